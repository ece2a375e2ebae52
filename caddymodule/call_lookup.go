package caddymodule

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
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
func (x *call) answer(found execution.Finding) (step, error) {
	if found.Status == execution.Free {
		return stepClaim, nil
	}
	x.found = true
	if err := x.keepTokens(found); err != nil {
		return stepDone, err
	}
	switch found.Status {
	case execution.Mismatch:
		x.emit(eventMismatch, nil)
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

func (x *call) unavailable() error {
	return x.problem(api.ResultUnavailable, "The call was executed.", execution.StateCompleted)
}

// marks are the guard's own fields of an answer.
func (x *call) marks(status string) http.Header {
	return http.Header{headerExecutionID: {x.call.Scope.ID}, headerExecutionStatus: {status}}
}

// replay answers with the recorded result.
func (x *call) replay(found execution.Finding) error {
	result, err := x.guard.Result(x.r.Context(), x.call.Key, found)
	switch {
	case errors.Is(err, execution.ErrResultUnavailable):
		return x.unavailable()
	case err != nil:
		return x.storeFailed(err)
	}
	x.note("replayed", "")
	x.noted.outcome, x.noted.created = execution.Completed, result.Created
	x.action.counts.Replayed()
	x.call.Checkpoint = found.Record.Checkpoint
	marks := marked(x.marks("replayed"), x.call.Checkpoint)
	marks[headerReplayed] = []string{"true"}
	if result.Head.Status >= http.StatusBadRequest {
		if failed := x.recordedError(x.call.Checkpoint); failed != nil {
			marks[ect.FieldName] = append(slices.Clone(result.Head.Header[ect.FieldName]), failed.raw)
		}
	}
	err = guard.Play(x.w, x.r, guard.Source{
		Head: &result.Head, Body: result.Body(x.r.Context()),
		Trailer: func() map[string][]string { return result.Head.Trailer },
	}, marks)
	return x.played(err)
}

func (x *call) played(err error) error {
	switch {
	case err == nil:
		return nil
	case x.w.Sent():
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return x.unavailable()
}

// attach follows the execution that is running in this process.
func (x *call) attach(flight *execution.Flight) (step, error) {
	if x.r.Header.Get(headerExecutionParent) == x.call.Scope.ID {
		x.h.logger.Warn("a call has come back to the guard that runs it; give the guards of a chain different names",
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
	x.action.counts.Attached()
	status := "attached"
	if follower.Doubtful() { // head has the rest of what its owner gets
		status = statusInDoubt
	}
	err = guard.Play(x.w, x.r, guard.Source{
		Head: head, Body: followed{x.r.Context(), follower}, Trailer: follower.Trailer, Live: true,
	}, marked(x.marks(status), flight.Checkpoint()))
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

func (x *call) inDoubt(cause execution.Cause) error {
	p := x.problem(api.InDoubt, "Cause: "+string(cause)+".", execution.StateInDoubt)
	p.RetryHelps = x.runsAgain()
	return p
}

// doubtMarks are the fields of an answer that leaves the call in doubt. SDKs must not retry
// it, unless a retry runs the call again.
func (x *call) doubtMarks() http.Header {
	marks := http.Header{headerExecutionStatus: {statusInDoubt}}
	if !x.runsAgain() {
		api.NoRetry(marks)
	}
	return marks
}

// runsAgain reports that a retry of the call runs it again where it is in doubt.
func (x *call) runsAgain() bool {
	switch x.action.OnUnknown {
	case onUnknownRetry:
		return true
	case onUnknownResend:
		return x.call.Sent != [32]byte{} && !x.stays
	}
	return false
}

// resend lets a call in doubt go once more, to an upstream that answers a repetition of its
// own key from its record: with that key and the same bytes, and only while the upstream
// keeps the key. Time is no evidence: past that the call is in doubt as before (P1).
func (x *call) resend(found execution.Finding) (step, error) {
	age, err := x.guard.Age(x.r.Context(), found)
	if err != nil {
		return stepDone, x.storeFailed(err)
	}
	if x.call.Sent == [32]byte{} || x.call.Sent != found.Record.Sent || age < 0 || age >= time.Duration(x.action.ResendFor) {
		x.stays = true
		return stepDone, x.inDoubt(found.Record.Cause)
	}
	return stepClaim, nil
}

// sentAs is a hash of what an upstream that keeps keys knows the call by; zero where the call
// has no such key. The key's own bytes count: quoted it is another to the upstream.
func (x *call) sentAs(id string) (sum [32]byte, err error) {
	lines := x.r.Header[headerIdempotencyKey]
	if key, err := execution.ParseID(lines); x.action.OnUnknown != onUnknownResend || err != nil || key != id {
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

func (x *call) doubt(found execution.Finding) (step, error) {
	switch x.action.OnUnknown {
	case onUnknownRetry:
		return stepClaim, nil
	case onUnknownResend:
		return x.resend(found)
	case onUnknownProbe:
		return x.probe(found)
	}
	return stepDone, x.inDoubt(found.Record.Cause)
}

// mayHaveRun reports that the call runs although nobody knows whether it did before: its
// action says so, and no probe has denied it.
func (x *call) mayHaveRun() bool { return x.earlier != "" }

// stillInDoubt is the outcome of an attempt that was not executed, where an earlier one may
// have been: what is proven of this one says nothing of that (P6).
func (x *call) stillInDoubt(o execution.Outcome) execution.Outcome {
	if o.Verdict == execution.Released && x.mayHaveRun() {
		o.Verdict, o.Cause = execution.InDoubt, x.earlier
	}
	return o
}

// refusedInDoubt says with a refusal of the call that it may have been executed before.
func (x *call) refusedInDoubt(err error) error {
	if p := (*api.Problem)(nil); errors.As(err, &p) && x.mayHaveRun() {
		p.Doubtful, p.State = true, execution.StateInDoubt.String()
	}
	return err
}

// followedInVain goes on with a call that got nothing from the execution that it
// followed. Released unsent, one of those that wait may run. In doubt, none: on_unknown
// is for calls that come afterwards; applied here, each would run in its turn.
func (x *call) followedInVain(flight *execution.Flight) (step, error) {
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
func (x *call) probe(found execution.Finding) (step, error) {
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
func (x *call) probed() {
	if x.probing != nil {
		x.h.probes.leave(x.call.Key, x.probing)
		x.probing = nil
	}
}

// settleDoubt asks, and records that the call was applied. stepDone says that it stays
// in doubt.
func (x *call) settleDoubt(found execution.Finding) (step, error) {
	p := x.action.Probe
	a, err := p.ask(x)
	if err != nil {
		x.action.counts.Probed(probeUnknown)
		x.h.logger.Warn("the status probe gave no answer; the call stays in doubt",
			slog.Any("key", x.call.Key), slog.Any("error", err))
		return stepDone, nil
	}
	switch {
	case p.Applied.matches(a):
		x.action.counts.Probed(probeApplied)
		var head *execution.Head
		if p.UseAnswer {
			head = &execution.Head{Status: a.status, Header: guard.Replayable(a.header)}
		}
		// Others wait for this, whether or not the caller does.
		ctx := context.WithoutCancel(x.r.Context())
		batch := x.evidence.policy.settledBy(ctx, x.engine, x.call.Key, found.Record, true, "probe")
		err := x.guard.Applied(ctx, x.call.Key, found, head, a.body, batch)
		if err != nil && !errors.Is(err, execution.ErrTaken) {
			return stepLookUp, x.storeFailed(err)
		}
		if err == nil {
			x.resolved(execution.Completed)
		}
		return stepLookUp, nil
	case p.NotApplied.matches(a):
		x.action.counts.Probed(probeNotApplied)
		return stepClaim, nil
	}
	x.action.counts.Probed(probeUnknown)
	return stepDone, nil
}

func (x *call) resolved(v execution.Verdict) {
	x.emit(eventResolved, map[string]any{"outcome": v.String(), "by": "probe"})
}

// maxProbeAnswer is the largest answer of a probe that is read, in bytes.
const maxProbeAnswer = 256 << 10
