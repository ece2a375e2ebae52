package caddymodule

import (
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// ServeHTTP is the way of a request (docs/request.md). Calls that change nothing
// take its first step only.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if isOwn(r) {
		return next.ServeHTTP(w, r)
	}
	if h.Endpoints != endpointsOff && h.serveEndpoint(w, r) {
		return nil
	}
	action, guarded, err := h.classify(r)
	if err != nil {
		return err
	}
	if !guarded {
		return h.pass(w, r, next)
	}
	x := &exchange{h: h, w: answer.NewWriter(w, r), r: r, action: action}
	x.publish()
	defer x.close()
	err = x.serve(next)
	if err != nil && x.failsOpen(err) {
		err = refusedByCircuit(x.forwardUnguarded(w, next, err), verifiedHere(x.call.Scope.Caller))
	}
	var p *problem.Problem
	if errors.As(err, &p) {
		x.tellRejection(p)
		if answered, err := x.degrade(w, p); answered {
			return err
		}
		x.refuse(w, p)
		return nil
	}
	if err != nil {
		x.giveBack()
	}
	return err
}

// pass hands on what is not guarded. A token is verified all the same.
func (h *Handler) pass(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	err := h.verifySafe(r)
	if err == nil {
		err = h.passOn(w, r, next)
	}
	var p *problem.Problem
	if !errors.As(err, &p) {
		return err
	}
	h.refuseUnguarded(w, p)
	return nil
}

// refuseUnguarded answers a request that is not guarded with a problem.
func (h *Handler) refuseUnguarded(w http.ResponseWriter, p *problem.Problem) {
	w.Header().Set(headerExecutionStatus, answer.StatusRefused)
	h.actions[len(h.actions)-1].counts.Refused(p.Kind().Slug) // the action default
	if p.Cause != nil && p.Kind() != problem.CircuitOpen {    // which is told once, when it opens
		h.logger.Error("request refused", zap.String("problem", p.Kind().Slug), zap.Error(p.Cause))
	}
	p.Write(w)
}

// serve takes a guarded call through its steps.
func (x *exchange) serve(next caddyhttp.Handler) error {
	if err := x.open(); err != nil {
		return err
	}
	if err := x.identify(); err != nil { // 1 and 2
		return err
	}
	for {
		found, err := x.find() // 3
		if err != nil {
			return err
		}
		if found.Standing != guard.Free {
			x.found = true
			if err := x.keepTokens(found); errors.Is(err, guard.ErrTaken) {
				continue
			} else if err != nil {
				return err
			}
			then, err := x.answer(found)
			if err != nil || then == stepDone {
				return err
			}
			if then == stepFind {
				continue
			}
		}
		if err := x.story.tokens.inTime(); err != nil {
			return err // nothing new begins with them
		}
		execution, err := x.claim(found) // 4 and 5
		if errors.Is(err, guard.ErrTaken) {
			x.found = true
			continue
		}
		if err != nil {
			return err
		}
		return x.execute(execution, next) // 6, 7 and 8
	}
}

// refuse answers with a problem.
func (x *exchange) refuse(w http.ResponseWriter, p *problem.Problem) {
	if p.ExecutionID == "" {
		p.ExecutionID = x.call.Scope.ID
	}
	if p.ExecutionID != "" {
		w.Header().Set(headerExecutionID, p.ExecutionID)
	}
	x.pointToStatus(p)
	w.Header().Set(headerExecutionStatus, answer.StatusRefused)
	if x.call.Checkpoint != "" {
		w.Header().Set(headerExecutionCheckpoint, x.call.Checkpoint)
	}
	if !x.read && x.r.ProtoMajor == 1 && x.r.Header.Get("Expect") != "" {
		// Else the server would wait for a body that the client was not asked for.
		w.Header().Set("Connection", "close")
	}
	status := statusRefused
	if x.doubtful {
		status = statusInDoubt
	}
	x.note(status, p.Kind().Slug)
	x.action.counts.Refused(p.Kind().Slug)
	level := zap.DebugLevel
	if p.Cause != nil && p.Kind() != problem.CircuitOpen {
		level = zap.ErrorLevel
	}
	if entry := x.h.logger.Check(level, "guarded call refused"); entry != nil {
		fields := []zap.Field{zap.String("problem", p.Kind().Slug), zap.Error(p.Cause)}
		if x.identified() {
			fields = append(fields, zap.Stringer("key", x.call.Key))
		}
		entry.Write(fields...)
	}
	p.Write(w)
}
