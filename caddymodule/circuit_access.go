package caddymodule

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
)

// circuitsFor says which breakers a caller may see. The state of upstreams tells how the
// house is built (cascade 6.2, ATD "Circuit Breaker State Leakage"): operators see all,
// callers those behind the guard that they ask, which its refusals tell them of too
// (circuitOpen), and who takes part in a workflow what was told to it. A credential that nobody
// here has verified is no identity.
func (h *Handler) circuitsFor(e *engine, way *testimony, r *http.Request, who graph.Reader, caller string) (func(*circuits.Circuit) bool, error) {
	if !verifiedHere(caller) {
		return nil, problem.New(problem.AuthenticationRequired,
			"Ask as somebody whom this gateway knows: with a token, a certificate, or a name of its own authentication.")
	}
	if name, ok := strings.CutPrefix(caller, "explicit:"); ok {
		caller = "caller:" + name
	}
	operator := slices.Contains(h.Operators, caller)
	if wid := r.URL.Query().Get("wid"); wid != "" {
		return circuitsOf(e, way, r, who, wid, operator)
	}
	if operator {
		return func(*circuits.Circuit) bool { return true }, nil
	}
	proxy := h.proxy.Load()
	return func(c *circuits.Circuit) bool { return proxy != nil && proxy.LeadsTo(c.Upstream) }, nil
}

// circuitsOf are the breakers that have failed a workflow, as it was told.
func circuitsOf(e *engine, way *testimony, r *http.Request, who graph.Reader, wid string, all bool) (func(*circuits.Circuit) bool, error) {
	unknown := problem.New(problem.WorkflowUnknown, "Nothing of it is known for the identity that asks.")
	if way == nil {
		return nil, unknown
	}
	names, found, err := way.graph(e).Downstreams(r.Context(), wid, who, all)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, unknown
	}
	return func(c *circuits.Circuit) bool { return names[c.Downstream] }, nil
}

// operatorKinds are the kinds of callers that can be operators.
var operatorKinds = []string{"issuer:", "certificate:", "user:", "caller:"}

// checkOperators checks names of callers.
func checkOperators(names []string) error {
	for _, name := range names {
		if !slices.ContainsFunc(operatorKinds, func(kind string) bool { return strings.HasPrefix(name, kind) && len(name) > len(kind) }) {
			return fmt.Errorf("%q is no caller: it must begin with one of %s, and go on with a name", name, strings.Join(operatorKinds, ", "))
		}
	}
	return nil
}
