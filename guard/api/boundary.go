package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// End says where a workflow is between its start and its end: as its initiator sees it, since others may
// use its name for calls of their own (P3).
type End struct {
	// WorkflowEnd is the end to record now, or the one that the gateway has recorded last. Its Status is running
	// while something is open and no end is recorded.
	evidence.WorkflowEnd
	// Initiator is who began it.
	Initiator evidence.Reader
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
		if evidence.IsUnproven(e) {
			continue
		}
		before := end.Start
		end.Add(e)
		if own := s.own(e); first == "" || before != end.Start {
			end.Initiator = evidence.Reader{Issuer: e.Issuer}
			if own {
				end.Initiator = evidence.Reader{Caller: evidence.CallerOf(e)}
			}
			if own && before != end.Start { // its audience is who began the workflow, and the gateway
				for _, name := range evidence.AudienceOf(e) {
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
	name, err := segment(q.name, "workflow id")
	if err != nil {
		return err
	}
	stated, who, err := q.statedEnd()
	if err != nil {
		return err
	}
	if stated == nil {
		if q.who.Anonymous {
			return problem.New(AuthenticationRequired, "Ask with the credential that the workflow's calls were made with, or with a signed token that says workflow_complete.")
		}
		if called, err := q.hasCalled(q.r.Context(), q.who); err != nil || !called {
			return cmp.Or(err, error(unknownWorkflow()))
		}
	}
	// Who saw the end of a call can rely on its record.
	if err := q.caughtUp(q.r.Context()); err != nil {
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
		return refused(ect.CodeParentUnknown)
	}
	return unknownWorkflow()
}

// statedEnd returns the agent's own verified token of the end, if the request has one, and who asks.
func (q *ledgerRequest) statedEnd() (*ect.Token, evidence.Reader, error) {
	raws, err := ect.ParseFields(q.r.Header.Values(ect.FieldName))
	switch {
	case err != nil || len(raws) == 0:
		return nil, q.who, err
	case len(raws) > 1:
		return nil, q.who, refusedFor(ect.CodeTooManyParents, "Send one token.")
	}
	u, err := ect.ParseInsecure(raws[0])
	if err != nil {
		return nil, q.who, err
	}
	status, _ := u.Ext().Text(ect.MemberTerminalStatus)
	switch {
	case u.Event() != ect.EventWorkflowComplete:
		return nil, q.who, refusedFor(ect.CodeAction, "Only a token whose exec_act is workflow_complete ends a workflow.")
	case u.Level() < ect.L2:
		return nil, q.who, refused(ect.CodeLevel)
	case u.Workflow() == "":
		return nil, q.who, refused(ect.CodeWorkflow)
	case len(u.Lacks()) > 0:
		return nil, q.who, &ect.Error{Code: ect.CodeExt, Lacks: u.Vocabulary().Member(u.Lacks()[0])}
	case !slices.Contains([]string{"success", "partial", "failed", "rolled_back", "escalated"}, status):
		return nil, q.who, refusedFor(ect.CodeExt, "The terminal status is none of success, partial, failed, rolled_back and escalated.")
	}
	verified, err := q.Verify(q.r, raws)
	if err != nil {
		return nil, q.who, err
	}
	return verified[0], evidence.Reader{Issuer: verified[0].Issuer()}, nil
}

// completeAs records the end of a workflow. done is false if the reader has no part in it.
func (q *ledgerRequest) completeAs(wid string, who evidence.Reader, stated *ect.Token) (done bool, err error) {
	ctx := q.r.Context()
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
func (end *End) began(who evidence.Reader) bool {
	i := end.Initiator
	return i.Issuer != "" && i.Issuer == who.Issuer || i.Caller != [16]byte{} && i.Caller == who.Caller
}

func (q *ledgerRequest) writeEnd(status int, end *End) error {
	return q.writeJSON(status, endDocument{end.Workflow, end.Status, end.Token, entryURL(end.Workflow, end.Token)})
}
