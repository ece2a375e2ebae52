package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

const (
	rollbackID   = "f1b1c2d3-e4f5-4789-abcd-ef0123456789"
	checkpointID = "c1b1c2d3-e4f5-4789-abcd-ef0123456789"
)

func someRollback() *rollbackapi.Document {
	at := time.Date(2026, 11, 20, 13, 0, 0, 0, time.UTC)
	return &rollbackapi.Document{
		RollbackID: "urn:uuid:" + rollbackID, CheckpointID: "c1", Workflow: "w1", WorkflowName: "trip-7", Scope: "sub_dag", Operator: "ann\x1b[2J",
		Reason: "wrong price list", State: "finished", Status: rollback.Partial, Effect: rollbackapi.EffectMixed,
		Asked: at, Due: at.Add(time.Hour), Finished: at.Add(3 * time.Second),
		Steps: []rollbackapi.StepDocument{
			{CheckpointID: "c3", Way: "compensate POST /v1/refunds", Call: &rollbackapi.CallDocument{
				Execution: "ab", ExecutionID: "order-7", Action: "charge", Method: "POST", Path: "/v1/charges\x1b[2J", Created: at.Add(-time.Hour),
			}, Agent: "spiffe://example.com/agent/b", Action: "undo", State: rollback.StepDone, Status: rollback.Completed, HTTPStatus: 200},
			{CheckpointID: "c2", Action: "escalate", State: rollback.StepDone, Status: rollback.Escalated, Reason: "irreversible"},
			{CheckpointID: "c1", Level: 1, Action: "undo", State: rollback.StepDone, Status: rollback.Failed, Effect: rollbackapi.EffectUnknown, Reason: "answer-lost"},
		},
		FollowUp: []string{"Checkpoint c2: it cannot be undone by the gateway; undo it by hand, or decide that it stays."},
	}
}

// Section "CLI": how rollbacks are shown.
func TestGoldenRollbacks(t *testing.T) {
	now := time.Date(2026, 11, 20, 13, 0, 10, 0, time.UTC)
	var out strings.Builder
	if err := printRollback(&out, someRollback(), now); err != nil {
		t.Fatal(err)
	}
	golden(t, "rollback_show", out.String())
	out.Reset()
	planned := someRollback()
	planned.State, planned.Status, planned.Effect, planned.Asked, planned.Due, planned.Finished = rollbackapi.Planned, "", "", time.Time{}, time.Time{}, time.Time{}
	for i := range planned.Steps {
		step := &planned.Steps[i]
		step.State, step.Status, step.Effect, step.HTTPStatus, step.Reason = "", "", "", 0, ""
	}
	if err := printRollback(&out, planned, now); err != nil {
		t.Fatal(err)
	}
	golden(t, "rollback_plan", out.String())
	out.Reset()
	hangs := someRollback()
	hangs.State, hangs.Status, hangs.Effect, hangs.Finished, hangs.FollowUp = "executing", "", "", time.Time{}, nil
	hangs.Steps[2] = rollbackapi.StepDocument{CheckpointID: "c1", Level: 1, Action: "undo", State: rollback.StepRunning, Attempts: 7, LastCause: "POST: connection refused"}
	if err := printRollback(&out, hangs, now); err != nil {
		t.Fatal(err)
	}
	golden(t, "rollback_hangs", out.String())
	out.Reset()
	if err := listRollbacks(&out, &admin.RollbackPage{Rollbacks: []*rollbackapi.Document{someRollback()}}, now); err != nil {
		t.Fatal(err)
	}
	golden(t, "rollbacks_list", out.String())
}

// rollbackServer answers as the admin API does, with a rollback that ends with the second
// look at it.
type rollbackServer struct {
	asked  []string
	looks  int
	status rollback.Status
}

func (s *rollbackServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.asked = append(s.asked, r.Method+" "+r.URL.String()+" "+string(body))
	doc := someRollback()
	if r.Method == http.MethodGet {
		s.looks++
		doc.Steps[2] = rollbackapi.StepDocument{CheckpointID: "c1", State: rollback.StepRunning, Attempts: 7, LastCause: "POST: connection refused"}
	}
	if doc.Status = s.status; s.looks < 2 {
		doc.State, doc.Status = "executing", ""
	}
	var answer any = doc
	if strings.HasSuffix(r.URL.Path, "/rollbacks") {
		answer = admin.RollbackPage{Rollbacks: []*rollbackapi.Document{doc}, Next: "n"}
	}
	w.Header().Set(admin.Mark, "1")
	_ = json.NewEncoder(w).Encode(answer)
}

// Issue 6 "Rollback": the command waits for the end, and succeeds only where all is undone.
func TestRollbackCommand(t *testing.T) {
	s := &rollbackServer{status: rollback.Completed}
	server := httptest.NewServer(s)
	defer server.Close()
	command := []string{"rollback", checkpointID, "--reason", "why", "--operator", "ann", "--cascade", "--id", rollbackID, "--address", server.Listener.Addr().String()}
	out, told, err := run(t, command...)
	if !strings.Contains(told, "with --no-wait it would not") || !strings.Contains(told, "7 attempts were in vain, the last one: POST: connection refused.") {
		t.Errorf("%s", told)
	}
	if err != nil || !strings.Contains(out, "finished, completed") {
		t.Errorf("%v\n%s", err, out)
	}
	want := []string{
		`POST /agent_guard/rollback {"rollback_id":"urn:uuid:` + rollbackID + `","checkpoint_id":"` + checkpointID + `","cascade":true,"operator":"ann","reason":"why"}`,
		`GET /agent_guard/rollback/` + rollbackID + `?wait=20s `, `GET /agent_guard/rollback/` + rollbackID + `?wait=20s `,
	}
	if strings.Join(s.asked, "\n") != strings.Join(want, "\n") {
		t.Errorf("asked\n%s", strings.Join(s.asked, "\n"))
	}
	for _, status := range []rollback.Status{rollback.Partial, rollback.Escalated, rollback.Failed} {
		s.status = status
		if out, _, err := run(t, command...); err == nil || !strings.Contains(err.Error(), string(status)) || !strings.Contains(out, "What a person must still do") {
			t.Errorf("%s: %v\n%s", status, err, out)
		}
	}
	s.asked, s.looks = nil, 0
	if _, _, err := run(t, append(command, "--no-wait")...); err != nil || len(s.asked) != 1 {
		t.Errorf("%v %v", err, s.asked)
	}
	s.asked = nil
	if _, _, err := run(t, append(command, "--dry-run")...); err != nil || len(s.asked) != 1 || !strings.Contains(s.asked[0], `"dry_run":true`) {
		t.Errorf("%v %v", err, s.asked)
	}
	s.looks = 2
	if got := document[admin.RollbackPage](t, "rollbacks", "--address", server.Listener.Addr().String()); len(got.Rollbacks) != 1 {
		t.Errorf("%+v", got)
	}
	if out, _, err := run(t, "rollbacks", rollbackID, "--address", server.Listener.Addr().String()); err != nil || !strings.Contains(out, "c1") {
		t.Errorf("%v\n%s", err, out)
	}
	refuses(t, `CHECKPOINT: "foo" is no UUID; it stands in Execution-Checkpoint`, "rollback", "foo", "--dry-run")
	refuses(t, `ID: "foo" is no UUID`, "rollbacks", "foo")
	refuses(t, "give one ID, or none; there are 2", "rollbacks", "a", "b")
	refuses(t, "give --scope or --cascade", "rollback", checkpointID, "--scope", "single", "--cascade", "--dry-run")
	refuses(t, "give --dry-run or --no-wait", "rollback", checkpointID, "--no-wait", "--dry-run")
	refuses(t, "give one CHECKPOINT", "rollback", "--reason", "x")
	refuses(t, "--reason: say why", "rollback", checkpointID, "--operator", "a")
	refuses(t, "is no UUID", "rollback", checkpointID, "--reason", "x", "--operator", "a", "--id", "x")
}
