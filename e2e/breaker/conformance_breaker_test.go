package breaker

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Cascade 3.2.1: the breaker opens strictly above the threshold, and not at it.
func TestCascade321Threshold(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	u.On("/down", harness.Status(500, ""))
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr + " {\n breaker {\n cooldown 10h\n }\n }"})
	g.Times(5, "/works")
	g.Times(4, "/down")
	if c := g.Circuit(a); c.State != "closed" {
		t.Errorf("with 9 calls, fewer than min_volume: %+v", c)
	}
	g.Times(1, "/down")
	if c := g.Circuit(a); c.State != "closed" || c.Rate != 0.5 {
		t.Errorf("at 50 %%: %+v", c)
	}
	g.Times(1, "/down")
	if c := g.Circuit(a); c.State != "open" || c.Rate <= 0.5 {
		t.Errorf("above it: %+v", c)
	}
}

// Cascade 3.2.1, 3.2.2: closed, open, half-open with one probe, closed again with counters that
// begin anew.
func TestCascade321States(t *testing.T) {
	u, a, hold := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewGate(t)
	u.On("/down", harness.Status(500, ""))
	u.On("/slow", func(w http.ResponseWriter, _ *harness.Arrival) { hold.Pass() })
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr + " {\n breaker {\n min_volume 6\n cooldown 10h\n }\n }"})
	g.Times(6, "/down")
	if c := g.Circuit(a); c.State != "open" || c.Rate != 1 {
		t.Fatalf("%+v", c)
	}
	g.Call(harness.Request{Method: "GET", Path: "/works"}).Refused(t)
	u.Arrived("/works", 0)

	harness.HalfOpen(t, u.Addr)
	probe := g.Begin(harness.Request{Method: "GET", Path: "/slow"})
	harness.Wait(t, hold.Arrived, "the probe")
	if c := g.Circuit(a); c.State != "half_open" {
		t.Errorf("while it is probed: %+v", c)
	}
	g.Call(harness.Request{Method: "GET", Path: "/works"}).Refused(t)
	hold.Open()
	probe.Answer()
	if c := g.Circuit(a); c.State != "closed" {
		t.Errorf("after the probe: %+v", c)
	}
	// The six failures of before are forgotten: with them three more would be nine of ten.
	g.Times(3, "/down")
	if c := g.Circuit(a); c.State != "closed" {
		t.Errorf("C-3.2.2-d: the counters were not reset: %+v", c)
	}
	g.Times(2, "/down")
	if c := g.Circuit(a); c.State != "open" {
		t.Errorf("it counts again: %+v", c)
	}
}

// Cascade 3.2.1-h, 3.2.2-e: a probe that fails doubles the cooldown, up to the largest; each
// opening says for how long. Recovered, it is the first again, and the closing says the sum.
func TestCascade321Cooldown(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	u.On("/down", harness.Status(500, ""))
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr + " {\n breaker {\n consecutive 2\n cooldown 100ms 350ms\n }\n }"})
	wid := uuid.NewString()
	call := func(path string) harness.Reply {
		return g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: path}))
	}
	call("/down")
	call("/down")
	opened := []string{""}
	for n := range 4 {
		if n > 0 {
			harness.Eventually(t, "a probe, that fails", func() bool { return call("/down").Status != http.StatusServiceUnavailable })
		}
		var id string
		harness.Eventually(t, "the next opening is told", func() bool {
			id = g.Circuit(a).Opened
			return id != "" && !slices.Contains(opened, id)
		})
		opened = append(opened, id)
		harness.Says(t, g.Entry(a, wid, id), map[ect.Member]string{ect.MemberCooldown: []string{"0.1", "0.2", "0.35", "0.35"}[n]})
	}
	harness.Eventually(t, "a probe gets through", func() bool { return call("/works").Status == http.StatusCreated })
	if c := g.Circuit(a); c.State != "closed" {
		t.Errorf("%+v", c)
	}
	harness.Eventually(t, "the closing is told", func() bool {
		for _, n := range harness.Document[harness.WorkflowView](t, g.Get(a, "workflows/"+wid)).Nodes {
			if n.Event == "circuit_breaker_close" {
				closing := g.Entry(a, wid, n.JTI)
				harness.Follows(t, closing, opened[len(opened)-1])
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
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	u.On("/down", harness.Status(503, ""))
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr + " {\n" + strings.Replace(harness.Tripping, "{", "{\n downstream "+u.Addr+" "+downstream, 1) + "\n}"})
	wid := uuid.NewString()
	fails := func() {
		t.Helper()
		g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/down"}))
	}
	fails()
	fails()
	opened, failure := g.Opening(a, u.Addr)
	opening := g.Entry(a, wid, opened)
	harness.Follows(t, opening, failure)
	harness.Says(t, opening, map[ect.Member]string{
		ect.MemberDownstreamAgent: harness.Quoted(downstream), ect.MemberErrorRate: "1", ect.MemberWindow: "60", ect.MemberCooldown: "36000",
	})
	if cause := g.Entry(a, wid, failure); opening.Action() != "circuit_breaker_open" || cause.Action() != "error" {
		t.Errorf("%s follows from %s", opening.Payload(), cause.Payload())
	}

	// A probe that fails: open again, behind the opening of before and an error of its own.
	harness.HalfOpen(t, u.Addr)
	fails()
	var again, cause string
	harness.Eventually(t, "the second opening is told", func() bool {
		c := g.Circuit(a)
		again, cause = c.Opened, c.Failure
		return again != "" && again != opened
	})
	reopening := g.Entry(a, wid, again)
	if got := reopening.Parents(); !slices.Contains(got, cause) {
		t.Errorf("it follows from %v, and not from %s", got, cause)
	}
	harness.Says(t, reopening, map[ect.Member]string{ect.MemberDownstreamAgent: harness.Quoted(downstream), ect.MemberWindow: "60"})

	harness.HalfOpen(t, u.Addr)
	if got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/works"})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	// Four calls with token, checkpoint and node; three errors; two openings, two probes, one closing.
	counts := map[string]int{}
	for _, n := range g.SettledView(a, wid, 4*3+3+2+2+1).Nodes {
		switch counts[n.Event]++; n.Event {
		case "circuit_breaker_close":
			closing := g.Entry(a, wid, n.JTI)
			harness.Follows(t, closing, again)
			harness.Says(t, closing, map[ect.Member]string{ect.MemberDownstreamAgent: harness.Quoted(downstream)})
			if total, ok := closing.Ext().Number(ect.MemberTotalCooldown); !ok || total < 36000 {
				t.Errorf("%s", closing.Payload())
			}
		case "circuit_breaker_half_open":
			harness.Says(t, g.Entry(a, wid, n.JTI), map[ect.Member]string{ect.MemberDownstreamAgent: harness.Quoted(downstream)})
		}
	}
	if counts["circuit_breaker_open"] != 2 || counts["circuit_breaker_half_open"] != 2 || counts["circuit_breaker_close"] != 1 {
		t.Errorf("C-3.2.4-a: %v", counts)
	}
}

// ATD "Coordinated Circuit Breaking": each breaker is one of its own, also where it is
// recorded: of two that were open both are open again after a restart, and none else.
func TestCircuitsAreApartOverARestart(t *testing.T) {
	one, two, three, a := harness.NewUpstream(t), harness.NewUpstream(t), harness.NewUpstream(t), harness.NewAgent(t, "a")
	site := ""
	for i, u := range []*harness.Upstream{one, two, three} {
		u.On("/down", harness.Status(503, ""))
		site += fmt.Sprintf("handle_path /%[1]d/* {\n agent_proxy %[2]s {\n name g%[1]d\n %[3]s\n }\n}\n", i, u.Addr, harness.Tripping)
	}
	setting := harness.Setup{App: harness.Trusting(t, a), Site: site}
	g := harness.Launch(t, setting)
	for range 2 {
		g.Call(harness.Request{Method: "GET", Path: "/0/down"})
		g.Call(harness.Request{Method: "GET", Path: "/1/down"})
	}
	check := func(when string) {
		t.Helper()
		for path, want := range map[string]int{"/0/works": 503, "/1/works": 503, "/2/works": 201} {
			if got := g.Call(harness.Request{Method: "GET", Path: path}); got.Status != want {
				t.Errorf("%s: %s is %d, want %d", when, path, got.Status, want)
			}
		}
	}
	check("before")
	harness.Stop(t)
	setting.Store = g.Store
	g = harness.Launch(t, setting)
	check("after a restart")
}
