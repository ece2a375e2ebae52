package guard

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
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
		if n%1000 == 0 {
			c.add(asker{"asked again", "i"}, view)
			c.find(asker{"seen again", "i"})
		}
		c.add(asker{fmt.Sprint(n), "i"}, view)
	}
	if n := len(c.younger) + len(c.older); n < maxConstrained/2 || n > maxConstrained {
		t.Errorf("%d are remembered, at most %d", n, maxConstrained)
	}
	for workflow, known := range map[string]bool{"asked again": true, "seen again": true, "gone": false, "0": false, "4095": true} {
		if (c.find(asker{workflow, "i"}) != nil) != known {
			t.Errorf("%s: remembered is %v", workflow, !known)
		}
	}
}

// ATD "Circuit Breaker Policy Configuration": what a token asks of breakers, by a member of its
// own or in an object. What cannot be meant refuses the token: without it the workflow would go
// on with less care than it has asked for.
func TestWhatTokensAskOfBreakers(t *testing.T) {
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer("spiffe://example.com/agent", ring)
	if err != nil {
		t.Fatal(err)
	}
	const refused = "refused"
	for _, c := range []struct{ member, value, want string }{
		{"atd.circuit_threshold", "0.3", "0.3"},
		{"atd.circuit_window_s", "1800", "1 30m0s"},
		{"constraints", `{"atd.circuit_threshold":0.25,"atd.circuit_window_s":1800,"atd.resource_cpu":"2"}`, "0.25 30m0s"},
		{"constraints", `{"atd.circuit_threshold":0.25,"atd.circuit_window_s":1e9}`, "0.25 1h0m0s"},
		{"constraints", `["atd.circuit_threshold"]`, ""}, {"another", "1", ""},
		{"atd.circuit_threshold", "0", refused}, {"atd.circuit_threshold", "1", refused}, {"atd.circuit_threshold", "-0.2", refused},
		{"atd.circuit_threshold", "50", refused}, {"atd.circuit_threshold", `"0.2"`, refused}, {"atd.circuit_threshold", "null", refused},
		{"atd.circuit_threshold", "1e999", refused}, {"atd.circuit_threshold", "[0.2]", refused},
		{"atd.circuit_window_s", "0", refused}, {"atd.circuit_window_s", "0.9", refused}, {"atd.circuit_window_s", "-60", refused},
		{"atd.circuit_window_s", `"60s"`, refused},
		{"constraints", `{"atd.circuit_threshold":2}`, refused}, {"constraints", `{"atd.circuit_window_s":false}`, refused},
	} {
		token, err := issuer.Issue(time.Now(), ect.Claims{
			Audience: []string{"a"}, Action: "act", Ext: new(ect.ExtBuilder).JSON(ect.Member(c.member), c.value),
		})
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		view, err := askedBy(token)
		if code := (*ect.Error)(nil); errors.As(err, &code) && code.Code == ect.CodeExt {
			got = refused
		} else if view != nil {
			got = fmt.Sprint(view.Threshold())
			if w := view.Window(); w < math.MaxInt64 { // else the breaker's own
				got += " " + w.String()
			}
		}
		if got != c.want {
			t.Errorf("%s %s: %q, %v; want %q", c.member, c.value, got, err, c.want)
		}
	}
}
