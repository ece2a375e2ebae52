package caddymodule

import (
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
)

// policyBreaker says that a circuit breaker stands before each upstream.
type policyBreaker struct {
	circuits.Policy
	// Problem is what a call gets that a breaker refuses. Fallback says that something
	// else answers in its place, marked as refused.
	Problem  string `json:"problem"`
	Fallback bool   `json:"fallback,omitempty"`
}

// breakerPolicy is that of the proxy behind the guard; nil where it has no breakers, or
// is not plain to see.
func (h *Handler) breakerPolicy() *policyBreaker {
	t := h.proxy.Load()
	if t == nil {
		return nil
	}
	p := t.BreakerPolicy()
	if p == nil {
		return nil
	}
	return &policyBreaker{*p, problem.BasePath + problem.CircuitOpen.Slug, h.fallback != nil}
}
