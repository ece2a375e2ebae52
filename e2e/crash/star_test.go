//go:build unix

package crash

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// starCrash is a star whose gateways are killed in its rollbacks, again and again. The ledger of
// the RestLab behind them is the only truth about what was undone.
type starCrash struct {
	*harness.Star
	stages []*harness.ProcStages
	random *rand.Rand
	rounds int
	tally  map[string]int // how the rollbacks have ended
}

func newStarCrash(t *testing.T) *starCrash {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed) // kills hit where the scheduler lets them: it repeats the plan only
	c := &starCrash{random: rand.New(rand.NewPCG(seed, 0)), tally: map[string]int{}}
	for range 3 {
		c.stages = append(c.stages, harness.ProcNewStages(t))
	}
	c.Star = harness.NewStar(t, "rollback {\n partial allow\n prepare_timeout 2s\n wait 1s\n }", c.stages...)
	return c
}

// starRound is what one round has done, and how it is undone.
type starRound struct {
	*harness.Saga
	asked   harness.RollbackBody
	undos   []string // what the ledger says of the undo of each call, in the order of the calls
	steps   []string // the checkpoints of the calls
	charges []string
	effects int    // in the ledger when the rollback was asked for
	fault   string // of an undo; empty is none
}

// build makes a workflow of calls over both gateways behind, each a consequence of the one before.
// Those of one gateway stand beside each other or apart, so that what it knows of the workflow is
// connected or not.
func (c *starCrash) build(calls int) *starRound {
	c.T.Helper()
	c.rounds++
	s := &starRound{Saga: c.Sites[0].Gateway(c.T).Saga(c.A)}
	order := []int{1, 2, 1, 2}[:calls]
	c.random.Shuffle(calls, func(i, j int) { order[i], order[j] = order[j], order[i] })
	var after []string
	for i, at := range order {
		var step harness.SagaStep
		if at == 1 {
			step = s.Do(harness.Charge(1), after...)
			s.charges = append(s.charges, step.Id(c.T))
			s.undos = append(s.undos, "refunded "+step.Id(c.T))
		} else {
			name, undo := fmt.Sprintf("/docs/%d-%d", c.rounds, i), "deleted "
			if c.random.IntN(2) == 0 {
				c.Lab.Write(name, `{"n":1}`)
				undo = "changed "
			}
			step = s.Do(harness.Put(name, `{"n":2}`), after...)
			s.undos = append(s.undos, undo+name)
		}
		s.steps, after = append(s.steps, step.Checkpoint), []string{step.Checkpoint}
	}
	s.asked = harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: s.steps[0], Scope: "sub_dag"}
	s.effects = len(c.Lab.LedgerEffects())
	return s
}

// disturb lets an upstream fail in the undo of one of the charges.
func (c *starCrash) disturb(s *starRound) {
	of := s.charges[c.random.IntN(len(s.charges))]
	s.fault = []string{"refused", "unclear", "lost", "busy"}[c.random.IntN(4)]
	switch s.fault {
	case "refused": // it does nothing, and says so
		c.Lab.OnFor("POST /refunds", of, -1, harness.RestSays(http.StatusOK, `{"status":"failed"}`))
	case "unclear": // it does it, and says what nobody understands
		c.Lab.OnFor("POST /refunds", of, 1, harness.RestDoes(http.StatusNotFound, ""))
	case "lost":
		c.Lab.OnFor("POST /refunds", of, 1, harness.RestLoses)
	case "busy":
		c.Lab.OnFor("POST /refunds", of, 1, harness.RestSays(http.StatusServiceUnavailable, ""))
	}
}

// begin asks for the rollback in the background, in one phase or in two: a gateway may die of it.
func (c *starCrash) begin(s *starRound, phases int) <-chan struct{} {
	prepare, execute, done := s.Asking(s.asked), s.G.Build(s.Asking(s.asked)), make(chan struct{})
	prepare.Path += "/prepare"
	first := s.G.Build(prepare)
	go func() {
		defer close(done)
		for _, r := range []*http.Request{first, execute}[2-phases:] {
			if res, err := s.G.Client.Do(r); err == nil {
				harness.Read(res)
			}
		}
	}()
	return done
}

// ended holds that a rollback comes to its end, whoever has died meanwhile, that asking again gives
// the same, and that it says what the ledger says.
func (c *starCrash) ended(s *starRound) {
	c.T.Helper()
	got, accepted := s.Look(s.asked.ID), false
	if got.Status < 300 {
		accepted = harness.Document[harness.RollbackDoc](c.T, got).Status != "prepared"
	} else {
		got.Problem(c.T, http.StatusForbidden, "not-in-workflow")
	}
	if !accepted { // else nobody asks for it: it goes on by itself
		if now := c.Lab.LedgerEffects()[s.effects:]; len(now) > 0 {
			c.T.Errorf("P5: %v by a rollback that was not accepted", now)
		}
		s.Ask(s.asked)
	}
	c.decide(s)
	s.Finished(s.asked.ID)
	doc := s.Back(s.asked)
	if again := s.Back(s.asked); again.Status != doc.Status || again.Effect != doc.Effect || fmt.Sprint(again.Steps) != fmt.Sprint(doc.Steps) {
		c.T.Errorf("P5: the same request got\n%+v\nand then\n%+v", doc, again)
	}
	c.tally[doc.Status]++
	c.compare(s, &doc)
}

// decide answers people's question, if the rollback has one: what it was asked for could not prepare.
func (c *starCrash) decide(s *starRound) {
	c.T.Helper()
	var doc harness.WaitingDoc
	harness.EventuallyWithin(c.T, harness.Patience, "a question, or the end", func() bool {
		doc = harness.Document[harness.WaitingDoc](c.T, s.Look(s.asked.ID))
		return doc.Waits != "" || doc.Status != ""
	})
	if doc.Waits == "" {
		return
	}
	verb := []string{"approve", "deny"}[c.random.IntN(2)]
	status, text, err := c.Running[0].Admin("POST", "/agent_guard/escalations/"+doc.Waits+"/decision", "application/json",
		fmt.Sprintf(`{"decision":%q,"plan_hash":%q,"operator":"ann","reason":"a test"}`, verb, doc.PlanHash))
	if err != nil || status != http.StatusOK {
		c.T.Errorf("%s: %d %s %v", verb, status, text, err)
	}
	c.tally[verb]++
}

// compare compares what the rollback says with what has happened.
func (c *starCrash) compare(s *starRound, doc *harness.RollbackDoc) {
	c.T.Helper()
	var order []int
	happened := make([]int, len(s.undos))
	for _, e := range c.Lab.LedgerEffects()[s.effects:] {
		i := slices.Index(s.undos, e.What+" "+e.Of)
		if i < 0 {
			c.T.Fatalf("P1: %+v is the undo of nothing", e)
		}
		happened[i]++
		order = append(order, i)
	}
	if !slices.IsSortedFunc(order, func(a, b int) int { return b - a }) {
		c.T.Errorf("cascade 4.3.2: the calls were undone in the order %v", order)
	}
	done, undone := 0, 0
	for i, id := range s.steps {
		at := slices.IndexFunc(doc.Steps, func(step harness.RollbackStep) bool { return step.Checkpoint == id })
		if at < 0 {
			c.T.Fatalf("there is no step of %s: %+v", id, doc)
		}
		step := doc.Steps[at]
		switch {
		case happened[i] > 1:
			c.T.Errorf("P1: %q has happened %d times", s.undos[i], happened[i])
		case step.Status == "completed" && happened[i] == 0:
			c.T.Errorf("P6: %q has not happened, and counts as done", s.undos[i])
		case step.Status != "completed" && happened[i] > 0 && step.Effect != "unknown":
			c.T.Errorf("P6: %q has happened, and its step is %+v", s.undos[i], step)
		case step.Status != "completed" && s.fault == "" && step.Reason != "unreachable" && step.Reason != "policy" && step.Reason != "denied":
			c.T.Errorf("nothing but a death was in the way of %q, and its step is %+v", s.undos[i], step)
		}
		if step.Status == "completed" {
			done++
		}
		undone += happened[i]
	}
	switch {
	case (doc.Status == "completed") != (done == len(s.steps)):
		c.T.Errorf("P6: the rollback is %s, and %d of %d steps are", doc.Status, done, len(s.steps))
	case doc.Status == "completed" && doc.Effect != "":
		c.T.Errorf("P6: it is completed, and its effect %s", doc.Effect)
	case undone > 0 && undone < len(s.steps) && doc.Effect == "":
		c.T.Errorf("P6: a part has happened, and it does not say so: %+v", doc)
	}
}

// revive starts those who were killed, side by side.
func (c *starCrash) revive(dead ...int) {
	c.T.Helper()
	for _, i := range dead {
		c.stages[i].Disarm()
		c.Running[i] = c.Sites[i].Launch(c.T)
	}
	for _, i := range dead {
		if !c.Running[i].Ready(c.T) {
			c.T.Fatalf("gateway %d did not start: %v\n%s", i, c.Running[i].Err, c.Running[i].Log.Tail(6000))
		}
	}
}

// settled holds that no gateway has a rollback that goes on.
func (c *starCrash) settled() {
	c.T.Helper()
	for i, g := range c.Running {
		harness.EventuallyWithin(c.T, harness.ProcBound, fmt.Sprintf("the end of all rollbacks of gateway %d", i), func() bool {
			for after := ""; ; {
				status, text, err := g.Admin("GET", "/agent_guard/rollbacks?limit=50&after="+after, "", "")
				var page struct {
					Rollbacks []harness.RollbackDoc
					Next      string
				}
				if err == nil {
					err = json.Unmarshal([]byte(text), &page)
				}
				if err != nil || status != http.StatusOK {
					c.T.Fatalf("%d %s %v", status, text, err)
				}
				for _, doc := range page.Rollbacks {
					if doc.State != "finished" {
						return false
					}
				}
				if after = page.Next; after == "" {
					return true
				}
			}
		})
	}
}

// Cascade 4.3.2, 4.3.4; P1, P5, P6: SIGKILL of the coordinator, and of each participant, before and
// after each commit that it makes while a rollback is prepared and executed.
func TestCrashAtEveryCommitOfAParticipant(t *testing.T) {
	t.Parallel() // its gateways are processes
	for victim := range 3 {
		t.Run(harness.StarIdentity(victim), func(t *testing.T) {
			t.Parallel()
			c := newStarCrash(t)
			stride := max(1, 300/harness.CrashRounds(t, 25)) // others each time
			kills := 0
			for n := c.random.IntN(stride); ; n += stride {
				s := c.build(2)
				reached := c.stages[victim].Count(n)
				ended := c.begin(s, 2)
				select {
				case <-reached:
				case <-ended:
				}
				c.Running[victim].Kill()
				point := c.stages[victim].Disarm()
				c.revive(victim)
				<-ended
				c.ended(s)
				if t.Failed() {
					t.Fatalf("killed at point %d, %q", n, point)
				}
				if point == "" {
					break
				}
				kills++
			}
			c.settled()
			t.Logf("%d kills: %v", kills, c.tally)
		})
	}
}

// ATD "Interaction with HITL": SIGKILL right before and right after the commit that pauses a workflow, or
// resumes it, before anything of it is sent to the participant: it hears of it all the same.
func TestCrashBetweenHoldAndDelivery(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newStarCrash(t)
	for _, point := range []string{"before hold", "after hold"} {
		s := c.Sites[0].Gateway(t).Saga(c.A)
		root, doc := s.Do(harness.Charge(1)), "/docs/"+uuid.NewString()
		s.Do(harness.Put(doc, `{"n":2}`), root.Checkpoint)
		c.Lab.Write(doc, `{"n":3}`) // which is not undone
		killed := func(do func()) {
			reached, ended := c.stages[0].Arm(point), make(chan struct{})
			go func() { defer close(ended); do() }()
			harness.WaitWithin(t, harness.ProcBound, reached, point)
			c.Running[0].Kill()
			<-ended
			c.revive(0)
		}
		asked := harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
		killed(func() {
			if res, err := s.G.Client.Do(s.G.Build(s.Asking(asked))); err == nil {
				harness.Read(res)
			}
		})
		s.Finished(asked.ID).Want(t, "partial", "changed-since")
		harness.Eventually(t, "it is paused", func() bool { return c.Tried(1, s.Wid).Status == http.StatusConflict })
		harness.Eventually(t, "that is confirmed", func() bool { return strings.Contains(fmt.Sprint(s.Holds().Holds), "held held") })
		id, gateway := s.Holds().Holds[0].Escalation, c.Running[0]
		killed(func() {
			_, _, _ = gateway.Admin("POST", "/agent_guard/escalations/"+id+"/decision", "application/json", `{"decision":"approve","operator":"ann"}`)
		})
		if s.Holds().Holds[0].State == "held" {
			c.Sites[0].Decides(t, "approve", id)
		} else if point == "before hold" {
			t.Error("a decision counts that was not committed")
		}
		harness.Eventually(t, "it is resumed", func() bool { return c.Tried(1, s.Wid).Status == http.StatusCreated })
	}
}

// Cascade 4.3.2, 4.3.4; P1, P5, P6: SIGKILL of any of three gateways, or of several, at random
// moments of a rollback, and again while it goes on, with upstreams that fail.
func TestCrashParticipantsAtRandomMoments(t *testing.T) {
	t.Parallel() // its gateways are processes
	const stars = 2
	rounds := harness.CrashRounds(t, 4)
	for star := range stars {
		t.Run(fmt.Sprint(star), func(t *testing.T) {
			t.Parallel()
			c := newStarCrash(t)
			for round := star; round < rounds; round += stars {
				s := c.build(4)
				if c.random.IntN(2) == 0 {
					c.disturb(s)
				}
				c.round(s)
				c.ended(s)
				if t.Failed() {
					t.Fatalf("round %d of %d, with %q", round+1, rounds, s.fault)
				}
			}
			c.settled()
			t.Logf("%v", c.tally)
		})
	}
}

// round kills once or more often while s is rolled back, and leaves all alive.
func (c *starCrash) round(s *starRound) {
	c.T.Helper()
	dead := c.random.Perm(3)[:1+c.random.IntN(5)/2]
	hit, over := make(chan struct{}), make(chan struct{})
	var once sync.Once
	moment := func() { once.Do(func() { close(hit) }) }
	before := c.random.IntN(2) == 0
	if c.random.IntN(2) == 0 { // at an effect
		nth, seen := 1+c.random.IntN(4), 0
		c.Lab.Watch(func(harness.RestEffect) {
			if seen++; seen == nth {
				moment()
				if before {
					<-over
				}
			}
		})
	} else { // at a point of one of them
		reached := c.stages[dead[0]].Count(c.random.IntN(60))
		go func() {
			select {
			case <-reached:
				moment()
			case <-over:
			}
		}()
	}
	ended := c.begin(s, 1+c.random.IntN(2))
	select {
	case <-hit:
	case <-ended:
	}
	for _, i := range dead {
		c.Running[i].Kill()
	}
	close(over)
	c.Lab.Watch(nil)
	if !slices.Contains(dead, 0) && c.random.IntN(8) == 0 {
		<-ended // away for as long as it is asked to prepare
	}
	for c.random.IntN(3) == 0 { // again, while it starts or goes on
		i := dead[c.random.IntN(len(dead))]
		c.stages[i].Disarm()
		reached := c.stages[i].Count(c.random.IntN(40))
		c.Running[i] = c.Sites[i].Launch(c.T)
		select {
		case <-reached:
		case <-c.Running[i].Log.When("serving initial configuration"):
		}
		c.Running[i].Kill()
	}
	c.revive(dead...)
	<-ended
}
