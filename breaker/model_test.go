package breaker_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// model is a breaker that is slow and obviously right: it keeps every outcome and every
// call, and looks at all of them each time.
type model struct {
	set        breaker.Settings
	now        time.Time
	state      breaker.State
	mode       breaker.Mode
	generation uint64
	since      time.Time

	// of the present CLOSED
	base       time.Time // where its steps begin
	outcomes   []modelOutcome
	streak     int
	retryAfter time.Time

	cooldown, lasts time.Duration
	until           time.Time
	total           time.Duration
	failedProbes    int
	permanent       int
	opened          modelCounts
	probe           *modelCall
	leaseEnds       time.Time
	paced, alive    bool // the lease that is out

	safe     bool // whether a preferred call has asked, in the window or since
	safeStep int  // when it did, in CLOSED

	calls []*modelCall
}

type modelOutcome struct {
	step                int
	fail, slow, limited bool
}

type modelCounts struct{ calls, failures, slow, limited, overdue int }

// modelCall is one call beside its real permit.
type modelCall struct {
	permit     *breaker.Permit
	generation uint64 // in which it counts; 0 if in none
	due        int    // the step in which it is overdue; 0 if never
	slow       bool
}

func (m *model) step() int { return int(m.now.Sub(m.base) / (time.Duration(m.set.Window) / 60)) }

// patienceSteps rounds up to one of the values that the package documents.
func patienceSteps(patience, step time.Duration) int {
	n := int((patience + step - 1) / step)
	value, by := 1, 1
	for value < n {
		if value >= 8*by {
			by *= 2
		}
		value += by
	}
	return value
}

func (m *model) counts() modelCounts {
	var c modelCounts
	for _, o := range m.outcomes {
		if o.step <= m.step()-60 {
			continue
		}
		if o.limited {
			c.limited++
			continue
		}
		c.calls++
		if o.fail {
			c.failures++
		}
		if o.slow {
			c.slow++
		}
	}
	for _, call := range m.calls {
		if call.generation == m.generation && call.due > 0 && m.step() >= call.due {
			c.overdue++
		}
	}
	return c
}

// modelView is a view beside what it was made of.
type modelView struct {
	view      *breaker.View
	threshold float64
	windows   []time.Duration
}

func randomView(t *testing.T, rnd *rand.Rand) modelView {
	v := modelView{threshold: 1}
	for range rnd.IntN(3) {
		threshold := pick(rnd, 0.05, 0.2, 0.4, 0.7)
		window := time.Duration(1+rnd.IntN(80)) * time.Second
		v.view = v.view.And(mustView(t, threshold, window))
		v.threshold, v.windows = min(v.threshold, threshold), append(v.windows, window)
	}
	return v
}

// refuses looks at every stretch from the shortest window to the longest, in steps.
func (m *model) refuses(v modelView) bool {
	if v.view == nil || m.mode == breaker.ForcedClosed || m.mode == breaker.Observe {
		return false
	}
	threshold := min(max(v.threshold, 0.1), m.set.Threshold)
	steps := func(window time.Duration) int { return min(stepsIn(window, time.Duration(m.set.Window)/60)+1, 60) }
	from, to := steps(slices.Min(v.windows)), steps(slices.Max(v.windows))
	if from == 60 && threshold == m.set.Threshold {
		return false
	}
	for n := from; n <= to; n++ {
		c := modelCounts{overdue: m.counts().overdue}
		for _, o := range m.outcomes {
			if o.step > m.step()-n && !o.limited {
				c.calls++
				if o.fail {
					c.failures++
				}
			}
		}
		if m.over(c.failures, c.calls, threshold) || m.over(c.failures+c.overdue, c.calls+c.overdue, threshold) {
			return true
		}
	}
	return false
}

// stepsIn is how many steps a window has, rounded up.
func stepsIn(window, step time.Duration) int { return int((window + step - 1) / step) }

func (m *model) over(part, all int, threshold float64) bool {
	return all >= m.set.MinVolume && float64(part) > threshold*float64(all)
}

func (m *model) exceeded() bool {
	c := m.counts()
	return m.over(c.failures, c.calls, m.set.Threshold) ||
		m.set.SlowCall > 0 && m.over(c.slow, c.calls, m.set.SlowThreshold) ||
		c.overdue > 0 && m.over(c.failures+c.overdue, c.calls+c.overdue, m.set.Threshold)
}

func (m *model) enter(state breaker.State) {
	m.forgetSafe()
	m.state, m.since, m.until = state, m.now, time.Time{}
	m.generation++
	m.probe = nil
}

// forgetSafe forgets that a safe call asked once a window has passed. Outside of CLOSED there is none.
func (m *model) forgetSafe() {
	if m.state == breaker.Closed && m.safeStep <= m.step()-60 {
		m.safe = false
	}
}

func (m *model) close() {
	m.enter(breaker.Closed)
	m.base, m.outcomes, m.streak, m.retryAfter = m.now, nil, 0, time.Time{}
	m.total, m.failedProbes, m.safeStep = 0, 0, 0
}

func (m *model) open(cooldown time.Duration, retryAfter time.Time) {
	m.enter(breaker.Open)
	m.cooldown, m.lasts = cooldown, max(cooldown, retryAfter.Sub(m.now))
	m.until = m.now.Add(m.lasts)
	m.total += m.lasts
}

func (m *model) trip() {
	if m.mode == breaker.ForcedClosed {
		return
	}
	cooldown := m.cooldown
	if cooldown == 0 || m.now.Sub(m.since) >= 10*time.Minute {
		cooldown = time.Duration(m.set.Cooldown)
	}
	m.opened, m.total, m.failedProbes = m.counts(), 0, 0
	m.open(cooldown, m.retryAfter)
}

func (m *model) probeFailed(retryAfter time.Duration) {
	var until time.Time
	if retryAfter > 0 {
		until = m.now.Add(min(retryAfter, time.Duration(m.set.MaxCooldown)))
	}
	m.failedProbes++
	if m.failedProbes == 3 {
		m.permanent++
	}
	cooldown := time.Duration(m.set.Cooldown)
	if m.cooldown > 0 {
		cooldown = min(2*m.cooldown, time.Duration(m.set.MaxCooldown))
	}
	m.open(cooldown, until)
}

// pass lets time go by, from one thing that is due to the next.
func (m *model) pass(d time.Duration) {
	end := m.now.Add(d)
	for {
		next := end
		earlier := func(at time.Time) {
			if at.Before(next) {
				next = at
			}
		}
		switch {
		case m.state == breaker.Closed:
			earlier(m.base.Add(time.Duration(m.step()+1) * (time.Duration(m.set.Window) / 60)))
		case m.state == breaker.Open && !m.until.IsZero():
			earlier(m.until)
		case m.state == breaker.HalfOpen && m.probe != nil:
			earlier(m.leaseEnds)
		}
		m.now = next
		if next == end {
			return
		}
		switch m.state {
		case breaker.Closed:
			if m.counts().overdue > 0 && m.exceeded() {
				m.trip()
			}
		case breaker.Open:
			m.enter(breaker.HalfOpen)
		case breaker.HalfOpen:
			if m.paced || m.alive {
				m.probe = nil
			} else {
				m.probeFailed(0)
			}
		}
	}
}

// acquire reports whether the call is let through.
func (m *model) acquire(op breaker.Op, v modelView) (*modelCall, bool) {
	call := &modelCall{}
	preferred := op.Safe && !op.ClientPaced
	m.forgetSafe()
	if preferred {
		m.safe, m.safeStep = true, m.step()
	}
	wait := time.Duration(0)
	if m.safe {
		wait = 5 * time.Second
	}
	switch {
	case m.state == breaker.Closed && m.refuses(v):
		return nil, false
	case m.state == breaker.Closed:
		call.generation = m.generation
		if op.Patience > 0 {
			call.due = m.step() + patienceSteps(op.Patience, time.Duration(m.set.Window)/60) + 1
		}
	case m.state == breaker.HalfOpen && m.probe == nil && (preferred || m.now.Sub(m.since) >= wait):
		m.probe, m.leaseEnds = call, m.now.Add(time.Duration(m.set.ProbeLease))
		m.paced, m.alive = op.ClientPaced, false
	case m.mode != breaker.Observe:
		return nil, false
	}
	m.calls = append(m.calls, call)
	return call, true
}

func (m *model) answered(call *modelCall, latency time.Duration) {
	call.due = 0
	call.slow = m.set.SlowCall > 0 && latency > time.Duration(m.set.SlowCall)
	if m.probe == call {
		if call.slow {
			m.probeFailed(0)
			return
		}
		m.close()
		call.generation = m.generation
	}
}

func (m *model) sent(call *modelCall) {
	if m.probe == call && m.paced && !m.alive {
		m.paced, m.leaseEnds = false, m.now.Add(time.Duration(m.set.ProbeLease))
	}
}

func (m *model) done(call *modelCall, o breaker.Outcome) {
	call.due = 0
	if m.probe == call {
		switch o.Class {
		case breaker.Success:
			m.close()
			call.generation = m.generation
		case breaker.Neutral:
			m.probe = nil
			return
		default:
			m.probeFailed(o.RetryAfter)
			return
		}
	}
	if m.state != breaker.Closed || call.generation != m.generation {
		return
	}
	if at := m.now.Add(min(o.RetryAfter, time.Duration(m.set.MaxCooldown))); o.RetryAfter > 0 && at.After(m.retryAfter) {
		m.retryAfter = at
	}
	fail := o.Class == breaker.Failure || o.Class == breaker.InBand
	switch {
	case o.Class == breaker.Neutral:
		return
	case o.Class == breaker.RateLimited:
		m.outcomes = append(m.outcomes, modelOutcome{step: m.step(), limited: true})
		return
	case fail:
		m.streak++
	default:
		m.streak = 0
	}
	m.outcomes = append(m.outcomes, modelOutcome{step: m.step(), fail: fail, slow: call.slow})
	if m.exceeded() || fail && m.set.Consecutive > 0 && m.streak >= m.set.Consecutive {
		m.trip()
	}
}

func (m *model) setMode(mode breaker.Mode) {
	was := m.mode
	m.mode = mode
	switch {
	case mode == was:
	case mode == breaker.ForcedOpen:
		if m.state == breaker.Closed {
			m.opened, m.total, m.failedProbes, m.lasts = m.counts(), 0, 0, 0
		}
		if m.state != breaker.Open {
			m.enter(breaker.Open)
		}
		m.until = time.Time{}
	case mode == breaker.ForcedClosed && m.state != breaker.Closed:
		m.close()
	case was == breaker.ForcedOpen:
		m.enter(breaker.HalfOpen)
	}
}

// restart forgets what dies with the process.
func (m *model) restart() {
	m.calls, m.probe, m.permanent = nil, nil, 0
	m.opened = modelCounts{calls: m.opened.calls + m.opened.overdue, failures: m.opened.failures + m.opened.overdue}
	m.safe = m.state != breaker.Closed
	if m.state == breaker.Closed {
		m.base, m.outcomes, m.streak, m.retryAfter = m.now, nil, 0, time.Time{}
	}
}

// compare holds the real breaker against the model.
func (m *model) compare(t *testing.T, b *breaker.Breaker, hook *recorder) {
	t.Helper()
	s := b.Status()
	equal(t, "state", s.State, m.state)
	equal(t, "mode", s.Mode, m.mode)
	equal(t, "generation", s.Generation, m.generation)
	c := m.opened
	if m.state == breaker.Closed {
		c = m.counts()
	}
	equal(t, "counts", modelCounts{s.Calls, s.Failures, s.Slow, s.RateLimited, s.Overdue}, c)
	left := time.Duration(0)
	if !m.until.IsZero() {
		left = m.until.Sub(m.now)
	}
	equal(t, "cooldown left", s.CooldownRemaining, left)
	equal(t, "probing", s.Probing, m.probe != nil)
	equal(t, "failed probes", s.FailedProbes, m.failedProbes)
	equal(t, "reports", len(hook.permanent), m.permanent)
	snapshot := b.Snapshot()
	equal(t, "cooldown", snapshot.Cooldown, m.cooldown)
	equal(t, "total cooldown", snapshot.TotalCooldown, m.total)
}

// TestModel compares the breaker with the model over random histories, after each step.
func TestModel(t *testing.T) {
	seeds := uint64(100)
	if raced {
		seeds = 10
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T, pass func(time.Duration)) {
				runModel(t, rand.New(rand.NewPCG(seed, 1)), pass)
			})
		})
	}
}

func pick[T any](rnd *rand.Rand, of ...T) T { return of[rnd.IntN(len(of))] }

func runModel(t *testing.T, rnd *rand.Rand, pass func(time.Duration)) {
	rules := mustRules(t, breaker.Settings{
		Window: jsontime.Duration(pick(rnd, 60*time.Second, 10*time.Second)), MinVolume: pick(rnd, 3, 10),
		Consecutive: pick(rnd, 0, 4), SlowCall: jsontime.Duration(pick(rnd, 0, time.Second)), Threshold: pick(rnd, 0.5, 0.25),
		ProbeLease: jsontime.Duration(20 * time.Second),
	})
	hook := &recorder{}
	b := breaker.New(upstream, rules, hook)
	m := &model{set: rules.Settings(), now: time.Now(), since: time.Now(), base: time.Now(), generation: 1}
	health, reads := 0.5, pick(rnd, 0, 0.01, 0.5)
	for i := range 600 {
		var did string
		switch n := rnd.IntN(100); {
		case n < 45:
			op := breaker.Op{Safe: rnd.Float64() < reads, ClientPaced: rnd.IntN(3) == 0, Patience: pick(rnd, 0, 0, time.Second, 7*time.Second, 12*time.Second, 5*time.Minute)}
			view := randomView(t, rnd)
			op.View = view.view
			did = fmt.Sprintf("acquire %+v", op)
			permit, err := b.Acquire(op)
			call, let := m.acquire(op, view)
			if let != (err == nil) {
				t.Fatalf("step %d: %s: error %v, the model says %v", i, did, err, let)
			}
			if let {
				call.permit = &permit
			}
		case n < 55 && len(m.calls) > 0:
			call := pick(rnd, m.calls...)
			latency := pick(rnd, time.Millisecond, time.Millisecond, time.Minute)
			did = fmt.Sprint("answered ", latency)
			call.permit.Answered(latency)
			m.answered(call, latency)
		case n < 60 && len(m.calls) > 0:
			call := pick(rnd, m.calls...)
			did = "sent"
			call.permit.Lease().Sent()
			m.sent(call)
		case n < 62 && len(m.calls) > 0:
			call := pick(rnd, m.calls...)
			did = "alive"
			call.permit.Lease().Alive()
			m.alive = m.alive || m.probe == call
		case n < 85 && len(m.calls) > 0:
			at := rnd.IntN(len(m.calls))
			call := m.calls[at]
			m.calls = append(m.calls[:at], m.calls[at+1:]...)
			o := breaker.Outcome{Class: breaker.Success, RetryAfter: pick(rnd, 0, 0, 0, 50*time.Second, time.Hour)}
			if rnd.Float64() > health {
				o.Class = pick(rnd, breaker.Failure, breaker.Failure, breaker.InBand, breaker.RateLimited, breaker.Neutral)
			}
			did = fmt.Sprintf("done %+v", o)
			call.permit.Done(o)
			m.done(call, o)
		case n < 98:
			d := time.Duration(rnd.Int64N(int64(pick(rnd, time.Second, time.Second, time.Minute, 10*time.Minute))))
			did = fmt.Sprint("pass ", d)
			pass(d)
			m.pass(d)
		case n < 99:
			mode := pick(rnd, breaker.Auto, breaker.Auto, breaker.Observe, breaker.ForcedOpen, breaker.ForcedClosed)
			did = fmt.Sprint("mode ", mode)
			b.SetMode(mode)
			m.setMode(mode)
		case rnd.IntN(3) > 0:
			health, reads = pick(rnd, 0.1, 0.5, 0.9), pick(rnd, 0, 0.01, 0.5)
		default:
			did = "restart"
			hook = &recorder{} // the old breaker lives on, and tells the old one
			b = restart(t, b, m.set, hook)
			m.restart()
		}
		m.compare(t, b, hook)
		if t.Failed() {
			t.Fatalf("step %d: %s", i, did)
		}
	}
}

// Nothing is lost or counted twice, however many calls end at once.
func TestCountsAreExactAtOnce(t *testing.T) {
	crowd(t, func(t *testing.T, pass, sleep func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{SlowCall: jsontime.Duration(time.Second)}, nil)
		b.SetMode(breaker.ForcedClosed)
		const callers, each = 16, 1000
		var group sync.WaitGroup
		for range callers {
			group.Go(func() {
				for i := range each {
					p, err := b.Acquire(breaker.Op{Safe: true, Patience: time.Minute})
					if err != nil {
						t.Error(err)
						return
					}
					if i%5 == 0 {
						p.Answered(2 * time.Second)
					}
					switch i % 4 {
					case 0, 1:
						p.Done(ok)
					case 2:
						p.Done(failed)
					case 3:
						p.Done(breaker.Outcome{Class: breaker.RateLimited})
					}
					if i%100 == 0 {
						sleep(time.Millisecond)
					}
				}
			})
		}
		group.Wait()
		s := b.Status()
		equal(t, "calls", s.Calls, callers*each*3/4)
		equal(t, "failures", s.Failures, callers*each/4)
		equal(t, "rate-limited", s.RateLimited, callers*each/4)
		equal(t, "slow", s.Slow, callers*each/5*3/4)
		equal(t, "overdue", s.Overdue, 0)
		pass(61 * time.Second)
		s = b.Status()
		equal(t, "calls later", s.Calls, 0)
		equal(t, "slow later", s.Slow, 0)
		equal(t, "rate-limited later", s.RateLimited, 0)
	})
}

// Calls that become overdue, are answered and end at the same instants leave nothing
// behind.
func TestOverdueIsExactAtOnce(t *testing.T) {
	crowd(t, func(t *testing.T, pass, sleep func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		b.SetMode(breaker.ForcedClosed)
		var group sync.WaitGroup
		for i := range 200 {
			group.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 0))
				for range 20 {
					p, err := b.Acquire(breaker.Op{Patience: time.Duration(rnd.IntN(10)) * time.Second})
					if err != nil {
						t.Error(err)
						return
					}
					sleep(time.Duration(rnd.IntN(10)) * time.Second)
					if rnd.IntN(2) == 0 {
						p.Answered(time.Second)
						sleep(time.Duration(rnd.IntN(10)) * time.Second)
					}
					p.Done(ok)
				}
			})
		}
		group.Wait()
		equal(t, "overdue", b.Status().Overdue, 0)
		equal(t, "rate", b.Status().ErrorRate, 0)
		pass(2 * time.Minute)
		calls(t, b, 1, ok)
		equal(t, "overdue", b.Status().Overdue, 0)
		equal(t, "calls", b.Status().Calls, 1)
	})
}

// Everything at once: the race detector looks on, and it all comes to an end.
func TestEverythingAtOnce(t *testing.T) {
	crowd(t, func(t *testing.T, _, sleep func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		other := mustRules(t, breaker.Settings{MinVolume: 5, Window: jsontime.Duration(10 * time.Second)})
		var group sync.WaitGroup
		for i := range 32 {
			group.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 1))
				for range 200 {
					p, err := b.Acquire(breaker.Op{Safe: rnd.IntN(2) == 0, Patience: time.Duration(rnd.IntN(3)) * time.Second})
					sleep(time.Duration(rnd.IntN(3000)) * time.Millisecond)
					if err == nil && rnd.IntN(3) > 0 {
						p.Answered(time.Second)
					}
					p.Done(breaker.Outcome{Class: breaker.Class(rnd.IntN(5)), RetryAfter: time.Duration(rnd.IntN(2)) * time.Second})
					switch rnd.IntN(200) {
					case 0:
						b.SetMode(breaker.Mode(rnd.IntN(4)))
					case 1:
						b.SetRules(other)
					case 2:
						b.Status()
					case 3:
						b.Snapshot()
					case 4:
						b.Keep(b.Status().Generation, "token")
					}
				}
			})
		}
		group.Wait()
		b.SetMode(breaker.ForcedClosed)
		b.SetMode(breaker.Auto)
		calls(t, b, 1, ok)
		for i, e := range hook.heard {
			equal(t, "generation", e.Generation, uint64(i+2))
		}
	})
}

func TestNothingIsAllocated(t *testing.T) {
	b := newBreaker(t, breaker.Settings{}, nil)
	b.SetMode(breaker.ForcedClosed)
	equal(t, "allocations of a call", testing.AllocsPerRun(1000, func() {
		p, _ := b.Acquire(breaker.Op{})
		p.Answered(time.Millisecond)
		p.Done(ok)
		p, _ = b.Acquire(breaker.Op{Patience: time.Hour})
		p.Done(failed)
	}), 0)
	b.SetMode(breaker.ForcedOpen)
	equal(t, "allocations of a refusal", testing.AllocsPerRun(1000, func() {
		p, _ := b.Acquire(breaker.Op{})
		p.Done(ok)
	}), 0)
}
