package guard

import (
	"cmp"
	"container/list"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// VerifiedHere reports whether the gateway itself has verified a caller, so that it may see
// breakers (cascade 6.2). A credential that only the upstream can check may be made up.
func VerifiedHere(caller string) bool {
	switch kind, _, _ := strings.Cut(caller, ":"); kind {
	case "issuer", "certificate", "user", "explicit":
		return true
	}
	return false
}

// refusedByCircuit returns err, or its problem where a breaker has refused the last attempt: the
// call was not sent. verified says that the caller is verified here.
func refusedByCircuit(err error, verified bool) error {
	open := (*breaker.OpenError)(nil)
	if !errors.As(err, &open) {
		return err
	}
	identity := ""
	if named := (interface{ Downstream() string })(nil); errors.As(err, &named) {
		identity = named.Downstream()
	}
	return circuitOpen(open, identity, verified)
}

// circuitOpen is the problem of a call that a breaker has refused. Only callers that are verified
// here see the address and the failures of the upstream, as at the endpoint of breakers. The
// identity that the configuration gives the upstream is public.
func circuitOpen(open *breaker.OpenError, identity string, verified bool) *api.Problem {
	name := cmp.Or(identity, "the upstream")
	if verified {
		name = cmp.Or(identity, open.Key.Upstream)
		if open.Key.Class != "" {
			name += " (" + open.Key.Class + ")"
		}
	}
	detail := "The circuit breaker of " + name + " is open"
	switch {
	case open.View != nil: // open for this caller only
		detail = "The circuit breaker of " + name + " refuses this caller, and no other, as its tokens ask for a stricter limit"
	case open.State == breaker.HalfOpen:
		detail = "The circuit breaker of " + name + " is half-open, and lets one call through at a time"
	}
	if open.View != nil && verified {
		detail += fmt.Sprintf(": more than %.4g%% of the calls in %v have failed", open.View.Threshold()*100, open.View.Window())
	}
	switch {
	case !verified:
	case open.Mode == breaker.ForcedOpen:
		detail += ", as its operator says"
	case open.Cause != "":
		detail += ": " + open.Cause
	}
	p := api.NewProblem(api.CircuitOpen, detail+".")
	p.Reason = open.State.String()
	if open.View != nil {
		p.Reason = "workflow_threshold"
	}
	p.RetryAfter, p.Cause = open.RetryAfter(), open
	return p
}

const (
	// maxRejected is the number of workflows in which the rejections of one breaker are
	// recorded, until it changes. Further rejections are counted only.
	maxRejected = 1024
	// maxRejectedUnverified is the same for callers that are not verified here: they can
	// make up workflows, and must not use up the others' room.
	maxRejectedUnverified = 64
	// maxBreakers is how many breakers' rejections are remembered.
	maxBreakers = 1024
)

// rejections remembers the workflows in which the rejections of a breaker are recorded, so that
// many retries cannot flood the ledger (cascade 3.3.2).
type rejections struct {
	mu sync.Mutex
	of map[breaker.Key]*rejected
}

type rejected struct {
	generation uint64
	verified   map[string]struct{} // the workflows of callers that are known here
	unverified map[string]struct{}
	errors     map[rejectedCaller]*shownError
}

type rejectedCaller struct{ workflow, caller string }

// first reports whether to record a rejection: once for each workflow and generation of a
// breaker. Callers that are not verified here are counted apart.
func (r *rejections) first(open *breaker.OpenError, workflow string, verified bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.at(open)
	workflows, most := known.unverified, maxRejectedUnverified
	if verified {
		workflows, most = known.verified, maxRejected
	}
	if _, recorded := workflows[workflow]; recorded || len(workflows) >= most {
		return false
	}
	workflows[workflow] = struct{}{}
	return true
}

// at returns the rejections by a breaker since its last change. The caller holds the lock.
func (r *rejections) at(open *breaker.OpenError) *rejected {
	known := r.of[open.Key]
	if known == nil || known.generation != open.Generation {
		if r.of == nil || known == nil && len(r.of) >= maxBreakers {
			r.of = map[breaker.Key]*rejected{}
		}
		known = &rejected{open.Generation, map[string]struct{}{}, map[string]struct{}{}, map[rejectedCaller]*shownError{}}
		r.of[open.Key] = known
	}
	return known
}

// shown is the error that a caller got before, and whether there is room for another one.
func (r *rejections) shown(open *breaker.OpenError, to rejectedCaller) (e *shownError, room bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.at(open).errors
	return all[to], len(all) < maxRejected
}

func (r *rejections) show(open *breaker.OpenError, to rejectedCaller, e *shownError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at(open).errors[to] = e
}

// ledTo are the ids of the call's parents, recorded or not.
func (s *callEvidence) ledTo() []string {
	ids := slices.Clone(s.call.Parents)
	for _, t := range s.tokens.All {
		if t.Proven() { // others may name any
			ids = append(ids, t.Parents()...)
		}
	}
	return ids
}

// Members with which a token constrains breakers (ATD "Circuit Breaker Policy Configuration"):
// in its extensions, or in an object there as in ATD's figure.
const (
	constraintThreshold = "atd.circuit_threshold" // a share, over 0 and under 1
	constraintWindow    = "atd.circuit_window_s"  // seconds, 1 or more

	constraintObject = "constraints"
)

const maxConstrained = 4096

// asker has asked breakers for a stricter limit: an issuer of tokens, in one workflow. The
// workflow alone is not enough, as a token may name any: one agent could make the limits of
// others stricter.
type asker struct {
	workflow string // its UUID
	issuer   string
}

// constraints remembers what askers have asked for, for their later calls. When it is full, the
// least recently used one is forgotten. The zero value is empty.
type constraints struct {
	mu     sync.Mutex
	of     map[asker]*list.Element
	recent list.List // of *constrained, the latest first
}

type constrained struct {
	by   asker
	view *breaker.View
}

// add combines what is asked with what was asked before: limits only get stricter.
func (c *constraints) add(by asker, asked *breaker.View) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.of[by]; at != nil {
		c.recent.MoveToFront(at)
		known := at.Value.(*constrained)
		known.view = known.view.And(asked)
		return
	}
	if c.of == nil {
		c.of = map[asker]*list.Element{}
	}
	if len(c.of) >= maxConstrained {
		oldest := c.recent.Back()
		delete(c.of, c.recent.Remove(oldest).(*constrained).by)
	}
	c.of[by] = c.recent.PushFront(&constrained{by, asked})
}

func (c *constraints) find(by asker) *breaker.View {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.of[by]
	if at == nil {
		return nil
	}
	c.recent.MoveToFront(at)
	return at.Value.(*constrained).view
}

// askedBy is what a token asks of breakers, or nil. A token with an invalid value is refused,
// rather than accepted without the limit that it asks for.
func askedBy(t *ect.Token) (*breaker.View, error) {
	ext := t.Ext()
	if ext.JSON() == "" {
		return nil, nil
	}
	asked, err := readConstraints(func(name string) (string, bool) { return ext.Raw(ect.Member(name)) })
	if err != nil {
		return nil, err
	}
	var object map[string]json.RawMessage
	raw, ok := ext.Raw(constraintObject)
	if !ok || json.Unmarshal([]byte(raw), &object) != nil {
		return asked, nil // another use of this name
	}
	inner, err := readConstraints(func(name string) (string, bool) { raw, ok := object[name]; return string(raw), ok })
	return asked.And(inner), err
}

func readConstraints(member func(name string) (raw string, ok bool)) (*breaker.View, error) {
	threshold, hasThreshold := member(constraintThreshold)
	window, hasWindow := member(constraintWindow)
	if !hasThreshold && !hasWindow {
		return nil, nil
	}
	var share, seconds float64
	var err error
	// Zero would mean the breaker's own value.
	if hasThreshold {
		if share, err = strconv.ParseFloat(threshold, 64); err != nil || share == 0 {
			return nil, &ect.Error{Code: ect.CodeExt}
		}
	}
	if hasWindow {
		if seconds, err = strconv.ParseFloat(window, 64); err != nil || seconds == 0 {
			return nil, &ect.Error{Code: ect.CodeExt}
		}
	}
	// No breaker has a longer window.
	view, err := breaker.NewView(share, time.Duration(min(seconds, time.Hour.Seconds())*float64(time.Second)))
	if err != nil {
		return nil, &ect.Error{Code: ect.CodeExt}
	}
	return view, nil
}

// view is what the tokens of a request ask of breakers; nil without.
func (h *Handler) view(r *http.Request) *breaker.View {
	v, _ := h.Host.Var(r, ViewVar).(*breaker.View)
	return v
}
