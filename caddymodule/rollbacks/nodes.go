package rollbacks

import (
	"context"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Requester is the name by which lineage judges who asks: the issuer of a verified token,
// else what the ledger knows of the credential. It is empty, and nobody, for those who
// have none. It is to be compared with plan.Node.By of the nodes that Nodes gives.
func Requester(who graph.Reader) string {
	switch {
	case who.Anonymous:
		return ""
	case who.Issuer != "":
		return who.Issuer
	}
	return evidence.CallerName(who.Caller)
}

// Nodes are the nodes of a workflow as a plan needs them. It is all of the workflow or an
// error: *plan.TooManyError where there is more than a plan can be made for.
//
// Where wid is empty the workflow is that of the target. A checkpoint that is in none is
// alone.
func (l *Ledger) Nodes(ctx context.Context, wid, target string) ([]plan.Node, error) {
	v, err := l.settled(ctx)
	if err != nil {
		return nil, altered(err)
	}
	target = canonical(target)
	var e *ledger.Entry
	if wid == "" {
		if e, err = v.target(ctx, target); err != nil {
			return nil, altered(err)
		}
		wid = e.Workflow
	}
	var entries []ledger.Entry
	if wid == "" {
		entries, err = v.alone(ctx, e)
	} else {
		entries, err = v.all(ctx, wid)
	}
	if err != nil {
		return nil, altered(err)
	}
	by, err := v.behind(ctx, entries)
	if err != nil {
		return nil, altered(err)
	}
	nodes := nodesOf(workflow.New(linked(graph.Records(entries, v.own))), by)
	begun(nodes, entries)
	if wid == "" {
		return only(nodes, target), nil
	}
	return nodes, nil
}

// all are the entries of a workflow, in the order in which they were recorded.
func (v *Voice) all(ctx context.Context, wid string) ([]ledger.Entry, error) {
	var all []ledger.Entry
	for next := ledger.Cursor(""); ; {
		page, err := v.Evidence.Log().List(ctx, wid, next, ledger.MaxPage)
		if err != nil {
			return nil, err
		}
		if all = append(all, page.Entries...); len(all) > plan.MaxNodes {
			return nil, &plan.TooManyError{What: "nodes", Count: len(all), Limit: plan.MaxNodes}
		}
		if next = page.Next; next == "" {
			break
		}
	}
	// A fleet has a log for each gateway.
	slices.SortStableFunc(all, func(a, b ledger.Entry) int { return a.Recorded.Compare(b.Recorded) })
	return all, nil
}

// alone are the entries that a checkpoint without a workflow is judged by: what led to it,
// itself, and what came of its call.
func (v *Voice) alone(ctx context.Context, e *ledger.Entry) ([]ledger.Entry, error) {
	ids := append(slices.Clone(e.Parents), e.ID)
	if v.own(e) {
		ids = append(ids, v.Evidence.NodeID(e.ID), v.Evidence.SettledID(e.ID))
	}
	var all []ledger.Entry
	for _, id := range ids {
		near, err := v.near(ctx, "", id)
		if err != nil {
			return nil, err
		}
		if near != nil {
			all = append(all, *near)
		}
	}
	return all, nil
}

// only is the one node, without what it does not stand beside.
func only(nodes []plan.Node, id string) []plan.Node {
	nodes = slices.DeleteFunc(nodes, func(n plan.Node) bool { return n.ID != id })
	for i := range nodes {
		nodes[i].Guards = nil
	}
	return nodes
}

// behind says by id who is behind the gateway's own nodes: the agent whose token led to
// it, else the caller. What others have issued speaks for its issuer alone.
func (v *Voice) behind(ctx context.Context, entries []ledger.Entry) (map[string]string, error) {
	issuers := make(map[string]string, len(entries)) // none of the gateway's own
	for i := range entries {
		issuers[entries[i].ID] = v.agentOf(&entries[i])
	}
	by := make(map[string]string)
	for i := range entries {
		e := &entries[i]
		if !v.own(e) {
			continue
		}
		by[e.ID] = e.Issuer
		caller := evidence.CallerName(graph.CallerOf(e))
		if caller == "" {
			continue // it tells of no call
		}
		by[e.ID] = caller
		for _, id := range e.Parents {
			issuer, there := issuers[id]
			if !there { // a token without a workflow, it may be
				p, err := v.near(ctx, "", id)
				if err != nil {
					return nil, err
				}
				if p != nil {
					issuer = v.agentOf(p)
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

// agentOf is the issuer of an entry, empty where that is the gateway.
func (v *Voice) agentOf(e *ledger.Entry) string {
	if v.own(e) {
		return ""
	}
	return e.Issuer
}

// linked cuts off what names what it likes: what nobody is proven to have issued, and what is
// told by who has no part in it (ADR 0024).
func linked(records []workflow.Record) []workflow.Record {
	for i := range records {
		if r := &records[i]; r.Issuer == "" || r.Stranger {
			r.Parents = nil
		}
	}
	return records
}

// nodesOf makes nodes of a workflow's graph.
func nodesOf(g *workflow.Graph, by map[string]string) []plan.Node {
	groups := make(map[string]bool)
	for _, e := range g.Edges() {
		groups[e.From] = groups[e.From] || e.Kind == workflow.Contains
	}
	all := g.Nodes()
	nodes := make([]plan.Node, 0, len(all))
	for i := range all {
		n := &all[i]
		node := plan.Node{ID: n.ID, Parents: n.Parents, Kind: plan.Event, By: n.Issuer, Told: graph.Told(&n.Record)}
		if name, own := by[n.ID]; own {
			node.By = name
		}
		switch {
		case n.Event == workflow.Event(ect.EventWorkflowStart):
			node.Begins = true
		case n.Event == "":
			node.Kind, node.Done = plan.Action, n.State == workflow.Done
		case n.Event == workflow.Checkpoint:
			node.Kind, node.State = plan.Checkpoint, stateOf(n, groups[n.ID])
			node.Reversible, node.Expires, node.Guards = n.Reversible, n.Expires, n.Guards
			if groups[n.ID] {
				node.Kind = plan.Group
				// A token that names itself contains nothing by it.
				node.Parents = slices.DeleteFunc(slices.Clone(n.Parents), func(id string) bool { return id == n.ID })
			}
		}
		nodes = append(nodes, node)
	}
	return nodes
}

// begun says in which order the nodes began, which is that of the entries.
func begun(nodes []plan.Node, entries []ledger.Entry) {
	places := make(map[string]int, len(entries))
	for i := range entries {
		if _, twice := places[entries[i].ID]; !twice {
			places[entries[i].ID] = i
		}
	}
	for i := range nodes {
		nodes[i].Start = places[nodes[i].ID]
	}
}

// stateOf is how a checkpoint stands by what was told of it. A group stands until all that
// it contains was looked at: somebody's word for the group is none for that (P6).
func stateOf(n *workflow.Node, group bool) plan.State {
	switch {
	case group:
		return plan.Standing
	case n.State == workflow.RolledBack:
		return plan.Undone
	case n.Detail == workflow.DetailReleased:
		return plan.NeverRan
	case n.Own && n.State == workflow.Running:
		return plan.InFlight
	}
	return plan.Standing
}
