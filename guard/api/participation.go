package api

import (
	"context"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// participationOf collects what a reader may see of the first MaxNodes entries of a
// workflow.
func (s *Ledger) participationOf(ctx context.Context, wid string, who evidence.Reader) (evidence.Participation, error) {
	if wid == "" {
		return evidence.Participation{}, nil
	}
	v, err := s.records(ctx, wid, s.MaxNodes)
	part := evidence.PartOf(v.records, who)
	part.Truncated = v.more
	return part, err
}

// mayRead reports whether the reader may see an entry.
func (s *Ledger) mayRead(ctx context.Context, e *ledger.Entry, who evidence.Reader) (bool, error) {
	r := s.recordOf(e)
	if s.issued(e, who) || who.TookPart(&r) {
		return true, nil
	}
	if isAlert(e) {
		return s.mayReadAll(ctx, e.Workflow, e.Parents, who)
	}
	return s.partOf(ctx, e.Workflow, who).has(e.ID)
}

// partOf starts a search for the reader's part in a workflow.
func (s *Ledger) partOf(ctx context.Context, wid string, who evidence.Reader) *search {
	return s.search(ctx, wid, func(e *ledger.Entry) bool {
		r := s.recordOf(e)
		return who.TookPart(&r)
	}, nil)
}

// search finds out whether an id is linked to a reader's part in a workflow, with the same
// result as evidence.PartOf on all of it. It starts at the id and reads the nearest entries
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
	if !evidence.IsUnproven(e) { // an unproven token could name any parents
		ids = append(ids, e.Parents...)
	}
	return s.mine(e), ids, nil
}

// children returns ids that follow from an id, except agents' reports on others.
func (s *search) children(id string, from ledger.Cursor) (ids []string, next ledger.Cursor, err error) {
	follows := func(e *ledger.Entry) bool {
		switch {
		case evidence.IsUnproven(e), evidence.Reports(e, s.own(e)):
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
	return slices.Compact([]string{evidence.WorkflowID(name), evidence.NamedWorkflowID(name)})
}

// TakesPart reports whether an entry of a workflow is linked to the reader's own part in
// it, and so visible to the reader (ADR 0024).
func (s *Ledger) TakesPart(ctx context.Context, wid, id string, who evidence.Reader) (bool, error) {
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
	if id := evidence.NamedCheckpoint(t.Ext()); id != "" {
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
	if !evidence.IsReport(t.Event()) || t.Workflow() == "" || !t.Proven() { // such a token is nobody's proven report
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
	if id := evidence.NamedCheckpoint(t.Ext()); id != "" {
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
	return refused(code)
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
		case e.Issuer == c.t.Issuer(), !evidence.IsUnproven(e) && slices.Contains(evidence.AudienceOf(e), c.t.Issuer()):
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
			report := evidence.IsReport(o.Event())
			along = append(along, node{o.ID(), o.Parents(), report, !report && o.Issuer() == c.t.Issuer()})
		}
	}
	mine := func(e *ledger.Entry) bool {
		return e.Issuer == c.t.Issuer() && !evidence.IsUnproven(e) && !evidence.Reports(e, c.own(e))
	}
	c.part = c.search(ctx, c.t.Workflow(), mine, along)
	return c.part, nil
}

// caughtUp waits until this gateway knows what others know of plans.
func (s *Ledger) caughtUp(ctx context.Context) error {
	waits, cancel := until(ctx, s.Waits, catchUpTime)
	defer cancel()
	return s.Assigned.CatchUp(waits)
}
