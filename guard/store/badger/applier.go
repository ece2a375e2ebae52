package badger

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// applyAfter is how long a change waits for others of its key: what is written and
// deleted again meanwhile never goes to Badger.
const applyAfter = 100 * time.Millisecond

// applier brings the overlay to Badger, one layer after the other. It is the only one
// that writes there. Nothing that it writes is synced: the log has it all, until
// Badger's tables have it.
type applier struct {
	*Store
	ts    uint64 // of the last transaction
	hurry chan struct{}
	flush chan struct{} // the keeper wants Badger's memory in tables
}

// run applies until stop is closed and nothing is left.
func (a *applier) run(stop <-chan struct{}) {
	for last := false; !last; {
		select {
		case <-a.overlay.some:
			a.linger(stop)
		case <-a.flush:
			if err := a.fill(); err != nil {
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

// linger gives changes time to cancel each other out.
func (a *applier) linger(stop <-chan struct{}) {
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
		if !noSpace(err) || !a.awaitSpace(stop) {
			return err
		}
	}
	a.log.applied(l.seq, a.ts)
	a.durable.Store(a.ts)
	a.overlay.landed(a.ts) // which gives l away
	return nil
}

// awaitSpace waits a moment for space on the disk; false is that nothing is to be waited
// for. The layer is in the log and is read from memory meanwhile, so that a full disk
// costs nothing but time (P4).
func (a *applier) awaitSpace(stop <-chan struct{}) bool {
	timer := time.NewTimer(roomEvery)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-a.failed:
	case <-stop:
	}
	return false
}

// noSpace reports an error that is over once somebody frees space.
func noSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// apply writes a layer to Badger, bulk values to their files first. The marker comes
// last: where Badger's tables have it, they have the whole layer and all before it.
func (a *applier) apply(l *layer) error {
	now := a.options.Now()
	pointed, err := a.stageBulk(l, now)
	if err != nil {
		return err
	}
	reader := a.db.NewTransactionAt(a.ts, false)
	defer reader.Discard()
	w := &writer{applier: a, floor: uint64(l.version)}
	defer w.discard()
	for key, value := range l.values {
		if at, ok := pointed[key]; ok {
			value = at
		}
		if value == nil {
			there, err := stands(reader, []byte(key))
			if err != nil {
				return fmt.Errorf("applying: %w", err)
			}
			if !there {
				continue // it came and went, or never was
			}
		}
		if err := w.set([]byte(key), value, now); err != nil {
			return fmt.Errorf("applying: %w", err)
		}
	}
	if err := w.set(markerKey, marker{seq: l.seq}.value(), now); err != nil {
		return fmt.Errorf("applying: %w", err)
	}
	return w.commit()
}

// stageBulk writes the layer's bulk values to their files and returns what stands in
// their place: pointers, and nil for those that are not worth a file any more.
func (a *applier) stageBulk(l *layer, now time.Time) (map[string][]byte, error) {
	var values []*bulkValue
	var keys []string
	pointed := make(map[string][]byte)
	for key, value := range l.values {
		if value == nil || value[0]&flagInline == 0 {
			continue
		}
		r, err := decode(value)
		if err != nil {
			return nil, fmt.Errorf("applying: %w", err)
		}
		if !r.living(now) {
			pointed[key] = nil // its file may have been swept already
			continue
		}
		keys = append(keys, key)
		values = append(values, &bulkValue{key: []byte(key[1:]), value: r.value, expires: r.expires})
	}
	if len(values) == 0 {
		return pointed, nil
	}
	if err := a.bodies.stage(values, a.countBulkSync); err != nil {
		return nil, fmt.Errorf("applying: %w", err)
	}
	for i, v := range values {
		p := make([]byte, headerSize+pointerSize)
		copy(p, l.values[keys[i]][:headerSize])
		p[0] &^= flagInline
		v.at.put(p[headerSize:])
		pointed[keys[i]] = p
	}
	return pointed, nil
}

// writer is a row of transactions under rising timestamps. It need not be one: until
// the last of them is in tables, the log has all of them.
type writer struct {
	*applier
	floor uint64 // of the timestamps
	txn   *badgerdb.Txn
	size  int64
	count int64
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
	e := badgerdb.NewEntry(key, value)
	if key[0] == userSpace {
		r, err := decode(value)
		if err != nil {
			return err
		}
		e.ExpiresAt = hint(r.expires, now)
	}
	return w.txn.SetEntry(e)
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

// fill pads Badger's memory until it goes to a table: many large bulk values fill the
// log with little that goes to Badger, and Badger has no other way to be told.
func (a *applier) fill() error {
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

func (s *Store) countBulkSync() { s.counters.bulkSyncs.Add(1) }
