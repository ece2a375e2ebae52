package rollback

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Failure is an error because of which the gateway rolls a call back in its own name, the call of the
// checkpoint and what followed from it, or asks people (ATD, "Error Signaling"; AERR, "Error
// Propagation via DAG").
type Failure struct {
	// Checkpoint is that of the call that failed.
	Checkpoint string `cbor:"checkpoint"`
	// Error is the id of the error's token, from which the rollback follows; empty without one.
	Error string `cbor:"error,omitempty"`
	// By is the identity of the gateway.
	By string `cbor:"by"`
	// Undo says that the call was itself an undo, by its own word. It is left to a person: an undo
	// of an undo could go on for ever.
	Undo bool `cbor:"undo,omitempty"`
	// Reporter is the agent whose error it is; empty for the outcome of the call. An agent counts if
	// it may ask for the rollback by Lineage, or is the one that was called; and only for calls whose
	// checkpoint says that errors roll them back.
	Reporter string  `cbor:"reporter,omitempty"`
	Lineage  Lineage `cbor:"lineage,omitempty"`
	// Asks has people asked, with this cause, in the place of a rollback: those of Workflow. Of an
	// agent's error it is the cause where no error rolls its call back; empty asks nobody.
	Asks hitl.Cause `cbor:"asks,omitempty"`
	// Caller is the name of who has made the call, as operators know it; empty for one that the gateway
	// has not verified.
	Caller string `cbor:"caller,omitempty"`
	// Named are, in the place of Checkpoint, the ids that an error of Reporter names which was
	// refused, and Workflow is the error's own: where another workflow has one of them, its people
	// are asked (cascade 3.3.2).
	Named    []string `cbor:"named,omitempty"`
	Workflow string   `cbor:"workflow,omitempty"` // see Named and Asks

	// Boot is that of the member that asks for the rollback; set when it is recorded, and empty where one gateway has the
	// store.
	Boot string `cbor:"boot,omitempty"`
}

// failureReason is what a rollback that an error has caused gives as its reason.
const failureReason = "on_error: the call has failed"

// maxFailures is how many rollbacks because of errors run at once. Further ones wait in the store:
// where an upstream is down every call fails, and every undo waits for that upstream.
const maxFailures = 64

// rollbackOf is the id of the rollback that errors of a call cause: there is one, whoever reports
// how many errors, also after a restart (P5).
func (c *journal) rollbackOf(checkpoint string) string {
	sum := store.Index(c.o.Sealer, "rollback on error", checkpoint)
	id := uuid.UUID(sum[:16])
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80 // version 8, of RFC 9562
	return id.String()
}

// Failed returns the batch that records failures. Once it is committed the rollbacks are asked for,
// and again at the next start until each was accepted or refused for good.
func (c *Coordinator) Failed(all ...Failure) *store.Batch {
	b := new(store.Batch)
	var keys [][]byte
	leave := c.sealing.Enter()
	b.OnDone(func(err error) error {
		leave()
		if err == nil || errors.Is(err, store.ErrUnknown) {
			c.takeUp(keys...)
		}
		return err
	})
	for i := range all {
		f := &all[i]
		keys = append(keys, c.failureKey(f.Checkpoint, f.Error, f.Reporter))
		b.Add(c.failureWrite(keys[i], f, store.Condition{}))
	}
	return b
}

func (c *journal) failureWrite(key []byte, f *Failure, condition store.Condition) store.Write {
	record := *f
	record.Boot = c.fleet.Boot()
	return c.failed.Put(key, &record, condition, time.Time{})
}

// failureKey is the key of the record of a failure.
func (c *journal) failureKey(about ...string) []byte {
	return keyOf(kindFailure, store.Index(c.o.Sealer, "rollback failure", strings.Join(about, " ")))
}

// Refused records a refused error with what it has Named, and has it looked at. Where as many of its
// Reporter's as may wait do, it is dropped.
func (c *Coordinator) Refused(ctx context.Context, f Failure) error {
	defer c.sealing.Enter()()
	for place := range maxRefused {
		key := c.failureKey("refused", f.Reporter, strconv.Itoa(place))
		switch _, err := c.o.Store.Get(ctx, key); {
		case err == nil:
			continue
		case !errors.Is(err, store.ErrNotFound):
			return err
		}
		_, err := c.o.Store.Commit(ctx, c.failureWrite(key, &f, store.Absent()))
		if errors.As(err, new(*store.Conflict)) {
			continue
		}
		if err == nil || errors.Is(err, store.ErrUnknown) {
			c.takeUp(key)
		}
		return err
	}
	return nil
}

// takeUp has the recorded failures handled, each in its turn.
func (c *Coordinator) takeUp(keys ...[]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.started || c.stopping {
		return // the next start does
	}
	c.failures = append(c.failures, keys...)
	for range min(len(c.failures), maxFailures-c.handling) {
		c.handling++
		c.wg.Go(func() {
			for key := c.nextFailure(); key != nil; key = c.nextFailure() {
				c.handleFailure(key)
			}
		})
	}
}

// nextFailure is the failure that waits longest; nil if the caller is to end.
func (c *Coordinator) nextFailure() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.failures) == 0 || c.stopping {
		c.handling--
		return nil
	}
	key := c.failures[0]
	c.failures = c.failures[1:]
	return key
}

// Waiting is how many recorded failures wait for their turn.
func (c *Coordinator) Waiting() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.failures)
}

// Unfinished returns how many rollbacks go on here, and when the oldest of them was asked for.
func (c *Coordinator) Unfinished() (n int, oldest time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.runs {
		if r.done.is() {
			continue
		}
		if asked := r.now().Asked; n == 0 || asked.Before(oldest) {
			oldest = asked
		}
		n++
	}
	return n, oldest
}

// handleFailure asks for the rollback until it was accepted, waits for its end, and then leaves. It
// leaves too where another rollback takes precedence, which may wait for people, and where the ledger
// holds it up for longer than others that wait: it goes behind them.
func (c *Coordinator) handleFailure(key []byte) {
	for pause := firstPause; !c.ending(); pause = min(2*pause, longPause) {
		wait, err := c.askBecauseOf(c.hard, key)
		switch {
		case err == nil && wait == "":
			return
		case err == nil:
			if _, err = c.Get(c.hard, wait); err == nil {
				c.putBehind(wait, key)
				return
			}
		}
		switch {
		case errors.Is(err, ErrStopping):
			return
		case !errors.Is(err, ErrUnknown): // else it waits for the end of a reservation
			c.log.Warn("what becomes of an error waits for the store or the ledger", "error", err)
		}
		sleep(c.begins, pause)
		if pause == longPause && c.Waiting() > 0 {
			c.takeUp(key)
			return
		}
	}
}

// putBehind has a failure handled again after the end of another rollback. No turn is taken meanwhile.
func (c *Coordinator) putBehind(other string, key []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.behind[other] = append(c.behind[other], key)
	if len(c.behind[other]) > 1 {
		return // somebody waits already
	}
	c.wg.Go(func() {
		if _, err := c.Wait(c.hard, other); err != nil {
			sleep(c.begins, longPause)
		}
		c.mu.Lock()
		keys := c.behind[other]
		delete(c.behind, other)
		c.mu.Unlock()
		c.takeUp(keys...)
	})
}

// askBecauseOf asks for the rollback of a recorded failure once. It returns the id of a rollback to
// wait for before the failure is looked at again; empty if the failure is done with.
func (c *Coordinator) askBecauseOf(ctx context.Context, key []byte) (wait string, err error) {
	row, err := c.failed.Get(ctx, key)
	switch {
	case errors.Is(err, ErrUnknown):
		return "", nil
	case errors.Is(err, errUnreadable): // it is of no use any more, and nobody knows the call
		c.log.Error("what is recorded of an error cannot be read; nothing is rolled back because of it", "error", err)
		return "", nil
	case err != nil:
		return "", err
	}
	done := store.Write{Key: key, If: store.VersionIs(row.Version), Delete: true}
	f := row.Record
	if len(f.Named) > 0 {
		return "", c.crossed(ctx, f, done)
	}
	rolls, err := c.counts(ctx, f)
	switch {
	case refusedForGood(err) != "":
		return "", c.leave(ctx, f, done, refusedForGood(err))
	case err != nil:
		return "", err
	case !rolls && f.Asks != "":
		return "", c.askPeople(ctx, f, done)
	case !rolls:
		return "", c.forget(ctx, done)
	case f.Undo:
		return "", c.leave(ctx, f, done, "an undo is not undone")
	}
	r := Request{
		ID: c.rollbackOf(f.Checkpoint), Checkpoint: f.Checkpoint, Scope: SubDAG, Reason: failureReason,
		Error: f.Error, By: f.By, Coordinator: true, Whole: c.o.Whole != nil && c.o.Whole(),
	}
	_, err = c.Execute(ctx, r, nil)
	var conflict *ConflictError
	switch {
	case err == nil, errors.Is(err, ErrMismatch): // accepted under an earlier name of the gateway
		if err := c.forget(ctx, done); err != nil {
			return "", err
		}
		if accepted, _ := c.known(c.name(r.ID)); accepted != nil { // one that waits for people holds up no others
			select {
			case <-accepted.done.Done():
			case <-accepted.asks.Done():
			case <-c.begins.Done():
			}
		}
		return "", nil
	case errors.As(err, &conflict):
		return cmp.Or(conflict.kept, conflict.Winner), nil
	case errors.Is(err, ErrStopping):
		return "", nil // the next start goes on
	}
	if why := refusedForGood(err); why != "" {
		return "", c.leave(ctx, f, done, why)
	}
	return "", err
}

// refusedForGood says in fixed words why a rollback cannot be accepted now or later; empty for
// errors that pass.
func refusedForGood(err error) string {
	switch {
	case errors.Is(err, checkpoint.ErrExpired):
		return "the time to undo it is over"
	case errors.Is(err, checkpoint.ErrTampered):
		return "what is kept of it is not what was recorded"
	case errors.Is(err, ErrCheckpointUnknown):
		return "its checkpoint is not known"
	case errors.As(err, new(*DependedOnError)):
		return "completed actions that would stay depend on it"
	case errors.As(err, new(*TooManyError)):
		return "the workflow is too large to be planned for"
	case errors.As(err, new(*CycleError)):
		return "what is recorded of the workflow follows from itself"
	case errors.Is(err, ErrInvalid):
		return "the request breaks a rule"
	}
	return ""
}

// counts reports whether an error rolls its call back: the outcome of a call does unless it asks
// people, an agent's error only of whom the call concerns (P3). An error that counts for nothing asks
// nobody either. Where refusedForGood knows the error, nobody will ever find out.
func (c *journal) counts(ctx context.Context, f *Failure) (rolls bool, err error) {
	if f.Reporter == "" {
		return f.Asks == "", nil
	}
	asks := f.Asks
	f.Asks = ""
	cp, err := c.o.Ledger.Checkpoint(ctx, f.Checkpoint)
	switch {
	case errors.Is(err, ErrUnknown): // it may name anything
		return false, nil
	case err != nil:
		return false, unavailable(err)
	case !cp.Own:
		return false, nil
	}
	opened, err := c.o.Checkpoints.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires})
	switch {
	case errors.Is(err, checkpoint.ErrStore):
		return false, unavailable(err)
	case err == nil:
		rolls = opened.Snapshot.OnError
	}
	concerned := slices.Contains(cp.Audience, f.Reporter) // it is the agent that was called
	if !concerned {
		view, err := c.o.Ledger.Graph(ctx, Query{Target: cp.ID, Scope: SubDAG, By: f.Reporter, Lineage: f.Lineage})
		switch {
		case errors.Is(err, ErrUnknown):
			return false, nil
		case err != nil:
			return false, unavailable(err)
		}
		concerned = MayAsk(view.Graph, f.Reporter, cp.ID, f.Lineage)
	}
	if concerned && cp.Reversible { // else the commit of the error has asked (ADR 0080)
		f.Asks, f.Workflow, f.Caller = asks, cp.Workflow, "issuer:"+f.Reporter
	}
	return concerned && rolls, nil
}

// forget removes the record of a failure. Who lost to somebody else has nothing left to do.
func (c *journal) forget(ctx context.Context, done store.Write) error {
	_, err := c.o.Store.Commit(ctx, done)
	if errors.As(err, new(*store.Conflict)) {
		return nil
	}
	return unavailable(err)
}

const (
	// maxRefused is how many refused errors of a reporter may wait.
	maxRefused = 64
	// maxCrossings is how many escalations because of one reporter's errors in other workflows may be
	// pending.
	maxCrossings = 16
)

// crossed opens an escalation for each other workflow of which a refused error names something: a
// failure does not cross the boundary by itself (cascade 3.3.2). The reporter is not told (P3), and
// causes one for a workflow, and only so many that nobody has looked at.
func (c *Coordinator) crossed(ctx context.Context, f *Failure, done store.Write) error {
	b, named := new(store.Batch), map[string]string{}
	for _, id := range f.Named {
		workflows, err := c.o.Ledger.Workflows(ctx, id)
		if err != nil {
			return b.Done(unavailable(err))
		}
		for _, w := range workflows {
			if w != "" && w != f.Workflow && named[w] == "" {
				named[w] = id
			}
		}
	}
	requester := "reporter " + f.Reporter
	c.deciding.Lock()
	defer c.deciding.Unlock()
	for w, id := range named {
		full, err := c.o.Escalations.Waits(ctx, requester, maxCrossings)
		if err != nil {
			return b.Done(err)
		}
		if full {
			c.log.Warn("an agent reports errors in other workflows again and again; further ones are not escalated until people have looked", "reporter", f.Reporter)
			break
		}
		if _, err := c.escalate(ctx, b, hitl.Opening{
			Key: "boundary " + f.Reporter + " " + w, Level: hitl.Approval, Cause: hitl.CauseBoundary, Workflow: w,
			Summary: "An agent reports an error in another workflow that names something of this one. It was refused, and nothing was done because of it.",
			Caller:  "issuer:" + f.Reporter, Requester: requester, Links: hitl.Links{Checkpoint: id},
		}); err != nil {
			return b.Done(err)
		}
	}
	b.Add(done)
	return c.handOver(ctx, b)
}

// handOver commits what removes a failure and opens escalations. Who lost to somebody else who has
// removed it has nothing left to do.
func (c *journal) handOver(ctx context.Context, b *store.Batch) error {
	err := b.Commit(ctx, c.o.Store)
	if err == nil || errors.As(err, new(*store.Conflict)) && !errors.Is(err, hitl.ErrAlreadyOpen) {
		return nil
	}
	return unavailable(err)
}

// leave leaves a failure to a person: nobody who fails is left without either (A-error-signaling-f).
func (c *journal) leave(ctx context.Context, f *Failure, done store.Write, why string) error {
	cp, _, err := c.token(ctx, f.Checkpoint)
	if err != nil && refusedForGood(err) == "" {
		return err
	}
	b := new(store.Batch)
	b.Add(done)
	if _, err := c.escalate(ctx, b, hitl.Opening{
		Key: "on_error " + f.Checkpoint, Level: hitl.Approval, Cause: hitl.CauseError, Workflow: cp.Workflow,
		Summary: "The call has failed, and it is not rolled back: " + why + ".",
		Links:   hitl.Links{Checkpoint: f.Checkpoint, Error: f.Error},
	}); err != nil {
		return b.Done(err)
	}
	return c.handOver(ctx, b)
}

// maxFailed is how many escalations because of one caller's failed calls may be pending.
const maxFailed = 16

// askPeople opens the escalation of a failure that rolls nothing back (A-error-signaling-f). One failure is one
// question (ADR 0127): a call that has failed opens nothing while people are asked about a failure of its workflow.
// A question about a call that cannot be undone, or that reaches many agents, takes the place of lesser ones. Only
// so many are opened because of one caller: agents try again, and an upstream that is down fails every call.
func (c *Coordinator) askPeople(ctx context.Context, f *Failure, done store.Write) error {
	o := hitl.Opening{
		Key: "failed call " + string(f.Asks), Level: hitl.Approval, Cause: f.Asks, Workflow: f.Workflow, Caller: f.Caller,
		Links:   hitl.Links{Checkpoint: f.Checkpoint, Error: f.Error},
		Summary: "A call has failed, or its answer carries an error, and it is not rolled back. Further ones of the workflow open nothing until this is decided.",
		// The callers that nobody has verified are one: they could take any number of names.
		Requester: "failed calls of " + cmp.Or(f.Caller, "others"),
	}
	if f.Asks == hitl.CauseIrreversible {
		o.Summary = "A call that cannot be undone has failed, or its answer carries an error. Further ones of the workflow open nothing until this is decided."
	}
	if reach := c.reach(ctx, f); reach != "" {
		o.Key, o.Level, o.Requester = "error reach", hitl.Pause, ""
		if f.Asks != hitl.CauseIrreversible { // else it may have an end (unreachable_human)
			o.Cause, o.Summary = hitl.CauseReach, "A call has failed, or its answer carries an error:"
		}
		o.Summary += " " + reach
	}
	c.deciding.Lock()
	defer c.deciding.Unlock()
	asked, err := c.askedOfFailures(ctx, f.Workflow)
	if err != nil {
		return err
	}
	b := store.NewBatch(done)
	lesser := func(e *hitl.Escalation) bool {
		return !e.Held && (o.Level == hitl.Pause || o.Cause == hitl.CauseIrreversible && e.Cause != hitl.CauseIrreversible)
	}
	covered := slices.ContainsFunc(asked, func(e hitl.Escalation) bool {
		return o.Cause == hitl.CauseFailed || o.Level != hitl.Pause && e.Held && e.Cause == o.Cause
	})
	if !covered {
		for i := range asked { // what it takes the place of
			switch e := &asked[i]; {
			case !lesser(e):
			case e.Cause == hitl.CauseReach:
				o.Summary += " " + e.Summary
			case e.Cause == hitl.CauseIrreversible:
				o.Cause = e.Cause
			}
		}
		if err := c.escalateAnew(ctx, b, o); err != nil {
			return b.Done(err)
		}
	}
	if err := c.handOver(ctx, b); err != nil || covered {
		return err
	}
	if asked, err = c.askedOfFailures(ctx, f.Workflow); err != nil {
		return nil // both stay, which is harmless
	}
	if !slices.ContainsFunc(asked, func(e hitl.Escalation) bool { return e.Cause != hitl.CauseFailed && !lesser(&e) }) {
		return nil // too many wait for it to be opened
	}
	for i := range asked { // also its own, where a failure that spreads was found meanwhile
		e := &asked[i]
		if e.Cause != hitl.CauseFailed && !lesser(e) {
			continue
		}
		if _, err := c.o.Escalations.Withdraw(ctx, e.ID); err != nil && !errors.Is(err, hitl.ErrDecided) {
			c.log.Warn("a question that another one stands for cannot be withdrawn", "escalation", e.ID, "error", err)
		}
	}
	return nil
}

// askedOfFailures are the pending escalations about failed calls of a workflow, or about a failure that spreads in it.
func (c *journal) askedOfFailures(ctx context.Context, workflow string) (all []hitl.Escalation, err error) {
	if workflow == "" {
		return nil, nil
	}
	page, err := c.o.Escalations.List(ctx, hitl.Filter{Workflow: workflow, Status: hitl.Pending}, "", maxFailed)
	for _, e := range page.Escalations {
		if e.Links.Rollback == "" && (e.Cause == hitl.CauseReach || e.Cause == hitl.CauseFailed || e.Cause == hitl.CauseIrreversible) {
			all = append(all, e)
		}
	}
	return all, err
}

// escalateAnew opens an escalation for its workflow, unless an earlier one with the key is pending or
// holds the workflow, or too many because of the same requester are pending.
func (c *journal) escalateAnew(ctx context.Context, b *store.Batch, o hitl.Opening) error {
	for o.Key += " " + o.Workflow; ; {
		e, err := c.o.Escalations.Find(ctx, o.Key)
		if errors.Is(err, hitl.ErrNotFound) {
			break
		}
		if errors.Is(err, hitl.ErrUnreadable) { // nobody can decide it
			o.Key += " anew"
			continue
		}
		if err != nil || e.Status == hitl.Pending || e.Held {
			return err
		}
		o.Key = "after " + e.ID // behind those that people have decided
	}
	if o.Requester != "" {
		full, err := c.o.Escalations.Waits(ctx, o.Requester, maxFailed)
		if err != nil {
			return err
		}
		if full {
			c.log.Warn("calls of a caller fail in many workflows; further ones are not escalated until people have looked", "caller", o.Caller)
			return nil
		}
	}
	_, err := c.escalate(ctx, b, o)
	return err
}

// manyAgents is how many agents may be affected before people are asked (cascade 3.4.3).
const manyAgents = 3

// reach says how many agents have acted in the call of a failure and in what follows from it, the
// failing ones counted (C-2-c); empty if they are not many, or cannot be counted: that keeps nobody from
// being asked. It reads no more of the workflow than a plan does (ADR 0051).
func (c *journal) reach(ctx context.Context, f *Failure) string {
	view, err := c.o.Ledger.Graph(ctx, Query{Target: f.Checkpoint, Scope: SubDAG})
	if errors.As(err, new(*TooManyError)) {
		return "more follows from it than can be looked at."
	}
	if err != nil {
		c.log.Warn("how many agents an error has reached cannot be counted", "error", err)
		return ""
	}
	if n := agentsBehind(view.Graph, f.Checkpoint); n > manyAgents {
		return fmt.Sprintf("%d agents have acted in it and in what followed from it.", n)
	}
	return ""
}
