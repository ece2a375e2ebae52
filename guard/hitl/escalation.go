// Package hitl keeps the cases that need a human in the loop: an Escalation is recorded durably
// before anybody says "escalated" (A-basic-rollback-g), and then somebody is notified.
//
// A Store records, finds and lists escalations, and counts what people decide about them: see
// Store.Decide. One can be opened in the commit of the event that causes it: see Store.Prepare.
// Store.Deliver notifies somebody of each open one at least once, also after a restart.
//
// The package knows neither HTTP servers nor Caddy. It keeps everything in a store.Store, sealed
// (P8).
package hitl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Level says what a human should review before it goes on (ATD, Interaction with HITL).
type Level uint8

// The levels.
const (
	// Pause: the workflow, before its next step. Its new calls wait until it is resumed.
	Pause Level = 1 + iota
	// Approval: the one step that needs it.
	Approval
	// Stop: the workflow as a whole. Its new calls are refused until it is resumed.
	Stop
)

// String is the word used in documents and logs.
func (l Level) String() string {
	switch l {
	case Pause:
		return "pause"
	case Approval:
		return "approval"
	case Stop:
		return "stop"
	default:
		return fmt.Sprintf("level_%d", uint8(l))
	}
}

// Cause is why an escalation was opened. A reader may find causes of a newer build.
type Cause string

// The causes.
const (
	// CauseIrreversible: the call to undo is irreversible (cascade 4.2.1).
	CauseIrreversible Cause = "irreversible_rollback"
	// CauseRollbackFailed: a rollback ended as failed (ATD, HITL case 2).
	CauseRollbackFailed Cause = "rollback_failed"
	// CauseRollbackTimeout: a rollback was not done within half of the checkpoint's ttl.
	CauseRollbackTimeout Cause = "rollback_timeout"
	// CauseRollbackPartial: a rollback undid a part, or can undo no more than a part.
	CauseRollbackPartial Cause = "rollback_partial"
	// CauseBreakerOpen: an upstream does not come back (ATD, HITL case 4).
	CauseBreakerOpen Cause = "breaker_permanently_open"
	// CauseTampered: a checkpoint differs from its record.
	CauseTampered Cause = "checkpoint_tampered"
	// CauseBoundary: a failure would cross into another workflow (cascade 3.3.2).
	CauseBoundary Cause = "workflow_boundary"
	// CauseCall: a call waits for an approval, by its action or by a rule.
	CauseCall Cause = "approval_required"
	// CauseError: an error is critical, or fits a rule (ATD, HITL Escalation on Error).
	CauseError Cause = "critical_error"
	// CauseFailed: a call has failed, and nothing rolls it back (ATD, Error Signaling).
	CauseFailed Cause = "call_failed"
	// CauseReach: a rollback, or an error, affects more than three agents (cascade 3.4.3).
	CauseReach Cause = "many_agents"
	// CauseCritical: a rollback is about to undo a critical node (ATD, HITL case 3), or cannot.
	CauseCritical Cause = "critical_node"
	// CauseShared: several breakers have opened on one downstream (ATD, "Coordinated Circuit Breaking").
	CauseShared Cause = "shared_dependency"
	// CauseUnserved: a critical call finds no place at its upstream (ATD, "Unsatisfiable Resource
	// Hints").
	CauseUnserved Cause = "resource_exhausted"
	// CauseOther: see the summary.
	CauseOther Cause = "other"
)

// causes lists the causes with which an escalation may be opened.
func causes() []Cause {
	return []Cause{
		CauseIrreversible, CauseRollbackFailed, CauseRollbackTimeout, CauseRollbackPartial, CauseBreakerOpen,
		CauseTampered, CauseBoundary, CauseCall, CauseError, CauseFailed, CauseReach, CauseCritical,
		CauseShared, CauseUnserved, CauseOther,
	}
}

// State is the state of an escalation's notification; Status is that of the decision.
type State string

// The states.
const (
	// Open: not delivered yet. Such an escalation never expires.
	Open State = "open"
	// Notified: the notifier has accepted it.
	Notified State = "notified"
	// Undeliverable: the notifier refused it for good. It still needs a human.
	Undeliverable State = "undeliverable"
)

// States lists the states, in the order in which they are documented.
func States() []State { return []State{Open, Notified, Undeliverable} }

// Links lead from an escalation to its subjects. All are optional, and cut at 2,048 bytes.
type Links struct {
	// Checkpoint and Error are ids of tokens, Rollback is a rollback's id.
	Checkpoint string `json:"checkpoint,omitempty"`
	Rollback   string `json:"rollback,omitempty"` // see Checkpoint
	Error      string `json:"error,omitempty"`    // see Checkpoint
	// Execution is the hash by which operators name an execution: the execution key in hexadecimal.
	Execution string `json:"execution,omitempty"`
	// Upstream is an upstream's address.
	Upstream string `json:"upstream,omitempty"`
}

// Opening is a request to a human. It holds nothing secret: it is sent to the notifier unchanged
// (P8).
type Opening struct {
	// Key names the occasion, say a rollback id and a checkpoint: while an escalation is kept,
	// the same key is the same one. It is not stored.
	Key string
	// Level is Pause, Approval or Stop.
	Level Level
	// Cause is one of Causes.
	Cause Cause
	// Summary is a sentence for people; it is cut at 1,024 bytes.
	Summary string
	// Workflow and Caller may be empty; they are cut at 2,048 bytes. Caller is the name that
	// operators know, never a credential.
	Workflow, Caller string
	Links            Links

	// Proposal is what an approval does. With level Pause or Stop and a workflow the escalation
	// holds that, and without a kind it proposes to resume it.
	Proposal Proposal
	// Role is required of who decides, at most 128 bytes; empty is DefaultRole.
	Role string
	// Quorum is how many have to approve, at most 16; zero is one. One denial denies.
	Quorum int
	// Within is the time to decide; zero is without end. Once it is over, it counts as a denial, or
	// Unreachable says more.
	Within      time.Duration
	Unreachable Unreachable // see Within
	// Final says that no approval counts, so that nothing is proposed by itself.
	Final bool
	// Requester is who asked, and cannot approve; cut at 2,048 bytes, and not sent to the notifier.
	Requester string

	// Participants are the gateways that hold the workflow, too, and hear when it is resumed; at most
	// 64. Only Agent and URI of each count.
	Participants []Participant
	// Notice says that nobody is asked or notified: it was decided elsewhere. Lifted says that it does
	// not hold its workflow here, or not any more.
	Notice, Lifted bool
}

// errOpening: the Opening is incomplete.
var errOpening = errors.New("hitl: the escalation cannot be opened")

func (o *Opening) check() error {
	switch {
	case o.Key == "":
		return fmt.Errorf("%w: key is empty; it names the occasion", errOpening)
	case o.Level < Pause || o.Level > Stop:
		return fmt.Errorf("%w: level is %d; use 1 (pause), 2 (approval) or 3 (stop)", errOpening, o.Level)
	case !slices.Contains(causes(), o.Cause):
		return fmt.Errorf("%w: cause is %q; use one of %q", errOpening, o.Cause, causes())
	case o.Summary == "":
		return fmt.Errorf("%w: summary is empty; write a sentence for whoever has to decide", errOpening)
	case !slices.Contains([]ProposalKind{"", RunCall, Resume, PartialRollback, ContinueRollback}, o.Proposal.Kind):
		return fmt.Errorf("%w: proposal is %q, which nothing carries out", errOpening, o.Proposal.Kind)
	case len(o.Proposal.Hash()) > maxHash || len(o.Role) > maxRole:
		return fmt.Errorf("%w: hash or role is longer than 128 bytes", errOpening)
	case o.Unreachable.Check() != nil:
		return fmt.Errorf("%w: %w", errOpening, o.Unreachable.Check())
	case len(o.Participants) > maxParticipants:
		return fmt.Errorf("%w: %d participants, at most %d", errOpening, len(o.Participants), maxParticipants)
	case o.Quorum < 0 || o.Quorum > maxQuorum || o.Within < 0:
		return fmt.Errorf("%w: quorum is %d and the time %s; use up to %d, and no negative time", errOpening, o.Quorum, o.Within, maxQuorum)
	}
	return nil
}

// Escalation is the record of an Opening: a case that only a person can decide. Its members are an API; what
// nobody is shown is Private. It is sealed in the store.
type Escalation struct {
	// ID is a UUID derived from the opening's key and the store's index key: known before the
	// commit, and revealing nothing of the key. A key that is opened again after its escalation
	// has expired gets the same id.
	ID string `json:"id"`
	// Level is 1 (pause), 2 (approval) or 3 (stop), LevelName the word.
	Level     Level  `json:"level"`
	LevelName string `json:"level_name"` // see Level
	State     State  `json:"state"`
	// Cause is a fixed word, Summary a sentence.
	Cause   Cause  `json:"cause"`
	Summary string `json:"summary"` // see Cause
	// Workflow and Caller are those of the case.
	Workflow string `json:"workflow,omitempty"`
	Caller   string `json:"caller,omitempty"` // see Workflow
	// WorkflowName is the caller's name of the workflow, if that is another one; for operators. It is not stored.
	WorkflowName string `json:"workflow_name,omitempty" cbor:"-"`
	// Links has the ids of what the case is about.
	Links Links `json:"links"`
	// Opened is when it was opened, Changed when its state or status last changed.
	Opened  time.Time `json:"opened"`
	Changed time.Time `json:"changed"` // see Opened
	// Attempts counts the attempts to notify somebody, and LastError is why the last one failed, at most 512 bytes;
	// empty if it did not.
	Attempts  int    `json:"attempts"`
	LastError string `json:"last_error,omitempty"` // see Attempts
	// NextAttempt is when the next attempt is due; zero if none is. During an attempt it is when another
	// dispatcher may take over, because this one must have died.
	NextAttempt time.Time `json:"next_attempt,omitzero"`
	Status      Status    `json:"status"`
	// Proposal is what an approval does; it is missing if there is nothing to do.
	Proposal Proposal `json:"proposal,omitzero"`
	// RequiredRole is that of who may decide; who has the admin API has every role. Quorum is
	// how many have to approve, if that is more than one.
	RequiredRole string `json:"required_role"`
	Quorum       int    `json:"quorum,omitempty"` // see RequiredRole
	// Requester is who asked, and cannot approve.
	Requester string `json:"requester,omitempty"`
	// Deadline is when it expires undecided, and Unreachable happens; zero is never.
	Deadline time.Time `json:"deadline,omitzero"`
	Unreachable
	// Held says that it keeps new calls of its workflow from beginning, until it is approved.
	Held bool `json:"held,omitempty"`
	// Participants are the gateways that are told what it holds.
	Participants []Participant `json:"participants,omitempty"`
	// Decisions are what people said, the latest last.
	Decisions []Decision `json:"decisions,omitempty"`
	// Token is the id of the token that says that it was opened, Resolution that of the latest
	// decision; empty where no ledger is kept.
	Token      string `json:"token,omitempty"`
	Resolution string `json:"resolution,omitempty"` // see Token

	// Page is the URL of a page that shows and decides it, for Delivery.Notify. It is not stored.
	Page    string `json:"-"`
	Private `json:"-" cbor:"private"`
}

// Private is what is stored with an Escalation, and shown to nobody.
type Private struct {
	// Final and Notice are those of the Opening.
	Final  bool
	Notice bool // see Final
	// Round counts how often the question was asked again.
	Round int
	// Approvals is how many of the Decisions, the last ones, are approvals of this round.
	Approvals int
	// Tokens are the hashes of the tokens that have decided. Each counts once.
	Tokens []string
	// Boot is that of the member of a shared store that makes an attempt; empty otherwise. Once it is gone,
	// another one takes over at once.
	Boot string
}

// Longest recorded forms, in bytes. They keep a record far below store.MaxValue.
const (
	maxSummary = 1024
	maxText    = 2048
	maxError   = 512
)

// shorten cuts s to at most that many bytes, at a character's end.
func shorten(s string, most int) string {
	if len(s) > most {
		s = s[:most]
		for len(s) > 0 {
			if r, n := utf8.DecodeLastRuneInString(s); r != utf8.RuneError || n != 1 {
				break
			}
			s = s[:len(s)-1]
		}
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// check reports whether a record is an escalation: an unreadable one must not pass for one that holds nothing.
func (e *Escalation) check() error {
	if e.Level == 0 || e.State == "" || e.Status == "" {
		return errors.New("it has no level, state or status")
	}
	return nil
}

// indexed is the value of an escalation's index entries by age, by which listings select.
func (e *Escalation) indexed() []byte {
	return fmt.Appendf(nil, "%d %s %s %t", e.Level, e.State, e.Status, e.Held)
}

// readIndexed reads what indexed wrote, as far as that goes.
func readIndexed(value []byte) (e Escalation) {
	if words := strings.Fields(string(value)); len(words) == 4 {
		e.Level, e.State, e.Status, e.Held = Level(words[0][0]-'0'), State(words[1]), Status(words[2]), words[3] == "true"
	}
	return e
}

// The store's keys of escalations. Nothing of a caller is readable in them; only times,
// levels, states and statuses are plain.
//
//	h e id                        the escalation, sealed
//	h t opened id                 index: all by age; see Escalation.indexed
//	h w workflow opened id        index: a workflow's by age; the same value
//	h v workflow                  changes whenever something begins to hold the workflow, where gateways share the store
//	h u level due id              index: those to be delivered
//	h b id                        index: what holds a workflow, with its hash, or counts for its requester
//	h d deadline id               index: the pending ones that expire
//	h r id                        index: those whose participants have not confirmed what holds
const (
	space           = 'h'
	kindRecord      = 'e'
	kindAge         = 't'
	kindWorkflow    = 'w'
	kindUndelivered = 'u'
	kindHold        = 'b'
	kindDeadline    = 'd'
	kindReach       = 'r'
	kindFence       = 'v'
)

// idOf is the id of an occasion's escalation: a UUID of version 8 (RFC 9562), whose bits the
// maker defines.
func (d *Store) idOf(key string) uuid.UUID {
	hash := store.Index(d.sealer, "escalation", key)
	id := uuid.UUID(hash[:16])
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

func recordKey(id uuid.UUID) []byte { return append([]byte{space, kindRecord}, id[:]...) }

func appendPlace(b []byte, at time.Time, id uuid.UUID) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(at.UnixNano()))
	return append(b, id[:]...)
}

func ageKey(opened time.Time, id uuid.UUID) []byte {
	return appendPlace([]byte{space, kindAge}, opened, id)
}

func (d *Store) workflowPrefix(workflow string) []byte {
	hash := d.hashOf(workflow)
	return append([]byte{space, kindWorkflow}, hash[:]...)
}

func (d *Store) fenceKey(workflow string) []byte {
	hash := d.hashOf(workflow)
	return append([]byte{space, kindFence}, hash[:]...)
}

// workflowHash is the keyed hash of a workflow's name.
type workflowHash [16]byte

func (d *Store) hashOf(workflow string) workflowHash {
	hash := store.Index(d.sealer, "escalation workflow", shorten(workflow, maxText))
	return workflowHash(hash[:])
}

// undelivered is the part of the index that holds one level.
func undelivered(l Level) []byte { return []byte{space, kindUndelivered, byte(l)} }

func dueKey(l Level, due time.Time, id uuid.UUID) []byte { return appendPlace(undelivered(l), due, id) }

const placeSize = 8 + 16

// placeIn is the time and the id at the end of an index entry's key.
func placeIn(name []byte) (time.Time, uuid.UUID) {
	end := name[len(name)-placeSize:]
	return time.Unix(0, int64(binary.BigEndian.Uint64(end))).UTC(), uuid.UUID(end[8:])
}

// expires is when the record expires: never before its notification, nor while it holds a workflow,
// proposes something, counts for its requester, has to reach participants, or is to be lifted for them.
func (e *Escalation) expires() time.Time {
	if e.unsettled() || e.State == Open || e.Held || e.Status == Pending && e.Proposal.Kind != "" || e.waits() {
		return time.Time{}
	}
	return e.Changed.Add(keep)
}

// put is the batch that changes an escalation from old, which may be nil, to new, with its index
// entries. The record comes first.
func (d *Store) put(id uuid.UUID, old, new *Escalation, condition store.Condition) []store.Write {
	expires, hold := new.expires(), new.Hold()
	new.Participants = slices.Clone(new.Participants)
	for i := range new.Participants {
		new.Participants[i].State = hold
	}
	batch := make([]store.Write, 1, 8)
	batch[0] = d.records.Put(recordKey(id), new, condition, expires)
	if old == nil || old.State != new.State || old.Status != new.Status || !old.Changed.Equal(new.Changed) {
		value := new.indexed()
		batch = append(batch, store.Write{Key: ageKey(new.Opened, id), Value: value, Expires: expires})
		if new.Workflow != "" {
			of := appendPlace(d.workflowPrefix(new.Workflow), new.Opened, id)
			batch = append(batch, store.Write{Key: of, Value: value, Expires: expires})
		}
	}
	if old != nil && old.due() && !(new.due() && old.NextAttempt.Equal(new.NextAttempt)) {
		batch = append(batch, store.Write{Key: dueKey(old.Level, old.NextAttempt, id), Delete: true})
	}
	if new.due() && !(old != nil && old.due() && old.NextAttempt.Equal(new.NextAttempt)) {
		batch = append(batch, store.Write{Key: dueKey(new.Level, new.NextAttempt, id)})
	}
	if now, before := new.Held || new.waits(), old != nil && (old.Held || old.waits()); now != before {
		hold := store.Write{Key: append([]byte{space, kindHold}, id[:]...), Delete: before}
		if new.Held { // so that a damaged record holds it too
			hash := d.hashOf(new.Workflow)
			hold.Value = hash[:]
		}
		batch = append(batch, hold)
	}
	if new.Held && (old == nil || !old.Held) && d.fences != nil {
		batch = append(batch, store.Write{Key: d.fenceKey(new.Workflow), Expires: new.Changed.Add(keep)})
	}
	if now, before := new.unsettled(), old != nil && old.unsettled(); now != before {
		batch = append(batch, store.Write{Key: append([]byte{space, kindReach}, id[:]...), Delete: before})
	}
	before := time.Time{}
	if old != nil {
		before = old.expiry()
	}
	if at := new.expiry(); !at.Equal(before) {
		if !before.IsZero() {
			batch = append(batch, store.Write{Key: appendPlace([]byte{space, kindDeadline}, before, id), Delete: true})
		}
		if !at.IsZero() {
			batch = append(batch, store.Write{Key: appendPlace([]byte{space, kindDeadline}, at, id)})
		}
	}
	return batch
}

// expiry is when it expires undecided; zero is never.
func (e *Escalation) expiry() time.Time {
	if e.Status != Pending {
		return time.Time{}
	}
	return e.Deadline
}

// due reports whether it is still to be delivered.
func (e *Escalation) due() bool { return e.State == Open && !e.NextAttempt.IsZero() }
