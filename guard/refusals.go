package guard

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

func (x *Call) refuse(w http.ResponseWriter, p *problem.Problem) {
	if p.ExecutionID == "" {
		p.ExecutionID = x.call.Scope.ID
	}
	if x.state != 0 {
		p.Known(x.state.String(), x.state == execution.StateRolledBack)
	}
	if p.ExecutionID != "" {
		w.Header().Set(HeaderExecutionID, p.ExecutionID)
	}
	x.pointToStatus(p)
	x.pointToError(w.Header(), p)
	p.Announce(w.Header())
	w.Header().Set(HeaderExecutionStatus, StatusRefused)
	switch p.Kind() {
	case problem.InDoubt:
		w.Header().Set(HeaderExecutionStatus, statusInDoubt)
	case problem.UpstreamUnreachable:
		w.Header().Set(HeaderExecutionStatus, statusReleased)
	}
	if a := x.call.Attempt; a != nil && a.Evidence != "" {
		w.Header().Set(headerExecutionRecognized, a.ID)
	}
	if x.noted.checkpoint != "" {
		w.Header().Set(headerExecutionCheckpoint, x.noted.checkpoint)
	}
	if x.body == nil && x.r.ProtoMajor == 1 && (x.r.Header.Get("Expect") != "" || p.Kind() == problem.BodyTimeout) {
		// Otherwise the server would wait for a body that may never come.
		w.Header().Set("Connection", "close")
	}
	if x.noted.status != statusInDoubt { // else it was forwarded
		x.noted.status = StatusRefused
	}
	x.noted.problem = p.Kind().Slug
	x.action.Counts.Refused(p.Kind().Slug)
	level := slog.LevelDebug
	if p.Cause != nil && p.Kind() != problem.CircuitOpen {
		level = slog.LevelError
	}
	if x.h.Logger.Enabled(x.r.Context(), level) {
		fields := []slog.Attr{slog.String("problem", p.Kind().Slug)}
		if p.Cause != nil {
			fields = append(fields, slog.Any("error", p.Cause))
		}
		if x.hasID() {
			fields = append(fields, slog.Any("key", x.call.Key))
		}
		x.h.Logger.LogAttrs(x.r.Context(), level, "guarded call refused", fields...)
	}
	p.Mount = x.h.Host.Mount(x.r)
	// A sender who has named neither MCP nor A2A, and whose server nobody has named, may go by the status.
	if m := x.message; m != nil && !m.REST && !m.Batch && (m.Protocol != protocol.JSONRPC || !x.h.rules.Guesses()) {
		writeMessage(w, p, x.message, x.action.InDoubtAs == InDoubtToolResult)
		return
	}
	WriteProblem(w, x.r, p)
}

// writeMessage answers m with a problem. The status is 200: another one fails the transport of SDKs,
// and nobody reads the problem. doubtAsResult has models read a doubt.
func writeMessage(w http.ResponseWriter, p *problem.Problem, m *protocol.Message, doubtAsResult bool) {
	body := messageProblem(&documentWriter{header: w.Header()}, p, m, doubtAsResult)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	status := http.StatusOK
	if p.Kind() == problem.BodyTooLarge { // nobody knows whose it is
		status = p.Kind().Status
	}
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}

// messageProblem is p as the response to m, whose header fields are in document.
func messageProblem(document *documentWriter, p *problem.Problem, m *protocol.Message, doubtAsResult bool) []byte {
	p.Write(document)
	if doubtAsResult && m.Protocol == protocol.MCP && m.Tool != "" && p.Kind() == problem.InDoubt && !p.RetryHelps {
		return m.ToolError(fmt.Sprintf(doubtForModels, p.Detail, p.ExecutionID), document.body)
	}
	return m.Error(p.Kind().Title+". "+p.Detail, document.body)
}

// doubtForModels is what a model reads of its call in doubt.
const doubtForModels = "It is not known whether this call was executed. %s It may have taken effect, or may yet. " +
	"Do not simply repeat it, neither as it was nor slightly changed: the effect could happen twice. " +
	"First find out what has become of it, for example by reading what it would have changed, or leave that to a person. " +
	"The execution is %s."

// refuseUnguarded answers a request that nothing is recorded of. A message, if m is one, gets an error
// with its id where it has one.
func (h *Handler) refuseUnguarded(w http.ResponseWriter, r *http.Request, m *protocol.Message, p *problem.Problem) {
	w.Header().Set(HeaderExecutionStatus, StatusRefused)
	h.CountRefusal(p.Kind().Slug)
	if p.Cause != nil && p.Kind() != problem.CircuitOpen { // which is logged once, when it opens
		h.Logger.Error("request refused", slog.String("problem", p.Kind().Slug), slog.Any("error", p.Cause))
	}
	p.Mount = h.Host.Mount(r)
	if m != nil && m.ID != nil {
		writeMessage(w, p, m, false)
		return
	}
	WriteProblem(w, r, p)
}

// WriteProblem answers r with p in the form that its caller reads. p.Mount makes its URLs
// lead back to the gateway.
func WriteProblem(w http.ResponseWriter, r *http.Request, p *problem.Problem) {
	if isGRPC(r) || isMedia(r, "application/grpc-web") || isMedia(r, "application/grpc-web-text") {
		p.WriteGRPC(w, r.Header.Get("Content-Type"))
		return
	}
	p.Write(w)
}

func problemOf(k problem.Kind, detail string, state execution.State) *problem.Problem {
	p := problem.New(k, detail)
	if state != 0 {
		p.State = state.String()
	}
	return p
}

func (q *guardedRequest) gone() error {
	return &StatusError{Status: statusClientClosed, Err: q.r.Context().Err()}
}

func (q *guardedRequest) storeFailed(err error) error {
	if q.r.Context().Err() != nil {
		return q.gone()
	}
	if already := (*problem.Problem)(nil); errors.As(err, &already) {
		return already
	}
	if errors.Is(err, execution.ErrDraining) {
		return problemOf(problem.ShuttingDown, "Send the call again.", 0)
	}
	return problemOf(problem.StoreUnavailable, "Nothing was forwarded.", 0).Because(err)
}

// StoreClosed is the problem of a store that cannot be opened.
func StoreClosed(err error) error {
	return problem.New(problem.StoreUnavailable, "The gateway's store cannot be opened.").Because(err)
}

func unkept(err error) error {
	var p *problem.Problem
	if errors.As(err, &p) {
		return p
	}
	return problem.New(problem.StoreUnavailable, "The request's body could not be read again.").Because(err)
}

func unavailable() error {
	return problemOf(problem.ResultUnavailable, "The call was executed.", execution.StateCompleted)
}

func overQuota(over *execution.QuotaError) *problem.Problem {
	detail := fmt.Sprintf("The caller has %d bytes of records and answers stored, at most %d.", over.Bytes, over.Quota.Bytes)
	if over.Quota.Open > 0 && over.Open >= over.Quota.Open {
		detail = fmt.Sprintf("The caller has %d executions that run or are in doubt, at most %d.", over.Open, over.Quota.Open)
	}
	if over.Workflow > 0 {
		detail = fmt.Sprintf("The workflow has %d bytes of records and answers stored, with what its running calls may need, at most %d.", over.Bytes, over.Workflow)
	}
	full := over.Quota.Open > 0 && over.Doubts >= over.Quota.Open
	if full {
		detail += " All of them are in doubt: an operator or a probe makes room, a retry does not."
	}
	p := problemOf(problem.QuotaExceeded, detail, 0)
	if full {
		p.RetryAfter = max(p.RetryAfter, time.Minute)
	}
	if !over.Retry.IsZero() {
		p.RetryAfter = max(p.RetryAfter, time.Until(over.Retry))
	}
	return p
}

func overCheckpoints(over *checkpoint.QuotaError) *problem.Problem {
	var detail string
	switch over.Over {
	case checkpoint.OverRate:
		detail = fmt.Sprintf("The %s makes more than %d checkpoints in a minute.", over.Of, over.Most)
	case checkpoint.OverCount:
		detail = fmt.Sprintf("The %s has %d checkpoints standing, at most so many.", over.Of, over.Most)
	default:
		detail = fmt.Sprintf("The %s would have more than %d bytes of checkpoints.", over.Of, over.Most)
	}
	p := problemOf(problem.QuotaExceeded, detail, 0)
	if !over.Retry.IsZero() {
		p.RetryAfter = max(p.RetryAfter, time.Until(over.Retry))
	}
	return p
}

// pointToStatus adds to a problem where its caller can follow the call.
func (q *Request) pointToStatus(p *problem.Problem) {
	if k := p.Kind(); k != problem.InProgress && k != problem.InDoubt || q.h.Endpoint == nil {
		return
	}
	if !caller.Unnamed(q.call.Scope.Caller) {
		p.StatusURL = problem.ExecutionPath(q.call.Scope.ID)
	}
}

// circuitsOpen refuses a call whose upstreams are refused by their breakers, before it is claimed, so
// that its key stays free.
func (q *Request) circuitsOpen() error {
	open, name := q.h.Refusal(q.r.Method, q.h.view(q.r))
	if open == nil {
		return nil
	}
	return circuitOpen(open, name, caller.Verified(q.call.Scope.Caller))
}

// notSent is the error or problem that answers a call which was not sent.
func (x *Call) notSent(f *forwarding) error {
	err := refusedByCircuit(f.Err, caller.Verified(x.call.Scope.Caller))
	if p := (*problem.Problem)(nil); f.Status == 0 || errors.As(err, &p) {
		return err
	}
	p := problem.New(problem.UpstreamUnreachable, "Nothing was sent, and nothing was executed.")
	p.Status, p.Cause = f.Status, err
	return p
}

// refusedByCircuit turns err into its problem where a breaker refused the last attempt, so that
// the call was not sent.
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

// circuitOpen is the problem of a call that a breaker refused. Only callers verified here see the
// upstream's address and failures, as at the breakers' endpoint. The upstream's configured
// identity is public.
func circuitOpen(open *breaker.OpenError, identity string, verified bool) *problem.Problem {
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
		detail = "The circuit breaker of " + name + " refuses this caller, and no other, as its tokens or its plan ask for a stricter limit"
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
	p := problem.New(problem.CircuitOpen, detail+".")
	p.Reason = open.State.String()
	if open.View != nil {
		p.Reason = "workflow_threshold"
	}
	p.RetryAfter, p.Cause = open.RetryAfter(), open
	return p
}

const (
	// maxRejected bounds the workflows in which the rejections of one breaker are recorded until
	// it changes. Further rejections are only counted.
	maxRejected = 1024
	// maxRejectedUnverified is the same for unverified callers: they can make up workflows, and
	// must not use up the others' room.
	maxRejectedUnverified = 64
	// maxBreakers bounds the breakers whose rejections are remembered.
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

func (q *Request) parentIDs(facts *evidence.Call) []string {
	ids := slices.Clone(facts.Parents)
	for _, t := range q.tokens.All {
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

// asker is an issuer of tokens in one workflow. The workflow alone is not enough: tokens may name
// any, so one agent could make the limits of others stricter.
type asker struct {
	workflow string // its UUID
	issuer   string
}

// constraints remembers the limits that askers asked for. When the younger half is full it replaces the older one; what
// is asked or looked up again moves into the younger half. The zero value is empty.
type constraints struct {
	mu             sync.Mutex
	younger, older map[asker]*breaker.View
}

// add combines what is asked with what was asked before, and returns it: limits only get stricter.
func (c *constraints) add(by asker, asked *breaker.View) *breaker.View {
	c.mu.Lock()
	defer c.mu.Unlock()
	view, there := c.younger[by]
	if !there {
		view = c.older[by]
	}
	if view = view.And(asked); view == nil {
		return nil
	}
	if c.younger == nil || !there && len(c.younger) >= maxConstrained/2 {
		c.younger, c.older = make(map[asker]*breaker.View), c.younger
	}
	c.younger[by] = view
	return view
}

func (c *constraints) find(by asker) *breaker.View { return c.add(by, nil) }

// askedBy returns the limits that a token asks of breakers, or nil. A token with an invalid value
// is refused, not accepted without its limit.
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
