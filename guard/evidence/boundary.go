package evidence

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// The boundaries of workflows (ATD "Workflow Boundary ECTs", ADR 0117). Each follows from its occasion,
// and so has its id: whoever records it a second time, after a crash or at another node, finds it
// recorded.

// memberNodeCount is how many nodes the plan of a workflow has.
const memberNodeCount ect.Member = "cascade.node_count"

// endID is the id of the gateway's workflow_complete: one for a workflow, beside those of rollbacks.
func (e *Evidence) endID(wid string) string { return e.secretID("workflow end", wid) }

// startID is the id of the gateway's workflow_start: one for a workflow.
func (e *Evidence) startID(wid string) string { return e.secretID("workflow start", wid) }

// workflowCompleteID is the id of the event that a rollback has ended its workflow.
func (e *Evidence) workflowCompleteID(id string) string { return e.secretID("workflow complete", id) }

// Begins reports whether a call would be the first of its workflow that anybody has recorded: there is
// neither a start of it, by an agent or by the gateway, nor an earlier call.
func (b *EventBuilder) Begins(ctx context.Context, wid string) (bool, error) {
	if _, known := b.e.begun.find(wid, ""); known {
		return false, nil
	}
	begun, err := b.e.log.Has(ctx, wid, b.e.startID(wid))
	if err == nil && !begun {
		begun, err = b.hasBegun(ctx, wid)
	}
	if err == nil && begun {
		b.e.begun.add(scope{wid, ""}, struct{}{})
	}
	return !begun, err
}

// hasBegun looks at the first entries of a workflow.
func (b *EventBuilder) hasBegun(ctx context.Context, wid string) (bool, error) {
	page, err := b.e.log.List(ctx, wid, "", ledger.MaxPage)
	if err != nil {
		return false, err
	}
	for i := range page.Entries {
		e := &page.Entries[i]
		if beginsWorkflow(e) || b.Own(e) && isCheckpoint(e) {
			return true, nil
		}
	}
	return page.Next != "", nil
}

// Guards reports whether an id is that of a checkpoint of a workflow for a call of this gateway: its own, or one
// that another made, and from which one of its own follows.
func (b *EventBuilder) Guards(ctx context.Context, wid, id string) (bool, error) {
	if id == "" {
		return false, nil
	}
	e, err := b.e.log.Known(ctx, wid, id)
	switch {
	case err != nil || e == nil || !isCheckpoint(e) || IsUnproven(e):
		return false, err
	case b.Own(e):
		return true, nil
	}
	page, err := b.e.log.Following(ctx, wid, id, "", ledger.MaxPage)
	return slices.ContainsFunc(page.Entries, func(e ledger.Entry) bool { return b.Own(&e) && isCheckpoint(&e) }), err
}

func beginsWorkflow(e *ledger.Entry) bool {
	event, _ := ect.ParseEvent(e.Action)
	return event == ect.EventWorkflowStart && !IsUnproven(e)
}

// WorkflowStart is what the gateway says of a workflow that begins with a call.
type WorkflowStart struct {
	// Checkpoint is that of the call, which the start follows from: so it is seen by who may see the
	// call, and by nobody else who uses the name of the workflow (P3).
	Checkpoint string
	// Name, Description and Nodes are those of the workflow's plan; empty without one.
	Name, Description string
	Nodes             int // see Name
}

// WorkflowStart drafts that a workflow begins with a call (ATD Figure "Workflow Start ECT").
func (b *EventBuilder) WorkflowStart(now time.Time, c *Call, s *WorkflowStart) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberWorkflowName, Printable(cmp.Or(s.Name, c.Workflow), maxReason)).
		Text(ect.MemberDescription, Printable(cmp.Or(s.Description, "begins with "+c.Action), maxReason)).
		Text(memberCaller, hex.EncodeToString(c.Caller[:]))
	if s.Nodes > 0 {
		ext.Int(memberNodeCount, int64(s.Nodes))
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.errorAudience(c.Issuer), ID: b.e.startID(c.Workflow), Workflow: c.Workflow,
		Action: string(ect.EventWorkflowStart), Parents: []string{s.Checkpoint}, Ext: ext,
	})
}

// WorkflowEnd is how a workflow has ended.
type WorkflowEnd struct {
	Workflow string
	// Start is the id of its workflow_start, or of its first call where there is none; empty if neither
	// is known. Name is the wf_id in it, and Began the time of the first entry, zero if unknown.
	Start, Name string
	Began       time.Time // see Start
	// Status is success, partial, failed, rolled_back or escalated.
	Status workflow.Status
}

// WorkflowEnd drafts the end of a workflow (ATD Figure "Workflow Complete ECT").
func (b *EventBuilder) WorkflowEnd(now time.Time, w *WorkflowEnd) (*ect.Draft, error) {
	var parents []string
	if w.Start != "" {
		parents = []string{w.Start}
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: []string{b.Identity()}, ID: b.e.endID(w.Workflow), Workflow: w.Workflow,
		Action: string(ect.EventWorkflowComplete), Parents: parents, Ext: w.ext(now),
	})
}

func (w *WorkflowEnd) ext(now time.Time) *ect.ExtBuilder {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberWorkflowName, Printable(cmp.Or(w.Name, w.Workflow), maxReason)).
		Text(ect.MemberTerminalStatus, string(w.Status))
	if !w.Began.IsZero() {
		ext.Int(ect.MemberElapsed, max(0, int64(now.Sub(w.Began)/time.Second)))
	}
	return ext
}

// workflowComplete drafts that a rollback of the whole workflow has ended it (cascade 4.1.3). It follows
// from the workflow's start, if that is recorded, and from the rollback's result.
func (b *EventBuilder) workflowComplete(now time.Time, r *rollback.Rollback, began *WorkflowEnd) (*ect.Draft, error) {
	end := *began
	end.Status = workflow.Status(r.Status) // never more than the rollback achieved (P6)
	if r.Status == rollback.Completed {
		end.Status = "rolled_back"
	}
	parents := []string{b.e.rollbackCompleteID(r.ID)}
	if began.Start != "" {
		parents = append([]string{began.Start}, parents...)
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.rollbackAudience(r), ID: b.e.workflowCompleteID(r.ID), Workflow: r.Workflow,
		Action: string(ect.EventWorkflowComplete), Parents: parents, Ext: end.ext(now).Text(ect.MemberRollbackID, rollbackURN(r.AskedAs())),
	})
}

// Add reads one more entry of a workflow, in the order of recording: the first start counts.
func (w *WorkflowEnd) Add(e *ledger.Entry) {
	if w.Began.IsZero() || e.Time.Before(w.Began) {
		w.Began = e.Time
	}
	if w.Start == "" && beginsWorkflow(e) {
		w.Start = e.ID
		w.Name, _ = extension(e).Text(ect.MemberWorkflowName)
	}
}

// spaceOpen begins the store's keys of workflows whose ends are waited for: a keyed hash of the id. The
// value is the id, sealed.
const spaceOpen = 'y'

// openTime is how long after its last call the end of a workflow is waited for.
const openTime = 90 * 24 * time.Hour

func (e *Evidence) openKey(wid string) []byte {
	hash := store.Index(e.sealer, "open workflow", wid)
	return append(append(make([]byte, 0, 1+hashed), spaceOpen), hash[:hashed]...)
}

// Opened returns the write that notes that the end of a workflow is waited for. Each claim of a call
// writes it again, so that nobody can record the end of a workflow in which a call has just begun.
func (e *Evidence) Opened(now time.Time, wid string) store.Write {
	key := e.openKey(wid)
	return store.Write{Key: key, Value: e.sealer.Seal(nil, []byte(wid), key), Expires: now.Add(openTime)}
}

// OpenSince is the version of that note; zero if the end is not waited for.
func (e *Evidence) OpenSince(ctx context.Context, wid string) (store.Version, error) {
	found, err := e.store.Get(ctx, e.openKey(wid))
	if errors.Is(err, store.ErrNotFound) {
		return 0, nil
	}
	return found.Version, err
}

// Closed returns the write that removes the note, on the condition that no call has begun since.
func (e *Evidence) Closed(wid string, since store.Version) store.Write {
	w := store.Write{Key: e.openKey(wid), Delete: true, If: store.Absent()}
	if since != 0 {
		w.If = store.VersionIs(since)
	}
	return w
}

// OpenWorkflows are the workflows whose ends are waited for, at most so many.
func (e *Evidence) OpenWorkflows(ctx context.Context, most int) (all []string, err error) {
	r := store.Prefix([]byte{spaceOpen})
	r.Limit = most
	for found, err := range e.store.Scan(ctx, r) {
		if err != nil {
			return all, err
		}
		wid, err := e.sealer.Open(nil, found.Value, found.Key)
		if err != nil {
			return all, fmt.Errorf("evidence: an open workflow: %w: %w", ledger.ErrTampered, err)
		}
		all = append(all, string(wid))
	}
	return all, nil
}

// End says where a workflow is between its start and its end: as its initiator sees it, since others may
// use its name for calls of their own (P3).
type End struct {
	// WorkflowEnd is the end to record now, or the one that the gateway has recorded last. Its Status is running
	// while something is open and no end is recorded.
	WorkflowEnd
	// Initiator is who began it.
	Initiator router.Reader
	// Planned says that a plan in force says when it ends, which Status follows. Without one nothing more comes
	// only where somebody says so, or by time.
	Planned bool
	// Abandoned is how it has ended if nothing more comes, also against its plan.
	Abandoned workflow.Status
	// Recorded says whose end of it is recorded.
	Recorded workflow.EndedBy
	// Last is when something was recorded of it last.
	Last time.Time
	// Token is the id of the end that the gateway has recorded; empty without one.
	Token string
	// Since is the version of the note that the end is awaited; zero if it is not. It was read first, so that
	// no call has begun unseen if it has not changed.
	Since store.Version
}

// maxEnding is how many entries of a workflow are read to find out whether it has ended, or where it is in its
// plan.
const maxEnding = 100_000

// End reads where a workflow is. found is false if nothing of it is recorded.
func (s *Ledger) End(ctx context.Context, wid string) (end End, found bool, err error) {
	since, err := s.OpenSince(ctx, wid)
	if err != nil {
		return end, false, err
	}
	if err := s.caughtUp(ctx); err != nil {
		return end, false, err
	}
	if end, err = s.beginning(ctx, wid); err != nil || end.Start == "" {
		return end, false, err
	}
	v, err := s.view(ctx, wid, end.Initiator, maxEnding)
	switch {
	case err != nil || v.part.Empty():
		return end, false, err
	case v.more:
		return end, false, problem.New(workflowRunning, fmt.Sprintf("It has more than %d tokens, and its end is not recorded.", maxEnding))
	}
	recorded := workflow.Status("")
	end.Since = since
	for i := range v.records {
		r := &v.records[i]
		if at := v.sources[r.ID].at; at.After(end.Last) {
			end.Last = at
		}
		if r.Event == ect.EventWorkflowComplete && r.Own && !r.Stranger {
			end.Token, recorded = r.ID, workflow.Status(r.Status)
		}
	}
	var follows *plan.Descriptor // one that a start names and that is not in force keeps nothing from its end
	if s.Assigned != nil {
		a, err := s.Assigned.Of(ctx, wid, has(&v.part))
		if err != nil {
			return end, false, err
		}
		if a != nil {
			follows = a.Plan
		}
	}
	g := workflow.New(v.records)
	end.Recorded, end.Planned = g.Ended(), follows != nil
	if follows != nil {
		p := follows.Progress(g)
		end.Status, end.Abandoned = p.Status, p.Abandoned
	} else {
		var ending workflow.Ending
		for _, i := range g.Tasks() {
			ending.Add(g.At(i).State, g.At(i).Detail)
		}
		end.Status = ending.Status()
		end.Abandoned = end.Status
	}
	end.Status = cmp.Or(recorded, end.Status)
	return end, true, nil
}

// beginning finds who has begun a workflow, and with what: the first start that is recorded, or else the
// first entry. Only the first page is read.
func (s *Ledger) beginning(ctx context.Context, wid string) (end End, err error) {
	end.Workflow = wid
	page, err := s.Log.List(ctx, wid, "", ledger.MaxPage)
	if err != nil {
		return end, err
	}
	first := ""
	for i := range page.Entries {
		e := &page.Entries[i]
		if IsUnproven(e) {
			continue
		}
		before := end.Start
		end.Add(e)
		if own := s.own(e); first == "" || before != end.Start {
			end.Initiator = router.Reader{Issuer: e.Issuer}
			if own {
				end.Initiator = router.Reader{Caller: callerHashOf(e)}
			}
			if own && before != end.Start { // its audience is who began the workflow, and the gateway
				for _, name := range audienceOf(e) {
					if name != e.Issuer {
						end.Initiator.Issuer = name
					}
				}
			}
		}
		first = cmp.Or(first, e.ID)
	}
	end.Start = cmp.Or(end.Start, first)
	return end, nil
}

// endDocument says how a workflow has ended. Its members are an API.
type endDocument struct {
	Workflow string          `json:"wid"`
	Status   workflow.Status `json:"terminal_status"`
	// ID is that of the gateway's workflow_complete, and Entry the path of its entry and receipt.
	ID    string `json:"jti"`
	Entry string `json:"entry"`
}

// complete records the end of a workflow: its initiator, or a coordinator, says that nothing more comes. An
// agent says it with its own workflow_complete, which is recorded too; what the gateway records is how the
// workflow has ended by its records (P6).
func (q *ledgerRequest) complete() error {
	name, err := router.Segment(q.Name, "workflow id")
	if err != nil {
		return err
	}
	stated, who, err := q.statedEnd()
	if err != nil {
		return err
	}
	if stated == nil {
		if q.who.Anonymous {
			return problem.New(router.Unauthenticated, "Ask with the credential that the workflow's calls were made with, or with a signed token that says workflow_complete.")
		}
		if called, err := q.hasCalled(q.R.Context(), q.who); err != nil || !called {
			return cmp.Or(err, error(unknownWorkflow()))
		}
	}
	// Who saw the end of a call can rely on its record.
	if err := q.caughtUp(q.R.Context()); err != nil {
		return err
	}
	for _, wid := range workflowIDs(name) {
		if stated != nil && stated.Workflow() != wid {
			continue
		}
		if done, err := q.completeAs(wid, who, stated); done || err != nil {
			return err
		}
	}
	if stated != nil && len(stated.Parents()) > 0 { // P3: as if they were unknown
		return &ect.Error{Code: ect.CodeParentUnknown}
	}
	return unknownWorkflow()
}

// statedEnd returns the agent's own verified token of the end, if the request has one, and who asks.
func (q *ledgerRequest) statedEnd() (*ect.Token, router.Reader, error) {
	raws, err := ect.ParseFields(q.R.Header.Values(ect.FieldName))
	switch {
	case err != nil || len(raws) == 0:
		return nil, q.who, err
	case len(raws) > 1:
		return nil, q.who, router.Refused(ect.CodeTooManyParents, "Send one token.")
	}
	u, err := ect.ParseInsecure(raws[0])
	if err != nil {
		return nil, q.who, err
	}
	status, _ := u.Ext().Text(ect.MemberTerminalStatus)
	switch {
	case u.Event() != ect.EventWorkflowComplete:
		return nil, q.who, router.Refused(ect.CodeAction, "Only a token whose exec_act is workflow_complete ends a workflow.")
	case u.Level() < ect.L2:
		return nil, q.who, &ect.Error{Code: ect.CodeLevel}
	case u.Workflow() == "":
		return nil, q.who, &ect.Error{Code: ect.CodeWorkflow}
	case len(u.Lacks()) > 0:
		return nil, q.who, &ect.Error{Code: ect.CodeExt, Lacks: u.Vocabulary().Member(u.Lacks()[0])}
	case !slices.Contains([]string{"success", "partial", "failed", "rolled_back", "escalated"}, status):
		return nil, q.who, router.Refused(ect.CodeExt, "The terminal status is none of success, partial, failed, rolled_back and escalated.")
	}
	verified, err := q.Verify(q.R, raws)
	if err != nil {
		return nil, q.who, err
	}
	return verified[0], router.Reader{Issuer: verified[0].Issuer()}, nil
}

// completeAs records the end of a workflow. done is false if the reader has no part in it.
func (q *ledgerRequest) completeAs(wid string, who router.Reader, stated *ect.Token) (done bool, err error) {
	ctx := q.R.Context()
	coordinator := who.Issuer != "" && slices.Contains(q.Coordinators, who.Issuer)
	if !coordinator {
		part, err := q.participationOf(ctx, wid, who)
		if err != nil || part.Empty() {
			return false, err
		}
	}
	if stated != nil {
		if err := q.checkParents([]*ect.Token{stated}, nil); err != nil {
			return true, err
		}
	}
	for {
		end, found, err := q.End(ctx, wid)
		switch {
		case err != nil || !found:
			return false, err
		case !coordinator && !end.began(who):
			return true, problem.New(initiatorRequired, "Others began it.")
		case end.Recorded == workflow.ByGateway:
			return true, q.writeEnd(http.StatusOK, &end)
		case end.Abandoned == workflow.StatusRunning:
			return true, problem.New(workflowRunning, "Something of it runs, is in doubt or is being undone.")
		}
		end.Status = end.Abandoned
		if end.Token, err = q.Complete(ctx, &end, stated); err == nil {
			return true, q.writeEnd(http.StatusCreated, &end)
		}
		if !errors.Is(err, ErrEndedMeanwhile) {
			return true, err
		}
	}
}

// ErrEndedMeanwhile says that something was recorded in a workflow since its End was read: a call, or its
// end.
var ErrEndedMeanwhile = errors.New("api: the workflow has changed")

// began reports whether a reader is the workflow's initiator.
func (end *End) began(who router.Reader) bool {
	i := end.Initiator
	return i.Issuer != "" && i.Issuer == who.Issuer || i.Caller != [16]byte{} && i.Caller == who.Caller
}

func (q *ledgerRequest) writeEnd(status int, end *End) error {
	return q.JSON(status, endDocument{end.Workflow, end.Status, end.Token, entryURL(end.Workflow, end.Token)})
}
