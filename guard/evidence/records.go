package evidence

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

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
	ext := extension(e)
	r := recordOf(e, own, ext)
	r.Report = !IsUnproven(e) && reports(e, own)
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
		r.Expires = e.Time.Add(ttlOf(ext))
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
	_ = markStrangers(records, func(id string) ([]string, error) { return audienceOf(at[id]), nil }) // never fails
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

// markStrangers marks reports whose issuers do not participate in what they report on: they
// are in ledgers of earlier versions, or came unsigned. audience returns the aud of the
// token with an id.
func markStrangers(records []workflow.Record, audience func(id string) ([]string, error)) error {
	links, mine, parts := workflow.NewLinks(), make(map[string][]string), make(map[string]participation)
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

// isReport reports whether an event of an agent describes the events that it follows from or
// names: a failure, or the progress of a rollback or workflow. A report does not make its
// issuer a participant: one known id is enough to send it (ADR 0024). Checkpoints and
// compensations are actions and no reports.
func isReport(event ect.Event) bool {
	switch event {
	case ect.EventError, ect.EventRollbackRequest, ect.EventRollbackStart, ect.EventRollbackComplete, ect.EventWorkflowComplete,
		ect.EventCascadeDetected:
		return true
	}
	return false
}

// reports reports whether an entry is an agent's report, or says of cascades what it follows from: the failures in it
// need not be of one part of the workflow.
func reports(e *ledger.Entry, own bool) bool {
	event, _ := ect.ParseEvent(e.Action)
	return isReport(event) && (!own || event == ect.EventCascadeDetected)
}

// partOf is what a reader may see of a workflow with these records.
func partOf(records []workflow.Record, who router.Reader) participation {
	links := workflow.NewLinks()
	var mine []string
	var alerts []*workflow.Record
	for i := range records {
		r := &records[i]
		if tookPart(&who, r) {
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

// tookPart reports whether the reader itself took part in what is recorded.
func tookPart(who *router.Reader, r *workflow.Record) bool {
	return who.Operator || r.By != "" && (r.By == who.Issuer || r.By == callerName(who.Caller))
}

// linked is what is linked to these ids.
func linked(links *workflow.Links, ids []string) participation {
	s := participation{ids: make(map[string]bool)}
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

// participation is the part of a workflow that a reader may see (ADR 0023): the nodes that
// are linked to its own by tokens and calls. Naming the workflow in a token is not enough
// (cascade 6.1): strangers may use the same name. The zero value is empty.
type participation struct {
	ids map[string]bool
	// Truncated says that the workflow has more entries than were read.
	Truncated bool
}

// Has reports whether an id is in it.
func (s *participation) Has(id string) bool { return s.ids[id] }

// add adds an id.
func (s *participation) add(id string) { s.ids[id] = true }

// Empty reports whether it has no ids.
func (s *participation) Empty() bool { return len(s.ids) == 0 }

// extension returns the extension members of an entry's token, or of the draft that could
// not be signed. Entries were verified, or made here, before they were recorded.
func extension(e *ledger.Entry) ect.Ext {
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

// callerHashOf is the keyed hash of the caller in one of the gateway's entries; zero if absent.
func callerHashOf(e *ledger.Entry) (caller [16]byte) { return callerIn(extension(e)) }

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

// ttlOf is how long a checkpoint is kept, at most 100 years; 0 without a ttl, since nobody
// promised to keep it (cascade 4.2.2).
func ttlOf(ext ect.Ext) time.Duration {
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
	return ledger.Canonical(id)
}

// audienceOf is the aud of an entry's token.
func audienceOf(e *ledger.Entry) []string {
	c, err := recordedClaims(e)
	if err != nil {
		return nil
	}
	return c.Audience()
}

// participationOf collects what a reader may see of the first MaxNodes entries of a
// workflow.
func (s *Ledger) participationOf(ctx context.Context, wid string, who router.Reader) (participation, error) {
	if wid == "" {
		return participation{}, nil
	}
	v, err := s.records(ctx, wid, s.MaxNodes)
	part := partOf(v.records, who)
	part.Truncated = v.more
	return part, err
}

// mayRead reports whether the reader may see an entry.
func (s *Ledger) mayRead(ctx context.Context, e *ledger.Entry, who router.Reader) (bool, error) {
	r := s.recordOf(e)
	if s.issued(e, who) || tookPart(&who, &r) {
		return true, nil
	}
	if isAlert(e) {
		return s.MayReadAll(ctx, e.Workflow, e.Parents, who)
	}
	return s.partOf(ctx, e.Workflow, who).has(e.ID)
}

// partOf starts a search for the reader's part in a workflow.
func (s *Ledger) partOf(ctx context.Context, wid string, who router.Reader) *search {
	return s.search(ctx, wid, func(e *ledger.Entry) bool {
		r := s.recordOf(e)
		return tookPart(&who, &r)
	}, nil)
}

// search finds out whether an id is linked to a reader's part in a workflow, with the same
// result as PartOf on all of it. It starts at the id and reads the nearest entries
// first, parents before followers, at most MaxNodes. So the result does not depend on how
// much others have recorded in the workflow.
type search struct {
	*Ledger
	ctx   context.Context
	wid   string
	mine  func(e *ledger.Entry) bool
	along []node // tokens that are not recorded yet
	read  map[string]*ledger.Entry
	left  int
}

// followersAtOnce is how many followers of an id are read before those of the next id.
const followersAtOnce = 16

// node is a token that is not recorded yet.
type node struct {
	id      string
	parents []string
	report  bool // reports on what others do
	mine    bool
}

func (s *Ledger) search(ctx context.Context, wid string, mine func(e *ledger.Entry) bool, along []node) *search {
	return &search{Ledger: s, ctx: ctx, wid: wid, mine: mine, along: along, read: make(map[string]*ledger.Entry), left: s.MaxNodes}
}

func (s *search) has(id string) (bool, error) {
	if s.wid == "" {
		return false, nil
	}
	type place struct {
		id   string
		from ledger.Cursor
	}
	met := make(map[string]bool)
	var up []string
	var down []place
	reach := func(ids ...string) {
		for _, id := range ids {
			if !met[id] {
				met[id] = true
				up, down = append(up, id), append(down, place{id: id})
			}
		}
	}
	reach(id)
	for s.left > 0 {
		switch {
		case len(up) > 0:
			mine, parents, err := s.parents(up[0])
			if mine || err != nil {
				return mine, err
			}
			up = up[1:]
			reach(parents...)
		case len(down) > 0:
			at := down[0]
			down = down[1:]
			children, next, err := s.children(at.id, at.from)
			if err != nil {
				return false, err
			}
			reach(children...)
			if next != "" {
				down = append(down, place{at.id, next})
			}
		default:
			return false, nil
		}
	}
	return false, nil
}

// parents returns the parents of an id. mine says that the id itself belongs to the part.
func (s *search) parents(id string) (mine bool, ids []string, err error) {
	for _, n := range s.along {
		if n.id == id {
			mine, ids = mine || n.mine, append(ids, n.parents...)
		}
	}
	e, err := s.get(id)
	if e == nil || mine || err != nil {
		return mine, ids, err
	}
	if !IsUnproven(e) { // an unproven token could name any parents
		ids = append(ids, e.Parents...)
	}
	return s.mine(e), ids, nil
}

// children returns ids that follow from an id, except agents' reports on others.
func (s *search) children(id string, from ledger.Cursor) (ids []string, next ledger.Cursor, err error) {
	follows := func(e *ledger.Entry) bool {
		switch {
		case IsUnproven(e), reports(e, s.own(e)):
			return false
		case slices.Contains(e.Parents, id):
			return true
		}
		r := s.recordOf(e) // whoever takes part in a call got the errors with its answer that led to the gateway's own
		return r.Own && r.Event == ect.EventError && slices.Contains(r.UpstreamErrors, id)
	}
	if from == "" {
		for _, n := range s.along {
			if !n.report && slices.Contains(n.parents, id) {
				ids = append(ids, n.id)
			}
		}
		if e := s.read[id]; e != nil && s.own(e) && s.Outcomes != nil {
			for _, outcome := range s.Outcomes(e) {
				came, err := s.get(outcome)
				if err != nil {
					return nil, "", err
				}
				if came != nil && follows(came) {
					ids = append(ids, outcome)
				}
			}
		}
	}
	if id == "" || len(id) > ledger.MaxName {
		return ids, "", nil
	}
	s.left--
	page, err := s.Log.Following(s.ctx, s.wid, id, from, followersAtOnce)
	if err != nil {
		return nil, "", err
	}
	s.left -= len(page.Entries)
	for i := range page.Entries {
		e := &page.Entries[i]
		s.read[e.ID] = e
		if follows(e) {
			ids = append(ids, e.ID)
		}
	}
	return ids, page.Next, nil
}

// get returns the entry of an id in the workflow; nil if it cannot be read.
func (s *search) get(id string) (*ledger.Entry, error) {
	if e, known := s.read[id]; known || id == "" || len(id) > ledger.MaxName {
		return e, nil
	}
	s.left--
	e, err := s.Log.Known(s.ctx, s.wid, id)
	if err == nil {
		s.read[id] = e
	}
	return e, err
}

// workflowIDs returns the ids that a name can stand for: that of tokens, and that of calls
// without tokens (ADR 0023).
func workflowIDs(name string) []string {
	return slices.Compact([]string{WorkflowID(name), NamedWorkflowID(name)})
}

// TakesPart reports whether an entry of a workflow is linked to the reader's own part in
// it, and so visible to the reader (ADR 0024).
func (s *Ledger) TakesPart(ctx context.Context, wid, id string, who router.Reader) (bool, error) {
	if called, err := s.hasCalled(ctx, who); err != nil || !called {
		return false, err
	}
	return s.partOf(ctx, wid, who).has(id)
}

// CheckReport checks that the issuer of a report took part in all that the report names:
// every parent of the token, and the checkpoint (cascade 6.2; ATD, "False Error
// Injection"). It took part in what it has issued, in what was made for it, such as the
// checkpoint that an upstream gets with a call, and in what is linked to its own nodes.
// along are tokens that are not recorded yet but count as if they were.
//
// A refusal is an *ect.Error. It does not reveal whether something belongs to others or is
// unknown (P3).
func (s *Ledger) CheckReport(ctx context.Context, t *ect.Token, along []*ect.Token) error {
	return s.checkReport(ctx, t, along, nil)
}

// CheckAnswer is CheckReport for a token that came with the answer to a call. call has the
// ids of the call's tokens and of its checkpoint; the called party took part in them.
// called is its identity as the route names it. If it is empty, any issuer may report on
// this call or on its own part, but on both in one token only by its own part.
func (s *Ledger) CheckAnswer(ctx context.Context, t *ect.Token, along []*ect.Token, called string, call []string) error {
	names := slices.Clone(t.Parents())
	if id := NamedCheckpoint(t.Ext()); id != "" {
		names = append(names, id)
	}
	other := func(id string) bool { return !slices.Contains(call, id) }
	if called != t.Issuer() && (called != "" || slices.ContainsFunc(names, other)) {
		call = nil
	}
	return s.checkReport(ctx, t, along, call)
}

// checkReport is CheckReport with ids that count as made for the issuer.
func (s *Ledger) checkReport(ctx context.Context, t *ect.Token, along []*ect.Token, made []string) error {
	if !isReport(t.Event()) || t.Workflow() == "" || !t.Proven() { // such a token is nobody's proven report
		return nil
	}
	ask := issuerPart{Ledger: s, t: t, made: made, along: slices.DeleteFunc(slices.Clone(along), func(o *ect.Token) bool {
		return o == t || o.Workflow() != t.Workflow() && o.Workflow() != ""
	})}
	for _, id := range t.Parents() {
		if has, err := ask.has(ctx, id); err != nil || !has {
			return refusedUnless(err, ect.CodeParentUnknown)
		}
	}
	if id := NamedCheckpoint(t.Ext()); id != "" {
		if has, err := ask.has(ctx, id); err != nil || !has {
			return refusedUnless(err, ect.CodeExt)
		}
	}
	return nil
}

// refusedUnless returns the refusal, unless err says that the lookup failed.
func refusedUnless(err error, code ect.Code) error {
	if err != nil {
		return err
	}
	return &ect.Error{Code: code}
}

// issuerPart is what the issuer of one token takes part in.
type issuerPart struct {
	*Ledger
	t     *ect.Token
	along []*ect.Token
	made  []string // ids that count as made for the issuer
	part  *search  // nil until it is needed
}

func (c *issuerPart) has(ctx context.Context, id string) (bool, error) {
	if slices.Contains(c.made, id) {
		return true, nil
	}
	for _, o := range c.along {
		if o.Proven() && o.ID() == id && (o.Issuer() == c.t.Issuer() || slices.Contains(o.Audience(), c.t.Issuer())) {
			return true, nil
		}
	}
	for _, wid := range []string{c.t.Workflow(), ""} { // a parent may have no workflow
		e, err := c.Log.Known(ctx, wid, id)
		switch {
		case err != nil:
			return false, err
		case e == nil:
			continue
		case e.Issuer == c.t.Issuer(), !IsUnproven(e) && slices.Contains(audienceOf(e), c.t.Issuer()):
			return true, nil
		}
		break
	}
	part, err := c.read(ctx)
	if err != nil {
		return false, err
	}
	return part.has(id)
}

// read looks for the issuer's part in the workflow. It first waits for what other gateways
// have just recorded, which may be all of it.
func (c *issuerPart) read(ctx context.Context) (*search, error) {
	if c.part != nil {
		return c.part, nil
	}
	if err := c.caughtUp(ctx); err != nil {
		return nil, err
	}
	var along []node
	for _, o := range c.along {
		if o.Proven() {
			report := isReport(o.Event())
			along = append(along, node{o.ID(), o.Parents(), report, !report && o.Issuer() == c.t.Issuer()})
		}
	}
	mine := func(e *ledger.Entry) bool {
		return e.Issuer == c.t.Issuer() && !IsUnproven(e) && !reports(e, c.own(e))
	}
	c.part = c.search(ctx, c.t.Workflow(), mine, along)
	return c.part, nil
}

// caughtUp waits until this gateway knows what others know of plans.
func (s *Ledger) caughtUp(ctx context.Context) error {
	waits, cancel := router.Until(ctx, s.Waits, catchUpTime)
	defer cancel()
	return s.Assigned.CatchUp(waits)
}

// Names reports whether a workflow's id is what a name stands for.
func Names(wid, name string) bool { return slices.Contains(workflowIDs(name), wid) }

// MayReadAll reports whether the reader may read all of these entries of a workflow.
func (s *Ledger) MayReadAll(ctx context.Context, wid string, ids []string, who router.Reader) (bool, error) {
	if called, err := s.hasCalled(ctx, who); err != nil || !called || who.Anonymous || len(ids) == 0 {
		return false, err
	}
	part := s.partOf(ctx, wid, who)
	for _, id := range ids {
		if has, err := part.has(id); err != nil || !has {
			return false, err
		}
	}
	return true, nil
}

// isAlert reports whether an entry says that a failure spreads. Who may read it took part in all that it
// follows from: the failures in it need not be of one part of the workflow (P3).
func isAlert(e *ledger.Entry) bool {
	event, _ := ect.ParseEvent(e.Action)
	return event == ect.EventCascadeDetected
}
