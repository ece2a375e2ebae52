package cascade_test

import (
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// A planner calls a writer, and that one calls a model, which fails.
func Example() {
	settings, err := cascade.Settings{}.Check()
	if err != nil {
		panic(err)
	}
	d := cascade.New(settings)
	now := time.Now()
	d.Node(now, cascade.Node{ID: "start", Workflow: "w", Agent: "user"})
	d.Node(now, cascade.Node{ID: "plan", Workflow: "w", Agent: "user", Parents: []string{"start"}, Upstream: cascade.Upstream{Pool: "planners", Agent: "planner"}})
	d.Node(now, cascade.Node{ID: "write", Workflow: "w", Agent: "planner", Parents: []string{"plan"}, Upstream: cascade.Upstream{Pool: "writers", Agent: "writer"}})
	d.Node(now, cascade.Node{ID: "ask", Workflow: "w", Agent: "writer", Parents: []string{"write"}, Upstream: cascade.Upstream{Pool: "models", Agent: "model"}})

	for _, f := range []cascade.Failure{
		{Workflow: "w", Node: "ask", Error: "error-1", Kind: cascade.Timeout, Address: "10.0.0.1:443"},
		{Workflow: "w", Node: "write", Error: "error-2", Address: "10.0.0.2:443"},
		{Workflow: "w", Node: "plan", Error: "error-3", Address: "10.0.0.3:443"},
	} {
		for _, c := range d.Fail(now, f) {
			fmt.Println(c.Finding.Pattern, "from", c.Finding.Root.Agent, c.Finding.Root.Error, c.Finding.Parts[0].Failed)
		}
	}
	// Output: depth_first from model error-1 [model planner writer]
}

// The p99 of an upstream rises to ten times what it was.
func ExampleLatency() {
	var l cascade.Latency
	now := time.Now()
	for range 1000 { // what is usual is known after a window of 30 s
		now = now.Add(50 * time.Millisecond)
		l.Observe(now, 200*time.Millisecond)
	}
	for i := 1; ; i++ { // one in a hundred of the last 1,000
		now = now.Add(50 * time.Millisecond)
		if l.Observe(now, 2*time.Second) == cascade.Spiked {
			fmt.Println("spike after", i, "slow calls")
			break
		}
	}
	// Output: spike after 11 slow calls
}
