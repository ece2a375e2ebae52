package ect_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// family makes and verifies tokens against a graph.
type family struct {
	t testing.TB
	a *agent
	v *ect.Verifier
	g graph
}

func newFamily(t testing.TB, change func(*ect.Policy)) *family {
	a := newAgent(t, "k", "EdDSA")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) {
		p.Algorithms = []ect.Algorithm{ect.EdDSA}
		if change != nil {
			change(p)
		}
	})
	return &family{t, a, v, graph{}}
}

func (f *family) verify(changes map[string]any) (*ect.Token, error) {
	f.t.Helper()
	return f.v.Verify(f.t.Context(), f.a.send(f.t, f.a.header(), with(changes)), ect.Presentation{Now: at, DAG: always(f.g)})
}

// record verifies a token and puts it into the graph.
func (f *family) record(n int, parents ...int) *ect.Token {
	f.t.Helper()
	list := make([]string, len(parents))
	for i, p := range parents {
		list[i] = id(p)
	}
	token, err := f.verify(map[string]any{"jti": id(n), "par": list})
	if err != nil {
		f.t.Fatalf("token %d: %v", n, err)
	}
	f.g.add(token.Node())
	return token
}

// TestDAGShapes: root, chain, fork, join and two roots pass, and their ancestors are
// counted.
func TestDAGShapes(t *testing.T) {
	f := newFamily(t, nil)
	for _, c := range []struct {
		n         int
		parents   []int
		ancestors int // at least; what is counted twice is allowed
	}{
		{1, nil, 0}, {2, []int{1}, 1}, {3, []int{2}, 2}, {4, []int{2}, 2}, {5, []int{3, 4}, 4}, {6, nil, 0}, {7, []int{5, 6}, 6},
	} {
		l := f.record(c.n, c.parents...).Lineage()
		if !l.Checked || len(l.Missing) > 0 || l.Ancestors < c.ancestors || l.Weakest != ect.L2 && len(c.parents) > 0 {
			t.Errorf("token %d: %+v", c.n, l)
		}
	}
}

// TestDAGRefusals: missing parents, late ones, foreign ones, and ids that are there.
func TestDAGRefusals(t *testing.T) {
	f := newFamily(t, nil)
	f.g.add(ect.Node{ID: id(1), Workflow: workflow})
	f.g.add(ect.Node{ID: id(2), Workflow: other})
	f.g.add(ect.Node{ID: id(3)})
	f.g.add(ect.Node{ID: id(4), Workflow: workflow, IssuedAt: at.Add(30*time.Second - 1)})
	f.g.add(ect.Node{ID: id(5), Workflow: workflow, IssuedAt: at.Add(30 * time.Second)})
	f.g.add(ect.Node{ID: id(6), Workflow: workflow, Level: ect.L1})
	f.g.add(ect.Node{ID: id(7), Workflow: other})
	f.g.add(ect.Node{ID: id(7), Workflow: workflow})
	par := func(n ...int) []string {
		var list []string
		for _, n := range n {
			list = append(list, id(n))
		}
		return list
	}
	for name, c := range map[string]struct {
		changes map[string]any
		want    ect.Code
	}{
		"known":              {map[string]any{"par": par(1)}, ""},
		"without workflow":   {map[string]any{"par": par(3)}, ""},
		"in two workflows":   {map[string]any{"par": par(7)}, ""},
		"unknown":            {map[string]any{"par": par(1, 99)}, ect.CodeParentUnknown},
		"foreign":            {map[string]any{"par": par(2)}, ect.CodeParentUnknown},
		"foreign, we global": {map[string]any{"par": par(2), "wid": nil}, ""},
		"at the last moment": {map[string]any{"par": par(4)}, ""},
		"too late":           {map[string]any{"par": par(5)}, ect.CodeParentLater},
		"lower level":        {map[string]any{"par": par(6)}, ect.CodeLevel},
		"used id":            {map[string]any{"jti": id(1)}, ect.CodeReplayed},
		"used elsewhere":     {map[string]any{"jti": id(2)}, ""},
		"used globally":      {map[string]any{"jti": id(3)}, ect.CodeReplayed},
		"used, we global":    {map[string]any{"jti": id(2), "wid": nil}, ect.CodeReplayed},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := f.verify(c.changes)
			wantCode(t, err, c.want)
		})
	}
}

// TestForeignParentLooksUnknown: the answers are the same (P3).
func TestForeignParentLooksUnknown(t *testing.T) {
	f := newFamily(t, nil)
	f.g.add(ect.Node{ID: id(2), Workflow: other})
	_, foreign := f.verify(map[string]any{"par": []string{id(2)}})
	_, unknown := f.verify(map[string]any{"par": []string{id(3)}})
	if foreign.Error() != unknown.Error() {
		t.Errorf("%v and %v", foreign, unknown)
	}
	if !errors.Is(foreign, ect.ErrOtherWorkflow) || errors.Is(unknown, ect.ErrOtherWorkflow) {
		t.Error("the operator cannot tell them apart")
	}
	f = newFamily(t, func(p *ect.Policy) { p.CrossWorkflow = true })
	f.g.add(ect.Node{ID: id(2), Workflow: other})
	_, err := f.verify(map[string]any{"par": []string{id(2)}})
	wantCode(t, err, "")
}

// TestPartial: missing parents are accepted only where that is allowed, and reported.
func TestPartial(t *testing.T) {
	f := newFamily(t, func(p *ect.Policy) { p.AllowPartial = true })
	f.g.add(ect.Node{ID: id(1), Workflow: workflow})
	token := must(f.verify(map[string]any{"par": []string{id(1), id(99)}}))(t)
	if l := token.Lineage(); len(l.Missing) != 1 || l.Missing[0] != id(99) || l.Ancestors != 1 {
		t.Errorf("%+v", l)
	}
	if n := token.Node(); n.Ancestors != 0 || n.Weakest != 0 {
		t.Errorf("what is not whole is remembered as whole: %+v", n)
	}
	// The missing one comes, and names its own descendant: a cycle that only the walk
	// can see.
	f.g.add(token.Node())
	child := must(f.verify(map[string]any{"jti": id(50), "par": []string{taskID}}))(t)
	f.g.add(child.Node())
	_, err := f.verify(map[string]any{"jti": id(99), "par": []string{id(50)}})
	wantCode(t, err, ect.CodeCycle)
}

// TestAncestorLimit: reaching it is a refusal, with or without recorded counts.
func TestAncestorLimit(t *testing.T) {
	for _, remember := range []bool{false, true} {
		f := newFamily(t, nil)
		for n := 1; n <= ect.MaxAncestors+1; n++ {
			node := ect.Node{ID: id(n), Workflow: workflow, IssuedAt: at, Level: ect.L2}
			if n > 1 {
				node.Parents = []string{id(n - 1)}
			}
			if remember {
				node.Ancestors, node.Weakest = n-1, ect.L2
			}
			f.g.add(node)
		}
		_, err := f.verify(map[string]any{"par": []string{id(ect.MaxAncestors)}})
		wantCode(t, err, "")
		_, err = f.verify(map[string]any{"par": []string{id(ect.MaxAncestors + 1)}})
		wantCode(t, err, ect.CodeTooManyAncestors)
	}
}

// TestAncestorsCountedTwice: recorded counts overstate diamonds, so the walk itself enforces
// the limit; where they are below it, the walk is short.
func TestAncestorsCountedTwice(t *testing.T) {
	f := newFamily(t, nil)
	f.record(1)
	for n := 2; n < 44; n += 3 { // each doubles the count: 14 make more than MaxAncestors
		f.record(n, n-1)
		f.record(n+1, n-1)
		f.record(n+2, n, n+1)
	}
	counted := &counting{graph: f.g}
	raw := f.a.send(t, f.a.header(), with(map[string]any{"par": []string{id(1)}}))
	if _, err := f.v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: always(counted)}); err != nil {
		t.Fatal(err)
	}
	counted.asked = 0
	chain := newFamily(t, nil)
	chain.record(1)
	for n := 2; n <= 500; n++ {
		chain.record(n, n-1)
	}
	counted = &counting{graph: chain.g}
	raw = chain.a.send(t, chain.a.header(), with(map[string]any{"par": []string{id(500)}}))
	token, err := chain.v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: always(counted)})
	if err != nil || token.Lineage().Ancestors != 500 {
		t.Fatalf("%+v, %v", token, err)
	}
	if counted.asked > 2 {
		t.Errorf("asked the graph %d times", counted.asked)
	}
}

type counting struct {
	graph
	asked int
}

func (c *counting) Nodes(ctx context.Context, id string) ([]ect.Node, error) {
	c.asked++
	return c.graph.Nodes(ctx, id)
}

// TestWeakest: a chain has the level of its weakest ancestor.
func TestWeakest(t *testing.T) {
	f := newFamily(t, func(p *ect.Policy) { p.MinLevel = ect.L1 })
	f.g.add(ect.Node{ID: id(1), Workflow: workflow, Level: ect.L1})
	f.g.add(ect.Node{ID: id(2), Workflow: workflow, Level: ect.L3, Parents: []string{id(1)}})
	token, err := f.verify(map[string]any{"par": []string{id(2)}})
	if err != nil || token.Level() != ect.L2 || token.Lineage().Weakest != ect.L1 || token.Node().Weakest != ect.L1 {
		t.Errorf("%+v, %v", token, err)
	}
	f.g.add(token.Node())
	child, err := f.verify(map[string]any{"jti": id(9), "par": []string{taskID}})
	if err != nil || child.Node().Weakest != ect.L1 {
		t.Errorf("%+v, %v", child, err)
	}
}

// TestRequestTokens: the tokens of one request may be each other's parents, in any order, but
// not in a circle; all of them pass or none.
func TestRequestTokens(t *testing.T) {
	f := newFamily(t, nil)
	token := func(n int, parents ...string) string {
		return f.a.send(t, f.a.header(), with(map[string]any{"jti": id(n), "par": append([]string{}, parents...)}))
	}
	all := func(raws ...string) ([]*ect.Token, error) {
		return f.v.VerifyAll(t.Context(), raws, ect.Presentation{Now: at, DAG: always(f.g)})
	}
	tokens, err := all(token(2, id(1)), token(1), token(3, id(1), id(2)))
	if err != nil || len(tokens) != 3 || tokens[2].Lineage().Ancestors != 2 {
		t.Fatalf("%v, %v", tokens, err)
	}
	_, err = all(token(1, id(3)), token(2, id(1)), token(3, id(2)))
	wantCode(t, err, ect.CodeCycle)
	_, err = all(token(1), token(2, id(99)))
	wantCode(t, err, ect.CodeParentUnknown)
	_, err = all(token(1), token(1, id(99)))
	wantCode(t, err, ect.CodeReplayed)
	_, err = all()
	wantCode(t, err, ect.CodeMissing)
	same := token(1)
	tokens, err = all(same, same)
	if err != nil || len(tokens) != 1 {
		t.Errorf("%v, %v", tokens, err)
	}
}

// TestRetryPassesGraph: the same bytes are a retry and no second use of the id.
func TestRetryPassesGraph(t *testing.T) {
	f := newFamily(t, nil)
	raw := f.a.send(t, f.a.header(), figure())
	first := must(f.v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: always(f.g)}))(t)
	f.g.add(first.Node())
	if _, err := f.v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: always(f.g)}); err != nil {
		t.Error(err)
	}
	_, err := f.verify(map[string]any{"exec_act": "something_else"})
	wantCode(t, err, ect.CodeReplayed)
}

type brokenGraph struct{}

func (brokenGraph) Nodes(context.Context, string) ([]ect.Node, error) {
	return nil, errors.New("store is down")
}

// TestGraphDown: a graph that fails is unavailable, and no refusal (P4).
func TestGraphDown(t *testing.T) {
	f := newFamily(t, nil)
	raw := f.a.send(t, f.a.header(), figure())
	_, err := f.v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: always(brokenGraph{})})
	if !errors.Is(err, ect.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}
