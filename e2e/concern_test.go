package e2e

import (
	"net/http"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
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

// With `lineage workflow` neither a token that nobody is proven to have issued nor what a
// third party tells of both makes two strangers of a workflow linked (ADR 0024, 0038).
func TestNobodyLinksStrangersForRollbacks(t *testing.T) {
	lab, ada, bob, eve := newRestLab(t), newAgent(t, "ada"), newAgent(t, "bob"), newAgent(t, "eve")
	g := launch(t, setup{app: trusting(t, ada, bob, eve) + "\nrollback {\n lineage workflow\n }" + level1, site: lab.site(), badger: true})
	f := g.workflow()
	first, checkpoint := f.does(ada, "PUT", "/docs/a", "1")
	second, _ := f.does(bob, "PUT", "/docs/b", "1")
	refused := func(after string) {
		t.Helper()
		if got := f.asks(bob, uuid.NewString(), checkpoint, ""); got.status != http.StatusForbidden {
			t.Errorf("after %s: %d %s", after, got.status, got.body)
		}
	}
	refused("nothing")
	both := []string{first.ID(), second.ID()}
	if got := g.call(withRaw(bare(t, map[string]any{"wid": f.wid, "par": both}), request{method: "PUT", path: "/docs/c", id: "c", body: "1"})); got.status >= 300 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	refused("an unsigned token")

	// Eve takes part in both, by two nodes that no link joins, and tells of them at once.
	f.does(eve, "PUT", "/docs/d", "1", first.ID())
	f.does(eve, "PUT", "/docs/e", "1", second.ID())
	failure := eve.issue(ect.Claims{Workflow: f.wid, Action: "error", Parents: both,
		Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, "")})
	if got := g.call(with(failure, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	refused("an error of both")
	f.asks(ada, uuid.NewString(), checkpoint, `, "keep_dependants": true`).undone(t, rollback.Completed)
}
