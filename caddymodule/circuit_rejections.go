package caddymodule

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// maxRejected is how many workflows are told that one breaker rejects them, until it
// changes. What else it rejects is counted.
const maxRejected = 1024

// maxRejectedUnverified is how many are told for callers that nobody here has verified.
// These make up workflows at no cost, and must not use up what others are told with.
const maxRejectedUnverified = 64

// rejections remembers which workflows were told that a breaker rejects their calls, so
// that a storm of retries cannot flood the ledger (cascade 3.3.2).
type rejections struct {
	mu sync.Mutex
	of map[breaker.Key]*rejected
}

type rejected struct {
	generation uint64
	verified   map[string]struct{} // the workflows of callers that are known here
	unverified map[string]struct{}
}

// first reports whether a workflow is to be told of a rejection, once for each
// generation of a breaker. What callers are told who are not verified here counts for
// them alone.
func (r *rejections) first(open *breaker.OpenError, workflow string, verified bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.of[open.Key]
	if known == nil || known.generation != open.Generation {
		if r.of == nil || known == nil && len(r.of) >= maxCircuits {
			r.of = map[breaker.Key]*rejected{}
		}
		known = &rejected{open.Generation, map[string]struct{}{}, map[string]struct{}{}}
		r.of[open.Key] = known
	}
	workflows, most := known.unverified, maxRejectedUnverified
	if verified {
		workflows, most = known.verified, maxRejected
	}
	if _, told := workflows[workflow]; told || len(workflows) >= most {
		return false
	}
	workflows[workflow] = struct{}{}
	return true
}

// tellRejection tells the workflow of a call that a breaker has rejected it: a gateway
// is the boundary of its workflows (cascade 3.3.2).
func (x *exchange) tellRejection(p *problem.Problem) {
	s := &x.story
	open := (*breaker.OpenError)(nil)
	if s.way == nil || s.call.Workflow == "" || !errors.As(p.Cause, &open) {
		return
	}
	e, way, workflow := x.engine, s.way, s.call.Workflow
	t := &e.teller
	// Changes of breakers always find room, and whoever is not told now may be with the
	// next rejection.
	if len(t.waiting) >= maxCircuitEvents/2 || !t.rejections.first(open, workflow, verifiedHere(x.call.Scope.Caller)) {
		return
	}
	ids := slices.Clone(s.call.Parents)
	for _, t := range s.tokens.all {
		if t.Proven() { // else it names what it likes
			ids = append(ids, t.Parents()...)
		}
	}
	t.later(func(ctx context.Context) { e.tellRejected(ctx, way, open, workflow, ids) })
}

// tellRejected tells of a rejection. It follows from whatever of ids is recorded: the
// tokens of a call that was not claimed are not.
func (e *engine) tellRejected(ctx context.Context, way *testimony, open *breaker.OpenError, workflow string, ids []string) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return // nothing can be recorded then
	}
	c := evidence.Circuit{
		Event: ect.EventCircuitOpen, Downstream: e.circuits.Downstream(open.Key.Upstream), Workflow: workflow, Reason: rejectedReason,
		ErrorType: problem.CircuitOpen.ErrorType,
	}
	for _, s := range e.circuits.Status() {
		if s.Key == open.Key {
			c.ErrorRate, c.Window, c.Cooldown = s.ErrorRate, s.Window, s.Cooldown
			ids = append(ids, s.Reference) // of its own workflow, or left out
		}
	}
	if c.Parents, err = way.evidence.Known(ctx, workflow, ids); err == nil {
		_, err = e.tellDraft(ctx, way, now, &c)
	}
	if err != nil {
		e.untold(open.Key, breaker.Open, err)
	}
}

// rejectedReason tells a rejection from an opening.
const rejectedReason = "rejected"
