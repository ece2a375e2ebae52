package evidence

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Graph returns the graph that the plan of a rollback depends on: all of the workflow for
// rollback.FullWorkflow, else the target's neighbourhood (ADR 0051). It is complete unless
// More is set; a rollback.TooManyError says that no plan can be made. A checkpoint without a
// workflow is returned alone. With checkpoint.ErrTampered the nodes are only those that link
// the target to the requester.
func (l *rollbackLedger) Graph(ctx context.Context, q rollback.Query) (view rollback.View, err error) {
	view, err = l.view(ctx, &q)
	if err = asTampered(err); errors.Is(err, checkpoint.ErrTampered) && q.Target != "" && q.By != "" {
		view.Graph, _ = l.lineageOf(ctx, &q) // entries that cannot be read give no rights
	}
	if view.Graph == nil {
		view.Graph = workflow.New(nil)
	}
	return view, err
}

// The versions of a workflow are the ends of its logs, behind what may be recorded without a
// change to plans.
const (
	nothingSince  = "n" // nothing
	requestsSince = "r" // requests for rollbacks: no result is recorded, which they could outdate
	// withoutWorkflow is the version of a checkpoint outside of workflows. Its plan is about
	// nothing else, so that only its own state can change.
	withoutWorkflow = "-"
)

// versionOf is the version of a workflow whose logs had these ends before the entries were read.
func versionOf(ends []ledger.Cursor, entries []ledger.Entry) string {
	since := requestsSince
	for i := range entries {
		if event, _ := ect.ParseEvent(entries[i].Action); event == ect.EventRollbackComplete || event == ect.EventCompensate {
			since = nothingSince
		}
	}
	for _, end := range ends {
		since += " " + string(end)
	}
	return since
}

// Unchanged reports whether nothing was recorded in a workflow since a version of it that can
// change a plan.
func (l *rollbackLedger) Unchanged(ctx context.Context, wid, version string) (bool, error) {
	if version == "" || wid == "" {
		return version == withoutWorkflow, nil
	}
	rec, err := l.recorder()
	if err != nil {
		return false, err
	}
	log := rec.Evidence.Log()
	ends, err := log.Ends(ctx, wid)
	if err != nil {
		return false, err
	}
	words := strings.Fields(version)
	if len(ends) != len(words)-1 { // also for a version that is none of this workflow
		return false, nil
	}
	for i, end := range ends {
		before := ledger.Cursor(words[i+1])
		if end == before {
			continue
		}
		if words[0] != requestsSince {
			return false, nil
		}
		page, err := log.List(ctx, wid, before, maxRequestsSince)
		if err != nil {
			return false, err
		}
		// Entries of the logs behind this one follow, and count as new ones too.
		if len(page.Entries) == 0 || page.Next != "" {
			return false, nil
		}
		for k := range page.Entries {
			event, _ := ect.ParseEvent(page.Entries[k].Action)
			asks := event == ect.EventRollbackRequest || event == ect.EventRollbackStart // cascade Figure 11
			if !asks || rec.own(&page.Entries[k]) {
				return false, nil
			}
		}
	}
	return true, nil
}

// Workflows are those in which an event with this id is recorded, whose issuer is proven.
func (l *rollbackLedger) Workflows(ctx context.Context, id string) ([]string, error) {
	rec, err := l.recorder()
	if err != nil {
		return nil, err
	}
	all, err := rec.Evidence.Log().Find(ctx, ledger.Canonical(id))
	if err != nil {
		return nil, err
	}
	var workflows []string
	for i := range all {
		if !IsUnproven(&all[i]) {
			workflows = append(workflows, all[i].Workflow)
		}
	}
	return workflows, nil
}

// maxCrossed is how many steps of a rollback are looked at for what follows in other workflows.
const maxCrossed = 1000

// Crossed are other workflows than r's in which something follows from what its Steps undo: tokens
// with such parents are accepted with cross_workflow. What cannot be read is left out.
func (l *rollbackLedger) Crossed(ctx context.Context, r *rollback.Rollback) (all []string, err error) {
	rec, err := l.recorder()
	if err != nil || r.Workflow == "" {
		return nil, err
	}
	log, damaged := rec.Evidence.Log(), func(err error) bool { return errors.Is(err, ledger.ErrTampered) || errors.Is(err, ledger.ErrPruned) }
	for i := range r.Steps[:min(len(r.Steps), maxCrossed)] {
		id := r.Steps[i].Checkpoint
		ids := []string{id, rec.Evidence.NodeID(id), rec.Evidence.SettledID(id)}
		e, err := log.Lookup(ctx, r.Workflow, id)
		if err != nil && !damaged(err) && !errors.Is(err, ledger.ErrNotFound) {
			return nil, err
		}
		for _, parent := range e.Parents {
			p, err := log.Lookup(ctx, r.Workflow, parent)
			if err == nil && !rec.own(&p) {
				if _, is := readEvent(p.Action, false); !is { // the action that it was made for
					ids = append(ids, parent)
				}
			} else if err != nil && !damaged(err) && !errors.Is(err, ledger.ErrNotFound) {
				return nil, err
			}
		}
		for _, id := range ids {
			found, err := log.Elsewhere(ctx, r.Workflow, id)
			if err != nil && !damaged(err) {
				return nil, err
			}
			all = append(all, found...)
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// maxRequestsSince is how many requests may come between a plan and its acceptance.
const maxRequestsSince = 16

// lineageOf returns the target and its ancestors up to one of the requester's.
func (l *rollbackLedger) lineageOf(ctx context.Context, q *rollback.Query) (*workflow.Graph, error) {
	rec, err := l.recorder()
	if err != nil {
		return nil, err
	}
	e, err := rec.target(ctx, ledger.Canonical(q.Target))
	if err != nil {
		e = reconstructed(ctx, rec.Evidence, rec.own, ledger.Canonical(q.Target))
	}
	if e == nil || e.Workflow == "" {
		return nil, err
	}
	p := newNeighbourhood(ctx, rec, e)
	p.bare = true
	p.add(e, 0)
	p.lineage([]*ledger.Entry{e}, &rollback.Query{By: q.By, Lineage: rollback.Ancestor})
	if p.err != nil {
		return nil, p.err
	}
	entries := p.entries()
	return rec.graphOf(ctx, entries, recordsNear(entries, rec.own))
}

// view is Graph without the fallback for altered entries.
func (l *rollbackLedger) view(ctx context.Context, q *rollback.Query) (view rollback.View, err error) {
	rec, err := l.recorder()
	if err != nil {
		return view, err
	}
	e := &ledger.Entry{Event: ledger.Event{Workflow: q.Workflow}}
	if q.Target == "" {
		q.Scope = rollback.FullWorkflow
	} else if e, err = rec.target(ctx, ledger.Canonical(q.Target)); err != nil {
		return view, err
	}
	var ends []ledger.Cursor
	if e.Workflow != "" {
		if ends, err = rec.Evidence.Log().Ends(ctx, e.Workflow); err != nil {
			return view, err
		}
	}
	var entries []ledger.Entry
	records := RecordsOf
	switch {
	case e.Workflow == "":
		entries, err = rec.entriesOfLone(ctx, e)
	case q.Scope == rollback.FullWorkflow:
		entries, err = rec.Evidence.workflowEntries(ctx, e.Workflow, l.o.MaxNodes)
	default:
		entries, view.More, err = newNeighbourhood(ctx, rec, e).collect(e, q, l.o.MaxNodes)
		records = recordsNear
	}
	if err != nil {
		return rollback.View{}, err
	}
	if view.Graph, err = rec.graphOf(ctx, entries, records(entries, rec.own)); err != nil {
		return rollback.View{}, err
	}
	if e.Workflow != "" {
		view.Version = versionOf(ends, entries)
		return view, nil
	}
	view.Version = withoutWorkflow
	var lone []workflow.Node
	if i, there := view.Graph.Index(e.ID); there {
		lone = append(lone, *view.Graph.At(i))
	}
	view.Graph = workflow.FromNodes(lone)
	return view, nil
}

// workflowEntries are the entries of a workflow, in the order in which they were recorded.
func (e *Evidence) workflowEntries(ctx context.Context, wid string, most int) (all []ledger.Entry, err error) {
	for entry, err := range e.log.All(ctx, wid) {
		if err != nil {
			return nil, err
		}
		if all = append(all, *entry); len(all) > most {
			return nil, &rollback.TooManyError{What: "nodes", Count: len(all), Limit: most}
		}
	}
	// A fleet has a log for each gateway.
	slices.SortStableFunc(all, func(a, b ledger.Entry) int { return a.Recorded.Compare(b.Recorded) })
	return all, nil
}

// entriesOfLone are a checkpoint without a workflow, its parents and its outcomes.
func (rec *Recorder) entriesOfLone(ctx context.Context, e *ledger.Entry) ([]ledger.Entry, error) {
	ids := append(slices.Clone(e.Parents), e.ID)
	if rec.own(e) {
		ids = append(ids, rec.Evidence.NodeID(e.ID), rec.Evidence.SettledID(e.ID))
	}
	var all []ledger.Entry
	for _, id := range ids {
		near, err := rec.lookup(ctx, "", id)
		if err != nil {
			return nil, err
		}
		if near != nil {
			all = append(all, *near)
		}
	}
	return all, nil
}

// callersOf maps the gateway's own nodes, by id, to who caused them: the agent whose token is
// a parent, else the caller. Nodes of agents are not in it.
func (rec *Recorder) callersOf(ctx context.Context, entries []ledger.Entry) (map[string]string, error) {
	issuers := make(map[string]string, len(entries)) // none of the gateway's own
	for i := range entries {
		issuers[entries[i].ID] = rec.agentIssuer(&entries[i])
	}
	by := make(map[string]string)
	for i := range entries {
		e := &entries[i]
		if !rec.own(e) {
			continue
		}
		by[e.ID] = e.Issuer
		caller := callerName(callerHashOf(e))
		if caller == "" {
			continue // not about a call
		}
		by[e.ID] = caller
		for _, id := range e.Parents {
			issuer, there := issuers[id]
			if !there { // a token without a workflow, or one that the plan does not need
				p, err := rec.lookup(ctx, e.Workflow, id)
				if err != nil {
					return nil, err
				}
				if p != nil {
					issuer = rec.agentIssuer(p)
				}
				issuers[id] = issuer
			}
			if issuer != "" {
				by[e.ID] = issuer
				break
			}
		}
	}
	return by, nil
}

// agentIssuer is the issuer of an entry; empty if that is the gateway.
func (rec *Recorder) agentIssuer(e *ledger.Entry) string {
	if rec.own(e) {
		return ""
	}
	return e.Issuer
}

// graphOf makes the graph of entries and their records, with who is behind each. It drops the
// parents of unproven tokens and of strangers' reports, which can name any id (ADR 0024).
func (rec *Recorder) graphOf(ctx context.Context, entries []ledger.Entry, records []workflow.Record) (*workflow.Graph, error) {
	by, err := rec.callersOf(ctx, entries)
	if err != nil {
		return nil, err
	}
	for i := range records {
		r := &records[i]
		if r.Issuer == "" || r.Stranger {
			r.Parents = nil
		}
		r.By = r.Issuer
		if name, own := by[r.ID]; own {
			r.By = name
		}
	}
	return workflow.New(records), nil
}

const (
	// maxSingle is how many followers a Single rollback reads. It undoes none of them; the
	// plan names some.
	maxSingle = 1000
	// maxLineage is how many entries are read to find the lineage of the requester.
	maxLineage = 100_000
	// maxAbove is how many levels of parents are read: from a settlement over its checkpoint and
	// the one before that to its group.
	maxAbove = 4
)

// neighbourhood is the part of a workflow that a plan depends on (ADR 0051).
type neighbourhood struct {
	*Recorder
	ctx    context.Context
	wid    string
	read   map[string]*ledger.Entry // by id; nil if nothing is recorded
	taken  map[string]int           // by id: one more than the levels of parents that were taken too
	queue  []string                 // ids whose followers are to be read
	queued map[string]bool          // ids that were in queue: whether all followers are read, or only reports
	bare   bool                     // take entries without their parents
	err    error                    // the first one; nothing is read after it
}

// newNeighbourhood begins with the target.
func newNeighbourhood(ctx context.Context, rec *Recorder, target *ledger.Entry) *neighbourhood {
	return &neighbourhood{
		Recorder: rec, ctx: ctx, wid: target.Workflow,
		read: map[string]*ledger.Entry{target.ID: target}, taken: map[string]int{}, queued: map[string]bool{},
	}
}

// collect reads the entries that the plan of a rollback depends on, however large the
// workflow is: the target and its actions, their followers with their own actions and
// parents, and the lineage of the requester. more says that followers were left out; only
// Single does that.
func (p *neighbourhood) collect(target *ledger.Entry, q *rollback.Query, limit int) (entries []ledger.Entry, more bool, err error) {
	p.add(target, maxAbove)
	p.enqueue(target.ID, true)
	p.lineage(p.contained(target), q)
	if q.Error != "" {
		if e := p.get(q.Error); e != nil {
			p.add(e, maxAbove)
		}
	}
	most := limit
	if q.Scope == rollback.Single {
		most = len(p.taken) + maxSingle
	}
	for n := 0; n < len(p.queue); n++ {
		all := p.queued[p.queue[n]]
		for e := range p.followers(p.queue[n]) {
			if !all && (isCheckpoint(e) || p.isTask(e)) {
				continue
			}
			if more = len(p.taken) >= most && p.taken[e.ID] == 0; more {
				break
			}
			p.addFollower(e)
		}
		switch {
		case p.err != nil:
			return nil, false, p.err
		case more && q.Scope != rollback.Single:
			return nil, false, &rollback.TooManyError{What: "nodes", Count: len(p.taken) + 1, Limit: limit}
		case more:
			p.queue = nil
		}
	}
	return p.entries(), more, p.err
}

// entries are those taken, in the order of recording.
func (p *neighbourhood) entries() (all []ledger.Entry) {
	for id := range p.taken {
		all = append(all, *p.read[id])
	}
	slices.SortFunc(all, func(a, b ledger.Entry) int {
		return cmp.Or(a.Recorded.Compare(b.Recorded), cmp.Compare(a.Log, b.Log), cmp.Compare(a.Index, b.Index))
	})
	return all
}

// get is the entry of an id in the workflow; nil if there is none.
func (p *neighbourhood) get(id string) *ledger.Entry {
	e, known := p.read[id]
	if !known && p.err == nil {
		e, p.err = p.Evidence.log.Known(p.ctx, p.wid, id)
		p.read[id] = e
	}
	return e
}

// parents are the recorded parents of an entry. Unproven tokens have none.
func (p *neighbourhood) parents(e *ledger.Entry) (all []*ledger.Entry) {
	if IsUnproven(e) {
		return nil
	}
	for _, id := range e.Parents {
		if parent := p.get(id); parent != nil && id != e.ID {
			all = append(all, parent)
		}
	}
	return all
}

// add takes an entry and so many levels of its parents; between actions only one.
func (p *neighbourhood) add(e *ledger.Entry, above int) {
	if p.taken[e.ID] > above {
		return
	}
	p.taken[e.ID] = above + 1
	if above == 0 || p.bare {
		return
	}
	for _, parent := range p.parents(e) {
		left := above - 1
		if !isCheckpoint(e) && !isCheckpoint(parent) {
			left = 0
		}
		p.add(parent, left)
	}
}

// enqueue queues a node for the reading of its followers: all of them, or only what reports on it.
func (p *neighbourhood) enqueue(id string, all bool) {
	if before, queued := p.queued[id]; !queued || all && !before {
		p.queued[id] = all
		p.queue = append(p.queue, id)
	}
}

// addFollower takes a follower and queues it, with its actions if it is a checkpoint, or with
// the checkpoint before it if it is an action.
func (p *neighbourhood) addFollower(e *ledger.Entry) {
	if !p.queued[e.ID] {
		p.add(e, maxAbove)
	}
	p.enqueue(e.ID, true)
	p.enqueueSubjects(e, false)
}

// enqueueSubjects queues the agent's actions of a checkpoint, or the agent's checkpoint of an
// action, unless it is about actions only.
func (p *neighbourhood) enqueueSubjects(e *ledger.Entry, actionsOnly bool) {
	parents := p.parents(e)
	// The gateway's own checkpoint of a call covers its outcome, if it follows from all that this follows
	// from: whatever undoes the outcome undoes it by that one. An agent's checkpoint before both has no
	// part in it, so what else follows from that does not matter, only what reports on it. A participant
	// has such a one before each call, and the coordinator's next calls follow from it (ADR 0098).
	covered := p.own(e) && (isCheckpoint(e) || slices.ContainsFunc(parents, func(c *ledger.Entry) bool {
		return p.own(c) && isCheckpoint(c) && slices.Contains(p.Evidence.Outcomes(c), e.ID) &&
			!slices.ContainsFunc(e.Parents, func(id string) bool { return id != c.ID && !slices.Contains(c.Parents, id) })
	}))
	for _, parent := range parents {
		switch {
		case p.own(parent), actionsOnly && !p.isTask(parent):
		case p.isTask(parent):
			if isCheckpoint(e) {
				p.enqueue(parent.ID, true)
			}
		case isCheckpoint(parent) && (p.isTask(e) || isCheckpoint(e)):
			p.enqueue(parent.ID, !covered)
			if isCheckpoint(e) { // the parent's actions are also this one's
				p.enqueueSubjects(parent, covered)
			}
		}
	}
}

// contained are a checkpoint, its actions, and all that it contains as a group. They are
// queued.
func (p *neighbourhood) contained(target *ledger.Entry) []*ledger.Entry {
	all, met := []*ledger.Entry{target}, map[string]bool{target.ID: true}
	for n := 0; n < len(all); n++ {
		e := all[n]
		if !isCheckpoint(e) {
			continue
		}
		p.add(e, maxAbove)
		p.addFollower(e)
		for _, parent := range p.parents(e) {
			counts := p.isTask(parent) && !p.own(parent) || isCheckpoint(parent) && !p.own(e)
			if counts && !met[parent.ID] {
				met[parent.ID] = true
				all = append(all, parent)
			}
		}
		if len(all) > rollback.MaxNodes {
			p.err = cmp.Or(p.err, error(&rollback.TooManyError{What: "nodes", Count: len(all), Limit: rollback.MaxNodes}))
			return nil
		}
	}
	return all
}

// followers are the entries that follow from an id or name it.
func (p *neighbourhood) followers(id string) iter.Seq[*ledger.Entry] {
	return func(yield func(e *ledger.Entry) bool) {
		if e := p.read[id]; e != nil && p.own(e) {
			// The outcomes of a call have ids derived from its checkpoint's.
			for _, id := range p.Evidence.Outcomes(e) {
				if e := p.get(id); e != nil && p.own(e) && !yield(e) {
					return
				}
			}
		}
		if p.err != nil {
			return
		}
		for e, err := range p.Evidence.log.AllFollowing(p.ctx, p.wid, id) {
			if err != nil {
				p.err = err
				return
			}
			if known := p.read[e.ID]; known != nil {
				e = known
			}
			if p.read[e.ID] = e; !yield(e) || p.err != nil {
				return
			}
		}
	}
}

// lineage takes, for each seed, the path to an entry of the requester, if there is one.
func (p *neighbourhood) lineage(seeds []*ledger.Entry, q *rollback.Query) {
	if q.By == "" {
		return
	}
	for _, seed := range seeds {
		from := map[string]string{seed.ID: ""}
		for todo := []*ledger.Entry{seed}; len(todo) > 0 && len(from) < maxLineage; todo = todo[1:] {
			e := todo[0]
			if p.issuedBy(e, q.By) {
				for id := e.ID; id != ""; id = from[id] {
					p.add(p.read[id], 1)
				}
				break
			}
			reach := func(next *ledger.Entry) {
				if _, met := from[next.ID]; !met {
					from[next.ID] = e.ID
					todo = append(todo, next)
				}
			}
			parents := p.parents(e)
			if q.Lineage == rollback.Ancestor && !p.own(e) && isCheckpoint(e) && !slices.ContainsFunc(parents, func(m *ledger.Entry) bool { return !isCheckpoint(m) }) {
				continue // a group does not follow from its members
			}
			for _, parent := range parents {
				reach(parent)
			}
			if q.Lineage != rollback.Workflow {
				continue
			}
			for child := range p.followers(e.ID) {
				// A report connects nothing, and naming a checkpoint is no link.
				if !IsUnproven(child) && !reports(child, p.own(child)) && slices.Contains(child.Parents, e.ID) {
					reach(child)
				}
				if len(from) >= maxLineage {
					break
				}
			}
		}
	}
}

// issuedBy reports whether an entry makes the requester a participant of the workflow.
func (p *neighbourhood) issuedBy(e *ledger.Entry, by string) bool {
	if event, is := readEvent(e.Action, p.own(e)); IsUnproven(e) || is && event != ect.EventCheckpoint && event != ect.EventWorkflowStart {
		return false
	}
	return e.Issuer == by || p.own(e) && callerName(callerHashOf(e)) == by
}

func (p *neighbourhood) isTask(e *ledger.Entry) bool {
	_, is := readEvent(e.Action, p.own(e))
	return !is
}

func isCheckpoint(e *ledger.Entry) bool {
	event, _ := ect.ParseEvent(e.Action)
	return event == ect.EventCheckpoint
}
