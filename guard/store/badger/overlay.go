package badger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"sync"
	"syscall"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// maxLayer is the size in bytes at which a layer is applied at once, and above which
// commits wait for the applier.
const maxLayer = 4 << 20

// overlay holds what is in the log and not yet in Badger. Reads ask it first.
type overlay struct {
	mu      sync.RWMutex
	active  *layer // the committer adds to it
	frozen  *layer // the applier is writing it to Badger; nil is none
	spare   *layer
	durable uint64        // Badger's timestamp with all that came before
	recent  recent        // what Badger has at durable
	applied uint64        // the last frame that Badger has
	changed chan struct{} // closed when a layer is frozen or dropped

	some chan struct{} // there is something to apply
	full chan struct{} // the active layer is full
}

// layer is the last state of every key that some consecutive frames changed.
type layer struct {
	values  map[string][]byte // by key as in Badger; nil is deleted
	size    int
	names   int           // bytes of the keys, at most
	seq     uint64        // the last frame
	version store.Version // the highest
}

func newLayer() *layer { return &layer{values: make(map[string][]byte)} }

func (l *layer) put(key string, value []byte) {
	l.values[key] = value
	l.size += len(key) + len(value) + entryOverhead
	l.names += len(key)
}

func newOverlay(ts, seq uint64) *overlay {
	return &overlay{
		active: newLayer(), durable: ts, applied: seq, recent: recent{seed: maphash.MakeSeed()},
		changed: make(chan struct{}), some: make(chan struct{}, 1), full: make(chan struct{}, 1),
	}
}

// get returns what the overlay has under key. If ok is false, Badger's value at found.ts is
// current: both are read under one lock, so that no read goes back in time.
func (o *overlay) get(key []byte) (found stored, ok bool) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if found.raw, ok = o.active.values[string(key)]; ok {
		return found, true
	}
	if o.frozen != nil {
		if found.raw, ok = o.frozen.values[string(key)]; ok {
			return found, true
		}
	}
	if found, ok = o.recent.get(key); ok {
		return found, true
	}
	return stored{ts: o.durable}, false
}

// remember keeps what Badger has under key, value included, if it is read again and again.
func (o *overlay) remember(key []byte, found stored, value []byte) {
	if len(value) > maxRecentValue || !o.recent.again(key) {
		return
	}
	kept := stored{raw: bytes.Clone(found.raw)}
	if found.raw[0]&flagBulk != 0 {
		kept.value = bytes.Clone(value)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.durable == found.ts { // else it may have changed since
		o.recent.put(string(key), kept)
	}
}

// publish adds the changes of a frame.
func (o *overlay) publish(changes map[string][]byte, seq uint64, version store.Version) {
	o.mu.Lock()
	l := o.active
	first := len(l.values) == 0
	for key, value := range changes {
		l.put(key, value)
	}
	l.seq, l.version = seq, version
	full := l.size >= maxLayer
	o.mu.Unlock()
	if first {
		signal(o.some)
	}
	if full {
		signal(o.full)
	}
}

// freeze takes the active layer, or nil where it is empty.
func (o *overlay) freeze() *layer {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.active.values) == 0 {
		return nil
	}
	o.frozen = o.active
	o.active, o.spare = o.spare, nil
	if o.active == nil {
		o.active = newLayer()
	}
	o.broadcast()
	return o.frozen
}

// dropFrozen drops the frozen layer, which Badger has completely at ts.
func (o *overlay) dropFrozen(ts uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	l := o.frozen
	o.frozen, o.durable, o.applied = nil, ts, l.seq
	o.recent.drop(l)
	if l.size <= 2*maxLayer { // else its map has grown too large to keep
		clear(l.values)
		*l = layer{values: l.values}
		o.spare = l
	}
	o.broadcast()
}

// broadcast wakes those that wait for changed. The caller holds mu.
func (o *overlay) broadcast() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// untilSpace returns a channel to wait on before more is added; nil is no wait.
func (o *overlay) untilSpace() <-chan struct{} {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.active.size < maxLayer {
		return nil
	}
	return o.changed
}

// untilApplied returns a channel to wait on, again and again, until Badger has frame seq;
// nil is no wait.
func (o *overlay) untilApplied(seq uint64) <-chan struct{} {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.applied >= seq {
		return nil
	}
	return o.changed
}

// newest is the last frame that can be read.
func (o *overlay) newest() uint64 {
	o.mu.RLock()
	defer o.mu.RUnlock()
	seq := max(o.active.seq, o.applied)
	if o.frozen != nil {
		seq = max(seq, o.frozen.seq)
	}
	return seq
}

// applyAfter is how long a change waits for others of its key: what is written and soon
// deleted never goes to Badger.
const applyAfter = 300 * time.Millisecond

// applier writes the overlay to Badger, layer by layer, and is the only writer there besides
// reclaim. It syncs nothing: the log keeps everything until Badger's tables have it.
type applier struct {
	*Store
	ts    uint64 // of the last transaction
	hurry chan struct{}
	flush chan struct{} // the log cleaner wants Badger's memory in tables
}

// run applies until stop is closed and nothing is left.
func (a *applier) run(stop <-chan struct{}) {
	for last := false; !last; {
		select {
		case <-a.overlay.some:
			a.coalesce(stop)
		case <-a.flush:
			if err := a.forceFlush(); err != nil {
				a.fail(err)
			}
			continue
		case <-stop:
			last = true
		}
		if a.unhealthy() != nil {
			<-stop
			return
		}
		if err := a.applyActive(stop); err != nil {
			a.fail(err)
		}
	}
}

// coalesce waits so that changes can cancel each other out.
func (a *applier) coalesce(stop <-chan struct{}) {
	timer := time.NewTimer(applyAfter)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.overlay.full:
	case <-a.hurry:
	case <-a.failed:
	case <-stop:
	}
}

func (a *applier) applyActive(stop <-chan struct{}) error {
	l := a.overlay.freeze()
	if l == nil {
		return nil
	}
	for {
		err := a.apply(l)
		if err == nil {
			break
		}
		full := errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
		// Not after a sync: a second one would report success without the pages of the first.
		if !full || errors.As(err, new(syncError)) || !a.awaitSpace(stop) {
			return err
		}
	}
	a.log.Applied(l.seq, a.ts)
	a.durable.Store(a.ts)
	a.overlay.dropFrozen(a.ts) // l may be reused from here on
	return nil
}

// awaitSpace waits a moment for disk space, or returns false if the store stops. The layer
// is in the log and is read from memory meanwhile, so a full disk loses nothing (P4).
func (a *applier) awaitSpace(stop <-chan struct{}) bool {
	timer := time.NewTimer(spaceEvery)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-a.failed:
	case <-stop:
	}
	return false
}

// apply writes a layer to Badger, its large values to their files first. The marker comes
// last: if Badger's tables have it, they have the whole layer and all before it.
func (a *applier) apply(l *layer) error {
	now := a.options.Now()
	pointed, err := a.stageApart(l, now)
	if err != nil {
		return err
	}
	a.absence.begin(a.ts)
	reader := a.db.NewTransactionAt(a.ts, false)
	defer reader.Discard()
	w := &writer{applier: a, floor: uint64(l.version), entries: make([]badgerdb.Entry, len(l.values)+1)}
	defer w.discard()
	names := make([]byte, 0, l.names)
	for name, value := range l.values {
		if at, ok := pointed[name]; ok {
			value = at
		}
		from := len(names)
		names = append(names, name...)
		key := names[from:len(names):len(names)]
		if value == nil {
			if a.absence.proves(key) {
				continue // nearly always written and deleted within the layer
			}
			_, err := reader.Get(key)
			if errors.Is(err, badgerdb.ErrKeyNotFound) {
				continue // written and deleted within the layer, or never there
			}
			if err != nil {
				return fmt.Errorf("applying: %w", err)
			}
		}
		if value != nil {
			a.absence.add(key, a.absence.next.Load(), a.absence.current.Load())
		}
		if err := w.set(key, value, now); err != nil {
			return fmt.Errorf("applying: %w", err)
		}
	}
	if err := w.set(markerKey, marker{seq: l.seq}.value(), now); err != nil {
		return fmt.Errorf("applying: %w", err)
	}
	return w.commit()
}

// minApart is the size in bytes from which on an ordinary value with an expiry leaves Badger for
// a segment. A pointer and Badger's own entry take about 100.
const minApart = 256

// apart reports whether a value, as the log has it, is stored in a segment once it is applied.
func apart(value []byte) bool {
	if value == nil || value[0]&flagInline != 0 {
		return value != nil
	}
	return value[0]&(flagExpires|flagBulk) == flagExpires && len(value)-headerSize >= minApart
}

// stageApart writes the layer's large values to their files and returns the pointers to store
// instead, nil for bulk values that have expired.
func (a *applier) stageApart(l *layer, now time.Time) (map[string][]byte, error) {
	n := 0
	for _, value := range l.values {
		if apart(value) {
			n++
		}
	}
	if n == 0 {
		return nil, nil
	}
	pointed := make(map[string][]byte, n)
	all, values, keys := make([]bulkValue, 0, n), make([]*bulkValue, 0, n), make([]string, 0, n)
	for key, value := range l.values {
		if !apart(value) {
			continue
		}
		r, err := decode(value)
		if err != nil {
			return nil, fmt.Errorf("applying: %w", err)
		}
		if !r.living(now) { // its file may have been swept already
			if value[0]&flagInline != 0 {
				pointed[key] = nil
			}
			continue
		}
		all = append(all, bulkValue{key: key[1:], value: r.value, expires: r.expires})
		keys, values = append(keys, key), append(values, &all[len(all)-1])
	}
	if err := a.bodies.stage(values, a.countBulkSync); err != nil {
		return nil, fmt.Errorf("applying: %w", err)
	}
	pointers := make([]byte, len(values)*(headerSize+pointerSize))
	for i, v := range values {
		p := pointers[: headerSize+pointerSize : headerSize+pointerSize]
		pointers = pointers[len(p):]
		copy(p, l.values[keys[i]][:headerSize])
		p[0] = p[0]&^flagInline | flagBulk
		v.at.put(p[headerSize:])
		pointed[keys[i]] = p
	}
	return pointed, nil
}

// writer is a series of transactions under rising timestamps. They need not be atomic: the
// log keeps all of them until the last is in tables.
type writer struct {
	*applier
	floor uint64 // of the timestamps
	txn   *badgerdb.Txn
	size  int64
	count int64
	// entries are for the next values, in one piece of memory; beyond them each has its own.
	entries []badgerdb.Entry
}

func (w *writer) set(key, value []byte, now time.Time) error {
	size := int64(len(key)+len(value)) + entryOverhead
	const spare = 1024 // Badger's own entry
	if w.txn != nil && (w.size+size >= w.db.MaxBatchSize()-spare || w.count+2 >= w.db.MaxBatchCount()) {
		if err := w.commit(); err != nil {
			return err
		}
	}
	if w.txn == nil {
		w.txn = w.db.NewTransactionAt(w.ts, true)
	}
	w.size += size
	w.count++
	if value == nil {
		return w.txn.Delete(key)
	}
	w.counters.applied.Add(1)
	e := w.entry()
	e.Key, e.Value = key, value
	if key[0] == userSpace {
		r, err := decode(value)
		if err != nil {
			return err
		}
		e.ExpiresAt = hint(r.expires, now)
	}
	return w.txn.SetEntry(e)
}

func (w *writer) entry() *badgerdb.Entry {
	if len(w.entries) == 0 {
		return new(badgerdb.Entry)
	}
	e := &w.entries[0]
	w.entries = w.entries[1:]
	return e
}

func (w *writer) commit() error {
	w.ts = max(w.ts+1, w.floor)
	if err := w.disk.apply(w.txn, w.ts); err != nil {
		return fmt.Errorf("applying: %w", err)
	}
	w.txn, w.size, w.count = nil, 0, 0
	return nil
}

func (w *writer) discard() {
	if w.txn != nil {
		w.txn.Discard()
	}
}

const padSize = 512 << 10

// forceFlush pads Badger's memory table until Badger flushes it, for Badger has no call for
// that. Many large bulk values fill the log with little that goes to Badger.
func (a *applier) forceFlush() error {
	want := a.ts
	for padded := 0; padded < memTableSize && a.inTables() < want; padded += padSize {
		w := &writer{applier: a}
		err := w.set(padKey, make([]byte, padSize), time.Time{})
		if err == nil {
			err = w.commit()
		}
		w.discard()
		if err != nil {
			return err
		}
	}
	w := &writer{applier: a}
	defer w.discard()
	if err := w.set(padKey, []byte{0}, time.Time{}); err != nil {
		return err
	}
	return w.commit()
}

// hint is when Badger's compaction may drop an entry, by the machine's clock: now plus the
// time left, since the store's clock may be another one.
func hint(expires, now time.Time) uint64 {
	if expires.IsZero() {
		return 0
	}
	left := expires.Sub(now) // saturates
	if left > 100*365*24*time.Hour {
		return 0
	}
	return uint64(time.Now().Add(left + grace).Unix())
}

// grace is the time between the expiry of an entry and the time from which Badger may drop
// it. Our clock decides; Badger's, the machine's, may run ahead of it by this much.
const grace = time.Hour

// The marker is an entry of our own that says which frames of the log Badger has. It also
// keeps versions from being given twice: compaction drops deleted entries with their
// versions, but keeps the newest marker, whose timestamp is above all that it covers.
const (
	// versionGap is left between the highest version found at opening and the first new
	// one, for versions in a torn end of the log.
	versionGap = 1 << 20
	// format is the form of what is written. No other is read.
	format = 3
)

var (
	markerKey = []byte{markerSpace}
	// padKey takes the padding of forceFlush.
	padKey = []byte{markerSpace, 'p'}
)

type marker struct {
	seq uint64 // of the last frame that Badger has
}

const markerText = "agent-guard store "

func (m marker) value() []byte {
	b := binary.BigEndian.AppendUint32([]byte(markerText), format)
	return binary.BigEndian.AppendUint64(b, m.seq)
}

// readMarker returns the marker; found is false where there is none.
func readMarker(db *badgerdb.DB) (m marker, found bool, err error) {
	txn := db.NewTransactionAt(math.MaxUint64, false)
	defer txn.Discard()
	raw, err := lookUp(txn, markerKey)
	if err != nil || raw == nil {
		return marker{}, false, err
	}
	rest, ok := bytes.CutPrefix(raw, []byte(markerText))
	if ok && len(rest) == 12 {
		if binary.BigEndian.Uint32(rest) == format {
			return marker{seq: binary.BigEndian.Uint64(rest[4:])}, true, nil
		}
	}
	return marker{}, false, fmt.Errorf("the marker is %q, written by another version of this program", raw)
}

const (
	cleanEvery = time.Second
	// maxFullLogs is the size in bytes of the full log files at which Badger's memory is
	// flushed, so that they can be dropped.
	maxFullLogs = 96 << 20
)

// logCleaner drops files of the log when everything in them is durable
// elsewhere: in the files of bulk values, and in Badger's tables, which Badger syncs before
// it lists them. Badger flushes transactions whole and in order, so a table with a
// timestamp shows that everything below it is in tables.
type logCleaner struct {
	*Store
	flush     chan struct{}
	flushedTo uint64 // the timestamp up to which a flush was requested
}

func (k *logCleaner) run(stop <-chan struct{}) {
	tick := time.NewTicker(cleanEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			if k.unhealthy() != nil {
				continue
			}
			if err := k.dropApplied(); err != nil {
				k.fail(err)
			}
		}
	}
}

// dropApplied drops the files that are durable elsewhere. An error means that the state of
// the disk is unknown.
func (k *logCleaner) dropApplied() error {
	n, full, applied := k.log.Droppable(k.inTables())
	if n == 0 {
		if full > maxFullLogs && applied > k.flushedTo {
			k.flushedTo = k.durable.Load()
			signal(k.flush)
		}
		return nil
	}
	if err := k.syncTablesAndBodies(); err != nil {
		return err
	}
	if err := k.log.Drop(n); err != nil {
		k.options.Logger.Warn("dropping files of the log", "dir", k.dir, "error", err)
	}
	return nil
}
