package workflow_test

import (
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// What failed, what that reaches, and in which order it is undone.
func Example() {
	g := workflow.New([]workflow.Record{
		{ID: "before", Event: workflow.Checkpoint, Reversible: true},
		{ID: "change", Parents: []string{"before"}, Action: "update_peer"},
		{ID: "check", Parents: []string{"change"}, Action: "check_peer"},
		{ID: "error", Parents: []string{"check"}, Event: workflow.Error, CheckpointID: "before"},
	})
	for _, n := range g.Nodes() {
		if n.State != "" {
			fmt.Println(n.ID, n.State)
		}
	}
	reached, _ := g.Descendants("before", 100)
	slices.Reverse(reached)
	fmt.Println(reached)
	// Output:
	// before failed
	// change failed
	// check failed
	// [error check change]
}
