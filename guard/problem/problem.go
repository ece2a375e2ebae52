// Package problem has the errors that the gateway itself answers with, and writes them as
// RFC 9457 documents and as answers of gRPC. The kinds of problems that a guarded call can meet
// are here, those of the gateway's own paths in guard/api.
package problem

import (
	"cmp"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Paths that problems name. BasePath + slug is the type URI of a problem, and the path of the page that
// explains it. Callers ask for their executions at ExecutionsPath + id, and for the answer at the same path
// with /output (ADR 0018).
const (
	BasePath       = "/.well-known/cascade/problems/"
	ExecutionsPath = "/.well-known/cascade/executions/"
)

// ExecutionPath returns the path of a caller's executions with an id. It quotes ids that
// would be parsed as something else.
func ExecutionPath(id string) string {
	if id == "." || id == ".." || strings.HasPrefix(id, `"`) {
		id = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(id) + `"`
	}
	return ExecutionsPath + url.PathEscape(id)
}

// Problem is an error that the gateway itself answers with, as an RFC 9457 document. It is
// an error value. The members with names are an API.
//
// Some SDKs take an error answer without a member `error` for a success, some give up if
// that member has Stripe's format, and some retry every 409 unless a header forbids it.
// docs/clients.md describes the observed behaviour of each.
type Problem struct {
	kind Kind
	// Status is the HTTP status; zero for that of the kind.
	Status int `json:"status"`
	// Detail describes this occurrence. It never contains a secret or a body.
	Detail string `json:"detail,omitempty"`
	// Reason is a short stable code that refines the kind; it may be empty.
	Reason string `json:"reason,omitempty"`
	// ErrorType is the type in AERR's registry; error.type has the type that SDKs know. Write sets it.
	ErrorType string `json:"error_type,omitempty"`
	// ExecutionID is the caller's id of the execution; empty if unknown.
	ExecutionID string `json:"execution_id,omitempty"`
	// State is the state of the recorded execution; empty if there is none.
	State string `json:"state,omitempty"`
	// SafeNewKey is that of the kind, unless the call is Doubtful. Write sets it.
	SafeNewKey bool `json:"safe_new_key"`
	// StatusURL is the path below Mount at which the caller can read the execution's state;
	// it may be empty.
	StatusURL string `json:"status_url,omitempty"`
	// ConflictingRollback is the id of the rollback that takes precedence (cascade 4.3.4).
	ConflictingRollback string `json:"conflicting_rollback_id,omitempty"`
	// PlanHash identifies the plan of a rollback as it is now: SHA-256 in hexadecimal.
	PlanHash string `json:"plan_hash,omitempty"`
	// Dependants are the ids of actions that prevent a rollback.
	Dependants []string `json:"dependants,omitempty"`
	// Dependencies are what the call has to wait for, some of them where there are many.
	Dependencies []Dependency `json:"dependencies,omitempty"`
	// ErrorECT is the id of the error token of the failure (circuits document). The token
	// itself is in Execution-Context. It may be empty.
	ErrorECT string `json:"error_ect,omitempty"`
	// Problems are what is wrong with a plan, by node: a slice of values with JSON of their own, or nil.
	// More is how many further ones there are.
	Problems any `json:"problems,omitempty"`
	More     int `json:"more,omitempty"` // see Problems
	// EscalationID is the id of the escalation that a person has to decide; it may be empty.
	EscalationID string `json:"escalation_id,omitempty"`

	// Mount is the prefix that the caller's paths have before the gateway's, such as /api
	// if a handler strips it; it may be empty.
	Mount string `json:"-"`
	// Doubtful says that the call was executed, or may have been, so that no new key is
	// safe, whatever the kind says.
	Doubtful bool `json:"-"`
	// RetryHelps says that a retry of the same call may succeed, although its kind says
	// otherwise.
	RetryHelps bool `json:"-"`
	// Final says that no retry of the same call helps, although its kind says otherwise.
	Final bool `json:"-"`
	// RetryAfter is when a retry may succeed, sent in whole seconds, at least 1; zero is
	// not sent.
	RetryAfter time.Duration `json:"-"`
	// Cause is logged and never sent to the caller.
	Cause error `json:"-"`
}

// Dependency is what a call has to wait for. Its members are an API.
type Dependency struct {
	// Node is the id of a node of the workflow's plan; empty where the caller's token names what it
	// depends on.
	Node string `json:"node,omitempty"`
	// Task is the id of the recorded token of what it depends on, Action its exec_act.
	Task   string `json:"jti,omitempty"`
	Action string `json:"exec_act,omitempty"` // see Task
	// State and Detail are those of the workflow's document.
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"` // see State
	// Final says that it will never be done.
	Final bool `json:"final"`
}

// New returns a problem of kind k.
func New(k Kind, detail string) *Problem {
	return &Problem{kind: k, Detail: detail, RetryAfter: k.RetryAfter}
}

// Because sets the cause of p, and returns p.
func (p *Problem) Because(err error) *Problem {
	p.Cause = err
	return p
}

// Kind returns the problem's kind.
func (p *Problem) Kind() Kind { return p.kind }

// Error returns the problem's slug and detail, with its cause.
func (p *Problem) Error() string {
	text := p.kind.Slug + ": " + p.Detail
	if p.Cause != nil {
		text += ": " + p.Cause.Error()
	}
	return text
}

// Known sets the state of the execution that is recorded under the caller's id. Unless it
// was undone, its effect has happened or may have.
func (p *Problem) Known(state string, undone bool) {
	p.State = cmp.Or(p.State, state)
	p.Doubtful = p.Doubtful || !undone
}

func (p *Problem) Unwrap() error { return p.Cause }

// document is the JSON of a problem. Its members are an API.
type document struct {
	Type  string `json:"type"`
	Title string `json:"title"`
	Problem
	Error sdkBody `json:"error"`
}

// sdkBody is the member that SDKs read. stripe-node takes an answer without it for a
// success, whatever its status.
type sdkBody struct {
	Type    string `json:"type"`
	Code    string `json:"code"`
	Message string `json:"message"`
	// Status is set if a retry may succeed. stripe-go gives up on every error that it can
	// decode, and it expects a number here: a string makes it retry.
	Status string `json:"status,omitempty"`
}

// Header fields that tell SDKs whether to retry: those of SDKs generated by Stainless
// (OpenAI, Anthropic) and those of Stripe.
const (
	headerShouldRetry       = "X-Should-Retry"
	headerStripeShouldRetry = "Stripe-Should-Retry"
)

// NoRetry tells SDKs that read such a header field not to retry, whatever the status.
func NoRetry(h http.Header) {
	h.Set(headerShouldRetry, "false")
	h.Set(headerStripeShouldRetry, "false")
}

func (p *Problem) retrySeconds() int64 {
	return max(1, int64((p.RetryAfter+time.Second-1)/time.Second))
}

func (p *Problem) retries() bool { return p.kind.RetryAfter > 0 && !p.Final || p.RetryHelps }

func (p *Problem) safeNewKey() bool { return p.kind.SafeNewKey && !p.Doubtful }

// Write sends the problem as the answer.
func (p *Problem) Write(w http.ResponseWriter) {
	k := p.kind
	doc := document{
		Type: p.Mount + BasePath + k.Slug, Title: k.Title, Problem: *p,
		Error: sdkBody{Type: k.errorType(), Code: strings.ReplaceAll(k.Slug, "-", "_"), Message: strings.TrimSpace(k.Title + ". " + p.Detail)},
	}
	doc.Status, doc.ErrorType, doc.SafeNewKey = cmp.Or(p.Status, k.Status), k.ErrorType, p.safeNewKey()
	if p.StatusURL != "" {
		doc.StatusURL = p.Mount + p.StatusURL
	}
	h := w.Header()
	if p.retries() {
		doc.Error.Status = strconv.Itoa(doc.Status)
		h.Set("Retry-After", strconv.FormatInt(p.retrySeconds(), 10))
		h.Set(headerStripeShouldRetry, "true") // by default stripe-node does not retry a 429
	} else {
		NoRetry(h)
	}
	body, err := json.Marshal(doc)
	if err != nil {
		panic("problem: " + err.Error()) // strings and numbers always marshal
	}
	body = append(body, '\n')
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Add("Link", "<"+p.Mount+`/.well-known/cascade/policy>; rel="describedby"`)
	if doc.StatusURL != "" {
		h.Add("Link", "<"+doc.StatusURL+`>; rel="status"`)
	}
	w.WriteHeader(doc.Status)
	_, _ = w.Write(body) // the client may be gone
}

// The gRPC status codes of problems.
const (
	grpcInvalidArgument    = 3
	grpcNotFound           = 5
	grpcAlreadyExists      = 6
	grpcPermissionDenied   = 7
	grpcResourceExhausted  = 8
	grpcFailedPrecondition = 9
	grpcAborted            = 10
	grpcUnimplemented      = 12
	grpcUnavailable        = 14
	grpcUnauthenticated    = 16
)

// Members of a problem as fields. Clients of gRPC read them in the trailer, and gateways in a row
// before the body comes.
const (
	headerProblem    = "Execution-Problem"
	headerState      = "Execution-State"
	headerSafeNewKey = "Execution-Safe-New-Key"
	headerPushback   = "Grpc-Retry-Pushback-Ms"
)

// Announce sets the fields that NothingSent reads.
func (p *Problem) Announce(h http.Header) {
	h.Set(headerProblem, p.kind.Slug)
	h.Set(headerSafeNewKey, strconv.FormatBool(p.safeNewKey()))
}

// NothingSent reports whether the header of an answer is that of a problem with which a guard holds the
// execution with this id up before it records or sends anything of it: nothing is known of an earlier
// attempt either, and the same call may run later. An agent may pass on what was said of a call of its
// own; then the id is another one.
func NothingSent(h http.Header, id string) bool {
	for _, named := range h["Execution-Id"] {
		if named != id {
			return false
		}
	}
	switch h.Get(headerProblem) {
	case WorkflowPaused.Slug, ApprovalRequired.Slug, DependencyNotDone.Slug:
		return h.Get(headerSafeNewKey) == "true"
	}
	return false
}

// grpcCodes are the gRPC status codes of HTTP statuses (ADR 0047).
var grpcCodes = map[int]int{
	http.StatusBadRequest: grpcInvalidArgument, http.StatusUnauthorized: grpcUnauthenticated,
	http.StatusForbidden: grpcPermissionDenied, http.StatusNotFound: grpcNotFound,
	http.StatusUnprocessableEntity:   grpcAlreadyExists, // the id exists, for another call
	http.StatusRequestEntityTooLarge: grpcResourceExhausted, http.StatusTooManyRequests: grpcResourceExhausted,
}

// grpcCode returns the gRPC status code. Only if a retry of the same call may succeed is it UNAVAILABLE, at which
// clients retry, or RESOURCE_EXHAUSTED.
func (k Kind) grpcCode() int {
	otherwise := grpcFailedPrecondition
	if k.RetryAfter > 0 {
		otherwise = grpcUnavailable
	}
	return cmp.Or(k.GRPC, grpcCodes[k.Status], otherwise)
}

// WriteGRPC sends the problem to a gRPC or gRPC-Web client as a trailers-only response.
// contentType is that of the request.
func (p *Problem) WriteGRPC(w http.ResponseWriter, contentType string) {
	k, h := p.kind, w.Header()
	contentType, _, _ = strings.Cut(contentType, ";")
	h.Set("Content-Type", strings.TrimSpace(contentType))
	h.Set("Cache-Control", "no-store")
	code := k.grpcCode()
	switch {
	case p.RetryHelps:
		code = grpcUnavailable
	case p.Final:
		code = grpcFailedPrecondition
	}
	h.Set("Grpc-Status", strconv.Itoa(code))
	h.Set("Grpc-Message", grpcMessage(strings.TrimSpace(k.Title+". "+p.Detail)))
	p.Announce(h)
	if p.State != "" {
		h.Set(headerState, p.State)
	}
	pushback := int64(-1) // a negative value forbids a retry, whatever the client's configuration
	if p.retries() {
		pushback = 1000 * p.retrySeconds()
	}
	h.Set(headerPushback, strconv.FormatInt(pushback, 10))
	w.WriteHeader(http.StatusOK)
}

// grpcMessage percent-encodes a text for grpc-message.
func grpcMessage(text string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(text) {
		if c := text[i]; c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		}
	}
	return b.String()
}

// Kind is a kind of problem. All kinds are variables of this package and of guard/api.
type Kind struct {
	// Slug identifies the kind; it is the last segment of the problem's type URI.
	Slug string
	// Status is the HTTP status.
	Status int
	// Title is a short summary, the same for every occurrence.
	Title string
	// SafeNewKey says that the call may be sent again under a new key without the risk that
	// its effect happens twice.
	SafeNewKey bool
	// ErrorType is the type in AERR's registry; it may be empty.
	ErrorType string
	// RetryAfter is when a retry of the same call may succeed; zero where none does.
	RetryAfter time.Duration
	// GRPC is the gRPC status code where the HTTP status does not say it, else zero.
	GRPC int
	// Meaning, Caller and Operator tell people what the problem means, what the caller should do, and what the
	// operator can; Operator is empty where nothing needs to be done.
	Meaning, Caller, Operator string
}

// errorType returns the type by which the SDKs of several services know an error.
func (k Kind) errorType() string {
	if k.Status >= 500 {
		return "api_error"
	}
	switch k.Status {
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusBadRequest, http.StatusUnauthorized, http.StatusNotFound, http.StatusGone, http.StatusRequestEntityTooLarge:
		return "invalid_request_error"
	}
	return "idempotency_error"
}

// The kinds of problems that a guarded call can meet.
var (
	ExecutionIDMissing = Kind{
		Slug: "execution-id-missing", Status: http.StatusBadRequest, SafeNewKey: true,
		Title:    "The call names no execution id",
		Meaning:  "This route runs a call that changes something only if the caller names the intended effect, so that a retry can be told from a second effect.",
		Caller:   "Send one Idempotency-Key header with a random value of 1 to 255 visible ASCII characters, the same for every retry of this one call.",
		Operator: "`missing_id recognize` runs such calls under an id that the gateway makes up, and finds retries by evidence; `missing_id mint` takes each for a new call; `missing_id derive` finds equal calls within a short window.",
	}
	ExecutionIDInvalid = Kind{
		Slug: "execution-id-invalid", Status: http.StatusBadRequest, SafeNewKey: true,
		Title:    "The execution id is malformed",
		Meaning:  "The id is empty, too long, has characters that are not visible ASCII, or stands on more than one header line.",
		Caller:   "Send one header line with 1 to 255 visible ASCII characters, plain or as a quoted string.",
		Operator: "The accepted places of the id are set with `execution_id`.",
	}
	WorkflowIDInvalid = Kind{
		Slug: "workflow-id-invalid", Status: http.StatusBadRequest,
		Title:   "The id of the workflow, or of its node, is malformed",
		Meaning: "The header Workflow-Id or Workflow-Node is too long, has characters that are not visible ASCII, such as a space, or stands on more than one line. The call was not forwarded.",
		Caller:  "Send one Workflow-Id line with 1 to 255 visible ASCII characters, one Workflow-Node line with 1 to 128, or leave them away. Keep the execution id.",
	}
	NodeUnknown = Kind{
		Slug: "node-unknown", Status: http.StatusUnprocessableEntity, SafeNewKey: true, GRPC: grpcInvalidArgument,
		Title:    "The call is no node of the plan of its workflow",
		Meaning:  "The workflow has a plan, and the call is none of its nodes: neither by `atd.node` in its token, nor by the header Workflow-Node, nor by what it does. Nothing was recorded or forwarded.",
		Caller:   "Name the node that the call is, in `atd.node` of the token's extensions or in Workflow-Node. If the plan has none for it, the call is not part of the workflow.",
		Operator: "`GET` of the workflow shows its plan. `plan_mode observed` in the global options records such calls in place of refusing them.",
	}
	NodeAmbiguous = Kind{
		Slug: "node-ambiguous", Status: http.StatusUnprocessableEntity, SafeNewKey: true, GRPC: grpcInvalidArgument,
		Title:    "The call could be several nodes of the plan of its workflow",
		Meaning:  "Several nodes of the workflow's plan have the label that the call's action is, and the call does not say which one it is. Nothing was recorded or forwarded.",
		Caller:   "Name the node in `atd.node` of the token's extensions, or in the header Workflow-Node.",
		Operator: "Give the nodes labels of their own, where their calls cannot name them.",
	}
	BatchMixed = Kind{
		Slug: "batch-mixed", Status: http.StatusBadRequest,
		Title:   "Several messages of the batch may change something",
		Meaning: "A batch is one call, under the rules of the message in it that may change something. This one has several such messages. Nothing was forwarded.",
		Caller:  "Send each message that may change something in a request of its own.",
	}
	CallerUnstable = Kind{
		Slug: "caller-unstable", Status: http.StatusBadRequest,
		Title:    "The credentials change with every attempt",
		Meaning:  "The Authorization scheme signs each request anew, or the call's only credential is a signature or cookies, which change by themselves. So the gateway cannot tell that a retry comes from the same caller, and must not show one caller's result to another. Nothing was forwarded.",
		Caller:   "Use a credential that stays the same over retries, or ask the operator to name the caller another way.",
		Operator: "Write `caller cookie NAME` with the name of the session's cookie, or set `caller` to a placeholder that is the same for every attempt, for example the key id of the signature.",
	}
	FingerprintMismatch = Kind{
		Slug: "fingerprint-mismatch", Status: http.StatusUnprocessableEntity,
		Title:    "The execution id was used for another request",
		Meaning:  "An execution with this id is recorded, and its host, query, media type or body differ from this call's. `state` says what became of that one. This call was not forwarded.",
		Caller:   "If it is a retry, send exactly what was sent before: under a new id its effect would happen twice. Only if another effect is meant, send it under a new id.",
		Operator: "Members that change with every attempt can be left out with `fingerprint_exclude`.",
	}
	InProgress = Kind{
		Slug: "in-progress", Status: http.StatusConflict, RetryAfter: 2 * time.Second,
		Title:    "The call is still running",
		Meaning:  "An earlier attempt with this id is being executed and has not answered yet.",
		Caller:   "Send the same call again after Retry-After; it then gets the result of the running execution.",
		Operator: "`attach_wait` is how long a retry waits for the first byte before it gets this answer.",
	}
	InDoubt = Kind{
		Slug: "in-doubt", Status: http.StatusConflict,
		Title:    "The call may have been executed, and nobody knows",
		Meaning:  "The call was sent, and no answer came that says what became of it: the connection broke, the deadline passed, the upstream answered with a status that leaves it open, or the gateway died. It is not run again without evidence.",
		Caller:   "Do not retry, and do not send it under a new id: the effect may have happened. Look at the target system, or ask the operator.",
		Operator: "Find out in the target system whether it was applied, and record it with `caddy agent-guard executions resolve`. `on_unknown probe` asks a status URL by itself; `on_unknown retry` runs it again, at the risk of a second effect.",
	}
	RolledBack = Kind{
		Slug: "rolled-back", Status: http.StatusConflict, SafeNewKey: true, GRPC: grpcAborted,
		Title:   "The execution was undone",
		Meaning: "The effect with this id was rolled back. A late duplicate does not bring it back.",
		Caller:  "If the effect is wanted again, send it under a new id.",
	}
	ResultExpired = Kind{
		Slug: "result-expired", Status: http.StatusConflict, GRPC: grpcAlreadyExists,
		Title:    "The call was executed, its result is no longer kept",
		Meaning:  "The call was executed some time ago. Its answer was kept for the time that this route states; the id stays taken, so that a late retry does not run again.",
		Caller:   "Do not send it under a new id. Look up what became of it in the target system.",
		Operator: "`retain_result` is how long results are kept.",
	}
	ResultUnavailable = Kind{
		Slug: "result-unavailable", Status: http.StatusConflict, GRPC: grpcAlreadyExists,
		Title:    "The call was executed, its result was not kept",
		Meaning:  "The call was executed. Its answer was too large to keep, could not be stored, or is damaged; the id stays taken.",
		Caller:   "Do not send it under a new id. Look up what became of it in the target system.",
		Operator: "`max_result` is the size up to which answers are kept.",
	}
	QuotaExceeded = Kind{
		Slug: "quota-exceeded", Status: http.StatusTooManyRequests, SafeNewKey: true, RetryAfter: 2 * time.Second,
		Title:    "The caller has too much open or stored",
		Meaning:  "The gateway bounds what one caller may hold in its store at a time: executions that run or are in doubt, and bytes of records and answers; and what checkpoints stand of one workflow and one caller, and how fast a workflow makes them. It also bounds how many calls a second a workflow makes, how many bytes of requests it has under way and how long it keeps the upstream busy, where `bulkhead` says so, and how many retries it sends for its calls. This caller, or its workflow, is at a bound. Nothing was recorded or forwarded; answers of earlier calls are still given.",
		Caller:   "Send the same call again after Retry-After. Executions in doubt count until they are settled, stored answers and checkpoints until they expire.",
		Operator: "The `quota` in the global options is the bound; a reload changes it at once. Look for the caller's executions in doubt, and for answers that are kept longer than needed (`retain_result`).",
	}
	BulkheadFull = Kind{
		Slug: "bulkhead-full", Status: http.StatusTooManyRequests, SafeNewKey: true,
		ErrorType: "resource_exhausted", RetryAfter: time.Second,
		Title:    "The upstream is busy, and the call cannot wait",
		Meaning:  "Workflows share the permits of an upstream, each up to a limit, and what finds none waits in a queue of its own workflow. The queue was full, or the call could not wait long enough. Nothing was recorded or forwarded; `reason` says which it was.",
		Caller:   "Send the same call again after Retry-After.",
		Operator: "Look which workflow holds the permits (`agent_guard_bulkhead_*`). `bulkhead` in the route has the limits.",
	}
	DependencyNotDone = Kind{
		Slug: "dependency-not-done", Status: http.StatusConflict, SafeNewKey: true, RetryAfter: 2 * time.Second,
		Title:    "What the call depends on is not done",
		Meaning:  "The plan of the workflow has something come before this call, or the call's own token names it as its parent, and it is not done: it has not begun, runs, is in doubt, has failed, was undone or is about to be. `dependencies` names it with its state. Nothing was recorded or forwarded. With the `reason` final it will never be done, since it has failed or was undone, or cannot begin itself.",
		Caller:   "Send the same call again after Retry-After. Where `reason` is final no retry helps: the work has to be planned anew.",
		Operator: "The workflow's document shows what holds each node. A call in doubt is settled with `caddy agent-guard executions resolve`. `order` says whether the parents that tokens name count.",
	}
	SnapshotFailed = Kind{
		Slug: "snapshot-failed", Status: http.StatusServiceUnavailable, SafeNewKey: true, RetryAfter: 2 * time.Second,
		Title:    "What the call would change cannot be read now",
		Meaning:  "Calls of this kind are undone by putting back what stood there before, and the gateway could not read that from the upstream. Nothing was recorded or forwarded.",
		Caller:   "Send the same call again after Retry-After.",
		Operator: "The gateway's log says what came of the GET: the upstream refuses it (credentials for it go into `restore`, or `undo_auth recorded`), it took longer than 10 seconds, or the answer is larger than 1 MiB. `on_snapshot_error irreversible` lets such calls through, and says in their checkpoints that they cannot be undone.",
	}
	StoreUnavailable = Kind{
		Slug: "store-unavailable", Status: http.StatusServiceUnavailable, RetryAfter: 5 * time.Second,
		Title:    "The execution cannot be recorded now",
		Meaning:  "The gateway's store does not answer or is full. Nothing is forwarded that could not be recorded.",
		Caller:   "Send the same call under the same id again after Retry-After.",
		Operator: "The gateway's log says what is wrong with the store: disk space, permissions, or a failed sync, after which the process must be restarted.",
	}
	ShuttingDown = Kind{
		Slug: "shutting-down", Status: http.StatusServiceUnavailable, RetryAfter: 2 * time.Second,
		Title:    "The gateway is shutting down",
		Meaning:  "The process finishes the calls that are running and starts no new ones. Nothing was forwarded.",
		Caller:   "Send the same call under the same id again after Retry-After.",
		Operator: "`drain` is how long the process waits for running calls.",
	}
	UpstreamUnreachable = Kind{
		Slug: "upstream-unreachable", Status: http.StatusBadGateway, SafeNewKey: true, RetryAfter: time.Second,
		Title:    "The call could not be sent to the upstream",
		Meaning:  "No connection to the upstream could be made, or it was closed before anything was sent. So the call was not executed, its id is free again, and Execution-Status says `released`. The status is that of the proxy: 502, or 503 where no upstream was available.",
		Caller:   "Send the same call under the same id again after Retry-After.",
		Operator: "The log names the upstream and the error. Error routes (`handle_errors`) of the server get the call in the place of this problem.",
	}
	CircuitOpen = Kind{
		Slug: "circuit-open", Status: http.StatusServiceUnavailable, ErrorType: "circuit_open", RetryAfter: time.Second,
		Title:    "The upstream is failing and is not called",
		Meaning:  "Too many calls to the upstream have failed, so its circuit breaker refuses calls for a while and then lets one through to see whether it is back. `reason` says where the breaker stands: open or half_open; or workflow_threshold, where it is closed and the caller's own tokens of this workflow have asked for a stricter limit. Nothing was forwarded.",
		Caller:   "Send the same call under the same id again after Retry-After.",
		Operator: "The detail names the upstream, and what its last failure was, to callers whom the gateway knows itself; the log and `caddy agent-guard circuits list` name them too. `breaker` in the transport's block sets when a breaker opens and for how long; `caddy agent-guard circuits set UPSTREAM forced_closed` overrules it; `fallback` answers in the place of this problem.",
	}
	BodyTooLarge = Kind{
		Slug: "body-too-large", Status: http.StatusRequestEntityTooLarge,
		Title:    "The request body is too large",
		Meaning:  "A guarded call is read whole before it is forwarded, and this one is larger than the route allows, or is a batch of more than 1000 messages. Nothing was forwarded.",
		Caller:   "Send less.",
		Operator: "`max_body` is the limit, or `request_body` where that is less.",
	}
	BodyTimeout = Kind{
		Slug: "body-timeout", Status: http.StatusRequestTimeout, RetryAfter: time.Second,
		Title:    "The request body did not come in time",
		Meaning:  "A guarded call is read whole before it is forwarded. This one's body stopped coming before its end, for as long as the server waits. Nothing was forwarded.",
		Caller:   "Send the same call again, with its whole body. A client that waits for an answer before it ends the body waits for ever at a guarded route: its call cannot be guarded.",
		Operator: "`read_idle_timeout` of the server (one minute by default), or of Caddy's `timeouts` handler on a route, is how long a body may stand still. A route that is called in both directions at once needs an `exempt`.",
	}
	StreamRefused = Kind{
		Slug: "stream-refused", Status: http.StatusForbidden, GRPC: grpcUnimplemented,
		Title:    "This route takes no stream that cannot be guarded",
		Meaning:  "The request asks for another protocol (an upgrade, such as to WebSocket, or CONNECT), or is a gRPC call that is not declared unary, or is declared so and sends more than one message, or a guarded call that asks to be forwarded while it comes (`Incremental`). What is sent over it could have effects that nothing records, so this route refuses it. It was not forwarded.",
		Caller:   "Send a plain HTTP request, or ask the operator to let this one pass.",
		Operator: "`unguarded_streams refuse` says so. `grpc unary` in an action guards its gRPC calls, and `exempt` lets requests pass unguarded.",
	}
	ECTInvalid = Kind{
		Slug: "ect-invalid", Status: http.StatusForbidden,
		Title:    "The Execution Context Token is not accepted",
		Meaning:  "The request carries a token that cannot be verified, that was used for another call, or that is missing where one is required. `reason` says which in one word. This request was not forwarded; an earlier one may have been. What cannot be parsed at all is answered with 400.",
		Caller:   "For a call that was never sent, make a new token: its own `jti`, an `aud` that names this gateway, an `iat` of now, parents of the same workflow. A retry sends the same bytes with the same call, also when the token's time is over; or a new token with the same Idempotency-Key, which is the safer way.",
		Operator: "`trust` says whose keys are believed and how strictly; the metric `agent_guard_tokens_total` counts the reasons.",
	}
	ECTUnavailable = Kind{
		Slug: "ect-unavailable", Status: http.StatusServiceUnavailable, RetryAfter: 5 * time.Second,
		Title:    "The Execution Context Token cannot be verified now",
		Meaning:  "What is needed to verify the token cannot be had at the moment: the keys of its issuer, or the ledger. Nothing is known of the token, and nothing was forwarded. With the `reason` ledger_unavailable the token holds, and the ledger has not taken it in time.",
		Caller:   "Send the same call with the same token again after Retry-After.",
		Operator: "The gateway's log says what is missing: a `jwks_url` that does not answer, the store, or memory for the tokens of requests that change nothing. `min_level L3` asks for a place in the ledger, which its store has refused.",
	}
	WorkflowStopped = Kind{
		Slug: "workflow-stopped", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "The workflow is stopped",
		Meaning:  "Nothing begins in the call's workflow any more. With `escalation_id` something has failed that a person has to look at, such as a rollback, and the workflow stays stopped until a person resumes it. Without one a rollback of the scope full_workflow was accepted, which has ended the workflow for good. Nothing was recorded or forwarded; what was recorded before is answered as ever.",
		Caller:   "Stop the work of this workflow. What has to be done all the same is a new workflow, with an id of its own.",
		Operator: "`caddy agent-guard escalations show` shows why, and `escalations approve` resumes the workflow. `caddy agent-guard rollbacks` shows the rollback of a workflow that was ended, which stays so for as long as that is kept (`retain` in the `rollback` block).",
	}
	WorkflowPaused = Kind{
		Slug: "workflow-paused", Status: http.StatusConflict, SafeNewKey: true, RetryAfter: 2 * time.Second,
		Title:    "The workflow is paused",
		Meaning:  "With `escalation_id` a person has to look at the workflow before it goes on. Without one a rollback is under way, or prepared, that undoes what led to this call, and a call that began now could be missing in it. Nothing was recorded or forwarded.",
		Caller:   "Look whether the work is still wanted: what it follows from may be taken back. If so, send the same call again after Retry-After.",
		Operator: "`caddy agent-guard escalations show` shows what there is to look at, and `escalations approve` resumes the workflow. `caddy agent-guard rollbacks` lists what is under way.",
	}
	ApprovalRequired = Kind{
		Slug: "approval-required", Status: http.StatusConflict, SafeNewKey: true, RetryAfter: 30 * time.Second,
		Title:    "A person has to approve the call",
		Meaning:  "Calls of this kind are sent only after a person has approved them. The question is recorded, `escalation_id` names it, and it outlives restarts. Nothing was forwarded, and the id is still free.",
		Caller:   "Send the same call under the same id again after Retry-After: it runs once it is approved. Another body is another question.",
		Operator: "`caddy agent-guard escalations list` shows what waits, `escalations approve` and `deny` decide. `approve` in the action says who may, and by when.",
	}
	ApprovalDenied = Kind{
		Slug: "approval-denied", Status: http.StatusForbidden, SafeNewKey: true,
		Title:    "The call was not approved",
		Meaning:  "A person has denied the call, or nobody has approved it in time, or it was not made in time after it was approved. Nothing was forwarded.",
		Caller:   "Do without it. Under a new id it is a new question to the same people.",
		Operator: "`caddy agent-guard escalations show` shows who decided, when and why.",
	}
)
