package cli

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

const (
	rollbackID   = "f1b1c2d3-e4f5-4789-abcd-ef0123456789"
	checkpointID = "c1b1c2d3-e4f5-4789-abcd-ef0123456789"
)

func someRollback() *rollback.Rollback {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	return &rollback.Rollback{
		ID: "urn:uuid:" + rollbackID, Checkpoint: "c1", Workflow: "w1", WorkflowName: "trip-7", Scope: "sub_dag", Operator: "ann\x1b[2J",
		Reason: "wrong price list", State: "finished", Status: rollback.Partial, Effect: rollback.EffectMixed,
		Asked: at, Due: at.Add(time.Hour), Finished: at.Add(3 * time.Second),
		Steps: []rollback.Step{
			{Checkpoint: "c3", Way: "compensate POST /v1/refunds", Call: &rollback.CallDocument{
				Execution: "ab", ExecutionID: "order-7", Action: "charge", Method: "POST", Path: "/v1/charges\x1b[2J", Created: at.Add(-time.Hour),
			}, Agent: "spiffe://example.com/agent/b", Action: "undo", State: rollback.StepDone, Status: rollback.Completed, HTTPStatus: 200},
			{Checkpoint: "c2", Action: "escalate", State: rollback.StepDone, Status: rollback.Escalated, Reason: "irreversible"},
			{Checkpoint: "c1", Level: 1, Action: "undo", State: rollback.StepDone, Status: rollback.Failed, Effect: rollback.EffectUnknown, Reason: "answer-lost"},
		},
		FollowUp: []string{"Checkpoint c2: it cannot be undone by the gateway; undo it by hand, or decide that it stays."},
	}
}

// Section "CLI": how rollbacks are shown.
func TestGoldenRollbacks(t *testing.T) {
	now := time.Date(2026, 11, 20, 13, 0, 10, 0, time.UTC)
	golden(t, "rollback_show", describeRollback(someRollback(), now))
	planned := someRollback()
	planned.State, planned.Status, planned.Effect, planned.Asked, planned.Due, planned.Finished = rollback.Planned, "", "", time.Time{}, time.Time{}, time.Time{}
	for i := range planned.Steps {
		step := &planned.Steps[i]
		step.State, step.Status, step.Effect, step.HTTPStatus, step.Reason = "", "", "", 0, ""
	}
	golden(t, "rollback_plan", describeRollback(planned, now))
	hangs := someRollback()
	hangs.State, hangs.Status, hangs.Effect, hangs.Finished, hangs.FollowUp = "executing", "", "", time.Time{}, nil
	hangs.Steps[2] = rollback.Step{Checkpoint: "c1", Level: 1, Action: "undo", State: rollback.StepRunning, Attempts: 7, LastCause: "POST: connection refused"}
	golden(t, "rollback_hangs", describeRollback(hangs, now))
	drawn := someRollback()
	drawn.Steps[2].Earlier = []string{"c2", "c3"}
	drawn.Steps[2].Begun, drawn.Steps[2].Ended = now, now.Add(time.Second)
	golden(t, "rollback_tree", rollback.Drawing(drawn).Tree())
	golden(t, "rollbacks_list", tableOf(now, []rollback.Rollback{*someRollback()}, rollbackRow))
}

// Issue 6 "Rollback": the command waits for the end, and succeeds only where all is undone.
func TestRollbackCommand(t *testing.T) {
	status, polls, escalation := rollback.Completed, 0, ""
	server := newAdminServer(t, func(r *http.Request) any {
		doc := someRollback()
		if r.Method == http.MethodGet {
			polls++
			doc.Steps[2] = rollback.Step{Checkpoint: "c1", State: rollback.StepRunning, Attempts: 7, LastCause: "POST: connection refused"}
		}
		if doc.Status = status; polls < 2 { // it ends with the second poll
			doc.State, doc.Status, doc.Waits = "executing", "", escalation
		}
		if r.URL.Query().Get("after") == "n" {
			return admin.RollbackPage{}
		}
		if strings.HasSuffix(r.URL.Path, "/rollbacks") {
			return admin.RollbackPage{Rollbacks: []*rollback.Rollback{doc}, Next: "n"}
		}
		return doc
	})
	command := []string{"rollback", checkpointID, "--reason", "why", "--operator", "ann", "--cascade", "--id", rollbackID}
	out, hint, err := server.run(t, command...)
	if !strings.Contains(hint, "with --no-wait it would not") || !strings.Contains(hint, "7 attempts were in vain, the last one: POST: connection refused.") {
		t.Errorf("%s", hint)
	}
	if err != nil || !strings.Contains(out, "finished, completed") {
		t.Errorf("%v\n%s", err, out)
	}
	want := []string{
		`POST /agent_guard/rollback {"rollback_id":"urn:uuid:` + rollbackID + `","checkpoint_id":"` + checkpointID + `","cascade":true,"operator":"ann","reason":"why"}`,
		`GET /agent_guard/rollback/` + rollbackID + `?wait=20s `, `GET /agent_guard/rollback/` + rollbackID + `?wait=20s `,
	}
	if strings.Join(server.asked, "\n") != strings.Join(want, "\n") {
		t.Errorf("asked\n%s", strings.Join(server.asked, "\n"))
	}
	for _, status = range []rollback.Status{rollback.Partial, rollback.Escalated, rollback.Failed} {
		if out, _, err := server.run(t, command...); err == nil || !strings.Contains(err.Error(), string(status)) || !strings.Contains(out, "What a person must still do") {
			t.Errorf("%s: %v\n%s", status, err, out)
		}
	}
	polls, escalation = 0, "e-7"
	if _, hint, _ := server.run(t, command...); !strings.Contains(hint, "until somebody else decides: `caddy agent-guard escalations show e-7`") {
		t.Errorf("%s", hint)
	}
	polls = 0
	if _, _, err := server.run(t, append(command, "--no-wait")...); err != nil || len(server.asked) != 1 {
		t.Errorf("%v %v", err, server.asked)
	}
	if _, _, err := server.run(t, append(command, "--dry-run")...); err != nil || len(server.asked) != 1 || !strings.Contains(server.asked[0], `"dry_run":true`) {
		t.Errorf("%v %v", err, server.asked)
	}
	polls = 2
	if got := document[admin.RollbackPage](t, "rollbacks", "--address", server.address); len(got.Rollbacks) != 1 {
		t.Errorf("%+v", got)
	}
	if out, _, err := run(t, "rollbacks", rollbackID, "--address", server.address); err != nil || !strings.Contains(out, "c1") {
		t.Errorf("%v\n%s", err, out)
	}
	refuses(t, `CHECKPOINT: "foo" is no UUID; it stands in Execution-Checkpoint`, "rollback", "foo", "--dry-run")
	if got := document[admin.RollbackPage](t, "rollbacks", "list", "--address", server.address); len(got.Rollbacks) != 1 {
		t.Errorf("`rollbacks list`: %+v", got)
	}
	if out, _, err := run(t, "rollbacks", "show", rollbackID, "--tree", "--address", server.address); err != nil || !strings.Contains(out, "● (agent not known)  escalate: escalated") {
		t.Errorf("%v\n%s", err, out)
	}
	refuses(t, `ID: "foo" is no UUID`, "rollbacks", "foo")
	refuses(t, `ID: "foo" is no UUID`, "rollbacks", "show", "foo")
	refuses(t, "ID: it is missing", "rollbacks", "show")
	refuses(t, "--tree: give the ID", "rollbacks", "--tree")
	refuses(t, "--tree: give the ID", "rollbacks", "list", "--tree")
	refuses(t, "give one ID, or none; there are 2", "rollbacks", "a", "b")
	refuses(t, "give --scope or --cascade", "rollback", checkpointID, "--scope", "single", "--cascade", "--dry-run")
	refuses(t, "give --dry-run or --no-wait", "rollback", checkpointID, "--no-wait", "--dry-run")
	refuses(t, "give one CHECKPOINT", "rollback", "--reason", "x")
	refuses(t, "--reason: say why", "rollback", checkpointID, "--operator", "a")
	refuses(t, "is no UUID", "rollback", checkpointID, "--reason", "x", "--operator", "a", "--id", "x")
}
