// Package problem holds the errors that the gateway answers with: RFC 9457 problem
// documents, shaped by what real SDKs do with them.
//
// Some SDKs retry every error body that has no `error` member, others retry every
// 409 unless told not to. So a terminal problem carries an `error` member and
// `X-Should-Retry: false`; one that a retry can cure carries neither.
package problem

import (
	"cmp"
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// BasePath is where each problem's type URI leads: BasePath + slug explains it.
const BasePath = "/.well-known/cascade/problems/"

// Problem is an error answer of the gateway's own. It is an error value.
type Problem struct {
	kind Kind
	// Detail says what happened to this call, and never contains a secret or a body.
	Detail string
	// ExecutionID is the caller's name for the effect, where one is known.
	ExecutionID string
	// State is the recorded execution's state, where there is one to tell of.
	State string
	// Status is the HTTP status, where it is not that of the kind.
	Status int
	// Reason is a short stable code that says more than the kind; it may be empty.
	Reason string
	// StatusURL is where the caller can ask what becomes of the execution, if it can.
	StatusURL string
	// ConflictingRollback is the id of the rollback that takes precedence (cascade 4.3.4).
	ConflictingRollback string
	// Dependants are ids of actions that keep a rollback from being prepared.
	Dependants []string
	// Doubtful says that an earlier attempt of the call may have been executed, so that no
	// new key is safe, whatever the kind says.
	Doubtful bool
	// RetryAfter is set where a retry helps; it is sent in whole seconds, at least 1.
	RetryAfter time.Duration
	// Cause is for the log, never for the caller.
	Cause error
}

// New makes a problem of kind k.
func New(k Kind, detail string) *Problem {
	p := &Problem{kind: k, Detail: detail}
	if k.retry {
		p.RetryAfter = k.retryAfter
	}
	return p
}

// Kind is the problem's kind.
func (p *Problem) Kind() Kind { return p.kind }

// Error is the problem's slug and detail, with its cause.
func (p *Problem) Error() string {
	text := p.kind.Slug + ": " + p.Detail
	if p.Cause != nil {
		text += ": " + p.Cause.Error()
	}
	return text
}

func (p *Problem) Unwrap() error { return p.Cause }

// document is the JSON of a problem. Its members are an API.
type document struct {
	Type        string   `json:"type"`
	Title       string   `json:"title"`
	Status      int      `json:"status"`
	Detail      string   `json:"detail,omitempty"`
	Reason      string   `json:"reason,omitempty"`
	ErrorType   string   `json:"error_type,omitempty"` // beside error: an SDK that finds that would not retry
	ExecutionID string   `json:"execution_id,omitempty"`
	State       string   `json:"state,omitempty"`
	SafeNewKey  bool     `json:"safe_new_key"`
	StatusURL   string   `json:"status_url,omitempty"`
	Conflicting string   `json:"conflicting_rollback_id,omitempty"`
	Dependants  []string `json:"dependants,omitempty"`
	Error       *sdkBody `json:"error,omitempty"`
}

// sdkBody is what makes Stripe-shaped SDKs take an error as final. All members are
// strings: another type would make them retry.
type sdkBody struct {
	Type    string `json:"type"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Write answers with the problem.
func (p *Problem) Write(w http.ResponseWriter) {
	k := p.kind
	doc := document{
		Type: BasePath + k.Slug, Title: k.Title, Status: cmp.Or(p.Status, k.Status), Detail: p.Detail, Reason: p.Reason,
		ExecutionID: p.ExecutionID, State: p.State, SafeNewKey: k.SafeNewKey && !p.Doubtful,
		StatusURL: p.StatusURL, ErrorType: k.ErrorType, Conflicting: p.ConflictingRollback, Dependants: p.Dependants,
	}
	h := w.Header()
	if k.retry {
		seconds := max(1, int64((p.RetryAfter+time.Second-1)/time.Second))
		h.Set("Retry-After", strconv.FormatInt(seconds, 10))
	} else {
		doc.Error = &sdkBody{Type: k.errorType(), Code: k.Code(), Message: k.Title + ". " + p.Detail}
		h.Set("X-Should-Retry", "false")
	}
	body, err := json.Marshal(doc)
	if err != nil {
		panic("problem: " + err.Error()) // strings and numbers always marshal
	}
	body = append(body, '\n')
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Add("Link", `</.well-known/cascade/policy>; rel="describedby"`)
	if p.StatusURL != "" {
		h.Add("Link", "<"+p.StatusURL+`>; rel="status"`)
	}
	w.WriteHeader(doc.Status)
	_, _ = w.Write(body) // the client may be gone; there is nobody to tell
}
