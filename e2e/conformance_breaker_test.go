package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// circuit is the one breaker that an agent sees.
func (g *gateway) circuit(a *agent) (c struct {
	State     string
	Remaining float64 `json:"cooldown_remaining_s"`
	Rate      float64 `json:"error_rate"`
	Opened    string  `json:"open_ect"`
	Failure   string  `json:"last_failure_ect"`
},
) {
	g.t.Helper()
	doc := document[struct {
		Circuits []struct {
			State     string
			Remaining float64 `json:"cooldown_remaining_s"`
			Rate      float64 `json:"error_rate"`
			Opened    string  `json:"open_ect"`
			Failure   string  `json:"last_failure_ect"`
		}
	}](g.t, g.get(a, "circuits"))
	if len(doc.Circuits) != 1 {
		g.t.Fatalf("%+v", doc)
	}
	return doc.Circuits[0]
}

// times makes so many calls that change nothing.
func (g *gateway) times(n int, path string) {
	g.t.Helper()
	for range n {
		g.call(request{method: "GET", path: path})
	}
}

// Cascade 3.2.1: the breaker opens strictly above the threshold, and not at it.
func TestCascade321Threshold(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	u.on("/down", status(500, ""))
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr + " {\n breaker {\n cooldown 10h\n }\n }"})
	g.times(5, "/works")
	g.times(4, "/down")
	if c := g.circuit(a); c.State != "closed" {
		t.Errorf("with 9 calls, fewer than min_volume: %+v", c)
	}
	g.times(1, "/down")
	if c := g.circuit(a); c.State != "closed" || c.Rate != 0.5 {
		t.Errorf("at 50 %%: %+v", c)
	}
	g.times(1, "/down")
	if c := g.circuit(a); c.State != "open" || c.Rate <= 0.5 {
		t.Errorf("above it: %+v", c)
	}
}

// Cascade 3.2.1, 3.2.2: closed, open, half-open with one probe, closed again with counters that
// begin anew.
func TestCascade321States(t *testing.T) {
	u, a, hold := newUpstream(t), newAgent(t, "a"), newGate(t)
	u.on("/down", status(500, ""))
	u.on("/slow", func(w http.ResponseWriter, _ *arrival) { hold.pass() })
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr + " {\n breaker {\n min_volume 6\n cooldown 10h\n }\n }"})
	g.times(6, "/down")
	if c := g.circuit(a); c.State != "open" || c.Rate != 1 {
		t.Fatalf("%+v", c)
	}
	g.call(request{method: "GET", path: "/works"}).refused(t)
	u.arrived("/works", 0)

	halfOpen(t, u.addr)
	probe := g.begin(request{method: "GET", path: "/slow"})
	wait(t, hold.arrived, "the probe")
	if c := g.circuit(a); c.State != "half_open" {
		t.Errorf("while it is probed: %+v", c)
	}
	g.call(request{method: "GET", path: "/works"}).refused(t)
	hold.open()
	probe.answer()
	if c := g.circuit(a); c.State != "closed" {
		t.Errorf("after the probe: %+v", c)
	}
	// The six failures of before are forgotten: with them three more would be nine of ten.
	g.times(3, "/down")
	if c := g.circuit(a); c.State != "closed" {
		t.Errorf("C-3.2.2-d: the counters were not reset: %+v", c)
	}
	g.times(2, "/down")
	if c := g.circuit(a); c.State != "open" {
		t.Errorf("it counts again: %+v", c)
	}
}

// Cascade 3.2.1-h, 3.2.2-e: a probe that fails doubles the cooldown, up to the largest; each
// opening says for how long. Recovered, it is the first again, and the closing says the sum.
func TestCascade321Cooldown(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	u.on("/down", status(500, ""))
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr + " {\n breaker {\n consecutive 2\n cooldown 100ms 350ms\n }\n }"})
	wid := uuid.NewString()
	call := func(path string) reply {
		return g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: path}))
	}
	call("/down")
	call("/down")
	opened := []string{""}
	for n := range 4 {
		if n > 0 {
			eventually(t, "a probe, that fails", func() bool { return call("/down").status != http.StatusServiceUnavailable })
		}
		var id string
		eventually(t, "the next opening is told", func() bool {
			id = g.circuit(a).Opened
			return id != "" && !slices.Contains(opened, id)
		})
		opened = append(opened, id)
		says(t, g.entry(a, wid, id), map[ect.Member]string{ect.MemberCooldown: []string{"0.1", "0.2", "0.35", "0.35"}[n]})
	}
	eventually(t, "a probe gets through", func() bool { return call("/works").status == http.StatusCreated })
	if c := g.circuit(a); c.State != "closed" {
		t.Errorf("%+v", c)
	}
	eventually(t, "the closing is told", func() bool {
		for _, n := range document[workflowView](t, g.get(a, "workflows/"+wid)).Nodes {
			if n.Event == "circuit_breaker_close" {
				closing := g.entry(a, wid, n.JTI)
				follows(t, closing, opened[len(opened)-1])
				if total, ok := closing.Ext().Number(ect.MemberTotalCooldown); !ok || total < 0.99 || total > 1.01 {
					t.Errorf("%s", closing.Payload())
				}
				return true
			}
		}
		return false
	})
}

// Cascade 3.2.4, Figures 4 and 5: what the tokens of a breaker say and follow from.
func TestCascade324TokensOfABreaker(t *testing.T) {
	const downstream = "spiffe://example.com/agent/b"
	u, a := newUpstream(t), newAgent(t, "a")
	u.on("/down", status(503, ""))
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr + " {\n" + strings.Replace(tripping, "{", "{\n downstream "+u.addr+" "+downstream, 1) + "\n}"})
	wid := uuid.NewString()
	fails := func() {
		t.Helper()
		g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/down"}))
	}
	fails()
	fails()
	opened, failure := g.opening(a, u.addr)
	opening := g.entry(a, wid, opened)
	follows(t, opening, failure)
	says(t, opening, map[ect.Member]string{
		ect.MemberDownstreamAgent: quoted(downstream), ect.MemberErrorRate: "1", ect.MemberWindow: "60", ect.MemberCooldown: "36000",
	})
	if cause := g.entry(a, wid, failure); opening.Action() != "circuit_breaker_open" || cause.Action() != "error" {
		t.Errorf("%s follows from %s", opening.Payload(), cause.Payload())
	}

	// A probe that fails: open again, behind the opening of before and an error of its own.
	halfOpen(t, u.addr)
	fails()
	var again, cause string
	eventually(t, "the second opening is told", func() bool {
		c := g.circuit(a)
		again, cause = c.Opened, c.Failure
		return again != "" && again != opened
	})
	reopening := g.entry(a, wid, again)
	if got := reopening.Parents(); !slices.Contains(got, cause) {
		t.Errorf("it follows from %v, and not from %s", got, cause)
	}
	says(t, reopening, map[ect.Member]string{ect.MemberDownstreamAgent: quoted(downstream), ect.MemberWindow: "60"})

	halfOpen(t, u.addr)
	if got := g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/works"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	// Four calls with token, checkpoint and node; three errors; two openings, two probes, one closing.
	counts := map[string]int{}
	for _, n := range g.settledView(a, wid, 4*3+3+2+2+1).Nodes {
		switch counts[n.Event]++; n.Event {
		case "circuit_breaker_close":
			closing := g.entry(a, wid, n.JTI)
			follows(t, closing, again)
			says(t, closing, map[ect.Member]string{ect.MemberDownstreamAgent: quoted(downstream)})
			if total, ok := closing.Ext().Number(ect.MemberTotalCooldown); !ok || total < 36000 {
				t.Errorf("%s", closing.Payload())
			}
		case "circuit_breaker_half_open":
			says(t, g.entry(a, wid, n.JTI), map[ect.Member]string{ect.MemberDownstreamAgent: quoted(downstream)})
		}
	}
	if counts["circuit_breaker_open"] != 2 || counts["circuit_breaker_half_open"] != 2 || counts["circuit_breaker_close"] != 1 {
		t.Errorf("C-3.2.4-a: %v", counts)
	}
}

// ATD "Coordinated Circuit Breaking": each breaker is one of its own, also where it is
// recorded: of two that were open both are open again after a restart, and none else.
func TestCircuitsAreApartOverARestart(t *testing.T) {
	one, two, three, a := newUpstream(t), newUpstream(t), newUpstream(t), newAgent(t, "a")
	site := ""
	for i, u := range []*upstream{one, two, three} {
		u.on("/down", status(503, ""))
		site += fmt.Sprintf("handle_path /%[1]d/* {\n agent_proxy %[2]s {\n name g%[1]d\n %[3]s\n }\n}\n", i, u.addr, tripping)
	}
	setting := setup{app: trusting(t, a), site: site}
	g := launch(t, setting)
	for range 2 {
		g.call(request{method: "GET", path: "/0/down"})
		g.call(request{method: "GET", path: "/1/down"})
	}
	check := func(when string) {
		t.Helper()
		for path, want := range map[string]int{"/0/works": 503, "/1/works": 503, "/2/works": 201} {
			if got := g.call(request{method: "GET", path: path}); got.status != want {
				t.Errorf("%s: %s is %d, want %d", when, path, got.status, want)
			}
		}
	}
	check("before")
	stop(t)
	setting.store = g.store
	g = launch(t, setting)
	check("after a restart")
}
