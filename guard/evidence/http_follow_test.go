package evidence

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// A document and its changes, one after the other, are the documents that they were made of; what has gone is
// no change.
func TestChangesAreTheDocument(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 3))
	states := []workflow.State{workflow.Pending, workflow.Running, workflow.Done, workflow.Failed}
	doc := Workflow{ID: "w", Roots: []string{}, Leaves: []string{}, Nodes: []nodeDocument{}, Edges: []edgeDocument{}}
	followed := doc
	for step := range 300 {
		next := doc
		next.Nodes, next.Edges = slices.Clone(doc.Nodes), slices.Clone(doc.Edges)
		switch r.IntN(5) {
		case 0:
			id := fmt.Sprint("n", len(next.Nodes))
			if n := len(next.Nodes); n > 0 {
				next.Edges = append(next.Edges, edgeDocument{From: next.Nodes[r.IntN(n)].ID, To: id, Kind: workflow.Contains})
			}
			next.Nodes = append(next.Nodes, nodeDocument{ID: id, State: states[r.IntN(4)]})
		case 1, 2:
			if n := len(next.Nodes); n > 0 {
				next.Nodes[r.IntN(n)].State = states[r.IntN(4)]
			}
		case 3:
			next.Status = workflow.Status(states[r.IntN(4)])
		case 4:
			p := plan.Progress{PlanID: "trip", Version: "1", Others: []string{}}
			for i := range 5 {
				p.Nodes = append(p.Nodes, plan.Status{ID: fmt.Sprint(i), State: states[r.IntN(4)]})
			}
			if next.Plan = &p; doc.Plan == nil {
				doc.Plan = &plan.Progress{PlanID: "trip", Version: "1", Nodes: slices.Clone(p.Nodes), Others: []string{}}
				followed.Plan = &plan.Progress{PlanID: "trip", Version: "1", Nodes: slices.Clone(p.Nodes), Others: []string{}}
			}
		}
		change, plain := doc.change(&next)
		if !plain {
			t.Fatalf("step %d: something has gone", step)
		}
		text, err := json.Marshal(change)
		received := new(Workflow)
		if err == nil {
			err = json.Unmarshal(text, received)
		}
		if err != nil {
			t.Fatal(err)
		}
		followed.Apply(received)
		if got, want := followed.version(), next.version(); got != want {
			t.Fatalf("step %d: %+v\n%+v", step, followed, next)
		}
		doc = next
	}
	fewer := doc
	fewer.Nodes = doc.Nodes[1:]
	if _, plain := doc.change(&fewer); plain {
		t.Error("a token that has gone is a change")
	}
	fewer = doc
	fewer.Edges = doc.Edges[1:]
	if _, plain := doc.change(&fewer); plain {
		t.Error("an edge that has gone is a change")
	}
	other := *doc.Plan
	other.Version = "2"
	fewer = doc
	if fewer.Plan = &other; true {
		if _, plain := doc.change(&fewer); plain {
			t.Error("another plan is a change")
		}
	}
}

// Followers are woken by their workflow alone, and there are so many of them at most: in all, and of a reader.
func TestFollowersAreBounded(t *testing.T) {
	f := new(Followers)
	f.Changed("w") // nobody follows
	woken := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	one, leave, _ := f.join("w", router.Reader{Issuer: "a"})
	two, _, _ := f.join("v", router.Reader{Issuer: "a"})
	f.Changed("w")
	f.Changed("w") // waits for nobody
	if !woken(one) || woken(one) || woken(two) {
		t.Error("not who follows is woken, once")
	}
	for range maxOfReader - 2 {
		if _, _, ok := f.join("w", router.Reader{Issuer: "a"}); !ok {
			t.Fatal("refused")
		}
	}
	if _, _, ok := f.join("w", router.Reader{Issuer: "a"}); ok {
		t.Error("a reader has no bound")
	}
	leave()
	if f.Changed("w"); woken(one) {
		t.Error("who has left is woken")
	}
	for i := range maxFollowers - maxOfReader + 1 {
		if _, _, ok := f.join("w", router.Reader{Issuer: fmt.Sprint("b", i)}); !ok {
			t.Fatal("refused")
		}
	}
	if _, _, ok := f.join("w", router.Reader{Issuer: "c"}); ok {
		t.Error("all together have no bound")
	}
}

// A workflow is drawn as its plan where it has one, with the nodes that have no call yet; else as its tokens.
func TestWorkflowDrawing(t *testing.T) {
	at := time.Date(2026, 11, 26, 5, 0, 0, 0, time.UTC)
	doc := Workflow{
		ID: "w", Status: workflow.StatusRunning, Tasks: map[workflow.State]int{workflow.Done: 1}, Holds: []holdDocument{{Escalation: "e1", State: "held"}},
		Nodes: []nodeDocument{{ID: "t1", Action: "pay", Issuer: "a", State: workflow.Done, Time: at}, {ID: "t2", Action: "checkpoint"}},
		Edges: []edgeDocument{{From: "t1", To: "t2"}, {From: "t2", To: "t1"}, {From: "t1", To: "elsewhere"}},
	}
	p := doc.Drawing()
	if got := fmt.Sprint(p.Title, p.Notes, len(p.Nodes), p.Edges, p.Nodes[1].Layer); got != "Workflow w: running[tasks: 1 done held: escalation e1] 2 [{0 1}] 1" {
		t.Error(got)
	}
	doc.Plan = &plan.Progress{PlanID: "trip", Version: "v1", Others: []string{"x"}, Nodes: []plan.Status{
		{ID: "hold", Label: "hold_budget", State: workflow.Done, Begun: at, Ended: at.Add(time.Second)},
		{ID: "pay", Level: 1, After: []string{"hold"}, State: workflow.Pending, Ready: true},
		{ID: "mail", Level: 2, After: []string{"pay"}, State: workflow.Pending, Holds: []plan.Hold{{Node: "pay", Final: true}}},
	}}
	p = doc.Drawing()
	if len(p.Nodes) != 3 || fmt.Sprint(p.Edges) != "[{0 1} {1 2}]" || p.Nodes[1].State != "pending, can begin" || p.Nodes[2].Lines[1] != "waits for pay (for ever)" ||
		p.Notes[2] != "plan trip, version v1; 1 calls are no node of it" || p.Nodes[0].Lines[0] != "hold_budget" || p.Nodes[0].Lines[3] != "ended 2026-11-26T05:00:01.000Z" {
		t.Errorf("%+v", p)
	}
}
