package e2e

import (
	"net/http"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// C-6.2-b: a trusted agent that knows an id of somebody's workflow, and no more, cannot say
// with a call of its own that it failed, is being undone, or has ended. The answer is that
// to an unknown parent. Who takes part can.
func TestStrangersTellNothing(t *testing.T) {
	upstream, ada, eve := newUpstream(t), newAgent(t, "ada"), newAgent(t, "eve")
	g := launch(t, setup{app: trusting(t, ada, eve), badger: true, site: "agent_proxy " + upstream.addr})
	wid := uuid.NewString()
	task := ada.issue(ect.Claims{Workflow: wid})
	got := g.call(with(task, request{path: "/pay"}))
	if got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	checkpoint := got.header.Get("Execution-Checkpoint")
	failure := func(named string) *ect.ExtBuilder {
		return new(ect.ExtBuilder).Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, named)
	}
	start := new(ect.ExtBuilder).Text(ect.MemberRollbackID, "urn:uuid:"+uuid.NewString()).Text(ect.MemberCheckpointID, checkpoint).
		Text(ect.MemberScope, "single").Text(ect.MemberReason, "x")
	end := new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "w").Text(ect.MemberTerminalStatus, "failed")
	request := request{path: "/eve", method: "POST"}
	root := eve.issue(ect.Claims{Workflow: wid})
	g.call(with(root, request))
	for name, c := range map[string]ect.Claims{
		"an error of a task":       {Action: "error", Parents: []string{task.ID()}, Ext: failure("")},
		"of the gateway's word":    {Action: "aerr:error", Parents: []string{checkpoint}, Ext: failure("")},
		"beside a node of its own": {Action: "atd:error", Parents: []string{root.ID(), task.ID()}, Ext: failure("")},
		"a rollback that begins":   {Action: "rollback_start", Parents: []string{task.ID()}, Ext: start},
		"one that is asked for": {Action: "rollback_request", Parents: []string{checkpoint},
			Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "x").Bool(ect.MemberCascade, true)},
		"one that has ended": {Action: "rollback_complete", Parents: []string{checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberStatus, "completed")},
		"an end":             {Action: "workflow_complete", Parents: []string{task.ID()}, Ext: end},
	} {
		t.Run(name, func(t *testing.T) {
			c.Workflow = wid
			for _, method := range []string{"POST", "GET"} {
				request.method, request.path = method, "/told"
				g.call(with(eve.issue(c), request)).refusedFor(t, 403, "parent-unknown")
			}
		})
	}
	request.method = "POST"
	for _, named := range []string{checkpoint, uuid.NewString()} { // known and unknown are the same
		g.call(with(eve.issue(ect.Claims{Workflow: wid, Action: "error", Parents: []string{root.ID()}, Ext: failure(named)}), request)).refusedFor(t, 403, "ext")
	}
	upstream.arrived("/told", 0)
	if v := g.settledView(ada, wid, 3); v.state(task.ID()) != "done" || v.state(checkpoint) != "done" || v.state(root.ID()) != "none" {
		t.Errorf("%+v", v)
	}

	// With a call of its own, and again as a retry.
	own := with(ada.issue(ect.Claims{Workflow: wid, Action: "error", Parents: []string{task.ID(), checkpoint}, Ext: failure(checkpoint)}), request)
	for _, status := range []string{"executed", "replayed"} {
		if got := g.call(own); got.header.Get("Execution-Status") != status {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	if v := g.settledView(ada, wid, 6); v.state(task.ID()) != "failed" {
		t.Errorf("%+v", v)
	}
}
