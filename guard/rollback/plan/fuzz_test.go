package plan_test

import (
	"errors"
	"fmt"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// encoded makes nodes of bytes, four for each: hostile ones too, with cycles and with
// ids that stand twice.
func encoded(data []byte) []Node {
	kinds := []Kind{Action, Action, Action, Checkpoint, Checkpoint, Checkpoint, Group, Event}
	states := []State{Standing, Undone, InFlight, NeverRan}
	var nodes []Node
	for ; len(data) >= 4 && len(nodes) < 32; data = data[4:] {
		i := len(nodes)
		n := Node{ID: fmt.Sprint(i), Kind: kinds[data[0]&7], Done: data[0]&8 != 0, By: string('a' + rune(data[0]>>6))}
		if data[0]&0x30 == 0x30 {
			n.Parents = append(n.Parents, "gone")
		}
		if n.Kind == Checkpoint || n.Kind == Group {
			n.State, n.Reversible = states[data[0]>>4&3], data[0]&8 == 0
		}
		near := func(b byte) string { return fmt.Sprint(i - int(int8(b<<2)>>2)%16) }
		for _, b := range data[1:3] {
			if b&0x80 == 0 {
				n.Parents = append(n.Parents, near(b))
			}
		}
		if b := data[3]; n.Kind == Checkpoint {
			switch {
			case b&0xc0 == 0xc0:
				n.Guards = n.Parents
			case b&0x80 == 0:
				n.Guards = []string{near(b)}
			}
		}
		if data[3] == 0xbf {
			n.ID = "0"
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// mend takes out of the nodes what New refuses, so that more of them become plans.
func mend(nodes []Node) []Node {
	byID := make(map[string]Kind)
	var mended []Node
	for _, n := range nodes {
		if _, twice := byID[n.ID]; !twice {
			byID[n.ID] = n.Kind
			mended = append(mended, n)
		}
	}
	keep := func(ids []string, which func(k Kind, known bool) bool) []string {
		var kept []string
		for _, id := range ids {
			if k, known := byID[id]; which(k, known) {
				kept = append(kept, id)
			}
		}
		return kept
	}
	for i := range mended {
		n := &mended[i]
		n.Guards = keep(n.Guards, func(k Kind, _ bool) bool { return k == Action })
		if n.Kind == Group {
			n.Parents = keep(n.Parents, func(k Kind, known bool) bool { return !known || k == Checkpoint || k == Group })
		}
	}
	return mended
}

// FuzzPlan: whatever the nodes are, there is a typed refusal or a plan that the model
// agrees with; and asking who may do it is always safe.
func FuzzPlan(f *testing.F) {
	f.Add([]byte{0, 255, 255, 255, 3, 1, 255, 255, 0, 2, 255, 255, 3, 1, 255, 255}, uint8(0))
	f.Add([]byte{0, 63, 255, 255, 0, 1, 255, 255, 3, 1, 255, 255}, uint8(1)) // a cycle
	f.Add([]byte{0, 255, 255, 255, 3, 1, 255, 255, 3, 2, 255, 255, 6, 1, 2, 0, 6, 1, 62, 0}, uint8(2))
	f.Add([]byte{0, 255, 255, 255, 0, 255, 255, 191}, uint8(0))
	f.Add([]byte{0, 255, 255, 255, 3, 255, 255, 63, 8, 1, 255, 255, 3, 1, 3, 255, 8, 3, 255, 255}, uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, which uint8) {
		raw := encoded(data)
		if _, err := New("w", raw); err != nil {
			var refused *NodeError
			if !errors.As(err, &refused) {
				t.Fatalf("%T: %v", err, err)
			}
		}
		nodes := mend(raw)
		g, err := New("w", nodes)
		if err != nil {
			t.Fatalf("mended: %v", err)
		}
		scope := []Scope{Single, SubDAG, FullWorkflow}[which%3]
		for _, n := range nodes {
			g.MayAsk("a", n.ID, Ancestor)
			p, err := g.Plan(request(n.ID, scope))
			var unknown *UnknownError
			var cycle *CycleError
			switch {
			case errors.As(err, &cycle):
				if len(cycle.Nodes) == 0 {
					t.Error("a cycle of nothing")
				}
			case errors.As(err, &unknown):
				if n.Kind == Checkpoint || n.Kind == Group {
					t.Errorf("%s is unknown", n.ID)
				}
			case err != nil:
				t.Fatalf("%T: %v", err, err)
			default:
				newModel(nodes).check(t, p)
			}
			if g.MayAsk("a", n.ID, Ancestor) && !g.MayAsk("a", n.ID, Workflow) {
				t.Errorf("an ancestor of %s is not of its workflow", n.ID)
			}
		}
	})
}
