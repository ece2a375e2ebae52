package admin_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

const (
	checkpointID = "c1b1c2d3-e4f5-4789-abcd-ef0123456789"
	strangerID   = "c2b1c2d3-e4f5-4789-abcd-ef0123456789"
)

// keep records the checkpoint of a call.
func (o *opened) keep(key guard.Key, c call) {
	o.rig.t.Helper()
	spec := undo.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/v1/refunds"}}
	p, err := o.vault.Prepare(ctx, checkpoint.Snapshot{
		ID: c.checkpoint, Workflow: evidence.WorkflowID(c.workflow), Execution: key, Action: "charge",
		Way: checkpoint.Compensate, Undo: spec.Encode(),
		Request: checkpoint.Request{Method: "POST", Host: "api.example", Path: "/v1/charges", Query: "secret=1"},
	}, nil, checkpoint.Terms{TTL: 24 * time.Hour})
	if err != nil {
		o.rig.t.Fatal(err)
	}
	_, err = o.store.Commit(ctx, p.Writes()...)
	if err := p.Done(err); err != nil {
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
	o.doubt(call{id: "r/" + checkpointID, caller: "undo", method: undo.Method, action: "undo", checkpoint: checkpointID, workflow: evidence.WorkflowID("trip-7")})
	gone := o.doubt(call{id: strangerID, checkpoint: "not kept"})
	late := o.doubt(call{id: "late", checkpoint: strangerID}) // its checkpoint is not in the vault any more
	o.doubt(call{id: "twice"})
	o.doubt(call{id: "twice", caller: "user:bob"})
	for name, want := range map[string]guard.Key{
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
	if r.get("executions/order%2F7", &x); x.Workflow != "trip-7" || x.WorkflowID != evidence.WorkflowID("trip-7") {
		t.Errorf("%+v", x)
	}
	r.refuses("GET", "executions/twice", "", http.StatusBadRequest, "several executions have this id, such as ")
	r.refuses("GET", "executions/nobody", "", http.StatusNotFound, `neither a key that begins like this, nor a whole checkpoint or execution id, is "nobody"`)
	r.refuses("POST", "executions/twice/resolve", `{"decision": "applied", "operator": "ann", "reason": "seen"}`, http.StatusBadRequest, "several executions")

	for query, want := range map[string][]guard.Key{
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
		"workflow=trip-7":                        2, // with its undo, which is recorded under the UUID
		"method=" + url.QueryEscape(undo.Method): 1,
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
	o.rollback = &desk{all: map[string]*rollback.Rollback{rollbackID: {
		ID: rollbackID, Checkpoint: checkpointID, Workflow: evidence.WorkflowID("trip-7"), State: rollback.Executing, Plan: &plan.Plan{},
		Steps: []rollback.Step{{Checkpoint: checkpointID, What: plan.Undo, State: rollback.StepRunning}, {Checkpoint: strangerID, What: plan.Undo, State: rollback.StepPending}},
	}}}
	var doc rollbackapi.Document
	r.get("rollback/"+rollbackID, &doc)
	if len(doc.Steps) != 2 || doc.Steps[0].Call == nil || doc.Steps[1].Call != nil {
		t.Fatalf("%+v", doc.Steps)
	}
	step := doc.Steps[0]
	if want := (rollbackapi.CallDocument{
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
		_, err := o.desk.Open(ctx, hitl.Opening{Key: key, Level: hitl.Approval, Cause: hitl.CauseIrreversible, Summary: "No way back.",
			Workflow: workflow, Links: hitl.Links{Checkpoint: checkpointID}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"trip-7", evidence.WorkflowID("trip-7")} {
		var got admin.Escalations
		r.get("escalations?workflow="+name, &got)
		if len(got.Escalations) != 1 || got.Escalations[0].WorkflowName != "trip-7" {
			t.Errorf("%s: %+v", name, got.Escalations)
		}
	}
	var got admin.Escalations
	if r.get("escalations?workflow=trip-8", &got); len(got.Escalations) != 1 || got.Escalations[0].WorkflowName != "" {
		t.Errorf("%+v", got.Escalations)
	}
}
