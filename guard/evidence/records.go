package evidence

import (
	"encoding/hex"
	"encoding/json"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Reader is who wants to read a workflow.
type Reader struct {
	// Issuer is the issuer of a verified token; empty without one.
	Issuer string
	// Caller is the keyed hash of the caller's identity; zero without one.
	Caller [16]byte
	// Anonymous readers have no credential and may read nothing (P3).
	Anonymous bool
	// Credential readers have a credential that the gateway did not verify. They may read
	// the workflows and checkpoints of their own calls only (ADR 0024).
	Credential bool
	// Operator readers see all of every workflow.
	Operator bool
}

// IsUnproven reports whether the issuer of an entry's token is not proven (level L1): the
// entry shows only that the token was sent (ADR 0038).
func IsUnproven(e *ledger.Entry) bool { return e.Issuer == "" }

// unproven replaces the event of an unproven token, so that the token changes no state.
const unproven ect.Event = "unproven"

// MemberNode names the node of a plan that a call is, in the extensions of its token.
const MemberNode ect.Member = "atd.node"

// RecordOf converts an entry for its workflow's graph. own says that the gateway issued it. By is who takes part in
// what it is about: reporting an error is no part in that.
func RecordOf(e *ledger.Entry, own bool) workflow.Record {
	ext := Extension(e)
	r := recordOf(e, own, ext)
	r.Report = !IsUnproven(e) && Reports(e, own)
	switch {
	case own:
		r.By = callerName(callerIn(ext))
	case r.Event != ect.EventError:
		r.By = r.Issuer
	}
	return r
}

func recordOf(e *ledger.Entry, own bool, ext ect.Ext) workflow.Record {
	r := workflow.Record{
		ID: e.ID, Parents: e.Parents, Action: e.Action, Issuer: e.Issuer, Time: e.Time, Own: own,
	}
	event, _ := readEvent(e.Action, own)
	if r.Event = event; r.Event != "" && IsUnproven(e) {
		r.Event = unproven
		return r
	}
	text := func(m ect.Member) string {
		v, _ := ext.Text(m)
		return v
	}
	if r.Own {
		r.Outcome, r.Execution = workflow.Outcome(text(memberOutcome)), text(memberExecution)
		r.Attempt, _ = ext.Bool(memberAttempt)
		r.UpstreamErrors, _ = ext.Texts(ect.MemberUpstreamErrors)
		_, listed := ext.Raw(ect.MemberCascaded)
		r.Whole = listed && event == ect.EventRollbackComplete
	} else if r.IsTask() {
		r.Priority = priorityOf(ext)
	}
	r.Node = text(MemberNode)
	if event == ect.EventCheckpoint { // a participant's too: it is in what it has signed
		r.Critical, _ = ext.Bool(memberCritical)
	}
	r.CheckpointID = NamedCheckpoint(ext)
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

// priorityOf is the priority that an agent's token claims (ATD "Priority Levels"): in its extensions,
// or in the object `constraints` there, as in ATD's figure.
func priorityOf(ext ect.Ext) string {
	const member, object = "atd.resource_priority", "constraints"
	if p, there := ext.Text(member); there {
		return p
	}
	raw, there := ext.Raw(object)
	if !there {
		return ""
	}
	var constraints struct {
		Priority string `json:"atd.resource_priority"`
	}
	if json.Unmarshal([]byte(raw), &constraints) != nil {
		return "" // another use of this name
	}
	return constraints.Priority
}

// RecordsOf are the records of a whole workflow, in the order of its entries. own says of an entry that
// the gateway issued it.
func RecordsOf(entries []ledger.Entry, own func(e *ledger.Entry) bool) []workflow.Record {
	records := make([]workflow.Record, 0, len(entries))
	at := make(map[string]*ledger.Entry, len(entries))
	for i := range entries {
		e := &entries[i]
		records = append(records, RecordOf(e, own(e)))
		if _, twice := at[e.ID]; !twice {
			at[e.ID] = e
		}
	}
	_ = MarkStrangers(records, func(id string) ([]string, error) { return AudienceOf(at[id]), nil }) // never fails
	return records
}

// recordsNear are the records of a part of a workflow. Participation was checked when they
// were recorded; only reports of unproven issuers are strangers here.
func recordsNear(entries []ledger.Entry, own func(e *ledger.Entry) bool) []workflow.Record {
	records := make([]workflow.Record, 0, len(entries))
	for i := range entries {
		r := RecordOf(&entries[i], own(&entries[i]))
		r.Stranger = r.Issuer == "" && r.Report
		records = append(records, r)
	}
	return records
}

// MarkStrangers marks reports whose issuers do not participate in what they report on: they
// are in ledgers of earlier versions, or came unsigned. audience returns the aud of the
// token with an id.
func MarkStrangers(records []workflow.Record, audience func(id string) ([]string, error)) error {
	links, mine, parts := workflow.NewLinks(), make(map[string][]string), make(map[string]Participation)
	issuers := make(map[string]string, len(records))
	answers := make(map[string]*workflow.Record) // by an error that came with one
	for i := range records {
		r := &records[i]
		if r.Own {
			for _, id := range r.UpstreamErrors {
				answers[id] = r
			}
		}
		if _, twice := issuers[r.ID]; twice {
			continue
		}
		issuers[r.ID] = r.Issuer
		if r.Issuer == "" {
			continue // unproven
		}
		links.Add(r.ID, r.Parents, r.Report)
		if !r.Report {
			mine[r.Issuer] = append(mine[r.Issuer], r.ID)
		}
	}
	for i := range records {
		r := &records[i]
		if !r.Report || r.Own {
			continue
		}
		part, known := parts[r.Issuer]
		if !known {
			part = linked(links, mine[r.Issuer])
			parts[r.Issuer] = part
		}
		for _, id := range append(slices.Clone(r.Parents), r.CheckpointID) {
			issuer, there := issuers[id]
			if !there || issuer == r.Issuer || part.Has(id) {
				continue
			}
			if a := answers[r.ID]; a != nil && (id == a.CheckpointID || slices.Contains(a.Parents, id)) {
				continue // it came with the answer to that call
			}
			if issuer == "" {
				r.Stranger = true
				break
			}
			named, err := audience(id)
			if err != nil {
				return err
			}
			if !slices.Contains(named, r.Issuer) {
				r.Stranger = true
				break
			}
		}
	}
	return nil
}

// IsReport reports whether an event of an agent describes the events that it follows from or
// names: a failure, or the progress of a rollback or workflow. A report does not make its
// issuer a participant: one known id is enough to send it (ADR 0024). Checkpoints and
// compensations are actions and no reports.
func IsReport(event ect.Event) bool {
	switch event {
	case ect.EventError, ect.EventRollbackRequest, ect.EventRollbackStart, ect.EventRollbackComplete, ect.EventWorkflowComplete,
		ect.EventCascadeDetected:
		return true
	}
	return false
}

// Reports reports whether an entry is an agent's report, or says of cascades what it follows from: the failures in it
// need not be of one part of the workflow.
func Reports(e *ledger.Entry, own bool) bool {
	event, _ := ect.ParseEvent(e.Action)
	return IsReport(event) && (!own || event == ect.EventCascadeDetected)
}

// PartOf is what a reader may see of a workflow with these records.
func PartOf(records []workflow.Record, who Reader) Participation {
	links := workflow.NewLinks()
	var mine []string
	var alerts []*workflow.Record
	for i := range records {
		r := &records[i]
		if who.TookPart(r) {
			mine = append(mine, r.ID)
		}
		switch {
		case r.Issuer == "": // it could name any parents
		case r.Own && r.Event == ect.EventCascadeDetected:
			alerts = append(alerts, r)
		default:
			if links.Add(r.ID, r.Parents, r.Report); r.Own && r.Event == ect.EventError {
				links.Lead(r.ID, r.UpstreamErrors) // whoever takes part in the call got them with its answer
			}
		}
	}
	part := linked(links, mine)
	for _, r := range alerts { // whoever took part in all that it follows from may read it
		if len(r.Parents) > 0 && !slices.ContainsFunc(r.Parents, func(id string) bool { return !part.Has(id) }) {
			part.add(r.ID)
		}
	}
	return part
}

// TookPart reports whether the reader itself took part in what is recorded.
func (who *Reader) TookPart(r *workflow.Record) bool {
	return who.Operator || r.By != "" && (r.By == who.Issuer || r.By == callerName(who.Caller))
}

// linked is what is linked to these ids.
func linked(links *workflow.Links, ids []string) Participation {
	s := Participation{ids: make(map[string]bool)}
	var met workflow.Places
	for _, id := range ids {
		s.add(id)
		if place, known := links.Place(id); known {
			for _, linked := range links.Reach(&met, place) {
				s.add(links.ID(linked))
			}
		}
	}
	return s
}

// Participation is the part of a workflow that a reader may see (ADR 0023): the nodes that
// are linked to its own by tokens and calls. Naming the workflow in a token is not enough
// (cascade 6.1): strangers may use the same name. The zero value is empty.
type Participation struct {
	ids map[string]bool
	// Truncated says that the workflow has more entries than were read.
	Truncated bool
}

// Has reports whether an id is in it.
func (s *Participation) Has(id string) bool { return s.ids[id] }

// add adds an id.
func (s *Participation) add(id string) { s.ids[id] = true }

// Empty reports whether it has no ids.
func (s *Participation) Empty() bool { return len(s.ids) == 0 }

// Extension returns the extension members of an entry's token, or of the draft that could
// not be signed. Entries were verified, or made here, before they were recorded.
func Extension(e *ledger.Entry) ect.Ext {
	if e.Parsed != nil {
		return extensionOf(&e.Event) // it is being recorded
	}
	if c, err := recordedClaims(e); err == nil {
		return c.Ext()
	}
	return ect.Ext{}
}

// recordedClaims are the claims of an entry, as it was recorded: nothing is verified here.
// The error is an *ect.Error.
func recordedClaims(e *ledger.Entry) (claims, error) {
	if e.Header != nil {
		return ect.ParseDraft(string(e.Payload))
	}
	return ect.ParseInsecure(string(e.Payload))
}

// CallerOf is the keyed hash of the caller in one of the gateway's entries; zero if absent.
func CallerOf(e *ledger.Entry) (caller [16]byte) { return callerIn(Extension(e)) }

func callerIn(ext ect.Ext) (caller [16]byte) {
	text, _ := ext.Text(memberCaller)
	var hash [len(caller)]byte
	if len(text) == hex.EncodedLen(len(hash)) {
		if _, err := hex.Decode(hash[:], []byte(text)); err == nil {
			caller = hash
		}
	}
	return caller
}

// TTLOf is how long a checkpoint is kept, at most 100 years; 0 without a ttl, since nobody
// promised to keep it (cascade 4.2.2).
func TTLOf(ext ect.Ext) time.Duration {
	const longest = 100 * 365 * 24 * time.Hour
	seconds, _ := ext.Number(ect.MemberTTL)
	if seconds >= longest.Seconds() {
		return longest
	}
	return time.Duration(max(seconds, 0) * float64(time.Second))
}

// NamedCheckpoint is the id in cascade.checkpoint_id; empty if absent.
func NamedCheckpoint(x ect.Ext) string {
	id, _ := x.Text(ect.MemberCheckpointID)
	return Canonical(id)
}

// AudienceOf is the aud of an entry's token.
func AudienceOf(e *ledger.Entry) []string {
	c, err := recordedClaims(e)
	if err != nil {
		return nil
	}
	return c.Audience()
}
