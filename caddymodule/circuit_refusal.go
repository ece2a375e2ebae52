package caddymodule

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
)

// verifiedHere reports whether a caller is known to this gateway itself, so that it may
// see breakers (cascade 6.2). A credential that only the upstream can check is made up
// at no cost.
func verifiedHere(caller string) bool {
	switch kind, _, _ := strings.Cut(caller, ":"); kind {
	case "issuer", "certificate", "user", "explicit":
		return true
	}
	return false
}

// refusedByCircuit is err, or the problem that tells of it where a breaker has refused
// the last attempt: the call was not sent. verified says that the caller is known here.
func refusedByCircuit(err error, verified bool) error {
	open := (*breaker.OpenError)(nil)
	if !errors.As(err, &open) {
		return err
	}
	identity := ""
	if named := (interface{ Downstream() string })(nil); errors.As(err, &named) {
		identity = named.Downstream()
	}
	return circuitOpen(open, identity, verified)
}

// circuitOpen is the problem of a call that a breaker has refused. The state of upstreams
// tells how the house is built: their addresses and how they fail are for callers that
// are verified here, as at the endpoint of breakers. What identity the configuration
// gives the upstream is for everybody.
func circuitOpen(open *breaker.OpenError, identity string, verified bool) *problem.Problem {
	name := cmp.Or(identity, "the upstream")
	if verified {
		name = cmp.Or(identity, open.Key.Upstream)
		if open.Key.Class != "" {
			name += " (" + open.Key.Class + ")"
		}
	}
	detail := "The circuit breaker of " + name + " is open"
	switch {
	case open.View != nil: // for this caller it is open, and for others it is not
		detail = "The circuit breaker of " + name + " refuses this caller, and no other, as its tokens ask for a stricter limit"
	case open.State == breaker.HalfOpen:
		detail = "The circuit breaker of " + name + " is half-open, and lets one call through at a time"
	}
	if open.View != nil && verified {
		detail += fmt.Sprintf(": more than %.4g%% of the calls in %v have failed", open.View.Threshold()*100, open.View.Window())
	}
	switch {
	case !verified:
	case open.Mode == breaker.ForcedOpen:
		detail += ", as its operator says"
	case open.Cause != "":
		detail += ": " + open.Cause
	}
	p := problem.New(problem.CircuitOpen, detail+".")
	p.Reason = open.State.String()
	if open.View != nil {
		p.Reason = "workflow_threshold"
	}
	p.RetryAfter, p.Cause = open.RetryAfter(), open
	return p
}
