package ect

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Vocabulary is one of the documents that name actions and extension members. The
// cascade draft supersedes the other two, whose names stay readable.
type Vocabulary uint8

// The vocabularies. Cascade is written unless another one is asked for.
const (
	Cascade Vocabulary = iota
	ATD
	AERR
)

func (v Vocabulary) String() string { return [...]string{"cascade", "atd", "aerr"}[v] }

// Event is an action that the drafts define, by its name in the cascade vocabulary.
type Event string

// The events. Those that Table 1 of the cascade draft lacks have ATD's name without its prefix.
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

// Member is the name of an extension member, in the cascade vocabulary if it has one
// there. Unknown names stay as they are.
type Member string

// The members of Table 2, of the figures, and of the older drafts that the gateway writes or
// reads; the tables have all.
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
	MemberCascaded        Member = "cascade.cascaded"
	MemberFailedAgents    Member = "cascade.failed_agents"
	MemberStateBefore     Member = "cascade.state_hash_before"
	MemberStateAfter      Member = "cascade.state_hash_after"
	MemberDescription     Member = "cascade.description"
	MemberSeverity        Member = "cascade.severity"
	MemberErrorType       Member = "cascade.error_type"
	MemberUpstreamErrors  Member = "cascade.upstream_errors"
	MemberCascade         Member = "cascade.cascade"
	MemberWorkflowName    Member = "cascade.wf_id"
	MemberTerminalStatus  Member = "cascade.terminal_status"
	MemberElapsed         Member = "cascade.elapsed_s"
	MemberPattern         Member = "cascade.pattern"
	MemberAffectedAgents  Member = "cascade.affected_agents"
	MemberRootCause       Member = "cascade.root_cause_ect"
	MemberBlastRadius     Member = "cascade.blast_radius"
)

// kind is the JSON type of a member's value.
type kind uint8

const (
	textKind kind = iota
	numberKind
	boolKind
	listKind
)

// eventTable has every event with its names and with the members that Figures 4 to 12 of
// the cascade draft and ATD's table of actions require; of these, a vocabulary requires
// those that it names. An event that a vocabulary does not name is written with cascade's.
var eventTable = [...]struct {
	event     Event
	atd, aerr string
	also      string // a second name in aerr, written if the claims name it
	needs     []Member
	ours      bool // not in the cascade draft, so that nothing is required there
}{
	{event: EventCheckpoint, atd: "atd:checkpoint", aerr: "aerr:checkpoint", needs: []Member{MemberReversible, MemberRollbackURI, MemberTTL}},
	{event: EventError, atd: "atd:error", aerr: "aerr:error", needs: []Member{MemberSeverity, MemberErrorType, MemberCheckpointID}, ours: true},
	{event: EventCircuitOpen, atd: "atd:circuit_open", aerr: "aerr:circuit_open", needs: []Member{MemberDownstreamAgent, MemberErrorRate, MemberWindow}},
	{event: EventCircuitHalfOpen, aerr: "aerr:circuit_half_open", needs: []Member{MemberDownstreamAgent}, ours: true},
	{event: EventCircuitClose, atd: "atd:circuit_close", aerr: "aerr:circuit_closed", needs: []Member{MemberDownstreamAgent, MemberTotalCooldown}},
	{event: EventRollbackRequest, atd: "atd:rollback_request", aerr: "aerr:rollback_request", needs: []Member{MemberReason, MemberCascade}, ours: true},
	{event: EventRollbackStart, needs: []Member{MemberRollbackID, MemberCheckpointID, MemberScope, MemberReason}},
	{event: EventRollbackComplete, atd: "atd:rollback_result", aerr: "aerr:rollback_complete", also: "aerr:rollback_escalated", needs: []Member{MemberStatus}},
	{event: EventCompensate},
	{event: EventCascadeDetected, needs: []Member{MemberPattern, MemberAffectedAgents, MemberRootCause, MemberBlastRadius}},
	{event: EventWorkflowStart, atd: "atd:workflow_start", needs: []Member{MemberWorkflowName, MemberDescription}, ours: true},
	{event: EventWorkflowComplete, atd: "atd:workflow_complete", needs: []Member{MemberWorkflowName, MemberTerminalStatus}, ours: true},
}

// memberTable has every extension member that vocabularies share or whose type a draft
// gives. A member that a vocabulary does not name is written with cascade's.
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
	{member: "cascade.action_type", aerr: "aerr.action_type"},
	{member: MemberWorkflowName, atd: "atd.wf_id"},
	{member: "cascade.node_count", kind: numberKind, atd: "atd.node_count"},
	{member: MemberTerminalStatus, atd: "atd.terminal_status"},
	{member: MemberElapsed, kind: numberKind, atd: "atd.elapsed_s"},
	{member: "cascade.node", atd: "atd.node"},
}

const closingCooldown = "atd.cooldown_s"

// The rows of the tables by all names.
var (
	eventRows  = make(map[string]int)
	memberRows = make(map[string]int)
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
}

// ParseEvent reads the name of an event in any vocabulary. ok is false for an agent's own action.
func ParseEvent(action string) (event Event, ok bool) {
	i, ok := eventRows[action]
	if !ok {
		return "", false
	}
	return eventTable[i].event, true
}

// memberRow finds the row of an extension member by its name in any vocabulary, with the meaning that it has in
// a token of this event; -1 without.
func memberRow(name string, event Event) int {
	i, ok := memberRows[name]
	switch {
	case !ok:
		return -1
	case name == closingCooldown && event == EventCircuitClose:
		return memberRows[string(MemberTotalCooldown)]
	}
	return i
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

// action is Event, or the event's second name if the claims ask for that.
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

// vocabularyOf finds the vocabulary by the prefix of an action.
func vocabularyOf(action string) Vocabulary {
	switch {
	case strings.HasPrefix(action, "atd:"):
		return ATD
	case strings.HasPrefix(action, "aerr:"):
		return AERR
	}
	return Cascade
}

// The limits of the extensions, which the drafts only recommend.
const (
	maxExt      = 4096
	maxExtDepth = 5
)

// Ext reads the extension members of a token by their names in the cascade vocabulary,
// whatever the token's own is.
type Ext struct {
	raw    string
	event  Event
	values []extValue
}

// extValue is an extension member of a token: its name, its value as JSON, and its index in memberTable.
type extValue struct {
	name, value string
	row         int
}

func readExt(raw string, event Event) Ext {
	e := Ext{raw: raw, event: event}
	s := jsonx.Scanner{JSON: raw}
	s.Document(func(name string) bool {
		value, _, ok := s.Raw()
		if e.values == nil {
			e.values = make([]extValue, 0, 12) // as many as most tokens have
		}
		e.values = append(e.values, extValue{name, value, memberRow(name, event)})
		return ok
	})
	return e
}

// JSON is the whole object as received, empty if there is none.
func (e Ext) JSON() string { return e.raw }

// Raw is the JSON of a member's value.
func (e Ext) Raw(m Member) (value string, found bool) {
	row := memberRow(string(m), e.event)
	for i := range e.values {
		if v := &e.values[i]; v.name == string(m) || row >= 0 && v.row == row {
			return v.value, true
		}
	}
	return "", false
}

// Text is the value of a string member.
func (e Ext) Text(m Member) (string, bool) {
	raw, _ := e.Raw(m)
	s := jsonx.Scanner{JSON: raw}
	return s.Text()
}

// Bool is the value of a boolean member.
func (e Ext) Bool(m Member) (value, ok bool) {
	raw, _ := e.Raw(m)
	return raw == "true", raw == "true" || raw == "false"
}

// Number is the value of a number member.
func (e Ext) Number(m Member) (float64, bool) {
	raw, ok := e.Raw(m)
	if !ok || !jsonx.IsNumber(raw) {
		return 0, false
	}
	v, err := strconv.ParseFloat(raw, 64)
	return v, err == nil
}

// Int is the value of a number member that is whole, and at most 2^53 in either direction.
func (e Ext) Int(m Member) (int64, bool) {
	v, ok := e.Number(m)
	if !ok || v != math.Trunc(v) || math.Abs(v) > 1<<53 {
		return 0, false
	}
	return int64(v), true
}

// Texts is the value of a member that is a list of strings.
func (e Ext) Texts(m Member) ([]string, bool) {
	raw, _ := e.Raw(m)
	s := jsonx.Scanner{JSON: raw}
	return s.Texts(math.MaxInt)
}

// Outcome is the result of one agent in a rollback.
type Outcome struct {
	// Agent is its identity.
	Agent string
	// Status is completed, partial, escalated or failed.
	Status string
}

// Outcomes is the value of a member like cascade.cascaded.
func (e Ext) Outcomes(m Member) ([]Outcome, bool) {
	raw, _ := e.Raw(m)
	s := jsonx.Scanner{JSON: raw}
	list := []Outcome{}
	ok := s.Elements(func() bool {
		var o Outcome
		ok := s.Members(func(name string) (ok bool) {
			switch name {
			case "agent":
				o.Agent, ok = s.Text()
			case "status":
				o.Status, ok = s.Text()
			default:
				_, ok = s.Value()
			}
			return ok
		})
		list = append(list, o)
		return ok
	})
	return list, ok
}

// lacks lists the required members that are missing or have another type.
func (e Ext) lacks(v Vocabulary) []Member {
	i, ok := eventRows[string(e.event)]
	if !ok {
		return nil
	}
	var missing []Member
	for _, m := range eventTable[i].needs {
		if _, named := v.own(m); !named {
			continue
		}
		raw, there := e.Raw(m)
		if !there && v == Cascade && eventTable[i].ours {
			continue
		}
		if !memberTable[memberRows[string(m)]].kind.fits(raw) {
			missing = append(missing, m)
		}
	}
	return missing
}

// fits reports whether the JSON is of this kind.
func (k kind) fits(raw string) bool {
	switch k {
	case textKind:
		return raw != "" && raw[0] == '"'
	case numberKind:
		return jsonx.IsNumber(raw)
	case boolKind:
		return raw == "true" || raw == "false"
	default:
		return raw != "" && raw[0] == '['
	}
}

// consistent checks that a member with two names has one value: else readers of different
// vocabularies would read different ones.
func (e Ext) consistent() bool {
	var values [len(memberTable)]string
	for _, v := range e.values {
		if v.row < 0 {
			continue
		}
		if other := values[v.row]; other != "" && !jsonx.Same(other, v.value) {
			return false
		}
		values[v.row] = v.value
	}
	return true
}

// ExtBuilder collects the extension members of a token to be issued, by their names in
// the cascade vocabulary. The zero value is empty and usable. Errors come from [Issuer.Draft].
type ExtBuilder struct {
	values  []byte
	members []extMember
	err     error
}

type extMember struct {
	member   Member
	from, to int // its value
}

// add takes the buffer with the value of m at its end.
func (b *ExtBuilder) add(m Member, values []byte) *ExtBuilder {
	for _, other := range b.members {
		if other.member == m {
			b.fail(fmt.Errorf("ect: the extension %s is set twice", m))
		}
	}
	b.members = append(b.members, extMember{m, len(b.values), len(values)})
	b.values = values
	return b
}

func (b *ExtBuilder) fail(err error) {
	if b.err == nil {
		b.err = err
	}
}

// Text sets a string.
func (b *ExtBuilder) Text(m Member, v string) *ExtBuilder {
	return b.add(m, jsonx.AppendText(b.values, v))
}

// Optional adds a string, unless it is empty.
func (b *ExtBuilder) Optional(m Member, v string) *ExtBuilder {
	if v == "" {
		return b
	}
	return b.Text(m, v)
}

// Bool sets true or false.
func (b *ExtBuilder) Bool(m Member, v bool) *ExtBuilder {
	return b.add(m, strconv.AppendBool(b.values, v))
}

// Int sets a whole number.
func (b *ExtBuilder) Int(m Member, v int64) *ExtBuilder {
	return b.add(m, strconv.AppendInt(b.values, v, 10))
}

// Number sets a number; it must be finite.
func (b *ExtBuilder) Number(m Member, v float64) *ExtBuilder {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		b.fail(fmt.Errorf("ect: the extension %s is not a number", m))
		v = 0
	}
	return b.add(m, strconv.AppendFloat(b.values, v, 'g', -1, 64))
}

// Texts sets a list of strings.
func (b *ExtBuilder) Texts(m Member, vs []string) *ExtBuilder {
	return b.add(m, jsonx.AppendTexts(b.values, vs))
}

// Outcomes sets a list like cascade.cascaded.
func (b *ExtBuilder) Outcomes(m Member, list []Outcome) *ExtBuilder {
	values := append(b.values, '[')
	for i, o := range list {
		if i > 0 {
			values = append(values, ',')
		}
		values = jsonx.AppendText(append(values, `{"agent":`...), o.Agent)
		values = append(jsonx.AppendText(append(values, `,"status":`...), o.Status), '}')
	}
	return b.add(m, append(values, ']'))
}

// JSON sets any value, given as JSON.
func (b *ExtBuilder) JSON(m Member, raw string) *ExtBuilder {
	s := jsonx.Scanner{JSON: raw}
	value, depth := "", 0
	ok := s.Whole(func() (ok bool) {
		value, depth, ok = s.Raw()
		return ok
	})
	if !ok {
		b.fail(fmt.Errorf("ect: the value of the extension %s is not JSON", m))
		value = "null"
	}
	if depth+1 > maxExtDepth {
		b.fail(errExtSize)
	}
	return b.add(m, append(b.values, value...))
}

var errExtSize = errors.New("ect: the extensions are over 4096 bytes or nest deeper than 5")

// encode appends the object. Where it is too large, lists that may be cut lose elements
// from their end, the longest first.
func (b *ExtBuilder) encode(dst []byte, v Vocabulary) ([]byte, error) {
	if b.err != nil {
		return dst, b.err
	}
	begin := len(dst)
	members := b.members
	for {
		dst = append(dst[:begin], '{')
		for _, m := range members {
			if len(dst) > begin+1 {
				dst = append(dst, ',')
			}
			dst = append(jsonx.AppendText(dst, v.Member(m.member)), ':')
			dst = append(dst, b.values[m.from:m.to]...)
		}
		dst = append(dst, '}')
		if len(dst)-begin <= maxExt {
			break
		}
		if members = b.shorten(members, len(dst)-begin-maxExt); members == nil {
			return dst, errExtSize
		}
	}
	return dst, b.distinct(v)
}

// distinct checks that no two members share a name in the vocabulary.
func (b *ExtBuilder) distinct(v Vocabulary) error {
	if v == Cascade {
		return nil // add has checked
	}
	for i, m := range b.members {
		name := v.Member(m.member)
		if slices.ContainsFunc(b.members[:i], func(other extMember) bool { return v.Member(other.member) == name }) {
			return fmt.Errorf("ect: the extension %s is set twice", name)
		}
	}
	return nil
}

// shorten cuts the longest list that may be cut by excess bytes, or by half of it if that
// is less, so that another list can become the longest. It returns nil if there is none.
func (b *ExtBuilder) shorten(members []extMember, excess int) []extMember {
	longest, size := -1, 2
	for i, m := range members {
		row, ok := memberRows[string(m.member)]
		if ok && memberTable[row].cut && b.values[m.from] == '[' && m.to-m.from > size {
			longest, size = i, m.to-m.from
		}
	}
	if longest < 0 {
		return nil
	}
	m := members[longest]
	list := string(b.values[m.from:m.to])
	excess = min(excess, (len(list)+1)/2)
	s := jsonx.Scanner{JSON: list}
	keep := 1
	s.Elements(func() bool {
		_, ok := s.Value()
		if s.At+1 <= len(list)-excess {
			keep = s.At
		}
		return ok
	})
	from := len(b.values)
	b.values = append(append(b.values, list[:keep]...), ']')
	shorter := append([]extMember(nil), members...)
	shorter[longest].from, shorter[longest].to = from, len(b.values)
	return shorter
}
