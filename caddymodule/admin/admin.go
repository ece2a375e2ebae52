// Package admin is what operators ask of the guard over Caddy's admin endpoint, below
// /agent_guard/: executions, what is in doubt and how it is settled, the state of the
// stores, the keys, circuit breakers, rollbacks, and what waits for a person. Who may ask
// is decided by that endpoint: its address, its
// origins, and its access rules where it is remote.
//
// Nothing here gives out a body, an answer or a credential of a call.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Prefix is the path below which everything is.
const Prefix = "/agent_guard/"

// Mark is a header field of every answer, by which a client knows that it is an agent
// guard that has answered, and not whatever else listens at that address.
const Mark = "Agent-Guard-Admin"

// Stores are the stores that are open in this process.
type Stores interface {
	// Paths lists them.
	Paths() []string
	// Borrow keeps the store at path open until Release is called; false where it is
	// not open.
	Borrow(path string) (Store, bool)
}

// Store is an open store with the guard over it.
type Store interface {
	// Path names it.
	Path() string
	// Guard is the guard over it.
	Guard() *guard.Guard
	// Now is the clock by which ages and expiries are judged.
	Now(ctx context.Context) (time.Time, error)
	// Report is what the store tells of itself; nil where it cannot.
	Report() *Report
	// Quota is what one caller may hold; nil where nothing bounds it.
	Quota() *Quota
	// Testify returns the evidence of a decision, which lands in its commit, and who
	// must be told what came of that: it hands the error on.
	Testify(ctx context.Context, key guard.Key, found *guard.Record, decision guard.Resolution) (riders []store.Write, landed func(error) error)
	// Resolved tells the log, and who listens to events, of a decision.
	Resolved(key guard.Key, found *guard.Record, decision guard.Resolution)
	// Keys is the state of the key ring.
	Keys(ctx context.Context) (*KeyStatus, error)
	// Ledger is the log of what was decided; nil where the store has none.
	Ledger() *Ledger
	// RotateKeys makes a new sealing key. Where the gateway cannot do that by its
	// configuration, the error is a caddy.APIError.
	RotateKeys(ctx context.Context) error
	// Identity is who the gateway is in its tokens, with its keys; nil where the latest
	// configuration does not say.
	Identity() *Identity
	// RotateIdentity makes a new signing key. With stolen, none of those before it is
	// published any more. Where the key file does not allow it, the error is a
	// caddy.APIError.
	RotateIdentity(stolen bool) error
	// Circuits are the circuit breakers of this process, sorted by upstream; never nil.
	Circuits() []circuits.Circuit
	// SetCircuitMode sets what an operator wants of a breaker, and records it. It reports
	// false where there is no such breaker.
	SetCircuitMode(ctx context.Context, key breaker.Key, mode breaker.Mode) (bool, error)
	// Rollbacks are those over the store; nil where nothing can be rolled back.
	Rollbacks() Rollbacks
	// Trial is what is known of the undo of a checkpoint that has not succeeded yet; false
	// where nothing is.
	Trial(checkpoint string) (Trial, bool)
	// Vault is where checkpoints are; nil where none are made.
	Vault() *checkpoint.Vault
	// Desk is where escalations are recorded.
	Desk() *hitl.Desk
	// Release ends the borrowing.
	Release()
}

// API serves the routes.
type API struct {
	stores Stores
}

// New makes the API over stores.
func New(stores Stores) *API { return &API{stores: stores} }

// ServeHTTP implements caddy.AdminHandler.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	parts := strings.Split(strings.TrimPrefix(r.URL.EscapedPath(), Prefix), "/")
	for i, part := range parts { // an execution id may have a slash
		if plain, err := url.PathUnescape(part); err == nil {
			parts[i] = plain
		}
	}
	switch {
	case slices.Equal(parts, []string{"executions"}):
		return a.on(w, r, http.MethodGet, a.list)
	case len(parts) == 2 && parts[0] == "executions" && parts[1] != "":
		return a.on(w, r, http.MethodGet, a.show(parts[1]))
	case len(parts) == 3 && parts[0] == "executions" && parts[1] != "" && parts[2] == "resolve":
		return a.on(w, r, http.MethodPost, a.resolve(parts[1]))
	case slices.Equal(parts, []string{"store"}):
		return a.on(w, r, http.MethodGet, a.store)
	case slices.Equal(parts, []string{"keys"}):
		return a.on(w, r, http.MethodGet, a.keys)
	case slices.Equal(parts, []string{"keys", "rotate"}):
		return a.on(w, r, http.MethodPost, a.rotate)
	case slices.Equal(parts, []string{"identity"}):
		return a.on(w, r, http.MethodGet, a.identity)
	case slices.Equal(parts, []string{"identity", "rotate"}):
		return a.on(w, r, http.MethodPost, a.rotateIdentity)
	case slices.Equal(parts, []string{"circuits"}):
		return a.on(w, r, http.MethodGet, a.circuits)
	case slices.Equal(parts, []string{"circuits", "mode"}):
		return a.on(w, r, http.MethodPost, a.circuitMode)
	case slices.Equal(parts, []string{"rollback"}):
		return a.on(w, r, http.MethodPost, coordinated(a.rollback))
	case len(parts) == 2 && parts[0] == "rollback" && parts[1] != "":
		return a.on(w, r, http.MethodGet, a.showRollback(parts[1]))
	case slices.Equal(parts, []string{"rollbacks"}):
		return a.on(w, r, http.MethodGet, coordinated(a.listRollbacks))
	case slices.Equal(parts, []string{"escalations"}):
		return a.on(w, r, http.MethodGet, a.escalations)
	case slices.Equal(parts, []string{"ledger", "head"}):
		return a.on(w, r, http.MethodGet, a.ledgerHead)
	case slices.Equal(parts, []string{"ledger", "export"}):
		return a.on(w, r, http.MethodGet, a.ledgerExport)
	case slices.Equal(parts, []string{"ledger", "verify"}):
		return a.on(w, r, http.MethodGet, a.ledgerVerify)
	}
	return refuse(http.StatusNotFound,
		"%s has no %s; there are executions, executions/{key}, executions/{key}/resolve, store, keys, keys/rotate, "+
			"identity, identity/rotate, circuits, circuits/mode, rollback, rollback/{id}, rollbacks, escalations, ledger/head, ledger/export and ledger/verify",
		Prefix, strings.Join(parts, "/"))
}

// handler answers a request about a store, with what is to be encoded as JSON or with
// a stream. Its query is read from params, so that what nobody reads can be refused.
type handler func(r *http.Request, st Store, p *params) (any, error)

// on calls serve with the store that the request names, and writes what it returns.
func (a *API) on(w http.ResponseWriter, r *http.Request, method string, serve handler) error {
	if r.Method != method && (r.Method != http.MethodHead || method != http.MethodGet) {
		w.Header().Set("Allow", method)
		return refuse(http.StatusMethodNotAllowed, "%s is not for %s; use %s", r.URL.Path, r.Method, method)
	}
	p, err := newParams(r)
	if err != nil {
		return err
	}
	st, err := a.borrow(p.one("store"))
	if err != nil {
		return err
	}
	defer st.Release()
	answer, err := serve(r, st, p)
	if err != nil {
		return refusal(err)
	}
	if stream, ok := answer.(stream); ok {
		return stream.serve(w)
	}
	begin(w, "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(answer) // whoever asked has gone
	return nil
}

// begin sets the header of an answer.
func begin(w http.ResponseWriter, mediaType string) {
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set(Mark, "1")
}

// borrow returns the store at path, or the only one where path is empty.
func (a *API) borrow(path string) (Store, error) {
	open := a.stores.Paths()
	slices.Sort(open)
	if path == "" {
		switch len(open) {
		case 0:
			return nil, refuse(http.StatusNotFound, "no store is open: the running configuration has no agent_guard")
		case 1:
			path = open[0]
		default:
			return nil, refuse(http.StatusBadRequest, "several stores are open; name one with store: %s", strings.Join(open, ", "))
		}
	}
	if st, ok := a.stores.Borrow(path); ok {
		return st, nil
	}
	if len(open) == 0 {
		open = []string{"none"}
	}
	return nil, refuse(http.StatusNotFound, "the store %s is not open; open: %s", path, strings.Join(open, ", "))
}

func refuse(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// refusal is err with its status. The core's errors say what is wrong; the prefix
// that tells packages apart is of no use to an operator.
func refusal(err error) error {
	if api := (caddy.APIError{}); errors.As(err, &api) {
		return api
	}
	status := http.StatusInternalServerError
	switch {
	case errors.Is(err, guard.ErrUnknown):
		status = http.StatusNotFound
	case errors.Is(err, guard.ErrAmbiguous), errors.Is(err, guard.ErrKeyForm), errors.Is(err, guard.ErrCursor), errors.Is(err, hitl.ErrCursor),
		errors.Is(err, guard.ErrResolution), errors.Is(err, guard.ErrAnswerTooLarge):
		status = http.StatusBadRequest
	case errors.Is(err, guard.ErrNotInDoubt):
		status = http.StatusConflict
	case errors.Is(err, guard.ErrTaken):
		return refuse(http.StatusConflict, "the execution has changed meanwhile; look at it again")
	case errors.Is(err, guard.ErrStore), errors.Is(err, hitl.ErrStore), errors.Is(err, store.ErrClosed), errors.Is(err, store.ErrUnhealthy):
		status = http.StatusServiceUnavailable
	}
	text := err.Error()
	for _, prefix := range []string{"guard: ", "ledger: ", "hitl: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	return refuse(status, "%s", text)
}

var _ caddy.AdminHandler = (*API)(nil)
