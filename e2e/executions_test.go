package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// ann and bob are two callers.
var ann, bob = headers{"X-Api-Key": "ann"}, headers{"X-Api-Key": "bob"}

const executionsPath = "/.well-known/cascade/executions/"

// asking is a question about executions: what follows executionsPath.
func asking(what string, h headers) request {
	return request{method: http.MethodGet, path: executionsPath + what, header: h}
}

// executionDoc is one execution in the answer.
type executionDoc struct {
	Key        string    `json:"key"`
	Method     string    `json:"method"`
	Path       string    `json:"path"`
	Action     string    `json:"action"`
	Workflow   string    `json:"workflow_name"`
	State      string    `json:"state"`
	Cause      string    `json:"cause"`
	Created    time.Time `json:"created"`
	Deadline   time.Time `json:"deadline"`
	Settled    time.Time `json:"settled"`
	Status     int       `json:"status"`
	Replayable bool      `json:"replayable"`
	SafeNewKey *bool     `json:"safe_new_key"`
	OutputURL  string    `json:"output_url"`
	Result     *struct {
		Kept    bool      `json:"kept"`
		Expires time.Time `json:"expires"`
	} `json:"result"`
}

// executions reads r as a list of executions of the id.
func (r reply) executions(t *testing.T, status int, id string) []executionDoc {
	t.Helper()
	var doc struct {
		ID         string         `json:"execution_id"`
		Executions []executionDoc `json:"executions"`
	}
	if err := json.Unmarshal([]byte(r.body), &doc); err != nil || r.status != status || doc.ID != id {
		t.Fatalf("want %d and the executions of %s, got %d %q (%v)", status, id, r.status, r.body, err)
	}
	for name, want := range map[string]string{
		"Content-Type": "application/json", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
		"Cross-Origin-Resource-Policy": "same-origin", "Content-Length": fmt.Sprint(len(r.body)), "Execution-Status": "",
	} {
		if got := r.header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	return doc.Executions
}

// execution reads r as the state of one execution.
func (r reply) execution(t *testing.T, id string) executionDoc {
	t.Helper()
	all := r.executions(t, 200, id)
	if len(all) != 1 {
		t.Fatalf("%d executions: %s", len(all), r.body)
	}
	return all[0]
}

// awaited waits until n questions wait for the end of an execution.
func awaited(t *testing.T, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d questions wait", n), func() bool {
		return waiting("execution.(*Guard).awaitChange") == n
	})
}

// Section "Endpoints": what is told of an execution in each state.
func TestExecutionStatus(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, `agent_proxy %s {
		retain_result 1h
		action charge {
			match path /v1/*
			deadline 2m
			max_result 10
		}
	}`, u.addr)
	u.on("/held", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "")(w, a)
	})
	u.on("/doubt", reset)
	u.on("/v1/large", status(202, "more than ten bytes"))
	send := func(path, id string) request {
		return request{path: path, id: id, header: headers{"X-Api-Key": "ann", "Workflow-Id": "w-1"}}
	}
	before := time.Now().Add(-time.Second)
	g.call(send("/done?x=1", "done"))
	g.call(send("/doubt", "doubt"))
	g.call(send("/v1/large", "large"))
	running := g.begin(send("/held", "held"))
	wait(t, hold.arrived, "the call")

	want := map[string]string{
		"done":  `POST /done default w-1 completed "" 201 kept true`,
		"doubt": `POST /doubt default w-1 in_doubt "connection_lost" 0 - false`,
		"large": `POST /v1/large charge w-1 completed "" 202 lost false`,
		"held":  `POST /held default w-1 running "" 0 - false`,
	}
	describe := func(e executionDoc) string {
		result := "-"
		if e.Result != nil {
			result = map[bool]string{true: "kept", false: "lost"}[e.Result.Kept]
		}
		return fmt.Sprintf("%s %s %s %s %s %q %d %s %v", e.Method, e.Path, e.Action, e.Workflow, e.State, e.Cause, e.Status, result, e.Replayable)
	}
	for id, want := range want {
		e := g.call(asking(id, ann)).execution(t, id)
		if got := describe(e); got != want {
			t.Errorf("%s: %s, want %s", id, got, want)
		}
		if len(e.Key) != 64 || *e.SafeNewKey || e.OutputURL != executionsPath+id+"/output?key="+e.Key {
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
		head := asking(id, ann)
		head.method = http.MethodHead
		if got := g.call(head); got.status != 200 || got.body != "" || got.length <= 0 {
			t.Errorf("HEAD %s: %d %q %d", id, got.status, got.body, got.length)
		}
	}
	// The members are an API.
	var members map[string]any
	var list []map[string]any
	body := g.call(asking("done", ann)).body
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

	hold.open()
	running.answer()
	g.store.pass(2 * time.Hour)
	e := g.call(asking("done", ann)).execution(t, "done")
	if !e.Result.Kept || e.Replayable || e.State != "completed" {
		t.Errorf("after its time: %+v", e)
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS"} {
		r := asking("done", ann)
		r.method, r.id = method, "k"
		if got := g.call(r); got.status != 405 || got.header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %d %v", method, got.status, got.header)
		}
	}
}

// Problems of calls that run or are in doubt lead to their state, where it can be
// asked for.
func TestProblemsLeadToTheStatus(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, `
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
	}`, u.addr)
	u.on("/doubt", reset)
	u.on("/off/doubt", reset)
	u.on("/held", func(http.ResponseWriter, *arrival) { hold.pass() })
	leads := func(r reply, want string) {
		t.Helper()
		doc := r.problem(t, 409, r.slug())
		links := r.header.Values("Link")
		if doc.StatusURL != want || (want != "") != slices.Contains(links, "<"+want+`>; rel="status"`) {
			t.Errorf("status_url %q, links %q, want %q", doc.StatusURL, links, want)
		}
	}
	leads(g.call(request{path: "/doubt", id: "k", header: ann}), executionsPath+"k")
	leads(g.call(request{path: "/doubt", id: "k"}), "")
	leads(g.call(request{path: "/off/doubt", id: "k", header: ann}), "")
	running := g.begin(request{path: "/held", id: "h", header: ann})
	wait(t, hold.arrived, "the call")
	leads(g.call(request{path: "/held", id: "h", header: ann}), executionsPath+"h")
	leads(g.call(asking("h/output", ann)), executionsPath+"h")
	leads(g.call(asking("k/output", ann)), executionsPath+"k")
	hold.open()
	running.answer()
	g.call(request{path: "/ok", id: "k", header: ann})
	if doc := g.call(request{path: "/ok", id: "k", header: ann, body: "{}"}).terminal(t, 422, "fingerprint-mismatch"); doc.StatusURL != "" {
		t.Errorf("a mismatch leads to %s", doc.StatusURL)
	}
}

// slug is that of the problem in r.
func (r reply) slug() string {
	var doc problemDoc
	_ = json.Unmarshal([]byte(r.body), &doc) // the caller compares
	return doc.Type[strings.LastIndexByte(doc.Type, '/')+1:]
}
