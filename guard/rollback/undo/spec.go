package undo

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// What happens when the answer to an undo is lost and no status can be asked for.
const (
	// Resend sends it again under the same key: compensations are idempotent by contract.
	Resend = "resend"
	// Escalate leaves it to a person.
	Escalate = "escalate"
	// Overwrite restores also what was changed since; the other choice is Escalate.
	Overwrite = "overwrite"
)

// Where the credentials of an undo come from.
const (
	// AuthConfig: only what the action's configuration writes.
	AuthConfig = "config"
	// AuthRecorded: the call's own, sealed with its checkpoint, towards the same upstream.
	AuthRecorded = "recorded"
)

// Spec is how a call is undone, as it is recorded with its checkpoint
// (checkpoint.Snapshot.Undo) in JSON: decided before the call leaves. It holds no
// credentials of the configuration: those are taken from the configuration of the day,
// so that they can be changed.
type Spec struct {
	// Guard is the name of the guard that the call went through, by whose upstream requests
	// of the undo go too.
	Guard string `json:"guard"`
	// ExecutionID is the call's execution id, for templates.
	ExecutionID string `json:"execution_id,omitempty"`
	// Compensate is the request of the way compensate.
	Compensate *template.Spec `json:"compensate,omitempty"`
	// Status is the request that asks what became of a compensation whose answer was lost
	// or was 202. Its method is GET.
	Status *template.Spec `json:"status,omitempty"`
	// Delegate is the agent's rollback URI.
	Delegate string `json:"delegate,omitempty"`
	// OnLost is Resend or Escalate, for compensate and delegate; empty is Resend. Escalate
	// says that the undo is not idempotent, so that nothing in doubt is sent again.
	OnLost string `json:"on_lost"`
	// OnChanged is Escalate or Overwrite, for restore; empty is Escalate.
	OnChanged string `json:"on_changed,omitempty"`
	// Auth is AuthConfig or AuthRecorded; empty is AuthConfig.
	Auth string `json:"auth"`
	// Verify says that what was restored is read once more.
	Verify bool `json:"verify,omitempty"`
}

// ErrSpec: a Spec is not one; the message says what is wrong.
var ErrSpec = errors.New("undo: this is no way to undo a call")

// Encode writes the spec as ParseSpec reads it.
func (s *Spec) Encode() []byte {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings and booleans only
	}
	return b
}

// ParseSpec reads what Encode has written, and checks it. It refuses members that it
// does not know: what it does not understand it cannot do. The error is ErrSpec.
func ParseSpec(b []byte) (*Spec, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	s := new(Spec)
	if err := d.Decode(s); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSpec, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: something follows it", ErrSpec)
	}
	return s, s.Check()
}

// Check says what is wrong with the spec. The error is ErrSpec, and a
// *template.ParseError where a template is the fault.
func (s *Spec) Check() error {
	_, err := s.templates()
	switch {
	case err != nil:
		return err
	case s.Guard == "":
		return fmt.Errorf("%w: the guard's name is missing", ErrSpec)
	case s.Compensate != nil && s.Delegate != "":
		return fmt.Errorf("%w: compensate and delegate exclude each other", ErrSpec)
	case s.Status != nil && s.Compensate == nil && s.Delegate == "":
		return fmt.Errorf("%w: a status can be asked for of compensate and delegate only", ErrSpec)
	case s.Status != nil && s.Status.Method != http.MethodGet:
		return fmt.Errorf("%w: the method of status is GET, since asking changes nothing", ErrSpec)
	case !slices.Contains([]string{"", Resend, Escalate}, s.OnLost):
		return fmt.Errorf("%w: on_lost is %q; use resend or escalate", ErrSpec, s.OnLost)
	case !slices.Contains([]string{"", Escalate, Overwrite}, s.OnChanged):
		return fmt.Errorf("%w: on_changed is %q; use escalate or overwrite", ErrSpec, s.OnChanged)
	case !slices.Contains([]string{"", AuthConfig, AuthRecorded}, s.Auth):
		return fmt.Errorf("%w: auth is %q; use config or recorded", ErrSpec, s.Auth)
	}
	if s.Delegate != "" {
		u, err := url.Parse(s.Delegate)
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.Fragment != "" {
			return fmt.Errorf("%w: delegate is no http or https URL with a host", ErrSpec)
		}
	}
	return nil
}

// Needs tells what of the call must be recorded so that its undo can be made, for both
// templates together. The error is that of Check.
func (s *Spec) Needs() (template.Needs, error) {
	var all template.Needs
	if err := s.Check(); err != nil {
		return all, err
	}
	templates, err := s.templates()
	if err != nil {
		return all, err
	}
	for _, t := range []*template.Template{templates.compensate, templates.status} {
		if t == nil {
			continue
		}
		n := t.Needs()
		all.Path, all.Status = all.Path || n.Path, all.Status || n.Status
		all.Query = union(all.Query, n.Query)
		all.RequestHeader = union(all.RequestHeader, n.RequestHeader)
		all.ResponseHeader = union(all.ResponseHeader, n.ResponseHeader)
		all.RequestBody = union(all.RequestBody, n.RequestBody)
		all.ResponseBody = union(all.ResponseBody, n.ResponseBody)
	}
	return all, nil
}

func union(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

// templates are those of a spec; nil where there is none.
type templates struct {
	compensate, status *template.Template
}

func (s *Spec) templates() (t templates, err error) {
	if s.Compensate != nil {
		if t.compensate, err = template.Parse(*s.Compensate); err != nil {
			return t, fmt.Errorf("%w: compensate: %w", ErrSpec, err)
		}
	}
	if s.Status != nil {
		if t.status, err = template.Parse(*s.Status); err != nil {
			return t, fmt.Errorf("%w: status: %w", ErrSpec, err)
		}
	}
	return t, nil
}
