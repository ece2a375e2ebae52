//go:build unix

package operate

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Counts do not begin anew with a reload, nor where one fails, although Caddy makes a
// registry for each configuration; and what Caddy serves is what is documented.
func TestProcessMetricsGoOnOverReloads(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = harness.Trusting(t)
	gateway := site.Start(t)
	upstream.Script("doubt", func(w http.ResponseWriter, _ *http.Request, _ int) { w.WriteHeader(http.StatusGatewayTimeout) })
	const labels = `{action="default",guard="default"`
	counts := func() string {
		m := gateway.Metrics(t)
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
		c := harness.ProcCall{Id: fmt.Sprint("metrics-", n)}
		gateway.Retry(t, c)
		gateway.Retry(t, c)
		harness.WantProcDoubt(t, gateway.Retry(t, harness.ProcCall{Id: "doubt"}))
	}
	gateway.Post(t, harness.ProcCall{Id: "doubt"})
	work(1)
	expect("at first", 1)
	for n := range 3 {
		site.Guard = fmt.Sprintf("deadline %ds\n action other%d {\n match path /other\n }", 60+n, n)
		gateway.Reload(t)
		expect("after a reload", 1+n)
		work(2 + n)
		expect("after more calls", 2+n)
		if got := gateway.Metrics(t); got[fmt.Sprintf(`agent_guard_replays_total{action="other%d",guard="default"}`, n)] != "0" {
			t.Error("the new action is not counted")
		} else if _, old := got[fmt.Sprintf(`agent_guard_replays_total{action="other%d",guard="default"}`, n-1)]; old {
			t.Error("an action is shown that the configuration does not have any more")
		}
	}
	if err := gateway.Load(strings.Replace(site.Config(), "deadline", "no_such_option", 1)); err == nil {
		t.Fatal("a wrong configuration is accepted")
	}
	if err := gateway.Load(strings.Replace(site.Config(), "bind 127.0.0.1", "bind 203.0.113.1", 1)); err == nil { // fails to start
		t.Fatal("another host's address is listened on")
	}
	expect("after failed reloads", 4)
	work(5)
	expect("after the failed reloads' calls", 5)

	text := gateway.MetricsText(t)
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
		if got := harness.ParseSamples(text)[sample]; !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("%s is %q, want %s", sample, got, want)
		}
	}
	if !regexp.MustCompile(`(?m)^agent_guard_info\{store="badger",version="[^"]+"\} 1$`).MatchString(text) {
		t.Error("agent_guard_info does not tell the store and the version")
	}

	// Without the guard there is nothing to show, and with it again all begins anew.
	if err := gateway.Load(site.Without()); err != nil {
		t.Fatal(err)
	}
	if text := gateway.MetricsText(t); strings.Contains(text, "agent_guard_") {
		t.Errorf("a configuration without the guard shows its metrics:\n%.500s", text)
	}
	gateway.Reload(t)
	gateway.Retry(t, harness.ProcCall{Id: "metrics-1"})
	if got := counts(); got != "0 completed, 0 in doubt, 1 replays, 0 refused" {
		t.Errorf("once the guard is back: %s", got)
	}
	if got := gateway.Metrics(t)["agent_guard_in_doubt"]; got != "1" {
		t.Errorf("once the guard is back: %s in doubt", got)
	}
}

// What a crash leaves open is found and counted.
func TestProcessMetricsOfACrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	hold := upstream.Hold(t, "open")
	gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "open"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	gateway.Kill()
	gateway = site.Start(t)
	got := gateway.Metrics(t)
	if got[`agent_guard_recovered_total{outcome="in_doubt"}`] != "1" || got["agent_guard_in_doubt"] != "1" {
		t.Errorf("%s recovered, %s in doubt; want 1 and 1", got[`agent_guard_recovered_total{outcome="in_doubt"}`], got["agent_guard_in_doubt"])
	}
	gateway.End(t)
}

// P8: no line of the log, at any level, names who called, what for, or with what: in
// every way that a call can end. Caddy's own loggers of requests and of errors are left
// out, as the manual says that they must be; all others are not.
func TestProcessLogNamesNobody(t *testing.T) {
	t.Parallel()                 // its gateways are processes
	const marker = "marker-5e11" // in everything that a caller sends, and in answers
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Raw = fmt.Sprintf(`{
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
`, site.Admin, site.Path("data"), site.Addr, site.Upstream)
	site.Env = []string{"OTEL_TRACES_EXPORTER=none"}
	gateway := site.Start(t)

	call := func(id, path string) harness.ProcCall {
		return harness.ProcCall{
			Id: marker + id, Path: path + "/" + marker + "?q=" + marker, Body: `{"text":"` + marker + `"}`,
			Header: map[string]string{
				"X-Api-Key": marker + "-key", "Cookie": "c=" + marker, "Workflow-Id": marker + "-flow", "Content-Type": "application/json",
			},
		}
	}
	answer := func(status int) harness.ProcScript {
		return func(w http.ResponseWriter, _ *http.Request, _ int) {
			w.Header().Set("X-Answer", marker)
			w.WriteHeader(status)
			_, _ = w.Write([]byte(marker))
		}
	}
	client := harness.ProcDial()
	defer client.CloseIdleConnections()
	var problems []string
	send := func(c harness.ProcCall) {
		t.Helper()
		a, _ := harness.ProcPost(t.Context(), client, site.Addr, c) // torn answers are errors
		if slug := a.Problem(); slug != "" && !slices.Contains(problems, slug) {
			problems = append(problems, slug)
		}
	}
	// What every call does, and leaves no line at INFO or above.
	quiet := func() (n int) {
		for line := range strings.Lines(gateway.Log.String()) {
			if procOwnLine.MatchString(line) && !strings.Contains(line, `"level":"debug"`) {
				n++
			}
		}
		return n
	}
	upstream.Script(marker+"ordinary", answer(200))
	before := quiet()
	for range 3 {
		send(call("ordinary", "/a"))
	}
	if after := quiet(); after != before {
		t.Errorf("ordinary calls have left %d lines at INFO or above", after-before)
	}
	for id, status := range map[string]int{"refused": 401, "doubt": 504, "found": 404, "exempt": 504, "probed": 504, "closed": 0} {
		upstream.Script(marker+id, answer(status))
		path := "/" + id
		send(call(id, path))
		if status != 401 && id != "exempt" { // those run again
			send(call(id, path))
		}
	}
	other := call("ordinary", "/a")
	other.Body = `{"text":"` + marker + ` other"}`
	send(other)
	large := call("large", "/a")
	large.Body = strings.Repeat(marker, 300_000)
	send(large)
	malformed := call("bad id "+strings.Repeat("x", 300), "/a")
	send(malformed)
	unstable := call("unstable", "/a")
	unstable.Header["Authorization"] = "Digest " + marker
	send(unstable)
	upstream.Script(marker+"torn", func(w http.ResponseWriter, _ *http.Request, _ int) {
		w.Header().Set("Content-Length", "1000")
		_, _ = w.Write([]byte(marker))
		panic(http.ErrAbortHandler)
	})
	send(call("torn", "/a"))
	send(call("torn", "/a"))
	hold := upstream.Hold(t, marker+"running")
	running := gateway.Begin(t.Context(), harness.ProcDial(), call("running", "/a"))
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	send(call("running", "/a"))
	hold.Open()
	harness.WaitWithin(t, harness.ProcBound, running, "the answer")

	hold = upstream.Hold(t, marker+"killed")
	gateway.Begin(t.Context(), harness.ProcDial(), call("killed", "/a"))
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	gateway.Kill()
	logs := gateway.Log.String()
	gateway = site.Start(t)
	send(call("killed", "/a"))
	harness.ProcFind(t, "the metrics", []byte(gateway.MetricsText(t)), []string{marker})
	gateway.End(t)
	logs += gateway.Log.String()

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
		harness.ProcFind(t, "the log", []byte(line), []string{marker})
	}
}
