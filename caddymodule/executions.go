package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// executionsPath is where callers ask what became of their executions: followed by
// the id for their state, and by /output for the answer (ADR 0018).
const executionsPath = wellKnown + "executions/"

// inquiry is a caller's question about the executions that it has named with one id.
// It executes nothing and claims no key.
type inquiry struct {
	h      *Handler
	w      http.ResponseWriter
	r      *http.Request
	engine *engine
	caller guard.CallerHash
	question

	waits context.Context // over with the time to wait, the client's leaving, or an exit
}

// serveExecutions answers the paths below executionsPath.
func (h *Handler) serveExecutions(w http.ResponseWriter, r *http.Request) {
	if !allowRead(w, r) {
		return
	}
	q := &inquiry{h: h, w: w, r: r}
	if err := q.serve(); err != nil && r.Context().Err() == nil {
		q.refuse(err)
	}
}

func (q *inquiry) serve() error {
	e, err := q.h.app.acquire()
	if err != nil {
		return err
	}
	defer func() { _ = e.release() }() // closing the store logs its own errors
	q.engine = e
	if err := q.authenticate(); err != nil {
		return err
	}
	if q.question, err = parseQuestion(q.r.URL); err != nil {
		return err
	}
	var cancel context.CancelFunc
	q.waits, cancel = context.WithTimeout(q.r.Context(), q.wait)
	defer cancel()
	defer context.AfterFunc(e.waits, cancel)()
	if q.output {
		return q.serveOutput()
	}
	all, err := q.settled()
	if err != nil {
		return err
	}
	return q.writeList(http.StatusOK, all)
}

// authenticate finds out who asks, in the way in which callers are told apart.
// Callers without any credential share their ids, and are told nothing (P3).
func (q *inquiry) authenticate() error {
	way, err := q.h.app.testimony()
	if err != nil {
		return err
	}
	tokens, err := q.h.verifyQuestion(way, q.r)
	if err != nil {
		return err
	}
	if err := way.spend(&tokens, q.r); err != nil {
		return err
	}
	caller, err := q.h.caller(q.engine.guard, q.r, &tokens)
	if err != nil {
		return err
	}
	if caller == anonymous {
		return problem.New(problem.AuthenticationRequired, "Send the credential that the call was made with.")
	}
	q.caller = q.engine.guard.Caller(caller)
	return nil
}

// find returns the executions in question, the youngest first. Other guards may name
// callers in another way, and so may other sites of this one: what they have recorded
// is not shown (P3).
func (q *inquiry) find() ([]guard.Recorded, error) {
	all, err := q.engine.guard.ByID(q.r.Context(), q.caller, q.id)
	if err != nil {
		return nil, err
	}
	host := strings.ToLower(q.r.Host)
	all = slices.DeleteFunc(all, func(e guard.Recorded) bool {
		return e.Record.Guard != q.h.Name || e.Record.Host != host || !q.concerns(&e)
	})
	if len(all) == 0 {
		return nil, problem.New(problem.ExecutionUnknown, "At this route and host, for the caller that asks.")
	}
	slices.SortFunc(all, func(a, b guard.Recorded) int {
		if c := b.Record.Created.Compare(a.Record.Created); c != 0 {
			return c
		}
		return slices.Compare(a.Key[:], b.Key[:])
	})
	return all, nil
}

// settled is find once none of the executions runs any more, or when the wait is over.
func (q *inquiry) settled() ([]guard.Recorded, error) {
	for {
		all, err := q.find()
		if err != nil {
			return nil, err
		}
		running := slices.IndexFunc(all, func(e guard.Recorded) bool {
			return e.Standing == guard.RunningHere || e.Standing == guard.RunningElsewhere
		})
		if running < 0 || q.waits.Err() != nil {
			return all, nil
		}
		if err := q.await(all[running].Key); err != nil {
			return nil, err
		}
	}
}

// await waits for the end of an execution, for as long as there is time.
func (q *inquiry) await(key guard.Key) error {
	err := q.engine.guard.Await(q.waits, key)
	if err != nil && q.waits.Err() != nil {
		return q.r.Context().Err()
	}
	return err
}

// refuse answers with what went wrong.
func (q *inquiry) refuse(err error) {
	var p *problem.Problem
	if !errors.As(err, &p) {
		p = problem.New(problem.StoreUnavailable, "The gateway's store does not answer.")
		p.Cause = err
		q.h.logger.Error("a question about an execution could not be answered", zap.Error(err))
	}
	h := q.w.Header()
	h.Set(headerExecutionStatus, answer.StatusRefused)
	if p.ExecutionID = q.id; q.id != "" {
		h.Set(headerExecutionID, q.id)
	}
	if p.Kind() == problem.AuthenticationRequired {
		h.Set("WWW-Authenticate", q.h.challenge())
	}
	q.h.actions[len(q.h.actions)-1].counts.Refused(p.Kind().Slug) // the action default
	p.Write(q.w)
}

// challenge names a way to authenticate. No scheme is registered for API keys; the
// word is the one in use.
func (h *Handler) challenge() string {
	if slices.Contains(h.credentials, "Authorization") {
		return `Bearer realm="executions"`
	}
	return `ApiKey realm="executions"`
}

// pointToStatus says in a problem where its caller can see what becomes of the call.
func (x *exchange) pointToStatus(p *problem.Problem) {
	if k := p.Kind(); k != problem.InProgress && k != problem.InDoubt || x.h.Endpoints == endpointsOff {
		return
	}
	if x.call.Scope.Caller != anonymous {
		p.StatusURL = executionsPath + inPath(x.call.Scope.ID)
	}
}

// longestWait bounds what a question may wait.
const longestWait = 60 * time.Second
