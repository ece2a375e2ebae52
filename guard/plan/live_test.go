package plan_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// arrives lets a call of a node come: it is admitted by what the live states say, and that has to be what the
// definitions say of all that has happened.
func (w *world) arrives(t *testing.T, i int) (admitted bool) {
	t.Helper()
	if w.IntN(20) == 0 { // the gateway has crashed, or has had no room for the workflow
		w.live = nil
	}
	got := w.part().Holds(w.plan, w.plan.Nodes[i].ID, func(string) bool { return false })
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
		w := shared(r, parse(t, string(random(r, 1+r.IntN(12), 1+r.IntN(3)))))
		for range 60 {
			w.stranger.step()
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
	part := func() *Part { return l.Part([]string{"agent"}, nil) }
	holds := func(named string) string {
		return fmt.Sprint(part().Holds(d, "pay", func(id string) bool { return id == named }))
	}
	if got := holds("1"); got != "[{think pending  false}]" {
		t.Error(got)
	}
	l.Add(workflow.Record{ID: "1", Action: "think", Issuer: "agent", By: "agent"})
	if got := holds("1") + holds("2"); got != "[][{think running  false}]" {
		t.Error(got)
	}
	l.Add(workflow.Record{ID: "c", Event: ect.EventCheckpoint, Own: true, Issuer: "gateway", Parents: []string{"1"}, Execution: "x", Node: "think"})
	if got := holds("1"); got != "[{think running  false}]" {
		t.Error(got)
	}
	if got := part().Before(d, "pay"); !slices.Equal(got, []string{"1", "c"}) {
		t.Error(got)
	}
	// A plan that takes the place of another one has states of its own.
	d = parse(t, `{"wf_id": "v", "nodes": [{"id": "pay"}, {"id": "think"}], "edges": [{"from": "pay", "to": "think"}]}`)
	if got := fmt.Sprint(part().Holds(d, "pay", nil), part().Holds(d, "think", nil)); got != "[] [{pay pending  false}]" {
		t.Error(got)
	}
}

// P3: of a workflow each sees what is linked to its own, and nothing else counts. Who joins by a token sees what that
// follows from; parts that somebody links are one from then on, and what reports on one joins nothing to it.
func TestPartsOfAWorkflow(t *testing.T) {
	d := parse(t, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}, {"id": "c"}], "edges": [{"from": "a", "to": "c"}, {"from": "b", "to": "c"}]}`)
	l := NewLive()
	call := func(id, by, node string, parents ...string) {
		l.Add(workflow.Record{ID: id, By: by, Event: ect.EventCheckpoint, Own: true, Issuer: "gateway", Parents: parents, Execution: "of " + id, Node: node},
			workflow.Record{ID: id + "/1", By: by, Own: true, Issuer: "gateway", Parents: append(parents, id), Execution: "of " + id, Node: node, Action: node, Outcome: workflow.Completed})
	}
	want := func(who string, holds string, called bool, named ...string) {
		t.Helper()
		p := l.Part([]string{who}, named)
		var got []string
		for _, h := range p.Holds(d, "c", nil) {
			got = append(got, h.Node+" "+string(h.State))
		}
		if fmt.Sprint(got) != holds || p.Called() != called {
			t.Errorf("%s %v: %v, called %v; want %s, %v", who, named, got, p.Called(), holds, called)
		}
	}
	none := "[a pending b pending]"
	want("ada", none, false)
	want("bob", none, false, "1")
	call("1", "ada", "a")
	want("ada", "[b pending]", true)
	want("bob", none, false)
	want("bob", "[b pending]", true, "1")
	want("bob", none, false, "of another workflow")
	want("bob", none, false) // to have asked is no part
	call("2", "bob", "b", "0")
	want("bob", "[a pending]", true)
	want("ada", "[b pending]", true)
	want("cyd", "[]", true, "1", "2")

	// A report is seen by whom it is about, and shows its issuer nothing.
	l.Add(workflow.Record{ID: "e", Event: ect.EventError, Issuer: "cyd", Parents: []string{"1"}, Stranger: true, Report: true})
	want("cyd", none, false)
	want("cyd", none, false, "e")
	// Links of parents that come later, and of what comes with an error of the gateway.
	l.Add(workflow.Record{ID: "0", Issuer: "dan", By: "dan", Action: "think"})
	want("dan", "[a pending]", true)
	call("3", "cyd", "", "1/1", "2/1")
	for _, who := range []string{"ada", "bob", "cyd", "dan"} {
		want(who, "[]", true)
	}
	if l.Part([]string{"ada"}, nil).Has("of another workflow") || !l.Part([]string{"dan"}, nil).Has("1") {
		t.Error("what dan takes part in is not all")
	}

	// As many are kept as have room, and those that went are found again.
	for i := range 100 {
		want(fmt.Sprint("stranger ", i), none, false)
	}
	want("ada", "[]", true)

	// What a call links changes nothing of what was there, and yet it is in the part.
	l = NewLive()
	call("1", "ada", "a")
	call("2", "bob", "b")
	want("ada", "[b pending]", true)
	want("bob", "[a pending]", true)
	call("3", "cyd", "", "1/1", "2/1")
	want("ada", "[]", true)
	want("bob", "[]", true)
}

// What a call costs does not grow with the plan, nor with the calls before it.
func TestCostOfACallDoesNotGrowWithThePlan(t *testing.T) {
	cost := func(nodes int) (each float64) {
		text := &strings.Builder{}
		text.WriteString(`{"wf_id": "w", "nodes": [{"id": "n0"}`)
		for i := 1; i < nodes; i++ {
			fmt.Fprintf(text, `, {"id": "n%d"}`, i)
		}
		text.WriteString(`], "edges": [{"from": "n0", "to": "n1"}`)
		for i := 2; i < nodes; i++ {
			fmt.Fprintf(text, `, {"from": "n%d", "to": "n%d"}`, i-2, i)
		}
		d := parse(t, text.String()+"]}")
		l, n := NewLive(), 0
		l.Add(workflow.Record{ID: "start", Event: ect.EventWorkflowStart, Own: true, Issuer: "gateway"})
		holds := func(i int) []Hold {
			return l.Part([]string{"ada"}, nil).Holds(d, d.Nodes[i].ID, nil)
		}
		call := func() {
			id, node := fmt.Sprint(n), d.Nodes[n].ID
			if held := holds(n); held != nil {
				t.Fatal(node, held)
			}
			l.Add(workflow.Record{ID: id, By: "ada", Event: ect.EventCheckpoint, Own: true, Issuer: "gateway", Execution: "of " + id, Node: node})
			if held := holds(nodes - 1); len(held) != 1 {
				t.Fatal(held)
			}
			l.Add(workflow.Record{ID: id + "/1", By: "ada", Own: true, Issuer: "gateway", Parents: []string{id}, Execution: "of " + id, Node: node, Outcome: workflow.Completed})
			n++
		}
		for range nodes/2 - 20 {
			call()
		}
		return testing.AllocsPerRun(10, call)
	}
	if few, many := cost(100), cost(MaxNodes); many > few+3 { // what grows is copied at times
		t.Errorf("%v allocations, and %v among %d nodes", few, many, MaxNodes)
	}
}

// A refused call looks at each node that it waits for once, however many nodes hold it.
func TestRefusedCallLooksAtEachNodeOnce(t *testing.T) {
	const roots, holding = 1000, 500
	text, edges := &strings.Builder{}, &strings.Builder{}
	text.WriteString(`{"wf_id": "w", "nodes": [{"id": "middle"}, {"id": "last"}`)
	for i := range roots {
		fmt.Fprintf(text, `, {"id": "r%d"}`, i)
		fmt.Fprintf(edges, `{"from": "r%d", "to": "middle"}, `, i)
	}
	for i := range holding {
		fmt.Fprintf(text, `, {"id": "h%d"}`, i)
		fmt.Fprintf(edges, `{"from": "middle", "to": "h%d"}, {"from": "h%[1]d", "to": "last"}, `, i)
	}
	d := parse(t, text.String()+`], "edges": [`+strings.TrimSuffix(edges.String(), ", ")+"]}")
	l := NewLive()
	for _, node := range []string{"elsewhere", "r0"} { // what has failed is none of the plan's nodes, and then one
		l.Add(workflow.Record{ID: node, By: "ada", Issuer: "ada", Action: node},
			workflow.Record{ID: node + " failed", By: "ada", Issuer: "ada", Event: ect.EventError, Parents: []string{node}})
		var held []Hold
		if n := testing.AllocsPerRun(3, func() { held = l.Part([]string{"ada"}, nil).Holds(d, "last", nil) }); n > holding/2 {
			t.Errorf("%v allocations", n)
		}
		final := node == "r0"
		if len(held) != holding || slices.ContainsFunc(held, func(h Hold) bool { return h.Final != final }) {
			t.Errorf("%d nodes hold it; final should be %t: %+v", len(held), final, held[0])
		}
	}
}

// The agents whose tokens have led to a call, the nearest first: not the gateway, and nobody who is not proven.
func TestIssuersOfWhatLedToACall(t *testing.T) {
	l := NewLive()
	l.Add(workflow.Record{ID: "1", Issuer: "a"}, workflow.Record{ID: "2", Issuer: "b", Parents: []string{"1"}}, workflow.Record{ID: "c", Own: true, Issuer: "gateway", Parents: []string{"2"}},
		workflow.Record{ID: "3", Parents: []string{"2"}}, workflow.Record{ID: "4", Issuer: "d", Parents: []string{"c"}}, workflow.Record{ID: "5", Issuer: "b", Parents: []string{"4"}})
	for _, c := range []struct {
		named []string
		most  int
		want  []string
	}{{[]string{"5"}, 9, []string{"b", "d", "a"}}, {[]string{"c", "none"}, 9, []string{"b", "a"}}, {[]string{"5"}, 2, []string{"b", "d"}}, {nil, 9, nil}} {
		if got := l.Issuers(c.named, c.most); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.named, got, c.want)
		}
	}
}

// BenchmarkAdmission is the bar: of 10,000 nodes each is admitted in at most 5 µs. The plan has few roots,
// so that most nodes wait for two others.
func BenchmarkAdmission(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 3))
	w := &world{Rand: r, plan: parse(b, string(random(r, MaxNodes, 2))), name: "x"}
	l := NewLive()
	order := w.plan.Order()
	for _, i := range order {
		c := &call{node: i, name: fmt.Sprint("x", i)}
		w.claim(c)
		w.settle(c, workflow.Completed)
	}
	l.Add(w.records...)
	n, who, named := 0, []string{"x"}, []string{w.records[0].ID}
	b.ReportAllocs()
	for b.Loop() {
		p := l.Part(who, named)
		if held := p.Holds(w.plan, w.plan.Nodes[order[n%MaxNodes]].ID, nil); held != nil {
			b.Fatal(held)
		}
		n++
	}
}

// BenchmarkAdmissionAndRecords has with each admission what the call adds to the states: the records of its claim and
// of its outcome.
func BenchmarkAdmissionAndRecords(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 3))
	w := &world{Rand: r, plan: parse(b, string(random(r, MaxNodes, 2))), name: "x"}
	l, order, n, who := NewLive(), w.plan.Order(), 0, []string{"x"}
	b.ReportAllocs()
	for b.Loop() {
		if n == MaxNodes {
			b.StopTimer()
			l, n, w.records = NewLive(), 0, nil
			b.StartTimer()
		}
		p := l.Part(who, nil)
		if held := p.Holds(w.plan, w.plan.Nodes[order[n]].ID, nil); held != nil {
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
