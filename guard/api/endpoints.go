package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// Endpoints answers the gateway's own paths of one guarded route, or of a site without a
// guarded route. If a function is nil, its paths are not handled here.
type Endpoints struct {
	// Name is the name of the route's guard.
	Name string
	// Policy returns the route's published policy, with URLs below mount. It is nil for a
	// site without a guarded route, which has no executions either.
	Policy func(mount string) any
	// Health returns the gateway's state in a word, and whether it accepts guarded calls.
	Health func() (state string, ready bool)
	// Keys returns the JWK set of the gateway's tokens; nil if the gateway has no identity.
	// Keys itself logs errors that are not a *Problem.
	Keys func() ([]byte, error)
	// Open opens the gateway for one request. It is nil for a site without a gateway, which
	// has only the pages of the problems.
	Open func() (*Gateway, error)

	// Mount returns the prefix that the caller's path has before that of the gateway.
	Mount func(r *http.Request) string
	// Challenge is the WWW-Authenticate value of a 401.
	Challenge string
	// Refused counts a problem, and logs message with the problem's cause if it has one.
	Refused func(p *problem.Problem, message string)
	// Write sends a problem in the format that the caller understands.
	Write func(w http.ResponseWriter, r *http.Request, p *problem.Problem)
}

// Gateway is a gateway that was opened for one request.
type Gateway struct {
	// Close releases it.
	Close func()
	// Reader identifies who asks. Tokens in a POST are content and do not identify the
	// caller.
	Reader func(r *http.Request) (router.Reader, error)
	// Executions are the recorded executions.
	Executions *execution.Guard
	// Ledger and Rollbacks are nil if the gateway has no identity.
	Ledger    *evidence.Ledger
	Rollbacks *rollback.Rollbacks
	// Escalations are the questions to people.
	Escalations *hitl.Endpoints
	// Circuits describes the circuit breakers that the caller may see.
	Circuits func(r *http.Request) (any, error)
	// Cascades are the failures that spread.
	Cascades *Cascades
	// Waits ends all waiting when the gateway shuts down.
	Waits context.Context

	asked evidence.Asked // of the request, if the Ledger answers it
}

// Owns reports whether a path may be one of the gateway's own. It is cheap, because every
// call goes through it.
func Owns(path string) bool {
	return strings.HasPrefix(path, "/.well-known/") || strings.HasPrefix(path, "/aerr/")
}

// Serve answers a request for one of the gateway's own paths. For other paths it does
// nothing and returns false.
func (e *Endpoints) Serve(w http.ResponseWriter, r *http.Request) bool {
	to, ok := parseRoute(r.URL)
	if !ok || !e.has(to.endpoint) {
		if e.Policy == nil || !strings.HasPrefix(r.URL.Path, router.WellKnown) {
			return false
		}
		// The prefix is the gateway's own: never forward such a request to the upstream.
		http.Error(w, "The gateway answers nothing at this path.", http.StatusNotFound)
		return true
	}
	if to.endpoint == endpointLedger || to.allowed(w, r) { // the ledger identifies the reader before it checks the method
		e.answer(w, r, to)
	}
	return true
}

func (e *Endpoints) has(at endpoint) bool {
	switch at {
	case endpointProblems, endpointPlanSchema:
		return true
	case endpointPolicy, endpointExecutions:
		return e.Policy != nil
	}
	return e.Open != nil
}

func (e *Endpoints) answer(w http.ResponseWriter, r *http.Request, to route) {
	a := router.Responder{W: w, R: r, Name: to.name}
	switch to.endpoint {
	case endpointProblems:
		slug, _ := url.PathUnescape(to.name) // EscapedPath is correctly encoded
		servePage(w, r, slug)
	case endpointPlanSchema:
		router.Respond(a.W, http.StatusOK, "application/schema+json", "public, max-age=300", plan.Schema())
	case endpointPolicy:
		router.Respond(a.W, http.StatusOK, "application/json", "", indented(e.Policy(e.Mount(r))))
	case endpointHealth:
		state, ready := e.Health()
		status := http.StatusServiceUnavailable
		if ready {
			status = http.StatusOK
		}
		router.Respond(a.W, status, "application/json", "no-store", []byte(`{"status":"`+state+"\"}\n"))
	case endpointKeys:
		e.keys(a)
	default:
		if err := e.ask(a, to); err != nil && r.Context().Err() == nil {
			e.refuse(a, to, err)
		}
	}
}

// keys answers with the public keys that verify the gateway's tokens.
func (e *Endpoints) keys(a router.Responder) {
	set, err := e.Keys()
	var p *problem.Problem
	switch {
	case errors.As(err, &p):
		e.Write(a.W, a.R, p)
	case err != nil:
		http.Error(a.W, "The keys cannot be shown.", http.StatusInternalServerError)
	case set == nil:
		http.Error(a.W, "This gateway has no identity: it issues no tokens.", http.StatusNotFound)
	default:
		router.Respond(a.W, http.StatusOK, "application/jwk-set+json", "public, max-age=300", set)
	}
}

// ask answers the requests whose answer depends on the caller.
func (e *Endpoints) ask(a router.Responder, to route) error {
	if to.endpoint == endpointExecutions {
		return e.executions(a, to.name)
	}
	g, err := e.Open()
	if err != nil {
		return err
	}
	defer g.Close()
	switch {
	case to.endpoint == endpointCircuits:
		doc, err := g.Circuits(a.R)
		if err != nil {
			return err
		}
		router.Respond(a.W, http.StatusOK, "application/json", "no-store", indented(doc))
		return nil
	case to.endpoint == endpointCascades, to.endpoint == endpointCascade:
		return g.cascades(a, to)
	case to.endpoint == endpointEscalations:
		return to.serve(g, a)
	case to.endpoint == endpointRollback:
		if g.Rollbacks == nil {
			http.Error(a.W, "This gateway has no identity, and so no checkpoints that could be rolled back.", http.StatusNotFound)
			return nil
		}
		return to.serve(g, a)
	case g.Ledger == nil:
		http.Error(a.W, "This gateway has no identity, and so no ledger.", http.StatusNotFound)
		return nil
	}
	who, err := g.Reader(a.R)
	if err != nil {
		return err
	}
	if g.asked = (evidence.Asked{Ledger: g.Ledger, Who: who}); !to.allowed(a.W, a.R) {
		return nil
	}
	return to.serve(g, a)
}

func (e *Endpoints) refuse(a router.Responder, to route, err error) {
	p := problemOf(err, problem.New(problem.StoreUnavailable, "The gateway's store cannot be opened."))
	a.W.Header().Set(headerExecutionStatus, "refused")
	if p.Kind() == router.Unauthenticated {
		a.W.Header().Set("WWW-Authenticate", e.Challenge)
	}
	message := "request refused"
	if to.endpoint == endpointExecutions {
		message = "a question about an execution could not be answered"
	}
	e.Refused(p, message)
	e.Write(a.W, a.R, p)
}

// indented encodes a document as JSON. The gateway's documents always marshal.
func indented(doc any) []byte {
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		panic("api: " + err.Error())
	}
	return append(body, '\n')
}
