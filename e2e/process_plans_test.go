//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// An operator gives a workflow its plan; the plan, and what is known of its nodes, outlive a kill in the
// middle of a call. The call is in doubt then, and the ledger knows its node from the checkpoint alone.
func TestProcessPlanOutlivesAKill(t *testing.T) {
	t.Parallel()
	upstream := newUpstream(t)
	arrived, gone := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(gone) })
	upstream.on("/pay", func(http.ResponseWriter, *arrival) {
		close(arrived)
		<-gone
	})
	site := procNewSite(t, upstream.addr)
	file := site.path("trip.json")
	if err := os.WriteFile(file, []byte(tripPlan), 0o644); err != nil {
		t.Fatal(err)
	}
	site.app = "identity " + gatewayIdentity + "\nplan " + file
	site.guard = "action hold_budget {\n match path /hold\n }\n action pay {\n match path /pay\n }"
	g := site.start(t)
	if !strings.Contains(g.log.String(), "nothing undoes the action") { // A-optional-e, at load
		t.Errorf("no warning:\n%s", g.log.tail(6000))
	}
	if got := site.operate(t, "workflows", "list").says(t); got != "No workflow has a plan.\n" {
		t.Error(got)
	}
	if got := site.operate(t, "workflows", "put", "nightly", file).says(t); !strings.Contains(got, "put by     operator:ada\n") || !strings.Contains(got, "warning    hold reversible") {
		t.Error(got)
	}
	other := site.path("other.json")
	if err := os.WriteFile(other, []byte(strings.Replace(tripPlan, "mail-2", "mail-3", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	site.operate(t, "workflows", "put", "nightly", other).fails(t, "name the version")
	if err := os.WriteFile(site.path("wrong.json"), []byte(`{"wf_id": "w", "nodes": [{"id": "a"}], "edges": [{"from": "a", "to": "a"}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	site.operate(t, "workflows", "put", "nightly", site.path("wrong.json")).fails(t, "is no plan", "a")

	client := site.gateway(t)
	named := func(method, path string) request {
		return request{method: method, path: path, id: "key-of-" + path, header: map[string]string{"Workflow-Id": "nightly", "X-Api-Key": "ada"}}
	}
	call := func(method, path string) reply {
		t.Helper()
		return client.call(named(method, path))
	}
	if got := call("POST", "/hold"); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if res, err := client.send(named("POST", "/pay")); err == nil {
			_ = res.Body.Close()
		}
	}()
	<-arrived
	g.kill()
	<-ended
	site.start(t)
	call("POST", "/other").problem(t, http.StatusUnprocessableEntity, "node-unknown")
	eventually(t, "the states after the kill", func() bool {
		doc := document[struct{ Plan shownPlan }](t, call("GET", "/.well-known/cascade/workflows/nightly"))
		return fmt.Sprint(doc.Plan.Nodes, doc.Plan.Others) == "[{hold done} {mail-1 pending} {mail-2 pending} {pay failed}] []"
	})
	site.operate(t, "workflows", "put", "nightly", other, "--replaces", "*").fails(t, "begun under another plan")
	if got := site.operate(t, "workflows", "list").says(t); !strings.Contains(got, "begun ") || strings.Count(got, "\n") != 2 {
		t.Error(got)
	}
}

// A-optional-declarative-workflow-format-d: a call of a node with an approval gate waits for people, on disk, once
// what comes before it is done. It takes no key before, and is sent once afterwards.
func TestProcessNodeWaitsForApproval(t *testing.T) {
	t.Parallel()
	upstream := newUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity " + gatewayIdentity
	site.guard = "action hold_budget {\n match path /hold\n }\n action pay {\n match path /pay\n }"
	g := site.start(t)
	file := site.path("gate.json")
	if err := os.WriteFile(file, []byte(`{"wf_id": "w", "nodes": [{"id": "hold_budget"}, {"id": "pay", "hitl_required": true}], "edges": [{"from": "hold_budget", "to": "pay"}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	site.operate(t, "workflows", "put", "nightly", file).says(t)
	client := site.gateway(t)
	call := func(path string) reply {
		t.Helper()
		return client.call(request{path: path, id: "key-of-" + path, header: map[string]string{"Workflow-Id": "nightly", "X-Api-Key": "ada"}})
	}
	call("/pay").problem(t, http.StatusConflict, "dependency-not-done")
	if got := call("/hold"); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	asked := call("/pay")
	asked.problem(t, http.StatusConflict, "approval-required")
	g.kill()
	site.start(t)
	if again := call("/pay"); again.escalation(t) != asked.escalation(t) {
		t.Errorf("%d %s", again.status, again.body)
	}
	upstream.arrived("/pay", 0)
	site.decides(t, "approve", asked.escalation(t))
	if got := call("/pay"); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	upstream.arrived("/pay", 1)
}

// ADR 0139: two gateways on one database give one answer about a workflow with a plan. A plan that was put at one binds the
// calls at the other; what is done at one lets the next node begin at the other; a stream at one shows what happens at the
// other; their pages are the same; and though one is killed, the workflow has one start and one end.
func TestProcessPostgresFleetPlan(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := newUpstream(t)
	one, server, there := postgresSite(t, &procUpstream{addr: upstream.addr})
	if !there {
		return
	}
	two := withPostgres(procNewSite(t, upstream.addr), server.DSN())
	two.store = strings.Replace(one.store, "node one", "node two", 1)
	for _, site := range []*procSite{one, two} {
		site.guard = "action hold {\n match path /hold\n }\n action pay {\n match path /pay\n }\n action mail {\n match path /mail\n }"
		site.app = "keys file " + one.path("keys") + "\nidentity " + gatewayIdentity + " {\n key_file " + site.path("identity") + "\n}"
	}
	a := one.start(t)
	two.start(t)
	const page = "/.well-known/cascade/workflows/nightly"
	named := func(method, path string) request {
		return request{method: method, path: path, id: "key-of-" + path, host: one.addr, header: map[string]string{"Workflow-Id": "nightly", "X-Api-Key": "ada"}}
	}
	call := func(site *procSite, method, path string) reply {
		t.Helper()
		return site.gateway(t).call(named(method, path))
	}
	ran := func(got reply) {
		t.Helper()
		if got.header.Get("Execution-Status") != "executed" {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	const text = `{"operator": "ada", "plan": {"wf_id": "trip", "nodes": [{"id": "hold"}, {"id": "pay"}, {"id": "mail"}], "edges": [{"from": "hold", "to": "pay"}, {"from": "pay", "to": "mail"}]}}`
	if status, text, err := a.admin("POST", "/agent_guard/plans/nightly", "application/json", text); err != nil || status != http.StatusOK {
		t.Fatalf("%d %s %v", status, text, err)
	}
	call(two, "POST", "/pay").problem(t, http.StatusConflict, "dependency-not-done")
	ran(call(one, "POST", "/hold"))

	follow := named("GET", page)
	stream := two.gateway(t).follow(follow, "text/event-stream", "")
	_, _, doc := stream.next()
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
		switch name, _, change := stream.next(); name {
		case "change":
			doc.Apply(change)
		case "workflow":
			doc = change
		}
	}
	if first, second := call(one, "GET", page), call(two, "GET", page); first.status != http.StatusOK || first.body != second.body {
		t.Errorf("the page is\n%s\nand at the other gateway\n%s", first.body, second.body)
	}

	a.kill()
	ran(call(two, "POST", "/mail"))
	count := func(event ect.Event) (n int) {
		for _, node := range document[api.Workflow](t, call(two, "GET", page)).Nodes {
			if node.Event == event {
				n++
			}
		}
		return n
	}
	eventually(t, "its end", func() bool { return count(ect.EventWorkflowComplete) > 0 })
	one.start(t)
	ran(call(one, "POST", "/mail?again"))
	if starts, ends := count(ect.EventWorkflowStart), count(ect.EventWorkflowComplete); starts != 1 || ends != 1 {
		t.Errorf("%d starts and %d ends", starts, ends)
	}
}
