package rollback

import (
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// draft is a rollback before its acceptance, or only shown.
type draft struct {
	Rollback
	graph       string                  // the version of the workflow's graph that the plan was made of
	checkpoints map[string]*checkedNode // of the plan, by their ids
	target      Checkpoint
}

// checkedNode is a checkpoint of a plan, with the state that the plan assumes.
type checkedNode struct {
	node  *workflow.Node
	state NodeState
	token Checkpoint // the zero value where it does not verify
	outlook
}

// outlook is what is known of an undo before it is tried.
type outlook struct {
	way      string   // of a call that ran
	obstacle string   // why it is in vain; empty if nothing is known
	cause    string   // of the obstacle irreversible
	by       informed // who takes part in both phases and undoes it; zero is nobody
}

// refusal is a failed verification of the target: an error is recorded (cascade 4.2.3).
type refusal struct {
	error
	draft *draft
	why   string
}

func (e *refusal) Unwrap() error { return e.error }

// draft decides who may ask, verifies the target, and makes the plan. It changes nothing.
func (c *journal) draft(ctx context.Context, r *Request) (*draft, error) {
	// A coordinator and an operator may ask for everything, and for the whole workflow. Else others may have acted under
	// the same workflow id without being part of the workflow.
	ask := PlanInput{Target: r.Checkpoint, Scope: r.Scope, Coordinator: r.Coordinator || r.Operator != ""}
	if !ask.Coordinator {
		ask.By, ask.Lineage = r.By, r.Lineage
	}
	q := Query{Target: r.Checkpoint, Scope: r.Scope, By: ask.By, Lineage: r.Lineage, Error: r.Error}
	view, err := c.o.Ledger.Graph(ctx, q)
	if errors.Is(err, ErrUnknown) {
		return nil, r.unknown()
	}
	altered := errors.Is(err, checkpoint.ErrTampered)
	if err != nil && !altered {
		return nil, unavailable(err)
	}
	cp, tampered, err := c.token(ctx, r.Checkpoint)
	if err != nil {
		return nil, err
	}
	g := view.Graph
	if err := bounded(g); err != nil {
		return nil, err
	}
	if !ask.Coordinator && !MayAsk(g, r.By, r.Checkpoint, r.Lineage) {
		return nil, ErrNotInWorkflow
	}
	if r.Unnamed && !altered && !follows(g, r.Error, r.Checkpoint) {
		return nil, ErrUnnamed
	}
	now, err := c.now(ctx)
	if err != nil {
		return nil, err
	}
	d := &draft{Rollback: *r.rollback(), checkpoints: map[string]*checkedNode{}}
	d.Workflow, d.Asked = cp.Workflow, now
	switch {
	case tampered:
		return nil, &refusal{checkpoint.ErrTampered, d, "the checkpoint's token is not what was recorded"}
	case altered:
		return nil, &refusal{checkpoint.ErrTampered, d, "what depends on the checkpoint is not what was recorded"}
	}
	ask.Workflow, ask.Now = cp.Workflow, now
	ask.Coordinator = ask.Coordinator || r.By != "" && initiator(g) == r.By
	d.target = cp
	if err := c.plan(ctx, r, d, &view, ask); err != nil {
		return nil, err
	}
	return d, nil
}

// discovered is draft, after the configured participants were asked for what they have of the workflow
// (C-4.3.1-e): whoever asks may ask for it. Parts of a rollback leave that to its coordinator.
func (c *journal) discovered(ctx context.Context, r *Request) (*draft, error) {
	d, err := c.draft(ctx, r)
	if err != nil || c.o.Discover == nil || r.Scope == Single || r.PartOf != "" || d.Workflow == "" {
		return d, err
	}
	if _, err := c.reservation(ctx, c.name(r.ID)); !errors.Is(err, ErrUnknown) { // they were asked when it was prepared
		return d, err
	}
	within, cancel := context.WithTimeout(ctx, max(c.o.PrepareTimeout(), c.o.Reservation()))
	fresh, unreached, err := c.o.Discover(within, d.Workflow)
	cancel()
	if err != nil {
		return nil, unavailable(err)
	}
	if fresh {
		if d, err = c.draft(ctx, r); err != nil {
			return nil, err
		}
	}
	d.Plan.Unreached = unreached
	return d, nil
}

// plan makes the plan of a draft whose target was verified.
func (c *journal) plan(ctx context.Context, r *Request, d *draft, view *View, ask PlanInput) error {
	d.graph = view.Version
	p, err := MakePlan(view.Graph, ask, func(n *workflow.Node) (NodeState, error) {
		checked := &checkedNode{node: n, token: d.target}
		var err error
		if n.ID != r.Checkpoint {
			checked.token, err = c.verified(ctx, n.ID)
		}
		if err == nil {
			checked.state, checked.outlook, err = d.stateFor(ctx, c, n, &checked.token)
		}
		d.checkpoints[n.ID] = checked
		return checked.state, err
	})
	if errors.Is(err, ErrCheckpointUnknown) {
		return r.unknown()
	}
	if err != nil {
		return err
	}
	if !r.KeepDependants {
		if err := p.partial(); err != nil {
			return err
		}
		if view.More { // what was not looked at may be completed (P6)
			return &DependedOnError{Dependants: p.Dependants}
		}
	}
	d.Plan = p
	if err := c.verify(ctx, d, ask.Now); err != nil {
		return err
	}
	d.Due = ask.Now.Add(d.limit())
	for s := range p.all() {
		of := d.checkpoints[s.Checkpoint]
		s.Agent, s.Via = of.token.Agent, of.by.Agent
		s.setOutlook(of.outlook)
		p.inform(of.by)
	}
	if r.Scope == FullWorkflow {
		if err := c.informConfigured(p, func(string) bool { return true }); err != nil {
			return err
		}
	}
	hash := p.Hash()
	d.Hash = hash[:]
	return nil
}

// informConfigured tells the configured participants, named by their identity, that the workflow is held.
func (c *journal) informConfigured(p *Plan, which func(agent string) bool) error {
	if c.o.Configured == nil {
		return nil
	}
	all, err := c.o.Configured()
	if err != nil {
		return unavailable(err)
	}
	for _, one := range all {
		if which(one.Agent) {
			p.inform(informed{one.Agent, one.URI})
		}
	}
	return nil
}

// setOutlook says what is known of the step before it is tried.
func (s *PlanStep) setOutlook(o outlook) {
	switch {
	case s.What == noUndo, s.What == block:
		return
	case s.What == expired, s.Then == expired:
		o = outlook{obstacle: reasonExpired}
	case (s.What == Escalate || s.Then == Escalate) && o.obstacle == "":
		o.obstacle = string(reasonIrreversible)
	}
	s.Way, s.Obstacle, s.Cause = o.way, o.obstacle, o.cause
	if s.Obstacle != "" {
		s.Way = ""
	}
}

// verified is the token of a checkpoint, or the zero value if it does not verify: its step finds
// that out again.
func (c *journal) verified(ctx context.Context, id string) (Checkpoint, error) {
	cp, tampered, err := c.token(ctx, id)
	if tampered {
		return Checkpoint{}, err
	}
	return cp, err
}

// stateFor is stateOf, but for the checkpoints of who asks for a part of a rollback: it undoes those
// itself, in the order of its own plan. Here nothing is done for them, and nothing is said of them
// (P6).
func (d *draft) stateFor(ctx context.Context, c *journal, n *workflow.Node, token *Checkpoint) (NodeState, outlook, error) {
	if d.PartOf != "" && d.Requester != "" && n.By == d.Requester && !token.Own && token.ID != "" && n.ID != d.Checkpoint {
		return elsewhere, outlook{}, nil
	}
	return c.stateOf(ctx, n, token)
}

// stateOf is the state of a checkpoint by its records, the checkpoint store and the executions,
// with what is known of its undo; by its records alone if its token does not verify.
func (c *journal) stateOf(ctx context.Context, n *workflow.Node, token *Checkpoint) (NodeState, outlook, error) {
	recorded := RecordedState(n)
	if token.ID == "" {
		return recorded, outlook{obstacle: reasonTampered}, nil
	}
	m, damaged, err := c.mark(ctx, n.ID)
	switch {
	case err != nil:
		return recorded, outlook{}, err
	case m.State == checkpoint.Undone:
		return Undone, outlook{}, nil
	case damaged:
		return recorded, outlook{obstacle: reasonTampered}, nil
	case n.Group:
		return recorded, outlook{}, nil
	case token.Own && recorded == Undone: // P5: the checkpoint store says otherwise
		recorded = Ran
	}
	s, err := c.callStatus(ctx, token, "", recorded)
	switch {
	case errors.Is(err, ErrStore):
		return recorded, outlook{}, err
	case errors.Is(err, checkpoint.ErrExpired):
		return recorded, outlook{obstacle: reasonExpired}, nil
	case err != nil:
		return recorded, outlook{obstacle: reasonTampered}, nil
	case s.foreign && s.opened == nil:
		return recorded, outlook{obstacle: string(ReasonForeign)}, nil
	case s.foreign && recorded == Undone: // else it ran: a call that was released here says nothing of it
		return Undone, outlook{}, nil
	case s.opened == nil:
		return s.state, outlook{}, nil
	}
	o := outlookOf(s.opened)
	if s.state == InFlight && o.obstacle == string(reasonUnfilled) { // its answer may bring the values
		o = outlook{way: s.opened.Snapshot.Way.String(), by: informedOf(s.opened)}
	}
	return s.state, o, nil
}

// foreignGuard stands in the place of the guard of a call, for checkpoints that others have made. No
// guard has this name.
const foreignGuard = "(participants)"

// foreign is how a checkpoint is undone that somebody else has made: its agent is asked in both
// phases, if the configuration names it (C-4.3.1-e). It is nil where it does not.
func (c *journal) foreign(cp *Checkpoint) (*checkpoint.Checkpoint, error) {
	named, lacking := NamedCheckpoint(cp.ID)
	if c.o.Participants == nil || lacking != "" {
		return nil, nil
	}
	uri, err := c.o.Participants(cp.Issuer, cp.RollbackURI)
	if err != nil {
		return nil, unavailable(err)
	}
	if uri == "" {
		return nil, nil
	}
	spec := Spec{Guard: foreignGuard, Delegate: uri, Agent: cp.Issuer, OnLost: Resend, Auth: AuthConfig}
	return &checkpoint.Checkpoint{
		Snapshot: &checkpoint.Snapshot{ID: cp.ID, Workflow: cp.Workflow, Way: checkpoint.Delegate, Undo: spec.Encode()},
		Result:   &checkpoint.Result{Answer: named},
	}, nil
}

// outlookOf is what the records of a call say of its undo: its outcome may leave it to a person.
func outlookOf(opened *checkpoint.Checkpoint) outlook {
	o := outlook{by: informedOf(opened)}
	switch cause, is := irreversible(opened); {
	case cause == checkpoint.ReasonChanged:
		o.obstacle = string(ReasonChanged)
	case is:
		o.obstacle, o.cause = string(reasonIrreversible), string(cause)
	case LacksValues(opened): // of a participant too whose answer was lost: it may have a part all the same
		o.obstacle = string(reasonUnfilled)
	default:
		o.way = opened.Snapshot.Way.String()
	}
	return o
}

// current reports whether a plan made now would be the same. If so, the draft counts as made now.
// If that cannot be found out, a new draft is made, which fails as it must.
func (c *journal) current(ctx context.Context, d *draft) bool {
	unchanged, err := c.o.Ledger.Unchanged(ctx, d.Workflow, d.graph)
	if err != nil || !unchanged {
		return false
	}
	now, err := c.now(ctx)
	if err != nil || now.Before(d.Asked) {
		return false
	}
	for _, known := range d.checkpoints {
		n := known.node
		if !n.Expires.IsZero() && !now.Before(n.Expires) && d.Asked.Before(n.Expires) {
			return false
		}
		token, err := c.verified(ctx, n.ID)
		if err != nil || !reflect.DeepEqual(token, known.token) {
			return false
		}
		if state, seen, err := d.stateFor(ctx, c, n, &token); err != nil || state != known.state || seen != known.outlook {
			return false
		}
	}
	if c.verify(ctx, d, now) != nil {
		return false
	}
	d.Asked, d.Due = now, now.Add(d.limit())
	return true
}

// verify verifies the target before anything is touched (cascade 4.2.3). An undone target needs
// no verification.
func (c *journal) verify(ctx context.Context, d *draft, now time.Time) error {
	cp := &d.target
	var what What
	for s := range d.Plan.all() {
		if s.Checkpoint == d.Checkpoint {
			what = s.What
		}
	}
	expired := &refusal{checkpoint.ErrExpired, d, "the checkpoint has expired"}
	if what == noUndo {
		return nil
	}
	if what != block && !cp.Expires.IsZero() && !now.Before(cp.Expires) {
		return expired
	}
	if what != Undo || !cp.Own {
		return nil
	}
	_, err := c.o.Checkpoints.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires})
	switch {
	case err == nil, errors.Is(err, checkpoint.ErrReleased): // meanwhile: it is found again
		return nil
	case errors.Is(err, checkpoint.ErrStore):
		return unavailable(err)
	case errors.Is(err, checkpoint.ErrExpired):
		return expired
	}
	return &refusal{checkpoint.ErrTampered, d, "the snapshot does not match the checkpoint's out_hash"}
}

// limit is how long the rollback may take: half of the shortest ttl among what it undoes (ATD,
// "Rollback Timeout and Escalation").
func (d *draft) limit() time.Duration {
	least := time.Duration(0)
	for s := range d.Plan.all() {
		ttl := d.checkpoints[s.Checkpoint].token.TTL
		if undoes := s.What == Undo || s.Then == Undo; undoes && ttl > 0 && (least == 0 || ttl < least) {
			least = ttl
		}
	}
	if least == 0 {
		least = d.target.TTL
	}
	if least <= 0 {
		least = defaultTTL
	}
	return least / 2
}

// defaultTTL is the ttl of checkpoints without one (cascade 4.2.1).
const defaultTTL = 24 * time.Hour

// reasonUnknown is the obstacle of a member of a group that nobody knows.
const reasonUnknown = "checkpoint-unknown"

// obstacles are the steps of a plan that are in vain, in their order, and the unknown members of
// its groups.
func (p *Plan) obstacles() (all []Obstacle) {
	for s := range p.all() {
		if s.Obstacle != "" {
			all = append(all, Obstacle{Checkpoint: s.Checkpoint, Agent: s.Agent, Reason: s.Obstacle})
		}
	}
	for _, id := range p.Missing {
		all = append(all, Obstacle{Checkpoint: id, Reason: reasonUnknown})
	}
	return append(all, p.Unreached...)
}
