//go:build unix

package crash

import (
	"math/rand/v2"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

func newCrashRollback(t *testing.T) *harness.CrashRollback {
	t.Helper()
	c := &harness.CrashRollback{T: t, Lab: harness.NewRestLab(t), Stages: harness.ProcNewStages(t), A: harness.NewAgent(t, "a")}
	c.Site = harness.ProcNewSite(t, c.Lab.Addr)
	c.Site.Store = "staged " + c.Site.Path("data") + " " + c.Stages.Url
	c.Site.App = harness.Trusting(t, c.A)
	c.Site.Guard = harness.SagaActions
	c.Gateway = c.Site.Start(t)
	return c
}

// P1, P5, P6: SIGKILL before and after each commit of a rollback, one after another: it
// goes on by itself, no step runs twice, none is lost.
func TestCrashAtEveryCommitOfARollback(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newCrashRollback(t)
	kills, accepted := 0, 0
	stride := 1
	if harness.CrashRounds(t, 0) == 0 {
		stride = 6 // one in six, others each time
	}
	for n := rand.IntN(stride); ; n += stride {
		s := c.Build()
		reached := c.Stages.Count(n)
		ended := s.Begin()
		select {
		case <-reached:
		case <-ended:
		}
		c.Kill(s)
		<-ended
		point := c.Stages.Disarm()
		c.Gateway = c.Site.Start(t)
		if c.Undone(s) {
			accepted++
		}
		if t.Failed() {
			t.Fatalf("killed at point %d of the rollback, %q", n, point)
		}
		if point == "" {
			break
		}
		kills++
	}
	if accepted < 20/stride {
		t.Errorf("only %d kills hit the rollback", accepted)
	}
	t.Logf("%d kills, %d of them after the rollback was accepted", kills, accepted)
}

// P1, P5: SIGKILL at random moments of a rollback: when the service has had so many
// effects of it, or after a while, and once more while it goes on.
func TestCrashRollbackAtRandomMoments(t *testing.T) {
	t.Parallel() // its gateways are processes
	rounds := harness.CrashRounds(t, 5)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c := newCrashRollback(t)
	for round := range rounds {
		s := c.Build()
		c.KillAtEffect(s, 1+random.IntN(4), random.IntN(2) == 0)
		for random.IntN(3) > 0 { // again, while it goes on
			reached := c.Stages.Count(random.IntN(40))
			c.Gateway = c.Site.Launch(t)
			select {
			case <-reached:
			case <-c.Gateway.Log.When("serving initial configuration"):
			}
			c.Kill(s)
			c.Stages.Disarm()
		}
		c.Gateway = c.Site.Start(t)
		c.WentOn(s)
		if t.Failed() {
			t.Fatalf("round %d of %d", round+1, rounds)
		}
	}
	c.Gateway.End(t)
}

// The ledger of a gateway that was killed in a rollback tells of each step once, and can be
// proved.
func TestCrashRollbackIsTold(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newCrashRollback(t)
	s := c.Build()
	c.KillAtEffect(s, 2, true)
	c.Gateway = c.Site.Start(t)
	c.WentOn(s)
	c.WantTree(s)
	if got := s.Look(s.Asked.ID); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}
