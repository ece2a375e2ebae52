package e2e

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

var (
	shortHash = regexp.MustCompile(`^[0-9a-f]{16}$`)
	longHash  = regexp.MustCompile(`^[0-9a-f]{32}$`)
)

// What logs and matchers can know of each call (README, "Placeholders"), and the span
// that `tracing` makes for it.
func TestPlaceholdersAndSpans(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := start(t, `e2e_observe
	agent_proxy %s {
		name tools
		exempt path /search
		missing_id require
		action pay {
			match path /pay*
		}
	}`, u.addr)
	u.on("/pay/doubt", status(504, "late"))
	u.on("/pay/refused", status(429, "later"))
	hold := newGate(t)
	u.on("/pay/slow", func(w http.ResponseWriter, _ *arrival) {
		hold.pass()
		_, _ = io.WriteString(w, "slow")
	})
	caller := map[string]string{"Authorization": "Bearer secret", "Workflow-Id": "flow-1"}
	n := -1
	check := func(want map[string]string) {
		t.Helper()
		n++
		got := maps.Clone(o.request(n))
		if want["execution_id"] != "" {
			if !shortHash.MatchString(got["key"]) || !longHash.MatchString(got["caller"]) || got["workflow"] != "flow-1" {
				t.Errorf("%v", got)
			}
			for _, name := range []string{"key", "caller", "workflow"} {
				delete(got, name)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("request %d: %v, want %v", n, got, want)
		}
		spanned := map[string]string{}
		for _, name := range []string{"status", "guard", "action", "outcome", "problem"} {
			if v := want[name]; v != "" && want["guard"] != "" {
				spanned["agent_guard.execution."+name] = v
			}
		}
		attributes := o.attributes(n)
		if key := attributes["agent_guard.execution.key"]; key != o.request(n)["key"] {
			t.Errorf("request %d: the span has the key %q, the log %q", n, key, o.request(n)["key"])
		}
		delete(attributes, "agent_guard.execution.key")
		if fmt.Sprint(attributes) != fmt.Sprint(spanned) {
			t.Errorf("request %d: span %v, want %v", n, attributes, spanned)
		}
	}
	call := func(path string) reply { return g.call(request{path: path, id: "id-1", header: caller}) }
	call("/pay")
	check(map[string]string{"status": "executed", "guard": "tools", "action": "pay", "outcome": "completed", "execution_id": "id-1"})
	g.store.pass(-time.Second)
	call("/pay")
	check(map[string]string{"status": "replayed", "guard": "tools", "action": "pay", "outcome": "completed", "execution_id": "id-1", "age": "0"})
	call("/other")
	check(map[string]string{"status": "executed", "guard": "tools", "action": "default", "outcome": "completed", "execution_id": "id-1"})
	call("/pay/doubt")
	check(map[string]string{"status": "in_doubt", "guard": "tools", "action": "pay", "outcome": "in_doubt", "cause": "upstream_status", "execution_id": "id-1"})
	call("/pay/doubt")
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "in-doubt", "execution_id": "id-1"})
	call("/pay/refused")
	check(map[string]string{"status": "executed", "guard": "tools", "action": "pay", "outcome": "released", "execution_id": "id-1"})
	g.call(request{path: "/pay", id: "id-1", body: `{"amount":2}`, header: caller})
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "fingerprint-mismatch", "execution_id": "id-1"})
	g.call(request{path: "/pay", header: caller})
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "execution-id-missing", "workflow": "flow-1"})
	g.call(request{path: "/search", header: caller})
	check(map[string]string{"status": "unguarded"})
	g.call(request{method: "GET", path: "/pay", header: caller})
	check(map[string]string{})
	g.store.failCommits(errBroken)
	call("/pay/new")
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "store-unavailable", "execution_id": "id-1"})
	g.store.onCommit(nil)

	slow := request{path: "/pay/slow", id: "id-1", header: caller}
	owner := g.begin(slow)
	wait(t, hold.arrived, "the call")
	follower := g.begin(slow)
	followers(t, 1)
	hold.open()
	owner.answer()
	follower.answer()
	statuses := o.request(n + 1)["status"] + " " + o.request(n + 2)["status"]
	if statuses != "executed attached" && statuses != "attached executed" {
		t.Errorf("%s", statuses)
	}
	if a, b := o.request(n + 1)["key"], o.request(n + 2)["key"]; a != b {
		t.Errorf("one execution has the keys %s and %s", a, b)
	}
}

// A doubt that the store did not even record is one for logs, too.
func TestPlaceholdersOfAnUnrecordedOutcome(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := start(t, "e2e_observe\nagent_proxy %s", u.addr)
	u.on("/x", func(w http.ResponseWriter, _ *arrival) {
		g.store.failCommits(errBroken)
		w.Header().Set("Content-Length", "0")
		w.WriteHeader(200)
	})
	g.call(request{path: "/x", id: "k"}).terminal(t, 409, "in-doubt")
	got := o.request(0)
	if got["status"] != "in_doubt" || got["outcome"] != "in_doubt" || got["cause"] != "outcome_unrecorded" {
		t.Errorf("%v", got)
	}
}

// Of two guards in a chain, each fills its own templates, and the log shows the outer.
func TestPlaceholdersOfChainedGuards(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := start(t, `e2e_observe
	agent_guard {
		name outer
	}
	route {
		agent_guard {
			name inner
			execution_id header X-Inner
		}
		reverse_proxy %s {
			header_up X-Seen {http.agent_guard.guard}/{http.agent_guard.execution_id}
		}
	}`, u.addr)
	g.call(request{path: "/x", id: "a", header: map[string]string{"X-Inner": "b"}})
	u.mu.Lock()
	seen := u.seen["/x"][0].Header.Get("X-Seen")
	u.mu.Unlock()
	if seen != "inner/b" {
		t.Errorf("inside, the placeholders are %s", seen)
	}
	if got := o.request(0); got["guard"] != "outer" || got["execution_id"] != "a" || got["status"] != "executed" {
		t.Errorf("outside: %v", got)
	}
}

// samples reads the site's metrics: values by `name{labels}`.
func (g *gateway) samples(path string) map[string]string {
	g.t.Helper()
	return parseSamples(g.call(request{method: "GET", path: path}).body)
}

func parseSamples(text string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			all[line[:i]] = strings.TrimSpace(line[i+1:])
		}
	}
	return all
}

// What happens to calls is counted by guard, action, outcome and slug.
func TestMetricsOfCalls(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `handle /metrics {
		metrics
	}
	handle {
		agent_proxy %s {
			name tools
			exempt path /search
			action pay {
				match path /pay*
				on_unknown probe GET /status/{http.agent_guard.execution_id} {
					applied 200
					not_applied 404
				}
			}
		}
	}`, u.addr)
	count := func(name string, labels ...string) string {
		return "agent_guard_" + name + `{` + strings.Join(labels, ",") + `}`
	}
	pay := func(name string, more ...string) string {
		return count(name, append([]string{`action="pay"`, `guard="tools"`}, more...)...)
	}
	// The first time must show as an increase: everything begins at 0.
	before := g.samples("/metrics")
	want := map[string]string{}
	expect := func(name string, n string) {
		t.Helper()
		if before[name] != "0" {
			t.Errorf("%s begins as %q", name, before[name])
		}
		want[name] = n
	}
	u.on("/pay/doubt", status(504, "late"))
	u.on("/pay/refused", status(401, "no"))
	probed := 0
	for _, answer := range []int{500, 404, 200} {
		u.on("/status/"+fmt.Sprint("doubt", answer), status(answer, ""))
	}
	for range 3 {
		g.call(request{path: "/pay", id: "a"})
	}
	g.call(request{path: "/pay", id: "a", body: `{"other":1}`})
	g.call(request{path: "/pay/refused", id: "a"})
	for _, answer := range []int{500, 404, 200} {
		r := request{path: "/pay/doubt", id: fmt.Sprint("doubt", answer)}
		g.call(r)
		g.call(r)
		probed++
	}
	g.call(request{path: "/search"})
	g.call(request{method: "GET", path: "/x"})
	g.call(request{path: "/x", id: "\x22"})
	expect(pay("executions_total", `outcome="completed"`), "1")
	expect(pay("executions_total", `outcome="released"`), "1")
	expect(pay("executions_total", `outcome="in_doubt"`), "4") // not_applied: it ran again
	expect(pay("replays_total"), "2")
	expect(pay("attaches_total"), "0")
	expect(pay("running"), "0")
	expect(pay("probes_total", `result="applied"`), "1")
	expect(pay("probes_total", `result="not_applied"`), "1")
	expect(pay("probes_total", `result="unknown"`), "1")
	expect(pay("problems_total", `problem="fingerprint-mismatch"`), "1")
	expect(pay("problems_total", `problem="in-doubt"`), "1")
	expect(pay("problems_total", `problem="result-unavailable"`), "1")
	expect(pay("fail_open_total"), "0")
	expect(count("problems_total", `action="default"`, `guard="tools"`, `problem="execution-id-invalid"`), "1")
	expect(count("unguarded_total", `guard="tools"`, `reason="exempt"`), "1")
	expect(count("unguarded_total", `guard="tools"`, `reason="safe"`), "1")
	got := g.samples("/metrics")
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s is %q, want %s", name, got[name], n)
		}
	}
	eventually(t, "two doubts are counted", func() bool { return g.samples("/metrics")["agent_guard_in_doubt"] == "2" })
	if got := g.samples("/metrics"); got["agent_guard_store_healthy"] != "1" || !strings.HasPrefix(got["agent_guard_in_doubt_oldest_age_seconds"], "0.") &&
		!regexp.MustCompile(`^[1-9]`).MatchString(got["agent_guard_in_doubt_oldest_age_seconds"]) {
		t.Errorf("healthy %s, oldest doubt %s", got["agent_guard_store_healthy"], got["agent_guard_in_doubt_oldest_age_seconds"])
	}
}

// Calls that run are counted while they do.
func TestMetricsOfARunningCall(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "handle /metrics {\n metrics\n}\nhandle {\n agent_proxy %s\n}", u.addr)
	u.on("/x", func(http.ResponseWriter, *arrival) { hold.pass() })
	const running, attached = `agent_guard_running{action="default",guard="default"}`, `agent_guard_attaches_total{action="default",guard="default"}`
	owner := g.begin(request{path: "/x", id: "k"})
	wait(t, hold.arrived, "the call")
	follower := g.begin(request{path: "/x", id: "k"})
	followers(t, 1)
	if got := g.samples("/metrics"); got[running] != "1" || got[attached] != "0" {
		t.Errorf("while it runs: %s running, %s attached", got[running], got[attached])
	}
	hold.open()
	owner.answer()
	follower.answer()
	if got := g.samples("/metrics"); got[running] != "0" || got[attached] != "1" {
		t.Errorf("afterwards: %s running, %s attached", got[running], got[attached])
	}
}

const everyEvent = `events {
	on agent_guard.execution_in_doubt e2e
	on agent_guard.execution_resolved e2e
	on agent_guard.executions_recovered e2e
	on agent_guard.fingerprint_mismatch e2e
	on agent_guard.fail_open e2e
	on agent_guard.store_unhealthy e2e
	on agent_guard.disk_low e2e
	on agent_guard.disk_recovered e2e
}`

// Handlers that are bound through Caddy's events app hear what happens to calls, with
// data that name nobody (P8).
func TestEvents(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := launch(t, setup{global: everyEvent, site: fmt.Sprintf(`agent_proxy %s {
		on_unknown probe GET /status?id={http.agent_guard.execution_id} {
			applied 200
			not_applied 404
		}
	}`, u.addr)})
	u.on("/x", status(504, ""))
	asked := 404
	u.on("/status", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(asked) })
	header := map[string]string{"Authorization": "Bearer secret-credential", "Workflow-Id": "secret-flow"}
	var key string
	expect := func(name string, more map[string]any) {
		t.Helper()
		e := o.event()
		if key == "" {
			key, _ = e.Data["key"].(string)
		}
		caller, _ := e.Data["caller"].(string)
		want := map[string]any{"guard": "default", "action": "default", "key": key, "caller": caller}
		maps.Copy(want, more)
		if e.Name() != name || fmt.Sprint(e.Data) != fmt.Sprint(want) {
			t.Errorf("%s %v, want %s %v", e.Name(), e.Data, name, want)
		}
		if !shortHash.MatchString(key) || !longHash.MatchString(caller) {
			t.Errorf("key %q, caller %q", key, caller)
		}
		if e.Origin() == nil || e.Origin().CaddyModule().ID != "agent_guard" {
			t.Errorf("%s comes from %v", name, e.Origin())
		}
		if text := fmt.Sprint(e.Data); strings.Contains(text, "secret") {
			t.Errorf("P8: %s", text)
		}
	}
	call := func(body string) {
		g.call(request{path: "/x", id: "secret-id", header: header, body: `"secret` + body + `"`})
	}
	doubt := map[string]any{"cause": "upstream_status", "status": 504}
	call("")
	expect("agent_guard.execution_in_doubt", doubt)
	call("")
	expect("agent_guard.execution_resolved", map[string]any{"outcome": "released", "by": "probe"})
	expect("agent_guard.execution_in_doubt", doubt) // it ran again
	asked = 200
	call("")
	expect("agent_guard.execution_resolved", map[string]any{"outcome": "completed", "by": "probe"})
	call("another")
	expect("agent_guard.fingerprint_mismatch", nil)
}

// The store's state is told without any call.
func TestEventsOfTheStore(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := launch(t, setup{global: everyEvent, site: "agent_proxy " + u.addr})
	g.call(request{path: "/x", id: "k"}).want(t, 201, "arrival 1", "executed")
	_ = g.store.memory.Close()
	if e := o.event(); e.Name() != "agent_guard.store_unhealthy" || len(e.Data) != 0 {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
}

// A handler of events that hangs holds up no call.
func TestEventHandlersHoldUpNothing(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	o.events = make(chan caddy.Event) // nobody takes
	g := launch(t, setup{global: everyEvent, site: "agent_proxy " + u.addr})
	u.on("/x", status(504, ""))
	for n := range 5 {
		g.call(request{path: "/x", id: fmt.Sprint(n)})
	}
	u.arrived("/x", 5)
	for range 5 { // let it end
		o.event()
	}
}

const failOpen = "agent_proxy %s {\n fail_open\n}"

// P4: where a route says fail_open and nothing can be recorded, calls are forwarded
// unguarded, marked and counted. Without the option they are refused (TestClaimFails).
func TestFailOpen(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := launch(t, setup{global: everyEvent, site: fmt.Sprintf("e2e_observe\nhandle /metrics {\n metrics\n}\nhandle {\n"+failOpen+"\n}", u.addr)})
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "executed")
	arrivals := 0
	for name, broken := range map[string]func(){
		"claim":      func() { g.store.failCommits(errBroken) },
		"closed":     func() { g.store.failCommits(store.ErrUnhealthy) },
		"look-up":    func() { g.store.onGet(func() error { return errBroken }) },
		"everything": func() { g.store.failCommits(errBroken); g.store.onGet(func() error { return errBroken }) },
	} {
		broken()
		for range 2 {
			arrivals++
			body := strings.Repeat("x", arrivals)
			got := g.call(request{path: "/x", id: "k", body: body, header: map[string]string{"Expect": "100-continue"}})
			if got.status != 201 || got.body != fmt.Sprint("arrival ", arrivals) {
				t.Errorf("%s: %d %q", name, got.status, got.body)
			}
			if s := got.header.Values("Execution-Status"); len(s) != 1 || s[0] != "unguarded" {
				t.Errorf("%s: Execution-Status %q", name, s)
			}
			if got.header.Get("Execution-Id") != "" || got.header.Get("Idempotent-Replayed") != "" {
				t.Errorf("%s: %v", name, got.header)
			}
			u.mu.Lock()
			last := u.seen["/x"][arrivals-1]
			if last.body != body || last.Header.Get("Idempotency-Key") != "k" || last.ContentLength != int64(len(body)) {
				t.Errorf("%s: the upstream got %q, %v", name, last.body, last.Header)
			}
			u.mu.Unlock()
		}
		g.store.onCommit(nil)
		g.store.onGet(nil)
	}
	noted := o.request(1)
	if noted["status"] != "unguarded" || noted["problem"] != "store-unavailable" {
		t.Errorf("%v", noted)
	}
	if e := o.event(); e.Name() != "agent_guard.fail_open" || fmt.Sprint(e.Data["calls"]) != "1" {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
	if got := g.samples("/metrics")[`agent_guard_fail_open_total{action="default",guard="default"}`]; got != fmt.Sprint(arrivals) {
		t.Errorf("%s calls are counted, want %d", got, arrivals)
	}
	policy := g.call(request{method: "GET", path: "/.well-known/cascade/policy"}).body
	if !strings.Contains(policy, `"fail_open": true`) || !strings.Contains(policy, "forwarded unguarded") {
		t.Errorf("the published policy promises too much: %s", policy)
	}
	// Guarded again as soon as the store is back.
	g.call(request{path: "/y", id: "k"}).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/y", id: "k"}).want(t, 201, "arrival 1", "replayed")
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "replayed")
}

// P4, P1: fail_open forwards nothing where it is not certain that nothing is claimed
// or was executed.
func TestFailOpenStaysClosed(t *testing.T) {
	u := newUpstream(t)
	g := start(t, failOpen, u.addr)
	u.on("/doubt", status(504, ""))
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/doubt", id: "k"})
	closed := func(what, path string, broken func()) {
		t.Helper()
		broken()
		g.call(request{path: path, id: "k"}).retryable(t, 503, "store-unavailable")
		g.store.onCommit(nil)
		g.store.onGet(nil)
	}
	closed("the claim may stand", "/new", func() { g.store.failCommits(store.ErrUnknown) })
	closed("the record is not taken", "/new", func() { g.store.failCommits(store.ErrInvalid) })
	u.arrived("/new", 0)

	// Where the look-up finds an execution, that stands, whatever fails.
	g.store.failCommits(errBroken)
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "replayed")
	g.call(request{path: "/known", id: "k", body: `{"other":1}`}).terminal(t, 422, "fingerprint-mismatch")
	g.call(request{path: "/doubt", id: "k"}).terminal(t, 409, "in-doubt")
	g.store.onCommit(nil)
	u.arrived("/known", 1)
	u.arrived("/doubt", 1)
}

// A call that has met an earlier one is refused when the store fails afterwards.
func TestFailOpenAfterAnEarlierCall(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "agent_proxy %s {\n fail_open\n on_unknown retry\n}", u.addr)
	u.on("/doubt", status(504, ""))
	r := request{path: "/doubt", id: "k"}
	g.call(r).want(t, 504, "", "executed")
	g.store.failCommits(errBroken)
	g.call(r).retryable(t, 503, "store-unavailable")
	g.store.onCommit(nil)
	u.arrived("/doubt", 1)

	// It waits for an execution that is released; the look-up then fails.
	u.on("/x", func(w http.ResponseWriter, _ *arrival) {
		hold.pass()
		w.WriteHeader(504)
	})
	owner := g.begin(request{path: "/x", id: "k"})
	wait(t, hold.arrived, "the call")
	follower := g.begin(request{path: "/x", id: "k"})
	followers(t, 1)
	g.store.onGet(func() error { return errBroken })
	hold.open()
	owner.answer()
	if got := follower.answer(); got.header.Get("Execution-Status") == "unguarded" {
		t.Errorf("%d %v", got.status, got.header)
	}
	u.arrived("/x", 1)
}
