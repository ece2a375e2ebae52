package graph

import (
	"encoding/hex"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// extOf are the extension members of an entry's token, or of what a token could not be
// made of. It was verified, or made here, before it was recorded.
func extOf(e *ledger.Entry) ect.Ext {
	if e.Unsigned {
		if d, err := ect.ParseDraft(string(e.Payload)); err == nil {
			return d.Ext()
		}
		return ect.Ext{}
	}
	if u, err := ect.ParseInsecure(string(e.Payload)); err == nil {
		return u.Ext()
	}
	return ect.Ext{}
}

// own reports whether an entry is the gateway's.
func (s *Server) own(e *ledger.Entry) bool {
	return slices.Contains(s.Identities, e.Issuer) || s.Own != nil && s.Own(e)
}

// issued reports whether an entry is a token of the reader's own.
func (s *Server) issued(e *ledger.Entry, who Reader) bool {
	return who.Issuer != "" && e.Issuer == who.Issuer && !s.own(e)
}

// called reports whether an entry is the gateway's, of one of the reader's calls.
func (s *Server) called(e *ledger.Entry, who Reader) bool {
	if who.Caller == [16]byte{} || !s.own(e) {
		return false
	}
	return CallerOf(e) == who.Caller
}

// CallerOf is the keyed hash of the caller that an entry of the gateway's tells of; zero
// where it names none.
func CallerOf(e *ledger.Entry) (caller [16]byte) {
	text, _ := extOf(e).Text(evidence.MemberCaller)
	if hash, err := hex.DecodeString(text); err == nil && len(hash) == len(caller) {
		copy(caller[:], hash)
	}
	return caller
}

// recordOf is an entry as the graph reads it.
func (s *Server) recordOf(e *ledger.Entry) workflow.Record { return recordOf(e, s.own(e)) }

// NobodysWord reports whether an entry is a token that nobody is proven to have issued
// (level L1): evidence of what was sent, and no more (ADR 0038).
func NobodysWord(e *ledger.Entry) bool { return e.Issuer == "" }

// unproven is the event of a token that tells of one and is nobody's word.
const unproven workflow.Event = "unproven"

// recordOf is an entry as the graph of its workflow reads it. own says that the gateway
// has issued it.
func recordOf(e *ledger.Entry, own bool) workflow.Record {
	r := workflow.Record{
		ID: e.ID, Parents: e.Parents, Action: e.Action, Issuer: e.Issuer, Time: e.Time, Own: own,
	}
	event, _ := ect.ParseEvent(e.Action)
	if r.Event = workflow.Event(event); r.Event != "" && NobodysWord(e) {
		r.Event = unproven // it settles, undoes and ends nothing
		return r
	}
	ext := extOf(e)
	text := func(m ect.Member) string {
		v, _ := ext.Text(m)
		return v
	}
	if r.Own {
		r.Outcome, r.Execution = workflow.Outcome(text(evidence.MemberOutcome)), text(evidence.MemberExecution)
		r.Attempt, _ = ext.Bool(evidence.MemberAttempt)
		r.UpstreamErrors, _ = ext.Texts(ect.MemberUpstreamErrors)
		_, listed := ext.Raw(ect.MemberCascaded)
		r.Whole = listed && event == ect.EventRollbackComplete
	}
	r.CheckpointID = namedCheckpoint(ext)
	r.Severity = text(ect.MemberSeverity)
	r.Status = text(ect.MemberStatus)
	switch {
	case event == ect.EventWorkflowComplete:
		r.Status = text(ect.MemberTerminalStatus)
	case r.Status == "" && e.Action == "aerr:rollback_escalated":
		r.Status = "escalated"
	case event == ect.EventCheckpoint:
		r.Reversible, _ = ext.Bool(ect.MemberReversible)
		r.Expires = e.Time.Add(TTLOf(ext))
	}
	return r
}

// TTLOf is how long a checkpoint is kept: not at all where it does not say so, since
// then nobody has promised to (cascade 4.2.2).
func TTLOf(ext ect.Ext) time.Duration {
	const longest = 100 * 365 * 24 * time.Hour
	seconds, _ := ext.Number(ect.MemberTTL)
	if seconds >= longest.Seconds() {
		return longest
	}
	return time.Duration(max(seconds, 0) * float64(time.Second))
}

// levelOf is the assurance that an entry's token gives by itself.
func levelOf(e *ledger.Entry) string {
	if e.Unsigned {
		return ""
	}
	u, err := ect.ParseInsecure(string(e.Payload))
	if err != nil {
		return ""
	}
	return strings.ToUpper(u.Level().String())
}
