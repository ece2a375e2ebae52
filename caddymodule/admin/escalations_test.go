package admin_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

// Section "Admin API": what waits for a person is shown with all that leads to it, by
// level, state and workflow, in pages.
func TestEscalations(t *testing.T) {
	r, o := newRig(t)
	var got admin.Escalations
	if r.get("escalations", &got); got.Escalations == nil || len(got.Escalations) != 0 || got.Next != "" {
		t.Errorf("%+v", got)
	}
	var opened []hitl.Escalation
	for i := range 5 {
		e, err := o.desk.Open(ctx, hitl.Opening{
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
	if newest != (admin.Escalation{
		ID: want.ID, Level: 2, LevelName: "approval", State: "open", Cause: "irreversible_rollback", Summary: "No way back.",
		Workflow: "w0", Caller: "ada", Links: admin.EscalationLinks{Checkpoint: "c", Rollback: "r", Error: "e", Execution: "x", Upstream: "u:1"},
		Opened: want.Opened, Changed: want.Changed, NextAttempt: want.Delivery.Next,
	}) {
		t.Errorf("%+v", newest)
	}
	for query, n := range map[string]int{
		"level=1": 2, "level=pause": 2, "level=approval": 2, "level=3": 1, "state=open": 5, "state=notified": 0,
		"workflow=w1": 2, "workflow=w1&level=2": 1, "workflow=nobody": 0,
	} {
		var got admin.Escalations
		if r.get("escalations?"+query, &got); len(got.Escalations) != n {
			t.Errorf("%s: %d, want %d", query, len(got.Escalations), n)
		}
	}
	seen := map[string]bool{}
	for after := ""; ; {
		var page admin.Escalations
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
		"after=x":      "this is not where a page begins",
		"limit=0":      "is not from 1 to 1000",
	} {
		r.refuses("GET", "escalations?"+query, "", http.StatusBadRequest, want)
	}
	r.refuses("POST", "escalations", "", http.StatusMethodNotAllowed, "use GET")
}
