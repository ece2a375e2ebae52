package plan_test

import (
	"strings"
	"testing"
	"time"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// act is a completed action.
func act(id string, parents ...string) Node {
	return Node{ID: id, Parents: parents, Kind: Action, Done: true, By: "agent"}
}

func event(id string, parents ...string) Node {
	return Node{ID: id, Parents: parents, Kind: Event, By: "agent"}
}

// ckpt is the checkpoint of its parents (cascade 4.2.1).
func ckpt(id string, parents ...string) Node {
	return Node{
		ID: id, Parents: parents, Guards: parents, Kind: Checkpoint, By: "agent",
		State: Standing, Reversible: true, Expires: now.Add(time.Hour),
	}
}

// before is a checkpoint that is placed before its actions (cascade, Figure 7).
func before(id string, actions []string, parents ...string) Node {
	n := ckpt(id, parents...)
	n.Guards = actions
	return n
}

func group(id string, contained ...string) Node {
	n := ckpt(id, contained...)
	n.Kind, n.Guards = Group, nil
	return n
}

// with changes a node.
func with(n Node, change func(n *Node)) Node {
	change(&n)
	return n
}

func state(n Node, s State) Node { return with(n, func(n *Node) { n.State = s }) }

func graph(t testing.TB, nodes ...Node) *Graph {
	t.Helper()
	g, err := New("w", nodes)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func request(target string, s Scope) Request {
	return Request{Target: target, Scope: s, Coordinator: s == FullWorkflow, Now: now}
}

func planned(t testing.TB, g *Graph, target string, s Scope) *Plan {
	t.Helper()
	p, err := g.Plan(request(target, s))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// levels are the checkpoints of a plan, as in "C3 C2 | C1".
func levels(p *Plan) string {
	var all []string
	for _, level := range p.Levels {
		var ids []string
		for _, s := range level {
			ids = append(ids, s.Checkpoint)
		}
		all = append(all, strings.Join(ids, " "))
	}
	return strings.Join(all, " | ")
}

func wantLevels(t *testing.T, p *Plan, want string) {
	t.Helper()
	if got := levels(p); got != want {
		t.Errorf("levels %q, want %q", got, want)
	}
}

func wantIDs(t *testing.T, what string, got []string, want string) {
	t.Helper()
	if s := strings.Join(got, " "); s != want {
		t.Errorf("%s %q, want %q", what, s, want)
	}
}

// steps are the steps of a plan by their checkpoints.
func steps(t testing.TB, p *Plan) map[string]Step {
	t.Helper()
	all := make(map[string]Step)
	for _, level := range p.Levels {
		if len(level) == 0 {
			t.Error("a level without steps")
		}
		for _, s := range level {
			if _, twice := all[s.Checkpoint]; twice {
				t.Errorf("%s has two steps", s.Checkpoint)
			}
			all[s.Checkpoint] = s
		}
	}
	return all
}
