package hitl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Status says what was decided about an escalation.
type Status string

// The statuses. Only a pending escalation can be decided.
const (
	// Pending: nobody has decided yet, or not enough have approved.
	Pending Status = "pending"
	// Approved: what the proposal says is done.
	Approved Status = "approved"
	// Denied: somebody has said no, and everything stays as it is.
	Denied Status = "denied"
	// Expired: nobody has decided in time, which counts as no.
	Expired Status = "expired"
	// Withdrawn: there is nothing to decide any more.
	Withdrawn Status = "withdrawn"
)

// Statuses lists the statuses, in the order in which they are documented.
func Statuses() []Status { return []Status{Pending, Approved, Denied, Expired, Withdrawn} }

// ProposalKind is what an approval does.
type ProposalKind string

// The kinds of proposals. The empty kind proposes nothing: an approval then says that somebody
// has seen to the case.
const (
	// RunCall lets the call run that waits.
	RunCall ProposalKind = "run-call"
	// Resume ends that the escalation holds the workflow.
	Resume ProposalKind = "resume"
	// PartialRollback undoes what can be undone.
	PartialRollback ProposalKind = "partial-rollback"
	// ContinueRollback lets a rollback that waits go on.
	ContinueRollback ProposalKind = "continue-rollback"
)

// Proposal is what an approval does, and nothing else.
type Proposal struct {
	// Kind is one of the kinds, or empty.
	Kind ProposalKind `json:"kind"`
	// Text says in words what is done, and shows the request; it is cut at 8,192 bytes.
	Text string `json:"text,omitempty"`
	// RequestHash or PlanHash identifies the request or the plan that was shown, at most 128 bytes. A decision
	// must name it. Empty: there is nothing that could change.
	RequestHash string `json:"request_hash,omitempty"`
	PlanHash    string `json:"plan_hash,omitempty"` // see RequestHash
}

// Hash is what a decision must name.
func (p *Proposal) Hash() string { return cmp.Or(p.RequestHash, p.PlanHash) }

// Unreachable is what happens where nobody has decided in time. It never approves (ATD, "HITL
// Escalation on Error": unreachable_human). The zero value denies.
type Unreachable struct {
	// Do is one of the kinds below; empty is unreachableDeny.
	Do UnreachableKind `json:"unreachable_human,omitempty"`
	// NextRole is asked next by unreachableEscalate, at most 128 bytes.
	NextRole string `json:"next_role,omitempty"`
	// Within is the time to decide, also for NextRole; zero is 24 h.
	Within time.Duration `json:"-" cbor:"within,omitempty"`
}

// UnreachableKind is a kind of Unreachable.
type UnreachableKind string

// The kinds. Abort is the word of the drafts' companion for deny.
const (
	// unreachableDeny: the escalation expires, which counts as a denial.
	unreachableDeny  UnreachableKind = "deny"
	unreachableAbort UnreachableKind = "abort" // see unreachableDeny
	// unreachablePause: its workflow is paused, and from then on it asks, without a deadline, whether to
	// resume that. One that nobody may approve expires.
	unreachablePause UnreachableKind = "pause"
	// unreachableEscalate: another role is asked, once.
	unreachableEscalate UnreachableKind = "escalate"
)

// defaultWithin is the time to decide where one is needed and none is given.
const defaultWithin = 24 * time.Hour

// Check reports what is wrong with u.
func (u *Unreachable) Check() error {
	switch u.Do {
	case "", unreachableDeny, unreachableAbort, unreachablePause, unreachableEscalate:
	default:
		return fmt.Errorf("%q is not known; use deny, abort, pause, or escalate with a role: nobody's silence approves", u.Do)
	}
	switch {
	case u.Do == unreachableEscalate && u.NextRole == "":
		return errors.New("escalate needs the role that is asked next")
	case u.Do != unreachableEscalate && u.NextRole != "":
		return errors.New("a role is asked next by escalate only")
	case len(u.NextRole) > maxRole:
		return fmt.Errorf("the role has more than %d bytes", maxRole)
	case u.Within < 0:
		return errors.New("the time to decide is negative")
	}
	return nil
}

// DefaultRole decides where an escalation requires no other role.
const DefaultRole = "operator"

const (
	maxProposal = 8 << 10

	maxHash   = 128
	maxRole   = 128
	maxQuorum = 16
	// maxDecisions bounds what is kept of the decisions; the oldest go first.
	maxDecisions = 64
)

// Decision is what one person said.
type Decision struct {
	// By is the name of who decided, as operators know it.
	By string `json:"by"`
	// Decision is Approve or Deny.
	Decision string `json:"decision"`
	// Reason is the person's reason, at most 1,024 bytes.
	Reason string `json:"reason,omitempty"`
	// At is the time by the store's clock.
	At time.Time `json:"at"`
}

// The words of a Decision. Approve says that the proposal may be carried out.
const (
	Approve = "approve"
	deny    = "deny"
)

// Vote is a decision that somebody wants to make.
type Vote struct {
	// By is the name of who decides. Roles are theirs; Every has all roles.
	By    string
	Roles []string
	Every bool
	// Approve says that the proposal may be carried out.
	Approve bool
	// Hash is that of the proposal as it was shown.
	Hash string
	// Reason is for people, and may be empty for an approval.
	Reason string
	// Token is the hash of the token that decides, which counts once, in whatever round; empty for none.
	Token string
}

// The reasons why a vote does not count. Nothing is changed by it.
var (
	// ErrDecided: it was decided before, or this person has voted already.
	ErrDecided = errors.New("hitl: it was decided already")
	// ErrExpired: the time to decide is over.
	ErrExpired = errors.New("hitl: the time to decide is over, which counts as a denial")
	// ErrRole: the person does not have the role that is required.
	errRole = errors.New("hitl: the required role is missing")
	// ErrOwn: who asked cannot approve.
	ErrOwn = errors.New("hitl: who asked cannot approve")
	// ErrHash: the vote names another plan or request than the one to decide.
	ErrHash = errors.New("hitl: the decision is about something else than what is proposed")
	// ErrFinal: a rule allows no approval.
	errFinal = errors.New("hitl: the rule allows no override, so no approval counts")
	// ErrReason: a denial says why.
	errReason = errors.New("hitl: a denial needs a reason")
	// ErrNotHeld: only what still holds a workflow can be asked again.
	errNotHeld = errors.New("hitl: the escalation holds no workflow that could be resumed")
)

// Evidence makes the writes that record a change in a ledger, and returns the id of its token. old
// is nil where the escalation is opened; if it has fewer decisions than e, the last one is new. A
// nil batch records nothing.
type Evidence func(ctx context.Context, old, e *Escalation) (token string, b *store.Batch, err error)

// SetEvidence sets how later changes are recorded in a ledger; nil records none.
func (d *Store) SetEvidence(f Evidence) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.evidence = f
}

func (d *Store) recorded(ctx context.Context, old, e *Escalation) (string, *store.Batch, error) {
	d.mu.Lock()
	f := d.evidence
	d.mu.Unlock()
	if f == nil {
		return "", nil, nil
	}
	token, b, err := f(ctx, old, e)
	if err != nil {
		return "", nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return token, b, nil
}

// overdue reports whether the time to decide is over.
func (e *Escalation) overdue(now time.Time) bool {
	return e.Status == Pending && !e.Deadline.IsZero() && !now.Before(e.Deadline)
}

// decided is the escalation after a vote at a time, or why the vote does not count.
func (e *Escalation) decided(v *Vote, now time.Time) (*Escalation, error) {
	switch {
	case !v.Every && !slices.Contains(v.Roles, e.RequiredRole):
		return nil, fmt.Errorf("%w: %q is required", errRole, e.RequiredRole)
	case v.Token != "" && slices.Contains(e.Tokens, v.Token):
		return nil, nil // a retry
	case e.Status == Expired || e.overdue(now):
		return nil, ErrExpired
	case e.Status != Pending:
		return nil, fmt.Errorf("%w: %s", ErrDecided, e.Status)
	case e.Proposal.Hash() != v.Hash:
		return nil, ErrHash
	case v.Approve && e.Final:
		return nil, errFinal
	case v.Approve && v.By == e.Requester:
		return nil, ErrOwn
	case !v.Approve && v.Reason == "":
		return nil, errReason
	}
	by := shorten(v.By, maxText)
	if slices.ContainsFunc(e.Decisions[len(e.Decisions)-e.Approvals:], func(d Decision) bool { return d.By == by }) {
		return nil, fmt.Errorf("%w by %q", ErrDecided, by)
	}
	next := *e
	next.Decisions = appended(e.Decisions, Decision{By: by, Decision: deny, Reason: shorten(v.Reason, maxSummary), At: now})
	if v.Token != "" {
		next.Tokens = appended(e.Tokens, v.Token)
	}
	next.Changed = now
	if !v.Approve {
		next.Status = Denied
		return &next, nil
	}
	next.Decisions[len(next.Decisions)-1].Decision = Approve
	if next.Approvals++; next.Approvals >= e.Quorum {
		next.Status, next.Held = Approved, false
	}
	return &next, nil
}

// appended is a copy of the latest of all, with one more.
func appended[T any](all []T, one T) []T {
	return append(slices.Clone(all[max(0, len(all)+1-maxDecisions):]), one)
}

// again is the escalation when the question is asked once more: approvals of the question before do not count.
func (e *Escalation) again(now time.Time) *Escalation {
	next := *e
	next.Changed, next.Round, next.Approvals = now, e.Round+1, 0
	return &next
}

// notify has it delivered anew.
func (e *Escalation) notify(now time.Time) {
	e.State, e.Attempts, e.LastError, e.NextAttempt, e.Boot = Open, 0, "", now, ""
}

// unreached is the escalation after its time to decide is over.
func (e *Escalation) unreached(now time.Time) *Escalation {
	pauses := e.Unreachable.Do == unreachablePause && e.Workflow != ""
	if e.Unreachable.Do != unreachableEscalate && (!pauses || e.Final) {
		next := e.ended(Expired, now)
		next.Held = e.Held || pauses
		return next
	}
	next := e.again(now)
	next.Unreachable = Unreachable{}
	if pauses { // the question whether to resume takes the place of the one that nobody has answered
		next.Held, next.Proposal, next.Deadline = true, resumption(), time.Time{}
	} else {
		next.RequiredRole, next.Deadline = e.NextRole, now.Add(cmp.Or(e.Within, defaultWithin))
	}
	next.notify(now)
	return next
}

// ended is the escalation after it has expired or was withdrawn.
func (e *Escalation) ended(as Status, now time.Time) *Escalation {
	next := *e
	next.Status, next.Changed = as, now
	if as == Withdrawn {
		next.Held = false
	}
	return &next
}

// asked is the escalation after by has asked again for the workflow to be resumed.
func (e *Escalation) asked(by string, within time.Duration, now time.Time) (*Escalation, error) {
	switch {
	case e.Status == Pending:
		return nil, fmt.Errorf("%w: it is pending", errNotHeld)
	case !e.Held:
		return nil, errNotHeld
	case e.Final:
		return nil, errFinal
	}
	next := e.again(now)
	next.Status, next.Requester = Pending, shorten(by, maxText)
	next.Proposal, next.Deadline, next.Unreachable = resumption(), time.Time{}, Unreachable{}
	if within > 0 {
		next.Deadline = now.Add(within)
	}
	return next, nil
}

func resumption() Proposal {
	return Proposal{Kind: Resume, Text: "This escalation no longer holds the workflow: its new calls may begin again, unless another one holds it or it has ended."}
}

// Decide counts a vote. The errors are ErrNotFound, ErrStore and ErrUnreadable, and those above
// that say why the vote does not count; the escalation is returned with those. A vote that races
// the deadline, or another vote, has one result: each change is committed on the condition that
// nothing else has changed. A token that has decided changes nothing again, and is no error.
func (d *Store) Decide(ctx context.Context, id string, v Vote) (Escalation, error) {
	return d.change(ctx, id, func(e *Escalation, now time.Time) (*Escalation, error) { return e.decided(&v, now) })
}

// Withdraw ends a pending escalation that nobody has to decide any more, and lifts what it holds.
func (d *Store) Withdraw(ctx context.Context, id string) (Escalation, error) {
	return d.change(ctx, id, func(e *Escalation, now time.Time) (*Escalation, error) {
		if e.Status != Pending {
			return nil, fmt.Errorf("%w: %s", ErrDecided, e.Status)
		}
		return e.ended(Withdrawn, now), nil
	})
}

// Widen adds to a pending escalation what has turned out to belong to the same failure, and has it delivered
// again; approvals of the question before do not count. About each subject, a word of its text, it is once. The
// errors are those of Withdraw.
func (d *Store) Widen(ctx context.Context, id, subject, text string) (Escalation, error) {
	return d.change(ctx, id, func(e *Escalation, now time.Time) (*Escalation, error) {
		switch {
		case e.Status != Pending:
			return nil, fmt.Errorf("%w: %s", ErrDecided, e.Status)
		case strings.Contains(e.Summary, subject):
			return nil, nil
		}
		next := e.again(now)
		next.Summary = shorten(text+" "+e.Summary, maxSummary)
		next.notify(now)
		return next, nil
	})
}

// AskAgain makes an escalation pending again that was denied or has expired, and still holds its
// workflow. It then proposes to resume the workflow, and by cannot approve. within is the time to
// decide; zero is without end.
func (d *Store) AskAgain(ctx context.Context, id, by string, within time.Duration) (Escalation, error) {
	return d.change(ctx, id, func(e *Escalation, now time.Time) (*Escalation, error) { return e.asked(by, within, now) })
}

// change commits what make returns, on the condition that nothing else has changed; an error of
// make is returned with the escalation. One that is overdue expires first.
func (d *Store) change(ctx context.Context, id string, make func(e *Escalation, now time.Time) (*Escalation, error)) (Escalation, error) {
	parsed, err := parseID(id)
	if err != nil {
		return Escalation{}, err
	}
	for {
		e, version, err := d.read(ctx, parsed)
		if err != nil {
			return Escalation{}, err
		}
		now, err := d.now(ctx)
		if err != nil {
			return Escalation{}, err
		}
		next, refusal := make(e, now)
		late := e.overdue(now)
		if late {
			next = e.unreached(now)
			if refusal == nil {
				refusal = ErrExpired
			}
		}
		if next == nil {
			return *e, refusal
		}
		switch err := d.commit(ctx, parsed, e, next, version); {
		case err == nil && late && next.Status == Pending && next.Proposal.Kind == e.Proposal.Kind: // another role is asked, and may be who comes
		case err == nil:
			return *next, refusal
		case !errors.Is(err, errChanged):
			return Escalation{}, err
		}
	}
}

var errChanged = errors.New("hitl: somebody else has changed the escalation meanwhile")

// commit records a change of the decision from old to next, in one commit with its evidence.
func (d *Store) commit(ctx context.Context, id uuid.UUID, old, next *Escalation, version store.Version) error {
	token, evidence, err := d.recorded(ctx, old, next)
	if err != nil {
		return err
	}
	next.Resolution = token
	writes := d.put(id, old, next, store.VersionIs(version))
	b := store.NewBatch(writes...)
	b.Join(evidence)
	d.holds.note(next)
	err = b.Commit(ctx, d.store)
	if store.Lost(err, writes[:1]) {
		return errChanged
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	d.holds.settle(next)
	d.fences.Forget(d.fenceKey(next.Workflow))
	d.mu.Lock()
	if next.due() && !old.due() || next.unsettled() { // another role is to be notified, or participants
		close(d.news)
		d.news = make(chan struct{})
	}
	decided := d.onDecided
	d.mu.Unlock()
	if next.Status != Pending {
		decided(*next)
	}
	return nil
}

// OnDecided calls f for each escalation that was decided, expired or was withdrawn here from now
// on, after the commit. f must not wait.
func (d *Store) OnDecided(f func(Escalation)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onDecided = f
}

// Wait returns the escalation once it is not pending any more, whichever gateway over the store has decided it.
// With the error of ctx it returns it as it is.
func (d *Store) Wait(ctx context.Context, id string) (Escalation, error) {
	parsed, err := parseID(id)
	if err != nil {
		return Escalation{}, err
	}
	for {
		e, err := d.waitOnce(ctx, parsed)
		if err != nil || e.Status != Pending {
			return e, err
		}
	}
}

// waitOnce waits for a change, if it is pending.
func (d *Store) waitOnce(ctx context.Context, id uuid.UUID) (Escalation, error) {
	changed, cancel := d.store.Watch(recordKey(id))
	defer cancel()
	e, err := d.Get(ctx, id.String())
	if err != nil || e.Status != Pending {
		return e, err
	}
	var late <-chan time.Time
	if !e.Deadline.IsZero() {
		now, err := d.now(ctx)
		if err != nil {
			return e, err
		}
		timer := time.NewTimer(max(e.Deadline.Sub(now), time.Millisecond))
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-changed:
	case <-late:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return e, err
}

// expireDue ends what nobody has decided in time, up to a page, and returns the time until the next
// deadline.
func (d *Store) expireDue(ctx context.Context) (wait time.Duration, err error) {
	now, err := d.now(ctx)
	if err != nil {
		return 0, err
	}
	r := store.Prefix([]byte{space, kindDeadline})
	r.Limit = duePage
	n := 0
	for entry, err := range d.store.Scan(ctx, r) {
		if err != nil {
			return 0, fmt.Errorf("%w: %w", ErrStore, err)
		}
		n++
		at, id := placeIn(entry.Key)
		if at.After(now) {
			return at.Sub(now), nil
		}
		_, err := d.change(ctx, id.String(), func(*Escalation, time.Time) (*Escalation, error) { return nil, nil })
		switch {
		case errors.Is(err, ErrExpired):
		case err == nil, errors.Is(err, ErrNotFound), errors.Is(err, ErrUnreadable): // the entry is of an earlier round
			if _, err := d.store.Commit(ctx, store.Write{Key: entry.Key, Delete: true}); err != nil {
				return 0, fmt.Errorf("%w: %w", ErrStore, err)
			}
		default:
			return 0, err
		}
	}
	if n == r.Limit {
		return 0, nil // there may be more
	}
	return math.MaxInt64, nil
}

// holds names in memory what holds workflows, and what waits for its requester, so that a call of
// another workflow costs a map read, however much is pending. It may name what the store does
// not hold any more, and never lacks what this process has opened: whoever finds something reads
// the store.
type holds struct {
	mu        sync.RWMutex
	workflows map[string]map[string]struct{} // ids by workflow; not where gateways share the store
	waiting   map[string]map[string]struct{} // ids of what waits by requester
	damaged   map[workflowHash]struct{}      // workflows whose records cannot be read
	changed   map[uuid.UUID]struct{}         // at other gateways, and not read yet
	reload    bool                           // any of them may have
}

// change notes that another gateway has changed the index entry of what holds or waits; nil is any of them.
func (h *holds) change(key []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.changed) >= maxChanged || len(key) != 2+len(uuid.UUID{}) {
		h.changed, h.reload = nil, true
		return
	}
	if h.changed == nil {
		h.changed = map[uuid.UUID]struct{}{}
	}
	h.changed[uuid.UUID(key[2:])] = struct{}{}
}

// maxChanged is how many of them are remembered.
const maxChanged = 10_000

// catchUp reads what has changed at other gateways.
func (d *Store) catchUp(ctx context.Context) error {
	h := &d.holds
	h.mu.Lock()
	changed, reload := h.changed, h.reload
	h.changed, h.reload = nil, false
	h.mu.Unlock()
	err := error(nil)
	if reload {
		_, err = d.Load(ctx)
	}
	for id := range changed {
		if err != nil {
			break
		}
		var e *Escalation
		switch e, _, err = d.read(ctx, id); {
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrUnreadable):
			err = nil
		case err == nil:
			h.note(e)
		}
	}
	if err != nil { // it is read again
		h.mu.Lock()
		h.changed, h.reload = nil, true
		h.mu.Unlock()
	}
	return err
}

func (h *holds) note(e *Escalation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e.Held {
		h.workflows = with(h.workflows, e.Workflow, e.ID)
	}
	if e.waits() {
		h.waiting = with(h.waiting, e.Requester, e.ID)
	}
}

func (h *holds) noteDamaged(workflow workflowHash) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.damaged == nil {
		h.damaged = map[workflowHash]struct{}{}
	}
	h.damaged[workflow] = struct{}{}
}

// settle forgets what the escalation does not hold any more.
func (h *holds) settle(e *Escalation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !e.Held {
		without(h.workflows, e.Workflow, e.ID)
	}
	if !e.waits() {
		without(h.waiting, e.Requester, e.ID)
	}
}

func with(all map[string]map[string]struct{}, name, id string) map[string]map[string]struct{} {
	if all == nil {
		all = map[string]map[string]struct{}{}
	}
	if all[name] == nil {
		all[name] = map[string]struct{}{}
	}
	all[name][id] = struct{}{}
	return all
}

func without(all map[string]map[string]struct{}, name, id string) {
	delete(all[name], id)
	if len(all[name]) == 0 {
		delete(all, name)
	}
}

// waits reports whether it counts among those that wait for a decision because of its requester.
func (e *Escalation) waits() bool { return e.Status == Pending && e.Requester != "" && !e.Held }

// Load reads what holds workflows, before the first call. If it fails, no call may begin. A record
// that cannot be read goes on to hold its workflow, which its index entry names; unreadable counts
// such records.
func (d *Store) Load(ctx context.Context) (unreadable int, err error) {
	for entry, err := range d.store.Scan(ctx, store.Prefix([]byte{space, kindHold})) {
		if err != nil {
			return unreadable, fmt.Errorf("%w: %w", ErrStore, err)
		}
		id := uuid.UUID(bytes.Clone(entry.Key[2:]))
		e, _, err := d.read(ctx, id)
		switch {
		case errors.Is(err, ErrNotFound):
		case errors.Is(err, ErrUnreadable):
			unreadable++
			if len(entry.Value) == len(workflowHash{}) {
				d.holds.noteDamaged(workflowHash(entry.Value))
			}
		case err != nil:
			return unreadable, err
		default:
			d.holds.note(e)
		}
	}
	return unreadable, nil
}

// Blocks returns the escalation that keeps new calls of a workflow from beginning, the highest
// level first; nil if there is none, with what the claim's commit is bound to (store.Bind): nothing has begun to
// hold the workflow since. The errors are ErrStore and ErrUnreadable: then no call may begin.
func (d *Store) Blocks(ctx context.Context, workflow string) (*Escalation, store.Fence, error) {
	if d.fences != nil {
		return d.heldAnywhere(ctx, workflow)
	}
	none := store.Fence{}
	d.holds.mu.RLock()
	ids := slices.Collect(maps.Keys(d.holds.workflows[workflow]))
	damaged := false
	if len(d.holds.damaged) > 0 {
		_, damaged = d.holds.damaged[d.hashOf(workflow)]
	}
	d.holds.mu.RUnlock()
	switch {
	case damaged:
		return nil, none, fmt.Errorf("%w, and holds this workflow", ErrUnreadable)
	case len(ids) == 0:
		return nil, none, nil
	}
	e, err := d.highest(ctx, ids)
	return e, none, err
}

// heldAnywhere is Blocks where several gateways share the store, which it reads unless it knows that nothing has
// changed.
func (d *Store) heldAnywhere(ctx context.Context, workflow string) (*Escalation, store.Fence, error) {
	key := d.fenceKey(workflow)
	if at, open := d.fences.Open(key); open {
		return nil, at, nil
	}
	at, err := d.fences.Read(ctx, key)
	var ids []string
	for entry, failed := range d.store.Scan(ctx, store.Prefix(d.workflowPrefix(workflow))) {
		if err = cmp.Or(err, failed); err != nil {
			break
		}
		if readIndexed(entry.Value).Held {
			_, id := placeIn(entry.Key)
			ids = append(ids, id.String())
		}
	}
	if err != nil {
		return nil, at, fmt.Errorf("%w: %w", ErrStore, err)
	}
	e, err := d.highest(ctx, ids)
	if e == nil && err == nil {
		d.fences.Pass(at)
	}
	return e, at, err
}

// highest is the escalation of the highest level that still holds its workflow.
func (d *Store) highest(ctx context.Context, ids []string) (*Escalation, error) {
	var highest *Escalation
	for _, id := range ids {
		e, _, err := d.read(ctx, uuid.MustParse(id))
		switch {
		case errors.Is(err, ErrNotFound): // not committed yet, or never
		case err != nil:
			return nil, err
		case e.Held && (highest == nil || e.Level > highest.Level):
			highest = e
		}
	}
	return highest, nil
}

// Waits reports whether at least so many escalations wait for a decision because of a requester, such
// as its calls.
func (d *Store) Waits(ctx context.Context, requester string, most int) (bool, error) {
	if err := d.catchUp(ctx); err != nil {
		return false, err
	}
	d.holds.mu.RLock()
	ids := slices.Collect(maps.Keys(d.holds.waiting[requester]))
	d.holds.mu.RUnlock()
	if len(ids) < most {
		return false, nil
	}
	n := 0
	for _, id := range ids { // some may never have been committed
		switch e, err := d.Get(ctx, id); {
		case err == nil && e.waits():
			n++
		case err == nil, errors.Is(err, ErrNotFound):
			d.holds.mu.Lock()
			without(d.holds.waiting, requester, id)
			d.holds.mu.Unlock()
		default:
			return false, err
		}
	}
	return n >= most, nil
}

// LinkKey is the key in a link to an escalation. Only this store can make it.
func (d *Store) LinkKey(id string) string {
	hash := store.Index(d.sealer, "escalation link", id)
	return base64.RawURLEncoding.EncodeToString(hash[:])
}

// formKey is what a form has to send back that by decides on the escalation as it is now.
func (d *Store) formKey(e *Escalation, by string) string {
	hash := store.Index(d.sealer, "escalation form", fmt.Sprintf("%s %d %s %q %q", e.ID, e.Round, e.Status, e.Proposal.Hash(), by))
	return base64.RawURLEncoding.EncodeToString(hash[:])
}

// parseID reads the id of an escalation, or returns ErrNotFound.
func parseID(id string) (uuid.UUID, error) {
	parsed, err := uuid.Parse(id)
	if err != nil || parsed.String() != id {
		return uuid.UUID{}, ErrNotFound
	}
	return parsed, nil
}
