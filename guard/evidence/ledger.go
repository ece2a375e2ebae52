package evidence

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// errNoIdentity says that the gateway has no identity, and so neither reads nor writes a
// ledger.
var errNoIdentity = errors.New("rollbacks: without `identity` there is no ledger to read a workflow from or record a rollback in")

// Recorder has what a configuration needs to record rollbacks.
type Recorder struct {
	// Evidence is the ledger.
	Evidence *Evidence
	// EventBuilder drafts the events.
	EventBuilder *EventBuilder
	// Verifier verifies tokens of agents; nil if none are trusted.
	Verifier *ect.Verifier
}

// own reports whether an entry is the gateway's, also under a former name.
func (rec *Recorder) own(e *ledger.Entry) bool { return rec.EventBuilder.Own(e) }

// RollbackLedgerOptions are the settings of NewRollbackLedger. Recorder is required.
type RollbackLedgerOptions struct {
	// Recorder returns that of the latest configuration; false if that has no identity. It
	// is called for each read and event.
	Recorder func() (Recorder, bool)
	// Keep is how long the events of a rollback are kept, whatever the ledger's retention
	// is: as long as the coordinator keeps the rollback.
	Keep time.Duration
	// MaxNodes is the largest number of nodes of a plan; 0 is rollback.MaxNodes.
	MaxNodes int
}

// rollbackLedger is the rollback.Ledger of the coordinator. It returns verified and complete
// data, or an error: checkpoint.ErrTampered if an entry or the tree was altered, or
// errNoIdentity. It is safe for concurrent use.
type rollbackLedger struct {
	o     RollbackLedgerOptions
	known parentCache
}

// NewRollbackLedger makes the ledger that the coordinator of rollbacks reads and writes.
func NewRollbackLedger(o RollbackLedgerOptions) rollback.Ledger {
	if o.MaxNodes == 0 {
		o.MaxNodes = rollback.MaxNodes
	}
	return &rollbackLedger{o: o}
}

// recorder is that of the latest configuration.
func (l *rollbackLedger) recorder() (*Recorder, error) {
	rec, ok := l.o.Recorder()
	if !ok {
		return nil, errNoIdentity
	}
	return &rec, nil
}

// Checkpoint finds the token of a checkpoint or a group and verifies it, its parents, and
// its ancestors up to the agent behind it (cascade 4.2.3).
//
// Ids are unique within a workflow only. Of several checkpoints the gateway's own is taken,
// else the one recorded first, since nobody can add an earlier one. With an error, id and
// workflow are set if an entry was found, so that the failure can be recorded.
func (l *rollbackLedger) Checkpoint(ctx context.Context, id string) (rollback.Checkpoint, error) {
	rec, err := l.recorder()
	if err != nil {
		return rollback.Checkpoint{}, asTampered(err)
	}
	e, err := rec.target(ctx, ledger.Canonical(id))
	if err = asTampered(err); errors.Is(err, checkpoint.ErrTampered) {
		found := rollback.Checkpoint{ID: ledger.Canonical(id)}
		if e := reconstructed(ctx, rec.Evidence, rec.own, found.ID); e != nil {
			found.Workflow = e.Workflow
		}
		return found, err
	}
	if err != nil {
		return rollback.Checkpoint{}, err
	}
	found := rollback.Checkpoint{ID: e.ID, Workflow: e.Workflow}
	c, err := rec.verify(ctx, e, asCheckpoint)
	if err != nil {
		return found, asTampered(err)
	}
	parents, err := rec.parents(ctx, e)
	if err != nil {
		return found, asTampered(err)
	}
	agent, err := rec.agentBehind(ctx, &l.known, e, parents)
	if err != nil {
		return found, asTampered(err)
	}
	reversible, _ := c.Ext().Bool(ect.MemberReversible)
	rollbackURI, _ := c.Ext().Text(ect.MemberRollbackURI)
	ttl := ttlOf(c.Ext())
	return rollback.Checkpoint{
		ID: c.ID(), Workflow: c.Workflow(), Agent: agent, Own: rec.own(e), Issuer: c.Issuer(), RollbackURI: rollbackURI, Sum: c.OutputHash().Bytes(),
		Reversible: reversible, Expires: c.IssuedAt().Add(ttl), TTL: ttl, Parents: c.Parents(), Audience: c.Audience(),
	}, nil
}

// asTampered makes checkpoint.ErrTampered of ledger.ErrTampered.
func asTampered(err error) error {
	if errors.Is(err, ledger.ErrTampered) && !errors.Is(err, checkpoint.ErrTampered) {
		return fmt.Errorf("%w: %w", checkpoint.ErrTampered, err)
	}
	return err
}

// target finds the entry of a checkpoint.
func (rec *Recorder) target(ctx context.Context, id string) (*ledger.Entry, error) {
	all, err := rec.Evidence.Log().Find(ctx, id)
	if err != nil {
		return nil, err
	}
	if len(all) >= ledger.MaxFound {
		return nil, &rollback.TooManyError{What: "namesakes of the checkpoint in other workflows", Count: len(all), Limit: ledger.MaxFound - 1}
	}
	var found *ledger.Entry
	for i := range all {
		e := &all[i]
		if event, _ := ect.ParseEvent(e.Action); event != ect.EventCheckpoint || IsUnproven(e) {
			continue
		}
		first := found == nil || e.Recorded.Before(found.Recorded)
		if own := rec.own(e); found == nil || own && !rec.own(found) || own == rec.own(found) && first {
			found = e
		}
	}
	if found == nil {
		return nil, fmt.Errorf("%w: %w: %.80q", rollback.ErrUnknown, rollback.ErrCheckpointUnknown, id)
	}
	return found, nil
}

// reconstructed makes the entry of a checkpoint that cannot be read from the outcome of its
// call, which has the same workflow and parents. It is nil if there is no outcome.
func reconstructed(ctx context.Context, from *Evidence, own func(*ledger.Entry) bool, id string) *ledger.Entry {
	all, err := from.Log().Find(ctx, from.NodeID(id))
	if err != nil {
		return nil
	}
	for i := range all {
		if e := &all[i]; own(e) && slices.Contains(e.Parents, id) {
			event := e.Event
			event.ID, event.Action = id, string(ect.EventCheckpoint)
			event.Parents = slices.DeleteFunc(slices.Clone(e.Parents), func(parent string) bool { return parent == id })
			return &ledger.Entry{Event: event, Log: e.Log, Index: e.Index, Recorded: e.Recorded, Leaf: e.Leaf}
		}
	}
	return nil
}

// parents finds and verifies the parents of an entry that are recorded in its workflow or
// without one. Others are of another workflow or domain, or were pruned.
func (rec *Recorder) parents(ctx context.Context, e *ledger.Entry) ([]*ledger.Entry, error) {
	var all []*ledger.Entry
	for _, id := range e.Parents {
		p, err := rec.lookup(ctx, e.Workflow, id)
		if err != nil {
			return nil, err
		}
		if p == nil {
			continue
		}
		if _, err := rec.verify(ctx, p, asParent); err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// lookup finds the entry with an id in a workflow, else the one without a workflow; nil if
// there is none.
func (rec *Recorder) lookup(ctx context.Context, workflow, id string) (*ledger.Entry, error) {
	e, err := rec.Evidence.log.Known(ctx, workflow, id)
	if err == nil && e == nil && workflow != "" {
		e, err = rec.Evidence.log.Known(ctx, "", id)
	}
	return e, err
}

// claims are those of a recorded token.
type claims interface {
	ID() string
	Workflow() string
	Issuer() string
	IssuedAt() time.Time
	Parents() []string
	OutputHash() ect.Hash
	Ext() ect.Ext
	Audience() []string
}

// verify verifies the signature of a recorded token (cascade 4.2.3), also under replaced
// keys, and its inclusion in the tree under a signed head. The key of an agent may be gone,
// or the audience an earlier name: then the inclusion suffices, since the token was verified
// when it was recorded. Checkpoints under a revoked key are refused, but what followed from
// tokens under it can be undone. The error is checkpoint.ErrTampered for an invalid token.
func (rec *Recorder) verify(ctx context.Context, e *ledger.Entry, as role) (claims, error) {
	proven, err := rec.proven(ctx, e)
	if err != nil {
		return nil, err
	}
	if IsUnproven(e) && as == asParent {
		return recordedClaims(e) // it is not used as evidence
	}
	c, err := rec.signed(ctx, e, proven)
	if err != nil && proven && !rec.own(e) && ctx.Err() == nil && as.excuses(err) {
		c, err = recordedClaims(e)
	}
	if refused := (*ect.Error)(nil); errors.As(err, &refused) {
		err = fmt.Errorf("%w: the token of entry %d: %w", checkpoint.ErrTampered, e.Index, err)
	}
	if err != nil {
		return nil, err
	}
	if c.ID() != e.ID || c.Workflow() != e.Workflow || c.Issuer() != e.Issuer || !slices.Equal(c.Parents(), e.Parents) {
		return nil, fmt.Errorf("%w: entry %d is of another token", checkpoint.ErrTampered, e.Index)
	}
	return c, nil
}

// role is what a token is verified as.
type role uint8

const (
	asCheckpoint role = iota
	asParent          // of a checkpoint or of its ancestors
)

// excuses reports whether inclusion in the tree suffices although an agent's signature fails
// with err. A parent needs only to have been trusted when it was recorded.
func (r role) excuses(err error) bool {
	var refused *ect.Error
	if !errors.As(err, &refused) {
		return r == asParent && errors.Is(err, ect.ErrUnavailable)
	}
	switch refused.Code {
	case ect.CodeKeyID, ect.CodeAudience:
		return true
	case ect.CodeKeyRevoked, ect.CodeLevel: // the required level may have been raised
		return r == asParent
	}
	return false
}

// signed verifies a token by its signature. One that is signed only when it is shown was
// recorded by the gateway itself: that its entry is proven says as much, while its key is
// in the key file and not revoked (ADR 0064).
func (rec *Recorder) signed(ctx context.Context, e *ledger.Entry, proven bool) (claims, error) {
	if e.Header != nil && proven {
		switch known, revoked := rec.Evidence.Ring().Known(ect.HeaderKeyID(e.Header)); {
		case !known:
			return nil, &ect.Error{Code: ect.CodeKeyID}
		case revoked:
			return nil, &ect.Error{Code: ect.CodeKeyRevoked}
		}
		return recordedClaims(e)
	}
	token, err := rec.Evidence.Log().Token(ctx, e)
	if err != nil {
		return nil, err
	}
	verifier := rec.Verifier
	if rec.own(e) {
		var err error
		if verifier, err = rec.ownVerifier(); err != nil {
			return nil, err
		}
	}
	if verifier == nil { // no agent is trusted any more
		return nil, &ect.Error{Code: ect.CodeKeyID}
	}
	return verifier.VerifyStored(ctx, string(token))
}

// ownVerifier verifies the gateway's tokens under its own keys alone: the keys of a trust
// domain may be allowed to sign for all names in it.
func (rec *Recorder) ownVerifier() (*ect.Verifier, error) {
	source, err := rec.EventBuilder.Source()
	if err != nil {
		return nil, err
	}
	return ect.NewVerifier(ect.Policy{
		Audience: rec.EventBuilder.Names(), Sources: []ect.Source{source}, Algorithms: ect.Algorithms(),
	})
}

// proven verifies that an entry is in the tree of its log, whichever node's that is.
func (rec *Recorder) proven(ctx context.Context, e *ledger.Entry) (bool, error) {
	head, err := note.NewVerifier(rec.Evidence.HeadKeyOf(e.Log))
	if err != nil {
		return false, err
	}
	log, err := rec.Evidence.Log().In(ctx, e.Log)
	if errors.Is(err, ledger.ErrNotFound) {
		err = fmt.Errorf("%w: the log %s is gone", ledger.ErrTampered, e.Log)
	}
	var receipt ledger.Receipt
	if err == nil {
		receipt, err = log.Receipt(ctx, e.Index)
	}
	if err == nil {
		_, err = receipt.Check(e.Leaf, e.Log, note.VerifierList(head))
	}
	if errors.Is(err, ledger.ErrProof) || errors.Is(err, ledger.ErrTampered) {
		err = fmt.Errorf("%w: %w", checkpoint.ErrTampered, err)
	}
	return err == nil, err
}

// parentCache remembers the verified parents of the gateway's entries for a short time: checkpoints of one workflow
// share ancestors, and each would be verified again.
type parentCache struct {
	mu   sync.Mutex
	m    map[place]verifiedParents
	held int // entries and parents in m, also those that were replaced
}

// place identifies an entry.
type place struct {
	log   string
	index int64
}

type verifiedParents struct {
	all   []*ledger.Entry
	found time.Time
}

const (
	// parentsTime is how long cached parents are trusted: keys may be revoked meanwhile.
	parentsTime = time.Minute
	// maxVerified bounds the parents in the cache, of which each takes about 2 kB, and up to 60 kB.
	maxVerified = 4096
	// maxFar is how many ancestors of a call are searched. Each is verified.
	maxFar = 256
)

// parents are those of an entry, as Recorder.parents has them.
func (c *parentCache) parents(ctx context.Context, rec *Recorder, e *ledger.Entry) ([]*ledger.Entry, error) {
	at, now := place{e.Log, e.Index}, time.Now()
	c.mu.Lock()
	known, there := c.m[at]
	c.mu.Unlock()
	if there && now.Sub(known.found).Abs() < parentsTime {
		return known.all, nil
	}
	all, err := rec.parents(ctx, e)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil || c.held >= maxVerified {
		c.m, c.held = map[place]verifiedParents{}, 0
	}
	c.m[at] = verifiedParents{all, now}
	c.held += 1 + len(all)
	return all, nil
}

// agentBehind is the identity behind a checkpoint: its issuer if that is an agent, else the
// issuer of the nearest agent's token among its ancestors, else the gateway.
func (rec *Recorder) agentBehind(ctx context.Context, c *parentCache, e *ledger.Entry, parents []*ledger.Entry) (string, error) {
	if !rec.own(e) {
		return e.Issuer, nil // target returns no unproven checkpoint
	}
	met := map[place]bool{{e.Log, e.Index}: true}
	for todo := slices.Clone(parents); len(todo) > 0 && len(met) <= maxFar; todo = todo[1:] {
		p := todo[0]
		at := place{p.Log, p.Index}
		switch {
		case met[at], IsUnproven(p): // nor are the parents of an unproven one evidence
			continue
		case !rec.own(p):
			return p.Issuer, nil
		}
		met[at] = true
		above, err := c.parents(ctx, rec, p)
		if err != nil {
			return "", err
		}
		todo = append(todo, above...)
	}
	return e.Issuer, nil
}

// appendEvent drafts an event for a commit, unless the event is recorded already, perhaps
// before a restart.
func (l *rollbackLedger) appendEvent(ctx context.Context, workflow string, id func(*Evidence) string,
	draft func(*Recorder, time.Time) (*ect.Draft, error),
) (rollback.Evidence, error) {
	return l.appendEvents(ctx, workflow, id, func(rec *Recorder, now time.Time) ([]*ect.Token, []*ect.Draft, error) {
		d, err := draft(rec, now)
		return nil, []*ect.Draft{d}, err
	})
}

// appendEvents is appendEvent for an event with further tokens and drafts.
func (l *rollbackLedger) appendEvents(ctx context.Context, workflow string, id func(*Evidence) string,
	draft func(*Recorder, time.Time) ([]*ect.Token, []*ect.Draft, error),
) (rollback.Evidence, error) {
	rec, err := l.recorder()
	if err != nil {
		return rollback.Evidence{}, err
	}
	t := rollback.Evidence{ID: id(rec.Evidence)}
	if recorded, err := rec.Evidence.log.Has(ctx, workflow, t.ID); err != nil || recorded {
		return t, err
	}
	now, err := rec.Evidence.store.Now(ctx)
	if err != nil {
		return rollback.Evidence{}, err
	}
	tokens, drafts, err := draft(rec, now)
	if err != nil {
		return rollback.Evidence{}, err
	}
	t.Batch, err = rec.Evidence.NewBatch(now.Add(l.o.Keep), tokens, drafts...)
	return t, err
}

// Started records that a rollback was accepted. Its parent is the first known of parents,
// else the checkpoint (cascade 4.4.1). A parent that was passed to Evidence.Seen only is
// recorded with it, so that the token that requests a rollback enters the workflow only once
// the rollback is accepted.
func (l *rollbackLedger) Started(ctx context.Context, r *rollback.Rollback, parents []string) (rollback.Evidence, error) {
	return l.appendEvents(ctx, r.Workflow, func(e *Evidence) string { return e.rollbackStartID(r.ID) },
		func(rec *Recorder, now time.Time) ([]*ect.Token, []*ect.Draft, error) {
			parent, tokens, err := rec.cause(ctx, r, parents)
			if err != nil {
				return nil, nil, err
			}
			d, err := rec.EventBuilder.rollbackStart(now, r, parent)
			return tokens, []*ect.Draft{d}, err
		})
}

// maxWithStart is how many ancestors of a parent are recorded with a start.
const maxWithStart = ledger.MaxEvents - 2

// cause is the parent of a rollback's start, with the tokens to record for it.
func (rec *Recorder) cause(ctx context.Context, r *rollback.Rollback, parents []string) (string, []*ect.Token, error) {
	for _, id := range parents {
		known, err := rec.Evidence.Known(ctx, r.Workflow, []string{id})
		if err != nil {
			return "", nil, err
		}
		if len(known) > 0 {
			return known[0], nil, nil
		}
		presented, err := rec.Evidence.presented(ctx, r.Workflow, id, maxWithStart)
		if err != nil {
			return "", nil, err
		}
		if len(presented) > 0 {
			return id, presented, nil
		}
	}
	return r.Checkpoint, nil, nil
}

// Stepped records the result of a step: compensate where a compensation was sent, else
// rollback_complete (cascade Figure 13).
func (l *rollbackLedger) Stepped(ctx context.Context, r *rollback.Rollback, s *rollback.Step, way checkpoint.Way) (rollback.Evidence, error) {
	return l.appendEvent(ctx, r.Workflow, func(e *Evidence) string { return e.rollbackStepID(r.ID, s.Checkpoint) },
		func(rec *Recorder, now time.Time) (*ect.Draft, error) {
			if way == checkpoint.Compensate && s.Attempts > 0 {
				return rec.EventBuilder.compensate(now, r, s)
			}
			return rec.EventBuilder.rollbackStep(now, r, s)
		})
}

// Completed records the result of a rollback, and the end of the workflow if the rollback
// was of the whole workflow (cascade 4.1.3, ATD "Workflow Boundary ECTs"). Where an end is awaited its note is rewritten, so that no
// end is recorded that has not seen the result.
func (l *rollbackLedger) Completed(ctx context.Context, r *rollback.Rollback) (rollback.Evidence, error) {
	var note *store.Write
	t, err := l.appendEvents(ctx, r.Workflow, func(e *Evidence) string { return e.rollbackCompleteID(r.ID) },
		func(rec *Recorder, now time.Time) ([]*ect.Token, []*ect.Draft, error) {
			d, err := rec.EventBuilder.rollbackComplete(now, r)
			if err != nil || r.Workflow == "" {
				return nil, []*ect.Draft{d}, err
			}
			since, err := rec.Evidence.OpenSince(ctx, r.Workflow)
			if err == nil && since != 0 {
				w := rec.Evidence.Opened(now, r.Workflow)
				note = &w
			}
			if err != nil || r.Scope != rollback.FullWorkflow {
				return nil, []*ect.Draft{d}, err
			}
			page, err := rec.Evidence.Log().List(ctx, r.Workflow, "", ledger.MaxPage) // a workflow may be larger than any plan
			if err != nil {
				return nil, nil, err
			}
			began := WorkflowEnd{Workflow: r.Workflow}
			for i := range page.Entries {
				began.Add(&page.Entries[i])
			}
			end, err := rec.EventBuilder.workflowComplete(now, r, &began)
			return nil, []*ect.Draft{d, end}, err
		})
	if err == nil && note != nil {
		t.Batch.Add(*note)
	}
	return t, err
}

// Erred records an error of a rollback, once for each checkpoint and type.
func (l *rollbackLedger) Erred(ctx context.Context, r *rollback.Rollback, checkpointID, errorType, why string) (rollback.Evidence, error) {
	return l.appendEvent(ctx, r.Workflow, func(e *Evidence) string { return e.rollbackErrorID(r.ID, checkpointID, errorType) },
		func(rec *Recorder, now time.Time) (*ect.Draft, error) {
			return rec.EventBuilder.rollbackError(now, r, checkpointID, errorType, why)
		})
}
