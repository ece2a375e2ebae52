package storetest

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Fleet is a new, empty store that several gateways use.
type Fleet struct {
	// Join opens it for a node. The suite closes what it opened.
	Join func(node string) store.Shared
	// Remove has the member removed, as another one does that finds its lease over. It returns when that
	// is done.
	Remove func(m store.Shared)
}

// Members is the part of the contract that is about the members of a shared store.
func Members(t *testing.T, place func(t *testing.T, now func() time.Time) Fleet) {
	t.Run("KnowEachOther", func(t *testing.T) {
		f := newFleet(t, place, "b", "a")
		b, a := f.members[0], f.members[1]
		about := store.About{Version: "1", Configuration: map[string]string{"option": "c"}, SealingKeys: []uint32{1, 7}, Open: 3, LogSize: 5}
		a.Describe(about)
		eventually(t, func() bool {
			all, err := b.Members(t.Context())
			if err != nil || len(all) != 2 || all[0].Node != "a" || all[1].Node != "b" {
				t.Fatalf("members %+v, %v; want a and b", all, err)
			}
			if all[0].Boot != a.Self().Boot || all[1].Boot != b.Self().Boot || all[0].Boot == all[1].Boot || all[0].Boot == "" {
				t.Fatalf("members %+v, and they are %+v and %+v", all, a.Self(), b.Self())
			}
			if all[0].Joined.IsZero() || all[0].Seen.Before(all[0].Joined) {
				t.Fatalf("joined %v, seen %v", all[0].Joined, all[0].Seen)
			}
			return slices.Equal(all[0].SealingKeys, about.SealingKeys) && all[0].Version == "1" && all[0].Open == 3 && all[0].LogSize == 5
		})
		if self := a.Self(); self.Node != "a" || self.Configuration["option"] != "c" {
			t.Errorf("it says %+v of itself", self)
		}
		again := f.restart(0)
		if again.Self().Boot == b.Self().Boot {
			t.Error("two lives have one boot")
		}
		f.isGone(a, b, true)
		f.isGone(a, again, false)
		f.isGone(a, a, false)
	})

	t.Run("RemovedWritesNothing", func(t *testing.T) {
		f := newFleet(t, place, "a", "b")
		a, b := f.members[0], f.members[1]
		f.put(a, "key", "1")
		left := b.Left()
		select {
		case <-left:
			t.Error("somebody has left")
		default:
		}
		f.isGone(b, a, false)
		f.Remove(a)
		f.isGone(b, a, true)
		<-left
		for range 2 {
			if _, err := a.Commit(t.Context(), put("key", "2")); !errors.Is(err, store.ErrUnhealthy) {
				t.Errorf("a removed member commits: %v", err)
			}
		}
		if all, err := b.Members(t.Context()); err != nil || len(all) != 1 || all[0].Node != "b" {
			t.Errorf("members %+v, %v", all, err)
		}
		if e, err := b.Get(t.Context(), []byte("key")); err != nil || string(e.Value) != "1" {
			t.Errorf("get = %q, %v", e.Value, err)
		}
		again := f.restart(0)
		f.put(again, "key", "3")
	})

	t.Run("NothingComesAfterGone", func(t *testing.T) { // P1: its open executions are settled then
		for range 3 {
			f := newFleet(t, place, "a", "b")
			a, b := f.members[0], f.members[1]
			var last atomic.Int64 // the newest that was acknowledged
			var all sync.WaitGroup
			for w := range 4 {
				all.Go(func() {
					for i := 1; ; i++ {
						_, err := a.Commit(context.Background(), put(fmt.Sprint("key", w), strconv.Itoa(i)), put(fmt.Sprint("beside", w), strconv.Itoa(i)))
						if err != nil {
							if !errors.Is(err, store.ErrUnhealthy) {
								t.Errorf("commit: %v", err)
							}
							return
						}
						if w == 0 {
							last.Store(int64(i))
						}
					}
				})
			}
			eventually(t, func() bool { return last.Load() > 10 })
			f.Remove(a)
			f.isGone(b, a, true)
			before := f.values(b)
			all.Wait()
			if after := f.values(b); fmt.Sprint(before) != fmt.Sprint(after) {
				t.Fatalf("a removed member went on: %v and then %v", before, after)
			}
			if before["key0"] != before["beside0"] || before["key0"] != strconv.FormatInt(last.Load(), 10) {
				t.Errorf("%v is stored, and %d was acknowledged", before, last.Load())
			}
		}
	})

	t.Run("ClosedIsGone", func(t *testing.T) {
		f := newFleet(t, place, "a", "b")
		a, b := f.members[0], f.members[1]
		left, mine := b.Left(), a.Left()
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		<-left
		<-mine
		<-a.Left()
		f.isGone(b, a, true)
		f.put(b, "key", "1")
	})

	t.Run("Follow", func(t *testing.T) {
		f := newFleet(t, place, "a", "b")
		a, b := f.members[0], f.members[1]
		var mu sync.Mutex
		var seen []string
		cancel := b.Follow([]byte("x"), func(key []byte) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, string(key))
		})
		var want []string
		v := f.put(a, "checked", "1")
		for i := range 30 {
			key := fmt.Sprint("x", i)
			f.put(b, "xown", "1")
			if _, err := a.Commit(t.Context(), put(key, "1"), put("y", key), check("checked", store.VersionIs(v)), check("xnone", store.Absent())); err != nil {
				t.Fatal(err)
			}
			want = append(want, key)
		}
		if _, err := a.Commit(t.Context(), remove("x0")); err != nil {
			t.Fatal(err)
		}
		want = append(want, "x0")
		if err := b.CatchUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		if !slices.Equal(seen, want) {
			t.Errorf("%q were reported, want %q", seen, want)
		}
		mu.Unlock()
		cancel()
		cancel()
		f.put(a, "x", "1")
		if err := b.CatchUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(seen) != len(want) {
			t.Errorf("%q after the end", seen)
		}
	})

	t.Run("Watch", func(t *testing.T) {
		f := newFleet(t, place, "a", "b", "c")
		for _, m := range f.members {
			for _, other := range f.members {
				changed, cancel := other.Watch([]byte("key"))
				f.put(m, "key", "1")
				<-changed // without CatchUp
				cancel()
			}
		}
	})

	t.Run("CatchUp", func(t *testing.T) {
		f := newFleet(t, place, "a", "b")
		a, b := f.members[0], f.members[1]
		var seen atomic.Int64
		b.Follow([]byte("mine"), func([]byte) { seen.Add(1) })
		done := make(chan struct{})
		var others sync.WaitGroup
		for w := range 3 {
			others.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-done:
						return
					default:
						if _, err := a.Commit(context.Background(), put(fmt.Sprintf("%d-%d", w, i), "1")); err != nil {
							t.Errorf("commit: %v", err)
							return
						}
					}
				}
			})
		}
		for i := range int64(50) {
			f.put(a, "mine", "1")
			if err := b.CatchUp(t.Context()); err != nil {
				t.Fatal(err)
			}
			if n := seen.Load(); n < i+1 {
				t.Fatalf("%d commits have ended, and %d are known", i+1, n)
			}
		}
		close(done)
		others.Wait()
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if err := b.CatchUp(over); !errors.Is(err, context.Canceled) {
			t.Errorf("with a cancelled context: %v", err)
		}
		f.Remove(b)
		eventually(t, func() bool { return b.CatchUp(t.Context()) != nil })
	})

	three := func(wrap func(store.Shared) store.Store) Opener {
		return func(t *testing.T, now func() time.Time) store.Store {
			f := place(t, now)
			return Any(wrap(f.Join("a")), wrap(f.Join("b")), wrap(f.Join("c")))
		}
	}
	Concurrent(t, three(func(m store.Shared) store.Store { return m }))
	// What a member remembers, and drops when another one changes it, is as good as the store.
	t.Run("Memory", func(t *testing.T) {
		exerciseLinearizability(t, three(func(m store.Shared) store.Store { return newRemembering(m) }))
	})
}

// fleet is a Fleet in a test.
type fleet struct {
	Fleet
	t       *testing.T
	members []store.Shared
}

func newFleet(t *testing.T, place func(t *testing.T, now func() time.Time) Fleet, nodes ...string) *fleet {
	f := &fleet{Fleet: place(t, time.Now), t: t}
	for _, node := range nodes {
		f.members = append(f.members, f.Join(node))
	}
	t.Cleanup(func() {
		for _, m := range f.members {
			if err := m.Close(); err != nil && !errors.Is(err, store.ErrClosed) {
				t.Errorf("closing a member: %v", err)
			}
		}
	})
	return f
}

// restart closes a member and opens the store for its node again.
func (f *fleet) restart(i int) store.Shared {
	f.t.Helper()
	node := f.members[i].Self().Node
	if err := f.members[i].Close(); err != nil {
		f.t.Fatal(err)
	}
	f.members[i] = f.Join(node)
	return f.members[i]
}

func (f *fleet) put(m store.Shared, key, value string) store.Version {
	f.t.Helper()
	v, err := m.Commit(f.t.Context(), put(key, value))
	if err != nil {
		f.t.Fatalf("commit: %v", err)
	}
	return v
}

func (f *fleet) isGone(asked, m store.Shared, want bool) {
	f.t.Helper()
	for range 2 {
		if gone, err := asked.Gone(f.t.Context(), m.Self().Boot); err != nil || gone != want {
			f.t.Fatalf("node %s is gone: %t, %v; want %t", m.Self().Node, gone, err, want)
		}
	}
}

func (f *fleet) values(m store.Shared) map[string]string {
	f.t.Helper()
	entries, err := collect(f.t.Context(), m, store.Range{})
	if err != nil {
		f.t.Fatal(err)
	}
	all := make(map[string]string)
	for _, e := range entries {
		all[string(e.Key)] = string(e.Value)
	}
	return all
}

func eventually(t *testing.T, what func() bool) {
	t.Helper()
	for late := time.Now().Add(patience); !what(); {
		if time.Now().After(late) {
			t.Fatal("it does not happen")
		}
		<-time.After(time.Millisecond)
	}
}

// Any is a store that hands each call to any of several over one place.
func Any(stores ...store.Store) store.Store { return several(stores) }

type several []store.Store

func (all several) any() store.Store { return all[rand.IntN(len(all))] }

func (all several) Get(ctx context.Context, key []byte) (store.Entry, error) {
	return all.any().Get(ctx, key)
}

func (all several) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return all.any().Scan(ctx, r)
}

func (all several) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	return all.any().Commit(ctx, batch...)
}

func (all several) Watch(key []byte) (<-chan struct{}, func()) { return all.any().Watch(key) }

func (all several) Now(ctx context.Context) (time.Time, error) { return all.any().Now(ctx) }

func (all several) Close() (err error) {
	for _, s := range all {
		err = errors.Join(err, s.Close())
	}
	return err
}

// remembering reads a key from memory until somebody changes it, as the packages above do.
type remembering struct {
	store.Shared
	cancel func()

	mu      sync.Mutex
	changes int // so far
	writing int // commits of this member
	known   map[string]store.Entry
}

func newRemembering(m store.Shared) *remembering {
	r := &remembering{Shared: m, known: make(map[string]store.Entry)}
	r.cancel = m.Follow(nil, r.forget)
	return r
}

func (r *remembering) forget(key []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changes++
	if delete(r.known, string(key)); key == nil {
		clear(r.known)
	}
}

func (r *remembering) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if err := r.CatchUp(ctx); err != nil {
		return store.Entry{}, err
	}
	r.mu.Lock()
	e, ok := r.known[string(key)]
	changes, writing := r.changes, r.writing
	r.mu.Unlock()
	if ok && writing == 0 {
		return e, nil
	}
	e, err := r.Shared.Get(ctx, key)
	if err == nil {
		r.mu.Lock()
		if r.changes == changes && r.writing == 0 {
			r.known[string(key)] = e
		}
		r.mu.Unlock()
	}
	return e, err
}

func (r *remembering) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	r.mu.Lock()
	r.writing++
	r.mu.Unlock()
	v, err := r.Shared.Commit(ctx, batch...)
	for i := range batch {
		r.forget(batch[i].Key)
	}
	r.mu.Lock()
	r.writing-- // what is known is not used before
	r.mu.Unlock()
	return v, err
}

func (r *remembering) Close() error {
	r.cancel()
	return r.Shared.Close()
}
