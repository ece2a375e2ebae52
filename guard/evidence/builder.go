package evidence

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// The gateway's own extension members, in the outcomes of calls.
const (
	// MemberOutcome is completed, released or in_doubt.
	memberOutcome ect.Member = "agent_guard.outcome"
	// memberCause is the execution.Cause.
	memberCause ect.Member = "agent_guard.cause"
	// memberStatus is the status of the upstream's answer.
	memberStatus ect.Member = "agent_guard.status"
	// MemberCaller is the keyed hash of the caller, in hexadecimal.
	memberCaller ect.Member = "agent_guard.caller"
	// MemberExecution is the short form of the execution key.
	memberExecution ect.Member = "agent_guard.execution"
	// memberGuard is the name of the guard, in a checkpoint whose target is another.
	memberGuard ect.Member = "agent_guard.guard"
	// memberCritical marks a checkpoint whose action is configured as critical.
	memberCritical ect.Member = "agent_guard.critical"
	// memberRetry marks an outcome that is recorded for the tokens of a retry.
	memberRetry ect.Member = "agent_guard.retry"
	// MemberAttempt marks the error of an upstream or a rollback that says nothing about
	// the outcome of its call.
	memberAttempt ect.Member = "agent_guard.attempt"
	// memberClass says what has failed, in the token of a cascade.
	memberClass ect.Member = "agent_guard.failure_class"
	// memberAlert is the id of a cascade, in its tokens.
	memberAlert ect.Member = "agent_guard.cascade"
	// memberBy says who settled a call in doubt: an operator or a probe.
	memberBy ect.Member = "agent_guard.settled_by"
)

// EventBuilder drafts and signs the events of calls and rollbacks for one identity.
type EventBuilder struct {
	e          *Evidence
	issuer     *ect.Issuer
	former     []ect.Former  // earlier names
	ownEntries *recent[bool] // whether entries under earlier names are the gateway's, by the hash of their tokens
}

// EventBuilder returns a builder of events that identity issues.
func (e *Evidence) EventBuilder(identity string) (*EventBuilder, error) {
	issuer, err := ect.NewIssuer(identity, e.ring)
	if err != nil {
		return nil, err
	}
	e.names.mu.Lock()
	defer e.names.mu.Unlock()
	former := slices.DeleteFunc(slices.Clone(e.names.all), func(f ect.Former) bool { return f.Name == identity })
	return &EventBuilder{e, issuer, former, newRecent[bool]()}, nil
}

// Identity is the issuer of all tokens.
func (b *EventBuilder) Identity() string { return b.issuer.Identity() }

// Call describes a call.
type Call struct {
	// Key is the execution key.
	Key execution.Key
	// Caller is the keyed hash of the caller.
	Caller execution.CallerHash
	// Action is the configured name of the action.
	Action string
	// Workflow is the id of the workflow as WorkflowID gives it; it may be empty.
	Workflow string
	// Parents are the ids of the tokens that led to the call.
	Parents []string
	// Target is the system that the call changes.
	Target string
	// RollbackURI is where a rollback of the call is requested. It is never made from what
	// a caller sent.
	RollbackURI string
	// Description says in words what the call does; Action if empty.
	Description string
	// TTL is how long the call can be rolled back, in whole seconds.
	TTL time.Duration
	// Checkpoint is the id of the checkpoint's token; a fresh one if empty. State is the
	// hash of the state that was saved for undoing the call; zero for none. Reversible
	// says that the call can be undone with it.
	Checkpoint string
	State      ect.Hash // See Checkpoint.
	Reversible bool     // See Checkpoint.
	// Critical and Severity are what the configuration says of the action: whether a rollback may
	// leave it out, and how severe it is; false and empty where nothing.
	Critical bool
	Severity string // See Critical.
	// Audience are further verifiers of the checkpoint.
	Audience []string
	// Issuer is the identity that the caller's own tokens prove; empty for none. It is in
	// the audience of the error of a failed call, and so are Hearers: those for whom it has issued them.
	Issuer  string
	Hearers []string // See Issuer.
	// Node is the id of the plan's node that the call is; empty if that is not known.
	Node string
	// Guard is the name of the guard that makes the call.
	Guard string
}

// Names are those under which the ledger has what the caller takes part in, as plan.Live asks for them.
func (c *Call) Names() []string {
	return slices.DeleteFunc([]string{c.Issuer, callerName(c.Caller)}, func(name string) bool { return name == "" })
}

// extension begins the extensions of a call's token.
func (c *Call) extension() *ect.ExtBuilder { return new(ect.ExtBuilder).Optional(MemberNode, c.Node) }

// WorkflowID is the UUID of a workflow's name: a UUID stays as it is, a trace id becomes the
// UUID of the same digits, and any other name gets one that is derived from it.
func WorkflowID(name string) string {
	if name == "" {
		return ""
	}
	if id, err := uuid.Parse(name); err == nil && (len(name) == 36 || len(name) == 32) && id != uuid.Nil && id != uuid.Max {
		return id.String()
	}
	return NamedWorkflowID(name)
}

// NamedWorkflowID is the UUID derived from a workflow's name. No token names a workflow by
// such an id unless it was derived from the same name.
func NamedWorkflowID(name string) string { return derived("agent_guard workflow", name) }

// JointID is the execution id of a call whose caller sent several tokens and no other id.
// The same ids of tokens give the same id.
func JointID(ids []string) string { return derived("agent_guard tokens", strings.Join(ids, ",")) }

// derived makes a UUID (version 8, RFC 9562) of a name.
func derived(domain, name string) string {
	sum := sha256.Sum256([]byte(domain + "\x00" + name))
	return asUUID([16]byte(sum[:16]))
}

func asUUID(id uuid.UUID) string {
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id.String()
}

// actionName is the exec_act of an action. The prefix keeps an action that is named like an
// event from being read as one.
func actionName(action string) string {
	if _, ok := readEvent(action, true); ok {
		return "call:" + action
	}
	return action
}

// Checkpoint drafts the token that announces a call (cascade 4.2.1). Record it before the
// call is forwarded.
func (b *EventBuilder) Checkpoint(now time.Time, c *Call) (*ect.Draft, error) {
	ext := c.extension().
		Bool(ect.MemberReversible, c.Reversible).
		Text(ect.MemberRollbackURI, c.RollbackURI).
		Text(ect.MemberTarget, c.Target).
		Text(ect.MemberDescription, cmp.Or(c.Description, c.Action)).
		Int(ect.MemberTTL, int64(c.TTL/time.Second)).
		Text(memberCaller, hex.EncodeToString(c.Caller[:])).
		Text(memberExecution, c.Key.String())
	if c.Guard != "" && c.Guard != c.Target {
		ext.Text(memberGuard, c.Guard)
	}
	if c.Critical {
		ext.Bool(memberCritical, true)
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: append([]string{b.Identity()}, c.Audience...), ID: c.Checkpoint, Workflow: c.Workflow,
		Action: string(ect.EventCheckpoint), Parents: c.Parents, Output: c.State, Ext: ext.Optional(ect.MemberSeverity, c.Severity),
	})
}

// Sign signs a draft at once.
func (b *EventBuilder) Sign(d *ect.Draft) (*ect.Token, error) { return b.issuer.Sign(d) }

// Outcome is the outcome of a call.
type Outcome struct {
	Checkpoint string
	Verdict    execution.Verdict
	Cause      execution.Cause
	Status     int
	// By says who settled a call in doubt; empty if the call itself ended.
	By string
	// UpstreamErrors are the ids of the errors that the upstream reported.
	UpstreamErrors []string
}

// failed reports that the call failed or may have failed.
func (o *Outcome) failed() bool {
	inBand := o.Cause == execution.CauseInBand || o.Cause == execution.CauseTool
	return o.By == "" && (o.Verdict != execution.Completed || o.Status >= 400 || inBand)
}

// Failed reports that the call is known to have failed with an error that is more than a warning: not
// that it was refused, and not that it is in doubt.
func (o *Outcome) Failed() bool {
	severity, _ := classify(o)
	return o.failed() && o.Verdict == execution.Completed && Severe(severity)
}

// Severe reports whether an error of this severity is more than a warning. One that says none is.
func Severe(severity string) bool { return severity != "info" && severity != "warning" }

// NodeID is the id of the outcome of the call with this checkpoint. Each call has one, so
// that its outcome is recorded once even if the gateway restarts. The ids are derived from
// a secret: whoever could use one first would keep the outcome from being recorded (P6).
func (e *Evidence) NodeID(checkpoint string) string { return e.secretID("outcome node", checkpoint) }

// SettledID is the id of the event that says how that call in doubt was settled.
func (e *Evidence) SettledID(checkpoint string) string { return e.secretID("settled node", checkpoint) }

// failureID is the id of the error of a failed call, by the node of its outcome.
func (e *Evidence) failureID(node string) string { return e.secretID("error of node", node) }

// Outcomes are the ids under which the outcome of one of the gateway's entries is recorded,
// a checkpoint or the node of an outcome. The index leaves these out.
func (e *Evidence) Outcomes(entry *ledger.Entry) []string {
	switch event, is := readEvent(entry.Action, true); {
	case !is:
		return []string{e.failureID(entry.ID)}
	case event == ect.EventCheckpoint:
		return []string{e.NodeID(entry.ID), e.SettledID(entry.ID)}
	}
	return nil
}

// indexIDs are the ids under which ledger.Log.Following finds an event: its parents, and
// the checkpoint that an error or a rollback names. Outcomes need no index, since their ids
// are derived from the checkpoint's: a call without tokens writes none.
func (e *Evidence) indexIDs(event *ledger.Event) []string {
	if n := len(event.Parents); n > 0 && isDerived(event.ID) {
		for _, p := range []string{event.Parents[n-1], event.Parents[0]} { // the checkpoint, or the node of the outcome
			switch event.ID {
			case e.NodeID(p), e.SettledID(p):
				return nil
			case e.failureID(p): // what was passed along follows from nothing else (ADR 0112)
				named, _ := extensionOf(event).Texts(ect.MemberUpstreamErrors)
				return named
			}
		}
	}
	ids := event.Parents
	if kind, ok := ect.ParseEvent(event.Action); ok && kind != ect.EventCheckpoint {
		if id := NamedCheckpoint(extensionOf(event)); id != "" {
			ids = append(slices.Clone(ids), id)
		}
	}
	return ids
}

// extensionOf are the extension members of an event's token. Events that are being recorded
// have it in parsed form.
func extensionOf(event *ledger.Event) ect.Ext {
	if parsed, ok := event.Parsed.(interface{ Ext() ect.Ext }); ok {
		return parsed.Ext()
	}
	e := ledger.Entry{Event: *event}
	e.Parsed = nil
	return extension(&e)
}

// isDerived reports whether an id may be one that asUUID has made.
func isDerived(id string) bool { return len(id) == 36 && id[14] == '8' }

func (e *Evidence) secretID(domain, name string) string {
	hash := e.sealer.Index(domain, name)
	return asUUID([16]byte(hash[:16]))
}

// Outcome drafts the node of the action, and an error if the call failed (ATD "Error
// Signaling").
func (b *EventBuilder) Outcome(now time.Time, c *Call, o *Outcome) ([]*ect.Draft, error) {
	id := b.e.NodeID(o.Checkpoint)
	if o.By != "" {
		id = b.e.SettledID(o.Checkpoint)
	}
	ext := c.outcome(o).Optional(memberBy, o.By)
	if len(o.UpstreamErrors) > 0 && !o.failed() { // else the error names them
		ext.Texts(ect.MemberUpstreamErrors, o.UpstreamErrors)
	}
	node, err := b.node(now, c, o, id, ext)
	if err != nil {
		return nil, err
	}
	if !o.failed() {
		return []*ect.Draft{node}, nil
	}
	failure, err := b.failure(now, c, o, id)
	return []*ect.Draft{node, failure}, err
}

// RetryOutcome drafts the outcome of a call once more, as a follower of the tokens of a
// retry.
func (b *EventBuilder) RetryOutcome(now time.Time, c *Call, o *Outcome) (*ect.Draft, error) {
	return b.node(now, c, o, "", c.outcome(o).Bool(memberRetry, true))
}

// outcome begins the extensions of a node that says how a call has ended.
func (c *Call) outcome(o *Outcome) *ect.ExtBuilder {
	ext := c.extension().
		Text(memberOutcome, o.Verdict.String()).
		Text(memberCaller, hex.EncodeToString(c.Caller[:])).
		Text(memberExecution, c.Key.String()).
		Optional(memberCause, string(o.Cause))
	if o.Status != 0 {
		ext.Int(memberStatus, int64(o.Status))
	}
	return ext
}

// node drafts the node of an action. Its parents are those of the call and its checkpoint.
func (b *EventBuilder) node(now time.Time, c *Call, o *Outcome, id string, ext *ect.ExtBuilder) (*ect.Draft, error) {
	parents := append(make([]string, 0, len(c.Parents)+1), c.Parents...)
	if len(parents) < ect.MaxParents {
		parents = append(parents, o.Checkpoint)
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: []string{b.Identity()}, ID: id, Workflow: c.Workflow, Action: actionName(c.Action), Parents: parents, Ext: ext,
	})
}

func (b *EventBuilder) failure(now time.Time, c *Call, o *Outcome, node string) (*ect.Draft, error) {
	severity, kind := classify(o)
	ext := new(ect.ExtBuilder).
		Text(ect.MemberSeverity, severity).
		Text(ect.MemberErrorType, kind).
		Text(ect.MemberDescription, c.Action+": "+string(o.Cause)).
		Text(ect.MemberCheckpointID, o.Checkpoint).
		Texts(ect.MemberUpstreamErrors, o.UpstreamErrors)
	if len(c.Audience) > 0 { // the upstream
		ext.Text(ect.MemberDownstreamAgent, c.Audience[0])
	}
	// The parents are the tokens of the failed action: the gateway's node and the caller's.
	parents := append(make([]string, 0, len(c.Parents)+1), node)
	if len(c.Parents) < ect.MaxParents {
		parents = append(parents, c.Parents...)
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.errorAudience(c.Issuer, c.Hearers...), ID: b.e.failureID(node), Workflow: c.Workflow,
		Action: string(ect.EventError), Parents: parents, Ext: ext,
	})
}

// maxHearers bounds the audience of an error.
const maxHearers = 16

// errorAudience returns the verifiers of an error that the caller may read, and pass along to others.
func (b *EventBuilder) errorAudience(caller string, hearers ...string) []string {
	all := []string{b.Identity()}
	for _, name := range append([]string{caller}, hearers...) {
		if name != "" && len(all) < maxHearers && !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	return all
}

// classify gives the severity and type of a failure (ATD "Error Signaling"). Calls in doubt
// are critical: a person has to settle them.
func classify(o *Outcome) (severity, kind string) {
	switch {
	case o.Verdict == execution.InDoubt && o.Cause == execution.CauseDeadline:
		return "critical", "timeout"
	case o.Verdict == execution.InDoubt:
		return "critical", "unknown"
	case o.Cause == execution.CauseNotSent:
		return "error", "action_failed"
	case o.Status == 429:
		return "warning", "resource_exhausted"
	case o.Verdict == execution.Released:
		return "warning", "constraint_violation"
	case len(o.UpstreamErrors) > 0:
		return "error", "upstream_cascade"
	case o.Status < 500 && o.Cause != execution.CauseInBand:
		return "warning", "action_failed"
	default:
		return "error", "action_failed"
	}
}

// Circuit is a change of a circuit breaker's state (cascade 3.2.4).
type Circuit struct {
	// Event is ect.EventCircuitOpen, ect.EventCircuitHalfOpen or ect.EventCircuitClose.
	Event ect.Event
	// Downstream is the identity of the upstream; its address if that is unknown.
	Downstream string
	// Workflow is that of the failure that opened it; it may be empty.
	Workflow string
	// Parents are the ids of the error that opened it, or of its last opening.
	Parents []string
	// ErrorRate is the rate in the window when it opened, 0 to 1.
	ErrorRate float64
	// Window is the length of that window.
	Window time.Duration
	// Cooldown is how long it stays open, TotalCooldown the sum since it was closed.
	Cooldown, TotalCooldown time.Duration
	// Reason is the breaker.Reason.
	Reason string
	// ErrorType is the type of the error that a call got; it may be empty.
	ErrorType string
}

// Circuit drafts the token of a change (cascade Figures 4 and 5).
func (b *EventBuilder) Circuit(now time.Time, c *Circuit) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberDownstreamAgent, c.Downstream).
		Optional(ect.MemberReason, c.Reason).
		Optional(ect.MemberErrorType, c.ErrorType)
	if c.Event == ect.EventCircuitClose {
		ext.Number(ect.MemberTotalCooldown, c.TotalCooldown.Seconds())
	} else {
		ext.Number(ect.MemberErrorRate, c.ErrorRate).
			Number(ect.MemberWindow, c.Window.Seconds()).
			Number(ect.MemberCooldown, c.Cooldown.Seconds())
	}
	return b.issuer.Draft(now, ect.Claims{Audience: []string{b.Identity()}, Workflow: c.Workflow, Action: string(c.Event), Parents: c.Parents, Ext: ext})
}

// Cascade is a failure that spreads from one agent to others (cascade 3.4.3).
type Cascade struct {
	// Workflow is the one in which it was found; empty for breakers of no workflow.
	Workflow string
	// Parents are the ids of the errors and openings that show it.
	Parents []string
	// Pattern is depth_first, breadth_first or clustering, and Class what has failed: agent, service or
	// infrastructure (cascade 3.1.1).
	Pattern, Class string
	// Root is the id of the token in which it began, and Description says why that one.
	Root, Description string
	// Cascade is its id for people, and Round how often it was recorded before.
	Cascade string
	Round   int // see Cascade
	// Agents is how many agents are affected, Reach their identities: as many as fit are written.
	Agents int
	Reach  []string // see Agents
	// Downstream is the upstream behind it, if one is known, and Target the system that the calls which have
	// failed change, if that is what they have in common.
	Downstream, Target string
}

// Cascade drafts the alert (cascade Figure 6). The same alert has the same id, so that it is recorded once.
func (b *EventBuilder) Cascade(now time.Time, c *Cascade) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberPattern, c.Pattern).
		Int(ect.MemberAffectedAgents, int64(c.Agents)).
		Text(ect.MemberRootCause, c.Root).
		Texts(ect.MemberBlastRadius, c.Reach).
		Text(memberClass, c.Class).
		Text(memberAlert, c.Cascade).
		Optional(ect.MemberDescription, c.Description).
		Optional(ect.MemberDownstreamAgent, c.Downstream).
		Optional(ect.MemberTarget, c.Target)
	return b.issuer.Draft(now, ect.Claims{
		Audience: []string{b.Identity()}, ID: b.e.secretID("cascade", c.Cascade+" "+c.Workflow+" "+strconv.Itoa(c.Round)), Workflow: c.Workflow, Action: string(ect.EventCascadeDetected),
		Parents: c.Parents[:min(len(c.Parents), ect.MaxParents)], Ext: ext,
	})
}

// Attempt is a failure of an upstream that no outcome reports: its call is not guarded, or
// succeeded elsewhere.
type Attempt struct {
	// Downstream is the identity of the upstream, or its address where none is known.
	Downstream string
	// Cause says in a few words what happened.
	Cause string
	// Checkpoint is that of the call and Workflow the checkpoint's, empty for an unguarded
	// call. ID is the Evidence.AttemptID of the checkpoint; a fresh one if empty.
	Checkpoint, ID, Workflow string
}

// Attempt drafts the error of such a failure, as a parent of the opening of a breaker. Its
// own parent is the call's checkpoint.
func (b *EventBuilder) Attempt(now time.Time, a *Attempt) (*ect.Draft, error) {
	var parents []string
	if a.Checkpoint != "" {
		parents = []string{a.Checkpoint}
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: []string{b.Identity()}, ID: a.ID, Workflow: a.Workflow, Action: string(ect.EventError), Parents: parents,
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, "error").
			Text(ect.MemberErrorType, "action_failed").
			Text(ect.MemberDescription, a.Cause).
			Text(ect.MemberDownstreamAgent, a.Downstream).
			Text(ect.MemberCheckpointID, a.Checkpoint).
			Bool(memberAttempt, true),
	})
}

// Rejection is a call that was refused, or kept waiting, before anything was recorded about it.
type Rejection struct {
	// ID is the Evidence.RejectionID.
	ID string
	// Downstream is the upstream's identity, or its address.
	Downstream string
	// Workflow is that of the call, Issuer the identity that its tokens prove, and Caller
	// the keyed hash of the caller, by which the caller finds the error.
	Workflow, Issuer string
	Caller           execution.CallerHash
	// Parents are the recorded tokens that led to the call.
	Parents []string
	// ErrorType is the cascade.error_type, Severity the cascade.severity, Description what is said to
	// people.
	ErrorType, Severity, Description string
}

// RejectionID is the id of the error about the calls of a caller in a workflow that a breaker refuses
// in its present generation, or that wait for a bulkhead in an hour.
func (e *Evidence) RejectionID(upstream string, generation uint64, workflow, caller string) string {
	return e.secretID("error of rejection", upstream+" "+strconv.FormatUint(generation, 10)+" "+workflow+" "+caller)
}

// Rejection drafts the error for the caller (AERR "States"). Its list of upstream errors is
// empty, since none of its parents failed.
func (b *EventBuilder) Rejection(now time.Time, r *Rejection) (*ect.Draft, error) {
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.errorAudience(r.Issuer), ID: r.ID, Workflow: r.Workflow, Action: string(ect.EventError), Parents: r.Parents,
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, r.Severity).
			Text(ect.MemberErrorType, r.ErrorType).
			Text(ect.MemberDescription, r.Description).
			Text(ect.MemberDownstreamAgent, r.Downstream).
			Texts(ect.MemberUpstreamErrors, nil).
			Text(memberCaller, hex.EncodeToString(r.Caller[:])).
			Bool(memberAttempt, true),
	})
}

// AttemptID is the id of the Attempt of an upstream in the call with this checkpoint.
func (e *Evidence) AttemptID(checkpoint, upstream string) string {
	return e.secretID("error of attempt", checkpoint+" "+upstream)
}

// ErrorID is the id of the error of the call with this checkpoint, if it fails.
func (e *Evidence) ErrorID(checkpoint string) string {
	return e.failureID(e.NodeID(checkpoint))
}

// CallOf describes a recorded call. Workflow and parents are those of its checkpoint, if
// the ledger has that.
func (e *Evidence) CallOf(ctx context.Context, key execution.Key, r *execution.Record) Call {
	c := Call{Key: key, Caller: r.Caller, Action: r.Action, Workflow: WorkflowID(r.Workflow)}
	for _, workflow := range []string{c.Workflow, NamedWorkflowID(r.Workflow)} {
		entry, err := e.log.Lookup(ctx, workflow, r.Checkpoint)
		if err == nil {
			c.Workflow, c.Parents = workflow, entry.Parents
			c.Node, _ = extension(&entry).Text(MemberNode)
			break
		}
	}
	return c
}

// RecordOrphan records that an execution is in doubt, unless that is recorded already.
func (e *Evidence) RecordOrphan(ctx context.Context, b *EventBuilder, key execution.Key, r *execution.Record) error {
	c := e.CallOf(ctx, key, r)
	if recorded, err := e.log.Has(ctx, c.Workflow, e.NodeID(r.Checkpoint)); err != nil || recorded {
		return err
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return err
	}
	drafts, err := b.Outcome(now, &c, &Outcome{Checkpoint: r.Checkpoint, Verdict: execution.InDoubt, Cause: r.Cause, Status: r.Status})
	if err != nil {
		return err
	}
	err = e.Append(ctx, now.Add(r.KeepResult), nil, drafts...)
	if errors.Is(err, ledger.ErrDuplicate) {
		return nil // another node was first
	}
	return err
}

// Former are the gateway's earlier names, with the keys that it used under each.
func (b *EventBuilder) Former() []ect.Former { return b.former }

// Names are all names of the gateway, the current one first.
func (b *EventBuilder) Names() []string {
	all := []string{b.Identity()}
	for _, f := range b.former {
		all = append(all, f.Name)
	}
	return all
}

// Source gives the gateway's own keys, for all its names.
func (b *EventBuilder) Source() (ect.Source, error) {
	owner, err := ect.ParseOwner(b.Identity())
	return b.e.ring.Source(owner, b.former...), err
}

// Issued reports whether a verified token is the gateway's.
func (b *EventBuilder) Issued(t *ect.Token) bool {
	return t.Issuer() == b.Identity() || b.e.ring.Signed(t, b.former)
}

// Own reports whether an entry is the gateway's. Under an earlier name it must be signed
// with a key that the gateway used with that name: others may have had the name too.
func (b *EventBuilder) Own(entry *ledger.Entry) bool {
	if entry.Issuer == b.Identity() {
		return true
	}
	if !slices.ContainsFunc(b.former, func(f ect.Former) bool { return f.Name == entry.Issuer }) {
		return false
	}
	if entry.Header != nil {
		return true // only the gateway's events are recorded unsigned
	}
	sum := sha256.Sum256(entry.Payload)
	if own, ok := b.ownEntries.find("", string(sum[:])); ok {
		return own
	}
	own := b.signed(entry)
	b.ownEntries.add(scope{"", string(sum[:])}, own)
	return own
}

// signed verifies an entry's token under the gateway's own keys.
func (b *EventBuilder) signed(entry *ledger.Entry) bool {
	source, err := b.Source()
	if err != nil {
		return false
	}
	seen, err := ect.ParseInsecure(string(entry.Payload))
	if err != nil {
		return false
	}
	v, err := ect.NewVerifier(ect.Policy{
		Audience: append(seen.Audience(), b.Identity()), Sources: []ect.Source{source}, Algorithms: ect.Algorithms(),
		AnyID: true, AllowPartial: true,
	})
	if err != nil {
		return false
	}
	token, err := v.VerifyStored(context.Background(), string(entry.Payload))
	return err == nil && b.e.ring.Signed(token, b.former)
}
