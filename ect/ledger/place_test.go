package ledger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
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
	o := testOptions(st)
	o.Signature, o.Links = testSignature, func(e *Event) []string { return e.Parents }
	return o
}

// TestInTheTreeWithTheirCommit: an event is in the tree when its commit returns, with ids, lists, links and a signed
// head.
func TestInTheTreeWithTheirCommit(t *testing.T) {
	o := placing(memory.New(memory.Options{}))
	l := mustOpen(t, o)
	for n := 1; n < 2*tileWidth+40; n += 2 {
		mustAppend(t, l, shown(n), testEvent(n+1))
		if at := l.Head().Size; at != int64(n)+1 {
			t.Fatalf("%d entries after %d events", at, n+1)
		}
		e := must(l.Lookup(t.Context(), shown(n).Workflow, shown(n).ID))(t)
		receipt := must(l.Receipt(t.Context(), e.Index))(t)
		if _, err := receipt.Check(e.Leaf, testOrigin, testKeys); err != nil {
			t.Fatal(err)
		}
	}
	mustVerify(t, l)
	if again := mustOpen(t, o).Head(); again.Root != l.Head().Root { // the tree as it was stored
		t.Errorf("roots %s and %s", again.Root, l.Head().Root)
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

// TestNoSignatureNoEvent: without a signature of the head nothing is written, and it goes on with the next one.
func TestNoSignatureNoEvent(t *testing.T) {
	s := &failingSigner{Signer: testSigner}
	o := placing(memory.New(memory.Options{}))
	o.HeadSigner = s
	l := mustOpen(t, o)
	mustAppend(t, l, shown(0))
	s.fails.Store(true)
	if err := l.Append(t.Context(), []Event{shown(1)}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("recorded without a signature: %v", err)
	}
	s.fails.Store(false)
	mustAppend(t, l, shown(1))
	if l.Head().Size != 2 {
		t.Errorf("%d entries", l.Head().Size)
	}
	mustVerify(t, l)
}

// TestPlacedInOrder: Options.Placed gets each event once and in the order of the tree.
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
	l := mustOpen(t, o)
	const callers, each = 8, 60
	var all sync.WaitGroup
	for c := range callers {
		all.Go(func() {
			parents := []string(nil)
			for i := range each {
				e := shown(0)
				e.ID, e.Workflow, e.Parents = fmt.Sprintf("%d-%02d", c, i), fmt.Sprint("w-", c), parents
				if err := l.Append(context.Background(), []Event{e}); err != nil {
					t.Error(err)
					return
				}
				parents = []string{e.ID}
			}
		})
	}
	all.Wait()
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
