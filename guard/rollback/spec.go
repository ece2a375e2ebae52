package rollback

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// What to do when the answer to an undo is lost and there is no status request.
const (
	// Resend sends it again under the same key: compensations are idempotent by contract.
	Resend = "resend"
	// UndoEscalate leaves it to a person.
	UndoEscalate = "escalate"
	// Overwrite restores also what was changed since; the alternative is Escalate.
	Overwrite = "overwrite"
)

// Where the credentials of an undo come from.
const (
	// AuthConfig: only what the action's configuration writes.
	AuthConfig = "config"
	// AuthRecorded: the call's own, sealed with its checkpoint, for the same upstream.
	AuthRecorded = "recorded"
)

// Spec is how a call is undone, recorded in JSON with its checkpoint (checkpoint.Snapshot.Undo)
// before the call leaves. Its credentials are as configured, with placeholders; if the current
// configuration still has the action, its credentials are used.
type Spec struct {
	// Guard is the name of the guard that the call went through.
	Guard string `json:"guard"`
	// Reach is where the guard's own requests went, and so where those of the undo go.
	Reach Reach `json:"reach,omitzero"`
	// Fields are the configured header fields of the undo's requests by origin; that of the
	// call's upstream is empty.
	Fields map[string]map[string]string `json:"fields,omitempty"`
	// ExecutionID is the call's execution id, for templates.
	ExecutionID string `json:"execution_id,omitempty"`
	// Compensate is the request of the way compensate.
	Compensate *template.Spec `json:"compensate,omitempty"`
	// Protocol is that of the call's guard. A Compensate that is a message of it is judged by what its
	// answer says; empty is by HTTP alone.
	Protocol protocol.Protocol `json:"protocol,omitempty"`
	// Status is the request for the outcome of a compensation whose answer was lost or 202. Its
	// method is GET.
	Status *template.Spec `json:"status,omitempty"`
	// Delegate is the agent's rollback URI.
	Delegate string `json:"delegate,omitempty"`
	// Agent is the identity behind Delegate, which takes part in both phases: it is asked for the
	// checkpoint that its answer to the call has named, and its answers count only if it has
	// signed them. Empty is an agent that is asked for the call's own checkpoint, and whose line says
	// `unsigned`.
	Agent string `json:"agent,omitempty"`
	// OnLost is Resend or Escalate, for compensate and delegate; empty is Resend. Escalate means
	// that the undo is not idempotent, so that nothing in doubt is sent again.
	OnLost string `json:"on_lost"`
	// OnChanged is Escalate or Overwrite, for restore; empty is Escalate.
	OnChanged string `json:"on_changed,omitempty"`
	// Auth is AuthConfig or AuthRecorded; empty is AuthConfig.
	Auth string `json:"auth"`
	// Target says that a GET of the call's target shows the state that a compensation changes,
	// since the action also restores.
	Target bool `json:"target,omitempty"`
	// Verify reads the restored state once more.
	Verify bool `json:"verify,omitempty"`
}

// Reach identifies the upstream of requests. It names no guard, and nothing that may change in a
// configuration without leading elsewhere.
type Reach struct {
	// Addresses are the possible addresses, with their scheme, sorted.
	Addresses []string `json:"addresses,omitempty"`
	// Host is the Host that is set on the way, and Rewrite how the URI is rewritten; empty where they stay as they are.
	Host    string `json:"host,omitempty"`
	Rewrite string `json:"rewrite,omitempty"`
	// Fields is a digest of the changes to the header on the way, credentials included; empty for none.
	Fields string `json:"fields,omitempty"`
}

// Name is one name for the upstream; empty without an address.
func (r *Reach) Name() string {
	if len(r.Addresses) == 0 {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(append(slices.Clone(r.Addresses), r.Host, r.Rewrite), "\n")))
	return hex.EncodeToString(sum[:16])
}

// Leads reports whether requests by other reach the same upstream: a common address, and the same
// service there. A pool that has grown or shrunk is the same upstream.
func (r *Reach) Leads(other *Reach) bool {
	return r.Host == other.Host && r.Rewrite == other.Rewrite && slices.ContainsFunc(r.Addresses, func(address string) bool { return slices.Contains(other.Addresses, address) })
}

// Place names the way to the call's upstream; empty if the undo only uses whole URLs.
func (s *Spec) Place() string {
	if s.Delegate != "" || s.Compensate != nil && !strings.HasPrefix(s.Compensate.URL, "/") {
		return ""
	}
	return strings.Join([]string{s.Guard, s.Auth, s.Reach.Name(), s.Reach.Fields}, "\n")
}

// errSpec: the Spec is invalid; the message says why.
var errSpec = errors.New("undo: this is no way to undo a call")

// Encode writes the spec as ParseSpec reads it.
func (s *Spec) Encode() []byte {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings and booleans only
	}
	return b
}

// ParseSpec reads and checks what Encode wrote. It refuses unknown members, which it could not
// carry out. The error is errSpec.
func ParseSpec(b []byte) (*Spec, error) {
	s := new(Spec)
	if err := jsonx.Decode(bytes.NewReader(b), s); err != nil {
		return nil, fmt.Errorf("%w: %w", errSpec, err)
	}
	return s, s.check()
}

// check validates the spec. The error is errSpec, and a *template.ParseError for an invalid
// template.
func (s *Spec) check() error {
	_, err := s.templates()
	switch {
	case err != nil:
		return err
	case s.Guard == "":
		return fmt.Errorf("%w: the guard's name is missing", errSpec)
	case s.Agent != "" && s.Delegate == "":
		return fmt.Errorf("%w: an agent is named, and not where it is asked", errSpec)
	case s.Compensate != nil && s.Delegate != "":
		return fmt.Errorf("%w: compensate and delegate exclude each other", errSpec)
	case s.Status != nil && s.Compensate == nil && s.Delegate == "":
		return fmt.Errorf("%w: a status can be asked for of compensate and delegate only", errSpec)
	case s.Status != nil && s.Status.Method != http.MethodGet:
		return fmt.Errorf("%w: the method of status is GET, since asking changes nothing", errSpec)
	case !slices.Contains([]string{"", Resend, UndoEscalate}, s.OnLost):
		return fmt.Errorf("%w: on_lost is %q; use resend or escalate", errSpec, s.OnLost)
	case !slices.Contains([]string{"", UndoEscalate, Overwrite}, s.OnChanged):
		return fmt.Errorf("%w: on_changed is %q; use escalate or overwrite", errSpec, s.OnChanged)
	case !slices.Contains([]string{"", AuthConfig, AuthRecorded}, s.Auth):
		return fmt.Errorf("%w: auth is %q; use config or recorded", errSpec, s.Auth)
	}
	if s.Delegate != "" {
		u, err := url.Parse(s.Delegate)
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.Fragment != "" {
			return fmt.Errorf("%w: delegate is no http or https URL with a host", errSpec)
		}
	}
	return nil
}

// Needs returns what must be recorded of the call for its undo, for both templates together. The
// error is that of check.
func (s *Spec) Needs() (template.Needs, error) {
	if err := s.check(); err != nil {
		return template.Needs{}, err
	}
	t, err := s.templates()
	return t.compensate.Needs(t.status), err
}

type templates struct {
	compensate, status *template.Template
}

func (s *Spec) templates() (t templates, err error) {
	if s.Compensate != nil {
		if t.compensate, err = template.Parse(*s.Compensate); err != nil {
			return t, fmt.Errorf("%w: compensate: %w", errSpec, err)
		}
	}
	if s.Status != nil {
		if t.status, err = template.Parse(*s.Status); err != nil {
			return t, fmt.Errorf("%w: status: %w", errSpec, err)
		}
	}
	return t, nil
}

// Outgoing is a request of an undo. The sender owns it and may change it.
type Outgoing struct {
	// Method is GET for requests that only read.
	Method string
	// URL is a path and a query for the upstream of the call, or a whole URL.
	URL string
	// Header is never nil.
	Header http.Header
	// Body is nil where there is none.
	Body []byte
	// Host is that of the call, for requests to its upstream.
	Host string
	// Guard and Action name the call's configuration. Spec.Reach is where it went: the request
	// must go to no other upstream.
	Guard, Action string
	// Spec was recorded with the checkpoint. It must not be changed.
	Spec *Spec
	// Recorded says that Header has the call's own credentials, if any. Otherwise the sender adds
	// those of the action's configuration.
	Recorded bool
	// Delegated says that it goes to an agent's rollback URI; the sender adds a token of the
	// gateway.
	Delegated bool
	// Participant is set where the agent takes part in both phases.
	Participant *Participant
	// Rollback, Checkpoint and Workflow are the ids of the undone call: of one with several
	// attempts the first checkpoint, so that all tries of its undo name the same.
	Rollback, Checkpoint, Workflow string
	// Execution is the undone call's key.
	Execution execution.Key
	// Step is the checkpoint of the rollback's step.
	Step string
	// Reason is the rollback's reason, for delegates.
	Reason string
	// Window is the request's write window; nil without one. If it is disturbed already, the
	// sender sends nothing and returns ReasonChanged.
	Window WriteWindow
}

// Answer is the answer to an Outgoing.
type Answer struct {
	// Status is the final one.
	Status int
	// Header has canonical names.
	Header http.Header
	// Body has no transfer coding, and is cut at MaxAnswer bytes.
	Body []byte
	// Cut says that the body was longer.
	Cut bool
	// Proven says that the first token of the answer is the participant's own, about what it was asked
	// for, and says how that has ended.
	Proven bool
	// Completion is the id of that token, recorded in the ledger; empty where it is not.
	Completion string
}

// MaxAnswer is the largest body of an answer that a Sender reads, in bytes.
const MaxAnswer = 16 << 20

// Sender sends requests of an undo, past open breakers and full bulkheads. It sends each once,
// and follows no redirection.
type Sender interface {
	// Send returns the whole answer, or an error: for what is known, a *SendError.
	Send(ctx context.Context, r *Outgoing) (*Answer, error)
}

// SendError says why there is no answer.
type SendError struct {
	// NotSent says that provably no byte was sent.
	NotSent bool
	// Reason is ReasonNoUpstream, ReasonOtherUpstream, ReasonNoCredentials or ReasonChanged if
	// trying again is useless; else empty. With a reason nothing was sent.
	Reason Reason
	// Err is the cause, for logs; it holds nothing secret.
	Err error
}

// Error is the cause's text.
func (e *SendError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *SendError) Unwrap() error { return e.Err }

// Method is the method of undos' executions. No request has it.
const Method = undoMethod

// Describe tells people how a call is undone: the way, and the request as far as it is known,
// like "compensate POST /v1/refunds". A URL is the configured one, with placeholders and without
// its query: it has no value of the call or its answer. result may be nil.
func Describe(call *checkpoint.Snapshot, result *checkpoint.Result) string {
	why := call.Reason
	if result != nil && result.Reason != "" {
		why = result.Reason
	}
	if why != "" {
		return checkpoint.Irreversible.String() + " (" + string(why) + ")"
	}
	spec, err := ParseSpec(call.Undo)
	if err != nil {
		spec = new(Spec)
	}
	request := ""
	switch {
	case call.Way == 0:
		return "" // nothing is left of it
	case call.Way == checkpoint.Restore && call.Image != nil:
		request = (&job{call: call}).method() + " " + call.Request.Path
	case call.Way == checkpoint.Compensate && spec.Compensate != nil:
		request = spec.Compensate.Method + " " + spec.Compensate.URL
	case call.Way == checkpoint.Delegate && spec.Delegate != "":
		request = http.MethodPost + " " + spec.Delegate
	}
	request, _, _ = strings.Cut(request, "?")
	return strings.TrimSuffix(call.Way.String()+" "+request, " ")
}
