package graph_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	. "github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// teller tells of calls as the gateway does.
type teller struct {
	*gate
	told    *evidence.Evidence
	witness *evidence.Witness
}

func newTeller(t *testing.T) *teller {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	told, err := evidence.Open(t.Context(), evidence.Options{Store: memory.New(memory.Options{}), Sealer: seal.Generate(), Node: "n", Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := told.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	witness, err := told.Witness(gateway, ect.Draft00, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, func(o *Options) { o.Log, o.HeadKey = told.Log(), told.HeadKey() })
	g.log = told.Log()
	return &teller{g, told, witness}
}

// tell records drafts and waits for their places.
func (g *teller) tell(drafts ...*ect.Draft) {
	g.t.Helper()
	if err := g.told.Append(g.t.Context(), time.Now(), nil, drafts...); err != nil {
		g.t.Fatal(err)
	}
	for _, d := range drafts {
		if _, err := g.log.Wait(g.t.Context(), d.Workflow(), d.ID()); err != nil {
			g.t.Fatal(err)
		}
	}
}

// claim announces a call and gives the id of its checkpoint.
func (g *teller) claim(key byte, workflow string, parents ...string) (*evidence.Call, string) {
	g.t.Helper()
	c := &evidence.Call{
		Key: guard.Key{key}, Caller: caller, Action: "pay", Workflow: evidence.WorkflowID(workflow), Parents: parents,
		Target: "POST example.com/pay", RollbackURI: "https://gateway.example/.well-known/cascade/rollback", TTL: time.Hour,
	}
	draft, err := g.witness.Checkpoint(time.Now(), c)
	if err != nil {
		g.t.Fatal(err)
	}
	g.tell(draft)
	return c, draft.ID()
}

func (g *teller) settle(c *evidence.Call, o evidence.Outcome) {
	g.t.Helper()
	drafts, err := g.witness.Outcome(time.Now(), c, &o)
	if err != nil {
		g.t.Fatal(err)
	}
	g.tell(drafts...)
}

// tasks are the states of a workflow's tasks.
func (g *teller) tasks(workflow, want string) workflowDoc {
	g.t.Helper()
	var doc workflowDoc
	g.get("workflows/"+workflow, asCaller).read(http.StatusOK, &doc)
	var got []string
	for _, state := range []string{"running", "done", "failed"} {
		for range doc.Tasks[state] {
			got = append(got, state)
		}
	}
	if strings.Join(got, " ") != want {
		g.t.Errorf("tasks %v, want %s", doc.Tasks, want)
	}
	return doc
}

// A-node-states-d and P6: the states that follow from what the gateway really tells
// (ADR 0023), from the claim to a doubt that is settled.
func TestStatesOfWhatTheGatewayTells(t *testing.T) {
	g := newTeller(t)
	token := g.add(alice, flow, "act", nil)
	c, id := g.claim(1, flow, token.ID())
	g.tasks(flow, "running")
	g.settle(c, evidence.Outcome{Checkpoint: id, Verdict: guard.InDoubt, Cause: guard.CauseDeadline})
	doc := g.tasks(flow, "failed")
	for _, n := range doc.Nodes {
		if n.JTI == token.ID() && (n.Detail != "in_doubt" || n.WorstSeverity != "critical") {
			t.Errorf("%+v", n)
		}
	}
	g.settle(c, evidence.Outcome{Checkpoint: id, Verdict: guard.Completed, By: "operator"})
	g.tasks(flow, "done")
	// An answer that says that it failed.
	other := g.add(alice, flow, "act", nil)
	c, id = g.claim(2, flow, other.ID())
	g.settle(c, evidence.Outcome{Checkpoint: id, Verdict: guard.Completed, Status: 500})
	g.tasks(flow, "done failed")
}

// A call without tokens in a workflow that has a name, another one within it, and one
// that was made again.
func TestNestedCallsWithoutTokens(t *testing.T) {
	g := newTeller(t)
	const name = "nightly billing"
	path := "nightly%20billing"
	outer, outerID := g.claim(1, name)
	inner, innerID := g.claim(2, name, outerID)
	g.tasks(path, "running running")
	g.settle(inner, evidence.Outcome{Checkpoint: innerID, Verdict: guard.Released, Cause: guard.CauseNotSent})
	g.tasks(path, "running failed")
	inner, innerID = g.claim(2, name, outerID)
	g.tasks(path, "running running")
	g.settle(inner, evidence.Outcome{Checkpoint: innerID, Verdict: guard.Completed, Status: 201})
	g.tasks(path, "running done")
	g.settle(outer, evidence.Outcome{Checkpoint: outerID, Verdict: guard.Completed, Status: 200})
	doc := g.tasks(path, "done done")
	if doc.Status != "success" || doc.WID != evidence.WorkflowID(name) {
		t.Errorf("%+v", doc)
	}
	var entry entryDoc
	g.get("ledger/entries?wid="+path+"&jti="+outerID, asCaller).read(http.StatusOK, &entry)
	if entry.JTI != outerID || !entry.Signed {
		t.Errorf("%+v", entry)
	}
	g.get("workflows/"+path, asMallory).refused(404, "workflow-unknown", "")
}

// Where tokens are believed, a call without one has a workflow that is made of its name
// even where that is a UUID; its caller asks by the name.
func TestWorkflowOfANameThatTokensUseToo(t *testing.T) {
	g := newTeller(t)
	g.add(alice, flow, "act", nil)
	c := &evidence.Call{
		Key: guard.Key{1}, Caller: caller, Action: "pay", Workflow: evidence.NamedWorkflowID(flow), Target: "POST example.com/pay",
		RollbackURI: "https://gateway.example/.well-known/cascade/rollback", TTL: time.Hour,
	}
	draft, err := g.witness.Checkpoint(time.Now(), c)
	if err != nil {
		t.Fatal(err)
	}
	g.tell(draft)
	doc := g.tasks(flow, "running")
	if doc.WID != evidence.NamedWorkflowID(flow) || len(doc.Nodes) != 1 {
		t.Errorf("%+v", doc)
	}
	var theirs workflowDoc
	g.get("workflows/"+flow, asAlice).read(http.StatusOK, &theirs)
	if theirs.WID != flow || len(theirs.Nodes) != 1 {
		t.Errorf("%+v", theirs)
	}
	g.get("ledger/entries?wid="+flow+"&jti="+draft.ID(), asCaller).read(http.StatusOK, &struct{}{})
	g.get("ledger/entries?wid="+flow+"&jti="+draft.ID(), asAlice).refused(404, "entry-unknown", "")
}
