package evidence

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// CascadesPath is where cascades are listed; one of them is at CascadesPath + "/" + id.
const CascadesPath = router.WellKnown + "cascades"

// CascadeFeed gives a detector what the ledger records (cascade 3.4.2). It reads a workflow when the
// first failure in it is recorded, and follows it from then on: the calls of healthy workflows cost
// nothing (ADR 0102). Wants may be called from any goroutine, the rest from one at a time.
type CascadeFeed struct {
	// Detector gets the events.
	Detector *cascade.Detector
	// Recorder returns that of the latest configuration; false if that has no identity.
	Recorder func() (Recorder, bool)
	// Pool is the name of the guard whose calls change a target, for checkpoints that do not name their guard.
	Pool func(target string) string

	// held are the agents' tokens that may have come with a call, by the log: their checkpoint follows there at once.
	held map[string][]ledger.Entry

	mu      sync.RWMutex
	watched map[string]time.Time // workflows, with their last failure
}

const (
	// maxWatched bounds the workflows that are followed; those that have not failed for longest go first.
	maxWatched = 4096
	// watchTime is how long a workflow is followed after its last failure.
	watchTime = 10 * time.Minute
	// maxRead is how many entries of a workflow are read when it is first followed.
	maxRead = 5000
	// maxRise is how many ancestors of a failure are read where the workflow has more entries.
	maxRise = 256
	// recently is how old an outcome may be to count as one of now.
	recently = time.Minute
)

// Wants reports whether an event is to be given to Take: a failure, or any of a workflow that is followed.
func (f *CascadeFeed) Wants(e *ledger.Event) bool {
	if e.Workflow == "" || e.Issuer == "" { // unproven tokens show nothing (P3)
		return false
	}
	switch event, _ := ect.ParseEvent(e.Action); event {
	case ect.EventError, ect.EventCircuitOpen:
		return true
	}
	f.mu.RLock()
	_, watched := f.watched[e.Workflow]
	f.mu.RUnlock()
	return watched
}

// Take gives the detector an entry that is in the tree of one of the logs, and returns what it changes. Those of
// each log come in their order; a call and what it follows from may be in several.
func (f *CascadeFeed) Take(ctx context.Context, e *ledger.Entry) (changes []cascade.Change, err error) {
	rec, ok := f.Recorder()
	if !ok {
		return nil, nil
	}
	own := rec.own(e)
	event, is := readEvent(e.Action, own)
	if held := f.held[e.Log]; len(held) > 0 && (held[0].Workflow != e.Workflow || is && !(own && isCheckpoint(e))) {
		changes = f.release(e.Log)
	}
	more, err := f.take(ctx, &rec, e, own, event, is)
	return append(changes, more...), err
}

func (f *CascadeFeed) take(ctx context.Context, rec *Recorder, e *ledger.Entry, own bool, event ect.Event, is bool) (changes []cascade.Change, err error) {
	if event == ect.EventError || event == ect.EventCircuitOpen && !own {
		if changes, err = f.follow(ctx, rec, e); err != nil {
			return changes, err
		}
	}
	var more []cascade.Change
	switch {
	case event == ect.EventError && own:
		more, err = f.failed(ctx, rec, e)
	case event == ect.EventError:
		more, err = f.reported(ctx, rec, e)
	case (event == ect.EventCircuitOpen || event == ect.EventCircuitClose) && !own:
		downstream, _ := extension(e).Text(ect.MemberDownstreamAgent)
		more = f.Detector.Breaker(e.Recorded, cascade.Breaker{
			Downstream: downstream, By: e.Issuer, Workflow: e.Workflow, Event: e.ID, Open: event == ect.EventCircuitOpen,
		})
	case is && event != ect.EventCheckpoint:
	default:
		var by map[string]string
		if by, err = rec.callersOf(ctx, []ledger.Entry{*e}); err == nil {
			more = append(f.action(rec, e, own, by), f.succeeded(e, own)...)
		}
	}
	return append(changes, more...), err
}

// know has the detector know a node that something is said of. It may not, where the log that has the node is read
// later than the one that says so.
func (f *CascadeFeed) know(ctx context.Context, rec *Recorder, workflow, id string) (changes []cascade.Change, err error) {
	if f.Detector.Knows(workflow, id) {
		return nil, nil
	}
	if changes = f.Flush(); f.Detector.Knows(workflow, id) {
		return changes, nil
	}
	e, err := rec.lookup(ctx, workflow, id)
	if err != nil || e == nil || e.Workflow != workflow {
		return changes, err
	}
	more, err := f.learn(ctx, rec, e.Recorded, []ledger.Entry{*e})
	return slices.Concat(changes, more, f.Flush()), err
}

// failed gives the detector an error of the gateway itself: a call that has failed, or one that was refused
// before anything was recorded of it.
func (f *CascadeFeed) failed(ctx context.Context, rec *Recorder, e *ledger.Entry) (changes []cascade.Change, err error) {
	ext := extension(e)
	failure := cascade.Failure{Workflow: e.Workflow, Node: NamedCheckpoint(ext), Error: e.ID, Kind: kindOf(ext)}
	failure.Causes, _ = ext.Texts(ect.MemberUpstreamErrors)
	attempt, _ := ext.Bool(memberAttempt)
	switch {
	case failure.Node == "" && attempt: // there is no call
		by, err := rec.callersOf(ctx, []ledger.Entry{*e})
		if err != nil {
			return nil, err
		}
		downstream, _ := ext.Text(ect.MemberDownstreamAgent)
		changes = f.Detector.Node(e.Recorded, cascade.Node{
			ID: e.ID, Workflow: e.Workflow, Parents: e.Parents, Agent: callerOf(e, by), Upstream: cascade.Upstream{Agent: downstream},
		})
		failure.Node = e.ID
	case failure.Node == "" || attempt:
		return nil, nil // the outcome of the call counts
	default:
		if changes, err = f.know(ctx, rec, e.Workflow, failure.Node); err != nil {
			return changes, err
		}
	}
	if failure.Address, err = rec.Evidence.failedAt(ctx, failure.Node); err != nil {
		return changes, err
	}
	return append(changes, f.Detector.Fail(e.Recorded, failure)...), nil
}

// SpaceCascade begins the store's keys of what is known of cascades, all sealed: package caddymodule has cascades
// and latencies there, and
//
//	f u checkpoint    the upstream at which the call has failed (FailedAt)
const SpaceCascade = 'f'

const kindFailure = 'u' // see SpaceCascade

// failedTime is how long the upstream of a failure is known: as long as a cascade may go on without another one.
const failedTime = 24 * time.Hour

func (e *Evidence) failedKey(checkpoint string) []byte {
	name := e.sealer.Index("failed at", checkpoint)
	return e.failures.Key(name[:16])
}

// FailedAt is the write that says at which upstream the call with a checkpoint has failed, for the detection of
// cascades, also by a later process. It belongs into the commit of the call's outcome.
func (e *Evidence) FailedAt(checkpoint, upstream string, now time.Time) store.Write {
	return e.failures.Put(e.failedKey(checkpoint), &upstream, store.Condition{}, now.Add(failedTime))
}

// failedAt is what FailedAt has written; empty if that is unknown, or cannot be read any more.
func (e *Evidence) failedAt(ctx context.Context, checkpoint string) (string, error) {
	row, err := e.failures.Get(ctx, e.failedKey(checkpoint))
	switch {
	case errors.Is(err, ledger.ErrTampered), err == nil && row.Record == nil:
		return "", nil
	case err != nil:
		return "", err
	}
	return *row.Record, nil
}

// answered counts the good answers of calls by what they change, as far as that is another name than the
// guard's: calls of healthy workflows are not looked at one by one.
type answered struct {
	mu sync.Mutex
	n  map[string]int
}

// maxAbout is how many targets are told apart between two looks; calls of further ones count for all.
const maxAbout = 4096

// Answered counts a call that was answered well, by its target.
func (e *Evidence) Answered(c *Call) {
	if c.Guard == "" || c.Guard == c.Target {
		return
	}
	a := &e.about
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.n == nil {
		a.n = map[string]int{}
	}
	name := c.Target
	if _, there := a.n[name]; !there && len(a.n) >= maxAbout {
		name = ""
	}
	a.n[name]++
}

// Count gives the detector how many calls have been answered well since the last time, by their target, and
// returns it.
func (f *CascadeFeed) Count(now time.Time) map[string]int {
	rec, ok := f.Recorder()
	if !ok {
		return nil
	}
	a := &rec.Evidence.about
	a.mu.Lock()
	counts := a.n
	a.n = nil
	a.mu.Unlock()
	for name, n := range counts {
		f.Detector.AnsweredAbout(now, name, n)
	}
	return counts
}

// reported gives the detector an agent's error. Its participation was checked before it was recorded. One that
// others have passed along from behind a call, and that follows from nothing recorded here, is a node of its own:
// what it says has failed (ADR 0112).
func (f *CascadeFeed) reported(ctx context.Context, rec *Recorder, e *ledger.Entry) (changes []cascade.Change, err error) {
	ext := extension(e)
	if severity, _ := ext.Text(ect.MemberSeverity); !Severe(severity) {
		return nil, nil
	}
	failure := cascade.Failure{Workflow: e.Workflow, Error: e.ID, Kind: kindOf(ext), By: e.Issuer}
	failure.Causes, _ = ext.Texts(ect.MemberUpstreamErrors)
	nodes := e.Parents
	if id := NamedCheckpoint(ext); id != "" && !slices.Contains(nodes, id) {
		nodes = append(slices.Clone(nodes), id)
	}
	known := false
	for _, id := range nodes {
		n, err := rec.lookup(ctx, e.Workflow, id)
		if err != nil {
			return nil, err
		}
		known = known || n != nil
	}
	if !known {
		if failure.By, err = f.failedBehind(ctx, rec, e, failure.Causes); err != nil {
			return nil, err
		}
		changes = f.Detector.Node(e.Recorded, cascade.Node{ID: e.ID, Workflow: e.Workflow, Agent: failure.By})
		nodes = []string{e.ID}
	}
	for _, failure.Node = range nodes {
		more, err := f.know(ctx, rec, e.Workflow, failure.Node)
		if changes = append(changes, more...); err != nil {
			return changes, err
		}
		changes = append(changes, f.Detector.Fail(e.Recorded, failure)...)
	}
	return changes, nil
}

// failedBehind is who has failed by an error that was passed along: its issuer. A gateway's error about a call names
// the error of the agent that it called, and is about the same failure. So who is not honest adds nobody but
// himself.
func (f *CascadeFeed) failedBehind(ctx context.Context, rec *Recorder, e *ledger.Entry, causes []string) (string, error) {
	downstream, _ := extension(e).Text(ect.MemberDownstreamAgent)
	for _, id := range causes {
		if downstream == "" {
			break
		}
		cause, err := rec.lookup(ctx, e.Workflow, id)
		if err != nil {
			return "", err
		}
		if cause != nil && cause.Issuer == downstream {
			return downstream, nil
		}
	}
	return e.Issuer, nil
}

// kindOf is how a call or an action failed, by its error. The gateway's own have the cause at the end of
// their description.
func kindOf(ext ect.Ext) cascade.Kind {
	text, _ := ext.Text(ect.MemberDescription)
	errorType, _ := ext.Text(ect.MemberErrorType)
	switch _, cause, _ := strings.Cut(text[strings.LastIndex(text, ":")+1:], " "); {
	case errorType == "circuit_open":
		return cascade.Refused
	case execution.Cause(cause) == execution.CauseNotSent:
		return cascade.Unreachable
	case execution.Cause(cause) == execution.CauseLeft:
		return cascade.Canceled
	}
	return cascade.ParseKind(errorType)
}

// maxHeld is how many tokens of one call are held.
const maxHeld = 2 * ect.MaxParents

// callerOf is who is behind a node of the gateway, by the callers of such nodes; empty if that is the gateway itself,
// which is no agent.
func callerOf(e *ledger.Entry, by map[string]string) string {
	if by[e.ID] == e.Issuer {
		return ""
	}
	return by[e.ID]
}

// action gives the detector an action, or holds it. by has who is behind the gateway's own. A call and the
// token that it was made with are one action: calls that follow from one token are beside each other.
func (f *CascadeFeed) action(rec *Recorder, e *ledger.Entry, own bool, by map[string]string) (changes []cascade.Change) {
	held := f.held[e.Log]
	if !own && !isCheckpoint(e) {
		if len(held) >= maxHeld {
			changes, held = f.release(e.Log), nil
		}
		if f.held == nil {
			f.held = map[string][]ledger.Entry{}
		}
		f.held[e.Log] = append(held, *e)
		return changes
	}
	n := cascade.Node{ID: e.ID, Workflow: e.Workflow, Parents: e.Parents, Agent: e.Issuer}
	if own {
		n.Agent = callerOf(e, by)
	}
	delete(f.held, e.Log)
	for i := range held {
		t := &held[i]
		if own && isCheckpoint(e) && t.Workflow == e.Workflow && t.Issuer == n.Agent && slices.Contains(e.Parents, t.ID) && len(n.Aliases) < 2 {
			n.Aliases = append(n.Aliases, t.ID)
			n.Parents = slices.Concat(n.Parents, t.Parents)
			continue
		}
		changes = append(changes, f.task(t)...)
	}
	if own && isCheckpoint(e) {
		target, _ := extension(e).Text(ect.MemberTarget)
		n.Aliases = append(n.Aliases, rec.Evidence.Outcomes(e)...)
		if n.Upstream.Pool, _ = extension(e).Text(memberGuard); n.Upstream.Pool == "" {
			n.Upstream.Pool = f.Pool(target)
		}
		if target != n.Upstream.Pool {
			n.Target = target
		}
		for _, name := range audienceOf(e) {
			if name != e.Issuer {
				n.Upstream.Agent = name
			}
		}
	}
	return append(changes, f.Detector.Node(e.Recorded, n)...)
}

// task gives the detector an agent's action.
func (f *CascadeFeed) task(e *ledger.Entry) []cascade.Change {
	return f.Detector.Node(e.Recorded, cascade.Node{ID: e.ID, Workflow: e.Workflow, Parents: e.Parents, Agent: e.Issuer})
}

// Flush gives the detector what is held, and returns what that changes. Call it about every second.
func (f *CascadeFeed) Flush() (changes []cascade.Change) {
	for _, log := range slices.Sorted(maps.Keys(f.held)) {
		changes = append(changes, f.release(log)...)
	}
	return changes
}

// release gives the detector what is held of one log.
func (f *CascadeFeed) release(log string) (changes []cascade.Change) {
	held := f.held[log]
	delete(f.held, log)
	for i := range held {
		changes = append(changes, f.task(&held[i])...)
	}
	return changes
}

// succeeded gives the detector the good outcome of a call.
func (f *CascadeFeed) succeeded(e *ledger.Entry, own bool) []cascade.Change {
	if !own || isCheckpoint(e) {
		return nil
	}
	ext := extension(e)
	outcome, _ := ext.Text(memberOutcome)
	status, _ := ext.Int(memberStatus)
	cause, _ := ext.Text(memberCause)
	by, _ := ext.Text(memberBy)
	o := Outcome{Verdict: execution.Completed, Cause: execution.Cause(cause), Status: int(status), By: by}
	if workflow.Outcome(outcome) != workflow.Completed || o.failed() {
		return nil
	}
	return f.Detector.Succeed(e.Recorded, e.Workflow, e.ID)
}

// follow begins to follow the workflow of a failure, and reads what is recorded of it.
func (f *CascadeFeed) follow(ctx context.Context, rec *Recorder, failure *ledger.Entry) ([]cascade.Change, error) {
	now := failure.Recorded
	f.mu.Lock()
	if f.watched == nil {
		f.watched = map[string]time.Time{}
	}
	last, watched := f.watched[failure.Workflow]
	if !watched && len(f.watched) >= maxWatched {
		oldest := ""
		for wid, at := range f.watched {
			if oldest == "" || at.Before(f.watched[oldest]) {
				oldest = wid
			}
		}
		delete(f.watched, oldest)
	}
	if last.Before(now) {
		f.watched[failure.Workflow] = now
	}
	f.mu.Unlock()
	if watched {
		return nil, nil
	}
	changes, err := f.read(ctx, rec, now, failure)
	changes = append(changes, f.Flush()...)
	if err != nil {
		f.mu.Lock()
		delete(f.watched, failure.Workflow) // the next failure reads it
		f.mu.Unlock()
	}
	return changes, err
}

// read gives the detector what is recorded of a workflow. Of one with more than maxRead entries, it reads
// what led to the failure beside the first ones.
func (f *CascadeFeed) read(ctx context.Context, rec *Recorder, now time.Time, failure *ledger.Entry) (changes []cascade.Change, err error) {
	var page []ledger.Entry // no more are in memory at once
	n, whole := 0, true
	learn := func() error {
		more, err := f.learn(ctx, rec, now, page)
		changes, page = append(changes, more...), nil
		return err
	}
	for e, err := range rec.Evidence.Log().All(ctx, failure.Workflow) {
		if err != nil {
			return changes, err
		}
		if whole = n < maxRead; !whole {
			break
		}
		n, page = n+1, append(page, *e)
		if len(page) >= ledger.MaxPage {
			if err := learn(); err != nil {
				return changes, err
			}
		}
	}
	if err = learn(); whole || err != nil {
		return changes, err
	}
	var above []ledger.Entry
	known := map[string]bool{}
	for todo := slices.Clone(failure.Parents); len(todo) > 0 && len(known) < maxRise; todo = todo[1:] {
		if known[todo[0]] {
			continue
		}
		known[todo[0]] = true
		e, err := rec.lookup(ctx, failure.Workflow, todo[0])
		if err != nil {
			return changes, err
		}
		if e != nil && !IsUnproven(e) {
			above = append(above, *e)
			todo = append(todo, e.Parents...)
		}
	}
	slices.Reverse(above)
	more, err := f.learn(ctx, rec, now, above)
	return append(changes, more...), err
}

// learn gives the detector actions that are recorded, those of each log in their order.
func (f *CascadeFeed) learn(ctx context.Context, rec *Recorder, now time.Time, entries []ledger.Entry) (changes []cascade.Change, err error) {
	by, err := rec.callersOf(ctx, entries)
	if err != nil {
		return nil, err
	}
	for i := range entries {
		e := &entries[i]
		own := rec.own(e)
		if event, is := readEvent(e.Action, own); IsUnproven(e) || is && event != ect.EventCheckpoint {
			changes = append(changes, f.release(e.Log)...)
			continue
		}
		changes = append(changes, f.action(rec, e, own, by)...)
		if now.Sub(e.Recorded) < recently {
			changes = append(changes, f.succeeded(e, own)...)
		}
	}
	return changes, nil
}

// Forget ends the following of workflows that have not failed for a while.
func (f *CascadeFeed) Forget(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for wid, last := range f.watched {
		if now.Sub(last) > watchTime {
			delete(f.watched, wid)
		}
	}
}

// Rebuild takes the failures that were recorded since then, as after a restart. It reads at most so many
// entries of each log, from the newest on; whole says that these were all.
func (f *CascadeFeed) Rebuild(ctx context.Context, since time.Time, most int) (changes []cascade.Change, whole bool, err error) {
	rec, ok := f.Recorder()
	if !ok {
		return nil, true, nil
	}
	logs := []*ledger.Log{rec.Evidence.Log()}
	if rec.Evidence.Fleet() {
		if logs, err = logsOf(ctx, logs[0]); err != nil {
			return nil, false, err
		}
	}
	whole = true
	var failures []ledger.Entry
	for _, log := range logs {
		size := log.Head().Size
		index := size - 1
		for ; index >= 0 && size-index <= int64(most); index-- {
			e, err := log.Entry(ctx, index)
			if errors.Is(err, ledger.ErrPruned) {
				continue
			}
			if err != nil {
				return nil, false, err
			}
			if e.Recorded.Before(since) {
				index = -1
				break
			}
			if f.Wants(&e.Event) {
				failures = append(failures, e)
			}
		}
		whole = whole && index < 0
	}
	slices.SortStableFunc(failures, func(a, b ledger.Entry) int { return b.Recorded.Compare(a.Recorded) })
	for i := range slices.Backward(failures) {
		more, err := f.Take(ctx, &failures[i])
		if err != nil {
			return changes, false, err
		}
		changes = append(changes, more...)
	}
	return changes, whole, nil
}

// logsOf are the logs of all nodes that can be read. What is wrong with others is said elsewhere.
func logsOf(ctx context.Context, own *ledger.Log) ([]*ledger.Log, error) {
	origins, err := own.Logs(ctx)
	if err != nil {
		return nil, err
	}
	logs := []*ledger.Log{own}
	for _, origin := range origins {
		if origin == own.Origin() {
			continue
		}
		if log, err := own.In(ctx, origin); err == nil {
			logs = append(logs, log)
		} else if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return logs, nil
}
