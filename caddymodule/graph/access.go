package graph

import (
	"context"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// share is what of a workflow a reader may see (ADR 0023): what is linked to its own
// nodes, by tokens and by calls. To name a workflow in a token is not enough (cascade
// 6.1), and strangers may use the same name for one. The zero share is nothing.
type share struct {
	ids map[string]bool
}

func (s *share) has(id string) bool { return s.ids[id] }
func (s *share) empty() bool        { return len(s.ids) == 0 }

// sharing finds out the share of a reader while entries are read.
type sharing struct {
	*Server
	who   Reader
	links links
	mine  []string
}

// add takes an entry. It reports whether nothing more can come of others, which is never.
func (p *sharing) add(e *ledger.Entry) bool {
	event, _ := ect.ParseEvent(e.Action)
	// Who has told of an error need not have any other part in the workflow.
	if p.called(e, p.who) || event != ect.EventError && p.issued(e, p.who) {
		p.mine = append(p.mine, e.ID)
	}
	if p.links == nil {
		p.links = make(links)
	}
	if !NobodysWord(e) { // which can name what it likes
		p.links.add(e.ID, e.Parents, p.told(e))
	}
	return false
}

func (p *sharing) share() share { return p.links.from(p.mine) }

// shareOf finds out what a reader may see of a workflow.
func (s *Server) shareOf(ctx context.Context, wid string, who Reader) (share, error) {
	if wid == "" {
		return share{}, nil
	}
	p := sharing{Server: s, who: who}
	_, err := s.each(ctx, wid, p.add)
	return p.share(), err
}

// mayRead reports whether the reader may see an entry.
func (s *Server) mayRead(ctx context.Context, e *ledger.Entry, who Reader) (bool, error) {
	if s.issued(e, who) || s.called(e, who) {
		return true, nil
	}
	part, err := s.shareOf(ctx, e.Workflow, who)
	return part.has(e.ID), err
}

// each gives the entries of a workflow in their order, at most MaxNodes, until visit
// has enough. It reports whether there are more than it gave.
func (s *Server) each(ctx context.Context, wid string, visit func(*ledger.Entry) (enough bool)) (more bool, err error) {
	var next ledger.Cursor
	for left := s.MaxNodes; ; {
		page, err := s.Log.List(ctx, wid, next, min(left, ledger.MaxPage))
		if err != nil {
			return false, err
		}
		for i := range page.Entries {
			if visit(&page.Entries[i]) {
				return true, nil
			}
		}
		left -= len(page.Entries)
		switch next = page.Next; {
		case next == "":
			return false, nil
		case left <= 0:
			return true, nil
		}
	}
}

// workflowIDs are the ids that a name can stand for: that of tokens, and that of calls
// without any (ADR 0023).
func workflowIDs(name string) []string {
	return slices.Compact([]string{evidence.WorkflowID(name), evidence.NamedWorkflowID(name)})
}
