//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// ATD "Workflow Boundary ECTs": the start and the end of a workflow are recorded once each, however often the
// gateway is killed: between the call and its end, and right behind the end.
func TestCrashBetweenBoundaries(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity " + gatewayIdentity + "\nworkflow_idle 1s"
	const ended = "a workflow has ended"
	call := func(g *procGateway, workflow, id string) {
		t.Helper()
		if a := g.post(t, procCall{id: id, header: map[string]string{"X-Api-Key": "ada", "Workflow-Id": workflow}}); !a.executed() {
			t.Fatalf("%v", a)
		}
	}
	gateway := site.start(t)
	for i := range 3 {
		call(gateway, fmt.Sprint("w", i), fmt.Sprint("call-", i))
	}
	gateway.kill() // nobody has waited
	gateway = site.start(t)
	select {
	case <-gateway.log.when(ended):
	case <-gateway.dead:
		t.Fatal("the gateway has died")
	}
	gateway.kill() // perhaps before the others
	gateway = site.start(t)
	call(gateway, "last", "call-last")
	wids, starts, ends := map[string]bool{}, map[string]int{}, map[string]int{}
	eventuallyWithin(t, procBound, "four ends", func() bool {
		clear(starts)
		clear(ends)
		site.exported(t, func(token *ect.Unverified) {
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
	upstream, stages := procNewUpstream(t), procNewStages(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity " + gatewayIdentity
	site.store = "staged " + site.path("data") + " " + stages.url
	gateway := site.start(t)
	for _, name := range []string{"ends", "begins", "last"} {
		status, text, err := gateway.admin("POST", "/agent_guard/plans/"+name, "application/json", `{"operator": "ada", "plan": {"wf_id": "one", "nodes": [{"id": "default"}]}}`)
		if err != nil || status != http.StatusOK {
			t.Fatalf("%d %s %v", status, text, err)
		}
	}
	call := func(name string) procCall {
		return procCall{id: "call-" + name, header: map[string]string{"X-Api-Key": "ada", "Workflow-Id": name}}
	}
	killed := func(reached <-chan struct{}) {
		t.Helper()
		waitWithin(t, procBound, reached, "the commit")
		gateway.kill()
		gateway = site.launch(t)
	}
	started := func() {
		t.Helper()
		if !gateway.ready(t) {
			t.Fatalf("the gateway did not start:\n%s", gateway.log.tail(6000))
		}
	}
	reached := stages.arm("before workflow end")
	if a := gateway.post(t, call("ends")); !a.executed() {
		t.Fatalf("%v", a)
	}
	waitWithin(t, procBound, reached, "its end")
	again := stages.arm("after workflow end") // of the next process
	killed(reached)
	killed(again)
	started()
	reached = stages.arm("after claim")
	lost := gateway.begin(t.Context(), procDial(), call("begins"))
	killed(reached)
	waitWithin(t, procBound, lost, "the call ends")
	started()
	wantProcDoubt(t, gateway.post(t, call("begins"))) // so its plan goes on
	if a := gateway.post(t, call("last")); !a.executed() {
		t.Fatalf("%v", a)
	}
	var starts, ends map[string]int
	eventuallyWithin(t, procBound, "the end of the last workflow", func() bool {
		starts, ends = map[string]int{}, map[string]int{}
		site.exported(t, func(token *ect.Unverified) {
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
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity " + gatewayIdentity
	gateway := site.start(t)
	ada := map[string]string{"X-Api-Key": "ada", "Workflow-Id": "nightly"}
	gateway.post(t, procCall{id: "call-1", header: ada})
	eventuallyWithin(t, procBound, "the call is shown", func() bool {
		r := site.operate(t, "workflows", "show", "nightly", "--tree")
		return r.code == 0 && strings.Contains(r.out, "● checkpoint") && strings.Contains(r.out, "workflow_start") && strings.Contains(r.out, ": success")
	})
	if r := site.operate(t, "workflows", "show", "another"); r.code == 0 || !strings.Contains(r.err, "Nothing is recorded of a workflow with this id") {
		t.Errorf("%+v", r)
	}
	shown, err := os.Create(filepath.Join(site.dir, "watched"))
	if err != nil {
		t.Fatal(err)
	}
	defer shown.Close()
	watch := site.operator(t, "workflows", "show", "nightly", "--watch")
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
		eventuallyWithin(t, procBound, fmt.Sprint("the workflow is shown with ", times, " checkpoints"), func() bool {
			text, err := os.ReadFile(shown.Name())
			parts := strings.Split(string(text), "workflow  ")
			return err == nil && strings.Count(parts[len(parts)-1], " checkpoint ") == times
		})
	}
	watched(1)
	gateway.post(t, procCall{id: "call-2", header: ada})
	watched(2)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+site.addr+"/.well-known/cascade/workflows/nightly", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", "ada")
	req.Header.Set("Authorization", "Bearer "+procCredential)
	req.Header.Set("Accept", "text/event-stream")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
	gateway.end(t)
}
