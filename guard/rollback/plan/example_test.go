package plan_test

import (
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// A peer was configured, and two things followed from it: a check, and an announcement
// that nobody can take back.
func Example() {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	checkpoint := func(id, action string, reversible bool) plan.Node {
		return plan.Node{
			ID: id, Kind: plan.Checkpoint, Parents: []string{action}, Guards: []string{action},
			State: plan.Standing, Reversible: reversible, Expires: now.Add(time.Hour),
		}
	}
	g, err := plan.New("maintenance", []plan.Node{
		{ID: "configure", Kind: plan.Action, By: "spiffe://example.com/a", Done: true},
		checkpoint("c1", "configure", true),
		{ID: "check", Kind: plan.Action, Parents: []string{"configure"}, Done: true},
		{ID: "announce", Kind: plan.Action, Parents: []string{"configure"}, Done: true},
		checkpoint("c2", "announce", false),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("may ask:", g.MayAsk("spiffe://example.com/a", "c1", plan.Ancestor))
	p, err := g.Plan(plan.Request{Target: "c1", Scope: plan.SubDAG, Now: now})
	if err != nil {
		fmt.Println(err)
		return
	}
	for i, level := range p.Levels {
		for _, s := range level {
			fmt.Println(i, s.What, s.Checkpoint, s.Actions)
		}
	}
	fmt.Println("passed over:", p.Passed)
	hash := p.Hash()
	fmt.Printf("%x\n", hash[:4])
	// Output:
	// may ask: true
	// 0 escalate c2 [announce]
	// 1 undo c1 [configure]
	// passed over: [check]
	// 5c42d214
}
