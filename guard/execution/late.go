package execution

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Outcomes that could not be recorded when they came are recorded when the store answers again (ADR 0147). What
// nobody here has room for, or knows, is then recorded as in doubt.

const (
	// lateEvery is how often it is tried.
	lateEvery = time.Second
	// lateAtOnce is how many are tried at a time, once one was recorded.
	lateAtOnce = 16
	// lateWait is how long a look-up waits for the outcome of its call.
	lateWait = 2 * time.Second
	// mostLate bounds the outcomes that wait. Those beyond it are recorded as in doubt.
	mostLate = 2048
	// mostLateBytes bounds what they keep: answers, and what their owners have. An answer beyond it is given up, and
	// the outcome of an owner beyond it is recorded as in doubt.
	mostLateBytes = 64 << 20
)

// Later is what the owner of an execution has to say of an outcome that is recorded late. Its methods are called by
// another goroutine, and one at a time.
type Later interface {
	// Size is the memory that it keeps for that, in bytes.
	Size() int64
	// Again makes the batches anew that the commit of the outcome carries.
	Again(ctx context.Context) []*store.Batch
	// Over says that the outcome is recorded, or why nothing more is tried: ErrTaken if somebody else has settled the
	// execution, or runs it again.
	Over(err error)
	// Moved says that this guard records nothing more, since its store has been given up, or its member removed: the
	// guard that is opened over it next may settle what it finds in doubt (Guard.SettleLate).
	Moved(l *Late)
}

// Late is an outcome that could not be recorded. An answer is evidence, also then.
type Late struct {
	key     Key
	claim   [16]byte
	applied bool
	head    *Head // of the answer; nil where it is not kept
	body    []byte

	// While it waits here.
	e     Execution // as it was when it ended
	o     Outcome
	later Later
	left  *Record // that the workflow has been charged for
	bytes int64   // that it keeps
	size  int64   // of the answer, of them
	holds bool    // the recording
	done  chan struct{}
	// replaced says that the call has run again meanwhile, and that outcome waits, too.
	replaced bool

	mu   sync.Mutex // held while it is being recorded
	over bool
}

// Key is that of the execution.
func (l *Late) Key() Key { return l.key }

// lates are the outcomes of this guard that wait.
type lates struct {
	g       *Guard
	ctx     context.Context // ends with the guard
	cancel  context.CancelFunc
	trying  chan struct{} // full during a round
	mu      sync.Mutex
	waiting map[Key]*Late
	order   []*Late // those whose executions have ended, and that nobody tries now
	bytes   int64
	unowned bool // an execution may be open whose outcome nobody here has
	armed   bool // a round is due
	ended   bool
}

// passing reports that a store may take a commit later that it does not take now.
func passing(err error) bool { return away(err) || errors.Is(err, store.ErrFull) }

// gone reports that a store takes no commit any more.
func gone(err error) bool {
	return errors.Is(err, store.ErrUnhealthy) || errors.Is(err, store.ErrClosed)
}

// keep takes the outcome of an execution that could not be recorded because of err, while the execution still has its
// flight; the function that it returns is called when that has ended. left is what remains charged for it.
func (t *lates) keep(e *Execution, o *Outcome, left *Record, err error) (begin func()) {
	switch {
	case gone(err):
		if e.later == nil || o.Verdict == InDoubt || t.g.members.store == nil { // a store of its own is opened by the next process
			return func() {}
		}
		moved := e.outcome(o)
		return func() { e.later.Moved(moved) }
	case e.later == nil || !passing(err):
		return t.lose
	}
	l := &Late{key: e.flight.key, claim: e.record.Claim, e: *e, o: *o, later: e.later, left: left, bytes: e.later.Size(), done: make(chan struct{})}
	recording := &e.flight.recording
	if o.Verdict == Completed && !recording.lost() {
		l.size = recording.Size()
		l.holds = true
	}
	recording.mu.Lock()
	recording.holders++ // before others see it, who may give it up
	recording.mu.Unlock()
	t.mu.Lock()
	if t.ended || len(t.waiting) >= mostLate || t.bytes+l.bytes > mostLateBytes {
		t.mu.Unlock()
		recording.drop()
		return t.lose
	}
	if l.holds = l.holds && t.bytes+l.bytes+l.size <= mostLateBytes; l.holds {
		l.bytes += l.size
	} else {
		l.size = 0
	}
	if before := t.waiting[l.key]; before != nil { // which finds that when it is tried
		before.replaced = true
	}
	t.waiting[l.key] = l
	t.bytes += l.bytes
	t.mu.Unlock()
	if !l.holds {
		recording.drop()
		recording.fail() // it is not read any more
	}
	return func() {
		t.mu.Lock()
		t.order = append(t.order, l)
		t.mu.Unlock()
		t.arm()
	}
}

// lose has what is open and nobody here knows of recorded as in doubt.
func (t *lates) lose() {
	t.mu.Lock()
	t.unowned = true
	t.mu.Unlock()
	t.arm()
}

// arm has a round tried in a while, if something waits.
func (t *lates) arm() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.armed && !t.ended && (t.unowned || len(t.order) > 0) {
		t.armed = true
		time.AfterFunc(lateEvery, func() {
			t.mu.Lock()
			t.armed = false
			t.mu.Unlock()
			t.work()
		})
	}
}

func (t *lates) of(key Key) *Late {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.waiting[key]
}

// wanted is of for somebody who waits for it: it is the next that is tried.
func (t *lates) wanted(key Key) *Late {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.waiting[key]
	if i := slices.Index(t.order, l); i > 0 {
		t.order = slices.Insert(slices.Delete(t.order, i, i+1), 0, l)
	}
	return l
}

// await waits a little for the outcome of a call that is looked up, and reports that it has come.
func (t *lates) await(ctx context.Context, key Key) bool {
	l := t.wanted(key)
	if l == nil {
		return false
	}
	go t.work()
	timer := time.NewTimer(lateWait)
	defer timer.Stop()
	select {
	case <-l.done:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// end gives up what waits, for the guard that is opened next.
func (t *lates) end() {
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	t.cancel()
	t.trying <- struct{}{}
	defer func() { <-t.trying }()
	t.move()
}

func (t *lates) move() {
	t.mu.Lock()
	t.ended = true
	all := append(slices.Collect(maps.Values(t.waiting)), t.order...) // some are in both
	t.waiting, t.order = map[Key]*Late{}, nil
	t.mu.Unlock()
	for _, l := range all {
		l.mu.Lock()
		if !l.over {
			if l.o.Verdict == InDoubt || l.replaced {
				l.finish() // whoever finds the execution open records that
			} else {
				next := l.e.outcome(&l.o)
				l.finish()
				l.later.Moved(next)
			}
		}
		l.mu.Unlock()
	}
}

// work tries what waits, once. One goroutine does so at a time: a store that is away is asked by one.
func (t *lates) work() {
	select {
	case t.trying <- struct{}{}:
		defer func() { <-t.trying }()
	default:
		return
	}
	if t.ctx.Err() != nil {
		return
	}
	if err := t.round(); gone(err) {
		t.move()
	}
	t.arm()
}

// round tries what waits, until the store fails.
func (t *lates) round() error {
	for n := 1; ; n = lateAtOnce { // one alone asks whether the store answers
		some := t.take(n)
		if len(some) == 0 {
			break
		}
		errs := make([]error, len(some))
		var trying sync.WaitGroup
		for i, l := range some {
			trying.Go(func() { errs[i] = l.try(t.ctx) })
		}
		trying.Wait()
		for i, err := range errs {
			if err != nil {
				t.mu.Lock()
				t.order = append(t.order, some[i])
				t.mu.Unlock()
			}
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	t.mu.Lock()
	unowned := t.unowned
	t.unowned = false
	t.mu.Unlock()
	if !unowned {
		return nil
	}
	m := &t.g.members
	found, err := m.recoverOwn(t.ctx)
	if found.InDoubt > 0 {
		m.reports(found)
	}
	if err != nil || found.Unrecorded > 0 {
		t.mu.Lock()
		t.unowned = true
		t.mu.Unlock()
	}
	return err
}

// take takes the first that wait.
func (t *lates) take(n int) (some []*Late) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n = min(n, len(t.order))
	some = slices.Clone(t.order[:n])
	t.order = slices.Delete(t.order, 0, n)
	return some
}

// try records the outcome. With an error it waits on.
func (l *Late) try(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return nil
	}
	err := l.record(ctx, true)
	if err != nil && !errors.Is(err, ErrTaken) && !passing(err) && !gone(err) && ctx.Err() == nil {
		err = l.record(ctx, false) // the outcome without what it carries, such as an event that is there already
	}
	switch {
	case err != nil && (passing(err) || gone(err) || ctx.Err() != nil):
		return err
	case err != nil && !errors.Is(err, ErrTaken):
		defer l.e.g.late.lose()
	}
	l.finish()
	l.later.Over(err)
	return nil
}

// finish forgets the outcome, with mu held.
func (l *Late) finish() {
	l.over = true
	t := &l.e.g.late
	t.mu.Lock()
	if t.waiting[l.key] == l {
		delete(t.waiting, l.key)
	}
	t.bytes -= l.bytes
	t.mu.Unlock()
	if l.holds {
		l.e.flight.recording.drop()
	}
	close(l.done)
}

// record commits the outcome as Settle does, on the condition that the record is still that of the claim.
func (l *Late) record(ctx context.Context, carries bool) error {
	g, e := l.e.g, &l.e
	now, err := g.store.Now(ctx)
	if err != nil {
		return err
	}
	var next Record
	run := *e
	run.usage, run.attempt, run.recorded = nil, nil, &next // they have taken it for a doubt
	if run.holding, err = g.lots.hold(ctx, l.left, &e.record, l.size, true, now); err != nil {
		return err
	}
	if run.keeper != nil {
		run.keeper.e = &run
	}
	var batches []*store.Batch
	if carries {
		batches = l.later.Again(ctx)
	}
	err = done(run.settle(ctx, l.o, batches), batches)
	if lost := (*store.Conflict)(nil); errors.As(err, &lost) && lost.Index == 0 {
		var there *Record
		if there, _, err = g.load(ctx, l.key); err == nil {
			err = l.landed(there)
		}
		if err == nil && there != nil {
			next = *there
		}
	}
	if err != nil {
		run.holding.end(false, l.key, nil)
		return err
	}
	var settled *Record
	if l.o.Verdict != Released {
		settled = &next
	}
	run.holding.end(true, l.key, settled)
	if e.usage != nil {
		orphan := e.record
		orphan.State = StateInDoubt // as it was counted
		g.quotas.resolved(l.key, &orphan, settled)
	}
	if e.attempt != nil {
		at := next.Settled
		if settled == nil {
			at = now
		}
		e.attempt.settledLate(&l.o, at, e.record.KeepKey)
	}
	return nil
}

// landed returns ErrTaken unless the record that is there is that of the outcome: a commit whose end was unknown.
func (l *Late) landed(there *Record) error {
	want := map[Verdict]State{Completed: StateCompleted, InDoubt: StateInDoubt}[l.o.Verdict]
	switch {
	case there == nil && l.o.Verdict == Released:
	case there != nil && there.Claim == l.claim && there.State == want:
	default:
		return ErrTaken
	}
	return nil
}

// outcome is what SettleLate needs of an outcome, while the recording is there.
func (e *Execution) outcome(o *Outcome) *Late {
	l := &Late{key: e.flight.key, claim: e.record.Claim, applied: o.Verdict == Completed}
	if head, whole := e.flight.recording.complete(); l.applied && whole && head.Size <= pieceSize {
		body := make([]byte, head.Size)
		if n, _ := e.flight.recording.readAt(body, 0); n == len(body) {
			l.head, l.body = head, body
		}
	}
	return l
}

// recoverOwn records as in doubt what this process has left open, and nobody here has an outcome of.
func (m *members) recoverOwn(ctx context.Context) (Recovery, error) {
	g, found := m.g, Recovery{Own: true}
	// A commit whose end was unknown comes before this one, or never.
	if _, err := g.store.Commit(ctx, store.Write{Key: stateKey(StateSending, time.Unix(0, 0), Key{}), Delete: true}); err != nil {
		return found, fmt.Errorf("%w: %w", ErrStore, err)
	}
	keys, err := m.openKeys(ctx)
	if err != nil {
		return found, err
	}
	for _, key := range keys {
		record, version, err := g.load(ctx, key)
		if errors.Is(err, ErrUnreadable) {
			continue
		}
		if err != nil {
			return found, err
		}
		if record == nil || !record.State.open() || record.Boot != g.boot || g.flights.find(key) != nil || g.late.of(key) != nil {
			continue
		}
		if err := m.doubt(ctx, key, record, version, CauseUnrecorded, &found); err != nil {
			return found, err
		}
	}
	return found, nil
}
