package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// shown is an event whose token is signed when it is asked for.
func shown(n int) Event {
	e := testEvent(n)
	e.Header = []byte(`{"alg":"EdDSA"}`)
	return e
}

func placing(st store.Store) Options {
	o := sequenced(testOptions(st))
	o.Signature, o.Links = testSignature, func(e *Event) []string { return e.Parents }
	return o
}

// TestInTheTreeWithTheirCommit: where the store is sequencing, an event is in the tree when its commit returns, with
// ids, lists, links and a signed head, as if the sequencer had moved it.
func TestInTheTreeWithTheirCommit(t *testing.T) {
	var logs []*Log
	synctest.Test(t, func(t *testing.T) {
		for _, direct := range []bool{true, false} {
			mem := memory.New(memory.Options{})
			o := placing(mem)
			if !direct {
				o.Store = unsequenced{mem}
			}
			l := mustOpen(t, o)
			for n := 1; n < 2*tileWidth+40; n += 2 {
				mustAppend(t, l, shown(n), testEvent(n+1))
				if !direct {
					drain(t, l)
				}
				if at := l.Head().Size; at != int64(n)+1 {
					t.Fatalf("%d entries after %d events", at, n+1)
				}
				e := must(l.Lookup(t.Context(), shown(n).Workflow, shown(n).ID))(t)
				receipt := must(l.Receipt(t.Context(), e.Index))(t)
				if _, err := receipt.Check(e.Leaf, testOrigin, testKeys); err != nil {
					t.Fatal(err)
				}
			}
			if n := must(l.Waiting(t.Context()))(t); n != 0 {
				t.Errorf("%d wait", n)
			}
			mustVerify(t, l)
			logs = append(logs, mustOpen(t, o)) // the tree as it was stored
		}
	})
	for i := range logs[1].Head().Size {
		a, b := must(logs[0].Entry(t.Context(), i))(t), must(logs[1].Entry(t.Context(), i))(t)
		if !slices.Equal(a.Leaf, b.Leaf) {
			t.Fatalf("entry %d is %q in the commit, and %q by the outbox", i, a.Leaf, b.Leaf)
		}
	}
	if a, b := logs[0].Head(), logs[1].Head(); a.Root != b.Root {
		t.Errorf("roots %s and %s", a.Root, b.Root)
	}
	if a, b := contents(t, logs[0].store), contents(t, logs[1].store); len(a) != len(b) {
		t.Errorf("%d keys are stored, and %d by the outbox", len(a), len(b))
	}
}

// TestDuplicatesInTheTree: an id is taken once, also by commits of one group.
func TestDuplicatesInTheTree(t *testing.T) {
	st := openBadger(t)
	l := mustOpen(t, placing(st))
	var won atomic.Int32
	var all sync.WaitGroup
	for range 32 {
		all.Go(func() {
			switch err := l.Append(context.Background(), []Event{shown(1)}); {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, ErrDuplicate):
				t.Error(err)
			}
		})
	}
	all.Wait()
	if won.Load() != 1 || l.Head().Size != 1 {
		t.Errorf("%d have won, %d entries", won.Load(), l.Head().Size)
	}
	if err := l.Append(t.Context(), []Event{shown(2), shown(2)}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("twice in one commit: %v", err)
	}
	mustVerify(t, l)
}

func openBadger(t testing.TB) *badger.Store {
	t.Helper()
	st := must(badger.Open(t.TempDir(), badger.Options{}))(t)
	t.Cleanup(func() { _ = st.Close() })
	return st
}

// TestCausesBeforeEffects: an event that has to be signed waits for the sequencer, and what follows from it stands
// behind it, though it would need no sequencer itself.
func TestCausesBeforeEffects(t *testing.T) {
	l := mustOpen(t, placing(memory.New(memory.Options{})))
	unsigned := func(n int) Event {
		e := testEvent(n)
		e.Unsigned = true
		return e
	}
	mustAppend(t, l, shown(0))
	mustAppend(t, l, unsigned(1), shown(2))
	mustAppend(t, l, shown(3))
	if l.Head().Size != 1 || l.Stats().Backlog.Entries != 3 {
		t.Fatalf("%d entries, and %d wait", l.Head().Size, l.Stats().Backlog.Entries)
	}
	if _, err := l.Lookup(t.Context(), shown(3).Workflow, shown(3).ID); !errors.Is(err, ErrWaiting) {
		t.Errorf("what waits is %v", err)
	}
	drain(t, l)
	mustAppend(t, l, shown(4))
	for i := range l.Head().Size {
		if e := must(l.Entry(t.Context(), i))(t); e.ID != testEvent(int(i)).ID {
			t.Errorf("entry %d is %s", i, e.ID)
		}
	}
	if l.Head().Size != 5 {
		t.Errorf("%d entries", l.Head().Size)
	}
	mustVerify(t, l)
}

// TestAfterACrashTheOutboxIsFirst: what an earlier life has left in the outbox comes before what this one records.
func TestAfterACrashTheOutboxIsFirst(t *testing.T) {
	mem := memory.New(memory.Options{})
	o := placing(mem)
	o.Store = unsequenced{mem} // as earlier versions do
	mustAppend(t, mustOpen(t, o), shown(0))
	l := mustOpen(t, placing(mem))
	mustAppend(t, l, shown(1))
	if l.Head().Size != 0 {
		t.Fatal("it is before what was left")
	}
	drain(t, l)
	if e := must(l.Entry(t.Context(), 0))(t); e.ID != testEvent(0).ID || l.Head().Size != 2 {
		t.Errorf("%s is the first of %d", e.ID, l.Head().Size)
	}
	mustVerify(t, l)
}

// failingSigner is a signer of heads that fails while it is told to.
type failingSigner struct {
	note.Signer
	fails atomic.Bool
}

func (s *failingSigner) Sign(msg []byte) ([]byte, error) {
	if s.fails.Load() {
		return nil, errors.New("no key")
	}
	return s.Signer.Sign(msg)
}

// TestWhatCannotBePlacedWaits: without a signature of the head, or behind the back of this handle, an event goes to
// the outbox with its commit, and is lost nowhere.
func TestWhatCannotBePlacedWaits(t *testing.T) {
	for name, hinder := range map[string]func(t *testing.T, l *Log, s *failingSigner) (help func()){
		"no signature": func(_ *testing.T, _ *Log, s *failingSigner) func() {
			s.fails.Store(true)
			return func() { s.fails.Store(false) }
		},
		"another handle": func(t *testing.T, l *Log, _ *failingSigner) func() {
			other := mustOpen(t, placing(l.store))
			mustAppend(t, other, shown(100))
			return func() {}
		},
		"something beyond the end": func(t *testing.T, l *Log, _ *failingSigner) func() {
			key := l.entryKey(l.Head().Size)
			if _, err := l.store.Commit(t.Context(), store.Write{Key: key, Value: []byte("forged")}); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := tryDrain(l); !errors.Is(err, ErrTampered) {
					t.Errorf("with a forged entry behind the end: %v", err)
				}
				if _, err := l.store.Commit(t.Context(), store.Write{Key: key, Delete: true}); err != nil {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &failingSigner{Signer: testSigner}
			o := placing(memory.New(memory.Options{}))
			o.HeadSigner = s
			l := mustOpen(t, o)
			mustAppend(t, l, shown(0))
			before := l.Head().Size
			help := hinder(t, l, s)
			mustAppend(t, l, shown(1), testEvent(2))
			if l.Head().Size != before || l.Stats().Backlog.Entries != 2 {
				t.Fatalf("%d entries, and %d wait", l.Head().Size, l.Stats().Backlog.Entries)
			}
			help()
			drain(t, l)
			size := l.Head().Size
			for n := range 3 {
				must(l.Lookup(t.Context(), testEvent(n).Workflow, testEvent(n).ID))(t)
			}
			mustAppend(t, l, shown(3))
			if l.Head().Size != size+1 {
				t.Errorf("it does not go on: %d entries after %d", l.Head().Size, size)
			}
			mustVerify(t, l)
		})
	}
}

// TestPlacedInOrder: Options.Placed gets each event once and in the order of the tree, whichever way it came there.
func TestPlacedInOrder(t *testing.T) {
	st := openBadger(t)
	o := placing(st)
	var mu sync.Mutex
	var said []string
	o.Placed = func(e *Event, _ time.Time) {
		mu.Lock()
		defer mu.Unlock()
		said = append(said, e.ID)
	}
	o.BatchDelay = 100 * time.Microsecond
	l := mustOpen(t, o)
	l.Start()
	const callers, each = 8, 60
	var all sync.WaitGroup
	for c := range callers {
		all.Go(func() {
			parents := []string(nil)
			for i := range each {
				e := shown(0)
				e.ID, e.Workflow, e.Parents = fmt.Sprintf("%d-%02d", c, i), fmt.Sprint("w-", c), parents
				if i%7 == 3 { // the sequencer signs it
					e.Header, e.Unsigned = nil, true
				}
				if err := l.Append(context.Background(), []Event{e}); err != nil {
					t.Error(err)
					return
				}
				parents = []string{e.ID}
			}
		})
	}
	all.Wait()
	if err := l.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustVerify(t, l)
	if len(said) != callers*each || l.Head().Size != callers*each {
		t.Fatalf("%d announced, %d entries, of %d", len(said), l.Head().Size, callers*each)
	}
	last := map[string]int{}
	for i, id := range said {
		e := must(l.Entry(t.Context(), int64(i)))(t)
		if e.ID != id {
			t.Fatalf("entry %d is %s and was announced as %s", i, e.ID, id)
		}
		var c, n int
		if _, err := fmt.Sscanf(id, "%d-%d", &c, &n); err != nil || n != last[e.Workflow] {
			t.Fatalf("%s stands where %d of %s is expected: %v", id, last[e.Workflow], e.Workflow, err)
		}
		last[e.Workflow]++
	}
}

// TestModelOfPlacements is TestModel with events that are in the tree with their commit.
func TestModelOfPlacements(t *testing.T) {
	l := mustOpen(t, placing(openBadger(t)))
	size := 0
	for n := range 3 * tileWidth {
		events := []Event{shown(2 * n), testEvent(2*n + 1)}
		mustAppend(t, l, events...)
		if size += len(events); int(l.Head().Size) != size {
			t.Fatalf("%d entries instead of %d", l.Head().Size, size)
		}
		if n%100 == 50 { // a restart
			l = mustOpen(t, placing(l.store))
		}
	}
	r := mustVerify(t, l)
	if r.Entries != int64(size) {
		t.Errorf("%d entries are verified", r.Entries)
	}
	mustPrune(t, l, -1)
	mustVerify(t, l)
}
