package plan_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// arrives lets a call of a node come: it is admitted by what the live states say, and that has to be what the
// definitions say of all that has happened.
func (w *world) arrives(t *testing.T, i int) (admitted bool) {
	t.Helper()
	if w.live == nil || w.IntN(20) == 0 { // the gateway has crashed, or has had no room for the workflow
		w.live, w.has = NewLive(), 0
	}
	w.live.Follow(w.plan)
	w.live.Add(w.records[w.has:]...)
	w.has = len(w.records)
	got := w.live.Holds(w.plan.Nodes[i].ID, func(string) bool { return false })
	var want []string
	for _, j := range w.plan.Nodes[i].Before {
		if w.done(j) {
			continue
		}
		want = append(want, fmt.Sprint(w.plan.Nodes[j].ID, " ", w.final(j)))
	}
	var held []string
	for _, h := range got {
		held = append(held, fmt.Sprint(h.Node, " ", h.Final))
	}
	if !slices.Equal(held, want) {
		t.Fatalf("node %d is held by %v, want %v", i, held, want)
	}
	if len(got) > 0 {
		return false
	}
	c := &call{node: i, name: fmt.Sprint("x", len(w.calls))}
	w.calls = append(w.calls, c)
	w.claim(c)
	return true
}

// A-topological-order-a, -c: whatever comes in whatever order, and whatever becomes of it (crashes, doubts, errors,
// rollbacks), a call begins exactly where all before it are done by the definitions. What is left can all be
// done then, or waits for good for something that has failed or was undone.
func TestOrderIsThatOfTheModel(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 19))
		w := &world{Rand: r, plan: parse(t, string(random(r, 1+r.IntN(12), 1+r.IntN(3))))}
		for range 60 {
			if w.IntN(2) == 0 {
				w.arrives(t, w.IntN(len(w.plan.Nodes)))
				continue
			}
			if len(w.calls) == 0 {
				continue
			}
			w.happens(w.calls[w.IntN(len(w.calls))])
		}
		// Now all goes well: what runs ends, doubts are settled, and what was not executed comes again.
		for _, c := range w.calls {
			switch {
			case c.undo == "requested":
				c.undo = "completed"
				w.record(c, workflow.Record{Event: ect.EventRollbackComplete, CheckpointID: c.checkpoint(), Status: c.undo})
			case c.undo == "" && (c.base == "running" || c.base == "in doubt"):
				w.settle(c, workflow.Completed)
			}
		}
		for range w.plan.Nodes {
			for _, i := range w.plan.Order() {
				if _, _, begun := w.model(i); !begun && w.arrives(t, i) {
					w.settle(w.calls[len(w.calls)-1], workflow.Completed)
				}
			}
		}
		for i := range w.plan.Nodes {
			_, _, begun := w.model(i)
			stuck := slices.ContainsFunc(w.plan.Nodes[i].Before, func(j int) bool { return !w.done(j) })
			if !begun && !stuck {
				t.Fatalf("seed %d: node %d has not begun, and nothing holds it", seed, i)
			}
		}
	}
}

// A task that is no call of the gateway's is done for the call whose token names it as a parent, and for no
// other (ATD, "Node States").
func TestLiveTaskOfAnAgent(t *testing.T) {
	d := parse(t, `{"wf_id": "w", "nodes": [{"id": "think"}, {"id": "pay"}], "edges": [{"from": "think", "to": "pay"}]}`)
	l := NewLive()
	l.Follow(d)
	holds := func(named string) string {
		return fmt.Sprint(l.Holds("pay", func(id string) bool { return id == named }))
	}
	if got := holds("1"); got != "[{think pending  false}]" {
		t.Error(got)
	}
	l.Add(workflow.Record{ID: "1", Action: "think", Issuer: "agent"})
	if got := holds("1") + holds("2"); got != "[][{think running  false}]" {
		t.Error(got)
	}
	l.Add(workflow.Record{ID: "c", Event: ect.EventCheckpoint, Own: true, Issuer: "gateway", Parents: []string{"1"}, Execution: "x", Node: "think"})
	if got := holds("1"); got != "[{think running  false}]" {
		t.Error(got)
	}
	if got := l.Before("pay"); !slices.Equal(got, []string{"1", "c"}) {
		t.Error(got)
	}
	// A plan that takes the place of another one has states of its own.
	l.Follow(parse(t, `{"wf_id": "v", "nodes": [{"id": "pay"}, {"id": "think"}], "edges": [{"from": "pay", "to": "think"}]}`))
	if got := fmt.Sprint(l.Holds("pay", nil), l.Holds("think", nil)); got != "[] [{pay pending  false}]" {
		t.Error(got)
	}
}

// BenchmarkAdmission is the bar: of 10,000 nodes each is admitted in at most 5 µs. The plan has few roots,
// so that most nodes wait for two others.
func BenchmarkAdmission(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 3))
	w := &world{Rand: r, plan: parse(b, string(random(r, MaxNodes, 2)))}
	l := NewLive()
	l.Follow(w.plan)
	order := w.plan.Order()
	for _, i := range order {
		c := &call{node: i, name: fmt.Sprint("x", i)}
		w.claim(c)
		w.settle(c, workflow.Completed)
	}
	l.Add(w.records...)
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		if held := l.Holds(w.plan.Nodes[order[n%MaxNodes]].ID, nil); held != nil {
			b.Fatal(held)
		}
		n++
	}
}

// BenchmarkAdmissionAndRecords has with each admission what the call adds to the states: the records of its claim and
// of its outcome.
func BenchmarkAdmissionAndRecords(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 3))
	w := &world{Rand: r, plan: parse(b, string(random(r, MaxNodes, 2)))}
	l, order, n := NewLive(), w.plan.Order(), 0
	l.Follow(w.plan)
	b.ReportAllocs()
	for b.Loop() {
		if n == MaxNodes {
			b.StopTimer()
			l, n, w.records = NewLive(), 0, nil
			l.Follow(w.plan)
			b.StartTimer()
		}
		if held := l.Holds(w.plan.Nodes[order[n]].ID, nil); held != nil {
			b.Fatal(held)
		}
		c := &call{node: order[n], name: fmt.Sprint("x", n)}
		from := len(w.records)
		w.claim(c)
		w.settle(c, workflow.Completed)
		l.Add(w.records[from])
		l.Add(w.records[from+1])
		n++
	}
}
