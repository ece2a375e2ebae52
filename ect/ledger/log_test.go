package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// TestManyProducers: under concurrency each event is in the tree once, in the order of
// its producer; of those who record one id at the same time exactly one succeeds.
func TestManyProducers(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	const producers, each = 16, 40
	var wg sync.WaitGroup
	var won, refused atomic.Int64
	for p := range producers {
		wg.Go(func() {
			for n := range each {
				e := testEvent(n)
				e.ID = fmt.Sprintf("%d-%d", p, n)
				if err := l.Append(t.Context(), []Event{e}); err != nil {
					t.Error(err)
				}
				contended := testEvent(n)
				contended.ID, contended.Workflow = fmt.Sprintf("all-%d", n), "contended"
				switch err := l.Append(t.Context(), []Event{contended}); {
				case err == nil:
					won.Add(1)
				case errors.Is(err, ErrDuplicate):
					refused.Add(1)
				default:
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if won.Load() != each || refused.Load() != each*(producers-1) {
		t.Errorf("of each contended id one must win: %d won, %d were refused", won.Load(), refused.Load())
	}
	for p := range producers { // receipts while it runs
		e := must(l.Lookup(t.Context(), testEvent(each-1).Workflow, fmt.Sprintf("%d-%d", p, each-1)))(t)
		r := must(l.Receipt(t.Context(), e.Index))(t)
		if _, err := r.Check(e.Leaf, testOrigin, testKeys); err != nil {
			t.Error(err)
		}
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustVerify(t, l)
	if got := len(listAll(t, l, "contended", MaxPage)); got != each {
		t.Errorf("%d contended events are in the tree", got)
	}
	next := make([]int, producers)
	for i := range l.Head().Size {
		e := must(l.Entry(t.Context(), i))(t)
		var p, n int
		if e.Workflow == "contended" {
			continue
		}
		if _, err := fmt.Sscanf(e.ID, "%d-%d", &p, &n); err != nil || n != next[p] {
			t.Fatalf("entry %d is %s, expected was number %d of its producer", i, e.ID, next[p])
		}
		next[p]++
	}
}

// TestOneCommit: the state change and the event land together or not at all.
func TestOneCommit(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	change := store.Write{Key: []byte("x"), Value: []byte("1"), If: store.Absent()}
	for i, want := range []error{nil, ErrDuplicate} {
		b := must(l.Record(testEvent(0)))(t)
		_, err := mem.Commit(t.Context(), append([]store.Write{{Key: []byte{byte('a' + i)}}}, b.Writes()...)...)
		if err := b.Done(err); !errors.Is(err, want) {
			t.Errorf("attempt %d: %v", i, err)
		}
	}
	if _, err := mem.Get(t.Context(), []byte("b")); !errors.Is(err, store.ErrNotFound) {
		t.Error("the change of a refused event landed")
	}
	for i := range 2 { // the change is refused the second time, and the event with it
		b := must(l.Record(testEvent(1 + i)))(t)
		b.Add(change)
		err := b.Commit(t.Context(), mem)
		if lost := (*store.Conflict)(nil); i == 1 && (!errors.As(err, &lost) || errors.Is(err, ErrDuplicate)) {
			t.Errorf("the conflict is not the caller's own: %v", err)
		}
	}
	if _, err := l.Record(testEvent(3), testEvent(3)); !errors.Is(err, ErrDuplicate) {
		t.Errorf("one id twice: %v", err)
	}
	if got := l.Head().Size; got != 2 {
		t.Errorf("%d events instead of 2", got)
	}
	if err := l.commits.await(t.Context()); err != nil {
		t.Errorf("what did not land is waited for: %v", err)
	}
}

// TestReseal: after a rotation everything opens under the newest key alone, and the
// tree is the same.
func TestReseal(t *testing.T) {
	mem := memory.New(memory.Options{})
	o := testOptions(mem)
	ring := &rotating{Ring: seal.Generate()}
	o.Sealer = ring
	l := mustOpen(t, o)
	appendEvents(t, l, 0, 300)
	appendEvents(t, l, 300, 310)
	before := l.Head()
	ring.rotate()
	if n, err := l.Reseal(t.Context()); err != nil || n != 310 {
		t.Fatalf("%d sealed anew: %v", n, err)
	}
	if n, err := l.Reseal(t.Context()); err != nil || n != 0 {
		t.Errorf("%d sealed anew a second time: %v", n, err)
	}
	ring.forget()
	if r := mustVerify(t, l); r.Entries != 310 {
		t.Errorf("%d entries", r.Entries)
	}
	checkHeads(t, l, []Head{before, l.Head()})
}

// rotating is two rings with one index key: a first byte says which one sealed.
type rotating struct {
	*seal.Ring
	newer   *seal.Ring
	forgets bool
}

func (r *rotating) rotate() { r.newer = seal.Generate() }
func (r *rotating) forget() { r.forgets = true }

func (r *rotating) KeyIDs() []uint32 {
	if r.newer != nil {
		return []uint32{1, 2}
	}
	return []uint32{1}
}

func (r *rotating) KeyOf(sealed []byte) uint32 { return uint32(sealed[0]) }

func (r *rotating) Seal(dst, plaintext, name []byte) []byte {
	if r.newer != nil {
		return r.newer.Seal(append(dst, 2), plaintext, name)
	}
	return r.Ring.Seal(append(dst, 1), plaintext, name)
}

func (r *rotating) Open(dst, sealed, name []byte) ([]byte, error) {
	switch {
	case sealed[0] == 2:
		return r.newer.Open(dst, sealed[1:], name)
	case r.forgets:
		return nil, seal.ErrOpen
	}
	return r.Ring.Open(dst, sealed[1:], name)
}

// TestVerifyInUse: concurrent events and prunings cause no false faults, and every export
// verifies.
func TestVerifyInUse(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	appendEvents(t, l, 0, tileWidth)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(done)
		for n := tileWidth; n < 4*tileWidth; n++ {
			e := testEvent(n)
			if err := l.Append(t.Context(), []Event{e}); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Go(func() {
		for over := false; !over; {
			select {
			case <-done:
				over = true
			default:
			}
			if _, err := l.Prune(t.Context(), time.Now().Add(time.Minute)); err != nil {
				t.Error(err)
			}
		}
	})
	for over, n := false, 0; !over; n++ {
		select {
		case <-done:
			over = true
		default:
		}
		r, err := l.Verify(t.Context())
		if err == nil {
			err = faultsOf(&r)
		}
		if err != nil {
			t.Fatalf("look %d: %v%s", n, err, allFaults(&r))
		}
		var b bytes.Buffer
		head := must(l.Export(t.Context(), &b))(t)
		if x, err := VerifyExport(&b, testOrigin, testKeys, nil, head, r.Head); err != nil || x.Head.Size < r.Head.Size {
			t.Fatalf("look %d: %v", n, err)
		}
	}
	wg.Wait()
}

// TestOvertaken: of two handles of one log the one that is behind records nothing once, and then goes on from the head of
// the other. What stands beyond the end of the tree is forged.
func TestOvertaken(t *testing.T) {
	for name, open := range map[string]func(t testing.TB) store.Store{
		"memory": func(testing.TB) store.Store { return memory.New(memory.Options{}) },
		"badger": func(t testing.TB) store.Store { return openBadger(t) },
	} {
		t.Run(name, func(t *testing.T) {
			st := open(t)
			a, b := mustOpen(t, testOptions(st)), mustOpen(t, testOptions(st))
			appendEvents(t, a, 0, 3)
			more := store.Write{Key: []byte("x"), Value: []byte("1")}
			if err := b.Append(t.Context(), []Event{testEvent(3)}, more); !errors.Is(err, store.ErrUnavailable) {
				t.Fatalf("recorded behind another handle: %v", err)
			}
			if _, err := st.Get(t.Context(), more.Key); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("the change landed without its event: %v", err)
			}
			mustAppend(t, b, testEvent(3))
			if got := b.Head().Size; got != 4 {
				t.Errorf("%d events instead of 4", got)
			}
			mustVerify(t, b)

			if _, err := st.Commit(t.Context(), store.Write{Key: b.entryKey(4), Value: []byte("forged")}); err != nil {
				t.Fatal(err)
			}
			if err := b.Append(t.Context(), []Event{testEvent(4)}); !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("recorded in front of a forged entry: %v", err)
			}
			for range 2 {
				if err := b.Append(t.Context(), []Event{testEvent(4)}); !errors.Is(err, ErrTampered) {
					t.Errorf("with a forged entry behind the end: %v", err)
				}
			}
		})
	}
}

// TestClosed: nothing is recorded behind the end.
func TestClosed(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	if err := errors.Join(l.usable(), l.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Record(testEvent(9)); !errors.Is(err, ErrClosed) {
		t.Errorf("recorded behind the end: %v", err)
	}
}

// TestClockStepsBack: the times of entries never decrease with their index.
func TestClockStepsBack(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	mem := memory.New(memory.Options{Now: func() time.Time { return now }})
	l := mustOpen(t, testOptions(mem))
	for n, step := range []time.Duration{0, time.Hour, -2 * time.Hour, time.Minute, 3 * time.Hour} {
		now = now.Add(step)
		appendEvents(t, l, n, n+1)
		if n == 3 {
			l = mustOpen(t, testOptions(mem)) // it is known again after a restart
		}
	}
	last := time.Time{}
	for i := range l.Head().Size {
		e, err := l.Entry(t.Context(), i)
		if err != nil || e.Recorded.Before(last) {
			t.Errorf("entry %d of %s follows one of %s: %v", i, e.Recorded, last, err)
		}
		last = e.Recorded
	}
}
