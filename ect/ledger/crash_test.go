package ledger

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// TestCrashAtEveryCommit kills the process at its n-th commit, before and after that
// landed, for every n: opening, recording over the end of a tile, pruning. Each time
// the next process finds a log that verifies, holds each acknowledged event once and in
// order, and continues.
func TestCrashAtEveryCommit(t *testing.T) {
	for _, landed := range []bool{false, true} {
		commits, step := 0, 1
		if raced {
			step = 5
		}
		for n := 1; ; n += step {
			mem := memory.New(memory.Options{})
			life := &crashing{Store: mem, left: n, landed: landed}
			acked, tried := crashLife(life)
			if !life.dead {
				commits = n - 1
				break
			}
			l := mustOpen(t, testOptions(mem))
			mustVerify(t, l)
			size := int(l.Head().Size)
			if size != acked && !(size == tried && size <= acked+10) {
				t.Fatalf("crash at commit %d, landed %v: %d entries, %d acknowledged, %d tried", n, landed, size, acked, tried)
			}
			for i := range size {
				e, err := l.Entry(t.Context(), int64(i))
				if errors.Is(err, ErrPruned) {
					continue
				}
				if err != nil || e.ID != testEvent(i).ID || string(e.Payload) != string(testEvent(i).Payload) {
					t.Fatalf("crash at commit %d, landed %v: entry %d is %q with %q: %v", n, landed, i, e.ID, e.Payload, err)
				}
			}
			if size == 0 {
				continue
			}
			// An event that came through is refused again, one that did not is not.
			for i, want := range map[int]error{size - 1: ErrDuplicate, size: nil} {
				if err := l.Append(t.Context(), []Event{testEvent(i)}); !errors.Is(err, want) {
					t.Fatalf("crash at commit %d, landed %v: event %d once more: %v", n, landed, i, err)
				}
			}
		}
		// 1 head, 27 times 10 events, and what is pruned.
		if commits < 30 {
			t.Errorf("a whole life has %d commits, so little was tried", commits)
		}
	}
}

// TestCrashInPruning: the next pruning finishes an interrupted one, also if an entry of the
// same tile must be kept.
func TestCrashInPruning(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	for n := range tileWidth {
		e := testEvent(n)
		if n == 7 {
			e.KeepUntil = time.Now().Add(time.Hour)
		}
		mustAppend(t, l, e)
	}
	life := mustOpen(t, testOptions(&crashing{Store: mem, left: 3, landed: true}))
	if n, err := life.Prune(t.Context(), time.Now().Add(time.Minute)); !errors.Is(err, errCrash) || n != 2*pruneStep {
		t.Fatalf("%d pruned: %v", n, err)
	}
	mustVerify(t, l)
	if n, err := l.Prune(t.Context(), time.Now().Add(time.Minute)); err != nil || n != tileWidth-1-3*pruneStep {
		t.Errorf("%d pruned by the next: %v", n, err)
	}
	if r := mustVerify(t, l); r.Entries != 1 {
		t.Errorf("%d entries are left", r.Entries)
	}
	// Until that one may go, nobody reads the tile again.
	reads := &counting{Store: mem}
	again := mustOpen(t, testOptions(reads))
	reads.scans = 0
	if n, err := again.Prune(t.Context(), time.Now().Add(time.Minute)); err != nil || n != 0 || reads.scans != 0 {
		t.Errorf("%d pruned after %d scans: %v", n, reads.scans, err)
	}
}

// counting is a store that counts its scans.
type counting struct {
	store.Store
	scans int
}

func (s *counting) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	s.scans++
	return s.Store.Scan(ctx, r)
}

// crashLife is one life on a store. It returns how many events were acknowledged, and
// how many were tried.
func crashLife(st store.Store) (acked, tried int) {
	ctx := context.Background()
	l, err := Open(ctx, testOptions(st))
	if err != nil {
		return 0, 0
	}
	for range 27 {
		var events []Event
		for range 10 {
			events = append(events, testEvent(tried))
			tried++
		}
		if l.Append(ctx, events) != nil {
			return acked, tried
		}
		acked = tried
	}
	_, _ = l.Prune(ctx, time.Now().Add(time.Hour))
	return acked, tried
}

// uncertain is a store whose commits end in ErrUnknown now and then, landed or not.
type uncertain struct {
	store.Store
	mu sync.Mutex
	n  int
}

func (s *uncertain) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	s.mu.Lock()
	s.n++
	n := s.n
	s.mu.Unlock()
	if n%5 == 2 {
		return 0, store.ErrUnknown
	}
	v, err := s.Store.Commit(ctx, batch...)
	if n%5 == 4 && err == nil {
		return 0, store.ErrUnknown
	}
	return v, err
}

// TestUnknownCommits: after commits of unknown result no event is lost or recorded twice.
func TestUnknownCommits(t *testing.T) {
	mem := memory.New(memory.Options{})
	mustOpen(t, testOptions(mem)) // the first head
	l := mustOpen(t, testOptions(&uncertain{Store: mem}))
	certain := map[string]bool{}
	for n := range 500 {
		if err := l.Append(t.Context(), []Event{testEvent(n)}); err == nil {
			certain[testEvent(n).ID] = true
		} else if !errors.Is(err, store.ErrUnknown) {
			t.Fatal(err)
		}
	}
	if len(certain) < 100 {
		t.Fatalf("only %d events were certain", len(certain))
	}
	last := -1
	for i := range l.Head().Size {
		e := must(l.Entry(t.Context(), i))(t)
		delete(certain, e.ID)
		var n int
		if _, err := fmt.Sscanf(e.ID, "id-%d", &n); err != nil || n <= last {
			t.Fatalf("entry %d is %s, behind id-%d", i, e.ID, last)
		}
		last = n
	}
	if len(certain) > 0 {
		t.Errorf("acknowledged and lost: %v", certain)
	}
	mustVerify(t, l)
}

// TestTwoProcesses: two processes on one log do not fork it. Whatever they interleave,
// every head that either of them showed is a continuation of those of smaller size.
func TestTwoProcesses(t *testing.T) {
	mem := memory.New(memory.Options{})
	const producers, each = 4, 60
	logs := []*Log{mustOpen(t, testOptions(mem)), mustOpen(t, testOptions(mem))}
	var mu sync.Mutex
	bySize := map[int64]Head{}
	see := func(h Head) {
		mu.Lock()
		defer mu.Unlock()
		if old, ok := bySize[h.Size]; ok && old.Root != h.Root {
			t.Errorf("two roots of size %d", h.Size)
		}
		bySize[h.Size] = h
	}
	var wg sync.WaitGroup
	for p := range producers {
		l := logs[p%2]
		wg.Go(func() {
			for n := range each {
				e := testEvent(n)
				e.ID = fmt.Sprintf("%d-%d", p, n)
				err := l.Append(t.Context(), []Event{e})
				for errors.Is(err, store.ErrUnavailable) { // the other was faster
					err = l.Append(t.Context(), []Event{e})
				}
				if err != nil {
					t.Error(err)
					return
				}
				see(l.Head())
			}
		})
	}
	wg.Wait()
	for _, l := range logs {
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	l := mustOpen(t, testOptions(mem))
	if l.Head().Size != producers*each {
		t.Fatalf("%d entries instead of %d", l.Head().Size, producers*each)
	}
	mustVerify(t, l)
	checkOrder(t, l, producers)
	for _, h := range bySize {
		proof := must(l.ProveConsistency(t.Context(), h.Size, l.Head().Size))(t)
		if err := CheckConsistency(proof, h, l.Head()); err != nil {
			t.Errorf("the head of size %d: %v", h.Size, err)
		}
	}
}

// hooked is a store that calls before ahead of each read of a range, or of a key alone, which is its From.
type hooked struct {
	store.Store
	before func(r store.Range)
}

func (s *hooked) Get(ctx context.Context, key []byte) (store.Entry, error) {
	s.before(store.Range{From: key})
	return s.Store.Get(ctx, key)
}

func (s *hooked) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	s.before(r)
	return s.Store.Scan(ctx, r)
}

// A log is not altered because another process extends it between two reads, however often that happens.
func TestGrowthIsNoAlteration(t *testing.T) {
	for name, c := range map[string]struct {
		kind       byte
		limit, add int // of the reads before which so many events are added
	}{"beyond the head": {spaceEntry, 1, 1}, "tile": {spaceTile, 0, tileWidth}} {
		t.Run(name, func(t *testing.T) {
			mem := memory.New(memory.Options{})
			writer, n, before := mustOpen(t, testOptions(mem)), 0, 0
			grow := func(by int) {
				appendEvents(t, writer, n, n+by)
				n += by
			}
			grow(tileWidth + 3)
			hook := func(r store.Range) {
				if r.From[1] == c.kind && r.Limit == c.limit {
					grow(c.add)
				}
			}
			before = n
			l := mustOpen(t, testOptions(&hooked{mem, hook}))
			if n == before {
				t.Error("nothing was added while the log was opened")
			}
			must(l.Receipt(t.Context(), 0))(t)
			for range 2 { // as after two lost commits, the second of which ends when the newest head is known already
				l.overtaken.Store(true)
				if err := l.usable(); err != nil {
					t.Fatalf("with a head of size %d: %v", l.Head().Size, err)
				}
			}
			mustVerify(t, l)

			// What stands beyond the end is forged, also where the log has grown.
			forged := store.Write{Key: l.entryKey(1 << 20), Value: []byte("forged")}
			if _, err := mem.Commit(t.Context(), forged); err != nil {
				t.Fatal(err)
			}
			if _, err := l.load(t.Context()); !errors.Is(err, ErrTampered) {
				t.Errorf("forged: %v", err)
			}
		})
	}
}

// checkOrder checks that the events called producer-number stand once and in the order
// of their producer.
func checkOrder(t testing.TB, l *Log, producers int) {
	t.Helper()
	next := make([]int, producers)
	for i := range l.Head().Size {
		e := must(l.Entry(t.Context(), i))(t)
		var p, n int
		if _, err := fmt.Sscanf(e.ID, "%d-%d", &p, &n); err != nil || n != next[p] {
			t.Fatalf("entry %d is %s, expected was number %d of its producer", i, e.ID, next[p])
		}
		next[p]++
	}
}

// TestReceiptsOfAnotherProcess: what one process has recorded another can prove at once.
func TestReceiptsOfAnotherProcess(t *testing.T) {
	mem := memory.New(memory.Options{})
	a, b := mustOpen(t, testOptions(mem)), mustOpen(t, testOptions(mem))
	appendEvents(t, a, 0, 5)
	e := must(b.Lookup(t.Context(), testEvent(4).Workflow, "id-4"))(t)
	r := must(b.Receipt(t.Context(), e.Index))(t)
	if head, err := r.Check(e.Leaf, testOrigin, testKeys); err != nil || head.Size != 5 {
		t.Errorf("a receipt of what the other has recorded: size %d, %v", head.Size, err)
	}
	for _, index := range []int64{-1, 5, 1 << 62} {
		if _, err := b.Receipt(t.Context(), index); !errors.Is(err, ErrNotFound) {
			t.Errorf("a receipt of entry %d: %v", index, err)
		}
		if _, err := b.Entry(t.Context(), index); !errors.Is(err, ErrNotFound) {
			t.Errorf("entry %d: %v", index, err)
		}
	}
}

// TestOlderCopyRefused: a store that was put back to an earlier state is refused where a
// later head is known, and so is one whose end was cut off.
func TestOlderCopyRefused(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	appendEvents(t, l, 0, 10)
	older := contents(t, mem)
	appendEvents(t, l, 10, 20)

	o := testOptions(filled(t, older))
	if _, err := Open(t.Context(), o); err != nil {
		t.Fatalf("without a later head it cannot be known: %v", err)
	}
	o.Known = []Head{l.Head()}
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrTampered) {
		t.Errorf("an older copy opened: %v", err)
	}
	if r, err := verifyStored(t, o); err != nil || faultsOf(&r) == nil {
		t.Errorf("an older copy verified: %v", err)
	}

	// A log that runs notices as well, before it adds anything to the older tree.
	put := func() {
		for _, e := range contents(t, mem) {
			if _, err := mem.Commit(t.Context(), store.Write{Key: e.Key, Delete: true}); err != nil {
				t.Fatal(err)
			}
		}
		for _, e := range older {
			if _, err := mem.Commit(t.Context(), store.Write{Key: e.Key, Value: e.Value}); err != nil {
				t.Fatal(err)
			}
		}
	}
	put()
	if err := l.Append(t.Context(), []Event{testEvent(30)}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("recorded in an older state: %v", err)
	}
	if err := l.Append(t.Context(), []Event{testEvent(30)}); !errors.Is(err, ErrTampered) {
		t.Errorf("it went on from an older state: %v", err)
	}
}

// TestOnBadger: the same on the embedded store, over a restart.
func TestOnBadger(t *testing.T) {
	dir := t.TempDir()
	for life := range 2 {
		st := must(badger.Open(dir, badger.Options{}))(t)
		l := mustOpen(t, testOptions(st))
		var wg sync.WaitGroup
		const producers, each = 4, 40
		for p := range producers {
			wg.Go(func() {
				for n := range each {
					e := testEvent(n)
					e.ID = fmt.Sprintf("%d-%d", p, life*each+n)
					if err := l.Append(t.Context(), []Event{e}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := l.Head().Size; got != int64((life+1)*producers*each) {
			t.Errorf("%d entries in life %d", got, life)
		}
		mustVerify(t, l)
		checkOrder(t, l, producers)
		if life == 1 {
			mustPrune(t, l, tileWidth)
			mustVerify(t, l)
		}
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
