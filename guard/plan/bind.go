package plan

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Receive takes one of the 16 places for texts that are received, of which 4 are for those that one puts. done returns
// it, once. It is nil where there is no place.
func (s *Store) Receive(by string) (done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := 0
	for _, n := range s.places {
		all += n
	}
	if all >= maxReceived || s.places[by] >= maxReceivedBy {
		return nil
	}
	s.places[by]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.places[by]--; s.places[by] == 0 {
			delete(s.places, by)
		}
	}
}

// Putting is a plan that somebody puts for a workflow.
type Putting struct {
	Workflow string
	// Issuer is the workflow's initiator, if nobody with authority puts it; By is who puts it.
	Issuer, By string
	Plan       *Descriptor
	// Replaces are the versions of which it replaces one; "*" is any, and none says that there may be
	// only the same. Fresh says that there must be no plan.
	Replaces []string
	Fresh    bool // see Replaces
}

// Put assigns a plan. created says that the workflow had none. The errors are ErrExists, ErrChanged,
// ErrBegun, ErrFull, ErrStore and ErrUnreadable, and that of ctx.
func (s *Store) Put(ctx context.Context, p Putting) (a *Assigned, created bool, err error) {
	leave, err := s.enter(ctx, p.Workflow)
	if err != nil {
		return nil, false, err
	}
	defer leave()
	for {
		a, created, err = s.put(ctx, p)
		if !errors.Is(err, store.ErrFenced) {
			return a, created, err
		}
		if err := store.AwaitGroup(ctx); err != nil { // another gateway was first
			return nil, false, err
		}
	}
}

func (s *Store) put(ctx context.Context, p Putting) (_ *Assigned, created bool, err error) {
	if err := s.CatchUp(ctx); err != nil { // a refusal says what is so now
		return nil, false, err
	}
	all, at, err := s.recorded(ctx, p.Workflow)
	if err != nil {
		return nil, false, err
	}
	current, err := s.living(ctx, all[p.Issuer])
	if err != nil {
		return nil, false, err
	}
	version := p.Plan.Version()
	switch {
	case current == nil && len(p.Replaces) > 0, current != nil && p.Fresh,
		current != nil && len(p.Replaces) > 0 && !slices.Contains(p.Replaces, "*") && !slices.Contains(p.Replaces, current.Version):
		return nil, false, ErrChanged
	case current == nil:
	case current.Version == version:
		same := *current
		same.Plan = p.Plan
		return &same, false, nil
	case !current.Begun.IsZero():
		return nil, false, ErrBegun
	case len(p.Replaces) == 0:
		return nil, false, ErrExists
	}
	now, err := s.store.Now(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if p.Issuer != "" {
		if err := s.readChanged(ctx); err != nil {
			return nil, false, err
		}
	}
	size := int64(len(p.Plan.Canonical()))
	if s.full(now, p.Issuer, current == nil, size) {
		return nil, false, ErrFull
	}
	a := &Assigned{
		Workflow: p.Workflow, Issuer: p.Issuer, By: p.By, Version: version, Size: size, Plan: p.Plan,
		Put: now, Expires: now.Add(time.Duration(s.keep.Load())),
	}
	if current != nil {
		a.Earlier = append(slices.Clone(current.Earlier), current.Version)
		a.Earlier = a.Earlier[max(0, len(a.Earlier)-maxEarlier):]
		a.Replaced = current.Replaced + current.Size
	}
	if err = s.keepText(ctx, p.Plan, a.Expires); err != nil {
		return nil, false, err
	}
	b := s.change(p.Workflow, at, a.Expires, s.write(a))
	b.OnDone(func(err error) error {
		s.committed(all, a, err)
		return err
	})
	if err := b.Commit(ctx, s.store); err != nil {
		return nil, false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return a, current == nil, nil
}

// readChanged reads the plans that other gateways have changed, so that full counts them.
func (s *Store) readChanged(ctx context.Context) error {
	s.mu.Lock()
	missed, heard := s.missed, slices.Collect(maps.Keys(s.heard))
	s.missed = false
	s.mu.Unlock()
	if missed {
		if _, err := s.Load(ctx); err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.missed = true
			return err
		}
	}
	for _, hash := range heard {
		var err error
		for row, bad := range s.heads.All(ctx, hash[:]) { // none where they have expired
			if err = bad; err == nil {
				_, _, err = s.readPlans(ctx, row.Record.Workflow)
				break
			}
		}
		if err != nil && !errors.Is(err, ErrUnreadable) { // which its calls find
			return err
		}
	}
	return nil
}

// full reports whether there is no room for one more offer of an issuer, or a further version of one. It
// forgets what has expired. Workflows of an issuer that have the same plan count once.
func (s *Store) full(now time.Time, issuer string, fresh bool, size int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, mine := 0, 0
	sizes := map[string]int64{}
	count := func(a *Assigned) {
		if issuer != "" && a.By == issuer && (a.Begun.IsZero() || now.Sub(a.Begun) < countedFor) {
			sizes[a.Version] = a.Size
			size += a.Replaced
		}
	}
	for workflow, p := range s.all {
		left := plans{}
		for by, a := range p {
			if !now.Before(a.Expires) {
				continue
			}
			left[by] = a
			count(a)
			if !a.inForce() {
				n++
				if by == issuer {
					mine++
				}
			}
		}
		switch {
		case len(left) == 0:
			delete(s.all, workflow)
		case len(left) < len(p):
			s.all[workflow] = left
		}
	}
	for _, of := range sizes {
		size += of
	}
	return issuer != "" && (fresh && (n >= maxOffers || mine >= maxPut) || size > maxPutBytes)
}

// keepText keeps the text of a plan at least until a time. Most times there is nothing to write.
func (s *Store) keepText(ctx context.Context, d *Descriptor, until time.Time) error {
	prefix := s.piecesOf(d.Version())
	kept, err := s.pieces.PiecesExpire(ctx, prefix)
	if err != nil && !errors.Is(err, ErrUnreadable) {
		return err
	}
	if !kept.Before(until) {
		return nil
	}
	whole := d.Canonical()
	s.seal.Lock()
	_, err = s.store.Commit(ctx, s.pieces.PutPieces(prefix, whole, until.Add(time.Duration(s.keep.Load())/2))...)
	s.seal.Unlock()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	if s.fences != nil { // the others have its nodes in the order of the canonical text
		if d, err = Parse(whole); err != nil {
			return fmt.Errorf("%w: %w", ErrUnreadable, err)
		}
	}
	s.hold(d, int64(len(whole)))
	return nil
}

// Settle waits until the commit of a first call of the workflow that is under way has ended, and returns
// what Of does then.
func (s *Store) Settle(ctx context.Context, workflow string, takesPart func(call string) (bool, error)) (*Assigned, error) {
	leave, err := s.enter(ctx, workflow)
	if err != nil {
		return nil, err
	}
	leave()
	return s.Of(ctx, workflow, takesPart)
}

// Beside returns a batch for the commit of a call's claim that no plan binds: until it has ended, none begins in
// the workflow. It is ErrChanged where one does that binds the call: look again.
func (s *Store) Beside(ctx context.Context, workflow string, takesPart func(call string) (bool, error)) (*store.Batch, error) {
	leave, err := s.enter(ctx, workflow)
	if err != nil {
		return nil, err
	}
	at, err := s.Fence(ctx, workflow)
	var a *Assigned
	var expires time.Time
	if err == nil {
		a, err = s.Of(ctx, workflow, takesPart)
	}
	if a != nil {
		err = ErrChanged
	}
	if err == nil && s.fences != nil {
		expires, err = s.store.Now(ctx)
		expires = expires.Add(time.Duration(s.keep.Load()))
	}
	if err != nil {
		leave()
		return nil, err
	}
	b := s.change(workflow, at, expires)
	b.OnDone(func(err error) error {
		leave()
		return err
	})
	return b, nil
}

// Begin returns the writes by which the call with a checkpoint begins under a plan, for the commit of its claim:
// from then on those who take part in it stay with the plan. a is what Of or Offered has returned, or a plan of the
// configuration that the workflow has named. called says whether something that the call takes part in was called
// before: then no plan begins that nobody with authority has put. The batch is nil if nothing is to be written.
// ErrChanged says that the plan is another one by now: look again.
//
// Other changes of the workflow's plans wait until the batch has ended.
func (s *Store) Begin(ctx context.Context, a *Assigned, call string, called func() (bool, error)) (_ *store.Batch, err error) {
	now, err := s.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	keep := time.Duration(s.keep.Load())
	if !a.Begun.IsZero() && a.Expires.Sub(now) > keep/2 {
		return nil, nil
	}
	leave, err := s.enter(ctx, a.Workflow)
	if err != nil {
		return nil, err
	}
	ended := false
	defer func() {
		if !ended {
			leave()
		}
	}()
	p, at, err := s.recorded(ctx, a.Workflow)
	if err != nil {
		return nil, err
	}
	current, err := s.living(ctx, p[a.Issuer])
	if err != nil {
		return nil, err
	}
	begun := *a
	switch {
	case current == nil && a.Expires.IsZero(): // a plan of the configuration
	case current == nil || current.Version != a.Version:
		return nil, ErrChanged
	case !current.Begun.IsZero() && current.Expires.Sub(now) > keep/2:
		return nil, nil // by another call meanwhile
	default:
		begun = *current
		begun.Plan = a.Plan
	}
	if a.Issuer != "" && begun.Begun.IsZero() {
		force, err := s.living(ctx, p[""])
		if err != nil {
			return nil, err
		}
		late, err := called()
		if err != nil {
			return nil, err
		}
		if late || force != nil {
			return nil, ErrChanged
		}
	}
	begun.Expires = now.Add(keep)
	if begun.Begun.IsZero() {
		begun.Begun, begun.First = now, call
	}
	if err = s.keepText(ctx, a.Plan, begun.Expires); err != nil {
		return nil, err
	}
	b := s.change(a.Workflow, at, begun.Expires, s.write(&begun))
	b.OnDone(func(err error) error {
		defer leave()
		s.committed(p, &begun, err)
		return err
	})
	ended = true
	return b, nil
}

// committed notes the end of a commit in a workflow that had these plans.
func (s *Store) committed(p plans, a *Assigned, err error) {
	unsure := errors.Is(err, store.ErrUnknown)
	if err != nil && !unsure {
		return
	}
	kept := *a
	kept.Plan = nil
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noted++
	s.fences.Forget(s.fenceKey(a.Workflow))
	if unsure {
		s.unsure[a.Workflow] = true
		return
	}
	delete(s.unsure, a.Workflow)
	s.set(a.Workflow, p.with(&kept))
}

// enter waits until nobody else changes the workflow's plan.
func (s *Store) enter(ctx context.Context, workflow string) (leave func(), err error) {
	gate := s.gates[maphash.String(s.seed, workflow)%uint64(len(s.gates))]
	select {
	case gate <- struct{}{}:
		return func() { <-gate }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ReadLarge waits until nobody else reads a large workflow for its plan: its records take about a kilobyte of
// memory each. done ends the turn. Nobody waits without a store.
func (s *Store) ReadLarge(ctx context.Context) (done func(), err error) {
	if s == nil {
		return func() {}, nil
	}
	select {
	case s.large <- struct{}{}:
		return func() { <-s.large }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
