package caddymodule

import (
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// failsOpen reports that the call may be forwarded unguarded in place of being refused
// with err (P4): the route says `fail_open`, the store is what is missing, nothing is
// claimed for the call, and nothing was found of an earlier one.
func (x *exchange) failsOpen(err error) bool {
	switch {
	case !x.h.FailOpen || x.found || x.exiting():
		return false
	case !x.verified && x.h.needsTokens(x.r):
		return false // whose call it is, is not known
	case x.story.way != nil && x.story.way.ledgerFirst && len(x.story.tokens.all) > 0:
		return false // its tokens are good for nothing before they stand in the ledger
	case x.engine == nil:
		// The store could not be opened. Where it could and only the keys are refused,
		// an earlier call may stand in it.
		return !errors.Is(err, errKeys) && !errors.Is(err, guard.ErrWrongKey) && !errors.Is(err, guard.ErrMissingKey)
	case errors.Is(err, store.ErrUnknown):
		return false // the claim may stand
	case errors.Is(err, guard.ErrUnreadable):
		return false // there was an earlier call
	case errors.Is(err, store.ErrInvalid):
		return false // the store answers: it is the record that it does not take
	}
	return errors.Is(err, guard.ErrStore)
}

// exiting reports that the process starts no new calls.
func (x *exchange) exiting() bool {
	return caddy.Exiting() || x.engine != nil && x.engine.draining.Load()
}

// forwardUnguarded hands the call to the next handler as if there were no guard.
func (x *exchange) forwardUnguarded(w http.ResponseWriter, next caddyhttp.Handler, cause error) error {
	x.action.counts.FailedOpen()
	x.note(statusUnguarded, problem.StoreUnavailable.Slug)
	if calls := x.h.failures.due(time.Now()); calls > 0 {
		x.h.logger.Warn("the store is unavailable; calls are forwarded unguarded, and retries of them run again",
			zap.String("guard", x.h.Name), zap.Uint64("calls", calls), zap.Error(rootOf(cause)))
		x.emit(eventFailOpen, map[string]any{"calls": calls})
	}
	r := x.unguardedRequest()
	defer r.Body.Close()
	return next.ServeHTTP(answer.Mark(w, headerExecutionStatus, statusUnguarded), r)
}

// unguardedRequest is the client's request, with the body that may have been read.
func (x *exchange) unguardedRequest() *http.Request {
	if !x.read {
		return x.r
	}
	r := x.r.WithContext(x.r.Context())
	r.Header = r.Header.Clone()
	r.Header.Del("Expect") // the body is here
	r.TransferEncoding = nil
	r.ContentLength = x.body.Size()
	r.Body = http.NoBody
	if r.ContentLength > 0 {
		r.Body = x.body.NewReader()
	}
	return r
}

// rootOf is the cause behind a problem, which speaks of a refusal.
func rootOf(err error) error {
	if p := (*problem.Problem)(nil); errors.As(err, &p) && p.Cause != nil {
		return p.Cause
	}
	return err
}

// tellEvery is how often calls that were forwarded unguarded are told of.
const tellEvery = 10 * time.Second

// stretch counts what happens too often to be told of each time.
type stretch struct {
	untold atomic.Uint64
	told   atomic.Int64 // when, in Unix nanoseconds
}

// due counts one more. It returns how many there are to tell of, or 0 where it is too
// early to tell again.
func (s *stretch) due(now time.Time) uint64 {
	s.untold.Add(1)
	last := s.told.Load()
	since := now.UnixNano() - last // negative where the clock was set back
	if last != 0 && since >= 0 && since < int64(tellEvery) || !s.told.CompareAndSwap(last, now.UnixNano()) {
		return 0
	}
	return s.untold.Swap(0)
}
