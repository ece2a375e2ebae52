package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Re-sealing works in small steps, one commit after the other: a commit among those
// of the traffic, which the store gathers anyway, and no snapshot that is kept.
const (
	resealPage  = 256 // records that are looked at in one snapshot
	resealBatch = 64  // records that are written in one commit
	countPage   = 64  // pieces of answers that are looked at in one snapshot
)

// ResealProgress tells how far a Reseal has come.
type ResealProgress struct {
	// Key is the sealing key under which values are sealed anew.
	Key uint32
	// Seen counts the values that were looked at.
	Seen int
	// Resealed counts those that were sealed anew.
	Resealed int
	// Damaged counts those that do not open with the key that they name. They stay
	// as they are.
	Damaged int
	// Left is what stands under older keys, by their id, as far as was looked.
	Left map[uint32]KeyLeft
	// Started and Finished are when it began, and when it was done; Finished is
	// zero before.
	Started, Finished time.Time
}

// KeyLeft is what a Reseal leaves under an older key.
type KeyLeft struct {
	// Records are damaged, or belong to executions that run on other nodes.
	Records int
	// Results are pieces of answers. They are not sealed anew but expire.
	Results int
	// Until is when the last of it expires; zero where some of it does not.
	Until time.Time

	endless bool
}

// Reseal seals anew, with the newest key, what was sealed with an older one: all
// records, what operators have resolved, and the key check. Pieces of answers are left
// to expire and are counted. When it is done the store notes which of the older keys it
// still needs (KeysInUse). It tells report, where there is one, after each step.
//
// It goes beside the traffic, whose commits win; a record whose execution runs is
// sealed anew by its own outcome, for which Reseal waits. It may be stopped at any
// moment: the next one passes quickly over what was done.
func (g *Guard) Reseal(ctx context.Context, report func(ResealProgress)) (ResealProgress, error) {
	ids := g.sealer.KeyIDs()
	r := &resealer{g: g, report: report, progress: ResealProgress{
		Key: ids[len(ids)-1], Left: map[uint32]KeyLeft{}, Started: time.Now(),
	}}
	if report == nil {
		r.report = func(ResealProgress) {}
	}
	err := r.run(ctx)
	if err == nil {
		r.progress.Finished = time.Now()
	}
	r.tell()
	return r.progress, err
}

type resealer struct {
	g        *Guard
	report   func(ResealProgress)
	progress ResealProgress
	pending  []opened // to be sealed anew
	running  []Key    // whose executions must end first
}

// opened is an entry and its plain value.
type opened struct {
	store.Entry
	plain []byte
}

func (r *resealer) run(ctx context.Context) error {
	r.tell()
	// From here on nothing new comes under an older key in this process.
	if err := r.g.writers.turn(ctx); err != nil {
		return err
	}
	steps := []func(context.Context) error{r.keyCheck, r.records, r.resolutions, r.awaitRunning, r.results, r.note}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
		r.tell()
	}
	return nil
}

func (r *resealer) tell() {
	p := r.progress
	p.Left = maps.Clone(p.Left)
	r.report(p)
}

// older reports whether the value is sealed with a key that is to be given up.
func (r *resealer) older(value []byte) bool { return r.g.sealer.KeyOf(value) < r.progress.Key }

func (r *resealer) keyCheck(ctx context.Context) error {
	entry, err := r.g.store.Get(ctx, metaKey("key"))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	r.progress.Seen++
	if r.older(entry.Value) {
		if plain := r.open(entry); plain != nil {
			r.pending = append(r.pending, opened{entry, plain})
		}
	}
	return r.flush(ctx)
}

// open returns the plain value. Where there is none, it is counted as left.
func (r *resealer) open(entry store.Entry) []byte {
	plain, err := r.g.sealer.Open(nil, entry.Value, entry.Key)
	if err != nil {
		r.progress.Damaged++
		r.left(entry, KeyLeft{Records: 1})
		return nil
	}
	return plain
}

// left counts what stays under an older key. A key that nobody has is none: the
// number itself was damaged.
func (r *resealer) left(entry store.Entry, more KeyLeft) {
	id := r.g.sealer.KeyOf(entry.Value)
	if !slices.Contains(r.g.sealer.KeyIDs(), id) {
		return
	}
	l := r.progress.Left[id]
	l.Records += more.Records
	l.Results += more.Results
	l.endless = l.endless || entry.Expires.IsZero()
	if entry.Expires.After(l.Until) {
		l.Until = entry.Expires
	}
	if l.endless {
		l.Until = time.Time{}
	}
	r.progress.Left[id] = l
}

func (r *resealer) records(ctx context.Context) error {
	return r.walk(ctx, spaceRecord, resealPage, func(entry store.Entry) {
		if r.older(entry.Value) {
			r.record(entry)
		}
	})
}

func (r *resealer) resolutions(ctx context.Context) error {
	return r.walk(ctx, spaceResolved, resealPage, func(entry store.Entry) {
		if !r.older(entry.Value) {
			return
		}
		if plain := r.open(entry); plain != nil {
			r.pending = append(r.pending, opened{entry, plain})
		}
	})
}

// record decides what becomes of a record under an older key.
func (r *resealer) record(entry store.Entry) {
	plain := r.open(entry)
	if plain == nil {
		return
	}
	record, err := decodeRecord(plain)
	if err != nil { // of a newer build; whether it runs cannot be told
		r.progress.Damaged++
		r.left(entry, KeyLeft{Records: 1})
		return
	}
	if record.State.Open() {
		key := Key(entry.Key[1:])
		switch {
		case record.Node != r.g.node:
			r.left(entry, KeyLeft{Records: 1})
			return
		case r.g.flights.find(key) != nil:
			// Its outcome is conditional on the version that stands there, and must
			// not lose to this. Without a flight nobody knows that version any more.
			r.running = append(r.running, key)
			return
		}
	}
	r.pending = append(r.pending, opened{entry, plain})
}

// awaitRunning waits for the executions whose records could not be touched, and
// takes care of those whose outcome was not recorded.
func (r *resealer) awaitRunning(ctx context.Context) error {
	for len(r.running) > 0 {
		key := r.running[0]
		r.running = r.running[1:]
		if flight := r.g.flights.find(key); flight != nil {
			select {
			case <-flight.Done():
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		entry, err := r.g.store.Get(ctx, recordKey(key))
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		if r.older(entry.Value) {
			r.record(entry)
		}
		if err := r.flush(ctx); err != nil {
			return err
		}
	}
	return nil
}

// results counts the pieces of answers under older keys.
func (r *resealer) results(ctx context.Context) error {
	return r.walk(ctx, spaceResult, countPage, func(entry store.Entry) {
		if r.older(entry.Value) {
			r.left(entry, KeyLeft{Results: 1})
		}
	})
}

// walk visits the entries of a space, a page at a time, and seals anew what became
// pending.
func (r *resealer) walk(ctx context.Context, space byte, page int, visit func(store.Entry)) error {
	at := store.Prefix([]byte{space})
	at.Limit = page
	for more := true; more; {
		n := 0
		more = false
		for entry, err := range r.g.store.Scan(ctx, at) {
			switch {
			case err == nil:
				visit(entry)
			case errors.Is(err, store.ErrDamaged):
				r.progress.Damaged++
				more = true // it ends the scan, but not the walk
			default:
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
			n++
			at.From = append(bytes.Clone(entry.Key), 0)
		}
		more = more || n == page
		r.progress.Seen += n
		if err := r.flush(ctx); err != nil {
			return err
		}
		r.tell()
	}
	return nil
}

// flush seals anew what is pending.
func (r *resealer) flush(ctx context.Context) error {
	for batch := range slices.Chunk(r.pending, resealBatch) {
		if err := r.commit(ctx, batch); err != nil {
			return err
		}
	}
	r.pending = r.pending[:0]
	return nil
}

// commit writes a batch. What was changed meanwhile is left to whoever changed it.
func (r *resealer) commit(ctx context.Context, values []opened) error {
	defer r.g.writers.enter().leave()
	values = slices.Clone(values)
	for len(values) > 0 {
		// A nearly full store takes batches that begin with a change of what is there,
		// since those are outcomes. This can wait: it begins with a write that asks
		// for nothing.
		batch := []store.Write{{Key: metaKey("reseal"), If: store.Absent(), Delete: true}}
		for _, v := range values {
			batch = append(batch, store.Write{
				Key: v.Key, If: store.VersionIs(v.Version), Expires: v.Expires,
				Value: r.g.sealer.Seal(nil, v.plain, v.Key),
			})
		}
		_, err := r.g.store.Commit(ctx, batch...)
		var lost *store.Conflict
		switch {
		case err == nil:
			r.progress.Resealed += len(values)
			return nil
		case errors.As(err, &lost) && lost.Index > 0:
			if lost.Found != nil && r.older(lost.Found.Value) { // by another node
				r.left(*lost.Found, KeyLeft{Records: 1})
			}
			values = slices.Delete(values, lost.Index-1, lost.Index)
		default:
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
	return nil
}

// note writes down which older keys are still needed.
func (r *resealer) note(ctx context.Context) error {
	return r.g.changeUses(ctx, func(uses []KeyUse) []KeyUse {
		uses = slices.DeleteFunc(uses, func(use KeyUse) bool { return use.ID < r.progress.Key })
		for id, left := range r.progress.Left {
			uses = with(uses, KeyUse{ID: id, Until: left.Until})
		}
		return uses
	})
}
