//go:build unix

package workflow

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// ATD "Workflow Boundary ECTs": the start and the end of a workflow are recorded once each, however often the
// gateway is killed: between the call and its end, and right behind the end.
func TestCrashBetweenBoundaries(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity " + harness.GatewayIdentity + "\nworkflow_idle 1s"
	const ended = "a workflow has ended"
	call := func(g *harness.ProcGateway, workflow, id string) {
		t.Helper()
		if a := g.Post(t, harness.ProcCall{Id: id, Header: map[string]string{"X-Api-Key": "ada", "Workflow-Id": workflow}}); !a.Executed() {
			t.Fatalf("%v", a)
		}
	}
	gateway := site.Start(t)
	for i := range 3 {
		call(gateway, fmt.Sprint("w", i), fmt.Sprint("call-", i))
	}
	gateway.Kill() // nobody has waited
	gateway = site.Start(t)
	select {
	case <-gateway.Log.When(ended):
	case <-gateway.Dead:
		t.Fatal("the gateway has died")
	}
	gateway.Kill() // perhaps before the others
	gateway = site.Start(t)
	call(gateway, "last", "call-last")
	wids, starts, ends := map[string]bool{}, map[string]int{}, map[string]int{}
	harness.EventuallyWithin(t, harness.ProcBound, "four ends", func() bool {
		clear(starts)
		clear(ends)
		site.Exported(t, func(token *ect.Unverified) {
			wids[token.Workflow()] = true
			switch token.Event() {
			case ect.EventWorkflowStart:
				starts[token.Workflow()]++
			case ect.EventWorkflowComplete:
				ends[token.Workflow()]++
			}
		})
		return len(ends) >= 4
	})
	for wid := range wids {
		if starts[wid] != 1 || ends[wid] != 1 {
			t.Errorf("%s: %d starts and %d ends", wid, starts[wid], ends[wid])
		}
	}
}

// A workflow with a plan begins once and ends once, though the gateway is killed before and after the commit of its
// end, and behind that of its first call.
func TestCrashAroundTheEndOfAPlan(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, stages := harness.ProcNewUpstream(t), harness.ProcNewStages(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity " + harness.GatewayIdentity
	site.Store = "staged " + site.Path("data") + " " + stages.Url
	gateway := site.Start(t)
	for _, name := range []string{"ends", "begins", "last"} {
		status, text, err := gateway.Admin("POST", "/agent_guard/plans/"+name, "application/json", `{"operator": "ada", "plan": {"wf_id": "one", "nodes": [{"id": "default"}]}}`)
		if err != nil || status != http.StatusOK {
			t.Fatalf("%d %s %v", status, text, err)
		}
	}
	call := func(name string) harness.ProcCall {
		return harness.ProcCall{Id: "call-" + name, Header: map[string]string{"X-Api-Key": "ada", "Workflow-Id": name}}
	}
	killed := func(reached <-chan struct{}) {
		t.Helper()
		harness.WaitWithin(t, harness.ProcBound, reached, "the commit")
		gateway.Kill()
		gateway = site.Launch(t)
	}
	started := func() {
		t.Helper()
		if !gateway.Ready(t) {
			t.Fatalf("the gateway did not start:\n%s", gateway.Log.Tail(6000))
		}
	}
	reached := stages.Arm("before workflow end")
	if a := gateway.Post(t, call("ends")); !a.Executed() {
		t.Fatalf("%v", a)
	}
	harness.WaitWithin(t, harness.ProcBound, reached, "its end")
	again := stages.Arm("after workflow end") // of the next process
	killed(reached)
	killed(again)
	started()
	reached = stages.Arm("after claim")
	lost := gateway.Begin(t.Context(), harness.ProcDial(), call("begins"))
	killed(reached)
	harness.WaitWithin(t, harness.ProcBound, lost, "the call ends")
	started()
	harness.WantProcDoubt(t, gateway.Post(t, call("begins"))) // so its plan goes on
	if a := gateway.Post(t, call("last")); !a.Executed() {
		t.Fatalf("%v", a)
	}
	var starts, ends map[string]int
	harness.EventuallyWithin(t, harness.ProcBound, "the end of the last workflow", func() bool {
		starts, ends = map[string]int{}, map[string]int{}
		site.Exported(t, func(token *ect.Unverified) {
			switch token.Event() {
			case ect.EventWorkflowStart:
				starts[token.Workflow()]++
			case ect.EventWorkflowComplete:
				ends[token.Workflow()]++
			}
		})
		return ends[evidence.WorkflowID("last")] > 0
	})
	for name, want := range map[string]int{"ends": 1, "begins": 0, "last": 1} {
		if wid := evidence.WorkflowID(name); starts[wid] != 1 || ends[wid] != want {
			t.Errorf("%s: %d starts and %d ends", name, starts[wid], ends[wid])
		}
	}
}

// `workflows show` asks a running server; --watch shows each change, and a stream does not hold up an exit.
func TestProcessWorkflowIsShown(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity " + harness.GatewayIdentity
	gateway := site.Start(t)
	ada := map[string]string{"X-Api-Key": "ada", "Workflow-Id": "nightly"}
	gateway.Post(t, harness.ProcCall{Id: "call-1", Header: ada})
	harness.EventuallyWithin(t, harness.ProcBound, "the call is shown", func() bool {
		r := site.Operate(t, "workflows", "show", "nightly", "--tree")
		return r.Code == 0 && strings.Contains(r.Out, "● checkpoint") && strings.Contains(r.Out, "workflow_start") && strings.Contains(r.Out, ": success")
	})
	if r := site.Operate(t, "workflows", "show", "another"); r.Code == 0 || !strings.Contains(r.Err, "Nothing is recorded of a workflow with this id") {
		t.Errorf("%+v", r)
	}
	shown, err := os.Create(filepath.Join(site.Dir, "watched"))
	if err != nil {
		t.Fatal(err)
	}
	defer shown.Close()
	watch := site.Operator(t, "workflows", "show", "nightly", "--watch")
	watch.Stdout = shown
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = watch.Process.Kill()
		_ = watch.Wait()
	}()
	watched := func(times int) {
		t.Helper()
		harness.EventuallyWithin(t, harness.ProcBound, fmt.Sprint("the workflow is shown with ", times, " checkpoints"), func() bool {
			text, err := os.ReadFile(shown.Name())
			parts := strings.Split(string(text), "workflow  ")
			return err == nil && strings.Count(parts[len(parts)-1], " checkpoint ") == times
		})
	}
	watched(1)
	gateway.Post(t, harness.ProcCall{Id: "call-2", Header: ada})
	watched(2)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+site.Addr+"/.well-known/cascade/workflows/nightly", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", "ada")
	req.Header.Set("Authorization", "Bearer "+harness.ProcCredential)
	req.Header.Set("Accept", "text/event-stream")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
	gateway.End(t)
}
