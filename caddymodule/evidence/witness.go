package evidence

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// The gateway's own extension members, in the nodes that tell what came of a call.
const (
	// MemberOutcome is completed, released or in_doubt.
	MemberOutcome ect.Member = "agent_guard.outcome"
	// MemberCause says why, in the words of guard.Cause.
	MemberCause ect.Member = "agent_guard.cause"
	// MemberStatus is the status of the upstream's answer.
	MemberStatus ect.Member = "agent_guard.status"
	// MemberCaller is the keyed hash of the caller, in hexadecimal.
	MemberCaller ect.Member = "agent_guard.caller"
	// MemberExecution is the short form of the execution key.
	MemberExecution ect.Member = "agent_guard.execution"
	// MemberRetry marks what is told to the tokens of a retry.
	MemberRetry ect.Member = "agent_guard.retry"
	// MemberAttempt marks the error of an upstream, or of a rollback, that says nothing about
	// its call: what came of that, its node tells.
	MemberAttempt ect.Member = "agent_guard.attempt"
	// MemberBy says who settled a doubt: an operator or a probe.
	MemberBy ect.Member = "agent_guard.settled_by"
)

// Witness tells of calls in the name of one identity.
type Witness struct {
	e      *Evidence
	issuer *ect.Issuer
	former []ect.Former  // names of before
	judged *recent[bool] // whether entries under these are the gateway's, by the hash of their tokens
}

// Witness makes tokens for an identity. Life is ect.DefaultLife if zero.
func (e *Evidence) Witness(identity string, spelling ect.Spelling, life time.Duration) (*Witness, error) {
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: identity, Ring: e.ring, Spelling: spelling, Life: life})
	if err != nil {
		return nil, err
	}
	return &Witness{e, issuer, e.former(identity), newRecent[bool]()}, nil
}

// Identity is the issuer of all tokens.
func (w *Witness) Identity() string { return w.issuer.Identity() }

// Call is what evidence says of a call.
type Call struct {
	// Key is the execution key.
	Key guard.Key
	// Caller is the keyed hash of the caller.
	Caller guard.CallerHash
	// Action is the configured name of the action.
	Action string
	// Workflow is the id of the workflow as WorkflowID gives it; it may be empty.
	Workflow string
	// Parents are the ids of the tokens that led to the call.
	Parents []string
	// Target is the system that the call changes.
	Target string
	// RollbackURI is where a rollback of the call is asked for, never made of what a
	// caller has sent.
	RollbackURI string
	// Description says in words what the call does; Action where it is empty.
	Description string
	// TTL is how long the call can be rolled back.
	TTL time.Duration
	// Checkpoint is the id of the checkpoint's token; a fresh one is made where it is
	// empty. State is the hash of what is kept for undoing the call, zero without any, and
	// Reversible says that this undoes it.
	Checkpoint string
	State      ect.Hash // See Checkpoint.
	Reversible bool     // See Checkpoint.
	// Audience are further verifiers of the checkpoint.
	Audience []string
}

// WorkflowID is the UUID of a workflow. A UUID stands for itself and a trace id for the
// UUID of the same digits; of any other name one is derived, always the same.
func WorkflowID(name string) string {
	if name == "" {
		return ""
	}
	if id, err := uuid.Parse(name); err == nil && (len(name) == 36 || len(name) == 32) && id != uuid.Nil && id != uuid.Max {
		return id.String()
	}
	return NamedWorkflowID(name)
}

// NamedWorkflowID is the UUID of a workflow that is known by nothing but its name: never
// one that tokens name.
func NamedWorkflowID(name string) string { return derived("agent_guard workflow", name) }

// JointID is the execution id of a call whose caller has sent several tokens and no
// other id: the same for the same tokens.
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

// actionName is the exec_act of an action. An action that is called like an event of
// the drafts would be read as one.
func actionName(action string) string {
	if _, ok := ect.ParseEvent(action); ok {
		return "call:" + action
	}
	return action
}

// Checkpoint drafts the token that announces a call (cascade 4.2.1). It is recorded
// before anything leaves.
func (w *Witness) Checkpoint(now time.Time, c *Call) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Bool(ect.MemberReversible, c.Reversible).
		Text(ect.MemberRollbackURI, c.RollbackURI).
		Text(ect.MemberTarget, c.Target).
		Text(ect.MemberDescription, cmp.Or(c.Description, c.Action)).
		Int(ect.MemberTTL, int64(c.TTL/time.Second)).
		Text(MemberCaller, hex.EncodeToString(c.Caller[:])).
		Text(MemberExecution, c.Key.String())
	return w.issuer.Draft(now, ect.Claims{
		Audience: append([]string{w.Identity()}, c.Audience...), ID: c.Checkpoint, Workflow: c.Workflow,
		Action: string(ect.EventCheckpoint), Parents: c.Parents, Output: c.State, Ext: ext,
	})
}

// Sign signs a draft at once, for those who cannot wait for the sequencer.
func (w *Witness) Sign(d *ect.Draft) (*ect.Token, error) { return w.issuer.Sign(d) }

// Outcome is what came of a call.
type Outcome struct {
	Checkpoint string
	Verdict    guard.Verdict
	Cause      guard.Cause
	Status     int
	// By says who settled a doubt; empty for the call itself.
	By string
	// UpstreamErrors are the ids of the errors that the upstream has told of.
	UpstreamErrors []string
}

// failed reports that the call did not do what its caller wanted, or may not have.
func (o *Outcome) failed() bool {
	return o.By == "" && (o.Verdict != guard.Completed || o.Status >= 400)
}

// NodeID is the id of the node that tells what came of the call with a checkpoint: it
// can be told once, in whatever life of the gateway. How a doubt was settled is told by
// another one. Nobody else can make these ids: whoever took one before would keep the
// outcome from being recorded (P6).
func (e *Evidence) NodeID(checkpoint string) string { return e.secretID("outcome node", checkpoint) }

// SettledID is the id of the node that tells how a doubt about that call was settled.
func (e *Evidence) SettledID(checkpoint string) string { return e.secretID("settled node", checkpoint) }

func (e *Evidence) secretID(domain, name string) string {
	hash := e.sealer.Index(domain, name)
	return asUUID([16]byte(hash[:16]))
}

// Outcome drafts the action's node, and an error where the call has failed (ATD "Error
// Signaling"). The node follows from the call's parents and from its checkpoint.
func (w *Witness) Outcome(now time.Time, c *Call, o *Outcome) ([]*ect.Draft, error) {
	id := w.e.NodeID(o.Checkpoint)
	if o.By != "" {
		id = w.e.SettledID(o.Checkpoint)
	}
	ext := new(ect.ExtBuilder).
		Text(MemberOutcome, o.Verdict.String()).
		Text(MemberCaller, hex.EncodeToString(c.Caller[:])).
		Text(MemberExecution, c.Key.String())
	if o.Cause != "" {
		ext.Text(MemberCause, string(o.Cause))
	}
	if o.Status != 0 {
		ext.Int(MemberStatus, int64(o.Status))
	}
	if o.By != "" {
		ext.Text(MemberBy, o.By)
	}
	if len(o.UpstreamErrors) > 0 && !o.failed() { // else the error names them
		ext.Texts(ect.MemberUpstreamErrors, o.UpstreamErrors)
	}
	parents := append(make([]string, 0, len(c.Parents)+1), c.Parents...)
	if len(parents) < ect.MaxParents {
		parents = append(parents, o.Checkpoint)
	}
	node, err := w.issuer.Draft(now, ect.Claims{
		Audience: []string{w.Identity()}, ID: id, Workflow: c.Workflow, Action: actionName(c.Action), Parents: parents, Ext: ext,
	})
	if err != nil {
		return nil, err
	}
	if !o.failed() {
		return []*ect.Draft{node}, nil
	}
	failure, err := w.failure(now, c, o, id)
	return []*ect.Draft{node, failure}, err
}

// Retold drafts the node that tells what came of a call to those of its caller's tokens
// that came with a retry.
func (w *Witness) Retold(now time.Time, c *Call, o *Outcome) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(MemberOutcome, o.Verdict.String()).
		Text(MemberCaller, hex.EncodeToString(c.Caller[:])).
		Text(MemberExecution, c.Key.String()).
		Bool(MemberRetry, true)
	if o.Cause != "" {
		ext.Text(MemberCause, string(o.Cause))
	}
	if o.Status != 0 {
		ext.Int(MemberStatus, int64(o.Status))
	}
	parents := append(make([]string, 0, len(c.Parents)+1), c.Parents...)
	if len(parents) < ect.MaxParents {
		parents = append(parents, o.Checkpoint)
	}
	return w.issuer.Draft(now, ect.Claims{
		Audience: []string{w.Identity()}, Workflow: c.Workflow, Action: actionName(c.Action), Parents: parents, Ext: ext,
	})
}

func (w *Witness) failure(now time.Time, c *Call, o *Outcome, node string) (*ect.Draft, error) {
	severity, kind := classify(o)
	ext := new(ect.ExtBuilder).
		Text(ect.MemberSeverity, severity).
		Text(ect.MemberErrorType, kind).
		Text(ect.MemberDescription, c.Action+": "+string(o.Cause)).
		Text(ect.MemberCheckpointID, o.Checkpoint).
		Texts(ect.MemberUpstreamErrors, o.UpstreamErrors)
	// Of the action that failed: the caller's own token, and our node of it.
	parents := append(make([]string, 0, len(c.Parents)+1), node)
	if len(c.Parents) < ect.MaxParents {
		parents = append(parents, c.Parents...)
	}
	return w.issuer.Draft(now, ect.Claims{
		Audience: []string{w.Identity()}, ID: w.e.secretID("error of node", node), Workflow: c.Workflow,
		Action: string(ect.EventError), Parents: parents, Ext: ext,
	})
}

// classify gives severity and type of a failure, in ATD's words ("Error Signaling").
// What is in doubt needs a person.
func classify(o *Outcome) (severity, kind string) {
	switch {
	case o.Verdict == guard.InDoubt && o.Cause == guard.CauseDeadline:
		return "critical", "timeout"
	case o.Verdict == guard.InDoubt:
		return "critical", "unknown"
	case o.Cause == guard.CauseNotSent:
		return "error", "action_failed"
	case o.Status == 429:
		return "warning", "resource_exhausted"
	case o.Verdict == guard.Released:
		return "warning", "constraint_violation"
	case len(o.UpstreamErrors) > 0:
		return "error", "upstream_cascade"
	case o.Status < 500:
		return "warning", "action_failed"
	default:
		return "error", "action_failed"
	}
}
