package caddymodule

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

func init() {
	caddy.RegisterModule(new(Endpoints))
}

const (
	wellKnown  = "/.well-known/cascade/"
	policyPath = wellKnown + "policy"
	jwksPath   = wellKnown + "jwks"
)

// serveEndpoint answers the well-known paths of a guard. It reports false for
// everything else.
func (h *Handler) serveEndpoint(w http.ResponseWriter, r *http.Request) bool {
	if !strings.HasPrefix(r.URL.Path, wellKnown) {
		return h.serveCircuits(w, r) || h.serveRollback(w, r) // under the older drafts' names
	}
	if r.URL.Path == policyPath {
		servePolicy(w, r, h)
		return true
	}
	if strings.HasPrefix(r.URL.EscapedPath(), executionsPath) {
		h.serveExecutions(w, r)
		return true
	}
	if !h.serveCommon(w, r) {
		// Everything below is the gateway's: what it does not answer is no call to guard.
		http.Error(w, "The gateway answers nothing at this path.", http.StatusNotFound)
	}
	return true
}

// serveCommon answers the well-known paths that do not belong to one guarded route.
func (h *Handler) serveCommon(w http.ResponseWriter, r *http.Request) bool {
	if h.app != nil && r.URL.Path == jwksPath {
		h.app.serveKeys(w, r)
		return true
	}
	if h.serveLedger(w, r) || h.serveCircuits(w, r) || h.serveRollback(w, r) {
		return true
	}
	slug, ok := strings.CutPrefix(r.URL.Path, problem.BasePath)
	if !ok {
		return false
	}
	if allowRead(w, r) {
		problem.ServePage(w, r, slug)
	}
	return true
}

func allowRead(w http.ResponseWriter, r *http.Request) bool {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return true
	}
	w.Header().Set("Allow", "GET, HEAD")
	w.WriteHeader(http.StatusMethodNotAllowed)
	return false
}

// Endpoints answers the well-known paths that do not belong to one guarded route, on a
// site of their own: below /.well-known/cascade/ the pages of `problems`, and where an
// `identity` is configured `jwks`, `ledger`, `workflows`, `errors` and `rollback`. Who asks is found
// out as by an `agent_guard` without options. The paths of a route are answered by its
// `agent_guard` handler.
type Endpoints struct {
	// h is a guard without a route.
	h *Handler
}

// CaddyModule returns the Caddy module information.
func (*Endpoints) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.agent_guard_endpoints", New: func() caddy.Module { return new(Endpoints) }}
}

// Provision finds the app, if there is one.
func (e *Endpoints) Provision(ctx caddy.Context) error {
	e.h = &Handler{logger: ctx.Logger(), Name: "endpoints"}
	e.h.setDefaults()
	e.h.credentials = canonical(e.h.Credentials)
	app, err := ctx.AppIfConfigured("agent_guard")
	if errors.Is(err, caddy.ErrNotConfigured) {
		return nil
	}
	if err != nil {
		return err
	}
	e.h.app = app.(*App)
	return e.h.provisionActions(ctx)
}

// ServeHTTP answers what is ours and hands on what is not.
func (e *Endpoints) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if !isOwn(r) && e.h.serveCommon(w, r) {
		return nil
	}
	return next.ServeHTTP(w, r)
}

// parseEndpoints reads
//
//	agent_guard_endpoints [<matcher>]
func parseEndpoints(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // the directive's name
	if h.NextArg() {
		return nil, h.ArgErr()
	}
	if h.NextBlock(0) {
		return nil, h.Errf("agent_guard_endpoints has no option %q", h.Val())
	}
	return new(Endpoints), nil
}

// policyDocument is the published idempotency policy of a guard. Its members are
// an API. Durations are in seconds, sizes in bytes.
type policyDocument struct {
	Guard        string          `json:"guard"`
	ExecutionID  policyID        `json:"execution_id"`
	Methods      string          `json:"guarded_methods"`
	Fingerprint  policyCompared  `json:"fingerprint"`
	MaxBody      int64           `json:"max_body_bytes"`
	AttachWait   float64         `json:"attach_wait_s"`
	FailOpen     bool            `json:"fail_open,omitempty"`
	Actions      []policyAction  `json:"actions"`
	Problems     []policyProblem `json:"problems"`
	Headers      policyHeaders   `json:"headers"`
	Executions   policyAsked     `json:"executions"`
	Tokens       *policyTokens   `json:"tokens,omitempty"`
	Quota        *policyQuota    `json:"quota,omitempty"`
	Rollback     *policyRollback `json:"rollback,omitempty"`
	Breaker      *policyBreaker  `json:"breaker,omitempty"`
	Guarantee    string          `json:"guarantee"`
	DocumentedBy string          `json:"describedby"`
}

type policyID struct {
	Sources []IDSource `json:"sources"`
	// Token says that the id of a verified token counts where no source has one.
	Token   bool    `json:"token_id,omitempty"`
	Format  string  `json:"format"`
	Missing string  `json:"missing"`
	Window  float64 `json:"derive_window_s,omitempty"`
}

type policyCompared struct {
	Covers   string   `json:"covers"`
	Excluded []string `json:"excluded_json_pointers,omitempty"`
}

type policyAction struct {
	Name         string        `json:"name"`
	RetainResult float64       `json:"retain_result_s"`
	RetainKey    float64       `json:"retain_key_s"`
	MaxResult    int64         `json:"max_result_bytes"`
	Deadline     float64       `json:"deadline_s"`
	Preset       guard.Preset  `json:"preset"`
	Outcomes     []OutcomeRule `json:"outcomes,omitempty"`
	OnUnknown    string        `json:"on_unknown"`
	Settle       string        `json:"settle"`
	// Undo are the ways in which calls are undone, in the order in which they are tried;
	// CheckpointTTL is for how long. Both are missing without an identity.
	Undo          []string `json:"undo,omitempty"`
	CheckpointTTL float64  `json:"checkpoint_ttl_s,omitempty"`
}

type policyProblem struct {
	Type       string `json:"type"`
	Status     int    `json:"status"`
	Title      string `json:"title"`
	SafeNewKey bool   `json:"safe_new_key"`
}

type policyHeaders struct {
	ID       string `json:"execution_id"`
	Status   string `json:"execution_status"`
	Replayed string `json:"replayed"`
}

// policyAsked says how callers ask about their executions, as URI templates (RFC 6570).
type policyAsked struct {
	Status  string  `json:"status"`
	Output  string  `json:"output"`
	MaxWait float64 `json:"max_wait_s"`
}

// policyTokens says what becomes of Execution Context Tokens.
type policyTokens struct {
	Header   string   `json:"header"`
	Audience []string `json:"audience"`
	Required bool     `json:"required"`
	// Keys and Ledger are where the gateway's own keys and its ledger are, Workflow
	// where a workflow can be looked at, Errors where agents tell of theirs.
	Keys     string `json:"jwks"`
	Ledger   string `json:"ledger"`
	Workflow string `json:"workflow"`
	Errors   string `json:"errors"`
}

// policyQuota is what one caller may hold at a time; a member that is missing is no
// bound.
type policyQuota struct {
	Open  int   `json:"open_executions,omitempty"`
	Bytes int64 `json:"stored_bytes,omitempty"`
	// Checkpoints are bounds of a workflow's checkpoints and of a caller's, with an identity.
	Checkpoints *policyCheckpoints `json:"checkpoints,omitempty"`
}

type policyCheckpoints struct {
	Workflow      int   `json:"workflow,omitempty"`
	WorkflowBytes int64 `json:"workflow_bytes,omitempty"`
	WorkflowRate  int   `json:"workflow_per_minute,omitempty"`
	Caller        int   `json:"caller,omitempty"`
	CallerBytes   int64 `json:"caller_bytes,omitempty"`
}

func servePolicy(w http.ResponseWriter, r *http.Request, h *Handler) {
	if !allowRead(w, r) {
		return
	}
	seconds := func(d caddy.Duration) float64 { return time.Duration(d).Seconds() }
	doc := policyDocument{
		Guard: h.Name,
		ExecutionID: policyID{
			Sources: h.ExecutionID, Missing: h.MissingID,
			Format: "1 to 255 visible ASCII characters; a quoted string and the bare characters are the same id",
		},
		Methods: "all but GET, HEAD, OPTIONS, TRACE, CONNECT, QUERY, SEARCH, PROPFIND and REPORT, unless configured otherwise",
		Fingerprint: policyCompared{
			Covers:   "method, host, path, query and body; JSON bodies by value, multipart bodies by part, others by byte; of the header only the media type and Content-Encoding",
			Excluded: h.FingerprintExclude,
		},
		MaxBody:    h.MaxBody,
		AttachWait: seconds(h.AttachWait),
		FailOpen:   h.FailOpen,
		Headers:    policyHeaders{headerExecutionID, headerExecutionStatus, headerReplayed},
		Executions: policyAsked{
			Status:  executionsPath + "{id}{?wait,key,method,path}",
			Output:  executionsPath + "{id}/output{?wait,key,method,path}",
			MaxWait: longestWait.Seconds(),
		},
		Guarantee: "A call is sent to the upstream at most once while its key is retained, unless it is known not to have been executed " +
			"or the action's on_unknown or preset says otherwise. A call whose outcome is unknown stays in doubt, whatever its age.",
		DocumentedBy: problem.BasePath,
	}
	if i, t := h.app.Identity, h.app.Trust; t != nil {
		doc.ExecutionID.Token = true
		doc.Tokens = &policyTokens{
			Header: ect.FieldName, Audience: append([]string{i.Name}, t.Audience...), Required: h.RequireECT,
			Keys: jwksPath, Ledger: wellKnown + "ledger/head", Workflow: wellKnown + "workflows/{id}", Errors: wellKnown + "errors",
		}
	}
	if q := h.app.Quota; h.app.Identity != nil {
		t := q.ofCheckpoints(&h.Terms)
		doc.Quota = &policyQuota{q.OpenExecutions, q.StoredBytes, &policyCheckpoints{
			t.Workflow.Count, t.Workflow.Bytes, t.Rate, t.Caller.Count, t.Caller.Bytes,
		}}
	} else if q.ofCaller() != (guard.Quota{}) {
		doc.Quota = &policyQuota{Open: q.OpenExecutions, Bytes: q.StoredBytes}
	}
	doc.Breaker, doc.Rollback = h.breakerPolicy(), h.app.rollbackPolicy()
	if h.MissingID == missingDerive {
		doc.ExecutionID.Window = seconds(h.DeriveWindow)
	}
	if h.FailOpen {
		doc.Guarantee += " While the gateway's records are unavailable, calls are forwarded unguarded, marked Execution-Status: unguarded; the guarantee does not hold for them."
	}
	for _, a := range h.actions {
		doc.Actions = append(doc.Actions, policyAction{
			Name: a.Name, RetainResult: seconds(a.RetainResult), RetainKey: seconds(a.RetainKey), MaxResult: a.MaxResult,
			Deadline: seconds(a.Deadline), Preset: a.Preset, Outcomes: a.Outcomes, OnUnknown: a.OnUnknown, Settle: a.Settle,
		})
		if h.app.Identity != nil {
			published := &doc.Actions[len(doc.Actions)-1]
			published.Undo, published.CheckpointTTL = a.undo.Words(), a.TTL().Seconds()
		}
	}
	for _, k := range problem.Kinds() {
		doc.Problems = append(doc.Problems, policyProblem{problem.BasePath + k.Slug, k.Status, k.Title, k.SafeNewKey})
	}
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(doc) // only the client's leaving can fail here
}

var (
	_ caddy.Provisioner           = (*Endpoints)(nil)
	_ caddyhttp.MiddlewareHandler = (*Endpoints)(nil)
)
