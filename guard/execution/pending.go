package execution

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Outcomes that the store did not take are held in memory and tried again (ADR 0147).

const (
	// pendingEvery is the time between two rounds.
	pendingEvery = time.Second
	// lookUpTime is the longest that a look-up tries the outcome of its call.
	lookUpTime = 2 * time.Second
	// mostPending bounds the memory of the outcomes, in bytes. One that does not fit is dropped: recovery calls it in
	// doubt.
	mostPending = 64 << 20
)

// Carried is what other packages add to the commit of an outcome. It makes that anew where the store takes the
// outcome only later.
type Carried interface {
	// Size is the memory that Again needs, in bytes.
	Size() int64
	// Again makes the batches. Another goroutine than the owner's calls it, one call at a time.
	Again(ctx context.Context) []*store.Batch
}

// pendingOutcome is an outcome that the store did not take.
type pendingOutcome struct {
	e       Execution // as it was at its end
	outcome Outcome
	left    *Record // that the workflow has been charged for
	answer  int64   // size of the recorded answer in bytes; 0 where it is not kept
	kept    bool    // the recorded answer is held
	bytes   int64   // memory of the outcome, its answer included

	busy turn // of the end of the execution, and of recording the outcome
	over bool // nothing more is tried
}

// pendingOutcomes are those of a guard, by the claims of their executions.
type pendingOutcomes struct {
	g      *Guard
	ctx    context.Context // ends with the guard
	cancel context.CancelFunc
	round  turn // of the round under way
	mu     sync.Mutex
	all    map[[16]byte]*pendingOutcome
	bytes  int64
	fenced []Fenced
	// fencedBytes is the memory of their answers, at most mostPending.
	fencedBytes int64
	dropped     bool // executions may be open here whose outcome nobody has
	armed       bool // a round is due, or under way
	ended       bool
}

// away reports that a commit has failed for a reason which has nothing to do with what it writes: an
// answer that clients have seen must not be given up for that (P7).
func away(err error) bool {
	return errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown)
}

// passing reports that a store may take a commit later that it does not take now.
func passing(err error) bool { return away(err) || errors.Is(err, store.ErrFull) }

// gone reports that a store takes no commit any more.
func gone(err error) bool {
	return errors.Is(err, store.ErrUnhealthy) || errors.Is(err, store.ErrClosed)
}

// hold takes the outcome of an execution that could not be recorded because of err. left is what
// remains charged for it. It returns the outcome, which is busy; nil where it is dropped.
func (t *pendingOutcomes) hold(e *Execution, o *Outcome, left *Record, err error) *pendingOutcome {
	if e.carried == nil {
		return nil
	}
	if gone(err) || t.hasEnded() {
		t.fence(e, o)
		return nil
	}
	if !passing(err) {
		return nil
	}
	p := &pendingOutcome{e: *e, outcome: *o, left: left, busy: make(turn, 1)}
	p.busy <- struct{}{}
	recording := &e.flight.recording
	if p.kept = o.Verdict == Completed && !recording.lost(); p.kept {
		p.answer = recording.written()
	}
	p.bytes = p.answer + e.carried.Size()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended || t.bytes+p.bytes > mostPending {
		return nil
	}
	if p.kept {
		recording.hold()
	}
	t.all[e.record.Claim] = p
	t.bytes += p.bytes
	t.arm()
	return p
}

// drop has the executions that are open and that nobody here has an outcome of recorded as in doubt.
func (t *pendingOutcomes) drop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dropped = true
	t.arm()
}

// arm has a round tried in a while, if there is something to record. The caller holds mu.
func (t *pendingOutcomes) arm() {
	if !t.armed && !t.ended && (t.dropped || len(t.all) > 0) {
		t.armed = true
		time.AfterFunc(pendingEvery, t.work)
	}
}

// work tries all that is pending, until the store fails.
func (t *pendingOutcomes) work() {
	if !t.round.tryEnter() { // it ends
		return
	}
	defer t.round.leave()
	t.mu.Lock()
	all, dropped, ended := slices.Collect(maps.Values(t.all)), t.dropped, t.ended
	t.dropped = false
	t.mu.Unlock()
	if ended {
		return
	}
	var err error
	for _, p := range all {
		p.busy <- struct{}{}
		err = p.try(t.ctx)
		p.busy.leave()
		if err != nil {
			break
		}
	}
	if dropped && err == nil {
		m, found := &t.g.members, Recovery{}
		if found, err = m.recover(t.ctx, true); found.InDoubt > 0 {
			m.reports(found)
		}
		dropped = err != nil || found.Unrecorded > 0
	}
	if gone(err) {
		t.forget()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.armed, t.dropped = false, t.dropped || dropped
	t.arm()
}

// has reports that the outcome of a claim is held.
func (t *pendingOutcomes) has(claim [16]byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all[claim] != nil
}

func (t *pendingOutcomes) hasEnded() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ended
}

// settle tries the outcome of a claim at once, for a call that looks it up, and reports that the record has changed.
func (t *pendingOutcomes) settle(ctx context.Context, claim [16]byte) bool {
	t.mu.Lock()
	p := t.all[claim]
	t.mu.Unlock()
	if p == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, lookUpTime)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	select {
	case p.busy <- struct{}{}:
	case <-ctx.Done(): // what has it may hang
		return false
	}
	defer p.busy.leave()
	return p.try(ctx) == nil
}

// end drops what is pending, once nothing of it is being recorded: recovery finds it in doubt.
func (t *pendingOutcomes) end() {
	t.cancel()
	t.round <- struct{}{}
	defer t.round.leave()
	t.forget()
}

func (t *pendingOutcomes) forget() {
	t.mu.Lock()
	t.ended = true
	all := slices.Collect(maps.Values(t.all))
	t.mu.Unlock()
	for _, p := range all {
		p.busy <- struct{}{}
		if !p.over {
			t.fence(&p.e, &p.outcome)
		}
		p.finish()
		p.busy.leave()
	}
}

// Fenced is the outcome of a call that this gateway has run as a member of a shared store, and could not record before
// it was removed. The others record a doubt meanwhile, which it settles: an answer is evidence.
type Fenced struct {
	Key   Key
	claim [16]byte
	how   Resolution
}

// mostFenced bounds such outcomes. The calls of those beyond it stay in doubt.
const mostFenced = 1024

// fence keeps an outcome for Fenced, and an answer of up to 256 KiB with it. The recording is still there.
func (t *pendingOutcomes) fence(e *Execution, o *Outcome) {
	if t.g.members.store == nil || o.Verdict == InDoubt { // a store of its own is opened by the next process
		return
	}
	f := Fenced{Key: e.flight.key, claim: e.record.Claim, how: Resolution{By: byOwner, Applied: o.Verdict == Completed}}
	if head, whole := e.flight.recording.complete(); f.how.Applied && whole && head.Size <= pieceSize {
		body := make([]byte, head.Size)
		if n, _ := e.flight.recording.readAt(body, 0); n == len(body) {
			answer := *head // nothing of the flight is kept
			f.how.Answer, f.how.Body = &answer, body
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	size := int64(len(f.how.Body))
	if t.fencedBytes+size > mostPending {
		size, f.how.Answer, f.how.Body = 0, nil, nil
	}
	if len(t.fenced) < mostFenced {
		t.fenced, t.fencedBytes = append(t.fenced, f), t.fencedBytes+size
	}
}

// Fenced returns the outcomes that this guard, which has ended, could not record. SettleFenced of the one that is
// opened next over the store takes them.
func (g *Guard) Fenced() []Fenced {
	g.pending.mu.Lock()
	defer g.pending.mu.Unlock()
	return g.pending.fenced
}

// SettleFenced settles the doubt about a call by the outcome that its owner could not record, unless somebody has
// settled it, or runs the call again: that is the last word. with makes the batch that the commit carries.
func (g *Guard) SettleFenced(ctx context.Context, f *Fenced, with func(*Record, *Resolution) *store.Batch) error {
	found, err := g.Get(ctx, f.Key)
	if errors.Is(err, ErrUnknown) || err == nil && (found.Status != Doubtful || found.Record.Claim != f.claim) {
		return nil
	}
	if err != nil {
		return err
	}
	err = g.SettleDoubt(ctx, found, f.how, with(found.Record, &f.how))
	if errors.Is(err, ErrTaken) {
		return nil
	}
	return err
}

// try records the outcome. An error says that it stays pending. The caller has it busy.
func (p *pendingOutcome) try(ctx context.Context) error {
	if p.over {
		return nil
	}
	err := p.record(ctx, true)
	if err != nil && !passing(err) && !gone(err) && ctx.Err() == nil {
		err = p.record(ctx, false) // without what it carries, such as an event that is there already
	}
	if err != nil && (passing(err) || gone(err) || ctx.Err() != nil) {
		return err
	}
	if err != nil {
		defer p.e.g.pending.drop()
	}
	p.finish()
	return nil
}

// finish forgets the outcome. The caller has it busy.
func (p *pendingOutcome) finish() {
	if p.over {
		return
	}
	p.over = true
	t := &p.e.g.pending
	t.mu.Lock()
	delete(t.all, p.e.record.Claim)
	t.bytes -= p.bytes
	t.mu.Unlock()
	if p.kept {
		p.e.flight.recording.drop()
	}
}

// record commits the outcome as Settle does, if the record is still that of the claim and open.
func (p *pendingOutcome) record(ctx context.Context, carries bool) error {
	g, key := p.e.g, p.e.flight.key
	now, err := g.store.Now(ctx)
	if err != nil {
		return err
	}
	there, version, err := g.load(ctx, key)
	if err != nil {
		return err
	}
	landed := p.landed(there)
	if there != nil && there.Claim == p.e.record.Claim && there.State == StateInDoubt && there.Cause == CauseDied {
		return store.ErrUnhealthy // the others have removed this member
	}
	if !landed && (there == nil || there.Claim != p.e.record.Claim || !there.State.open()) {
		return nil // somebody has settled the call, or runs it again: that is the last word
	}
	var next Record
	run := p.e
	run.usage, run.attempt, run.version, run.recorded = nil, nil, version, &next // they have counted a doubt
	if run.holding, err = g.quotas.hold(ctx, p.left, &p.e.record, p.answer, true, now); err != nil {
		return err
	}
	if landed && there != nil {
		next = *there
	}
	if !landed {
		if run.keeper != nil {
			run.keeper.e = &run
		}
		var batches []*store.Batch
		if carries {
			batches = run.carried.Again(ctx)
		}
		err = done(run.settle(ctx, p.outcome, batches), batches)
	}
	if err != nil {
		run.holding.end(false, key, nil)
		return err
	}
	var settled *Record
	at := now
	if p.outcome.Verdict != Released {
		settled, at = &next, next.Settled
	}
	run.holding.end(true, key, settled)
	if p.e.usage != nil {
		g.quotas.replaced(p.e.record.Caller, key, settled)
	}
	if p.e.attempt != nil {
		p.e.attempt.settledLate(&p.outcome, at, p.e.record.KeepKey)
	}
	return nil
}

// landed reports that an earlier commit of the outcome, whose end was unknown, has written the record that is there.
func (p *pendingOutcome) landed(there *Record) bool {
	if p.outcome.Verdict == Released {
		return there == nil
	}
	want := map[Verdict]State{Completed: StateCompleted, InDoubt: StateInDoubt}[p.outcome.Verdict]
	return there != nil && there.Claim == p.e.record.Claim && there.State == want
}
