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
