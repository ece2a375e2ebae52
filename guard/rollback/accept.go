package rollback

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
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

// rollback is what is asked for, before anything is known of it.
func (r *Request) rollback() *Rollback {
	b := &Rollback{
		ID: r.ID, Checkpoint: r.Checkpoint, Scope: r.Scope, Reason: r.Reason, Urgency: r.Urgency, Operator: r.Operator,
		State:   Reserved,
		Journal: Journal{Named: r.Named, Token: r.Token, Content: r.content(), PartOf: r.PartOf, Precedence: r.Precedence},
	}
	if r.Operator == "" {
		b.Requester = r.By
	}
	return b
}

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

// unknown is the error about a missing checkpoint: strangers get the same as for others'
// checkpoints.
func (r *Request) unknown() error {
	if r.Operator != "" || r.Coordinator {
		return ErrCheckpointUnknown
	}
	return ErrNotInWorkflow
}

// draft decides who may ask, verifies the target, and makes the plan. It changes nothing.
func (c *Coordinator) draft(ctx context.Context, r *Request) (*draft, error) {
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
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
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

// plan makes the plan of a draft whose target was verified.
func (c *Coordinator) plan(ctx context.Context, r *Request, d *draft, view *View, ask PlanInput) error {
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
func (c *Coordinator) informConfigured(p *Plan, which func(agent string) bool) error {
	if c.o.Configured == nil {
		return nil
	}
	all, err := c.o.Configured()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
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
	case s.What == Nothing, s.What == Block:
		return
	case s.What == Expired, s.Then == Expired:
		o = outlook{obstacle: reasonExpired}
	case (s.What == Escalate || s.Then == Escalate) && o.obstacle == "":
		o.obstacle = string(ReasonIrreversible)
	}
	s.Way, s.Obstacle, s.Cause = o.way, o.obstacle, o.cause
	if s.Obstacle != "" {
		s.Way = ""
	}
}

// verified is the token of a checkpoint, or the zero value if it does not verify: its step finds
// that out again.
func (c *Coordinator) verified(ctx context.Context, id string) (Checkpoint, error) {
	cp, tampered, err := c.token(ctx, id)
	if tampered {
		return Checkpoint{}, err
	}
	return cp, err
}

// stateFor is stateOf, but for the checkpoints of who asks for a part of a rollback: it undoes those
// itself, in the order of its own plan. Here nothing is done for them, and nothing is said of them
// (P6).
func (d *draft) stateFor(ctx context.Context, c *Coordinator, n *workflow.Node, token *Checkpoint) (NodeState, outlook, error) {
	if d.PartOf != "" && d.Requester != "" && n.By == d.Requester && !token.Own && token.ID != "" && n.ID != d.Checkpoint {
		return elsewhere, outlook{}, nil
	}
	return c.stateOf(ctx, n, token)
}

// stateOf is the state of a checkpoint by its records, the checkpoint store and the executions,
// with what is known of its undo; by its records alone if its token does not verify.
func (c *Coordinator) stateOf(ctx context.Context, n *workflow.Node, token *Checkpoint) (NodeState, outlook, error) {
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
	case s.foreign && recorded == Undone: // a call that was released here says nothing of it
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
func (c *Coordinator) foreign(cp *Checkpoint) (*checkpoint.Checkpoint, error) {
	named, lacking := NamedCheckpoint(cp.ID)
	if c.o.Participants == nil || lacking != "" {
		return nil, nil
	}
	uri, err := c.o.Participants(cp.Issuer, cp.RollbackURI)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
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
		o.obstacle, o.cause = string(ReasonIrreversible), string(cause)
	case LacksValues(opened): // of a participant too whose answer was lost: it may have a part all the same
		o.obstacle = string(reasonUnfilled)
	default:
		o.way = opened.Snapshot.Way.String()
	}
	return o
}

// current reports whether a plan made now would be the same. If so, the draft counts as made now.
// If that cannot be found out, a new draft is made, which fails as it must.
func (c *Coordinator) current(ctx context.Context, d *draft) bool {
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
func (c *Coordinator) verify(ctx context.Context, d *draft, now time.Time) error {
	cp := &d.target
	var what What
	for s := range d.Plan.all() {
		if s.Checkpoint == d.Checkpoint {
			what = s.What
		}
	}
	expired := &refusal{checkpoint.ErrExpired, d, "the checkpoint has expired"}
	if what == Nothing {
		return nil
	}
	if what != Block && !cp.Expires.IsZero() && !now.Before(cp.Expires) {
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
		return fmt.Errorf("%w: %w", ErrStore, err)
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

// planned is the rollback as it is shown before its acceptance.
func (b *Rollback) planned() *Rollback {
	shown := b.shown()
	if b.Plan != nil {
		shown.Steps = b.Plan.begin()
	}
	return shown
}

// Plan shows what Execute would do, or why it would be refused. It changes nothing; the request
// needs no id.
func (c *Coordinator) Plan(ctx context.Context, r Request) (*Rollback, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	d, err := c.unopposed(ctx, &r)
	if refused := (*refusal)(nil); errors.As(err, &refused) {
		return nil, refused.error
	}
	if err != nil {
		return nil, err
	}
	shown := d.planned()
	shown.State = Planned
	shown.markObstacles()
	return shown, nil
}

// unopposed makes the plan of a request that is not accepted yet, and fails where something else in the workflow
// takes precedence.
func (c *Coordinator) unopposed(ctx context.Context, r *Request) (*draft, error) {
	plan := c.discovered
	switch _, err := c.reservation(ctx, c.name(r.ID)); {
	case err == nil: // participants were asked when it was prepared
		plan = c.draft
	case !errors.Is(err, ErrUnknown):
		return nil, err
	}
	d, err := plan(ctx, r)
	if err != nil {
		return nil, err
	}
	shown := *d // the conflicts are resolved once more when it is accepted
	_, _, err = c.opposed(ctx, r, &shown)
	return d, err
}

// Execute accepts a rollback durably and returns at once: it goes on by itself. The same id with
// the same content gives the same rollback (P5), whatever became of its checkpoints.
//
// admit is called once for a rollback that is not accepted yet, when its requester is known to be one who may ask for
// it, and before anything is recorded; nil admits all. Its writes are part of the accepting commit; if the condition
// of one fails, the error is its *store.Conflict and nothing is accepted. refused says that the target does not
// verify: then nothing is accepted, and only the error is recorded (cascade 4.2.3).
//
// The plan is the one of before admit if nothing that it depends on has changed since; otherwise it is made again.
func (c *Coordinator) Execute(
	ctx context.Context, r Request, admit func(ctx context.Context, refused bool) ([]store.Write, error),
) (*Rollback, error) {
	if err := cmp.Or(r.check(), r.checkID()); err != nil {
		return nil, err
	}
	if found, err := c.acceptedAlready(ctx, &r); err == nil || !errors.Is(err, ErrUnknown) {
		return found, err
	}
	if c.ending() {
		return nil, ErrStopping
	}
	// Calls of the workflow are only held up for authorized requesters, whom drafting finds out.
	d, err := c.unopposed(ctx, &r)
	refused := (*refusal)(nil)
	if err != nil && !errors.As(err, &refused) {
		return nil, err
	}
	var extra []store.Write
	if admit != nil {
		if extra, err = admit(ctx, refused != nil); err != nil {
			return nil, err
		}
	}
	if refused != nil {
		return nil, c.refuse(ctx, refused)
	}
	if err := c.firstPhase(ctx, &r, d); err != nil {
		return nil, err
	}
	var accepted *Rollback
	err = c.behindLock(ctx, d, 0, func() (*draft, error) {
		anew, err := c.draft(ctx, &r)
		if errors.As(err, &refused) {
			return nil, c.refuse(ctx, refused)
		}
		if err == nil {
			anew.Plan.Unprepared, anew.Plan.Unreached, anew.Precedence = d.Plan.Unprepared, d.Plan.Unreached, d.Precedence
		}
		return anew, err
	}, func(d *draft) (keep bool, err error) {
		if accepted, err = c.acceptedAlready(ctx, &r); err == nil || !errors.Is(err, ErrUnknown) {
			return false, err
		}
		made, err := c.accept(ctx, &r, d, extra)
		switch {
		case err == nil:
			accepted, keep = made.snapshot(), true
		case !errors.Is(err, errAgain): // it may have landed all the same, and then goes on
			h, there := c.readHead(context.WithoutCancel(ctx), c.name(r.ID))
			keep = there == nil && (h.open() || h.stops()) || there != nil && !errors.Is(there, ErrUnknown)
		}
		return keep, err
	})
	if err != nil {
		c.giveUp(ctx, d, nil)
	}
	return accepted, err
}

// errAgain: another commit was first; read again.
var errAgain = errors.New("rollback: somebody else was first")

// again finds the rollback of an earlier identical request, or returns ErrUnknown.
func (c *Coordinator) again(ctx context.Context, r *Request) (*Rollback, error) {
	n := c.name(r.ID)
	h, err := c.readHead(ctx, n)
	if errors.Is(err, ErrUnknown) && r.Token != "" {
		// Cascade 4.3.4: one token asks for one rollback.
		id, found := c.byToken(ctx, r.Token)
		switch {
		case errors.Is(found, ErrUnknown):
		case found != nil:
			return nil, found
		case id != r.ID:
			return nil, ErrMismatch
		default: // it was accepted between the two looks (P5)
			h, err = c.readHead(ctx, n)
		}
	}
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(h.Content, r.content()) || r.Planned != "" && r.Planned != string(h.Hash) {
		return nil, ErrMismatch
	}
	if err := c.mayShare(ctx, r, h); err != nil {
		return nil, err
	}
	if h.open() { // one whose acceptance landed and was not answered
		if _, err := c.adopt(ctx, n); err != nil {
			return nil, err
		}
	}
	return c.Get(ctx, r.ID)
}

// mayShare decides whether a request may have the rollback of an earlier one: another requester must be
// allowed to ask for the checkpoint himself. Two gateways of one rollback ask a third for the same part.
func (c *Coordinator) mayShare(ctx context.Context, r *Request, first *Rollback) error {
	if first.askedBy(r) {
		return nil
	}
	_, err := c.draft(ctx, r)
	if errors.As(err, new(*refusal)) || errors.As(err, new(*DependedOnError)) { // of the plan, which the first one has
		return nil
	}
	return err
}

// acceptedAlready is again for a request to execute. The token of another requester than the first is
// recorded, since his own result names it.
func (c *Coordinator) acceptedAlready(ctx context.Context, r *Request) (*Rollback, error) {
	found, err := c.again(ctx, r)
	if err != nil || r.By == "" || r.By == found.Requester || r.Token == "" {
		return found, err
	}
	defer c.sealing.Enter()()
	expires := found.Due.Add(c.o.Keep)
	if end := found.Finished.Add(c.o.Keep); expires.Before(end) {
		expires = end
	}
	if _, err := c.o.Store.Commit(ctx, c.askers.Put(c.askerKey(r.ID, r.By), &r.Token, store.Condition{}, expires)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return found, nil
}

// AskedWith returns the id of the token by which somebody else than the requester has asked for a rollback
// too; empty where he has not.
func (c *Coordinator) AskedWith(ctx context.Context, id, asker string) (string, error) {
	row, err := c.askers.Get(ctx, c.askerKey(id, asker))
	switch {
	case errors.Is(err, ErrUnknown):
		return "", nil
	case err != nil:
		return "", err
	}
	return *row.Record, nil
}

// refuse records a failed verification of the target, and returns its error.
func (c *Coordinator) refuse(ctx context.Context, refused *refusal) error {
	d := refused.draft
	t, err := c.o.Ledger.Erred(ctx, &d.Rollback, d.Checkpoint, errorConstraint, refused.why)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	b := new(store.Batch)
	record(b, t)
	if err := b.Commit(ctx, c.o.Store); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return refused.error
}

// conflicting are the unfinished rollbacks of a workflow, which may conflict.
func (c *Coordinator) conflicting(ctx context.Context, workflow string) ([]*run, error) {
	var all []*run
	names, err := c.names(ctx, store.Prefix(c.workflowPrefix(kindWorkflow, workflow)))
	for _, n := range names {
		r, err := c.adopt(ctx, n)
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !r.done.is() {
			all = append(all, r)
		}
	}
	return all, err
}

// opposed compares a draft with all else that is accepted or reserved in its workflow (cascade 4.3.4). It returns the
// rollbacks that give way to it, and the reservations that it takes over; the error says what it must not go past.
func (c *Coordinator) opposed(ctx context.Context, r *Request, d *draft) (joins []*run, h held, err error) {
	others, err := c.conflicting(ctx, d.Workflow)
	if err != nil {
		return nil, h, err
	}
	if joins, err = d.resolveConflicts(others); err != nil {
		return nil, h, err
	}
	h, err = c.reserved(ctx, r, d)
	return joins, h, err
}

// Precedence decides between two rollbacks (cascade 4.3.4). Parts of a rollback at other gateways
// have that of the whole, so that all of them decide in the same way.
type Precedence struct {
	// ID is the rollback's id, which is unique.
	ID string `json:"rollback_id"`
	// Scope is how far it goes.
	Scope Scope `json:"scope"`
	// Asked is when it was recorded, by the clock of its coordinator's store and not the requester's.
	Asked time.Time `json:"asked"`
}

// comparePrecedence is negative if a takes precedence over b, positive if b does over a, and zero
// only if they are the same. The wider scope wins, then the earlier time, then the lower id. An
// unknown scope is the narrowest.
func comparePrecedence(a, b Precedence) int {
	return cmp.Or(
		cmp.Compare(b.Scope.breadth(), a.Scope.breadth()),
		a.Asked.Compare(b.Asked),
		cmp.Compare(a.ID, b.ID),
	)
}

// conflictResolution is what comes of two rollbacks.
type conflictResolution string

// What can come of them. Who loses gets 409 rollback-conflict with the winner's id.
const (
	// noConflict: they have no checkpoint in common, and both go on.
	noConflict conflictResolution = "no conflict"
	// newcomerRefused: the new one loses.
	newcomerRefused conflictResolution = "refused"
	// earlierJoins: the earlier one loses. It finishes its level, then the new one starts, whose
	// result becomes that of both.
	earlierJoins conflictResolution = "joins"
	// newcomerWaits: the earlier one goes on to its end, and then the new one starts. To break
	// off would leave a checkpoint to nobody.
	newcomerWaits conflictResolution = "waits"
)

// resolveConflict says what comes of two different rollbacks when one of them was accepted
// first. comparePrecedence decides, but nothing that was accepted is left half done.
//
// The earlier one joins a wider one whose plan has all of its checkpoints, for which they are
// undone then. Where the wider plan lacks some of them, as the sub-DAG of one checkpoint does
// that the other's group contains, the wider one waits. So does one of the same scope that was
// asked for earlier.
func resolveConflict(there, comes *Rollback) conflictResolution {
	switch {
	case !overlap(there.Plan, comes.Plan):
		return noConflict
	case comparePrecedence(there.precedence(), comes.precedence()) <= 0:
		return newcomerRefused
	case there.precedence().Scope.breadth() < comes.precedence().Scope.breadth() && len(comes.Plan.lacks(there.Plan)) == 0:
		return earlierJoins
	}
	return newcomerWaits
}

// maxJoins bounds how many others give way in one commit, whose size is bounded (store.MaxBatch).
const maxJoins = 256

// resolveConflicts decides between the draft and earlier rollbacks (cascade 4.3.4). It returns
// those that give way.
func (d *draft) resolveConflicts(others []*run) (joins []*run, err error) {
	d.Behind, d.Absorbed = nil, nil
	for _, r := range others {
		if r.id == d.ID { // accepted since: whoever asks for it finds it
			continue
		}
		there := r.now()
		if !d.Asked.After(there.Asked) { // a clock that went back gives no precedence
			d.Asked = there.Asked.Add(time.Nanosecond)
		}
		resolution := resolveConflict(there, &d.Rollback)
		if resolution != noConflict && d.sameWhole(there) || there.PartOf != "" && resolution == earlierJoins {
			resolution = newcomerWaits // a part has a result of its own
		}
		switch resolution {
		case noConflict:
			continue
		case newcomerRefused:
			if there.Joined == "" { // else the one that it gives way to decides
				return nil, &ConflictError{Winner: there.precedence().ID, kept: r.id}
			}
		case earlierJoins: // those beyond the bound go on to their end instead
			if there.Joined == "" && len(joins) < maxJoins {
				joins = append(joins, r)
				d.Absorbed = append(d.Absorbed, r.id)
			}
		}
		d.Behind = append(d.Behind, r.id)
	}
	return joins, nil
}

// fence is the write by which rollbacks of a workflow are decided one after the other.
func (c *Coordinator) fence(ctx context.Context, workflow string) (store.Write, error) {
	w := store.Write{Key: c.fenceKey(workflow), If: store.Absent()}
	found, err := c.o.Store.Get(ctx, w.Key)
	switch {
	case err == nil:
		w.If = store.VersionIs(found.Version)
		w.Expires = found.Expires
	case !errors.Is(err, store.ErrNotFound):
		return w, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return w, nil
}

// accept decides and commits, holding the lock on acceptance.
func (c *Coordinator) accept(ctx context.Context, r *Request, d *draft, extra []store.Write) (*run, error) {
	if d.Aborted = d.aborts(r); d.Aborted {
		d.Request = r
	}
	fence, err := c.fence(ctx, d.Workflow)
	if err != nil {
		return nil, err
	}
	joins, held, err := c.opposed(ctx, r, d)
	if err != nil {
		return nil, err
	}
	if held.own != nil {
		d.Prepared, d.Precedence = held.own.Asked, held.own.Precedence
	}
	defer c.sealing.Enter()()
	for _, other := range joins {
		other.mu.Lock()
		defer other.mu.Unlock()
		if h := other.now(); !h.open() || h.Joined != "" {
			return nil, errAgain
		}
	}
	d.State, d.Boot = Executing, c.fleet.boot()
	fence.Expires = d.Due.Add(c.o.Keep)
	b := new(store.Batch)
	n := c.name(d.ID)
	if err := c.acceptanceWrites(ctx, r, d, n, b); err != nil {
		return nil, b.Done(err)
	}
	writes := append([]store.Write{c.headWrite(n, &d.Rollback, store.Absent()), fence}, b.Writes()...)
	writes = append(writes, held.writes...)
	heads := make([]Rollback, len(joins))
	for i, other := range joins {
		heads[i] = *other.now()
		heads[i].Joined = d.ID
		writes = append(writes, c.headWrite(other.name, &heads[i], store.VersionIs(heads[i].version)))
	}
	version, err := c.o.Store.Commit(ctx, append(writes, extra...)...)
	if err = b.Done(err); err != nil {
		for _, other := range joins { // sealed anew, or changed by another node
			_ = c.refresh(ctx, other)
		}
		if err = refusedBy(err, extra); !errors.Is(err, store.ErrUnknown) {
			return nil, err
		}
		// It may have landed. Then it goes on, whether or not its requester asks again (P5).
		if h, readErr := c.readHead(context.WithoutCancel(ctx), n); readErr != nil || !bytes.Equal(h.Content, d.Content) {
			return nil, err
		}
		landed, readErr := c.adopt(context.WithoutCancel(ctx), n)
		if readErr != nil {
			return nil, err
		}
		return landed, nil
	}
	for i, other := range joins {
		heads[i].version = version
		c.publish(other, &heads[i])
	}
	c.ended(&held)
	d.version = version
	accepted := newRun(n, &d.Rollback)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runs[n] = accepted
	c.launch(accepted)
	return accepted, nil
}

// acceptanceWrites adds the records of a new rollback besides its head.
func (c *Coordinator) acceptanceWrites(ctx context.Context, r *Request, d *draft, n name, b *store.Batch) error {
	if len(d.Plan.Unreached) > 0 { // who has not said what he has may go on with it: what holds the workflow reaches him
		if err := c.informConfigured(d.Plan, func(agent string) bool {
			return slices.ContainsFunc(d.Plan.Unreached, func(o Obstacle) bool { return o.Agent == agent })
		}); err != nil {
			return err
		}
	}
	pieces, err := writePlan(&c.plans, n, d.Plan, time.Time{})
	if err != nil {
		return err
	}
	d.Pieces = len(pieces)
	parents := []string{}
	switch {
	case r.Error != "":
		parents = append(parents, r.Error)
	case r.Token != "":
		parents = append(parents, r.Token)
	}
	t, err := c.o.Ledger.Started(ctx, d.planned(), parents)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	d.Start = record(b, t)
	b.Add(pieces...)
	b.Add(
		store.Write{Key: ageKey(d.Asked, n)},
		store.Write{Key: keyOf(kindOpen, n)},
		store.Write{Key: c.workflowKey(kindWorkflow, d.Workflow, n)},
	)
	if d.stops() {
		b.Add(store.Write{Key: c.workflowKey(kindStop, d.Workflow, n)})
		if to := d.informs(); len(to) > 0 { // here the lock stops it
			if _, err := c.escalate(ctx, b, hitl.Opening{
				Key: "rollback terminates " + d.ID, Level: hitl.Stop, Cause: hitl.CauseOther, Workflow: d.Workflow,
				Summary: "A rollback of the whole workflow has ended it, also at its participants.",
				Links:   hitl.Links{Checkpoint: d.Checkpoint, Rollback: d.ID}, Notice: true, Lifted: true, Final: true, Participants: to,
			}); err != nil {
				return err
			}
		}
	}
	if r.Token != "" {
		b.Add(c.tokens.Put(c.tokenKey(r.Token), &d.ID, store.Absent(), time.Time{}))
	}
	return nil
}

// refusedBy is the conflict of an extra write, or errAgain if another commit was first.
func refusedBy(err error, extra []store.Write) error {
	lost := (*store.Conflict)(nil)
	switch {
	case !errors.As(err, &lost):
		return fmt.Errorf("%w: %w", ErrStore, err)
	case store.Lost(err, extra):
		return lost
	}
	return errAgain
}
