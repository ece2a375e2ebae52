package guard

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

// The strictest of what an issuer has asked for in a workflow is kept, for its calls there
// and no others.
func TestConstraintsOfAWorkflow(t *testing.T) {
	var c constraints
	if c.find(asker{"a", "i"}) != nil {
		t.Error("it knows of a workflow that has asked for nothing")
	}
	for _, threshold := range []float64{0.4, 0.2, 0.3} {
		c.add(asker{"a", "i"}, asking(t, threshold))
	}
	if got := c.find(asker{"a", "i"}); got == nil || got.Threshold() != 0.2 {
		t.Errorf("%+v, want the strictest", got)
	}
	for _, other := range []asker{{"b", "i"}, {"a", "j"}, {"a", ""}} {
		if got := c.find(other); got != nil {
			t.Errorf("%v: %+v", other, got)
		}
	}
}

// However many ask, the memory is bounded. Who was seen last is remembered.
func TestConstraintsAreBounded(t *testing.T) {
	var c constraints
	view := asking(t, 0.2)
	c.add(asker{"asked again", "i"}, view)
	c.add(asker{"seen again", "i"}, view)
	c.add(asker{"gone", "i"}, view)
	for n := range maxConstrained {
		if n == maxConstrained-3 {
			c.add(asker{"asked again", "i"}, view)
			c.find(asker{"seen again", "i"})
		}
		c.add(asker{fmt.Sprint(n), "i"}, view)
	}
	if len(c.of) != maxConstrained || c.recent.Len() != maxConstrained {
		t.Errorf("%d and %d are remembered, want %d", len(c.of), c.recent.Len(), maxConstrained)
	}
	for workflow, known := range map[string]bool{"asked again": true, "seen again": true, "gone": false, "0": false, "4095": true} {
		if (c.find(asker{workflow, "i"}) != nil) != known {
			t.Errorf("%s: remembered is %v", workflow, !known)
		}
	}
}
