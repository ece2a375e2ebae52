package caddymodule

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// serveOutput answers with the answer of the one execution in question, as a retry of
// the call would, or with the list where there are several.
func (q *inquiry) serveOutput() error {
	for {
		all, err := q.find()
		if err != nil {
			return err
		}
		if len(all) > 1 {
			return q.writeList(http.StatusMultipleChoices, all)
		}
		again, err := q.give(&all[0])
		if !again || err != nil {
			return err
		}
	}
}

// give answers with what came of an execution. It reports that the execution has moved
// on in the meantime, and must be looked up again.
func (q *inquiry) give(e *guard.Recorded) (again bool, err error) {
	switch e.Standing {
	case guard.RunningHere:
		if q.waits.Err() != nil {
			return false, q.problem(problem.InProgress, "It has not answered yet.", guard.StateSending)
		}
		return q.follow(e)
	case guard.RunningElsewhere:
		if q.waits.Err() != nil {
			return false, q.problem(problem.InProgress, "It runs on another node.", guard.StateSending)
		}
		return true, q.await(e.Key)
	case guard.Replayable:
		return false, q.replay(e)
	case guard.ResultExpired:
		return false, q.problem(problem.ResultExpired, "The result was kept until "+
			e.Record.Result.Expires.UTC().Format(time.RFC3339)+".", guard.StateCompleted)
	case guard.RolledBack:
		return false, q.problem(problem.RolledBack, "It was undone.", guard.StateRolledBack)
	case guard.Doubtful:
		return false, q.problem(problem.InDoubt, "Cause: "+string(e.Record.Cause)+".", guard.StateInDoubt)
	default:
		return false, q.unavailable()
	}
}

func (q *inquiry) unavailable() error {
	return q.problem(problem.ResultUnavailable, "The call was executed.", guard.StateCompleted)
}

func (q *inquiry) problem(k problem.Kind, detail string, state guard.State) error {
	p := problem.New(k, detail)
	p.State = state.String()
	if k == problem.InProgress || k == problem.InDoubt {
		p.StatusURL = executionsPath + inPath(q.id)
	}
	return p
}

// replay gives the recorded answer.
func (q *inquiry) replay(e *guard.Recorded) error {
	ctx := q.r.Context()
	result, err := q.engine.guard.Result(ctx, e.Key, e.Finding)
	if errors.Is(err, guard.ErrResultUnavailable) {
		return q.unavailable()
	}
	if err != nil {
		return err
	}
	sent, err := q.play(e, answer.Source{
		Head: &result.Head, Body: result.Body(ctx),
		Trailer: func() map[string][]string { return result.Head.Trailer },
	}, http.Header{headerExecutionStatus: {"replayed"}, headerReplayed: {"true"}})
	switch {
	case err == nil:
		return nil
	case sent:
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return q.unavailable()
}

// follow gives the answer of an execution that runs in this process, as it comes. The
// wait is for its first byte. An answer that is cut before anything of it was sent
// leaves the place to what is recorded then.
func (q *inquiry) follow(e *guard.Recorded) (again bool, err error) {
	follower := e.Flight.Follow()
	if follower == nil {
		select {
		case <-e.Flight.Done():
			return true, nil
		default:
			return false, q.problem(problem.ResultUnavailable,
				"The call is running; its answer is too large to be kept.", guard.StateSending)
		}
	}
	defer follower.Close()
	head, err := follower.Head(q.waits)
	if err != nil { // it has ended without an answer, or the time is over
		return true, q.r.Context().Err()
	}
	sent, err := q.play(e, answer.Source{
		Head: head, Body: followed{q.r.Context(), follower}, Trailer: follower.Trailer, Live: true,
	}, http.Header{headerExecutionStatus: {"attached"}})
	switch {
	case err == nil:
		return false, nil
	case sent:
		panic(http.ErrAbortHandler)
	}
	return true, nil
}

func (q *inquiry) play(e *guard.Recorded, src answer.Source, marks http.Header) (sent bool, err error) {
	marks[headerExecutionID] = []string{q.id}
	bodiless := e.Record.Method == http.MethodHead
	w := answer.NewWriter(&outputWriter{ResponseWriter: q.w, bodiless: bodiless}, q.r)
	err = answer.Play(w, q.r, src, marks)
	return w.Sent(), err
}

// outputWriter gives an answer to a GET that was recorded of another method: nobody
// may keep it (P3), and the length of a HEAD's is that of a body which never came.
type outputWriter struct {
	http.ResponseWriter
	bodiless bool
}

// WriteHeader sends the header.
func (w *outputWriter) WriteHeader(status int) {
	h := w.Header()
	for name := range h {
		// Some caches take a field of their own for more than Cache-Control.
		if strings.HasSuffix(name, "-Cache-Control") || name == "Surrogate-Control" {
			delete(h, name)
		}
	}
	protect(h)
	if w.bodiless {
		h.Del("Content-Length")
	}
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *outputWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
