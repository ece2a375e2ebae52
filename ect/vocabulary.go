package ect

import "strings"

// Vocabulary is one of the documents that name actions and extension members. The
// cascade draft supersedes the other two, whose names stay readable.
type Vocabulary uint8

// The vocabularies. Cascade is what is written unless somebody asked in another one.
const (
	Cascade Vocabulary = iota
	ATD
	AERR
)

func (v Vocabulary) String() string { return [...]string{"cascade", "atd", "aerr"}[v] }

// Event is an action with a meaning that the drafts define, by its name in the cascade
// vocabulary.
type Event string

// The events. What Table 1 of the cascade draft lacks has ATD's name without its
// prefix.
const (
	EventCheckpoint       Event = "checkpoint"
	EventError            Event = "error"
	EventCircuitOpen      Event = "circuit_breaker_open"
	EventCircuitHalfOpen  Event = "circuit_breaker_half_open"
	EventCircuitClose     Event = "circuit_breaker_close"
	EventRollbackRequest  Event = "rollback_request"
	EventRollbackStart    Event = "rollback_start"
	EventRollbackComplete Event = "rollback_complete"
	EventCompensate       Event = "compensate"
	EventCascadeDetected  Event = "cascade_detected"
	EventWorkflowStart    Event = "workflow_start"
	EventWorkflowComplete Event = "workflow_complete"
)

// Member is the name of an extension member, in the cascade vocabulary where it has
// one there. Names that no table knows stand for themselves.
type Member string

// The members of Table 2, of the figures, and of what the older drafts have besides.
const (
	MemberDownstreamAgent Member = "cascade.downstream_agent"
	MemberErrorRate       Member = "cascade.error_rate"
	MemberWindow          Member = "cascade.window_s"
	MemberCooldown        Member = "cascade.cooldown_s"
	MemberTotalCooldown   Member = "cascade.total_cooldown_s"
	MemberReversible      Member = "cascade.reversible"
	MemberRollbackURI     Member = "cascade.rollback_uri"
	MemberTarget          Member = "cascade.target"
	MemberTTL             Member = "cascade.ttl"
	MemberRollbackID      Member = "cascade.rollback_id"
	MemberCheckpointID    Member = "cascade.checkpoint_id"
	MemberScope           Member = "cascade.scope"
	MemberStatus          Member = "cascade.status"
	MemberReason          Member = "cascade.reason"
	MemberPattern         Member = "cascade.pattern"
	MemberAffectedAgents  Member = "cascade.affected_agents"
	MemberRootCause       Member = "cascade.root_cause_ect"
	MemberBlastRadius     Member = "cascade.blast_radius"
	MemberCascaded        Member = "cascade.cascaded"
	MemberFailedAgents    Member = "cascade.failed_agents"
	MemberStateBefore     Member = "cascade.state_hash_before"
	MemberStateAfter      Member = "cascade.state_hash_after"
	MemberDescription     Member = "cascade.description"
	MemberSeverity        Member = "cascade.severity"
	MemberErrorType       Member = "cascade.error_type"
	MemberUpstreamErrors  Member = "cascade.upstream_errors"
	MemberCascade         Member = "cascade.cascade"
	MemberActionType      Member = "cascade.action_type"
	MemberWorkflowName    Member = "cascade.wf_id"
	MemberNodeCount       Member = "cascade.node_count"
	MemberTerminalStatus  Member = "cascade.terminal_status"
	MemberElapsed         Member = "cascade.elapsed_s"
	MemberNode            Member = "cascade.node"
)

// kind is the JSON type of a member's value.
type kind uint8

const (
	textKind kind = iota
	numberKind
	boolKind
	listKind
)

// eventTable is every event with its names, and with the members that a token of this
// kind must have, by Figures 4 to 12 of the cascade draft and ATD's table of actions;
// only those that its vocabulary has a name for. An event without a name in a
// vocabulary is written with cascade's.
var eventTable = [...]struct {
	event     Event
	atd, aerr string
	also      string // a second name in aerr, which is written where the claims name it
	needs     []Member
}{
	{event: EventCheckpoint, atd: "atd:checkpoint", aerr: "aerr:checkpoint", needs: []Member{MemberReversible, MemberRollbackURI, MemberTTL}},
	{event: EventError, atd: "atd:error", aerr: "aerr:error", needs: []Member{MemberSeverity, MemberErrorType, MemberCheckpointID}},
	{event: EventCircuitOpen, atd: "atd:circuit_open", aerr: "aerr:circuit_open", needs: []Member{MemberDownstreamAgent, MemberErrorRate, MemberWindow}},
	{event: EventCircuitHalfOpen, aerr: "aerr:circuit_half_open", needs: []Member{MemberDownstreamAgent}},
	{event: EventCircuitClose, atd: "atd:circuit_close", aerr: "aerr:circuit_closed", needs: []Member{MemberDownstreamAgent, MemberTotalCooldown}},
	{event: EventRollbackRequest, atd: "atd:rollback_request", aerr: "aerr:rollback_request", needs: []Member{MemberReason, MemberCascade}},
	{event: EventRollbackStart, needs: []Member{MemberRollbackID, MemberCheckpointID, MemberScope, MemberReason}},
	{event: EventRollbackComplete, atd: "atd:rollback_result", aerr: "aerr:rollback_complete", also: "aerr:rollback_escalated", needs: []Member{MemberStatus}},
	{event: EventCompensate},
	{event: EventCascadeDetected, needs: []Member{MemberPattern, MemberAffectedAgents, MemberRootCause, MemberBlastRadius}},
	{event: EventWorkflowStart, atd: "atd:workflow_start", needs: []Member{MemberWorkflowName, MemberDescription}},
	{event: EventWorkflowComplete, atd: "atd:workflow_complete", needs: []Member{MemberWorkflowName, MemberTerminalStatus}},
}

// memberTable is every extension member that two vocabularies share, or whose type the
// drafts give. A member without a name in a vocabulary is written with cascade's. Lists
// that may grow long are cut to the size of the extensions; what was cut is told
// elsewhere.
var memberTable = [...]struct {
	member    Member
	kind      kind
	atd, aerr string
	cut       bool
}{
	{member: MemberDownstreamAgent, atd: "atd.downstream_agent"},
	{member: MemberErrorRate, kind: numberKind, atd: "atd.error_rate"},
	{member: MemberWindow, kind: numberKind, atd: "atd.window_s"},
	{member: MemberCooldown, kind: numberKind, atd: "atd.cooldown_s"},
	// atd.cooldown_s of a closing breaker is the whole time that it was open.
	{member: MemberTotalCooldown, kind: numberKind, atd: closingCooldown},
	{member: MemberReversible, kind: boolKind, atd: "atd.reversible", aerr: "aerr.reversible"},
	{member: MemberRollbackURI, atd: "atd.rollback_uri", aerr: "aerr.rollback_uri"},
	{member: MemberTarget, atd: "atd.target", aerr: "aerr.target"},
	{member: MemberTTL, kind: numberKind, atd: "atd.ttl", aerr: "aerr.ttl"},
	{member: MemberRollbackID, aerr: "aerr.rollback_id"},
	{member: MemberCheckpointID, atd: "atd.checkpoint_id", aerr: "aerr.checkpoint_id"},
	{member: MemberScope},
	{member: MemberStatus, atd: "atd.status", aerr: "aerr.status"},
	{member: MemberReason, atd: "atd.reason"},
	{member: MemberPattern},
	{member: MemberAffectedAgents, kind: numberKind},
	{member: MemberRootCause},
	{member: MemberBlastRadius, kind: listKind, cut: true},
	{member: MemberCascaded, kind: listKind, atd: "atd.cascaded", aerr: "aerr.cascaded", cut: true},
	{member: MemberFailedAgents, kind: listKind, cut: true},
	{member: MemberStateBefore, aerr: "aerr.state_hash_before"},
	{member: MemberStateAfter, aerr: "aerr.state_hash_after"},
	{member: MemberDescription, atd: "atd.description", aerr: "aerr.description"},
	{member: MemberSeverity, atd: "atd.severity", aerr: "aerr.severity"},
	{member: MemberErrorType, atd: "atd.error_type", aerr: "aerr.error_type"},
	{member: MemberUpstreamErrors, kind: listKind, atd: "atd.upstream_errors", aerr: "aerr.upstream_errors", cut: true},
	{member: MemberCascade, kind: boolKind, atd: "atd.cascade"},
	{member: MemberActionType, aerr: "aerr.action_type"},
	{member: MemberWorkflowName, atd: "atd.wf_id"},
	{member: MemberNodeCount, kind: numberKind, atd: "atd.node_count"},
	{member: MemberTerminalStatus, atd: "atd.terminal_status"},
	{member: MemberElapsed, kind: numberKind, atd: "atd.elapsed_s"},
	{member: MemberNode, atd: "atd.node"},
}

const closingCooldown = "atd.cooldown_s"

// The tables by name.
var (
	eventRows   = make(map[string]int)
	memberRows  = make(map[string]int)
	closingRow  int
	cooldownRow int
)

func init() {
	for i, row := range eventTable {
		for _, name := range []string{string(row.event), row.atd, row.aerr, row.also} {
			if name != "" {
				eventRows[name] = i
			}
		}
	}
	for i, row := range memberTable {
		memberRows[string(row.member)] = i
		for _, name := range []string{row.atd, row.aerr} {
			if name != "" && row.member != MemberTotalCooldown {
				memberRows[name] = i
			}
		}
	}
	closingRow, cooldownRow = memberRows[string(MemberTotalCooldown)], memberRows[string(MemberCooldown)]
}

// ParseEvent reads the name of an event in any vocabulary. Other actions are the
// agents' own.
func ParseEvent(action string) (Event, bool) {
	i, ok := eventRows[action]
	if !ok {
		return "", false
	}
	return eventTable[i].event, true
}

// ParseMember reads the name of an extension member in any vocabulary, as a token of
// this event means it. Other names stand for themselves.
func ParseMember(name string, event Event) Member {
	if i, ok := memberRow(name, event); ok {
		return memberTable[i].member
	}
	return Member(name)
}

// memberRow is the row of a name, in whatever vocabulary.
func memberRow(name string, event Event) (int, bool) {
	i, ok := memberRows[name]
	if ok && i == cooldownRow && event == EventCircuitClose && name == closingCooldown {
		i = closingRow
	}
	return i, ok
}

// Event is the name of e in the vocabulary.
func (v Vocabulary) Event(e Event) string {
	if i, ok := eventRows[string(e)]; ok && eventTable[i].event == e {
		switch row := &eventTable[i]; {
		case v == ATD && row.atd != "":
			return row.atd
		case v == AERR && row.aerr != "":
			return row.aerr
		}
	}
	return string(e)
}

// action is the name of e that claims ask for with a word of theirs: that word where it is
// the vocabulary's second name of the event, else the first.
func (v Vocabulary) action(word string, e Event) string {
	if v == AERR && word == eventTable[eventRows[string(e)]].also {
		return word
	}
	return v.Event(e)
}

// Member is the name of m in the vocabulary.
func (v Vocabulary) Member(m Member) string {
	if name, ok := v.own(m); ok {
		return name
	}
	return string(m)
}

// own is the name that the vocabulary itself has for m.
func (v Vocabulary) own(m Member) (string, bool) {
	if v == Cascade {
		return string(m), true
	}
	i, ok := memberRows[string(m)]
	if !ok {
		return "", false
	}
	name := memberTable[i].atd
	if v == AERR {
		name = memberTable[i].aerr
	}
	return name, name != ""
}

// vocabularyOf tells which document an action's name is from.
func vocabularyOf(action string) Vocabulary {
	switch {
	case strings.HasPrefix(action, "atd:"):
		return ATD
	case strings.HasPrefix(action, "aerr:"):
		return AERR
	}
	return Cascade
}
