//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
)

// metrics reads /metrics of the admin endpoint.
func (g *procGateway) metrics(t *testing.T) map[string]string {
	t.Helper()
	return parseSamples(g.metricsText(t))
}

func (g *procGateway) metricsText(t *testing.T) string {
	t.Helper()
	status, text, err := g.admin("GET", "/metrics", "", "")
	for range 10 { // the admin endpoint of the configuration before closes its connections
		if err == nil {
			break
		}
		status, text, err = g.admin("GET", "/metrics", "", "")
	}
	if err != nil || status != http.StatusOK {
		t.Fatalf("/metrics: %d %v\n%.2000s", status, err, text)
	}
	return text
}

// Counts do not begin anew with a reload, nor where one fails, although Caddy makes a
// registry for each configuration; and what Caddy serves is what is documented.
func TestProcessMetricsGoOnOverReloads(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = trusting(t)
	gateway := site.start(t)
	upstream.script("doubt", func(w http.ResponseWriter, _ *http.Request, _ int) { w.WriteHeader(http.StatusGatewayTimeout) })
	const labels = `{action="default",guard="default"`
	counts := func() string {
		m := gateway.metrics(t)
		return fmt.Sprintf("%s completed, %s in doubt, %s replays, %s refused",
			m["agent_guard_executions_total"+labels+`,outcome="completed"}`], m["agent_guard_executions_total"+labels+`,outcome="in_doubt"}`],
			m["agent_guard_replays_total"+labels+`}`], m["agent_guard_problems_total"+labels+`,problem="in-doubt"}`])
	}
	expect := func(when string, n int) {
		t.Helper()
		if got, want := counts(), fmt.Sprintf("%d completed, 1 in doubt, %d replays, %d refused", n, n, n); got != want {
			t.Fatalf("%s: %s; want %s", when, got, want)
		}
	}
	work := func(n int) {
		t.Helper()
		c := procCall{id: fmt.Sprint("metrics-", n)}
		gateway.retry(t, c)
		gateway.retry(t, c)
		wantProcDoubt(t, gateway.retry(t, procCall{id: "doubt"}))
	}
	gateway.post(t, procCall{id: "doubt"})
	work(1)
	expect("at first", 1)
	for n := range 3 {
		site.guard = fmt.Sprintf("deadline %ds\n action other%d {\n match path /other\n }", 60+n, n)
		gateway.reload(t)
		expect("after a reload", 1+n)
		work(2 + n)
		expect("after more calls", 2+n)
		if got := gateway.metrics(t); got[fmt.Sprintf(`agent_guard_replays_total{action="other%d",guard="default"}`, n)] != "0" {
			t.Error("the new action is not counted")
		} else if _, old := got[fmt.Sprintf(`agent_guard_replays_total{action="other%d",guard="default"}`, n-1)]; old {
			t.Error("an action is shown that the configuration does not have any more")
		}
	}
	if err := gateway.load(strings.Replace(site.config(), "deadline", "no_such_option", 1)); err == nil {
		t.Fatal("a wrong configuration is accepted")
	}
	if err := gateway.load(strings.Replace(site.config(), "bind 127.0.0.1", "bind 203.0.113.1", 1)); err == nil { // fails to start
		t.Fatal("another host's address is listened on")
	}
	expect("after failed reloads", 4)
	work(5)
	expect("after the failed reloads' calls", 5)

	text := gateway.metricsText(t)
	documented := map[string]string{}
	for _, f := range caddymodule.Families() {
		documented[f.Name] = f.Type
	}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (agent_guard_\w+) (\w+)$`).FindAllStringSubmatch(text, -1) {
		if documented[m[1]] != m[2] {
			t.Errorf("%s is served as a %s, and documented as a %s", m[1], m[2], documented[m[1]])
		}
		delete(documented, m[1])
	}
	for name := range documented {
		if strings.HasPrefix(name, "agent_guard_upstream_latency_") {
			continue // unknown before 200 answers
		}
		if name == "agent_guard_holds_unconfirmed" {
			continue // no workflow is held at a participant
		}
		if strings.HasPrefix(name, "agent_guard_database_") || strings.HasPrefix(name, "agent_guard_node") {
			continue // the store is Badger, which has one gateway
		}
		t.Errorf("%s is not served", name)
	}
	for sample, want := range map[string]string{
		"agent_guard_in_doubt":                                                                 `^1$`,
		"agent_guard_store_healthy":                                                            `^1$`,
		"agent_guard_store_watermark":                                                          `^[01]$`,
		"agent_guard_store_free_bytes":                                                         `^[1-9]`,
		`agent_guard_store_bytes{part="lsm"}`:                                                  `^[1-9]`,
		"agent_guard_store_commit_duration_seconds_count":                                      `^[1-9][0-9]+$`,
		"agent_guard_store_commit_batches_sum":                                                 `^[1-9][0-9]+$`,
		"agent_guard_store_opened_timestamp_seconds":                                           `^[1-9]`,
		`agent_guard_recovered_total{outcome="in_doubt"}`:                                      `^0$`,
		`agent_guard_unguarded_total{guard="default",reason="safe"}`:                           `^0$`,
		`agent_guard_call_duration_seconds_count{guard="default",status="executed"}`:           `^5$`,
		`agent_guard_call_duration_seconds_bucket{guard="default",status="executed",le="300"}`: `^5$`,
		`agent_guard_call_duration_seconds_count{guard="default",status="replayed"}`:           `^5$`,
		`agent_guard_overhead_duration_seconds_count{guard="default"}`:                         `^6$`, // with that in doubt
		`agent_guard_overhead_duration_seconds_sum{guard="default"}`:                           `^0\.`,
		`agent_guard_escalation_oldest_age_seconds{level="stop"}`:                              `^0$`,
	} {
		if got := parseSamples(text)[sample]; !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("%s is %q, want %s", sample, got, want)
		}
	}
	if !regexp.MustCompile(`(?m)^agent_guard_info\{store="badger",version="[^"]+"\} 1$`).MatchString(text) {
		t.Error("agent_guard_info does not tell the store and the version")
	}

	// Without the guard there is nothing to show, and with it again all begins anew.
	if err := gateway.load(site.without()); err != nil {
		t.Fatal(err)
	}
	if text := gateway.metricsText(t); strings.Contains(text, "agent_guard_") {
		t.Errorf("a configuration without the guard shows its metrics:\n%.500s", text)
	}
	gateway.reload(t)
	gateway.retry(t, procCall{id: "metrics-1"})
	if got := counts(); got != "0 completed, 0 in doubt, 1 replays, 0 refused" {
		t.Errorf("once the guard is back: %s", got)
	}
	if got := gateway.metrics(t)["agent_guard_in_doubt"]; got != "1" {
		t.Errorf("once the guard is back: %s in doubt", got)
	}
}

// What a crash leaves open is found and counted.
func TestProcessMetricsOfACrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	hold := upstream.hold(t, "open")
	gateway.begin(t.Context(), procDial(), procCall{id: "open"})
	waitWithin(t, procBound, hold.arrived, "arrival")
	gateway.kill()
	gateway = site.start(t)
	got := gateway.metrics(t)
	if got[`agent_guard_recovered_total{outcome="in_doubt"}`] != "1" || got["agent_guard_in_doubt"] != "1" {
		t.Errorf("%s recovered, %s in doubt; want 1 and 1", got[`agent_guard_recovered_total{outcome="in_doubt"}`], got["agent_guard_in_doubt"])
	}
	gateway.end(t)
}

// P8: no line of the log, at any level, names who called, what for, or with what: in
// every way that a call can end. Caddy's own loggers of requests and of errors are left
// out, as the manual says that they must be; all others are not.
func TestProcessLogNamesNobody(t *testing.T) {
	t.Parallel()                 // its gateways are processes
	const marker = "marker-5e11" // in everything that a caller sends, and in answers
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.raw = fmt.Sprintf(`{
	admin %s
	persist_config off
	log default {
		level DEBUG
		exclude http.handlers.reverse_proxy http.log.error http.log.access
	}
	agent_guard {
		store badger %s
	}
}
http://%s {
	bind 127.0.0.1
	tracing
	handle /closed/* {
		agent_proxy 127.0.0.1:1 {
			name closed
			fail_open
		}
	}
	handle {
		agent_proxy %s {
			name open
			missing_id require
			max_body 2MiB
			attach_wait 50ms
			exempt path /exempt/*
			action probed {
				match path /probed/*
				on_unknown probe GET /probe/{http.agent_guard.execution_id}?by={http.agent_guard.workflow} {
					header X-Token {http.request.header.X-Api-Key}{http.request.header.X-None}
					applied 299
				}
			}
		}
	}
}
`, site.admin, site.path("data"), site.addr, site.upstream)
	site.env = []string{"OTEL_TRACES_EXPORTER=none"}
	gateway := site.start(t)

	call := func(id, path string) procCall {
		return procCall{
			id: marker + id, path: path + "/" + marker + "?q=" + marker, body: `{"text":"` + marker + `"}`,
			header: map[string]string{
				"X-Api-Key": marker + "-key", "Cookie": "c=" + marker, "Workflow-Id": marker + "-flow", "Content-Type": "application/json",
			},
		}
	}
	answer := func(status int) procScript {
		return func(w http.ResponseWriter, _ *http.Request, _ int) {
			w.Header().Set("X-Answer", marker)
			w.WriteHeader(status)
			_, _ = w.Write([]byte(marker))
		}
	}
	client := procDial()
	defer client.CloseIdleConnections()
	var problems []string
	send := func(c procCall) {
		t.Helper()
		a, _ := procPost(t.Context(), client, site.addr, c) // torn answers are errors
		if slug := a.problem(); slug != "" && !slices.Contains(problems, slug) {
			problems = append(problems, slug)
		}
	}
	// What every call does, and leaves no line at INFO or above.
	quiet := func() (n int) {
		for line := range strings.Lines(gateway.log.String()) {
			if procOwnLine.MatchString(line) && !strings.Contains(line, `"level":"debug"`) {
				n++
			}
		}
		return n
	}
	upstream.script(marker+"ordinary", answer(200))
	before := quiet()
	for range 3 {
		send(call("ordinary", "/a"))
	}
	if after := quiet(); after != before {
		t.Errorf("ordinary calls have left %d lines at INFO or above", after-before)
	}
	for id, status := range map[string]int{"refused": 401, "doubt": 504, "found": 404, "exempt": 504, "probed": 504, "closed": 0} {
		upstream.script(marker+id, answer(status))
		path := "/" + id
		send(call(id, path))
		if status != 401 && id != "exempt" { // those run again
			send(call(id, path))
		}
	}
	other := call("ordinary", "/a")
	other.body = `{"text":"` + marker + ` other"}`
	send(other)
	large := call("large", "/a")
	large.body = strings.Repeat(marker, 300_000)
	send(large)
	malformed := call("bad id "+strings.Repeat("x", 300), "/a")
	send(malformed)
	unstable := call("unstable", "/a")
	unstable.header["Authorization"] = "Digest " + marker
	send(unstable)
	upstream.script(marker+"torn", func(w http.ResponseWriter, _ *http.Request, _ int) {
		w.Header().Set("Content-Length", "1000")
		_, _ = w.Write([]byte(marker))
		panic(http.ErrAbortHandler)
	})
	send(call("torn", "/a"))
	send(call("torn", "/a"))
	hold := upstream.hold(t, marker+"running")
	running := gateway.begin(t.Context(), procDial(), call("running", "/a"))
	waitWithin(t, procBound, hold.arrived, "arrival")
	send(call("running", "/a"))
	hold.open()
	waitWithin(t, procBound, running, "the answer")

	hold = upstream.hold(t, marker+"killed")
	gateway.begin(t.Context(), procDial(), call("killed", "/a"))
	waitWithin(t, procBound, hold.arrived, "arrival")
	gateway.kill()
	logs := gateway.log.String()
	gateway = site.start(t)
	send(call("killed", "/a"))
	procFind(t, "the metrics", []byte(gateway.metricsText(t)), []string{marker})
	gateway.end(t)
	logs += gateway.log.String()

	slices.Sort(problems)
	want := []string{"body-too-large", "caller-unstable", "execution-id-invalid", "fingerprint-mismatch", "in-doubt", "in-progress", "upstream-unreachable"}
	if !slices.Equal(problems, want) {
		t.Errorf("the calls have met %v, want %v", problems, want)
	}
	for _, line := range []string{"a call is in doubt", "guarded call refused", "the status probe gave no answer", "agent_guard.fingerprint_mismatch", "executions were open", "fail_open: while the store is unavailable"} {
		if !strings.Contains(logs, line) {
			t.Errorf("nothing was logged of %q, so that the test says little", line)
		}
	}
	for line := range strings.Lines(logs) {
		procFind(t, "the log", []byte(line), []string{marker})
	}
}
