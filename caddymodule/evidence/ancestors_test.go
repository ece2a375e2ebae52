package evidence_test

import (
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// However many ways lead to an ancestor, it is looked at once: 40 forks and joins have
// 2^40 of them.
func TestForksAndJoinsOfUnrecordedTokens(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	var before []string
	var last *ect.Token
	for range 40 {
		last = b.token(t, ect.Claims{Workflow: workflow, Parents: before})
		other := b.token(t, ect.Claims{Workflow: workflow, Parents: before})
		b.told.Seen([]*ect.Token{last, other})
		before = []string{last.ID(), other.ID()}
	}
	if found := b.told.Unrecorded([]*ect.Token{last}, 100); len(found) != 2*39 {
		t.Errorf("%d ancestors", len(found))
	}
}

// The nearest ancestors are recorded, each behind its own parents.
func TestNearestUnrecordedTokens(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	var chain []*ect.Token
	for n := range 6 {
		c := ect.Claims{Workflow: workflow}
		if n > 0 {
			c.Parents = []string{chain[n-1].ID()}
		}
		chain = append(chain, b.token(t, c))
	}
	b.told.Seen(chain)
	last := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{chain[5].ID()}})
	found := b.told.Unrecorded([]*ect.Token{last}, 4)
	if len(found) != 4 {
		t.Fatalf("%d found", len(found))
	}
	for n, token := range found {
		if token != chain[2+n] {
			t.Errorf("at %d stands %s", n, token.ID())
		}
	}
}

// A token that names no workflow is an ancestor in any, and stands before what follows
// from it. One of the workflow itself goes before it.
func TestAncestorsWithoutAWorkflow(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	first := b.token(t, ect.Claims{})
	second := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{first.ID()}})
	foreign := b.token(t, ect.Claims{Workflow: uuid.NewString(), ID: second.ID()})
	named := b.token(t, ect.Claims{ID: second.ID()})
	b.told.Seen([]*ect.Token{named, foreign, second, first})
	last := b.token(t, ect.Claims{Workflow: workflow, Parents: []string{second.ID()}})
	if found := b.told.Unrecorded([]*ect.Token{last}, 9); len(found) != 2 || found[0] != first || found[1] != second {
		t.Errorf("%d ancestors", len(found))
	}
	for id, digest := range map[string][32]byte{first.ID(): first.Digest(), second.ID(): second.Digest()} {
		nodes, err := b.told.Graph(workflow).Nodes(t.Context(), id)
		if err != nil || len(nodes) != 1 || nodes[0].Digest != digest {
			t.Errorf("%+v %v", nodes, err)
		}
	}
}
