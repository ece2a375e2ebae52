package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// step is where a call goes after a recorded execution was found.
type step int

const (
	stepDone  step = iota // it is answered
	stepFind              // look again
	stepClaim             // claim it over what was found
)

// answer answers the call from what is recorded of it.
func (x *exchange) answer(found guard.Finding) (step, error) {
	switch found.Standing {
	case guard.Mismatch:
		x.emit(eventMismatch, nil)
		return stepDone, x.problem(problem.FingerprintMismatch,
			"The host, the query, the media type or the body differ from the call that this id was first used for.", 0)
	case guard.RunningHere:
		return x.attach(found.Flight)
	case guard.RunningElsewhere:
		return stepDone, x.problem(problem.InProgress, "It runs on another node.", guard.StateSending)
	case guard.Replayable:
		return stepDone, x.replay(found)
	case guard.ResultExpired:
		return stepDone, x.problem(problem.ResultExpired, "The result was kept until "+
			found.Record.Result.Expires.UTC().Format(time.RFC3339)+".", guard.StateCompleted)
	case guard.ResultUnavailable:
		return stepDone, x.unavailable()
	case guard.RolledBack:
		return stepDone, x.problem(problem.RolledBack, "It was undone.", guard.StateRolledBack)
	default:
		x.call.Checkpoint = found.Record.Checkpoint
		return x.doubt(found)
	}
}

func (x *exchange) unavailable() error {
	return x.problem(problem.ResultUnavailable, "The call was executed.", guard.StateCompleted)
}

// marks are the guard's own fields of an answer.
func (x *exchange) marks(status string) http.Header {
	return http.Header{headerExecutionID: {x.call.Scope.ID}, headerExecutionStatus: {status}}
}

// replay answers with the recorded result.
func (x *exchange) replay(found guard.Finding) error {
	result, err := x.guard.Result(x.r.Context(), x.call.Key, found)
	switch {
	case errors.Is(err, guard.ErrResultUnavailable):
		return x.unavailable()
	case err != nil:
		return x.storeFailed(err)
	}
	x.note("replayed", "")
	x.noted.outcome, x.noted.created = guard.Completed, result.Created
	x.action.counts.Replayed()
	x.call.Checkpoint = found.Record.Checkpoint
	marks := marked(x.marks("replayed"), x.call.Checkpoint)
	marks[headerReplayed] = []string{"true"}
	err = answer.Play(x.w, x.r, answer.Source{
		Head: &result.Head, Body: result.Body(x.r.Context()),
		Trailer: func() map[string][]string { return result.Head.Trailer },
	}, marks)
	return x.played(err)
}

// played ends an answer that was played from a source.
func (x *exchange) played(err error) error {
	switch {
	case err == nil:
		return nil
	case x.w.Sent():
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return x.unavailable()
}

// attach follows the execution that is running in this process.
func (x *exchange) attach(flight *guard.Flight) (step, error) {
	if x.r.Header.Get(headerExecutionParent) == x.call.Scope.ID {
		x.h.logger.Warn("a call has come back to the guard that runs it; give the guards of a chain different names",
			zap.Stringer("key", x.call.Key), zap.String("guard", x.h.Name))
		return stepDone, x.problem(problem.InProgress, "It has come back to the guard that runs it.", guard.StateSending)
	}
	follower := flight.Follow()
	if follower == nil {
		select {
		case <-flight.Done():
			return stepFind, nil
		default:
			return stepDone, x.problem(problem.ResultUnavailable,
				"The call is running; its answer is too large to be kept.", guard.StateSending)
		}
	}
	defer follower.Close()

	ctx, cancel := context.WithDeadline(x.r.Context(), x.wait)
	head, err := follower.Head(ctx)
	cancel()
	switch {
	case errors.Is(err, guard.ErrNoAnswer):
		return x.followedInVain(flight)
	case x.r.Context().Err() != nil:
		return stepDone, x.gone()
	case err != nil:
		return stepDone, x.problem(problem.InProgress, "An earlier attempt has not answered yet.", guard.StateSending)
	}
	x.note("attached", "")
	x.action.counts.Attached()
	err = answer.Play(x.w, x.r, answer.Source{
		Head: head, Body: followed{x.r.Context(), follower}, Trailer: follower.Trailer, Live: true,
	}, marked(x.marks("attached"), flight.Checkpoint()))
	if err != nil && !x.w.Sent() {
		return x.followedInVain(flight)
	}
	return stepDone, x.played(err)
}

// followed makes a follower an io.Reader.
type followed struct {
	ctx context.Context
	f   *guard.Follower
}

func (f followed) Read(p []byte) (int, error) { return f.f.Read(f.ctx, p) }
