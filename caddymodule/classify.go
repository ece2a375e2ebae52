package caddymodule

import (
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
)

// guardedBy is the context key of calls that a guard of this name has forwarded.
type guardedBy struct{ name string }

// classify says whether r is guarded, and as which action. What it lets through is
// forwarded untouched and unwrapped.
func (h *Handler) classify(r *http.Request) (*Action, bool, error) {
	if r.Context().Value(guardedBy{h.Name}) != nil {
		return nil, false, nil // guarded on the way here: it would wait for itself
	}
	consequential, err := h.consequential(r)
	if err != nil || !consequential {
		return nil, false, err
	}
	action, err := h.action(r)
	if err != nil {
		return nil, false, err
	}
	switch {
	case isUpgrade(r):
		h.passThrough(r, metrics.Upgrade)
	case isGRPC(r) && action.GRPC != grpcUnary:
		h.passThrough(r, metrics.GRPC)
	default:
		return action, true, nil
	}
	return nil, false, nil
}

// consequential: a call that is not known to be harmless changes something, unless
// the configuration says otherwise.
func (h *Handler) consequential(r *http.Request) (bool, error) {
	if safeMethod(r.Method) {
		var declared bool
		var err error
		if len(h.consequentialSets) > 0 {
			declared, err = h.consequentialSets.AnyMatchWithError(r)
		}
		if !declared && err == nil {
			h.counts.Unguarded(metrics.Safe)
		}
		return declared, err
	}
	if len(h.exemptSets) == 0 {
		return true, nil
	}
	exempt, err := h.exemptSets.AnyMatchWithError(r)
	if exempt {
		h.passThrough(r, metrics.Exempt)
	}
	return !exempt, err
}

// passThrough notes that r might have been guarded, and is not.
func (h *Handler) passThrough(r *http.Request, why metrics.Reason) {
	h.counts.Unguarded(why)
	replacer(r).Set(placeholderSpace+"status", statusUnguarded)
}

// safeMethod lists the methods that are registered as safe. The case counts: an
// upstream may read `post` as POST, so that what is not exactly one of these is
// guarded. CONNECT makes tunnels, which cannot be guarded.
func safeMethod(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodConnect,
		"QUERY", "SEARCH", "PROPFIND", "REPORT":
		return true
	}
	return false
}

// action is the first whose matchers match; the last one matches everything.
func (h *Handler) action(r *http.Request) (*Action, error) {
	for _, a := range h.actions {
		if len(a.matchers) == 0 {
			return a, nil
		}
		matched, err := a.matchers.AnyMatchWithError(r)
		if err != nil {
			return nil, err
		}
		if matched {
			return a, nil
		}
	}
	panic("agent_guard: the default action matches everything")
}

// isUpgrade reports that r asks for a protocol that is not HTTP. An offer to go on
// with HTTP/2 or TLS, which some clients make with every call, may be ignored and is.
func isUpgrade(r *http.Request) bool {
	if !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") {
		return false
	}
	for _, line := range r.Header["Upgrade"] {
		for protocol := range strings.SplitSeq(line, ",") {
			name, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(protocol)), "/")
			if name != "" && name != "h2c" && name != "http" && name != "tls" {
				return true
			}
		}
	}
	return false
}

func isGRPC(r *http.Request) bool {
	return strings.HasPrefix(strings.ToLower(r.Header.Get("Content-Type")), "application/grpc")
}
