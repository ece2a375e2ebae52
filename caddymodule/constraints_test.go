package caddymodule

import (
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

func asking(t *testing.T, threshold float64) *breaker.View {
	t.Helper()
	v, err := breaker.NewView(threshold, 0)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// The strictest of what a workflow has asked for is kept, for it and no other.
func TestConstraintsOfAWorkflow(t *testing.T) {
	var c constraints
	if c.find("a") != nil {
		t.Error("it knows of a workflow that has asked for nothing")
	}
	for _, threshold := range []float64{0.4, 0.2, 0.3} {
		c.add("a", asking(t, threshold))
	}
	if got := c.find("a"); got == nil || got.Threshold() != 0.2 {
		t.Errorf("%+v, want the strictest", got)
	}
	if got := c.find("b"); got != nil {
		t.Errorf("another workflow: %+v", got)
	}
}

// However many workflows ask, the memory is bounded. Who was seen last is remembered.
func TestConstraintsAreBounded(t *testing.T) {
	var c constraints
	view := asking(t, 0.2)
	c.add("asked again", view)
	c.add("seen again", view)
	c.add("gone", view)
	for n := range maxConstrained {
		if n == maxConstrained-3 {
			c.add("asked again", view)
			c.find("seen again")
		}
		c.add(fmt.Sprint(n), view)
	}
	if len(c.of) != maxConstrained || c.recent.Len() != maxConstrained {
		t.Errorf("%d and %d workflows are remembered, want %d", len(c.of), c.recent.Len(), maxConstrained)
	}
	for workflow, known := range map[string]bool{"asked again": true, "seen again": true, "gone": false, "0": false, "4095": true} {
		if (c.find(workflow) != nil) != known {
			t.Errorf("%s: remembered is %v", workflow, !known)
		}
	}
}
