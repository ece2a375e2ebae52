package call

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// asking is a question about executions: what follows ExecutionsPath.
func asking(what string, h harness.Headers) harness.Request {
	return harness.Request{Method: http.MethodGet, Path: harness.ExecutionsPath + what, Header: h}
}

// awaited waits until n questions wait for the end of an execution.
func awaited(t *testing.T, n int) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d questions wait", n), func() bool {
		return harness.Waiting("execution.(*Guard).awaitChange") == n
	})
}

// Section "Endpoints": what is told of an execution in each state.
func TestExecutionStatus(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, `agent_proxy %s {
		retain_result 1h
		action charge {
			match path /v1/*
			deadline 2m
			max_result 10
		}
	}`, u.Addr)
	u.On("/held", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		harness.Status(201, "")(w, a)
	})
	u.On("/doubt", harness.Reset)
	u.On("/v1/large", harness.Status(202, "more than ten bytes"))
	send := func(path, id string) harness.Request {
		return harness.Request{Path: path, Id: id, Header: harness.Headers{"X-Api-Key": "ann", "Workflow-Id": "w-1"}}
	}
	before := time.Now().Add(-time.Second)
	g.Call(send("/done?x=1", "done"))
	g.Call(send("/doubt", "doubt"))
	g.Call(send("/v1/large", "large"))
	running := g.Begin(send("/held", "held"))
	harness.Wait(t, hold.Arrived, "the call")

	want := map[string]string{
		"done":  `POST /done default w-1 completed "" 201 kept true`,
		"doubt": `POST /doubt default w-1 in_doubt "connection_lost" 0 - false`,
		"large": `POST /v1/large charge w-1 completed "" 202 lost false`,
		"held":  `POST /held default w-1 running "" 0 - false`,
	}
	describe := func(e harness.ExecutionDoc) string {
		result := "-"
		if e.Result != nil {
			result = map[bool]string{true: "kept", false: "lost"}[e.Result.Kept]
		}
		return fmt.Sprintf("%s %s %s %s %s %q %d %s %v", e.Method, e.Path, e.Action, e.Workflow, e.State, e.Cause, e.Status, result, e.Replayable)
	}
	for id, want := range want {
		e := g.Call(asking(id, harness.Ann)).Execution(t, id)
		if got := describe(e); got != want {
			t.Errorf("%s: %s, want %s", id, got, want)
		}
		if len(e.Key) != 64 || *e.SafeNewKey || e.OutputURL != harness.ExecutionsPath+id+"/output?key="+e.Key {
			t.Errorf("%s: %+v", id, e)
		}
		if e.Created.Before(before) || e.Created.Location() != time.UTC {
			t.Errorf("%s: created %v", id, e.Created)
		}
		open := e.State == "running"
		if e.Deadline.IsZero() == open || e.Settled.IsZero() != open {
			t.Errorf("%s: deadline %v, settled %v", id, e.Deadline, e.Settled)
		}
		if open && e.Deadline.Sub(e.Created) != 5*time.Minute {
			t.Errorf("deadline %v of %v", e.Deadline, e.Created)
		}
		if id == "done" && e.Result.Expires.Sub(e.Settled) != time.Hour {
			t.Errorf("result until %v, settled %v", e.Result.Expires, e.Settled)
		}
		head := asking(id, harness.Ann)
		head.Method = http.MethodHead
		if got := g.Call(head); got.Status != 200 || got.Body != "" || got.Length <= 0 {
			t.Errorf("HEAD %s: %d %q %d", id, got.Status, got.Body, got.Length)
		}
	}
	// The members are an API.
	var members map[string]any
	var list []map[string]any
	body := g.Call(asking("done", harness.Ann)).Body
	if err := json.Unmarshal([]byte(body), &struct{ Executions *[]map[string]any }{&list}); err != nil {
		t.Fatal(err)
	}
	members = list[0]
	for _, name := range []string{"key", "method", "path", "action", "workflow_name", "state", "created", "settled",
		"status", "result", "replayable", "safe_new_key", "output_url"} {
		if _, ok := members[name]; !ok {
			t.Errorf("no member %s in %s", name, body)
		}
		delete(members, name)
	}
	if len(members) > 0 {
		t.Errorf("unknown members %v", members)
	}

	hold.Open()
	running.Answer()
	g.Store.Pass(2 * time.Hour)
	e := g.Call(asking("done", harness.Ann)).Execution(t, "done")
	if !e.Result.Kept || e.Replayable || e.State != "completed" {
		t.Errorf("after its time: %+v", e)
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS"} {
		r := asking("done", harness.Ann)
		r.Method, r.Id = method, "k"
		if got := g.Call(r); got.Status != 405 || got.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %d %v", method, got.Status, got.Header)
		}
	}
}

// Problems of calls that run or are in doubt lead to their state, where it can be
// asked for.
func TestProblemsLeadToTheStatus(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, `
	handle /off/* {
		agent_proxy %[1]s {
			name off
			endpoints off
		}
	}
	handle {
		agent_proxy %[1]s {
			attach_wait 20ms
		}
	}`, u.Addr)
	u.On("/doubt", harness.Reset)
	u.On("/off/doubt", harness.Reset)
	u.On("/held", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
	leads := func(r harness.Reply, want string) {
		t.Helper()
		doc := r.Problem(t, 409, r.Slug())
		links := r.Header.Values("Link")
		if doc.StatusURL != want || (want != "") != slices.Contains(links, "<"+want+`>; rel="status"`) {
			t.Errorf("status_url %q, links %q, want %q", doc.StatusURL, links, want)
		}
	}
	leads(g.Call(harness.Request{Path: "/doubt", Id: "k", Header: harness.Ann}), harness.ExecutionsPath+"k")
	leads(g.Call(harness.Request{Path: "/doubt", Id: "k"}), "")
	leads(g.Call(harness.Request{Path: "/off/doubt", Id: "k", Header: harness.Ann}), "")
	running := g.Begin(harness.Request{Path: "/held", Id: "h", Header: harness.Ann})
	harness.Wait(t, hold.Arrived, "the call")
	leads(g.Call(harness.Request{Path: "/held", Id: "h", Header: harness.Ann}), harness.ExecutionsPath+"h")
	leads(g.Call(asking("h/output", harness.Ann)), harness.ExecutionsPath+"h")
	leads(g.Call(asking("k/output", harness.Ann)), harness.ExecutionsPath+"k")
	hold.Open()
	running.Answer()
	g.Call(harness.Request{Path: "/ok", Id: "k", Header: harness.Ann})
	if doc := g.Call(harness.Request{Path: "/ok", Id: "k", Header: harness.Ann, Body: "{}"}).Terminal(t, 422, "fingerprint-mismatch"); doc.StatusURL != "" {
		t.Errorf("a mismatch leads to %s", doc.StatusURL)
	}
}
