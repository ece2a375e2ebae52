// Package api is the list of the gateway's own paths. Most are answered by the features that they belong to; here are
// those of executions, circuits, cascades, and of the kinds of problems.
//
// Heads and proofs have no content: every caller that the gateway can identify may read
// them. Entries, workflows, checkpoints and rollbacks are for those who took part (ADR
// 0023, 0024). Everybody else gets the same answer for what is unknown and what belongs to
// others (P3).
package api

import (
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// endpoint says which resource a path names.
type endpoint uint8

const (
	endpointLedger endpoint = iota + 1
	endpointRollback
	endpointPolicy
	endpointKeys
	endpointHealth
	endpointCircuits
	endpointExecutions
	endpointProblems
	endpointPlanSchema
	endpointCascades
	endpointCascade
	endpointEscalations
)

// resource is what a path of the gateway's own names. serve answers at it, and fits reports whether a token that names
// its phase may be presented there; they are nil where this package does that.
type resource struct {
	endpoint endpoint
	serve    func(g *Gateway, a router.Responder) error
	fits     func(name, phase string, ext ect.Ext) bool
}

var circuits = resource{endpoint: endpointCircuits, fits: router.PhaseIs(evidence.PhaseRead)}

// routes are the paths of sites.
var routes = slices.Concat([]router.Route[resource]{
	{Path: router.WellKnown + "policy", Method: http.MethodGet, To: resource{endpoint: endpointPolicy}},
	{Path: router.WellKnown + "jwks", Method: http.MethodGet, To: resource{endpoint: endpointKeys}},
	{Path: router.WellKnown + "health", Method: http.MethodGet, To: resource{endpoint: endpointHealth}},
	{Path: evidence.PlanSchemaPath, Method: http.MethodGet, To: resource{endpoint: endpointPlanSchema}},
	{Path: problem.BasePath + "{slug...}", Method: http.MethodGet, To: resource{endpoint: endpointProblems}},
	{Path: problem.ExecutionsPath + "{id...}", Method: http.MethodGet, To: resource{endpoint: endpointExecutions}},

	{Path: router.WellKnown + "circuits", Method: http.MethodGet, To: circuits},
	{Path: "/.well-known/aerr/circuits", Method: http.MethodGet, To: circuits},
	{Path: "/aerr/circuits", Method: http.MethodGet, To: circuits},

	{Path: evidence.CascadesPath, Method: http.MethodGet, To: resource{endpoint: endpointCascades}},
	{Path: evidence.CascadesPath + "/{id}", Method: http.MethodGet, To: resource{endpoint: endpointCascade}},
},
	of(endpointLedger, func(g *Gateway) evidence.Asked { return g.asked }, evidence.Routes),
	of(endpointRollback, func(g *Gateway) *rollback.Rollbacks { return g.Rollbacks }, rollback.Routes),
	of(endpointEscalations, func(g *Gateway) *hitl.Endpoints { return g.Escalations }, hitl.Routes),
)

// of are the rows of a feature, which answers with what it has of a gateway.
func of[F any](at endpoint, has func(*Gateway) F, routes []router.Route[router.Endpoint[F]]) (rows []router.Route[resource]) {
	for _, row := range routes {
		serve := func(g *Gateway, a router.Responder) error { return row.To.Serve(has(g), a) }
		rows = append(rows, router.Route[resource]{Path: row.Path, Method: row.Method, To: resource{at, serve, row.To.Fits}})
	}
	return rows
}

// route is a parsed path.
type route struct {
	row *router.Route[resource]
	resource
	name string // the variable part of the path, still percent-encoded
}

// parseRoute parses the path of a request.
func parseRoute(u *url.URL) (to route, ok bool) {
	if !Owns(u.Path) {
		return route{}, false // a call to guard
	}
	found, name := router.Match(routes, u.EscapedPath())
	if found == nil {
		return route{}, false
	}
	return route{found, found.To, name}, true
}

// allowed reports whether the path accepts the request's method; if not, it answers.
func (t route) allowed(w http.ResponseWriter, r *http.Request) bool {
	if t.row.Allows(r.Method) {
		return true
	}
	allow := t.row.Method
	if rest, gets := strings.CutPrefix(allow, http.MethodGet); gets {
		allow = http.MethodGet + ", " + http.MethodHead + rest
	}
	w.Header().Set("Allow", allow)
	w.WriteHeader(http.StatusMethodNotAllowed)
	return false
}

// HandlesRollback reports whether Rollbacks answer the request's path.
func HandlesRollback(r *http.Request) bool {
	to, ok := parseRoute(r.URL)
	return ok && to.endpoint == endpointRollback
}

// FitsPhase reports whether a token may be presented with a request that names its phase: what it was
// made for is that endpoint, and that checkpoint.
func FitsPhase(r *http.Request, phase string, ext ect.Ext) bool {
	to, ok := parseRoute(r.URL)
	return ok && to.fits != nil && to.fits(to.name, phase, ext)
}

// problemOf maps an error to a problem; otherwise is the problem for unknown errors.
func problemOf(err error, otherwise *problem.Problem) *problem.Problem {
	return router.ProblemOf(err, otherwise, plan.ProblemOf, rollback.ProblemOf)
}

// OperatorStatus maps an error to an HTTP status for operators. Unlike callers (P3), they
// may learn that nothing is recorded under a name. It is 0 for unknown errors.
func OperatorStatus(err error) int {
	if status := hitl.OperatorStatus(err); status != 0 {
		return status
	}
	is := func(known ...error) bool {
		return slices.ContainsFunc(known, func(one error) bool { return errors.Is(err, one) })
	}
	switch {
	case is(execution.ErrUnknown, rollback.ErrUnknown):
		return http.StatusNotFound
	case is(execution.ErrAmbiguous, execution.ErrKeyForm, execution.ErrResolution, execution.ErrAnswerTooLarge,
		execution.ErrCursor, rollback.ErrCursor):
		return http.StatusBadRequest
	case errors.As(err, new(*execution.QuotaError)), is(execution.ErrNotInDoubt, execution.ErrTaken):
		return http.StatusConflict
	case is(execution.ErrStore, plan.ErrStore, store.ErrClosed, store.ErrUnhealthy):
		return http.StatusServiceUnavailable
	}
	return problemOf(err, new(problem.Problem)).Kind().Status
}
