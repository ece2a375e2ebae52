package graph

import (
	"context"
	"errors"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// tells reports whether an event of an agent says something of what it follows from or
// names: that it failed, or how far a rollback or the workflow has come. It gives nobody a
// part in a workflow, since to tell of somebody takes one known id (ADR 0024). What
// agents do is no such event: a checkpoint and a compensation are their own.
func tells(event ect.Event) bool {
	switch event {
	case ect.EventError, ect.EventRollbackRequest, ect.EventRollbackStart, ect.EventRollbackComplete, ect.EventWorkflowComplete:
		return true
	}
	return false
}

// Told reports whether a record is what an agent tells of others.
func Told(r *workflow.Record) bool { return !r.Own && tells(ect.Event(r.Event)) }

// links are the ids that an id is linked to, both ways. What an agent tells is linked to
// what follows from it, and not to what it tells of: two parts of a workflow that
// somebody has told of at once stay two.
type links map[string][]string

func (l links) add(id string, parents []string, told bool) {
	for _, parent := range parents {
		l[parent] = append(l[parent], id)
		if !told {
			l[id] = append(l[id], parent)
		}
	}
}

// from is what can be reached.
func (l links) from(ids []string) share {
	s := share{ids: make(map[string]bool)}
	for todo := slices.Clone(ids); len(todo) > 0; {
		id := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if !s.ids[id] {
			s.ids[id] = true
			todo = append(todo, l[id]...)
		}
	}
	return s
}

// parts are the parts that issuers have in a workflow.
type parts struct {
	links links
	mine  map[string][]string // by issuer
	found map[string]share
}

func newParts() *parts {
	return &parts{links: make(links), mine: make(map[string][]string), found: make(map[string]share)}
}

// add takes a node. All are added before the first question.
func (p *parts) add(id, issuer string, parents []string, told bool) {
	p.links.add(id, parents, told)
	if !told {
		p.mine[issuer] = append(p.mine[issuer], id)
	}
}

func (p *parts) of(issuer string) share {
	s, known := p.found[issuer]
	if !known {
		s = p.links.from(p.mine[issuer])
		p.found[issuer] = s
	}
	return s
}

// CheckTelling holds that whoever tells of somebody's doings has to do with all of it: with
// every parent of the token, and with the checkpoint that it names (cascade 6.2; ATD,
// "False Error Injection"). That is what it has issued, what was made for it, as the
// checkpoint is that an upstream gets with a call, and what is linked to its own nodes.
// along are tokens that are not recorded and count as if they were.
//
// A refusal is an *ect.Error, and the same whether something is foreign or unknown (P3).
func (s *Server) CheckTelling(ctx context.Context, t *ect.Token, along []*ect.Token) error {
	return s.checkTelling(ctx, t, along, nil)
}

// CheckAnswer is CheckTelling of what came with the answer to a call. Whoever was called has
// to do with it: with the tokens that it was called with and the call's checkpoint, whose ids
// call has. That is who the call's route names; empty is whoever answers, who may tell of
// that call so, or of what is its own, and of both at once only by its own part.
func (s *Server) CheckAnswer(ctx context.Context, t *ect.Token, along []*ect.Token, called string, call []string) error {
	names := slices.Clone(t.Parents())
	if id := namedCheckpoint(t.Ext()); id != "" {
		names = append(names, id)
	}
	other := func(id string) bool { return !slices.Contains(call, id) }
	if called != t.Issuer() && (called != "" || slices.ContainsFunc(names, other)) {
		call = nil
	}
	return s.checkTelling(ctx, t, along, call)
}

// checkTelling is CheckTelling where some ids count as made for the issuer.
func (s *Server) checkTelling(ctx context.Context, t *ect.Token, along []*ect.Token, made []string) error {
	if !tells(t.Event()) || t.Workflow() == "" || !t.Proven() { // what is nobody's word counts for nothing
		return nil
	}
	ask := concern{Server: s, t: t, made: made, along: slices.DeleteFunc(slices.Clone(along), func(o *ect.Token) bool {
		return o == t || o.Workflow() != t.Workflow() && o.Workflow() != ""
	})}
	for _, id := range t.Parents() {
		if has, err := ask.has(ctx, id); err != nil || !has {
			return refusedUnless(err, ect.CodeParentUnknown)
		}
	}
	if id := namedCheckpoint(t.Ext()); id != "" {
		if has, err := ask.has(ctx, id); err != nil || !has {
			return refusedUnless(err, ect.CodeExt)
		}
	}
	return nil
}

// refusedUnless is the refusal, unless nothing is known.
func refusedUnless(err error, code ect.Code) error {
	if err != nil {
		return err
	}
	return refused(code)
}

// concern is the question what the issuer of one token has to do with.
type concern struct {
	*Server
	t     *ect.Token
	along []*ect.Token
	made  []string // ids of what counts as made for it
	part  *share   // once it was read
}

func (c *concern) has(ctx context.Context, id string) (bool, error) {
	if slices.Contains(c.made, id) {
		return true, nil
	}
	for _, o := range c.along {
		if o.Proven() && o.ID() == id && (o.Issuer() == c.t.Issuer() || slices.Contains(o.Audience(), c.t.Issuer())) {
			return true, nil
		}
	}
	if len(id) > ledger.MaxName {
		return false, nil
	}
	for _, wid := range []string{c.t.Workflow(), ""} { // a parent may be of no workflow
		e, err := c.reach(ctx, wid, id)
		switch {
		case errors.Is(err, ledger.ErrNotFound), errors.Is(err, ledger.ErrPruned):
			continue
		case err != nil:
			return false, err
		}
		if e.Issuer == c.t.Issuer() || !NobodysWord(&e) && slices.Contains(audienceOf(&e), c.t.Issuer()) {
			return true, nil
		}
		break
	}
	part, err := c.read(ctx)
	return part.has(id), err
}

// read finds the issuer's part in the workflow. What was recorded a moment ago may be all
// that it has there.
func (c *concern) read(ctx context.Context) (share, error) {
	if c.part != nil {
		return *c.part, nil
	}
	if _, err := c.caughtUp(ctx); err != nil {
		return share{}, err
	}
	p := newParts()
	for _, o := range c.along {
		if o.Proven() {
			p.add(o.ID(), o.Issuer(), o.Parents(), tells(o.Event()))
		}
	}
	_, err := c.each(ctx, c.t.Workflow(), func(e *ledger.Entry) bool {
		if !NobodysWord(e) {
			p.add(e.ID, e.Issuer, e.Parents, c.told(e))
		}
		return false
	})
	part := p.of(c.t.Issuer())
	c.part = &part
	return part, err
}

// told reports whether an entry is what an agent tells of others.
func (s *Server) told(e *ledger.Entry) bool {
	event, _ := ect.ParseEvent(e.Action)
	return tells(event) && !s.own(e)
}

// namedCheckpoint is the checkpoint that a token names; empty if none.
func namedCheckpoint(x ect.Ext) string {
	id, _ := x.Text(ect.MemberCheckpointID)
	return canonical(id)
}

// audienceOf is whom an entry's token was made for.
func audienceOf(e *ledger.Entry) []string {
	u, err := ect.ParseInsecure(string(e.Payload))
	if err != nil {
		return nil
	}
	return u.Audience()
}

// markStrangers marks what those tell who have no part in what they tell of: it stands in
// the ledger from before it was refused, or came with no signature. What is not among the
// records is told of in vain anyway. audience is whom the token with an id was made for.
func markStrangers(records []workflow.Record, audience func(id string) ([]string, error)) error {
	p, issuers := newParts(), make(map[string]string, len(records))
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
			continue // nobody's word, as NobodysWord says of entries
		}
		p.add(r.ID, r.Issuer, r.Parents, Told(r))
	}
	for i := range records {
		r := &records[i]
		if !Told(r) {
			continue
		}
		for _, id := range append(slices.Clone(r.Parents), r.CheckpointID) {
			issuer, there := issuers[id]
			part := p.of(r.Issuer)
			if !there || issuer == r.Issuer || part.has(id) {
				continue
			}
			if a := answers[r.ID]; a != nil && (id == a.CheckpointID || slices.Contains(a.Parents, id)) {
				continue // of the call that it was the answer to
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

// Records are the entries of a workflow as its graph reads them. own says of an entry
// that it is the gateway's.
func Records(entries []ledger.Entry, own func(e *ledger.Entry) bool) []workflow.Record {
	records := make([]workflow.Record, 0, len(entries))
	at := make(map[string]*ledger.Entry, len(entries))
	for i := range entries {
		e := &entries[i]
		records = append(records, recordOf(e, own(e)))
		if _, twice := at[e.ID]; !twice {
			at[e.ID] = e
		}
	}
	_ = markStrangers(records, func(id string) ([]string, error) { return audienceOf(at[id]), nil }) // which never fails
	return records
}

// caughtUp waits until what was recorded before stands in the tree, so that a list of
// entries shows it. whole is false where some of it never will, since it does not open.
func (s *Server) caughtUp(ctx context.Context) (whole bool, err error) {
	waits, cancel := s.wait(ctx, reachTime)
	defer cancel()
	err = s.Log.Flush(waits)
	if errors.Is(err, ledger.ErrWaiting) {
		return false, nil
	}
	return err == nil, err
}
