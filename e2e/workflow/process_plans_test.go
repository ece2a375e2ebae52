//go:build unix

package workflow

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// An operator gives a workflow its plan; the plan, and what is known of its nodes, outlive a kill in the
// middle of a call. The call is in doubt then, and the ledger knows its node from the checkpoint alone.
func TestProcessPlanOutlivesAKill(t *testing.T) {
	t.Parallel()
	upstream := harness.NewUpstream(t)
	arrived, gone := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(gone) })
	upstream.On("/pay", func(http.ResponseWriter, *harness.Arrival) {
		close(arrived)
		<-gone
	})
	site := harness.ProcNewSite(t, upstream.Addr)
	file := site.Path("trip.json")
	if err := os.WriteFile(file, []byte(harness.TripPlan), 0o644); err != nil {
		t.Fatal(err)
	}
	site.App = "identity " + harness.GatewayIdentity + "\nplan " + file
	site.Guard = "action hold_budget {\n match path /hold\n }\n action pay {\n match path /pay\n }"
	g := site.Start(t)
	if !strings.Contains(g.Log.String(), "nothing undoes the action") { // A-optional-e, at load
		t.Errorf("no warning:\n%s", g.Log.Tail(6000))
	}
	if got := site.Operate(t, "workflows", "list").Says(t); got != "No workflow has a plan.\n" {
		t.Error(got)
	}
	if got := site.Operate(t, "workflows", "put", "nightly", file).Says(t); !strings.Contains(got, "put by     operator:ada\n") || !strings.Contains(got, "warning    hold reversible") {
		t.Error(got)
	}
	other := site.Path("other.json")
	if err := os.WriteFile(other, []byte(strings.Replace(harness.TripPlan, "mail-2", "mail-3", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	site.Operate(t, "workflows", "put", "nightly", other).Fails(t, "name the version")
	if err := os.WriteFile(site.Path("wrong.json"), []byte(`{"wf_id": "w", "nodes": [{"id": "a"}], "edges": [{"from": "a", "to": "a"}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	site.Operate(t, "workflows", "put", "nightly", site.Path("wrong.json")).Fails(t, "is no plan", "a")

	client := site.Gateway(t)
	named := func(method, path string) harness.Request {
		return harness.Request{Method: method, Path: path, Id: "key-of-" + path, Header: map[string]string{"Workflow-Id": "nightly", "X-Api-Key": "ada"}}
	}
	call := func(method, path string) harness.Reply {
		t.Helper()
		return client.Call(named(method, path))
	}
	if got := call("POST", "/hold"); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if res, err := client.Send(named("POST", "/pay")); err == nil {
			_ = res.Body.Close()
		}
	}()
	<-arrived
	g.Kill()
	<-ended
	site.Start(t)
	call("POST", "/other").Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	harness.Eventually(t, "the states after the kill", func() bool {
		doc := harness.Document[struct{ Plan shownPlan }](t, call("GET", "/.well-known/cascade/workflows/nightly"))
		return fmt.Sprint(doc.Plan.Nodes, doc.Plan.Others) == "[{hold done} {mail-1 pending} {mail-2 pending} {pay failed}] []"
	})
	site.Operate(t, "workflows", "put", "nightly", other, "--replaces", "*").Fails(t, "begun under another plan")
	if got := site.Operate(t, "workflows", "list").Says(t); !strings.Contains(got, "begun ") || strings.Count(got, "\n") != 2 {
		t.Error(got)
	}
}

// A-optional-declarative-workflow-format-d: a call of a node with an approval gate waits for people, on disk, once
// what comes before it is done. It takes no key before, and is sent once afterwards.
func TestProcessNodeWaitsForApproval(t *testing.T) {
	t.Parallel()
	upstream := harness.NewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity " + harness.GatewayIdentity
	site.Guard = "action hold_budget {\n match path /hold\n }\n action pay {\n match path /pay\n }"
	g := site.Start(t)
	file := site.Path("gate.json")
	if err := os.WriteFile(file, []byte(`{"wf_id": "w", "nodes": [{"id": "hold_budget"}, {"id": "pay", "hitl_required": true}], "edges": [{"from": "hold_budget", "to": "pay"}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	site.Operate(t, "workflows", "put", "nightly", file).Says(t)
	client := site.Gateway(t)
	call := func(path string) harness.Reply {
		t.Helper()
		return client.Call(harness.Request{Path: path, Id: "key-of-" + path, Header: map[string]string{"Workflow-Id": "nightly", "X-Api-Key": "ada"}})
	}
	call("/pay").Problem(t, http.StatusConflict, "dependency-not-done")
	if got := call("/hold"); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	asked := call("/pay")
	asked.Problem(t, http.StatusConflict, "approval-required")
	g.Kill()
	site.Start(t)
	if again := call("/pay"); again.Escalation(t) != asked.Escalation(t) {
		t.Errorf("%d %s", again.Status, again.Body)
	}
	upstream.Arrived("/pay", 0)
	site.Decides(t, "approve", asked.Escalation(t))
	if got := call("/pay"); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	upstream.Arrived("/pay", 1)
}

// ADR 0139: two gateways on one database give one answer about a workflow with a plan. A plan that was put at one binds the
// calls at the other; what is done at one lets the next node begin at the other; a stream at one shows what happens at the
// other; their pages are the same; and though one is killed, the workflow has one start and one end.
func TestProcessPostgresFleetPlan(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.NewUpstream(t)
	one, server, there := harness.PostgresSite(t, &harness.ProcUpstream{Addr: upstream.Addr})
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
	two.Store = strings.Replace(one.Store, "node one", "node two", 1)
	for _, site := range []*harness.ProcSite{one, two} {
		site.Guard = "action hold {\n match path /hold\n }\n action pay {\n match path /pay\n }\n action mail {\n match path /mail\n }"
		site.App = "keys file " + one.Path("keys") + "\nidentity " + harness.GatewayIdentity + " {\n key_file " + site.Path("identity") + "\n}"
	}
	a := one.Start(t)
	two.Start(t)
	const page = "/.well-known/cascade/workflows/nightly"
	named := func(method, path string) harness.Request {
		return harness.Request{Method: method, Path: path, Id: "key-of-" + path, Host: one.Addr, Header: map[string]string{"Workflow-Id": "nightly", "X-Api-Key": "ada"}}
	}
	call := func(site *harness.ProcSite, method, path string) harness.Reply {
		t.Helper()
		return site.Gateway(t).Call(named(method, path))
	}
	ran := func(got harness.Reply) {
		t.Helper()
		if got.Header.Get("Execution-Status") != "executed" {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	const text = `{"operator": "ada", "plan": {"wf_id": "trip", "nodes": [{"id": "hold"}, {"id": "pay"}, {"id": "mail"}], "edges": [{"from": "hold", "to": "pay"}, {"from": "pay", "to": "mail"}]}}`
	if status, text, err := a.Admin("POST", "/agent_guard/plans/nightly", "application/json", text); err != nil || status != http.StatusOK {
		t.Fatalf("%d %s %v", status, text, err)
	}
	call(two, "POST", "/pay").Problem(t, http.StatusConflict, "dependency-not-done")
	ran(call(one, "POST", "/hold"))

	follow := named("GET", page)
	stream := two.Gateway(t).Follow(follow, "text/event-stream", "")
	_, _, doc := stream.Next()
	states := func() string {
		var all []string
		for _, n := range doc.Plan.Nodes {
			all = append(all, n.ID+" "+string(n.State))
		}
		return strings.Join(all, ", ")
	}
	if got := states(); got != "hold done, mail pending, pay pending" {
		t.Errorf("at the other gateway: %s", got)
	}
	ran(call(one, "POST", "/pay"))
	for states() != "hold done, mail pending, pay done" {
		switch name, _, change := stream.Next(); name {
		case "change":
			doc.Apply(change)
		case "workflow":
			doc = change
		}
	}
	if first, second := call(one, "GET", page), call(two, "GET", page); first.Status != http.StatusOK || first.Body != second.Body {
		t.Errorf("the page is\n%s\nand at the other gateway\n%s", first.Body, second.Body)
	}

	a.Kill()
	ran(call(two, "POST", "/mail"))
	count := func(event ect.Event) (n int) {
		for _, node := range harness.Document[evidence.Workflow](t, call(two, "GET", page)).Nodes {
			if node.Event == event {
				n++
			}
		}
		return n
	}
	harness.Eventually(t, "its end", func() bool { return count(ect.EventWorkflowComplete) > 0 })
	one.Start(t)
	ran(call(one, "POST", "/mail?again"))
	if starts, ends := count(ect.EventWorkflowStart), count(ect.EventWorkflowComplete); starts != 1 || ends != 1 {
		t.Errorf("%d starts and %d ends", starts, ends)
	}
}
