package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Fences remembers the versions of keys that are rewritten whenever something begins that has to hold up
// the others' commits, such as those that mean one workflow. A commit that may not miss it is made on the
// condition that its fence is as it was when its caller found nothing in the way. Only a store that several
// gateways share needs that: a nil Fences has no conditions.
type Fences struct {
	st Store

	mu      sync.Mutex
	open    map[string]Version // 0 is absent
	changes uint64             // counts what was forgotten
}

// maxFences is how many open fences are remembered. Others are read again.
const maxFences = 10_000

// FollowFences returns the fences whose keys begin with prefix; nil if st is no Shared. It follows until the store
// is closed.
func FollowFences(st Store, prefix []byte) *Fences {
	shared, is := st.(Shared)
	if !is {
		return nil
	}
	f := &Fences{st: st, open: map[string]Version{}}
	shared.Follow(prefix, f.Forget)
	return f
}

// Fence is one as it was read. The zero value is of a store that one gateway has.
type Fence struct {
	of      *Fences
	key     []byte
	version Version
	changes uint64
}

// Open returns a fence that was passed before, and was not seen to change since.
func (f *Fences) Open(key []byte) (_ Fence, is bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	version, is := f.open[string(key)]
	return Fence{f, key, version, f.changes}, is
}

// Read reads a fence. Whether it may be passed is read after that.
func (f *Fences) Read(ctx context.Context, key []byte) (Fence, error) {
	f.mu.Lock()
	at := Fence{of: f, key: key, changes: f.changes}
	f.mu.Unlock()
	entry, err := f.st.Get(ctx, key)
	if errors.Is(err, ErrNotFound) {
		err = nil
	}
	at.version = entry.Version
	return at, err
}

// Pass remembers that nothing was in the way behind a fence.
func (f *Fences) Pass(at Fence) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if at.changes != f.changes { // it may be this one that has
		return
	}
	if len(f.open) >= maxFences {
		clear(f.open)
	}
	f.open[string(at.key)] = at.version
}

// Forget has a fence read again; nil all of them. What this gateway changes itself it has to forget.
func (f *Fences) Forget(key []byte) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changes++
	if key == nil {
		clear(f.open)
		return
	}
	delete(f.open, string(key))
}

// ErrFenced: a fence has changed since it was passed, and nothing was written. Look again.
var ErrFenced = errors.New("store: something has begun meanwhile that may hold this up")

// Bind makes the commit of a batch conditional on fences, once its writes are complete, and returns it; nil is
// empty. Where one of them has changed, the batch's error is ErrFenced.
func Bind(b *Batch, all ...Fence) *Batch {
	for _, at := range all {
		if at.of != nil {
			b = at.bind(b)
		}
	}
	return b
}

func (at Fence) bind(b *Batch) *Batch {
	if b == nil {
		b = new(Batch)
	}
	unchanged := Write{Key: at.key, If: at.version.Unchanged(), Check: true}
	i := slices.IndexFunc(b.writes, func(w Write) bool { return bytes.Equal(w.Key, at.key) })
	if i >= 0 { // it changes the fence itself
		b.writes[i].If = unchanged.If
	} else {
		b.Add(unchanged)
	}
	b.OnDone(func(err error) error {
		if !Lost(err, []Write{unchanged}) {
			return err
		}
		at.of.Forget(at.key)
		return fmt.Errorf("%w: %w", ErrFenced, err)
	})
	return b
}
