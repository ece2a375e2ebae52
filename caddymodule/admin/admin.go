// Package admin is the API for operators on Caddy's admin endpoint, below /agent_guard/:
// executions and the resolution of those in doubt, the state of the stores, keys, the
// ledger, circuit breakers, rollbacks and escalations. Caddy's endpoint decides who may use
// it: by its address, its origins, and its access rules for remote administration.
//
// No answer contains a body, an answer or a credential of a call.
package admin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Prefix is the path below which all routes are.
const Prefix = "/agent_guard/"

// Mark is a header field of every answer: it shows clients that an agent guard answered,
// and not another server at that address.
const Mark = "Agent-Guard-Admin"

// Stores gives access to the stores that are open in this process.
type Stores interface {
	// Paths lists the paths of the open stores.
	Paths() []string
	// View keeps the store at path open until Release is called. It returns false if the
	// store is not open.
	View(path string) (Store, bool)
	// Unopened returns the path of the running configuration's store, and why it is not open although it is to be; nil
	// otherwise.
	Unopened() (path string, why error)
}

// Store is an open store with the guard over it.
type Store interface {
	// Path identifies the store.
	Path() string
	// Executions are the store's recorded executions.
	Executions() *execution.Guard
	// Now returns the time of the store's clock, for ages and expiries.
	Now(ctx context.Context) (time.Time, error)
	// Report returns the state of the store; nil if the store does not report it.
	Report() *Report
	// Nodes returns the gateways that have the store open, by name.
	Nodes(ctx context.Context) ([]Node, error)
	// Quota returns the limits of one caller; nil without limits.
	Quota() *Quota
	// Evidence returns the evidence of a decision for its commit; nil if none is recorded.
	Evidence(ctx context.Context, key execution.Key, found *execution.Record, decision execution.Resolution) *store.Batch
	// Resolved logs a decision and emits its event.
	Resolved(key execution.Key, found *execution.Record, decision execution.Resolution)
	// Keys returns the state of the key ring.
	Keys(ctx context.Context) (*gateway.KeyStatus, error)
	// Ledger returns the store's ledger; nil if there is none.
	Ledger() *Ledger
	// RotateKeys makes a new sealing key and returns its id; 0 while an earlier one waits for other gateways. If
	// the ring is given as a value, it returns the text of a ring with another key instead, and changes nothing.
	RotateKeys(ctx context.Context) (made uint32, ring string, err error)
	// Identity returns the gateway's identity in tokens, with its keys; nil if the latest
	// configuration has none.
	Identity() *Identity
	// RotateIdentity makes a new signing key. With stolen, no earlier key is published any
	// more. The error is a caddy.APIError if the key file does not allow it.
	RotateIdentity(stolen bool) error
	// Circuits returns the circuit breakers of this process, sorted by upstream, and with fleet behind
	// them those of the other nodes that use the store; never nil without an error.
	Circuits(ctx context.Context, fleet bool) ([]proxy.Circuit, error)
	// Cascades returns the cascades that are kept, the newest first, and Cascade one with its whole blast
	// radius, nil if there is none.
	Cascades() []api.Cascade
	Cascade(id string) *api.Cascade // see Cascades
	// Workflows answers with what is recorded of workflows; nil if nothing is.
	Workflows() *evidence.Ledger
	// SetCircuitMode sets and stores the mode that an operator chose for a breaker. It
	// returns false if there is no such breaker.
	SetCircuitMode(ctx context.Context, key breaker.Key, mode breaker.Mode) (bool, error)
	// Rollbacks returns the rollbacks of the store; nil if rollbacks are not possible.
	Rollbacks() Rollbacks
	// Trial returns the failed attempts to undo a checkpoint that is not undone yet; false
	// if there are none.
	Trial(checkpoint string) (Trial, bool)
	// Checkpoints returns the store of checkpoints; nil if none are made.
	Checkpoints() *checkpoint.Store
	// Escalations returns the store of escalations.
	Escalations() *hitl.Store
	// Plans returns the store of workflows' plans.
	Plans() *plan.Store
	// PutPlan takes the text of a plan of a workflow.
	PutPlan(ctx context.Context, text []byte, p plan.Putting) (evidence.PlanDocument, error)
	// Release ends the use of the store.
	Release()
}

// endpoints serve the routes.
type endpoints struct {
	stores Stores
}

// New makes the admin API over stores.
func New(stores Stores) caddy.AdminHandler { return &endpoints{stores} }

// routes are the paths below Prefix.
var routes = []router.Route[handler]{
	{Path: "executions", Method: http.MethodGet, To: listExecutions},
	{Path: "executions/{key}", Method: http.MethodGet, To: plain(showExecution)},
	{Path: "executions/{key}/resolve", Method: http.MethodPost, To: plain(resolveExecution)},
	{Path: "store", Method: http.MethodGet, To: plain(showStore)},
	{Path: "nodes", Method: http.MethodGet, To: plain(listNodes)},
	{Path: "keys", Method: http.MethodGet, To: plain(func(q *request) (any, error) { return q.Keys(q.Context()) })},
	{Path: "keys/rotate", Method: http.MethodPost, To: plain(rotateKeys)},
	{Path: "identity", Method: http.MethodGet, To: plain(showIdentity)},
	{Path: "identity/rotate", Method: http.MethodPost, To: plain(rotateIdentity)},
	{Path: "circuits", Method: http.MethodGet, To: listCircuits},
	{Path: "circuits/mode", Method: http.MethodPost, To: posted(`{"upstream": "host:port", "mode": "forced_open"}`, maxCircuitMode, setCircuitMode)},
	{Path: "cascades", Method: http.MethodGet, To: plain(func(q *request) (any, error) {
		return api.CascadeList{Cascades: append([]api.Cascade{}, q.Cascades()...)}, nil
	})},
	{Path: "cascades/{id}", Method: http.MethodGet, To: plain(showCascade)},
	{Path: "workflows/{id}", Method: http.MethodGet, To: plain(showWorkflow)},
	{Path: "rollback", Method: http.MethodPost, To: coordinated(posted(
		`{"checkpoint_id": "...", "operator": "...", "reason": "..."}`, maxRollback, startRollback))},
	{Path: "rollback/{id}", Method: http.MethodGet, To: coordinated(showRollback)},
	{Path: "rollbacks", Method: http.MethodGet, To: coordinated(listRollbacks)},
	{Path: "escalations", Method: http.MethodGet, To: listEscalations},
	{Path: "escalations/{id}", Method: http.MethodGet, To: plain(showEscalation)},
	{Path: "escalations/{id}/decision", Method: http.MethodPost, To: posted(
		`{"decision": "...", "operator": "...", "reason": "..."}`, maxRollback, decideEscalation)},
	{Path: "escalations/{id}/ask", Method: http.MethodPost, To: posted(`{"operator": "..."}`, maxRollback, askEscalation)},
	{Path: "plans", Method: http.MethodGet, To: plain(listPlans)},
	{Path: "plans/{id}", Method: http.MethodPost, To: posted(
		`{"operator": "...", "replaces": "...", "plan": {...}}`, plan.MaxSize+maxRollback, putPlan)},
	{Path: "ledger/head", Method: http.MethodGet, To: ledgerHead},
	{Path: "ledger/export", Method: http.MethodGet, To: ledgerExport},
	{Path: "ledger/verify", Method: http.MethodGet, To: ledgerVerify},
}

// ServeHTTP implements caddy.AdminHandler. It writes refusals of requests itself, as Caddy does:
// Caddy logs a returned error as one of the server.
func (a *endpoints) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	err := a.serve(w, r)
	var refused caddy.APIError
	if !errors.As(err, &refused) || refused.HTTPStatus < 400 || refused.HTTPStatus > 499 {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(refused.HTTPStatus)
	refused.Message = cmp.Or(refused.Message, fmt.Sprint(refused.Err))
	return json.NewEncoder(w).Encode(refused)
}

func (a *endpoints) serve(w http.ResponseWriter, r *http.Request) error {
	path := strings.TrimPrefix(r.URL.EscapedPath(), Prefix)
	if to, name := router.Match(routes, path); to != nil {
		return a.on(w, r, to, name)
	}
	if plain, err := url.PathUnescape(path); err == nil {
		path = plain
	}
	paths := make([]string, len(routes))
	for i := range routes {
		paths[i] = routes[i].Path
	}
	last := len(paths) - 1
	return refuse(http.StatusNotFound, "%s has no %s; there are %s and %s", Prefix, path, strings.Join(paths[:last], ", "), paths[last])
}

// request is a request about a store, with its parameters.
type request struct {
	*http.Request
	Store
	params
}

// handler answers a request with a value to be encoded as JSON, or an answer that writes itself.
// It reads the query by params, so that unknown parameters are refused.
type handler func(q *request) (any, error)

// shown is an answer that writes itself, in a form that the request accepts. With an error it has written nothing.
type shown func(w http.ResponseWriter) error

// plain makes a handler of a function that takes no parameters.
func plain(serve handler) handler {
	return func(q *request) (any, error) {
		if err := q.done(); err != nil {
			return nil, err
		}
		return serve(q)
	}
}

// posted makes a handler of a function that takes a JSON body of at most limit bytes, and no parameters; like is what
// a refusal says of the form.
func posted[T any](like string, limit int64, serve func(q *request, body *T) (any, error)) handler {
	return plain(func(q *request) (any, error) {
		body := new(T)
		if err := decode(q.Body, limit, body); err != nil {
			return nil, refuse(http.StatusBadRequest, "the request is no %s: %v", like, err)
		}
		return serve(q, body)
	})
}

// on calls the handler of a route with the requested store, and writes its result. name is
// that in the path, percent-encoded.
func (a *endpoints) on(w http.ResponseWriter, r *http.Request, to *router.Route[handler], name string) error {
	if !to.Allows(r.Method) {
		w.Header().Set("Allow", to.Method)
		return refuse(http.StatusMethodNotAllowed, "%s is not for %s; use %s", r.URL.Path, r.Method, to.Method)
	}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return refuse(http.StatusBadRequest, "query: %v", err)
	}
	if name, err = url.PathUnescape(name); err != nil {
		return refuse(http.StatusBadRequest, "path: %v", err)
	}
	q := &request{Request: r, params: params{name: name, query: query}}
	if q.Store, err = a.view(q.one("store")); err != nil {
		return err
	}
	defer q.Release()
	answer, err := to.To(q)
	if show, is := answer.(shown); is && err == nil {
		w.Header().Set(Mark, "1")
		if err = show(w); err == nil {
			return nil
		}
		w.Header().Del(Mark)
	}
	if err != nil {
		err = refusal(err, http.StatusInternalServerError, corePackages)
		if refused := (caddy.APIError{}); errors.As(err, &refused) && refused.HTTPStatus == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", "1")
		}
		return err
	}
	var body bytes.Buffer
	encoder := json.NewEncoder(&body)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(answer); err != nil {
		return err
	}
	w.Header().Set(Mark, "1")
	router.Respond(w, http.StatusOK, "application/json", "no-store", body.Bytes())
	return nil
}

// view returns the store at path, or the only one if path is empty.
func (a *endpoints) view(path string) (Store, error) {
	open := a.stores.Paths()
	slices.Sort(open)
	if of, why := a.stores.Unopened(); why != nil && (path == of || path == "" && len(open) == 0) {
		return nil, refuse(http.StatusServiceUnavailable, "the store %s is not open, and is tried again: %v", of, why)
	}
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
	if st, ok := a.stores.View(path); ok {
		return st, nil
	}
	if len(open) == 0 {
		open = []string{"none"}
	}
	return nil, refuse(http.StatusNotFound, "the store %s is not open; open: %s", path, strings.Join(open, ", "))
}

// decode decodes one JSON value of at most limit bytes strictly.
func decode(from io.Reader, limit int64, into any) error {
	return jsonx.Decode(io.LimitReader(from, limit), into)
}

func refuse(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// refusal converts err to the errors of Caddy's admin endpoint: a caddy.APIError, {"error":
// text}, not a problem document. The text is the error without the prefixes in packages;
// only operators read it (P8). The status is that of api.OperatorStatus, or otherwise for
// an unknown error.
func refusal(err error, otherwise int, packages []string) error {
	var refused caddy.APIError
	var known *problem.Problem
	switch {
	case errors.As(err, &refused):
		return refused
	case errors.As(err, &known):
		return refuse(known.Kind().Status, "%s", known.Detail)
	case errors.Is(err, execution.ErrTaken):
		return refuse(http.StatusConflict, "the execution has changed meanwhile; look at it again")
	}
	text := err.Error()
	for _, name := range packages {
		text = strings.TrimPrefix(text, name+": ")
	}
	return refuse(cmp.Or(api.OperatorStatus(err), otherwise), "%s", text)
}

var corePackages, rollbackPackages = []string{"guard", "ledger", "hitl", "plan"}, []string{"rollback", "plan", "checkpoint"}

// params is the query of a request. It keeps the first error until done.
type params struct {
	name  string // from the path, if the route has one
	query url.Values
	seen  []string
	err   error
}

func (p *params) fail(name string, err error) {
	if p.err == nil {
		p.err = refuse(http.StatusBadRequest, "%s: %v", name, err)
	}
}

// one returns the value of a parameter that may occur once.
func (p *params) one(name string) string {
	p.seen = append(p.seen, name)
	values := p.query[name]
	if len(values) > 1 {
		p.fail(name, fmt.Errorf("it stands %d times; once is enough", len(values)))
	}
	return p.query.Get(name)
}

// list returns the values of a parameter that may occur several times, or separated by
// commas.
func (p *params) list(name string) (all []string) {
	p.seen = append(p.seen, name)
	for _, value := range p.query[name] {
		for word := range strings.SplitSeq(value, ",") {
			if word != "" {
				all = append(all, word)
			}
		}
	}
	return all
}

// done returns the first error, also for a parameter that was never read: a misspelled
// filter must not be ignored.
func (p *params) done() error {
	if p.err != nil {
		return p.err
	}
	for name := range p.query {
		if !slices.Contains(p.seen, name) {
			slices.Sort(p.seen)
			return refuse(http.StatusBadRequest, "%q is no parameter here; there are %s", name, strings.Join(p.seen, ", "))
		}
	}
	return nil
}

// age parses a duration like 10m or 2d.
func (p *params) age(name string) time.Duration {
	text := p.one(name)
	if text == "" {
		return 0
	}
	d, err := caddy.ParseDuration(text)
	switch {
	case err != nil:
		p.fail(name, fmt.Errorf("%q is no duration; write one like 10m, 4h or 2d", text))
	case d < 0:
		p.fail(name, fmt.Errorf("%s is negative", text))
	}
	return d
}

func (p *params) time(name string) time.Time {
	text := p.one(name)
	if text == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		p.fail(name, fmt.Errorf("%q is no time; write one like 2026-11-20T14:00:00Z", text))
	}
	return t
}

func (p *params) states() (all []execution.State) {
	for _, word := range p.list("state") {
		state, err := execution.ParseState(word)
		if err != nil {
			p.fail("state", err)
		}
		all = append(all, state)
	}
	return all
}

// caller returns the first bytes of a caller's hash; nil matches any.
func (p *params) caller() []byte {
	text := p.one("caller")
	if text == "" {
		return nil
	}
	prefix, err := hex.DecodeString(text)
	if n := len(execution.CallerHash{}); err != nil || len(prefix) < 4 || len(prefix) > n {
		p.fail("caller", fmt.Errorf("%.64q is no caller's hash; give 8 to %d of its digits, an even number, as a listing shows them", text, 2*n))
		return nil
	}
	return prefix
}

// checkpoint returns the id of a checkpoint; empty matches any.
func (p *params) checkpoint() string {
	text := p.one("checkpoint")
	if text == "" {
		return ""
	}
	id, ok := checkpointID(text)
	if !ok {
		p.fail("checkpoint", fmt.Errorf("%q is no UUID; it stands in Execution-Checkpoint", text))
	}
	return id
}

// undos selects whether the executions of undos are left out, or all others.
func (p *params) undos(f *execution.Filter) {
	switch text := p.one("undos"); text {
	case "", "with":
	case "without":
		f.NotMethod = rollback.Method
	case "only":
		if f.Method == "" {
			f.Method = rollback.Method
		}
	default:
		p.fail("undos", fmt.Errorf("%q is none of with, without and only", text))
	}
}

// limit returns the size of a page.
func (p *params) limit() int {
	text := p.one("limit")
	if text == "" {
		return defaultPage
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > execution.MaxPage {
		p.fail("limit", fmt.Errorf("%q is not from 1 to %d", text, execution.MaxPage))
	}
	return n
}

// filter parses the filter of a list. Ages are counted back from now.
func (p *params) filter(now time.Time) execution.Filter {
	f := execution.Filter{
		States: p.states(), Guard: p.one("guard"), Action: p.one("action"), Method: p.one("method"),
		Caller: p.caller(), Workflow: p.one("workflow"), From: p.time("from"), To: p.time("to"),
		ID: p.one("id"), Checkpoint: p.checkpoint(),
	}
	p.undos(&f)
	if age := p.age("max_age"); age > 0 {
		if from := now.Add(-age); from.After(f.From) {
			f.From = from
		}
	}
	if age := p.age("min_age"); age > 0 {
		if to := now.Add(-age); f.To.IsZero() || to.Before(f.To) {
			f.To = to
		}
	}
	return f
}

// streamPatience is how long a reader may be idle: a stream keeps the store open and blocks
// the pruning of the ledger.
const streamPatience = 5 * time.Minute

// stream is an answer that is too large for memory: it is written as text. An error before the first byte is
// answered as usual. After it, the connection is aborted, so that nobody takes a part for the whole.
func stream(write func(to io.Writer) error) shown {
	return func(w http.ResponseWriter) error {
		to := streamWriter{to: w, control: http.NewResponseController(w)}
		err := write(&to)
		if err != nil && to.begun {
			panic(http.ErrAbortHandler)
		}
		if err == nil {
			_ = to.control.SetWriteDeadline(time.Time{}) // for the next answer on this connection
		}
		return err
	}
}

// streamWriter sends the header before the first byte, and extends the deadline before each
// write.
type streamWriter struct {
	to      http.ResponseWriter
	control *http.ResponseController
	begun   bool
}

func (s *streamWriter) Write(b []byte) (int, error) {
	if !s.begun {
		router.Respond(s.to, http.StatusOK, "text/plain; charset=utf-8", "no-store", nil)
		s.begun = true
	}
	_ = s.control.SetWriteDeadline(time.Now().Add(streamPatience)) // if the connection supports it
	return s.to.Write(b)
}
