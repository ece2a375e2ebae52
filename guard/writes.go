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
	t.fleet = &fleetWrites{t, shared, sealer, calls, shared.Self().Boot}
	shared.Follow([]byte{spaceLive, kindWrite}, t.fleet.changed)
}

// prefix begins the entries of a target's writes.
func (f *fleetWrites) prefix(name string) []byte {
	sum := store.Index(f.sealer, "written target", name)
	return append(append(make([]byte, 0, 2+16+32), spaceLive, kindWrite), sum[:16]...)
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
	for entry, err := range f.st.Scan(ctx, store.Prefix(f.prefix(name))) {
		if err != nil {
			return true
		}
		key := execution.Key(entry.Key[2+16:])
		if key == own {
			continue
		}
		if on, err := f.goesOn(ctx, key, entry.Value); on || err != nil {
			return true
		}
	}
	return false
}

// goesOn reports whether a recorded write may be under way.
func (f *fleetWrites) goesOn(ctx context.Context, key execution.Key, value []byte) (bool, error) {
	w, err := decodeWrite(value)
	if err != nil || w.boot == f.boot { // which the tracker knows
		return false, err
	}
	gone, err := f.st.Gone(ctx, w.boot)
	if err != nil || !gone {
		return true, err
	}
	// A gateway that was removed may run on. What it has sent is in doubt, until that is settled or has been undone.
	now, err := f.st.Now(ctx)
	if err != nil || !now.Before(w.until) {
		return false, err
	}
	found, err := f.calls.Get(ctx, key)
	if errors.Is(err, execution.ErrUnknown) {
		return false, nil
	}
	return err != nil || found.Status == execution.Doubtful || w.undo && found.Status != execution.RolledBack, nil
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
	entry := store.Write{Key: append(f.prefix(name), undone[:]...), Value: w.encode(), Expires: w.until}
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
	w := write{boot: f.boot, until: now.Add(deadline + goneTime)}
	return store.Write{Key: append(f.prefix(name), key[:]...), Value: w.encode(), Expires: w.until.Add(writeKept)}
}

// ends takes the record back, in the commit of the outcome.
func (f *fleetWrites) ends(name string, key execution.Key) store.Write {
	return store.Write{Key: append(f.prefix(name), key[:]...), Delete: true}
}

// written has the other gateways know of the call's write: in the commit of its claim that it begins, in that of its
// outcome that it has ended. Nil where nobody asks.
func written(x *Call, end bool) *store.Batch {
	f := x.engine.Writes.fleet
	switch {
	case f == nil || !x.h.restores:
		return nil
	case end:
		return store.NewBatch(f.ends(x.place(), x.call.Key))
	}
	return store.NewBatch(f.begins(x.r.Context(), x.place(), x.call.Key, x.call.Deadline))
}

// write is an entry.
type write struct {
	boot  string
	until time.Time // it has ended by then if its gateway has left
	undo  bool
}

const (
	tagWriteBoot = 1 + iota
	tagWriteUntil
	tagWriteUndo
)

func (w write) encode() []byte {
	e := store.Encoder{B: make([]byte, 0, 48)}
	e.String(tagWriteBoot, w.boot)
	e.Time(tagWriteUntil, w.until)
	e.Bool(tagWriteUndo, w.undo)
	return e.B
}

func decodeWrite(b []byte) (w write, err error) {
	d := store.Decoder{B: b, Broken: errWrite}
	for d.Next() {
		switch d.Tag {
		case tagWriteBoot:
			w.boot = string(d.Field)
		case tagWriteUntil:
			w.until = d.Time()
		case tagWriteUndo:
			w.undo = d.Int() != 0
		}
	}
	return w, d.Err
}

var errWrite = errors.New("agent_guard: the record of a write cannot be read by this build")
