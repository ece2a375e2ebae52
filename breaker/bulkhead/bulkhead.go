// Package bulkhead shares a pool of permits among workflows, so that one cannot starve another
// (cascade 3.3.3; ATD, "Fair-Share Scheduling").
//
// A call holds a permit from before it is sent until it has ended. A workflow that finds no permit
// waits in a queue of its own. A free permit goes to
//
//  1. a class of a workflow that has waited for five minutes since its last permit,
//  2. a critical call,
//  3. a workflow with less than its base share, which is the same for all that hold or wait,
//  4. any other one, so that no permit is idle while somebody waits.
//
// Among equals the higher class is first, then the workflow that has used the least time, then who
// came first. A call that was sent is never interrupted for another (P1).
package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// Class is the priority of a call (ATD, "Priority Levels").
type Class int8

// The classes. The zero value is Normal.
const (
	Low Class = iota - 1
	Normal
	High
	Critical
)

var classNames = [...]string{"low", "normal", "high", "critical"}

// Classes lists the names of the classes, the lowest first.
func Classes() []string { return classNames[:] }

func (c Class) String() string { return classNames[c-Low] }

// ParseClass reads the name of a class. It reports false for every other text.
func ParseClass(name string) (Class, bool) {
	for i, n := range classNames {
		if n == name {
			return Class(i) + Low, true
		}
	}
	return Normal, false
}

// Settings are the limits of a pool. Zero values stand for the defaults.
type Settings struct {
	// Calls at the upstream at a time. This and all other limits here are of each gateway: of several that share a
	// store, each allows so much; divide by their number what the upstream can take. Default: 32768.
	Total int `json:"total,omitempty"`

	// Calls of one workflow at the upstream at a time. Default: 16384.
	PerWorkflow int `json:"per_workflow,omitempty"`

	// Calls of one workflow that wait at a time; -1 for none. Default: 1024.
	Queue int `json:"queue,omitempty"`

	// How long a call waits for a permit, at most 1h. A call that would miss its deadline is refused at
	// once, after 16 calls have shown how long they take. Calls of class `low` wait up to 300 s, after which nobody
	// is preferred to them. Default: 30s.
	Wait jsontime.Duration `json:"wait,omitempty"`

	// Calls of one workflow in a second, on average and at once. Above it they get 429
	// `quota-exceeded`. Default: no limit.
	Rate int `json:"rate,omitempty"`

	// Retries that one workflow may send, in percent of its first calls, over 10 s; -1 for any number. A
	// retry is a call that would be sent again, or that counts its attempts in a header field. Ten a second may
	// be sent in any case. Above both retries get 429 `quota-exceeded`, and their keys stay free. Default: 20.
	Retries int `json:"retries,omitempty"`

	// Retries in a second that one workflow may send in any case; none if negative. Default: 10.
	RetryFloor int `json:"-"`
}

// Check fills in the defaults and checks the ranges. The error names the option that is out of its
// range.
func (s Settings) Check() (Settings, error) {
	s.Total = cmp.Or(s.Total, 32768)
	s.PerWorkflow = cmp.Or(s.PerWorkflow, 16384)
	s.Queue = cmp.Or(s.Queue, 1024)
	s.Wait = cmp.Or(s.Wait, jsontime.Duration(30*time.Second))
	s.Retries = cmp.Or(s.Retries, 20)
	s.RetryFloor = cmp.Or(s.RetryFloor, 10)
	switch {
	case s.Total < 1 || s.Total > maxPermits:
		return s, fmt.Errorf("total is %d; it must be from 1 to %d", s.Total, maxPermits)
	case s.PerWorkflow < 1 || s.PerWorkflow > maxPermits:
		return s, fmt.Errorf("per_workflow is %d; it must be from 1 to %d", s.PerWorkflow, maxPermits)
	case s.Queue > maxPermits:
		return s, fmt.Errorf("queue is %d; it must be at most %d", s.Queue, maxPermits)
	case s.Wait < 0 || time.Duration(s.Wait) > time.Hour:
		return s, fmt.Errorf("wait is %s; it must be over 0 and at most 1h", time.Duration(s.Wait))
	case s.Rate < 0 || s.Rate > maxPermits:
		return s, fmt.Errorf("rate is %d; it must be from 1 to %d calls a second, or 0 for any number", s.Rate, maxPermits)
	case s.Retries > 100:
		return s, fmt.Errorf("retries is %d; it must be from 1 to 100 percent, or negative for any number", s.Retries)
	case s.RetryFloor > maxPermits:
		return s, fmt.Errorf("retry_floor is %d; it must be from 1 to %d retries a second, or negative for none", s.RetryFloor, maxPermits)
	}
	s.Queue, s.RetryFloor = max(s.Queue, 0), max(s.RetryFloor, 0)
	return s, nil
}

const (
	maxPermits = 1_000_000
	// starve is how long others are preferred to a class of a workflow that waits. A call of class Low waits
	// that long, or Settings.Wait if that is longer.
	starve = 300 * time.Second
	// maxWaiting bounds the workflows that wait at once: each release looks at all of them, and names
	// of workflows cost their callers nothing.
	maxWaiting = 1024
	// seldom is how many permits must have been released before their time is trusted.
	seldom = 16
)

// Reason says why a call got no permit.
type Reason uint8

// Why a call got no permit: its workflow's queue is full, it waited too long, it would miss its
// deadline, or its workflow is over Settings.Rate or Retries.
const (
	QueueFull Reason = iota
	WaitedTooLong
	TooLate
	OverRate
	OverRetries
	reasons
)

var reasonNames = [reasons]string{"queue_full", "waited_too_long", "too_late", "over_rate", "over_retries"}

func (r Reason) String() string { return reasonNames[r] }

// FullError refuses a call. Nothing was sent.
type FullError struct {
	Reason Reason
	// RetryAfter is when a permit is likely to be had, from 1 s to 60 s.
	RetryAfter time.Duration
}

func (e *FullError) Error() string {
	return fmt.Sprintf("no permit: %s; try again in %s", e.Reason, e.RetryAfter)
}

// Sharer names what has a share: a workflow, and who says that a call belongs to it, where nothing
// proves that, so that nobody uses up the share of others (P3). Calls without a workflow share one lot,
// that of the zero value.
type Sharer struct {
	Workflow string
	// Caller is the caller's name, Credential a hash of what it shows; zero values where a token
	// proves the workflow.
	Caller     string
	Credential uint64
}

// Call is a call that wants a permit.
type Call struct {
	Sharer
	Class Class
	// Key is the same for a call and its retries, and no other; 0 where it is unknown.
	Key uint64
	// Retry says that an earlier attempt was sent, as Pool.Failed does.
	Retry bool
	// Deadline is when the call is of no use any more; zero for never.
	Deadline time.Time
	// Unserved is called once: when a call has waited for unservedAfter, or when the longest wait that
	// it has ends before that without a permit. It may be nil.
	Unserved func()
}

// unservedAfter is how long a call waits until it counts as unserved (ATD, "Unsatisfiable Resource
// Hints").
const unservedAfter = 60 * time.Second

// Pool is a set of permits. Its methods may be called from any goroutine.
type Pool struct {
	start time.Time

	mu      sync.Mutex
	set     Settings
	lots    map[Sharer]*lot
	spare   []*lot // forgotten, to be used again
	waiting []*lot // that have queues
	inUse   int
	active  int     // lots that hold or wait
	virtual int64   // the time used by the last lot that was preferred to others
	held    float64 // average time for which a permit is held, in µs
	samples int
	crowded int // so many lots are looked through for those that can be forgotten
	failed  failures
	again   map[uint64]*retry // by Call.Key, while none of them is known to be sent
	counts  Counts
}

// lot is what one workflow has of a pool.
type lot struct {
	inUse  int
	queued int
	place  int   // in Pool.waiting, with a queue
	used   int64 // µs for which permits were held, but for those that are held now
	begun  int64 // sum of the times at which those began, in µs
	due    int64 // when the rate's bucket is full again, in µs
	sent   sent
	queues [len(classNames)]queue
}

// queue is a list of waiting calls, the first first.
type queue struct {
	first, last *waiter
	length      int
	served      int64 // when it last got a permit
}

type waiter struct {
	lot        *lot
	class      Class
	came       int64
	granted    bool
	retry      *retry
	ready      chan struct{} // closed with granted
	prev, next *waiter
}

// New makes a pool. The settings must be those that Check returned.
func New(s Settings) *Pool {
	return &Pool{start: time.Now(), set: s, lots: map[Sharer]*lot{}, again: map[uint64]*retry{}}
}

// Configure changes the limits. Permits over new limits stay with their calls.
func (p *Pool) Configure(s Settings) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.set = s
	p.serve(p.now())
}

func (p *Pool) now() int64 { return int64(time.Since(p.start) / time.Microsecond) }

// Permit is the right to make one call. Do not copy it. The zero value is no permit.
type Permit struct {
	pool  *Pool
	lot   *lot
	begun int64
	retry *retry // nil for a first call
}

// Release returns the permit. Further calls do nothing, so that it can be deferred.
func (t *Permit) Release() {
	p, l := t.pool, t.lot
	if p == nil {
		return
	}
	t.pool = nil
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	p.drop(l, t.begun)
	l.used += now - t.begun
	p.leave(t.retry)
	p.counts.Held += time.Duration(now-t.begun) * time.Microsecond
	p.samples++
	p.held += (float64(now-t.begun) - p.held) / float64(min(p.samples, 64))
	p.left(l)
	p.serve(now)
}

// Acquire fills in t, or returns a *FullError or the cause of ctx. Waiting calls whose ctx has ended
// get no permit. Release must follow an Acquire without an error.
func (p *Pool) Acquire(ctx context.Context, c *Call, t *Permit) error {
	p.mu.Lock()
	now := p.now()
	l := p.lotOf(c.Sharer, now)
	again, err := p.quota(l, c, now)
	if err != nil {
		p.mu.Unlock()
		return err
	}
	if p.inUse < p.set.Total && l.inUse < p.set.PerWorkflow { // then nobody waits who may have it; see serve
		p.enter(l)
		p.take(l, again, now)
		p.mu.Unlock()
		*t = Permit{pool: p, lot: l, begun: now, retry: again}
		return nil
	}
	wait, err := p.mayWait(l, c)
	if err != nil {
		p.leave(again)
		p.mu.Unlock()
		return err
	}
	w := &waiter{lot: l, class: c.Class, came: now, retry: again, ready: make(chan struct{})}
	p.enter(l)
	p.push(w)
	p.mu.Unlock()
	if err := p.await(ctx, c, w, wait); err != nil {
		return err
	}
	*t = Permit{pool: p, lot: l, begun: w.came, retry: again}
	return nil
}

// await waits until w has a permit.
func (p *Pool) await(ctx context.Context, c *Call, w *waiter, wait time.Duration) error {
	over := time.NewTimer(wait)
	defer over.Stop()
	unserved := time.NewTimer(unservedAfter)
	defer unserved.Stop()
	reported := c.Unserved == nil
	report := func() {
		if !reported {
			reported = true
			c.Unserved()
		}
	}
	for {
		select {
		case <-w.ready:
			if ctx.Err() == nil {
				return nil
			}
			return p.giveUp(c, w, context.Cause(ctx)) // nobody waits for the answer
		case <-ctx.Done():
			return p.giveUp(c, w, context.Cause(ctx))
		case <-over.C:
			err := p.giveUp(c, w, nil)
			if err != nil {
				report()
			}
			return err
		case <-unserved.C:
			report()
		}
	}
}

// giveUp takes w out of its queue, or its permit back, since its client has left with this cause. With
// none its time is over: a permit that came with its end is good.
func (p *Pool) giveUp(c *Call, w *waiter, gone error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := w.lot
	switch {
	case w.granted && gone == nil:
		return nil
	case w.granted:
		p.drop(l, w.came)
	default:
		p.remove(w)
	}
	p.leave(w.retry)
	p.left(l)
	p.serve(p.now())
	if gone == nil {
		return p.refuse(WaitedTooLong, p.pace(l, c.Class))
	}
	p.counts.Left++
	return gone
}

// lotOf returns the workflow's lot. Those of workflows without calls are forgotten now and then.
func (p *Pool) lotOf(s Sharer, now int64) *lot {
	if l := p.lots[s]; l != nil {
		return l
	}
	if len(p.lots) > max(p.crowded, 64) {
		for name, l := range p.lots {
			if l.idle(&p.set, now) {
				delete(p.lots, name)
				p.spare = append(p.spare, l)
			}
		}
		p.spare = p.spare[:min(len(p.spare), 128)]
		p.crowded = 2*len(p.lots) + 64
	}
	l := new(lot)
	if n := len(p.spare); n > 0 {
		l, p.spare = p.spare[n-1], p.spare[:n-1]
		*l = lot{}
	}
	p.lots[s] = l
	return l
}

// idle reports whether the lot can be forgotten, so that nobody gets more or less by that.
func (l *lot) idle(set *Settings, now int64) bool {
	s := &l.sent
	s.turn(now)
	return l.inUse == 0 && l.queued == 0 && l.due <= now &&
		(set.Retries < 0 || s.retries == [2]int{} && (s.calls[0]+s.calls[1])*set.Retries < 100)
}

// quota refuses a call over its workflow's quotas, or counts it. A retry has a place in the budget.
func (p *Pool) quota(l *lot, c *Call, now int64) (*retry, error) {
	set := &p.set
	due := l.due
	if set.Rate > 0 {
		step := int64(time.Second/time.Microsecond) / int64(set.Rate)
		due = max(due, now) + step
		if ahead := due - now - int64(time.Second/time.Microsecond); ahead > 0 {
			return nil, p.refuse(OverRate, time.Duration(ahead)*time.Microsecond)
		}
	}
	f := &p.failed
	f.turn(now, false)
	_, newer := f.keys[0][c.Key]
	_, older := f.keys[1][c.Key]
	var again *retry
	if set.Retries > 0 && (c.Retry || newer || older) {
		var after time.Duration
		if again, after = p.retries(l, c.Key, now); again == nil {
			return nil, p.refuse(OverRetries, after)
		}
	}
	l.due = due
	return again, nil
}

func (p *Pool) refuse(r Reason, after time.Duration) error {
	p.counts.Refused[r]++
	return &FullError{Reason: r, RetryAfter: min(max(after, time.Second), time.Minute)}
}

// mayWait says how long a call may wait for a permit.
func (p *Pool) mayWait(l *lot, c *Call) (time.Duration, error) {
	if l.queued >= p.set.Queue || l.queued == 0 && len(p.waiting) >= maxWaiting {
		return 0, p.refuse(QueueFull, p.pace(l, c.Class))
	}
	wait := time.Duration(p.set.Wait)
	if c.Class == Low {
		wait = max(wait, starve)
	}
	if c.Deadline.IsZero() {
		return wait, nil
	}
	left := time.Until(c.Deadline)
	if pace := p.pace(l, c.Class); left <= 0 || p.samples >= seldom && pace > left {
		return 0, p.refuse(TooLate, pace)
	}
	return min(wait, left), nil
}

// pace is about how long one more call of the lot would wait, if all that wait have one class: for
// those ahead of it in its queue, which get the lot's share of the permits.
func (p *Pool) pace(l *lot, c Class) time.Duration {
	ahead := 1
	for i := int(c - Low); i < len(l.queues); i++ {
		ahead += l.queues[i].length
	}
	active := p.active
	if l.inUse == 0 && l.queued == 0 {
		active++
	}
	share := min(float64(p.set.Total)/float64(active), float64(p.set.PerWorkflow))
	return time.Duration(math.Min(p.held*float64(ahead)/share, float64(time.Hour/time.Microsecond))) * time.Microsecond
}

// enter begins to count l among those that hold or wait. What it did not use before gives it no
// right to more than the others.
func (p *Pool) enter(l *lot) {
	if l.inUse == 0 && l.queued == 0 {
		p.active++
		l.used = max(l.used, p.virtual)
	}
}

// left ends what enter began, once l neither holds nor waits.
func (p *Pool) left(l *lot) {
	if l.inUse == 0 && l.queued == 0 {
		p.active--
	}
}

// take gives l a permit, for a first call where again is nil.
func (p *Pool) take(l *lot, again *retry, now int64) {
	if again == nil {
		l.sent.turn(now)
		l.sent.calls[0]++
	}
	p.inUse++
	l.inUse++
	l.begun += now
	p.counts.Granted++
}

// drop takes back a permit that began then.
func (p *Pool) drop(l *lot, begun int64) {
	p.inUse--
	l.inUse--
	l.begun -= begun
}

// serve gives free permits to those that wait.
func (p *Pool) serve(now int64) {
	for p.inUse < p.set.Total {
		w := p.next(now)
		if w == nil {
			return
		}
		l := w.lot
		p.virtual = max(p.virtual, l.usedBy(now))
		p.counts.Waited += time.Duration(now-w.came) * time.Microsecond
		p.remove(w)
		l.queues[w.class-Low].served = now
		p.take(l, w.retry, now)
		w.granted, w.came = true, now
		close(w.ready)
	}
}

// rank orders those that wait for a permit; the smallest is first.
type rank struct {
	stage int   // see the package's documentation
	class Class // higher is first
	used  int64
	came  int64
}

// next is the call that gets the next permit; nil for none.
func (p *Pool) next(now int64) *waiter {
	var first *waiter
	var best rank
	for _, l := range p.waiting {
		if l.inUse >= p.set.PerWorkflow {
			continue
		}
		w, starved := l.head(now)
		r := rank{stage: 4, class: w.class, used: l.usedBy(now), came: w.came}
		switch {
		case starved:
			r = rank{stage: 1, came: w.came}
		case w.class == Critical:
			r.stage = 2
		case l.inUse*p.active < p.set.Total:
			r.stage = 3
		}
		if first == nil || cmp.Or(cmp.Compare(r.stage, best.stage), cmp.Compare(best.class, r.class),
			cmp.Compare(r.used, best.used), cmp.Compare(r.came, best.came)) < 0 {
			first, best = w, r
		}
	}
	return first
}

// usedBy is the time for which l has held permits.
func (l *lot) usedBy(now int64) int64 { return l.used + int64(l.inUse)*now - l.begun }

// head is the first call of the lot that waits: of the class that is starved the longest, else of the
// highest one.
func (l *lot) head(now int64) (first *waiter, starved bool) {
	since := now - int64(starve/time.Microsecond)
	for i := range l.queues {
		q := &l.queues[i]
		if q.first == nil {
			continue
		}
		if waits := max(q.first.came, q.served); waits <= since {
			first, starved, since = q.first, true, waits-1
		} else if !starved {
			first = q.first
		}
	}
	return first, starved
}

func (p *Pool) push(w *waiter) {
	l := w.lot
	q := &l.queues[w.class-Low]
	if w.prev = q.last; w.prev != nil {
		w.prev.next = w
	} else {
		q.first = w
	}
	q.last = w
	q.length++
	if l.queued++; l.queued == 1 {
		l.place = len(p.waiting)
		p.waiting = append(p.waiting, l)
	}
	p.counts.Waits++
}

func (p *Pool) remove(w *waiter) {
	l := w.lot
	q := &l.queues[w.class-Low]
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		q.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		q.last = w.prev
	}
	q.length--
	if l.queued--; l.queued > 0 {
		return
	}
	last := p.waiting[len(p.waiting)-1]
	p.waiting[l.place], last.place = last, l.place
	p.waiting[len(p.waiting)-1] = nil
	p.waiting = p.waiting[:len(p.waiting)-1]
}

// Counts are totals since the pool was made.
type Counts struct {
	// Granted is how many permits were given, Waits how many calls had to wait, and Waited how long
	// those that then got a permit did.
	Granted, Waits uint64
	Waited         time.Duration
	// Left is how many calls ended while they waited.
	Left uint64
	// Held is for how long permits were held that were released, Retries how many retries were sent.
	Held    time.Duration
	Retries uint64
	// Refused is how many calls got no permit, by Reason.
	Refused [reasons]uint64
}

// Status is what a pool looks like at one moment.
type Status struct {
	Settings Settings
	// InUse is how many permits are held, Waiting how many calls wait, Workflows how many workflows
	// hold permits or wait.
	InUse, Waiting, Workflows int
	Counts                    Counts
}

// Status returns the state of the pool.
func (p *Pool) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{Settings: p.set, InUse: p.inUse, Workflows: p.active, Counts: p.counts}
	for _, l := range p.waiting {
		s.Waiting += l.queued
	}
	return s
}
