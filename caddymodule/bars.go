package caddymodule

import (
	"errors"
	"iter"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// enter admits a call that would claim: not where its workflow is stopped, nor where it
// follows from what is being undone (DESIGN, "The way of a request", step 4). leave is
// called when the claim's commit has ended.
func (x *exchange) enter(found guard.Finding) (leave func(), err error) {
	c := x.engine.rollbacks.coordinator()
	if c == nil {
		return func() {}, nil
	}
	workflow := x.story.call.Workflow
	if x.story.way == nil { // this configuration has no identity, and another one had
		workflow = evidence.WorkflowID(x.call.Workflow)
	}
	if workflow == "" && found.Record != nil && found.Record.Checkpoint != "" {
		root, err := x.engine.vault.First(x.r.Context(), found.Record.Checkpoint)
		if err != nil {
			return nil, x.storeFailed(err)
		}
		workflow = rollback.Alone(root)
	}
	leave, err = c.Enter(x.r.Context(), workflow, x.led(workflow, found))
	barred := (*rollback.BarredError)(nil)
	switch {
	case err == nil:
		return leave, nil
	case !errors.As(err, &barred):
		return nil, x.storeFailed(err)
	case barred.Stopped:
		return nil, x.problem(problem.WorkflowStopped, "A rollback of the whole workflow has ended it. Nothing was forwarded.", 0)
	}
	return nil, x.problem(problem.WorkflowPaused, "What the call follows from is being rolled back. Nothing was forwarded.", 0)
}

// led is what has led to the call: the ids of its parents, of theirs, and so on, the
// nearest first. What stands in no ledger here has led from elsewhere, and ends the walk.
// It is read only while a rollback of the workflow is under way.
func (x *exchange) led(workflow string, found guard.Finding) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		s := &x.story
		if s.way == nil {
			return
		}
		todo := slices.Clone(s.call.Parents)
		if found.Record != nil { // an attempt that is in doubt, and may be just being undone
			todo = append(todo, found.Record.Checkpoint)
		}
		for _, t := range s.tokens.all {
			todo = append(todo, t.ID())
			todo = append(todo, t.Parents()...)
		}
		graph, known := s.way.evidence.Graph(workflow), map[string]bool{}
		for len(todo) > 0 {
			id := todo[0]
			todo = todo[1:]
			if known[id] {
				continue
			}
			if known[id] = true; len(known) > ect.MaxAncestors {
				yield("", errTooManyAncestors) // what was not looked at may be undone
				return
			}
			if !yield(id, nil) {
				return
			}
			nodes, err := graph.Nodes(x.r.Context(), id)
			if err != nil {
				yield("", err)
				return
			}
			for i := range nodes {
				if nodes[i].Workflow == workflow || nodes[i].Workflow == "" {
					todo = append(todo, nodes[i].Parents...)
				}
			}
		}
	}
}

var errTooManyAncestors = errors.New("more has led to the call than can be looked at")
