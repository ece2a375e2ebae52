package rollbacks

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Checkpoint finds the token of a checkpoint or a group and verifies it, its parents, and
// what led to it as far as the agent behind it (cascade 4.2.3).
//
// An id is taken in its workflow only. Of several the gateway's own counts, and else the
// one that was recorded first: nobody can put another one before it afterwards.
//
// With an error the id and the workflow are there all the same, once an entry was found:
// they are what is told of it.
func (l *Ledger) Checkpoint(ctx context.Context, id string) (rollback.Checkpoint, error) {
	v, err := l.settled(ctx)
	if err != nil {
		return rollback.Checkpoint{}, altered(err)
	}
	e, err := v.target(ctx, canonical(id))
	if err != nil {
		return rollback.Checkpoint{}, altered(err)
	}
	found := rollback.Checkpoint{ID: e.ID, Workflow: e.Workflow}
	c, err := v.verify(ctx, e, asCheckpoint)
	if err != nil {
		return found, altered(err)
	}
	parents, err := v.parents(ctx, e)
	if err != nil {
		return found, altered(err)
	}
	agent, err := v.agent(ctx, &l.behind, e, parents)
	if err != nil {
		return found, altered(err)
	}
	reversible, _ := c.Ext().Bool(ect.MemberReversible)
	ttl := graph.TTLOf(c.Ext())
	return rollback.Checkpoint{
		ID: c.ID(), Workflow: c.Workflow(), Agent: agent, Own: v.own(e), Sum: c.OutputHash().Bytes(),
		Reversible: reversible, Expires: c.IssuedAt().Add(ttl), TTL: ttl, Parents: c.Parents(),
	}, nil
}

// canonical is an id as it is recorded.
func canonical(id string) string {
	if parsed, err := uuid.Parse(id); err == nil && len(id) == len(parsed.String()) {
		return parsed.String()
	}
	return id
}

// altered says of a ledger that was altered that what it tells is not what was recorded.
func altered(err error) error {
	if errors.Is(err, ledger.ErrTampered) && !errors.Is(err, checkpoint.ErrTampered) {
		return fmt.Errorf("%w: %w", checkpoint.ErrTampered, err)
	}
	return err
}

// errUnknown is both what the package rollback says of a checkpoint that is not there.
func errUnknown(id string) error {
	return fmt.Errorf("%w: %w: %.80q", rollback.ErrUnknown, rollback.ErrCheckpointUnknown, id)
}

// target finds the entry of a checkpoint.
func (v *Voice) target(ctx context.Context, id string) (*ledger.Entry, error) {
	all, err := v.Evidence.Log().Find(ctx, id)
	if err != nil {
		return nil, err
	}
	if len(all) >= ledger.MaxFound {
		return nil, fmt.Errorf("rollbacks: the id %.80q stands in %d workflows or more", id, ledger.MaxFound)
	}
	var found *ledger.Entry
	for i := range all {
		e := &all[i]
		if event, _ := ect.ParseEvent(e.Action); event != ect.EventCheckpoint || graph.NobodysWord(e) {
			continue
		}
		first := found == nil || e.Recorded.Before(found.Recorded)
		if own := v.own(e); found == nil || own && !v.own(found) || own == v.own(found) && first {
			found = e
		}
	}
	if found == nil {
		return nil, errUnknown(id)
	}
	return found, nil
}

// parents finds and verifies the parents of an entry, as they are recorded in its workflow
// or in none. Those that are neither are of another workflow or domain, or were pruned.
func (v *Voice) parents(ctx context.Context, e *ledger.Entry) ([]*ledger.Entry, error) {
	var all []*ledger.Entry
	for _, id := range e.Parents {
		p, err := v.near(ctx, e.Workflow, id)
		if err != nil {
			return nil, err
		}
		if p == nil {
			continue
		}
		if _, err := v.verify(ctx, p, asParent); err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// near finds what is recorded under an id in a workflow, or in none; nil is nothing.
func (v *Voice) near(ctx context.Context, workflow, id string) (*ledger.Entry, error) {
	e, err := v.Evidence.Log().Lookup(ctx, workflow, id)
	if errors.Is(err, ledger.ErrNotFound) && workflow != "" {
		e, err = v.Evidence.Log().Lookup(ctx, "", id)
	}
	switch {
	case err == nil:
		return &e, nil
	case errors.Is(err, ledger.ErrNotFound), errors.Is(err, ledger.ErrPruned):
		return nil, nil
	}
	return nil, err
}
