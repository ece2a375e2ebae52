package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const rollbackID = "f1b1c2d3-e4f5-4789-abcd-ef0123456789"

// coordinator does what the test says.
type coordinator struct {
	asked  []rollback.Request
	all    map[string]*rollback.Rollback
	fail   error
	waited int
	after  string
	limit  int
}

func (d *coordinator) Plan(_ context.Context, r rollback.Request) (*rollback.Rollback, error) {
	if d.fail != nil {
		return nil, d.fail
	}
	return &rollback.Rollback{Checkpoint: r.Checkpoint, Scope: r.Scope, Operator: r.Operator, State: rollback.Planned, Journal: rollback.Journal{Plan: &rollback.Plan{}},
		Steps: []rollback.Step{{Checkpoint: "c1", StepJournal: rollback.StepJournal{What: rollback.Escalate}}, {Checkpoint: "c2", StepJournal: rollback.StepJournal{What: rollback.Undo}, Level: 1}}}, nil
}

func (d *coordinator) Execute(
	_ context.Context, r rollback.Request, _ func(context.Context, bool) ([]store.Write, error),
) (*rollback.Rollback, error) {
	if d.fail != nil {
		return nil, d.fail
	}
	d.asked = append(d.asked, r)
	made := &rollback.Rollback{ID: r.ID, Checkpoint: r.Checkpoint, Scope: r.Scope, Operator: r.Operator, Reason: r.Reason, State: rollback.Executing}
	d.all = map[string]*rollback.Rollback{r.ID: made}
	return made, nil
}

func (d *coordinator) Get(_ context.Context, id string) (*rollback.Rollback, error) {
	if r, ok := d.all[id]; ok {
		return r, d.fail
	}
	return nil, rollback.ErrUnknown
}

func (d *coordinator) Wait(ctx context.Context, id string) (*rollback.Rollback, error) {
	d.waited++
	<-ctx.Done()
	return d.all[id], ctx.Err()
}

func (d *coordinator) List(_ context.Context, after string, limit int) (rollback.Page, error) {
	d.after, d.limit = after, limit
	if after == "bad" {
		return rollback.Page{}, rollback.ErrCursor
	}
	return rollback.Page{Rollbacks: []*rollback.Rollback{{ID: rollbackID, State: rollback.Finished, Status: rollback.Partial}}, Unreadable: 1, Next: "n"}, nil
}

// Issue 6 "Rollback": operators ask over the admin API, and are recorded.
func TestOperatorsRollBack(t *testing.T) {
	r, st := newRig(t)
	d := &coordinator{}
	st.rollback = d
	w, refused := r.ask(http.MethodPost, "rollback", fmt.Sprintf(
		`{"rollback_id": "urn:uuid:%s", "checkpoint_id": "C1B1C2D3-e4f5-6789-abcd-ef0123456789", "scope": "full_workflow", "operator": "ann", "reason": "wrong price"}`, rollbackID))
	if refused.Err != nil || !strings.Contains(w.Body.String(), `"state":"executing"`) {
		t.Fatalf("%v %s", refused, w.Body)
	}
	want := rollback.Request{ID: rollbackID, Checkpoint: "c1b1c2d3-e4f5-6789-abcd-ef0123456789", Scope: rollback.FullWorkflow, Reason: "wrong price", Operator: "ann"}
	if len(d.asked) != 1 || d.asked[0] != want {
		t.Errorf("%+v, want %+v", d.asked, want)
	}
	var doc rollback.Rollback
	r.get("rollback/"+rollbackID, &doc)
	if doc.Operator != "ann" || doc.ID != "urn:uuid:"+rollbackID || d.waited != 0 {
		t.Errorf("%+v", doc)
	}
	var page admin.RollbackPage
	r.get("rollbacks?limit=7&after=x", &page)
	if len(page.Rollbacks) != 1 || page.Next != "n" || page.Unreadable != 1 || d.after != "x" || d.limit != 7 {
		t.Errorf("%+v", page)
	}

	// --dry-run touches nothing.
	w, refused = r.ask(http.MethodPost, "rollback", `{"checkpoint_id": "c", "operator": "ann", "reason": "r", "cascade": true, "dry_run": true}`)
	if refused.Err != nil || len(d.asked) != 1 || !strings.Contains(w.Body.String(), `"state":"planned"`) || !strings.Contains(w.Body.String(), "cannot be undone") {
		t.Errorf("%v %s", refused, w.Body)
	}
}

// A look at a rollback waits where it is asked to.
func TestLookingAtARollbackWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, st := newRig(t)
		d := &coordinator{all: map[string]*rollback.Rollback{rollbackID: {ID: rollbackID, State: rollback.Executing}}}
		st.rollback = d
		began := time.Now()
		var doc rollback.Rollback
		r.get("rollback/"+rollbackID+"?wait=5s", &doc)
		if time.Since(began) != 5*time.Second || doc.State != "executing" {
			t.Errorf("%v %+v", time.Since(began), doc)
		}
	})
}

func TestRollbackRefusals(t *testing.T) {
	r, st := newRig(t)
	r.refuses(http.MethodGet, "rollbacks", "", http.StatusNotFound, "has no identity")
	d := &coordinator{}
	st.rollback = d
	const whole = `{"checkpoint_id": "c", "operator": "ann", "reason": "r"}`
	for body, words := range map[string]string{
		`{"operator": "ann", "reason": "r"}`:                                           "checkpoint_id",
		`{"checkpoint_id": "c", "reason": "r"}`:                                        "operator",
		`{"checkpoint_id": "c", "operator": "ann"}`:                                    "reason",
		`{"checkpoint_id": "c", "operator": "ann", "reason": "r", "scop": "x"}`:        "scop",
		`{"checkpoint_id": "c", "operator": "ann", "reason": "r", "scope": "x"}`:       "scope",
		`{"checkpoint_id": "c", "operator": "ann", "reason": "r", "rollback_id": "x"}`: "UUID",
		whole + "x": "something stands behind it",
	} {
		r.refuses(http.MethodPost, "rollback", body, http.StatusBadRequest, words)
	}
	for _, c := range []struct {
		err    error
		status int
		words  string
	}{
		{rollback.ErrCheckpointUnknown, 404, "no such checkpoint"},
		{fmt.Errorf("%w: x", checkpoint.ErrExpired), 410, "expired"},
		{fmt.Errorf("%w: x", checkpoint.ErrTampered), 409, "does not match its hash"},
		{&rollback.ConflictError{Winner: "w1"}, 409, "rollback w1 is under way"},
		{&rollback.DependedOnError{Dependants: []string{"d1"}}, 409, `"d1"`},
		{rollback.ErrMismatch, 422, "another request"},
		{errors.New("broken"), 503, "broken"},
	} {
		d.fail = c.err
		r.refuses(http.MethodPost, "rollback", whole, c.status, c.words)
	}
	r.refuses(http.MethodGet, "rollback/"+rollbackID, "", http.StatusNotFound, "no such rollback")
	r.refuses(http.MethodGet, "rollback/x", "", http.StatusBadRequest, "UUID")
	r.refuses(http.MethodGet, "rollbacks?after=bad", "", http.StatusBadRequest, "not where a page begins")
	r.refuses(http.MethodGet, "rollback", "", http.StatusMethodNotAllowed, "use POST")
}

// Section "Admin API": what waits for a person is shown with all that leads to it, by
// level, state and workflow, in pages.
func TestEscalations(t *testing.T) {
	r, o := newRig(t)
	var got hitl.Page
	if r.get("escalations", &got); got.Escalations == nil || len(got.Escalations) != 0 || got.Next != "" {
		t.Errorf("%+v", got)
	}
	var opened []hitl.Escalation
	for i := range 5 {
		e, err := o.escalations.Open(ctx, hitl.Opening{
			Key: fmt.Sprint(i), Level: hitl.Level(1 + i%3), Cause: hitl.CauseIrreversible, Summary: "No way back.",
			Workflow: fmt.Sprint("w", i%2), Caller: "ada",
			Links: hitl.Links{Checkpoint: "c", Rollback: "r", Error: "e", Execution: "x", Upstream: "u:1"},
		})
		if err != nil {
			t.Fatal(err)
		}
		opened = append(opened, e)
		r.now = r.now.Add(1e9)
	}
	r.get("escalations", &got)
	if len(got.Escalations) != 5 {
		t.Fatalf("%+v", got)
	}
	newest, want := got.Escalations[0], opened[4]
	if !reflect.DeepEqual(newest, hitl.Escalation{
		Status: "pending", RequiredRole: "operator",
		ID: want.ID, Level: 2, LevelName: "approval", State: "open", Cause: "irreversible_rollback", Summary: "No way back.",
		Workflow: "w0", Caller: "ada", Links: hitl.Links{Checkpoint: "c", Rollback: "r", Error: "e", Execution: "x", Upstream: "u:1"},
		Opened: want.Opened, Changed: want.Changed, NextAttempt: want.NextAttempt,
	}) {
		t.Errorf("%+v", newest)
	}
	for query, n := range map[string]int{
		"level=1": 2, "level=pause": 2, "level=approval": 2, "level=3": 1, "state=open": 5, "state=notified": 0, "status=pending": 5, "status=denied": 0,
		"workflow=w1": 2, "workflow=w1&level=2": 1, "workflow=nobody": 0,
	} {
		var got hitl.Page
		if r.get("escalations?"+query, &got); len(got.Escalations) != n {
			t.Errorf("%s: %d, want %d", query, len(got.Escalations), n)
		}
	}
	seen := map[string]bool{}
	for after := ""; ; {
		var page hitl.Page
		r.get("escalations?limit=2&after="+after, &page)
		for _, e := range page.Escalations {
			seen[e.ID] = true
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if len(seen) != 5 {
		t.Errorf("the pages have %d of 5", len(seen))
	}
}

// Section "Admin API": a misspelled filter is not one that everything passes.
func TestEscalationRefusals(t *testing.T) {
	r, _ := newRig(t)
	for query, want := range map[string]string{
		"level=4":      `"4" is no level; there are 1 (pause), 2 (approval) and 3 (stop)`,
		"state=closed": `"closed" is no state; there are [open notified undeliverable]`,
		"leve=1":       `"leve" is no parameter`,
		"status=open":  `"open" is no status; there are [pending approved denied expired withdrawn]`,
		"after=x":      "this is not where a page begins",
		"limit=0":      "is not from 1 to 1000",
	} {
		r.refuses("GET", "escalations?"+query, "", http.StatusBadRequest, want)
	}
	r.refuses("POST", "escalations", "", http.StatusMethodNotAllowed, "use GET")
}

// decide posts, and reads the escalation that is answered.
func decide(r *rig, target, body string, got *hitl.Escalation) {
	r.t.Helper()
	w, refused := r.ask(http.MethodPost, target, body)
	if refused.HTTPStatus != 0 {
		r.t.Fatalf("%s: %v", target, refused)
	}
	if err := json.Unmarshal(w.Body.Bytes(), got); err != nil {
		r.t.Fatal(err)
	}
}

// Section "Admin API": an operator decides what was shown, once.
func TestDecisionsOfOperators(t *testing.T) {
	r, o := newRig(t)
	open := func(op hitl.Opening) string {
		t.Helper()
		op.Summary = "s"
		e, err := o.escalations.Open(ctx, op)
		if err != nil {
			t.Fatal(err)
		}
		return "escalations/" + e.ID
	}
	call := open(hitl.Opening{Key: "call", Level: hitl.Approval, Cause: hitl.CauseCall, Requester: "operator:eve",
		Proposal: hitl.Proposal{Kind: hitl.RunCall, Text: "POST /pay", RequestHash: "sha-256:1"}})
	stop := open(hitl.Opening{Key: "stop", Level: hitl.Stop, Cause: hitl.CauseRollbackFailed, Workflow: "w"})
	for body, want := range map[string]struct {
		status int
		text   string
	}{
		`{"decision": "approve"}`:                                                               {400, "operator: say who decides"},
		`{"decision": "maybe", "operator": "ann"}`:                                              {400, `decision: it is "maybe"; use approve or deny`},
		`{"decision": "approve", "operator": "ann", "hash": "x"}`:                               {400, "unknown field"},
		`{"decision": "approve", "operator": "ann", "request_hash": "a", "plan_hash": "b"}`:     {400, "give the one"},
		`{"decision": "approve", "operator": "ann", "request_hash": "sha-256:2"}`:               {409, "something else"},
		`{"decision": "approve", "operator": "eve", "request_hash": "sha-256:1"}`:               {403, "who asked cannot approve"},
		`{"decision": "deny", "operator": "ann", "request_hash": "sha-256:1"}`:                  {400, "a denial needs a reason"},
		`{"decision": "deny", "operator": "ann", "reason": "` + strings.Repeat("x", 513) + `"}`: {400, "more than 512 bytes"},
	} {
		r.refuses("POST", call+"/decision", body, want.status, want.text)
	}
	r.refuses("POST", "escalations/00000000-0000-8000-8000-000000000000/decision", `{"decision": "approve", "operator": "ann"}`, http.StatusNotFound, "no such escalation")
	r.refuses("GET", "escalations/x", "", http.StatusNotFound, "no such escalation")
	var got hitl.Escalation
	decide(r, call+"/decision", `{"decision": "approve", "operator": "ann", "request_hash": "sha-256:1", "reason": "fine"}`, &got)
	if got.Status != "approved" || len(got.Decisions) != 1 || got.Decisions[0].By != "operator:ann" || got.Decisions[0].Reason != "fine" || got.Proposal.RequestHash != "sha-256:1" {
		t.Errorf("%+v", got)
	}
	r.refuses("POST", call+"/decision", `{"decision": "deny", "operator": "bob", "request_hash": "sha-256:1", "reason": "no"}`, http.StatusConflict, "decided already")
	r.refuses("POST", call+"/ask", `{"operator": "bob"}`, http.StatusConflict, "holds no workflow")
	got = hitl.Escalation{}
	decide(r, stop+"/decision", `{"decision": "deny", "operator": "ann", "reason": "not yet"}`, &got)
	if got.Status != "denied" || !got.Held {
		t.Errorf("%+v", got)
	}
	got = hitl.Escalation{}
	decide(r, stop+"/ask", `{"operator": "bob"}`, &got)
	r.refuses("POST", stop+"/decision", `{"decision": "approve", "operator": "bob"}`, http.StatusForbidden, "who asked cannot approve")
	got = hitl.Escalation{}
	decide(r, stop+"/decision", `{"decision": "approve", "operator": "ann"}`, &got)
	if got.Status != "approved" || got.Held {
		t.Errorf("%+v", got)
	}
}
