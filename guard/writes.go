package guard

import (
	"context"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// fleetWrites are the writes of all gateways that share the store, from before a byte is sent until their outcome is
// recorded (ADR 0137): v w target execution. The methods of a nil one do nothing.
type fleetWrites struct {
	t      *WriteTracker
	st     store.Shared
	writes store.Table[write] // they have nothing of a caller
	sealer store.Sealer
	calls  *execution.Guard
	boot   string
}

const (
	spaceLive = 'v' // of package execution
	kindWrite = 'w'
)

const (
	// askTime is how long other gateways' writes may take to be known here.
	askTime = 10 * time.Second
	// goneTime is how much longer than a call may take, the write of a gateway that has left may be under way.
	goneTime = time.Minute
	// undoTime is how long the write of an undo may be.
	undoTime = 5 * time.Minute
	// writeKept is how much longer the write of a gateway is known that has not left.
	writeKept = 24 * time.Hour
)

// Follow has the tracker see the writes of all gateways that share the store. On any other store it does nothing. It
// comes before the first call, and lasts until the store is closed.
func (t *WriteTracker) Follow(st store.Store, sealer store.Sealer, calls *execution.Guard) {
	shared, is := st.(store.Shared)
	if !is {
		return
	}
	writes := store.Table[write]{Store: shared, Prefix: string([]byte{spaceLive, kindWrite})}
	t.fleet = &fleetWrites{t, shared, writes, sealer, calls, shared.Self().Boot}
	shared.Follow([]byte(writes.Prefix), t.fleet.changed)
}

// target begins the keys of the writes to a target, behind the prefix of all.
func (f *fleetWrites) target(name string) []byte {
	sum := store.Index(f.sealer, "written target", name)
	return sum[:16]
}

// changed disturbs the windows in which another gateway has begun or ended a write.
func (f *fleetWrites) changed(key []byte) {
	f.t.mu.Lock()
	defer f.t.mu.Unlock()
	for _, at := range f.t.all {
		if key != nil && at.prefix != string(key[:2+16]) {
			continue
		}
		for w := range at.windows {
			w.disturbed = w.disturbed || key == nil || string(w.own[:]) != string(key[2+16:])
		}
	}
}

// catchUp returns when every write that has begun or ended before the call has disturbed the windows here.
func (f *fleetWrites) catchUp() error {
	if f == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	return f.st.CatchUp(ctx)
}

// writing reports whether another gateway may be writing to a target, for another call than that with the key own.
func (f *fleetWrites) writing(name string, own execution.Key) bool {
	if f == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	for row, err := range f.writes.All(ctx, f.target(name)) {
		if err != nil {
			return true
		}
		key := execution.Key(row.Key[2+16:])
		if key == own {
			continue
		}
		if on, err := f.goesOn(ctx, key, row.Record); on || err != nil {
			return true
		}
	}
	return false
}

// goesOn reports whether a recorded write may be under way.
func (f *fleetWrites) goesOn(ctx context.Context, key execution.Key, w *write) (bool, error) {
	if w.Boot == f.boot { // which the tracker knows
		return false, nil
	}
	gone, err := f.st.Gone(ctx, w.Boot)
	if err != nil || !gone {
		return true, err
	}
	// A gateway that was removed may run on. What it has sent is in doubt, until that is settled or has been undone.
	now, err := f.st.Now(ctx)
	if err != nil || !now.Before(w.Until) {
		return false, err
	}
	found, err := f.calls.Get(ctx, key)
	if errors.Is(err, execution.ErrUnknown) {
		return false, nil
	}
	return err != nil || found.Status == execution.Doubtful || w.Undo && found.Status != execution.RolledBack, nil
}

// announceUndo records that an undo is about to write. over is called at its end.
func (f *fleetWrites) announceUndo(name string, undone execution.Key) (over func(), err error) {
	if f == nil {
		return func() {}, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	now, err := f.st.Now(ctx)
	if err != nil {
		return nil, err
	}
	w := write{f.boot, now.Add(undoTime), true}
	entry := f.writes.Put(f.writes.Key(f.target(name), undone[:]), &w, store.Condition{}, w.Until)
	if _, err = f.st.Commit(ctx, entry); err != nil {
		return nil, err
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), askTime)
		defer cancel()
		_, _ = f.st.Commit(ctx, store.Write{Key: entry.Key, Delete: true}) // else it expires
	}, nil
}

// begins is the record of the write of a call, for the commit of its claim. It may take until its deadline.
func (f *fleetWrites) begins(ctx context.Context, name string, key execution.Key, deadline time.Duration) store.Write {
	now, err := f.st.Now(ctx)
	if err != nil {
		now = time.Now() // then the commit fails, too
	}
	w := write{Boot: f.boot, Until: now.Add(deadline + goneTime)}
	return f.writes.Put(f.writes.Key(f.target(name), key[:]), &w, store.Condition{}, w.Until.Add(writeKept))
}

// ends takes the record back, in the commit of the outcome.
func (f *fleetWrites) ends(name string, key execution.Key) store.Write {
	return store.Write{Key: f.writes.Key(f.target(name), key[:]), Delete: true}
}

// written has the other gateways know of the call's write: in the commit of its claim that it begins, in that of its
// outcome that it has ended. It may take until its deadline. Nil where nobody asks.
func written(q *Request, end bool, deadline time.Duration) *store.Batch {
	f := q.engine.Writes.fleet
	switch {
	case f == nil || !q.h.restores():
		return nil
	case end:
		return store.NewBatch(f.ends(q.place(), q.call.Key))
	}
	return store.NewBatch(f.begins(q.r.Context(), q.place(), q.call.Key, deadline))
}

// write is an entry.
type write struct {
	Boot  string    `cbor:"1,keyasint"`
	Until time.Time `cbor:"2,keyasint"` // it has ended by then if its gateway has left
	Undo  bool      `cbor:"3,keyasint,omitempty"`
}
