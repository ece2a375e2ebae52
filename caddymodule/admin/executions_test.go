package admin_test

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/answer"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// Section "Admin API": every filter, alone and together.
func TestListFilters(t *testing.T) {
	r, o := newRig(t)
	// One a minute, the first at two o'clock.
	minute := func(f func()) {
		f()
		r.now = r.now.Add(time.Minute)
	}
	minute(func() { o.doubt(call{id: "0", workflow: "w-1"}) })
	minute(func() {
		_, e := o.claim(call{id: "1", action: "refund", guard: "other"})
		o.settle(e, execution.Outcome{Verdict: execution.Completed})
	})
	minute(func() { o.claim(call{id: "2", caller: "user:bob", method: "PUT"}) })
	minute(func() { o.doubt(call{id: "3", caller: "user:bob", action: "refund", workflow: "w-1"}) })
	bob := o.guard.Caller("user:bob")
	for query, want := range map[string]string{
		"":                                      "3210",
		"state=in_doubt":                        "30",
		"state=in_doubt,running":                "320",
		"state=in_doubt&state=completed":        "310",
		"guard=other":                           "1",
		"action=refund":                         "31",
		"method=PUT":                            "2",
		"caller=" + hex.EncodeToString(bob[:]):  "32",
		"workflow=w-1":                          "30",
		"min_age=2m":                            "10",
		"max_age=3m":                            "321",
		"min_age=2m&max_age=3m":                 "1",
		"min_age=1h":                            "",
		"max_age=2d":                            "3210",
		"from=2026-11-20T14:02:00Z":             "32",
		"to=2026-11-20T14:02:00Z":               "10",
		"to=2026-11-20T16:02:00%2B02:00":        "10",
		"from=2026-11-20T14:01:00Z&max_age=90s": "3",
		"to=2026-11-20T14:03:00Z&min_age=3m":    "0",
		"workflow=w-1&action=refund&state=in_doubt&method=PUT": "",
		"workflow=w-1&action=refund&state=in_doubt":            "3",
	} {
		var page admin.Page
		r.get("executions?"+query, &page)
		var got strings.Builder
		for _, x := range page.Executions {
			got.WriteString(x.ExecutionID)
		}
		if got.String() != want || page.Next != "" || page.Executions == nil {
			t.Errorf("%s: %q, want %q; next %q", query, got.String(), want, page.Next)
		}
	}
}

// Section "Admin API": what is misspelled is not a filter that all pass.
func TestListRefuses(t *testing.T) {
	r, _ := newRig(t)
	for query, words := range map[string]string{
		"states=in_doubt":                   `"states" is no parameter here`,
		"state=doubtful":                    `"doubtful" is no state; use running`,
		"action=a&action=b":                 "action: it stands 2 times",
		"caller=abcd":                       "no caller's hash; give 8 to 32 of its digits",
		"caller=" + strings.Repeat("z", 32): "no caller's hash",
		"min_age=soon":                      `min_age: "soon" is no duration; write one like 10m, 4h or 2d`,
		"max_age=-3m":                       "max_age: -3m is negative",
		"from=yesterday":                    `from: "yesterday" is no time; write one like`,
		"limit=0":                           `limit: "0" is not from 1 to 1000`,
		"limit=1001":                        `limit: "1001" is not from 1 to 1000`,
		"limit=many":                        `limit: "many" is not from 1 to 1000`,
		"after=here":                        "not where a page begins",
		"state=in_doubt&x=%zz":              "query: invalid URL escape",
		"store=a&store=b":                   "not open",
		"store=&store=":                     "store: it stands 2 times",
	} {
		status := http.StatusBadRequest
		if words == "not open" {
			status = http.StatusNotFound
		}
		r.refuses("GET", "executions?"+query, "", status, words)
	}
	r.refuses("GET", "executions/abcd?state=in_doubt", "", http.StatusBadRequest, `"state" is no parameter here; there are store`)
	r.refuses("GET", "store?limit=1", "", http.StatusBadRequest, `"limit" is no parameter`)
}

// Section "Admin API": pages are as large as was asked, and follow each other.
func TestListPages(t *testing.T) {
	r, o := newRig(t)
	var want []string
	for i := range 120 {
		want = append(want, o.doubt(call{id: fmt.Sprint(i)}).Hex())
		r.now = r.now.Add(time.Second)
	}
	slices.Reverse(want)
	for limit, first := range map[string]int{"": 50, "7": 7, "120": 120, "1000": 120} {
		var got []string
		query := url.Values{}
		if limit != "" {
			query.Set("limit", limit)
		}
		for {
			var page admin.Page
			r.get("executions?"+query.Encode(), &page)
			if got == nil && len(page.Executions) != first {
				t.Errorf("limit %q: %d executions on the first page", limit, len(page.Executions))
			}
			for _, x := range page.Executions {
				got = append(got, x.Key)
			}
			if page.Next == "" {
				break
			}
			query.Set("after", page.Next)
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %q: %d executions, want %d in their order", limit, len(got), len(want))
		}
	}
}

// Section "Admin API": what is shown of an execution in each state, to the letter.
// P8: neither body nor answer nor credential is in it.
func TestGoldenShow(t *testing.T) {
	r, o := newRig(t)
	keys := map[string]string{}
	name := func(state string, key execution.Key) { keys[state] = key.Hex() }
	key, _ := o.claim(call{id: "run", workflow: "w-1"})
	name("running", key)
	key, e := o.claim(call{id: "done"})
	name("completed", key)
	r.now = r.now.Add(90 * time.Second)
	o.settle(e, execution.Outcome{Verdict: execution.Completed})
	name("in_doubt", o.doubt(call{id: "lost"}))
	free := o.doubt(call{id: "freed"})
	name("free", free)
	r.decide(free, `{"decision": "not_applied", "operator": "ada", "reason": "no such charge"}`)
	applied := o.doubt(call{id: "applied"})
	name("applied", applied)
	r.decide(applied, `{"decision": "applied", "operator": "ada", "reason": "found ch_1"}`)
	var got strings.Builder
	for _, state := range []string{"running", "completed", "in_doubt", "free", "applied"} {
		w, refused := r.ask("GET", "executions/"+keys[state], "")
		if refused.HTTPStatus != 0 {
			t.Fatalf("%s: %v", state, refused)
		}
		fmt.Fprintf(&got, "%s: %s", state, w.Body)
		short, refused := r.ask("GET", "executions/"+keys[state][:16], "")
		if refused.HTTPStatus != 0 || short.Body.String() == "" {
			t.Errorf("%s by its first digits: %v", state, refused)
		}
	}
	text := regexp.MustCompile(`[0-9a-f]{32,64}`).ReplaceAllString(got.String(), "HEX")
	text = regexp.MustCompile(`"size":[1-9]\d+`).ReplaceAllString(text, `"size":N`) // as it is encoded
	golden(t, "testdata/show.golden", text)
	// The result's time is over, then the key's.
	var x admin.Execution
	r.now = r.now.Add(2 * time.Hour)
	if r.get("executions/"+keys["completed"], &x); x.Detail != "result_expired" || x.Result.Replayable || x.Age != 7290 {
		t.Errorf("%+v", x)
	}
	r.now = r.now.Add(48 * time.Hour)
	r.refuses("GET", "executions/"+keys["completed"], "", http.StatusNotFound, "no such execution")
}

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares text with a file.
func golden(t *testing.T, file, text string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	got, lines := strings.Split(text, "\n"), strings.Split(string(want), "\n")
	for i := range min(len(got), len(lines)) {
		if !same(got[i], lines[i]) {
			t.Fatalf("%s, line %d:\n%s\nwant:\n%s", file, i+1, got[i], lines[i])
		}
	}
	if len(got) != len(lines) {
		t.Errorf("%s: %d lines, want %d", file, len(got), len(lines))
	}
}

// same reports whether two lines are equal. The order of the members of an object is no part of the API.
func same(a, b string) bool {
	read := func(line string) (string, any) {
		before, object, is := strings.Cut(line, "{")
		var v any
		if !is || json.Unmarshal([]byte("{"+strings.ReplaceAll(object, ":N", ":0")), &v) != nil {
			return line, nil
		}
		return before, v
	}
	beforeA, objectA := read(a)
	beforeB, objectB := read(b)
	return beforeA == beforeB && reflect.DeepEqual(objectA, objectB)
}

// decide resolves key, which must be possible.
func (r *rig) decide(key execution.Key, decision string) {
	r.t.Helper()
	if _, refused := r.ask("POST", "executions/"+key.Hex()+"/resolve", decision); refused.HTTPStatus != 0 {
		r.t.Fatalf("%s: %d %v", decision, refused.HTTPStatus, refused)
	}
}

// Section "Admin API": names that mean no execution, or more than one.
func TestShowRefuses(t *testing.T) {
	r, o := newRig(t)
	seen := map[string]bool{}
	twice := ""
	for i := 0; twice == ""; i++ {
		prefix := o.doubt(call{id: fmt.Sprint(i)}).Hex()[:4]
		if seen[prefix] {
			twice = prefix
		}
		seen[prefix] = true
	}
	r.refuses("GET", "executions/"+twice, "", http.StatusBadRequest, "more than one execution's key begins like this")
	r.refuses("POST", "executions/"+twice+"/resolve", `{"decision":"applied","operator":"a","reason":"b"}`, http.StatusBadRequest, "more than one")
	r.refuses("GET", "executions/abc", "", http.StatusNotFound, "nor a whole checkpoint or execution id")
	r.refuses("GET", "executions/nonsense", "", http.StatusNotFound, "no such execution")
	r.refuses("GET", "executions/"+strings.Repeat("0", 64), "", http.StatusNotFound, "no such execution")
}

// Nothing goes on for those who have left.
func TestLeavingEndsTheWork(t *testing.T) {
	r, o := newRig(t)
	o.doubt(call{id: "a"})
	gone, leave := context.WithCancel(ctx)
	leave()
	for _, target := range []string{"executions", "executions/abcd", "store"} {
		req := httptest.NewRequest("GET", "/agent_guard/"+target, nil).WithContext(gone)
		if err := r.api.ServeHTTP(httptest.NewRecorder(), req); err == nil {
			t.Errorf("%s was answered", target)
		}
	}
}

const (
	checkpointID = "c1b1c2d3-e4f5-4789-abcd-ef0123456789"
	strangerID   = "c2b1c2d3-e4f5-4789-abcd-ef0123456789"
)

// keep records the checkpoint of a call.
func (o *opened) keep(key execution.Key, c call) {
	o.rig.t.Helper()
	spec := rollback.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/v1/refunds"}}
	p, err := o.checkpoints.Prepare(ctx, checkpoint.Snapshot{
		ID: c.checkpoint, Workflow: evidence.WorkflowID(c.workflow), Execution: key, Action: "charge",
		Way: checkpoint.Compensate, Undo: spec.Encode(),
		Request: checkpoint.Request{Method: "POST", Host: "api.example", Path: "/v1/charges", Query: "secret=1"},
	}, nil, checkpoint.Terms{TTL: 24 * time.Hour})
	if err != nil {
		o.rig.t.Fatal(err)
	}
	if err := p.Commit(ctx, o.store); err != nil {
		o.rig.t.Fatal(err)
	}
}

// An operator has a checkpoint's id from an escalation, or an execution id from a caller,
// and finds the call by it; undos have the checkpoint's id too, and are no answer.
func TestFind(t *testing.T) {
	r, o := newRig(t)
	c := call{id: "order/7", workflow: "trip-7", checkpoint: checkpointID}
	key := o.doubt(c)
	o.keep(key, c)
	r.now = r.now.Add(time.Minute)
	o.doubt(call{id: "r/" + checkpointID, caller: "undo", method: rollback.Method, action: "undo", checkpoint: checkpointID, workflow: evidence.WorkflowID("trip-7")})
	gone := o.doubt(call{id: strangerID, checkpoint: "not kept"})
	late := o.doubt(call{id: "late", checkpoint: strangerID}) // its checkpoint is not stored any more
	o.doubt(call{id: "twice"})
	o.doubt(call{id: "twice", caller: "user:bob"})
	for name, want := range map[string]execution.Key{
		key.Hex(): key, key.Hex()[:16]: key, "order%2F7": key, checkpointID: key, strings.ToUpper(checkpointID): key,
		"late": late, strangerID: late,
	} {
		var x admin.Execution
		r.get("executions/"+name, &x)
		if x.Key != want.Hex() {
			t.Errorf("%s is %s, want %s", name, x.Key, want)
		}
	}
	var x admin.Execution
	if r.get("executions/order%2F7", &x); x.WorkflowName != "trip-7" || x.Workflow != evidence.WorkflowID("trip-7") {
		t.Errorf("%+v", x)
	}
	r.refuses("GET", "executions/twice", "", http.StatusBadRequest, "several executions have this id, such as ")
	r.refuses("GET", "executions/nobody", "", http.StatusNotFound, `neither a key that begins like this, nor a whole checkpoint or execution id, is "nobody"`)
	r.refuses("POST", "executions/twice/resolve", `{"decision": "applied", "operator": "ann", "reason": "seen"}`, http.StatusBadRequest, "several executions")

	for query, want := range map[string][]execution.Key{
		"id=order/7":                 {key},
		"id=" + strangerID:           {gone},
		"id=nobody":                  {},
		"checkpoint=" + checkpointID: {key},
		"checkpoint=" + checkpointID + "&action=x":                     {},
		"checkpoint=" + checkpointID + "&max_age=1s":                   {},
		"checkpoint=" + strangerID:                                     {late},
		"workflow=trip-7&undos=without":                                {key},
		"workflow=" + evidence.WorkflowID("trip-7") + "&undos=without": {},
	} {
		var page admin.Page
		r.get("executions?"+query, &page)
		if len(page.Executions) != len(want) {
			t.Errorf("%s: %d executions, want %d", query, len(page.Executions), len(want))
			continue
		}
		for i := range want {
			if page.Executions[i].Key != want[i].Hex() {
				t.Errorf("%s: %s", query, page.Executions[i].Key)
			}
		}
	}
	for query, n := range map[string]int{
		"undos=only": 1, "undos=without": 5, "undos=with": 6, "undos=only&checkpoint=" + checkpointID: 1,
		"workflow=trip-7": 2, // with its undo, which is recorded under the UUID
		"method=" + url.QueryEscape(rollback.Method): 1,
	} {
		var page admin.Page
		if r.get("executions?"+query, &page); len(page.Executions) != n {
			t.Errorf("%s: %d executions, want %d", query, len(page.Executions), n)
		}
	}
	r.refuses("GET", "executions?checkpoint=x", "", http.StatusBadRequest, `checkpoint: "x" is no UUID; it stands in Execution-Checkpoint`)
	r.refuses("GET", "executions?undos=no", "", http.StatusBadRequest, `undos: "no" is none of with, without and only`)
}

// Who approves a plan reads what each step is about, and sees why one hangs.
func TestStepsSayWhatTheyAreAbout(t *testing.T) {
	r, o := newRig(t)
	c := call{id: "order-7", workflow: "trip-7", checkpoint: checkpointID}
	key := o.doubt(c)
	o.keep(key, c)
	o.trials = map[string]admin.Trial{checkpointID: {Attempts: 3, Cause: "POST: connection refused"}}
	o.rollback = &coordinator{all: map[string]*rollback.Rollback{rollbackID: {
		ID: rollbackID, Checkpoint: checkpointID, Workflow: evidence.WorkflowID("trip-7"), State: rollback.Executing, Journal: rollback.Journal{Plan: &rollback.Plan{}},
		Steps: []rollback.Step{{Checkpoint: checkpointID, StepJournal: rollback.StepJournal{What: rollback.Undo}, State: rollback.StepRunning}, {Checkpoint: strangerID, StepJournal: rollback.StepJournal{What: rollback.Undo}, State: rollback.StepPending}},
	}}}
	var doc rollback.Rollback
	r.get("rollback/"+rollbackID, &doc)
	if len(doc.Steps) != 2 || doc.Steps[0].Call == nil || doc.Steps[1].Call != nil {
		t.Fatalf("%+v", doc.Steps)
	}
	step := doc.Steps[0]
	if want := (rollback.CallDocument{
		Execution: key.Hex(), ExecutionID: "order-7", Action: "charge", Method: "POST", Host: "api.example", Path: "/v1/charges", Created: r.now,
	}); *step.Call != want {
		t.Errorf("%+v, want %+v", *step.Call, want)
	}
	if step.Way != "compensate POST /v1/refunds" || step.Attempts != 3 || step.LastCause != "POST: connection refused" || doc.WorkflowName != "trip-7" {
		t.Errorf("%+v %q", step, doc.WorkflowName)
	}
}

// Escalations know a workflow by its UUID; operators know it by the caller's name too.
func TestEscalationsByTheNameOfAWorkflow(t *testing.T) {
	r, o := newRig(t)
	c := call{id: "order-7", workflow: "trip-7", checkpoint: checkpointID}
	o.keep(o.doubt(c), c)
	for key, workflow := range map[string]string{"1": evidence.WorkflowID("trip-7"), "2": evidence.WorkflowID("trip-8")} {
		_, err := o.escalations.Open(ctx, hitl.Opening{Key: key, Level: hitl.Approval, Cause: hitl.CauseIrreversible, Summary: "No way back.",
			Workflow: workflow, Links: hitl.Links{Checkpoint: checkpointID}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"trip-7", evidence.WorkflowID("trip-7")} {
		var got hitl.Page
		r.get("escalations?workflow="+name, &got)
		if len(got.Escalations) != 1 || got.Escalations[0].WorkflowName != "trip-7" {
			t.Errorf("%s: %+v", name, got.Escalations)
		}
	}
	var got hitl.Page
	if r.get("escalations?workflow=trip-8", &got); len(got.Escalations) != 1 || got.Escalations[0].WorkflowName != "" {
		t.Errorf("%+v", got.Escalations)
	}
}

// P1: an operator's "applied" makes the given answer the result, byte for byte.
func TestP1ResolveApplied(t *testing.T) {
	binary := "\x00\xff\xfebinary"
	large := strings.Repeat("\x01", 256<<10) // six bytes each in JSON
	quoted, _ := json.Marshal(large)
	for name, c := range map[string]struct{ result, body string }{
		"text":    {`{"status": 201, "header": {"content-type": ["application/json"], "X-Two": ["a", "b"]}, "body": "{\"id\":\"ch_1\"}"}`, `{"id":"ch_1"}`},
		"binary":  {`{"status": 200, "body_base64": "` + base64.StdEncoding.EncodeToString([]byte(binary)) + `"}`, binary},
		"nothing": {`{"status": 204}`, ""},
		"length":  {`{"status": 200, "header": {"Content-Length": ["2"]}, "body": "ok"}`, "ok"},
		"largest": {`{"status": 200, "body": ` + string(quoted) + `}`, large},
	} {
		t.Run(name, func(t *testing.T) {
			r, o := newRig(t)
			key := o.doubt(call{id: "a"})
			w, refused := r.ask("POST", "executions/"+key.Hex()[:16]+"/resolve",
				`{"decision": "applied", "operator": "ada", "reason": "it is there", "result": `+c.result+`}`)
			if refused.HTTPStatus != 0 {
				t.Fatal(refused)
			}
			var x admin.Execution
			if err := json.Unmarshal(w.Body.Bytes(), &x); err != nil {
				t.Fatal(err)
			}
			if x.State != "completed" || x.Detail != "replayable" || len(x.Resolutions) != 1 || !x.Resolutions[0].Applied {
				t.Errorf("%+v", x)
			}
			found, err := o.guard.Get(ctx, key)
			if err != nil {
				t.Fatal(err)
			}
			result, err := o.guard.Result(ctx, key, found.Finding)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(result.Body(ctx))
			if err != nil || string(body) != c.body {
				t.Errorf("replays %d bytes, %v", len(body), err)
			}
			if name == "text" && (result.Head.Status != 201 || result.Head.Header["Content-Type"][0] != "application/json" || len(result.Head.Header["X-Two"]) != 2) {
				t.Errorf("replays %+v", result.Head)
			}
			if len(o.resolved) != 1 || o.resolved[0].Operator != "ada" || !o.resolved[0].Applied {
				t.Errorf("resolved: %+v", o.resolved)
			}
		})
	}
}

// P1: "not applied" frees the key, and only of what is in doubt; it is decided once.
func TestP1ResolveNotApplied(t *testing.T) {
	const decision = `{"decision": "not_applied", "operator": "ada", "reason": "none"}`
	r, o := newRig(t)
	key := o.doubt(call{id: "a"})
	r.decide(key, decision)
	var x admin.Execution
	r.get("executions/"+key.Hex()[:16], &x)
	if x.State != admin.StateFree || x.Key != key.Hex() || len(x.Resolutions) != 1 || x.Resolutions[0].Cause != "connection_lost" {
		t.Errorf("%+v", x)
	}
	target := "executions/" + key.Hex() + "/resolve"
	r.refuses("POST", target, decision, http.StatusNotFound, "no such execution")

	_, e := o.claim(call{id: "a"})
	r.refuses("POST", target, decision, http.StatusConflict, "the execution is not in doubt: it is running")
	o.settle(e, execution.Outcome{Verdict: execution.Completed})
	r.refuses("POST", target, decision, http.StatusConflict, "the execution is not in doubt: it is completed")
	r.refuses("POST", "executions/"+strings.Repeat("0", 64)+"/resolve", decision, http.StatusNotFound, "no such execution")
	if len(o.resolved) != 1 {
		t.Errorf("resolved %d times", len(o.resolved))
	}
}

// A decision that somebody else was faster with is refused, and not reported.
func TestResolveLosesARace(t *testing.T) {
	r, o := newRig(t)
	key := o.doubt(call{id: "a"})
	first := make(chan int)
	for range 8 {
		go func() {
			_, refused := r.ask("POST", "executions/"+key.Hex()+"/resolve", `{"decision": "not_applied", "operator": "ada", "reason": "none"}`)
			first <- refused.HTTPStatus
		}()
	}
	won := 0
	for range 8 {
		select {
		case status := <-first:
			switch status {
			case 0:
				won++
			case http.StatusConflict, http.StatusNotFound:
			default:
				t.Errorf("status %d", status)
			}
		case <-time.After(time.Minute):
			t.Fatal("no answer")
		}
	}
	if won != 1 {
		t.Errorf("decided %d times", won)
	}
}

// Section "Admin API": a decision is taken as it was meant, or not at all.
func TestResolveRefuses(t *testing.T) {
	r, o := newRig(t)
	key := o.doubt(call{id: "a"})
	target := "executions/" + key.Hex() + "/resolve"
	refuses := func(body string, status int, words string) {
		t.Helper()
		r.refuses("POST", target, body, status, words)
	}
	applied := func(result string) string {
		return `{"decision": "applied", "operator": "ada", "reason": "seen", "result": ` + result + `}`
	}
	large, _ := json.Marshal(strings.Repeat("x", 256<<10+1))
	for body, words := range map[string]string{
		``:     "the request is no decision: EOF",
		`null`: `decision: "" is unknown; use applied or not_applied`,
		`[]`:   "the request is no decision",
		`{"decision": "applied", "operator": "ada", "reason": "x", "forced": true}`:               `unknown field "forced"`,
		`{"decision": "applied", "operator": "ada", "reason": "x"} {}`:                            "something stands behind the decision",
		`{"decision": "maybe", "operator": "ada", "reason": "x"}`:                                 `decision: "maybe" is unknown`,
		`{"decision": "applied", "reason": "x"}`:                                                  "operator: who decides must be named",
		`{"decision": "applied", "operator": "ada"}`:                                              "reason: say what you have found out",
		`{"decision": "applied", "operator": "` + strings.Repeat("a", 257) + `", "reason": "x"}`:  "of at most 256 and 1024 bytes",
		`{"decision": "applied", "operator": "a", "reason": "` + strings.Repeat("a", 1025) + `"}`: "of at most 256 and 1024 bytes",
		"{\"decision\": \"applied\", \"operator\": \"\xff\", \"reason\": \"x\"}":                  "not UTF-8",
		`{"decision": "not_applied", "operator": "a", "reason": "x", "result": {"status": 200}}`:  "what was not applied has none",
		applied(`{}`):                                                                 "status: 0 is no final status; use 200 to 599",
		applied(`{"status": 100}`):                                                    "status: 100 is no final status",
		applied(`{"status": 600}`):                                                    "status: 600 is no final status",
		applied(`{"status": "200"}`):                                                  "the request is no decision",
		applied(`{"status": 200, "headers": {}}`):                                     `unknown field "headers"`,
		applied(`{"status": 204, "body": "x"}`):                                       "an answer with the status 204 has none",
		applied(`{"status": 200, "body": "x", "body_base64": "eA=="}`):                "not both",
		applied(`{"status": 200, "body_base64": "%%"}`):                               "body_base64: illegal base64",
		applied(`{"status": 200, "body": ` + string(large) + `}`):                     "larger than 256 KiB",
		applied(`{"status": 200, "header": {"X Y": ["z"]}}`):                          `"X Y" is no name of a header field`,
		applied(`{"status": 200, "header": {"X": ["a\nb"]}}`):                         "a control character",
		applied(`{"status": 200, "header": {"X": []}}`):                               "X has no values",
		applied(`{"status": 200, "header": {"X": ["1"], "x": ["2"]}}`):                "X stands twice",
		applied(`{"status": 200, "header": {"Content-Length": ["3"]}, "body": "ok"}`): "the body has 2 bytes",
		applied(`{"status": 200, "header": {"Content-Encoding": ["gzip"]}}`):          "give the plain body",
		applied(`{"status": 200, "header": {"Trailer": ["X"]}}`):                      "give the plain body",
		applied(`{"status": 200, "header": {"Transfer-Encoding": ["chunked"]}}`):      "Transfer-Encoding is never replayed",
		applied(`{"status": 200, "header": {"Connection": ["close"]}}`):               "Connection is never replayed",
		applied(`{"status": 200, "header": {"set-cookie": ["a=b"]}}`):                 "Set-Cookie is never replayed",
		applied(`{"status": 200, "header": {"Execution-Status": ["executed"]}}`):      "Execution-Status is never replayed",
	} {
		refuses(body, http.StatusBadRequest, words)
	}
	refuses(`"`+strings.Repeat("x", 2<<20)+`"`, http.StatusRequestEntityTooLarge, "more than 2097152 bytes")
	r.refuses("POST", target+"?force=1", `{}`, http.StatusBadRequest, `"force" is no parameter`)
	if found, err := o.guard.Get(ctx, key); err != nil || found.Status != execution.Doubtful || len(o.resolved) != 0 {
		t.Errorf("P1: something was decided: %+v, %v", found, err)
	}
}

// Whatever is taken for a decision can be recorded, and its answer replayed.
func FuzzDecision(f *testing.F) {
	for _, seed := range []string{
		`{"decision": "not_applied", "operator": "ada", "reason": "none"}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": {"status": 204}}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": {"status": 201, "header": {"content-type": ["text/plain"]}, "body": "ok"}}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": {"status": 200, "header": {"Content-Length": ["1"]}, "body_base64": "/w=="}}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": null}`,
		"\xff", `[]`, `{`, ``,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, head, body, err := admin.ReadDecision(text)
		if err != nil {
			return
		}
		if d.Decision != admin.DecisionApplied && d.Decision != admin.DecisionNotApplied || d.Operator == "" || d.Reason == "" {
			t.Fatalf("taken for a decision: %+v", d)
		}
		if !utf8.ValidString(d.Operator + d.Reason) {
			t.Errorf("%q, %q are logged", d.Operator, d.Reason)
		}
		if head == nil {
			if body != nil {
				t.Errorf("a body of %d bytes without an answer", len(body))
			}
			return
		}
		if d.Decision == admin.DecisionNotApplied || head.Status < 200 || head.Status > 599 {
			t.Errorf("%s with the status %d", d.Decision, head.Status)
		}
		replayed := answer.Replayable(head.Header)
		for name, values := range head.Header {
			if name != textproto.CanonicalMIMEHeaderKey(name) || !httpguts.ValidHeaderFieldName(name) || len(replayed[name]) != len(values) {
				t.Errorf("%q cannot be replayed", name)
			}
			for _, value := range values {
				if !httpguts.ValidHeaderFieldValue(value) {
					t.Errorf("%s: %q cannot be replayed", name, value)
				}
			}
		}
		if (head.Status == http.StatusNoContent || head.Status == http.StatusNotModified) && len(body) > 0 {
			t.Errorf("%d with a body", head.Status)
		}
	})
}
