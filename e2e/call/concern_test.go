package call

import (
	"net/http"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// C-6.2-b: a trusted agent that knows an id of somebody's workflow, and no more, cannot say
// with a call of its own that it failed, is being undone, or has ended. The answer is that
// to an unknown parent. Who takes part can.
func TestStrangersTellNothing(t *testing.T) {
	upstream, ada, eve := harness.NewUpstream(t), harness.NewAgent(t, "ada"), harness.NewAgent(t, "eve")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, ada, eve), Badger: true, Site: "agent_proxy " + upstream.Addr})
	wid := uuid.NewString()
	task := ada.Issue(ect.Claims{Workflow: wid})
	got := g.Call(harness.With(task, harness.Request{Path: "/pay"}))
	if got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	checkpoint := got.Header.Get("Execution-Checkpoint")
	failure := func(named string) *ect.ExtBuilder {
		return new(ect.ExtBuilder).Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, named)
	}
	start := new(ect.ExtBuilder).Text(ect.MemberRollbackID, "urn:uuid:"+uuid.NewString()).Text(ect.MemberCheckpointID, checkpoint).
		Text(ect.MemberScope, "single").Text(ect.MemberReason, "x")
	end := new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "w").Text(ect.MemberTerminalStatus, "failed")
	request := harness.Request{Path: "/eve", Method: "POST"}
	root := eve.Issue(ect.Claims{Workflow: wid})
	g.Call(harness.With(root, request))
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
				request.Method, request.Path = method, "/told"
				g.Call(harness.With(eve.Issue(c), request)).RefusedFor(t, 403, "parent-unknown")
			}
		})
	}
	request.Method = "POST"
	for _, named := range []string{checkpoint, uuid.NewString()} { // known and unknown are the same
		g.Call(harness.With(eve.Issue(ect.Claims{Workflow: wid, Action: "error", Parents: []string{root.ID()}, Ext: failure(named)}), request)).RefusedFor(t, 403, "ext")
	}
	upstream.Arrived("/told", 0)
	if v := g.SettledView(ada, wid, 3); v.State(task.ID()) != "done" || v.State(checkpoint) != "done" || v.State(root.ID()) != "none" {
		t.Errorf("%+v", v)
	}

	// With a call of its own, and again as a retry.
	own := harness.With(ada.Issue(ect.Claims{Workflow: wid, Action: "error", Parents: []string{task.ID(), checkpoint}, Ext: failure(checkpoint)}), request)
	for _, status := range []string{"executed", "replayed"} {
		if got := g.Call(own); got.Header.Get("Execution-Status") != status {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	if v := g.SettledView(ada, wid, 6); v.State(task.ID()) != "failed" {
		t.Errorf("%+v", v)
	}
}

// With `lineage workflow` neither a token that nobody is proven to have issued nor what a
// third party tells of both makes two strangers of a workflow linked (ADR 0024, 0038).
func TestNobodyLinksStrangersForRollbacks(t *testing.T) {
	lab, ada, bob, eve := harness.NewRestLab(t), harness.NewAgent(t, "ada"), harness.NewAgent(t, "bob"), harness.NewAgent(t, "eve")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, ada, bob, eve) + "\nrollback {\n lineage workflow\n }" + harness.Level1, Site: lab.Site(), Badger: true})
	f := g.Workflow()
	first, checkpoint := f.Does(ada, "PUT", "/docs/a", "1")
	second, _ := f.Does(bob, "PUT", "/docs/b", "1")
	refused := func(after string) {
		t.Helper()
		if got := f.Asks(bob, uuid.NewString(), checkpoint, ""); got.Status != http.StatusForbidden {
			t.Errorf("after %s: %d %s", after, got.Status, got.Body)
		}
	}
	refused("nothing")
	both := []string{first.ID(), second.ID()}
	if got := g.Call(harness.WithRaw(harness.Bare(t, map[string]any{"wid": f.Wid, "par": both}), harness.Request{Method: "PUT", Path: "/docs/c", Id: "c", Body: "1"})); got.Status >= 300 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	refused("an unsigned token")

	// Eve takes part in both, by two nodes that no link joins, and tells of them at once.
	f.Does(eve, "PUT", "/docs/d", "1", first.ID())
	f.Does(eve, "PUT", "/docs/e", "1", second.ID())
	failure := eve.Issue(ect.Claims{Workflow: f.Wid, Action: "error", Parents: both,
		Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "x").Text(ect.MemberCheckpointID, "")})
	if got := g.Call(harness.With(failure, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	refused("an error of both")
	f.Asks(ada, uuid.NewString(), checkpoint, `, "keep_dependants": true`).Undone(t, rollback.Completed)
}
