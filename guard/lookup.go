package guard

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// step is where a call goes after a recorded execution was found.
type step int

const (
	stepDone   step = iota // it is answered
	stepLookUp             // look again
	stepClaim              // admit and claim it, over what was found
)

// answer answers the call from what is recorded of it, if anything is. ErrTaken says to
// look again.
func (x *Call) answer(found execution.Finding) (step, error) {
	if found.Status == execution.Free {
		return stepClaim, nil
	}
	x.found = true
	if err := x.keepTokens(found); err != nil {
		return stepDone, err
	}
	switch found.Status {
	case execution.Mismatch:
		x.emit(EventMismatch, nil)
		return stepDone, x.problem(api.FingerprintMismatch,
			"The host, the query, the media type or the body differ from the call that this id was first used for.", x.state)
	case execution.RunningHere:
		return x.attach(found.Flight)
	case execution.RunningElsewhere:
		return stepDone, x.problem(api.InProgress, "It runs on another node.", execution.StateSending)
	case execution.Replayable:
		return stepDone, x.replay(found)
	case execution.ResultExpired:
		return stepDone, x.problem(api.ResultExpired, "The result was kept until "+
			found.Record.Result.Expires.UTC().Format(time.RFC3339)+".", execution.StateCompleted)
	case execution.ResultUnavailable:
		return stepDone, x.unavailable()
	case execution.RolledBack:
		return stepDone, x.problem(api.RolledBack, "It was undone.", execution.StateRolledBack)
	default:
		x.call.Checkpoint = found.Record.Checkpoint
		return x.doubt(found)
	}
}

func (x *Call) unavailable() error {
	return x.problem(api.ResultUnavailable, "The call was executed.", execution.StateCompleted)
}

// marks are the guard's own fields of an answer.
func (x *Call) marks(status string) http.Header {
	return http.Header{HeaderExecutionID: {x.call.Scope.ID}, HeaderExecutionStatus: {status}}
}

func (x *Call) replay(found execution.Finding) error {
	result, err := x.executions.Result(x.r.Context(), x.call.Key, found)
	switch {
	case errors.Is(err, execution.ErrResultUnavailable):
		return x.unavailable()
	case err != nil:
		return x.storeFailed(err)
	}
	x.note("replayed", "")
	x.noted.outcome, x.noted.created = execution.Completed, result.Created
	x.action.Counts.Replayed()
	x.call.Checkpoint = found.Record.Checkpoint
	marks := withCheckpoint(x.marks("replayed"), x.call.Checkpoint)
	marks[HeaderReplayed] = []string{"true"}
	if result.Head.Status >= http.StatusBadRequest {
		if failed := x.recordedError(x.call.Checkpoint); failed != nil {
			marks[ect.FieldName] = append(slices.Clone(result.Head.Header[ect.FieldName]), failed.raw)
		}
	}
	err = Play(x.w, x.r, Source{
		Head: &result.Head, Body: result.Body(x.r.Context()),
		Trailer: func() map[string][]string { return result.Head.Trailer },
	}, marks)
	return x.played(err)
}

func (x *Call) played(err error) error {
	switch {
	case err == nil:
		return nil
	case x.w.Sent():
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return x.unavailable()
}

// attach follows the execution that is running in this process.
func (x *Call) attach(flight *execution.Flight) (step, error) {
	if x.r.Header.Get(HeaderExecutionParent) == x.call.Scope.ID {
		x.h.Logger.Warn("a call has come back to the guard that runs it; give the guards of a chain different names",
			slog.Any("key", x.call.Key), slog.String("guard", x.h.Name))
		return stepDone, x.problem(api.InProgress, "It has come back to the guard that runs it.", execution.StateSending)
	}
	follower := flight.Follow()
	if follower == nil {
		select {
		case <-flight.Done():
			return stepLookUp, nil
		default:
			return stepDone, x.problem(api.ResultUnavailable,
				"The call is running; its answer is too large to be kept.", execution.StateSending)
		}
	}
	defer follower.Close()

	ctx, cancel := context.WithDeadline(x.r.Context(), x.wait)
	head, err := follower.Head(ctx)
	cancel()
	switch {
	case errors.Is(err, execution.ErrNoAnswer):
		return x.followedInVain(flight)
	case x.r.Context().Err() != nil:
		return stepDone, x.gone()
	case err != nil:
		return stepDone, x.problem(api.InProgress, "An earlier attempt has not answered yet.", execution.StateSending)
	}
	x.note("attached", "")
	x.action.Counts.Attached()
	status := "attached"
	if follower.Doubtful() { // head has the rest of what its owner gets
		status = StatusInDoubt
	}
	err = Play(x.w, x.r, Source{
		Head: head, Body: followed{x.r.Context(), follower}, Trailer: follower.Trailer, Live: true,
	}, withCheckpoint(x.marks(status), flight.Checkpoint()))
	if err != nil && !x.w.Sent() {
		return x.followedInVain(flight)
	}
	return stepDone, x.played(err)
}

type followed struct {
	ctx context.Context
	f   *execution.Follower
}

func (f followed) Read(p []byte) (int, error) { return f.f.Read(f.ctx, p) }

func (x *Call) inDoubt(cause execution.Cause) error {
	p := x.problem(api.InDoubt, "Cause: "+string(cause)+".", execution.StateInDoubt)
	p.RetryHelps = x.runsAgain()
	return p
}

// doubtMarks are the fields of an answer that leaves the call in doubt. SDKs must not retry
// it, unless a retry runs the call again.
func (x *Call) doubtMarks() http.Header {
	marks := http.Header{HeaderExecutionStatus: {StatusInDoubt}}
	if !x.runsAgain() {
		api.NoRetry(marks)
	}
	return marks
}

// runsAgain reports that a retry of the call runs it again where it is in doubt.
func (x *Call) runsAgain() bool {
	switch x.action.OnUnknown {
	case OnUnknownRetry:
		return true
	case OnUnknownResend:
		return x.call.Sent != [32]byte{} && !x.stays
	}
	return false
}

// resend lets a call in doubt go once more, to an upstream that answers a repetition of its
// own key from its record: with that key and the same bytes, and only while the upstream
// keeps the key. Time is no evidence: past that the call is in doubt as before (P1).
func (x *Call) resend(found execution.Finding) (step, error) {
	age, err := x.executions.Age(x.r.Context(), found)
	if err != nil {
		return stepDone, x.storeFailed(err)
	}
	if x.call.Sent == [32]byte{} || x.call.Sent != found.Record.Sent || age < 0 || age >= x.action.ResendFor {
		x.stays = true
		return stepDone, x.inDoubt(found.Record.Cause)
	}
	return stepClaim, nil
}

// sentAs is a hash of what an upstream that keeps keys knows the call by; zero where the call
// has no such key. The key's own bytes count: quoted it is another to the upstream.
func (x *Call) sentAs(id string) (sum [32]byte, err error) {
	lines := x.r.Header[headerIdempotencyKey]
	if key, err := execution.ParseID(lines); x.action.OnUnknown != OnUnknownResend || err != nil || key != id {
		return sum, nil
	}
	hash := sha256.New()
	_, _ = fmt.Fprintf(hash, "%d:%s", len(lines[0]), lines[0])
	body := x.body.NewReader()
	defer func() { _ = body.Close() }()
	if _, err := io.Copy(hash, body); err != nil {
		return sum, x.unkept(err)
	}
	hash.Sum(sum[:0])
	return sum, nil
}

func (x *Call) doubt(found execution.Finding) (step, error) {
	switch x.action.OnUnknown {
	case OnUnknownRetry:
		return stepClaim, nil
	case OnUnknownResend:
		return x.resend(found)
	case OnUnknownProbe:
		return x.probe(found)
	}
	return stepDone, x.inDoubt(found.Record.Cause)
}

// mayHaveRun reports that the call runs although nobody knows whether it did before: its
// action says so, and no probe has denied it.
func (x *Call) mayHaveRun() bool { return x.earlier != "" }

// stillInDoubt is the outcome of an attempt that was not executed, where an earlier one may
// have been: what is proven of this one says nothing of that (P6).
func (x *Call) stillInDoubt(o execution.Outcome) execution.Outcome {
	if o.Verdict == execution.Released && x.mayHaveRun() {
		o.Verdict, o.Cause = execution.InDoubt, x.earlier
	}
	return o
}

// refusedInDoubt says with a refusal of the call that it may have been executed before.
func (x *Call) refusedInDoubt(err error) error {
	if p := (*api.Problem)(nil); errors.As(err, &p) && x.mayHaveRun() {
		p.Doubtful, p.State = true, execution.StateInDoubt.String()
	}
	return err
}

// followedInVain goes on with a call that got nothing from the execution that it
// followed. Released unsent, one of those that wait may run. In doubt, none: on_unknown
// is for calls that come afterwards; applied here, each would run in its turn.
func (x *Call) followedInVain(flight *execution.Flight) (step, error) {
	select {
	case <-flight.Done():
	default:
		return stepLookUp, nil
	}
	if flight.Ending() != execution.EndedInDoubt {
		return stepLookUp, nil
	}
	found, err := x.lookUp()
	if err != nil {
		return stepDone, err
	}
	cause := execution.CauseUnrecorded
	if found.Status == execution.Doubtful {
		cause = found.Record.Cause
	}
	return stepDone, x.inDoubt(cause)
}

// probe settles a call in doubt by asking the upstream about it. Of many retries one
// asks; the others do what its answer allows.
func (x *Call) probe(found execution.Finding) (step, error) {
	probe, first := x.h.probes.enter(x.call.Key)
	if !first {
		select {
		case <-probe.over:
		case <-x.r.Context().Done():
			return stepDone, x.gone()
		}
		if probe.doubt {
			return stepDone, x.inDoubt(found.Record.Cause)
		}
		return stepLookUp, nil
	}
	x.probing = probe
	// It may have been settled since it was found.
	found, err := x.lookUp()
	if err != nil || found.Status != execution.Doubtful {
		x.probed()
		return stepLookUp, err
	}
	next, err := x.settleDoubt(found)
	if next == stepDone && err == nil {
		probe.doubt = true
		err = x.inDoubt(found.Record.Cause)
	}
	if next != stepClaim { // those who wait must find the claim
		x.probed()
	}
	return next, err
}

// probed wakes the retries that wait for the probe of this call.
func (x *Call) probed() {
	if x.probing != nil {
		x.h.probes.leave(x.call.Key, x.probing)
		x.probing = nil
	}
}

// settleDoubt asks, and records that the call was applied. stepDone says that it stays
// in doubt.
func (x *Call) settleDoubt(found execution.Finding) (step, error) {
	p := x.action.Probe
	a, err := p.Ask(x.r)
	if err != nil {
		x.action.Counts.Probed(ProbeUnknown)
		x.h.Logger.Warn("the status probe gave no answer; the call stays in doubt",
			slog.Any("key", x.call.Key), slog.Any("error", err))
		return stepDone, nil
	}
	switch {
	case p.Applied(a):
		x.action.Counts.Probed(ProbeApplied)
		var head *execution.Head
		if p.UseAnswer {
			head = &execution.Head{Status: a.Status, Header: Replayable(a.Header)}
		}
		// Others wait for this, whether or not the caller does.
		ctx := context.WithoutCancel(x.r.Context())
		batch := x.evidence.policy.SettledBy(ctx, x.call.Key, found.Record, true, "probe")
		err := x.executions.Applied(ctx, x.call.Key, found, head, a.Body, batch)
		if err != nil && !errors.Is(err, execution.ErrTaken) {
			return stepLookUp, x.storeFailed(err)
		}
		if err == nil {
			x.resolved(execution.Completed)
		}
		return stepLookUp, nil
	case p.NotApplied(a):
		x.action.Counts.Probed(ProbeNotApplied)
		return stepClaim, nil
	}
	x.action.Counts.Probed(ProbeUnknown)
	return stepDone, nil
}

func (x *Call) resolved(v execution.Verdict) {
	x.emit(EventResolved, map[string]any{"outcome": v.String(), "by": "probe"})
}

// Probe asks the upstream whether a call in doubt was applied.
type Probe struct {
	// Ask sends the question about the call that a request makes. An error says that there
	// is no answer.
	Ask func(r *http.Request) (*InternalAnswer, error)
	// Applied and NotApplied say which answers mean that the call was applied, and that it
	// was not. Applied is asked first; an answer that is neither leaves the call in doubt.
	Applied, NotApplied func(a *InternalAnswer) bool
	// UseAnswer makes the answer that means "applied" the result of the call.
	UseAnswer bool
}

// InternalRequest is a request of the guard's own to the upstream: a status probe, or a look at
// what stands at a target.
type InternalRequest struct {
	Method string
	// Path is escaped, Query without the question mark.
	Path, Query string
	Host        string
	// Remote is the address of the client that it is made for.
	Remote string
	Header http.Header
	// MaxAnswer is the size of the largest answer that is read, in bytes.
	MaxAnswer int64
}

// InternalAnswer is the answer to an InternalRequest.
type InternalAnswer struct {
	Status int
	Header http.Header
	Body   []byte
	// Unframed says that nothing but the end of the connection ends the body.
	Unframed bool
	// Replaced says that another handler has answered in the upstream's place.
	Replaced bool
}

// prober runs one probe for a key at a time; others wait for its result.
type prober struct {
	mu      sync.Mutex
	running map[execution.Key]*probing
}

// enter returns the probe of key, and whether the caller has to run it, and then call leave.
func (p *prober) enter(key execution.Key) (probe *probing, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if probe, ok := p.running[key]; ok {
		return probe, false
	}
	if p.running == nil {
		p.running = map[execution.Key]*probing{}
	}
	probe = &probing{over: make(chan struct{})}
	p.running[key] = probe
	return probe, true
}

func (p *prober) leave(key execution.Key, probe *probing) {
	p.mu.Lock()
	delete(p.running, key)
	p.mu.Unlock()
	close(probe.over)
}

type probing struct {
	over chan struct{}
	// doubt says, once over is closed, that the call stays in doubt.
	doubt bool
}
