package plan_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Too many nodes, or links, are refused before anything is made of them.
func TestLimits(t *testing.T) {
	nodes := make([]Node, MaxNodes+1)
	for i := range nodes {
		nodes[i] = event(fmt.Sprint("n", i))
	}
	var refused *TooManyError
	if _, err := New("w", nodes); !errors.As(err, &refused) || refused.Count != MaxNodes+1 || refused.What != "nodes" {
		t.Errorf("error %v", err)
	}
	if _, err := New("w", nodes[:MaxNodes]); err != nil {
		t.Error(err)
	}
	many := make([]string, MaxEdges/2+1)
	few := []Node{act("T"), with(ckpt("C"), func(n *Node) { n.Parents, n.Guards = many, many })}
	if _, err := New("w", few); !errors.As(err, &refused) || refused.Count != MaxEdges+2 || refused.What != "edges" {
		t.Errorf("error %v", err)
	}
}

// A plan follows each link a fixed number of times, whatever the graph looks like: 10^5
// nodes are a question of memory alone.
func TestLinear(t *testing.T) {
	const n = 100_000
	r := rand.New(rand.NewPCG(1, 2))
	shapes := map[string]func(i int) Node{
		"chain": func(i int) Node { return ckpt(fmt.Sprint(i), fmt.Sprint(i-1)) },
		"star":  func(i int) Node { return act(fmt.Sprint(i), "0") },
		"pairs": func(i int) Node {
			if i%2 == 1 {
				return act(fmt.Sprint(i), fmt.Sprint(max(0, i-3)), fmt.Sprint(i-1))
			}
			return ckpt(fmt.Sprint(i), fmt.Sprint(i-1))
		},
		"layers": func(i int) Node {
			if i < 100 {
				return ckpt(fmt.Sprint(i), "0")
			}
			return act(fmt.Sprint(i), fmt.Sprint(i-100+r.IntN(50)), fmt.Sprint(i-50+r.IntN(50)), fmt.Sprint(i-99))
		},
		"groups": func(i int) Node {
			if i%10 == 0 {
				return group(fmt.Sprint(i), fmt.Sprint(i-1), fmt.Sprint(i-2), fmt.Sprint(max(0, i-10)))
			}
			return ckpt(fmt.Sprint(i), fmt.Sprint(i-1))
		},
	}
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			nodes := []Node{ckpt("0")}
			links := 0
			for i := 1; i < n; i++ {
				node := shape(i)
				if name != "pairs" {
					node.Guards = nil // its parents are no actions
				}
				nodes = append(nodes, node)
				links += len(node.Parents) + len(node.Guards)
			}
			if name == "pairs" { // one knot of everything
				nodes[0].Guards = []string{fmt.Sprint(n - 1)}
			}
			for _, s := range []Scope{Single, SubDAG, FullWorkflow} {
				p, looked, err := Unbounded(nodes, request("0", s))
				if err != nil {
					t.Fatal(err)
				}
				if most := 12 * (links + n); looked > most || looked == 0 {
					t.Errorf("%s: %d links were followed, of %d", s, looked, links+n)
				}
				if s == FullWorkflow && len(steps(t, p))+len(p.Passed)+coveredBy(p) != n {
					t.Errorf("%d steps, %d passed over", len(steps(t, p)), len(p.Passed))
				}
			}
		})
	}
}

func coveredBy(p *Plan) int {
	all := make(map[string]bool)
	for _, level := range p.Levels {
		for _, s := range level {
			for _, a := range s.Actions {
				all[a] = true
			}
		}
	}
	return len(all)
}
