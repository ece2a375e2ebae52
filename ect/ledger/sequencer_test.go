package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// TestManyProducers: under concurrency each event is in the tree once, in the order of
// its producer; of those who record one id at the same time exactly one succeeds.
func TestManyProducers(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustStart(t, testOptions(mem))
	const producers, each = 16, 40
	var wg sync.WaitGroup
	var won, refused atomic.Int64
	for p := range producers {
		wg.Go(func() {
			for n := range each {
				if err := l.Admit(t.Context()); err != nil {
					t.Error(err)
				}
				e := testEvent(n)
				e.ID, e.Unsigned = fmt.Sprintf("%d-%d", p, n), n%2 == 0
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
		e := must(l.Wait(t.Context(), testEvent(each-1).Workflow, fmt.Sprintf("%d-%d", p, each-1)))(t)
		r := must(l.Receipt(t.Context(), e.Index))(t)
		if _, err := r.Check(e.Leaf, testOrigin, testKeys); err != nil {
			t.Error(err)
		}
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if b := l.queue.backlog(); b.Entries != 0 || b.Age != 0 {
		t.Errorf("left behind: %+v", b)
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
	drain(t, l)
	if got := l.Head().Size; got != 2 {
		t.Errorf("%d events instead of 2", got)
	}
	if n := len(l.queue.tickets); n != 0 {
		t.Errorf("%d tickets are kept of what did not land", n)
	}
	if b := l.queue.backlog(); b.Entries != 0 {
		t.Errorf("what did not land is waited for: %+v", b)
	}
}

// TestCommitsWakeTheSequencer: what landed, or may have, is moved at once, the latter after a
// scan of the outbox. What did not land wakes nobody.
func TestCommitsWakeTheSequencer(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	m := sequencer{Log: l} // it has scanned the outbox
	unknown := fmt.Errorf("%w: the answer was lost", store.ErrUnknown)
	for i, c := range []struct {
		lands bool
		err   error // that the batch is ended with
		wakes bool
	}{{true, nil, true}, {true, unknown, true}, {false, unknown, true}, {false, store.ErrFull, false}} {
		size := l.Head().Size
		b := must(l.Record(testEvent(i)))(t)
		if c.lands {
			must(mem.Commit(t.Context(), b.Writes()...))(t)
			size++
		}
		if err := b.Done(c.err); err != c.err {
			t.Errorf("%d: %v", i, err)
		}
		woken := false
		select {
		case <-l.queue.wake:
			woken = true
		default:
		}
		if woken != c.wakes {
			t.Errorf("%d: woken: %t", i, woken)
		}
		if awaited := len(l.queue.tickets) == 1; awaited != c.wakes {
			t.Errorf("%d: waits for it: %t", i, awaited)
		}
		if counted := l.queue.backlog().Entries == 1; counted != (c.err == nil) {
			t.Errorf("%d: in the backlog: %t", i, counted)
		}
		for rest := true; rest; {
			rest = must(m.move(t.Context()))(t)
		}
		if got := l.Head().Size; got != size {
			t.Errorf("%d: %d events instead of %d", i, got, size)
		}
		if n := len(l.queue.tickets); n != 0 {
			t.Errorf("%d: %d tickets are kept", i, n)
		}
	}
	b := must(l.Record(testEvent(9)))(t)
	l.queue.overtake() // another process moves the log on, and perhaps this event
	if err := b.Commit(t.Context(), mem); err != nil {
		t.Error(err)
	}
	if _, sure := l.queue.recorded(l.boot, 1); sure {
		t.Error("an event is moved without a look at whether another process has moved it")
	}
}

// TestLateLanding: an event whose commit is slower than that of a later one is not
// forgotten, and moves when it is there.
func TestLateLanding(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	slow := must(l.Record(testEvent(0)))(t)
	appendEvents(t, l, 1, 3)
	drain(t, l)
	m := sequencer{Log: l} // without a scan of the outbox
	if err := slow.Commit(t.Context(), mem); err != nil {
		t.Fatal(err)
	}
	if _, err := m.move(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e, err := l.Lookup(t.Context(), testEvent(0).Workflow, "id-0"); err != nil || e.Index != 2 {
		t.Errorf("index %d: %v", e.Index, err)
	}
	mustVerify(t, l)
}

// gated is a store whose commits from the sequencer wait until the gate is open: those
// that carry a head.
type gated struct {
	store.Store
	open chan struct{}
}

func (s *gated) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if batch[0].Key[1] == spaceHead && batch[0].If != store.Absent() {
		select {
		case <-s.open:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return s.Store.Commit(ctx, batch...)
}

// lateScan is a store whose scans of the outbox, once they have read, wait until the gate is open. Without one none
// waits.
type lateScan struct {
	store.Store
	open chan struct{}
}

func (s *lateScan) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	if s.open == nil || r.From[1] != spaceOutbox {
		return s.Store.Scan(ctx, r)
	}
	return func(yield func(store.Entry, error) bool) {
		var read []store.Entry
		for e := range s.Store.Scan(ctx, r) {
			read = append(read, e)
		}
		<-s.open
		for _, e := range read {
			if !yield(e, nil) {
				return
			}
		}
	}
}

// TestCloseMovesEverything: what was recorded before the close is in the tree after it, also where the sequencer was
// just looking at an outbox that had nothing yet.
func TestCloseMovesEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := &lateScan{Store: memory.New(memory.Options{})}
		l := mustOpen(t, testOptions(late))
		late.open = make(chan struct{})
		l.Start()
		synctest.Wait()
		appendEvents(t, l, 0, 3)
		closed := make(chan error)
		go func() { closed <- l.Close(t.Context()) }()
		synctest.Wait()
		close(late.open)
		if err := <-closed; err != nil {
			t.Fatal(err)
		}
		if n := l.Head().Size; n != 3 {
			t.Errorf("%d events are in the tree, not 3", n)
		}
	})
}

// TestBacklogBounds: with as many events waiting as allowed, or one that waits too
// long, claims wait; they go on when the sequencer has caught up, and get an error when it
// never will.
func TestBacklogBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gated{Store: memory.New(memory.Options{}), open: make(chan struct{})}
		o := testOptions(g)
		o.MaxBacklog, o.MaxAge, o.BatchDelay = 5, time.Minute, time.Millisecond
		l := mustOpen(t, o)
		l.Start()
		admitted := func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			ready, err := l.Ready(), l.Admit(ctx)
			if ready != (err == nil) {
				t.Errorf("Ready says %t, and Admit %v", ready, err)
			}
			return err == nil
		}
		appendEvents(t, l, 0, 4)
		if !admitted() {
			t.Error("not admitted below the bounds")
		}
		appendEvents(t, l, 4, 5)
		if admitted() {
			t.Error("admitted over the bound of entries")
		}
		if b := l.queue.backlog(); b.Entries != 5 || b.Age < time.Second || b.Age > 10*time.Second {
			t.Errorf("%+v", b)
		}
		waiting := make(chan error)
		go func() { waiting <- l.Admit(t.Context()) }()
		synctest.Wait()
		close(g.open)
		if err := <-waiting; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if b := l.queue.backlog(); b.Entries != 0 || b.Age != 0 {
			t.Errorf("%+v", b)
		}
		g.open = make(chan struct{}) // the sequencer sleeps
		appendEvents(t, l, 5, 6)
		if !admitted() {
			t.Error("not admitted with one young event")
		}
		time.Sleep(time.Minute)
		if admitted() {
			t.Error("admitted over the bound of age")
		}
		go func() { waiting <- l.Admit(t.Context()) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := l.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("closed with events left: %v", err)
		}
		if err := <-waiting; !errors.Is(err, ErrClosed) {
			t.Errorf("a waiter at the end gets %v", err)
		}
		if _, err := l.Record(testEvent(9)); !errors.Is(err, ErrClosed) {
			t.Errorf("recorded behind the end: %v", err)
		}
		if l.Ready() {
			t.Error("ready behind the end")
		}

		// What was left counts for the next life, until it is moved.
		next := mustOpen(t, o)
		if b := next.queue.backlog(); b.Entries != 1 {
			t.Errorf("%+v", b)
		}
		close(g.open)
		next.Start()
		if _, err := next.Wait(t.Context(), testEvent(5).Workflow, "id-5"); err != nil {
			t.Error(err)
		}
		if err := next.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if b := next.queue.backlog(); b.Entries != 0 {
			t.Errorf("%+v", b)
		}
	})
}

// TestStoreDown: while commits fail the events wait; the sequencer retries, and nothing is
// lost.
func TestStoreDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := &failing{Store: memory.New(memory.Options{})}
		l := mustOpen(t, testOptions(down))
		appendEvents(t, l, 0, 40)
		down.down.Store(true)
		l.Start()
		time.Sleep(time.Minute)
		if s := l.Stats(); s.Size != 0 || s.Retries < 10 || s.Retries > 50 || s.Backlog.Entries != 40 {
			t.Errorf("%+v", s)
		}
		down.down.Store(false)
		if _, err := l.Wait(t.Context(), testEvent(39).Workflow, "id-39"); err != nil {
			t.Error(err)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
		mustVerify(t, l)
	})
}

type failing struct {
	store.Store
	down atomic.Bool
}

func (s *failing) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if s.down.Load() {
		return 0, errors.New("no space left")
	}
	return s.Store.Commit(ctx, batch...)
}

// TestSigner: a temporary failure blocks later events only; a refused event goes into the
// tree unsigned.
func TestSigner(t *testing.T) {
	mem := memory.New(memory.Options{})
	o := testOptions(mem)
	away := errors.New("the key is away")
	var sign func(Event) ([]byte, error)
	o.Sign = func(_ context.Context, e Event) ([]byte, error) { return sign(e) }
	l := mustOpen(t, o)
	for n := range 6 {
		e := testEvent(n)
		e.Unsigned = n != 0
		mustAppend(t, l, e)
	}
	calls := map[string]int{}
	sign = func(e Event) ([]byte, error) {
		calls[e.ID]++
		if e.ID == "id-3" {
			return nil, away
		}
		return []byte("signed " + e.ID), nil
	}
	if err := tryDrain(l); !errors.Is(err, away) {
		t.Errorf("the failure is %v", err)
	}
	if l.Head().Size != 3 || calls["id-4"] != 0 {
		t.Errorf("%d entries, calls %v", l.Head().Size, calls)
	}
	sign = func(e Event) ([]byte, error) {
		switch e.ID {
		case "id-3":
			return nil, fmt.Errorf("no such claim: %w", ErrRefused)
		case "id-4":
			return make([]byte, MaxPayload+1), nil
		}
		return []byte("signed " + e.ID), nil
	}
	drain(t, l)
	for n, want := range []string{"payload-0", "signed id-1", "signed id-2", "payload-3", "payload-4", "signed id-5"} {
		e, err := l.Entry(t.Context(), int64(n))
		if err != nil || string(e.Payload) != want || e.Unsigned != (n == 3 || n == 4) {
			t.Errorf("entry %d: %q, unsigned %v, %v", n, e.Payload, e.Unsigned, err)
		}
	}
	if got := l.Stats().Refused; got != 2 {
		t.Errorf("%d refused", got)
	}
	mustVerify(t, l)

	o.Sign = nil
	if _, err := mustOpen(t, o).Record(Event{ID: "u", Payload: []byte("p"), Unsigned: true}); !errors.Is(err, ErrInvalid) {
		t.Errorf("unsigned without a signer: %v", err)
	}
}

// TestDamagedWaiting: events that do not open stay in the outbox and do not block later ones.
func TestDamagedWaiting(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	const damaged = 2*maxMoved + 3
	appendEvents(t, l, 0, damaged+5)
	n := 0
	for _, e := range contents(t, mem) {
		if e.Key[1] == spaceOutbox && n < damaged {
			n++
			e.Value[len(e.Value)-1] ^= 1
			if _, err := mem.Commit(t.Context(), store.Write{Key: e.Key, Value: e.Value}); err != nil {
				t.Fatal(err)
			}
		}
	}
	drain(t, l)
	if s := l.Stats(); s.Size != 5 || s.Damaged != damaged || s.Backlog.Entries != 0 {
		t.Errorf("%+v", s)
	}
	r, err := l.Verify(t.Context())
	if err != nil || r.Count != damaged || r.Waiting != damaged {
		t.Errorf("%d faults, %d waiting: %v", r.Count, r.Waiting, err)
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
	drain(t, l)
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
	drain(t, l)
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

// TestAbandonedTickets: tickets without a Done cost bounded memory, and the next scan finds
// their events.
func TestAbandonedTickets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := memory.New(memory.Options{})
		l := mustOpen(t, testOptions(mem))
		l.Start()
		p := must(l.Record(testEvent(0)))(t)
		for range maxOpen + 10 {
			if _, _, err := l.queue.open(make([]hashedEvent, 1), false); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(l.queue.tickets); n != maxOpen {
			t.Errorf("%d tickets are looked after", n)
		}
		if _, err := mem.Commit(t.Context(), p.Writes()...); err != nil {
			t.Fatal(err)
		}
		if e, err := l.Wait(t.Context(), testEvent(0).Workflow, "id-0"); err != nil || e.Index != 0 {
			t.Errorf("index %d: %v", e.Index, err)
		}
		if err := p.Done(nil); err != nil { // late, and of no consequence
			t.Error(err)
		}
		if b := l.queue.backlog(); b.Entries != 0 {
			t.Errorf("%+v", b)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestVerifyInUse: concurrent events and prunings cause no false faults, and every export
// verifies.
func TestVerifyInUse(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustStart(t, testOptions(mem))
	appendEvents(t, l, 0, tileWidth)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(done)
		for n := tileWidth; n < 4*tileWidth; n++ {
			e := testEvent(n)
			e.Unsigned = n%2 == 0
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

// TestBacklogOfOthers: events of an earlier process count until they are moved.
func TestBacklogOfOthers(t *testing.T) {
	mem := memory.New(memory.Options{})
	appendEvents(t, mustOpen(t, testOptions(mem)), 0, 2*maxMoved+5)
	l := mustOpen(t, testOptions(mem))
	m := sequencer{Log: l, rescan: true}
	for _, want := range []int{2*maxMoved + 5, maxMoved + 5, 5, 0} {
		if b := l.queue.backlog(); b.Entries != want {
			t.Errorf("%d wait instead of %d", b.Entries, want)
		}
		if _, err := m.move(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMovedByOthers: events that another process moved are not waited for; those that landed
// during the scan are.
func TestMovedByOthers(t *testing.T) {
	mem := memory.New(memory.Options{})
	a, b := mustOpen(t, testOptions(mem)), mustOpen(t, testOptions(mem))
	appendEvents(t, a, 0, 3)
	drain(t, b)
	if got := a.queue.backlog().Entries; got != 3 {
		t.Errorf("%d wait as far as a can know, instead of 3", got)
	}
	scan := a.queue.beginScan()
	appendEvents(t, a, 3, 4) // the scan that began before need not have seen it
	a.queue.endScan(scan, nil, 0)
	if got := a.queue.backlog().Entries; got != 1 {
		t.Errorf("%d wait instead of 1", got)
	}
}

// otherHead is a store that gives other bytes as a head, under the version of the true one.
type otherHead struct {
	store.Store
	key   []byte
	bytes atomic.Pointer[[]byte] // nil is the true head
}

func (s *otherHead) Get(ctx context.Context, key []byte) (store.Entry, error) {
	e, err := s.Store.Get(ctx, key)
	if other := s.bytes.Load(); other != nil && bytes.Equal(key, s.key) {
		e.Value = *other
	}
	return e, err
}

// countedKeys counts the signatures that are verified.
type countedKeys struct {
	note.Verifiers
	verified *atomic.Int64
}

type countedKey struct {
	note.Verifier
	verified *atomic.Int64
}

func (k countedKeys) Verifier(name string, hash uint32) (note.Verifier, error) {
	v, err := k.Verifiers.Verifier(name, hash)
	return countedKey{v, k.verified}, err
}

func (k countedKey) Verify(msg, sig []byte) bool {
	k.verified.Add(1)
	return k.Verifier.Verify(msg, sig)
}

// TestSweepsOfTheSameHead: a log to which nothing comes verifies no signature again, and its next sweep finds a head
// that is another one, whatever its version.
func TestSweepsOfTheSameHead(t *testing.T) {
	for name, other := range map[string]func(older, head []byte) []byte{
		"an altered head": func(_, head []byte) []byte {
			altered := bytes.Clone(head)
			altered[len(altered)-10] ^= 1
			return altered
		},
		"an older head": func(older, _ []byte) []byte { return older },
		"an empty head": func(_, _ []byte) []byte { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := &otherHead{Store: memory.New(memory.Options{})}
				o := testOptions(st)
				verified := new(atomic.Int64)
				o.HeadKeys = countedKeys{o.HeadKeys, verified}
				l := mustStart(t, o)
				st.key = l.headKey()
				appendEvents(t, l, 0, 3)
				synctest.Wait()
				older := l.Head().Note
				appendEvents(t, l, 3, 5)
				time.Sleep(2 * sweepEvery)
				if got := l.Head().Size; got != 5 {
					t.Fatalf("%d events are in the tree", got)
				}
				verified.Store(0)
				time.Sleep(time.Hour)
				if got := verified.Load(); got != 0 {
					t.Errorf("%d signatures verified in an hour in which nothing came", got)
				}
				head := other(older, l.Head().Note)
				st.bytes.Store(&head)
				time.Sleep(2 * sweepEvery)
				if err := l.Admit(t.Context()); !errors.Is(err, ErrTampered) {
					t.Errorf("it goes on: %v", err)
				}
			})
		})
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
		drain(t, l)
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
