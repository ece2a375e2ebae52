package workflow_test

import (
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// What failed, in topological order.
func Example() {
	g := workflow.New([]workflow.Record{
		{ID: "before", Event: ect.EventCheckpoint, Reversible: true},
		{ID: "change", Parents: []string{"before"}, Action: "update_peer"},
		{ID: "check", Parents: []string{"change"}, Action: "check_peer"},
		{ID: "error", Parents: []string{"check"}, Event: ect.EventError, CheckpointID: "before"},
	})
	for _, n := range g.Nodes() {
		if n.State != "" {
			fmt.Println(n.ID, n.State)
		}
	}
	// Output:
	// before failed
	// change failed
	// check failed
}
