package execution

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Re-sealing works in small steps, one commit after the other, which the store groups with the
// traffic's, and keeps no snapshot.
const (
	resealPage = 256 // records that are read in one snapshot
	countPage  = 64  // pieces of answers that are read in one snapshot
)

// ResealProgress is the progress of a Reseal.
type ResealProgress struct {
	// Key is the sealing key under which, or a newer one, values are sealed anew.
	Key uint32 `json:"key"`
	// Seen counts the values read.
	Seen int `json:"seen"`
	// Resealed counts the values sealed anew.
	Resealed int `json:"resealed"`
	// Damaged counts values that do not open with the key that they name. They stay as they are.
	Damaged int `json:"damaged"`
	// Left is what was found under older keys, by their ids.
	Left []KeyLeft `json:"left"`
	// Started and Finished are the times of its beginning and end; Finished is zero before.
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished,omitzero"` // see Started
}

// KeyLeft is what a Reseal leaves under an older key.
type KeyLeft struct {
	// ID is the number of the key.
	ID uint32 `json:"id"`
	// Records are damaged, or belong to executions of another node that used the store before.
	Records int `json:"records"`
	// Results are pieces of answers, which are left to expire.
	Results int `json:"results"`
	// Until is when the last of it expires; zero where some of it does not.
	Until time.Time `json:"until,omitzero"`

	endless bool
}

// Reseal seals anew, with the newest key, what was sealed with an older one: all records, what
// operators have resolved, and the key check. Pieces of answers are left to expire and are
// counted. At the end the store notes which older keys it still needs (Keys.InUse). It calls
// report, if any, after each step.
//
// It runs beside the traffic, whose commits win; a running execution's record is sealed anew by
// its own outcome, for which Reseal waits. It may be stopped at any moment: the next one passes
// quickly over what was done.
//
// Keys older than key are given up but for what is counted: all that others seal has to be under key, or a newer
// one, by now. 0 is the key that seals. In a shared store it comes after Keys.Await.
func (g *Guard) Reseal(ctx context.Context, key uint32, report func(ResealProgress)) (ResealProgress, error) {
	r := &resealer{
		g: g, ctx: ctx, Resealer: store.NewResealer(g.store, g.sealer), report: report,
		key: key, started: time.Now(), remains: map[uint32]KeyLeft{},
	}
	if key == 0 {
		r.key = r.Newest()
	}
	r.Take = r.take
	r.Enter = g.writers.Enter
	r.OnDamaged = func(entry store.Entry, _ error) {
		r.unread = r.unread || entry.Value == nil
		r.left(entry, KeyLeft{Records: 1})
	}
	r.OnLost = func(found store.Entry) {
		if r.Older(found.Value) { // by another node
			r.left(found, KeyLeft{Records: 1})
		}
	}
	if report == nil {
		r.report = func(ResealProgress) {}
	}
	var finished time.Time
	err := r.run(ctx)
	if err == nil {
		finished = time.Now()
	}
	p := r.progress()
	p.Finished = finished
	r.report(p)
	return p, err
}

type resealer struct {
	*store.Resealer
	g       *Guard
	ctx     context.Context // of the Reseal
	report  func(ResealProgress)
	key     uint32 // older ones are given up
	started time.Time
	remains map[uint32]KeyLeft // under older keys
	running []Key              // whose executions must end first, here or elsewhere
	unread  bool               // a value could not be read, so that its key is not known
}

func (r *resealer) progress() ResealProgress {
	p := ResealProgress{
		Key: r.key, Seen: r.Seen, Resealed: r.Resealed, Damaged: r.Damaged, Left: []KeyLeft{}, Started: r.started,
	}
	for _, id := range slices.Sorted(maps.Keys(r.remains)) {
		p.Left = append(p.Left, r.remains[id])
	}
	return p
}

func (r *resealer) run(ctx context.Context) error {
	r.report(r.progress())
	// From here on this process writes nothing under an older key.
	if err := r.g.writers.Wait(ctx); err != nil {
		return err
	}
	steps := []func(context.Context) error{
		r.keyCheck, r.walk(resealPage, r.Reseal, spaceRecord), r.walk(resealPage, r.Reseal, spaceResolved), r.awaitRunning,
		r.walk(countPage, r.countResults, spaceResult), r.walk(countPage, r.countResults, spaceLive, kindPart),
		r.walk(countPage, r.countResults, spaceLive, kindSays), r.note,
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
		r.report(r.progress())
	}
	return nil
}

// walk is the step that calls do for the values under older keys whose keys begin so.
func (r *resealer) walk(page int, do func(context.Context, ...store.Entry) error, prefix ...byte) func(context.Context) error {
	return func(ctx context.Context) error {
		err := r.Walk(ctx, prefix, page, func(ctx context.Context, older ...store.Entry) error {
			err := do(ctx, older...)
			if err == nil {
				r.report(r.progress())
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		return nil
	}
}

func (r *resealer) keyCheck(ctx context.Context) error {
	r.Seen++
	return r.resealKey(ctx, metaKey("key"))
}

// resealKey seals the value under one key anew, if needed.
func (r *resealer) resealKey(ctx context.Context, key []byte) error {
	entry, err := r.g.store.Get(ctx, key)
	if err == nil && r.Older(entry.Value) {
		err = r.Reseal(ctx, entry)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// left counts what stays under an older key. Values under an unknown key are damaged, and not
// counted.
func (r *resealer) left(entry store.Entry, more KeyLeft) {
	id := r.g.sealer.KeyOf(entry.Value)
	if !slices.Contains(r.g.sealer.KeyIDs(), id) {
		return
	}
	l := r.remains[id]
	l.ID = id
	l.Records += more.Records
	l.Results += more.Results
	l.endless = l.endless || entry.Expires.IsZero()
	if entry.Expires.After(l.Until) {
		l.Until = entry.Expires
	}
	if l.endless {
		l.Until = time.Time{}
	}
	r.remains[id] = l
}

// take decides whether an opened value under an older key is sealed anew now.
func (r *resealer) take(entry store.Entry, plain []byte) bool {
	if entry.Key[0] != spaceRecord {
		return true
	}
	record, err := decodeRecord(plain)
	if err != nil { // of a newer build; it may be running
		r.Damaged++
		r.left(entry, KeyLeft{Records: 1})
		return false
	}
	if !record.State.open() {
		return true
	}
	key := Key(entry.Key[1:])
	orphan, err := r.g.members.orphaned(r.ctx, record)
	switch {
	case err != nil, !orphan && r.g.members.store == nil:
		r.left(entry, KeyLeft{Records: 1})
		return false
	case !orphan, r.g.flights.find(key) != nil:
		// Its outcome is conditional on the current version, and must not lose to this. Without a
		// flight no process has that version any more.
		r.running = append(r.running, key)
		return false
	}
	return true
}

// awaitRunning waits for the executions whose records could not be touched, and reseals those
// whose outcome was not recorded.
func (r *resealer) awaitRunning(ctx context.Context) error {
	for len(r.running) > 0 {
		key := r.running[0]
		r.running = r.running[1:]
		flight := r.g.flights.find(key)
		switch {
		case flight != nil:
			select {
			case <-flight.Done():
			case <-ctx.Done():
				return ctx.Err()
			}
		case r.g.members.store != nil: // it may run elsewhere
			if err := r.g.Await(ctx, key); err != nil {
				return err
			}
		}
		if err := r.resealKey(ctx, recordKey(key)); err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
	}
	return nil
}

// countResults counts the pieces of answers, which are left to expire.
func (r *resealer) countResults(_ context.Context, older ...store.Entry) error {
	for _, entry := range older {
		r.left(entry, KeyLeft{Results: 1})
	}
	return nil
}

// note writes down which older keys are still needed: all of them as before if a value could not be
// read.
func (r *resealer) note(ctx context.Context) error {
	if r.unread {
		return nil
	}
	return r.g.keys.change(ctx, func(s *keyState) error {
		s.Uses = slices.DeleteFunc(s.Uses, func(use KeyUse) bool { return use.ID < r.key })
		for id, left := range r.remains {
			if id < r.key {
				s.Uses = with(s.Uses, KeyUse{ID: id, Until: left.Until})
			}
		}
		return nil
	})
}
