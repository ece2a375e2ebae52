package store

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
)

// Sealer keeps values unreadable at rest (P8) and derives the store's keys. A seal.Ring is one.
type Sealer interface {
	// Seal appends the sealed plaintext to dst; it opens under the same name only.
	Seal(dst, plaintext, name []byte) []byte
	// Open appends the plain value to dst. With sealed[:0] it takes sealed's place, which is then gone.
	Open(dst, sealed, name []byte) ([]byte, error)
	// Index derives 32 bytes from parts, stable for the life of the store.
	Index(domain string, parts ...string) [32]byte
	// KeyIDs lists the ids of the keys that open; the last one seals.
	KeyIDs() []uint32
	// KeyOf is the id of the key under which a value is sealed.
	KeyOf(sealed []byte) uint32
	// Check is the same for two keys only if they are one; empty for an id that KeyIDs does not list.
	Check(id uint32) string
	// Use makes a key seal from now on, and later ones only once they are used; false if there is no such key.
	Use(id uint32) bool
}

// lists have room for the parts of an index.
var lists = sync.Pool{New: func() any { return new([8]string) }}

// Index is Sealer.Index of parts that are not kept: as arguments of an interface's method they would
// be allocated.
func Index(s Sealer, domain string, parts ...string) [32]byte {
	list := lists.Get().(*[8]string)
	defer lists.Put(list)
	return s.Index(domain, append(list[:0], parts...)...)
}

// Resealer seals values under older keys anew with the newest one. It works beside the traffic in
// small commits, and loses to every other change of a value. It may be stopped anywhere: the next
// one passes quickly over what was done. Errors are those of the store.
type Resealer struct {
	// OnDamaged, if any, is called for each value that does not open; it stays as it is. Of a value
	// that the store cannot read (ErrDamaged) the entry has only the key: under which key it is sealed
	// is not known.
	OnDamaged func(entry Entry, err error)
	// OnLost, if any, is called for the current entry of a key that was changed meanwhile.
	OnLost func(found Entry)
	// Take, if any, decides whether an opened value is sealed anew.
	Take func(entry Entry, plain []byte) bool
	// Bulk seals values that do not expire anew as bulk values, which they were.
	Bulk bool
	// Enter, if any, is called before values are sealed, and its result after their commit.
	Enter func() (leave func())

	// Seen counts the values read, Resealed those sealed anew, Damaged those that do not open.
	Seen, Resealed, Damaged int

	store  Store
	sealer Sealer
	newest uint32
}

// resealBatch bounds the values that one commit seals anew.
const resealBatch = 64

// NewResealer returns a Resealer to the key that seals now.
func NewResealer(st Store, sealer Sealer) *Resealer {
	ids := sealer.KeyIDs()
	return &Resealer{store: st, sealer: sealer, newest: ids[len(ids)-1]}
}

// Newest is the id of the key under which values are sealed anew.
func (r *Resealer) Newest() uint32 { return r.newest }

// Older reports whether a value is sealed under an older key.
func (r *Resealer) Older(value []byte) bool { return r.sealer.KeyOf(value) < r.newest }

// Walk calls do, usually Reseal, for the entries whose keys begin with prefix and whose values
// are sealed under older keys, a page of one snapshot at a time.
func (r *Resealer) Walk(ctx context.Context, prefix []byte, page int, do func(context.Context, ...Entry) error) error {
	at := Prefix(prefix)
	at.Limit = page
	for more := true; more; {
		n := 0
		more = false
		var older []Entry
		for entry, err := range r.store.Scan(ctx, at) {
			switch {
			case err == nil:
				if r.Older(entry.Value) {
					older = append(older, entry)
				}
			case errors.Is(err, ErrDamaged):
				r.damaged(entry, err)
				more = true // it ends the scan, but not the walk
			default:
				return err
			}
			n++
			at.From = append(bytes.Clone(entry.Key), 0)
		}
		more = more || n == page
		r.Seen += n
		if err := do(ctx, older...); err != nil {
			return err
		}
	}
	return nil
}

// resealPage is how many ordinary values are read in one snapshot.
const resealPage = 256

// Tables seals the records of tables with these prefixes anew.
func (r *Resealer) Tables(ctx context.Context, prefixes ...string) error {
	for _, prefix := range prefixes {
		if err := r.Walk(ctx, []byte(prefix), resealPage, r.Reseal); err != nil {
			return err
		}
	}
	return nil
}

func (r *Resealer) damaged(entry Entry, err error) {
	r.Damaged++
	if r.OnDamaged != nil {
		r.OnDamaged(entry, err)
	}
}

// opened is an entry with its plain value.
type opened struct {
	Entry
	plain []byte
}

// open returns the entries that open and are to be sealed anew.
func (r *Resealer) open(entries []Entry) []opened {
	var all []opened
	for _, entry := range entries {
		plain, err := r.sealer.Open(nil, entry.Value, entry.Key)
		if err != nil {
			r.damaged(entry, err)
			continue
		}
		if r.Take == nil || r.Take(entry, plain) {
			all = append(all, opened{entry, plain})
		}
	}
	return all
}

// Reseal seals entries anew that have not changed since they were read.
func (r *Resealer) Reseal(ctx context.Context, entries ...Entry) error {
	values := r.open(entries)
	for len(values) > 0 {
		n, size := 0, 0
		for n < min(len(values), resealBatch) && size < MaxBatchBytes/2 {
			size += len(values[n].Key) + len(values[n].Value)
			n++
		}
		if err := r.commit(ctx, values[:n]); err != nil {
			return err
		}
		values = values[n:]
	}
	return nil
}

func (r *Resealer) commit(ctx context.Context, values []opened) error {
	if r.Enter != nil {
		defer r.Enter()()
	}
	// A nearly full store takes only batches that begin with a change of an existing entry, since
	// those are outcomes. This batch can wait: it begins with another write.
	batch := []Write{{Key: []byte("mreseal"), If: Absent(), Delete: true}}
	for _, v := range values {
		batch = append(batch, Write{
			Key: v.Key, If: VersionIs(v.Version), Expires: v.Expires, Bulk: r.Bulk && v.Expires.IsZero(),
			Value: r.sealer.Seal(make([]byte, 0, len(v.Value)), v.plain, v.Key),
		})
	}
	for len(batch) > 1 {
		_, err := r.store.Commit(ctx, batch...)
		var lost *Conflict
		switch {
		case err == nil:
			r.Resealed += len(batch) - 1
			return nil
		case errors.As(err, &lost) && lost.Index > 0:
			if lost.Found != nil && r.OnLost != nil {
				r.OnLost(*lost.Found)
			}
			batch = slices.Delete(batch, lost.Index, lost.Index+1)
		default:
			return err
		}
	}
	return nil
}

// ResealBulk seals bulk values anew, without conditions: each key is written once. A value
// deleted meanwhile may come back until its expiry.
func (r *Resealer) ResealBulk(ctx context.Context, entries ...Entry) error {
	for i := range entries {
		one := r.open(entries[i : i+1]) // they are large: one at a time is in memory
		if len(one) == 0 {
			continue
		}
		v := one[0]
		w := Write{Key: v.Key, Value: r.sealer.Seal(nil, v.plain, v.Key), Expires: v.Expires, Bulk: true}
		if _, err := r.store.Commit(ctx, w); err != nil {
			return err
		}
		r.Resealed++
	}
	return nil
}

// Writers counts what is sealed and not committed yet, so that a resealing can wait for what was sealed with an
// older key. The zero value is ready.
type Writers struct {
	mu      sync.Mutex
	current *entered
	idle    chan struct{} // closed when all who have entered before the last Wait have left; nil before
}

// entered counts those who have entered between two Waits. leave is made once, so that Enter allocates nothing.
type entered struct {
	sync.WaitGroup
	leave func()
}

// Enter is called before anything is sealed, and leave, once, after the commit. It never waits.
func (w *Writers) Enter() (leave func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		w.current = new(entered)
		w.current.leave = w.current.Done
	}
	w.current.Add(1)
	return w.current.leave
}

// Wait waits for all who have entered before it. Others enter meanwhile. The error is that of ctx.
func (w *Writers) Wait(ctx context.Context) error {
	w.mu.Lock()
	older, before, idle := w.current, w.idle, make(chan struct{})
	w.current, w.idle = nil, idle
	w.mu.Unlock()
	go func() {
		defer close(idle)
		if before != nil {
			<-before // for whom a Wait that was given up has waited
		}
		if older != nil {
			older.Wait()
		}
	}()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
