package problem

import (
	"net/http"
	"strings"
	"time"
)

// Kind is one kind of problem. The kinds are the variables of this package.
type Kind struct {
	// Slug names the kind; it ends the problem's type URI.
	Slug string
	// Status is the HTTP status.
	Status int
	// Title says it in a few words, the same for every occurrence.
	Title string
	// SafeNewKey says whether the call may be sent again under a new key without
	// any danger that its effect happens twice.
	SafeNewKey bool
	// ErrorType is the type that AERR's registry has for it; it may be empty.
	ErrorType string

	retry      bool // a retry of the same call can cure it
	retryAfter time.Duration
	meaning    string // for people: what it means
	caller     string // for people: what the caller should do
	operator   string // for people: what the operator can do
}

// Code is the slug with underscores, as error codes are written.
func (k Kind) Code() string { return strings.ReplaceAll(k.Slug, "-", "_") }

func (k Kind) errorType() string {
	switch k.Status {
	case http.StatusBadRequest, http.StatusUnauthorized, http.StatusNotFound, http.StatusGone, http.StatusRequestEntityTooLarge:
		return "invalid_request_error"
	}
	return "idempotency_error"
}

// The kinds of problems.
var (
	ExecutionIDMissing = Kind{
		Slug: "execution-id-missing", Status: http.StatusBadRequest, SafeNewKey: true,
		Title:    "The call names no execution id",
		meaning:  "This route runs a call that changes something only if the caller names the intended effect, so that a retry can be told from a second effect.",
		caller:   "Send one Idempotency-Key header with a random value of 1 to 255 visible ASCII characters, the same for every retry of this one call.",
		operator: "`missing_id mint` lets such calls through under an id that the gateway makes up; `missing_id derive` finds equal calls within a short window.",
	}
	ExecutionIDInvalid = Kind{
		Slug: "execution-id-invalid", Status: http.StatusBadRequest, SafeNewKey: true,
		Title:    "The execution id is malformed",
		meaning:  "The id is empty, too long, has characters that are not visible ASCII, or stands on more than one header line.",
		caller:   "Send one header line with 1 to 255 visible ASCII characters, plain or as a quoted string.",
		operator: "The accepted places of the id are set with `execution_id`.",
	}
	CallerUnstable = Kind{
		Slug: "caller-unstable", Status: http.StatusBadRequest, SafeNewKey: true,
		Title:    "The credentials change with every attempt",
		meaning:  "The Authorization scheme signs each request anew, so the gateway cannot tell that a retry comes from the same caller, and must not show one caller's result to another.",
		caller:   "Use a credential that stays the same over retries, or ask the operator to name the caller another way.",
		operator: "Set `caller` to a placeholder that is the same for every attempt, for example the key id of the signature.",
	}
	FingerprintMismatch = Kind{
		Slug: "fingerprint-mismatch", Status: http.StatusUnprocessableEntity, SafeNewKey: true,
		Title:    "The execution id was used for another request",
		meaning:  "An execution with this id is recorded, and its host, query, media type or body differ from this call's. Nothing was forwarded.",
		caller:   "If this is meant as another effect, send it under a new id. If it is a retry, send exactly what was sent before.",
		operator: "Members that change with every attempt can be left out with `fingerprint_exclude`.",
	}
	InProgress = Kind{
		Slug: "in-progress", Status: http.StatusConflict,
		Title: "The call is still running",
		retry: true, retryAfter: 2 * time.Second,
		meaning:  "An earlier attempt with this id is being executed and has not answered yet.",
		caller:   "Send the same call again after Retry-After; it then gets the result of the running execution.",
		operator: "`attach_wait` is how long a retry waits for the first byte before it gets this answer.",
	}
	InDoubt = Kind{
		Slug: "in-doubt", Status: http.StatusConflict,
		Title:    "The call may have been executed, and nobody knows",
		meaning:  "The call was sent, and no answer came that says what became of it: the connection broke, the deadline passed, the upstream answered with a status that leaves it open, or the gateway died. It is not run again without evidence.",
		caller:   "Do not retry, and do not send it under a new id: the effect may have happened. Look at the target system, or ask the operator.",
		operator: "Find out in the target system whether it was applied, and record it with `caddy agent-guard executions resolve`. `on_unknown probe` asks a status URL by itself; `on_unknown retry` runs it again, at the risk of a second effect.",
	}
	RolledBack = Kind{
		Slug: "rolled-back", Status: http.StatusConflict, SafeNewKey: true,
		Title:    "The execution was undone",
		meaning:  "The effect with this id was rolled back. A late duplicate does not bring it back.",
		caller:   "If the effect is wanted again, send it under a new id.",
		operator: "Nothing needs to be done.",
	}
	ResultExpired = Kind{
		Slug: "result-expired", Status: http.StatusConflict,
		Title:    "The call was executed, its result is no longer kept",
		meaning:  "The call was executed some time ago. Its answer was kept for the time that this route states; the id stays taken, so that a late retry does not run again.",
		caller:   "Do not send it under a new id. Look up what became of it in the target system.",
		operator: "`retain_result` is how long results are kept.",
	}
	ResultUnavailable = Kind{
		Slug: "result-unavailable", Status: http.StatusConflict,
		Title:    "The call was executed, its result was not kept",
		meaning:  "The call was executed. Its answer was too large to keep, could not be stored, or is damaged; the id stays taken.",
		caller:   "Do not send it under a new id. Look up what became of it in the target system.",
		operator: "`max_result` is the size up to which answers are kept.",
	}
	QuotaExceeded = Kind{
		Slug: "quota-exceeded", Status: http.StatusTooManyRequests, SafeNewKey: true,
		Title: "The caller has too much open or stored",
		retry: true, retryAfter: 2 * time.Second,
		meaning:  "The gateway bounds what one caller may hold in its store at a time: executions that run or are in doubt, and bytes of records and answers; and what checkpoints stand of one workflow and one caller, and how fast a workflow makes them. This caller, or its workflow, is at a bound. Nothing was recorded or forwarded; answers of earlier calls are still given.",
		caller:   "Send the same call again after Retry-After. Executions in doubt count until they are settled, stored answers and checkpoints until they expire.",
		operator: "The `quota` in the global options is the bound; a reload changes it at once. Look for the caller's executions in doubt, and for answers that are kept longer than needed (`retain_result`).",
	}
	SnapshotFailed = Kind{
		Slug: "snapshot-failed", Status: http.StatusServiceUnavailable, SafeNewKey: true,
		Title: "What the call would change cannot be read now",
		retry: true, retryAfter: 2 * time.Second,
		meaning:  "Calls of this kind are undone by putting back what stood there before, and the gateway could not read that from the upstream. Nothing was recorded or forwarded.",
		caller:   "Send the same call again after Retry-After.",
		operator: "The gateway's log says what came of the GET: the upstream refuses it (credentials for it go into `restore`, or `undo_auth recorded`), it took longer than `snapshot_timeout`, or the answer is larger than `max_image`. `on_snapshot_error irreversible` lets such calls through, and says in their checkpoints that they cannot be undone.",
	}
	StoreUnavailable = Kind{
		Slug: "store-unavailable", Status: http.StatusServiceUnavailable,
		Title: "The execution cannot be recorded now",
		retry: true, retryAfter: 5 * time.Second,
		meaning:  "The gateway's store does not answer or is full. Nothing is forwarded that could not be recorded.",
		caller:   "Send the same call under the same id again after Retry-After.",
		operator: "The gateway's log says what is wrong with the store: disk space, permissions, or a failed sync, after which the process must be restarted.",
	}
	ShuttingDown = Kind{
		Slug: "shutting-down", Status: http.StatusServiceUnavailable,
		Title: "The gateway is shutting down",
		retry: true, retryAfter: 2 * time.Second,
		meaning:  "The process finishes the calls that are running and starts no new ones. Nothing was forwarded.",
		caller:   "Send the same call under the same id again after Retry-After.",
		operator: "`drain` is how long the process waits for running calls.",
	}
	CircuitOpen = Kind{
		Slug: "circuit-open", Status: http.StatusServiceUnavailable, ErrorType: "circuit_open",
		Title: "The upstream is failing and is not called",
		retry: true, retryAfter: time.Second,
		meaning:  "Too many calls to the upstream have failed, so its circuit breaker refuses calls for a while and then lets one through to see whether it is back. `reason` says where the breaker stands: open or half_open; or workflow_threshold, where it is closed and the caller's own tokens of this workflow have asked for a stricter limit. Nothing was forwarded.",
		caller:   "Send the same call under the same id again after Retry-After.",
		operator: "The detail names the upstream, and what its last failure was, to callers whom the gateway knows itself; the log and `caddy agent-guard circuits list` name them too. `breaker` in the transport's block sets when a breaker opens and for how long; `workflow_threshold` how strict workflows may be; `mode forced_closed` overrules both; `fallback` answers in the place of this problem.",
	}
	BodyTooLarge = Kind{
		Slug: "body-too-large", Status: http.StatusRequestEntityTooLarge, SafeNewKey: true,
		Title:    "The request body is too large",
		meaning:  "A guarded call is read whole before it is forwarded, and this one is larger than the route allows. Nothing was forwarded.",
		caller:   "Send less.",
		operator: "`max_body` is the limit.",
	}
	AuthenticationRequired = Kind{
		Slug: "authentication-required", Status: http.StatusUnauthorized,
		Title:    "Only who took part may ask about it",
		meaning:  "The request has no credential. What became of an execution is told to the identity that made the call, and what a workflow's tokens say to those who took part in it; never to callers without any.",
		caller:   "Ask with the credential that the call was made with.",
		operator: "Who the caller is comes from a client certificate, Caddy's authentication, `caller` or the fields of `credentials`. Calls without any of them can be looked up by an operator only.",
	}
	ExecutionUnknown = Kind{
		Slug: "execution-unknown", Status: http.StatusNotFound,
		Title:    "No execution of this caller has this id",
		meaning:  "At this route and host nothing is recorded under this id for the identity that asks. It was never called, was refused or released without being executed, its key is no longer kept, or it was called with another credential.",
		caller:   "Ask with the credential and at the host that the call was made with. This is no proof that the call was never executed: a retry is safe under the same id and credential, for as long as keys are kept.",
		operator: "A credential that was rotated is another caller; an identity from Caddy's authentication, or `caller`, stays the same.",
	}
	ECTInvalid = Kind{
		Slug: "ect-invalid", Status: http.StatusForbidden,
		Title:    "The Execution Context Token is not accepted",
		meaning:  "The request carries a token that cannot be verified, that was used for another call, or that is missing where one is required. `reason` says which in one word. This request was not forwarded; an earlier one may have been. What cannot be parsed at all is answered with 400.",
		caller:   "For a call that was never sent, make a new token: its own `jti`, an `aud` that names this gateway, an `iat` of now, parents of the same workflow. A retry sends the same bytes with the same call, also when the token's time is over; or a new token with the same Idempotency-Key, which is the safer way.",
		operator: "`trust` says whose keys are believed and how strictly; the metric `agent_guard_tokens_total` counts the reasons.",
	}
	EntryUnknown = Kind{
		Slug: "entry-unknown", Status: http.StatusNotFound,
		Title:    "The ledger has no such entry for this reader",
		meaning:  "Nothing stands there, or it belongs to a workflow in which the identity that asks has no part. The two are not told apart.",
		caller:   "Ask with the identity that took part in the workflow. An entry reaches the ledger a moment after its request.",
		operator: "Readers are told apart as callers are: by the issuer of a verified token, else by the credential that a call was made with.",
	}
	EntryPruned = Kind{
		Slug: "entry-pruned", Status: http.StatusGone,
		Title:    "The content of the entry is no longer kept",
		meaning:  "The entry was recorded and its content was pruned after the retention. Its hash is still in the tree, and proofs over it still hold.",
		caller:   "Use a copy of the entry that was made before, if there is one; its receipt and the inclusion proof still prove it.",
		operator: "`retain` in the `identity` is how long the ledger keeps contents.",
	}
	WorkflowUnknown = Kind{
		Slug: "workflow-unknown", Status: http.StatusNotFound,
		Title:    "No workflow of this reader has this id",
		meaning:  "Nothing is recorded under this workflow id, or the identity that asks has no part in it. The two are not told apart.",
		caller:   "Ask with the identity that took part in the workflow.",
		operator: "Readers are told apart as callers are: by the issuer of a verified token, else by the credential that a call was made with.",
	}
	ECTUnavailable = Kind{
		Slug: "ect-unavailable", Status: http.StatusServiceUnavailable,
		Title: "The Execution Context Token cannot be verified now",
		retry: true, retryAfter: 5 * time.Second,
		meaning:  "What is needed to verify the token cannot be had at the moment: the keys of its issuer, or the ledger. Nothing is known of the token, and nothing was forwarded. With the `reason` ledger_unavailable the token holds, and the ledger has not taken it in time.",
		caller:   "Send the same call with the same token again after Retry-After.",
		operator: "The gateway's log says what is missing: a `jwks_url` that does not answer, the store, or memory for the tokens of requests that change nothing. `min_level L3` asks for a place in the ledger: look at its backlog, and at what its sequencer logs.",
	}
	ParameterInvalid = Kind{
		Slug: "parameter-invalid", Status: http.StatusBadRequest,
		Title:    "The question is malformed",
		meaning:  "A parameter of a request to one of the gateway's own paths cannot be read. This says nothing about any execution.",
		caller:   "Correct what the detail names.",
		operator: "Nothing needs to be done.",
	}
)

// Kinds lists all kinds, in the order in which they are documented.
func Kinds() []Kind {
	return append([]Kind{
		ExecutionIDMissing, ExecutionIDInvalid, CallerUnstable, FingerprintMismatch, InProgress, InDoubt,
		RolledBack, ResultExpired, ResultUnavailable, QuotaExceeded, SnapshotFailed, StoreUnavailable, ShuttingDown, CircuitOpen, BodyTooLarge,
		AuthenticationRequired, ExecutionUnknown, ECTInvalid, ECTUnavailable, EntryUnknown, EntryPruned, WorkflowUnknown,
		ParameterInvalid,
	}, rollbackKinds()...)
}

// Find returns the kind with this slug.
func Find(slug string) (Kind, bool) {
	for _, k := range Kinds() {
		if k.Slug == slug {
			return k, true
		}
	}
	return Kind{}, false
}
