//go:build unix

package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"

	"github.com/google/uuid"
)

// crashRollback is a gateway that is killed in its rollbacks, again and again, over one
// store and one restLab.
type crashRollback struct {
	t       *testing.T
	lab     *restLab
	stages  *procStages
	site    *procSite
	a       *agent
	gateway *procGateway
	rounds  int
}

func newCrashRollback(t *testing.T) *crashRollback {
	t.Helper()
	c := &crashRollback{t: t, lab: newRestLab(t), stages: procNewStages(t), a: newAgent(t, "a")}
	c.site = procNewSite(t, c.lab.addr)
	c.site.store = "staged " + c.site.path("data") + " " + c.stages.url
	c.site.app = trusting(t, c.a)
	c.site.guard = sagaActions
	c.gateway = c.site.start(t)
	return c
}

// crashSaga is what one round has done, and how it is undone.
type crashSaga struct {
	*saga
	asked   rollbackBody
	docs    [2]string
	charges [2]string
	effects int // in the lab's ledger when the rollback was asked for
	kills   int // since then
}

// kill ends the gateway while it rolls s back.
func (c *crashRollback) kill(s *crashSaga) {
	s.kills++
	c.gateway.kill()
}

// build makes a workflow of four calls, each a consequence of the one before: a document
// changes, money is taken, a document is made, money is taken.
func (c *crashRollback) build() *crashSaga {
	c.t.Helper()
	c.rounds++
	s := &crashSaga{saga: c.site.gateway(c.t).saga(c.a)}
	s.docs = [2]string{fmt.Sprintf("/docs/old-%d", c.rounds), fmt.Sprintf("/docs/new-%d", c.rounds)}
	c.lab.write(s.docs[0], `{"n":1}`)
	root := s.do(put(s.docs[0], `{"n":2}`))
	first := s.do(charge(1), root.checkpoint)
	made := s.do(put(s.docs[1], `{"n":2}`), first.checkpoint)
	second := s.do(charge(2), made.checkpoint)
	s.charges = [2]string{first.id(c.t), second.id(c.t)}
	s.asked = rollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	s.effects = len(c.lab.ledgerEffects())
	return s
}

// begin asks for the rollback in the background: the gateway may die of it.
func (s *crashSaga) begin() <-chan struct{} {
	r, done := s.g.build(s.asking(s.asked)), make(chan struct{})
	go func() {
		defer close(done)
		if res, err := s.g.client.Do(r); err == nil {
			read(res)
		}
	}()
	return done
}

// undone holds that a rollback goes on by itself to its end, that asking for it again
// gives the same, and that each effect was taken back once, the last one first.
//
// It reports whether the rollback was accepted before the kill: else nothing was undone.
func (c *crashRollback) undone(s *crashSaga) (accepted bool) {
	c.t.Helper()
	if got := s.look(s.asked.ID); got.status < 300 {
		accepted = true
		s.finished(s.asked.ID) // nobody asks for it: it goes on by itself
	} else if got.problem(c.t, http.StatusForbidden, "not-in-workflow"); len(c.lab.ledgerEffects()) != s.effects {
		c.t.Error("something was undone by a rollback that nobody knows")
	}
	s.back(s.asked).want(c.t, "completed")
	s.back(s.asked).want(c.t, "completed")
	var got []string
	for _, e := range c.lab.ledgerEffects()[s.effects:] {
		got = append(got, e.What+" "+e.Of)
	}
	want := []string{"refunded " + s.charges[1], "deleted " + s.docs[1], "refunded " + s.charges[0], "changed " + s.docs[0]}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		c.t.Errorf("P1, P5: the service has seen %q, want %q", got, want)
	}
	c.lab.wantDoc(s.docs[0], `{"n":1}`)
	c.lab.wantDoc(s.docs[1], "")
	// What was sent when the gateway died is sent once more, under its key, and nothing else.
	sent := -2 // the calls themselves
	for _, of := range slices.Concat(s.docs[:], s.charges[:]) {
		for _, route := range []string{"PUT " + of, "DELETE " + of, "POST /refunds"} {
			about := ""
			if route == "POST /refunds" {
				about = of
			}
			sent += len(c.lab.all(route, about))
		}
	}
	if sent > 4+s.kills {
		c.t.Errorf("P1: four undos were sent %d times over %d kills", sent, s.kills)
	}
	return accepted
}

// wentOn is undone for a rollback that has had effects.
func (c *crashRollback) wentOn(s *crashSaga) {
	c.t.Helper()
	if !c.undone(s) {
		c.t.Error("P5: a rollback was forgotten that had undone something")
	}
}

// P1, P5, P6: SIGKILL before and after each commit of a rollback, one after another: it
// goes on by itself, no step runs twice, none is lost.
func TestCrashAtEveryCommitOfARollback(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newCrashRollback(t)
	kills, accepted := 0, 0
	stride := 1
	if crashRounds(t, 0) == 0 {
		stride = 6 // one in six, others each time
	}
	for n := rand.IntN(stride); ; n += stride {
		s := c.build()
		reached := c.stages.count(n)
		ended := s.begin()
		select {
		case <-reached:
		case <-ended:
		}
		c.kill(s)
		<-ended
		point := c.stages.disarm()
		c.gateway = c.site.start(t)
		if c.undone(s) {
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
	rounds := crashRounds(t, 5)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c := newCrashRollback(t)
	for round := range rounds {
		s := c.build()
		c.killAtEffect(s, 1+random.IntN(4), random.IntN(2) == 0)
		for random.IntN(3) > 0 { // again, while it goes on
			reached := c.stages.count(random.IntN(40))
			c.gateway = c.site.launch(t)
			select {
			case <-reached:
			case <-c.gateway.log.when("serving initial configuration"):
			}
			c.kill(s)
			c.stages.disarm()
		}
		c.gateway = c.site.start(t)
		c.wentOn(s)
		if t.Failed() {
			t.Fatalf("round %d of %d", round+1, rounds)
		}
	}
	c.gateway.end(t)
}

// killAtEffect kills the gateway at the nth effect of the rollback, before the service
// answers or as soon as it has.
func (c *crashRollback) killAtEffect(s *crashSaga, nth int, before bool) {
	c.t.Helper()
	hit, done := make(chan struct{}), make(chan struct{})
	seen := 0
	c.lab.watch(func(restEffect) {
		if seen++; seen == nth {
			close(hit)
			if before {
				<-done
			}
		}
	})
	ended := s.begin()
	waitWithin(c.t, procBound, hit, "the effect")
	c.kill(s)
	close(done)
	<-ended
	c.lab.watch(nil)
}

// The ledger of a gateway that was killed in a rollback tells of each step once, and can be
// proved.
func TestCrashRollbackIsTold(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newCrashRollback(t)
	s := c.build()
	c.killAtEffect(s, 2, true)
	c.gateway = c.site.start(t)
	c.wentOn(s)
	c.wantTree(s)
	if got := s.look(s.asked.ID); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
}
