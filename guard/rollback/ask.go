package rollback

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Longest members of a Request, in bytes.
const (
	maxText   = 512
	maxReason = 512
)

func (r *Request) check() error {
	switch {
	case r.Checkpoint == "":
		return fmt.Errorf("%w: no checkpoint is named", ErrInvalid)
	case len(r.Reason) > maxReason:
		return fmt.Errorf("%w: a reason of %d bytes, at most %d", ErrInvalid, len(r.Reason), maxReason)
	}
	for what, text := range map[string]string{
		"checkpoint": r.Checkpoint, "urgency": r.Urgency, "token": r.Token, "error": r.Error, "operator": r.Operator,
	} {
		if len(text) > maxText {
			return fmt.Errorf("%w: %s of %d bytes, at most %d", ErrInvalid, what, len(text), maxText)
		}
	}
	return nil
}

func (r *Request) checkID() error {
	if id, err := uuid.Parse(r.ID); err != nil || id.String() != r.ID {
		return fmt.Errorf("%w: the id is no UUID in its canonical form", ErrInvalid)
	}
	return nil
}

// draft is a rollback that is about to be accepted, or shown.
type draft struct {
	head
	planned
}

// refusal is a verification of the target that has failed: an error is told (cascade
// 4.2.3).
type refusal struct {
	error
	draft *draft
	why   string
}

func (e *refusal) Unwrap() error { return e.error }

// unknown is the answer about a checkpoint that is not there: strangers get what they get
// for others' checkpoints.
func (r *Request) unknown() error {
	if r.Operator != "" || r.Coordinator {
		return ErrCheckpointUnknown
	}
	return ErrNotInWorkflow
}

// draft decides who may ask, verifies the target, and makes the plan. It touches nothing.
func (c *Coordinator) draft(ctx context.Context, r *Request) (*draft, error) {
	nodes, err := c.o.Ledger.Nodes(ctx, "", r.Checkpoint)
	if errors.Is(err, ErrUnknown) {
		return nil, r.unknown()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	cp, tampered, err := c.token(ctx, r.Checkpoint)
	if err != nil {
		return nil, err
	}
	g, err := plan.New(cp.Workflow, nodes)
	if err != nil {
		return nil, err
	}
	if r.Operator == "" && !r.Coordinator && !g.MayAsk(r.By, r.Checkpoint, r.Lineage) {
		return nil, ErrNotInWorkflow
	}
	if r.Unnamed && !g.Follows(r.Error, r.Checkpoint) {
		return nil, ErrUnnamed
	}
	now, err := c.now(ctx)
	if err != nil {
		return nil, err
	}
	d := &draft{head: head{
		ID: r.ID, Checkpoint: r.Checkpoint, Workflow: cp.Workflow, Scope: r.Scope, Reason: r.Reason, Urgency: r.Urgency,
		Operator: r.Operator, Token: r.Token, Content: r.content(), Asked: now,
	}}
	if r.Operator == "" {
		d.Requester = r.By
	}
	if tampered {
		return nil, &refusal{checkpoint.ErrTampered, d, "the checkpoint's token is not what was recorded"}
	}
	ask := plan.Request{
		Target: r.Checkpoint, Scope: r.Scope, Now: now,
		Coordinator: r.Coordinator || r.Operator != "",
	}
	if !ask.Coordinator {
		// Others may have done something under the same workflow id that is none of theirs.
		ask.By, ask.Lineage = r.By, r.Lineage
		ask.Coordinator = r.By != "" && g.Initiator() == r.By
	}
	p, err := g.Plan(ask)
	if unknown := (*plan.UnknownError)(nil); errors.As(err, &unknown) {
		return nil, r.unknown()
	}
	if err != nil {
		return nil, err
	}
	tokens := map[string]Checkpoint{r.Checkpoint: cp}
	if err := c.update(ctx, nodes, p, tokens); err != nil {
		return nil, err
	}
	if g, err = plan.New(cp.Workflow, nodes); err != nil {
		return nil, err
	}
	if p, err = g.Plan(ask); err != nil {
		return nil, err
	}
	if err := p.Partial(); err != nil {
		return nil, err
	}
	d.Plan = p
	if err := c.verify(ctx, d, &cp, now); err != nil {
		return nil, err
	}
	d.Due = now.Add(d.limit(tokens, &cp))
	hash := p.Hash()
	d.Hash = hash[:]
	for _, level := range p.Levels {
		for _, s := range level {
			d.Agents = append(d.Agents, tokens[s.Checkpoint].Agent)
		}
	}
	d.Steps = len(d.Agents)
	return d, nil
}

// update brings what the tokens tell of the plan's checkpoints up to date, and collects
// the tokens.
func (c *Coordinator) update(ctx context.Context, nodes []plan.Node, p *plan.Plan, tokens map[string]Checkpoint) error {
	places := make(map[string]int, len(nodes))
	for i := range nodes {
		places[nodes[i].ID] = i
	}
	for _, level := range p.Levels {
		for _, s := range level {
			n := &nodes[places[s.Checkpoint]]
			m, _, err := c.mark(ctx, n.ID)
			if err != nil {
				return err
			}
			cp, known := tokens[n.ID]
			if !known {
				// One that does not verify is found out again when it is its turn.
				var tampered bool
				if cp, tampered, err = c.token(ctx, n.ID); err != nil {
					return err
				}
				if tampered {
					continue
				}
				tokens[n.ID] = cp
			}
			if m.State == checkpoint.Undone {
				n.State = plan.Undone
				continue
			}
			if n.Kind == plan.Group || !cp.Own {
				continue
			}
			if n.State == plan.Undone { // P5: the vault knows, and says otherwise
				n.State = plan.Standing
			}
			seen, err := c.call(ctx, &cp, "", n.State)
			if errors.Is(err, ErrStore) {
				return err
			}
			if err == nil {
				n.State = seen.state
			}
		}
	}
	return nil
}

// verify verifies the target before anything is touched (cascade 4.2.3). What was undone
// already needs nothing of it.
func (c *Coordinator) verify(ctx context.Context, d *draft, cp *Checkpoint, now time.Time) error {
	var what plan.What
	for _, level := range d.Plan.Levels {
		for _, s := range level {
			if s.Checkpoint == d.Checkpoint {
				what = s.What
			}
		}
	}
	expired := &refusal{checkpoint.ErrExpired, d, "the checkpoint has expired"}
	if what == plan.Nothing {
		return nil
	}
	if what != plan.Block && !cp.Expires.IsZero() && !now.Before(cp.Expires) {
		return expired
	}
	if what != plan.Undo || !cp.Own {
		return nil
	}
	_, err := c.o.Vault.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires})
	switch {
	case err == nil, errors.Is(err, checkpoint.ErrReleased): // meanwhile: it is found again
		return nil
	case errors.Is(err, checkpoint.ErrStore):
		return fmt.Errorf("%w: %w", ErrStore, err)
	case errors.Is(err, checkpoint.ErrExpired):
		return expired
	}
	return &refusal{checkpoint.ErrTampered, d, "the snapshot does not match the checkpoint's out_hash"}
}

// limit is how long the rollback may take: half of the shortest ttl among what it undoes
// (ATD, "Rollback Timeout and Escalation").
func (d *draft) limit(tokens map[string]Checkpoint, target *Checkpoint) time.Duration {
	least := time.Duration(0)
	for _, level := range d.Plan.Levels {
		for _, s := range level {
			ttl := tokens[s.Checkpoint].TTL
			if undoes := s.What == plan.Undo || s.Then == plan.Undo; undoes && ttl > 0 && (least == 0 || ttl < least) {
				least = ttl
			}
		}
	}
	if least == 0 {
		least = target.TTL
	}
	if least <= 0 {
		least = defaultTTL
	}
	return least / 2
}

// defaultTTL is the ttl of checkpoints that say nothing (cascade 4.2.1).
const defaultTTL = 24 * time.Hour

// rollback is the draft as others see it.
func (d *draft) rollback() *Rollback {
	r := d.head.rollback()
	if d.Plan != nil {
		r.Plan = d.Plan
		r.Steps, _ = d.planned.steps()
	}
	return r
}

// Plan shows what Execute would do, or why it would be refused. Nothing is recorded,
// nothing is touched; the request needs no id.
func (c *Coordinator) Plan(ctx context.Context, r Request) (*Rollback, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	d, err := c.draft(ctx, &r)
	if refused := (*refusal)(nil); errors.As(err, &refused) {
		return nil, refused.error
	}
	if err != nil {
		return nil, err
	}
	rivals, err := c.rivals(ctx, d.Workflow)
	if err != nil {
		return nil, err
	}
	if _, err := d.meet(rivals); err != nil {
		return nil, err
	}
	shown := d.rollback()
	for i := range shown.Steps {
		c.foresee(ctx, &shown.Steps[i])
	}
	return shown, nil
}
