package badger

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// held stops the committer inside a commit, so that the commits that follow form one group.
type held struct {
	s       *Store
	d       *faultyDisk
	entered chan struct{}
	release func()
	first   sync.WaitGroup
}

func hold(t *testing.T, s *Store, d *faultyDisk) *held {
	t.Helper()
	released := make(chan struct{})
	h := &held{s: s, d: d, entered: make(chan struct{}), release: sync.OnceFunc(func() { close(released) })}
	t.Cleanup(h.release) // before the store is closed, where the test fails
	d.set(func() {
		d.onCommit = func() error {
			close(h.entered)
			<-released
			return nil
		}
	})
	h.first.Go(func() {
		if _, err := s.Commit(t.Context(), put("held", "1")); err != nil {
			t.Errorf("the commit that is held: %v", err)
		}
	})
	wait(t, h.entered)
	return h
}

// queue starts a commit and returns when it is queued.
func (h *held) queue(t *testing.T, results []error, i int, all *sync.WaitGroup, writes ...store.Write) {
	before := h.s.queue.length()
	all.Go(func() { _, results[i] = h.s.Commit(t.Context(), writes...) })
	for h.s.queue.length() == before {
		runtime.Gosched() // it is on its way; nothing tells from outside
	}
}

// let continues the held commit; onNext is called for the group.
func (h *held) let(onNext func() error) {
	h.d.set(func() { h.d.onCommit = onNext })
	h.release()
	h.first.Wait()
}

func TestOneSyncForAGroup(t *testing.T) {
	s, d := newFaulty(t, Options{})
	h := hold(t, s, d)
	const n = 20
	var all sync.WaitGroup
	results := make([]error, n)
	for i := range n {
		h.queue(t, results, i, &all, insert(fmt.Sprintf("key-%d", i), "1"))
	}
	h.let(nil)
	all.Wait()
	if err := errors.Join(results...); err != nil {
		t.Fatal(err)
	}
	if commits := d.count("commit"); commits != 2 {
		t.Errorf("%d Badger transactions for the held batch and %d that came meanwhile, want 2", commits, n)
	}
	for i := range n {
		wantValue(t, s, fmt.Sprintf("key-%d", i), "1")
	}
}

// P2: Close lets the commits that wait become durable, and refuses later ones.
func TestCloseAwaitsCommits(t *testing.T) {
	s, d := newFaulty(t, Options{})
	h := hold(t, s, d)
	const n = 3
	var all sync.WaitGroup
	results := make([]error, n)
	for i := range n {
		h.queue(t, results, i, &all, put(fmt.Sprintf("key-%d", i), "1"))
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	for s.queue.length() >= 0 {
		runtime.Gosched()
	}
	_, err := s.Commit(t.Context(), put("late", "1"))
	wantErr(t, "a commit after the close", err, store.ErrClosed)
	select {
	case err := <-closed:
		t.Fatalf("closed beside a commit: %v", err)
	default:
	}
	h.let(nil)
	all.Wait()
	if err := errors.Join(append(results, <-closed)...); err != nil {
		t.Fatal(err)
	}
	again := reopenWith(t, s.dir, Options{}, osDisk{})
	wantValue(t, again, "held", "1")
	for i := range n {
		wantValue(t, again, fmt.Sprintf("key-%d", i), "1")
	}
}

func TestBatchesOfAGroupSeeEachOther(t *testing.T) {
	s, d := newFaulty(t, Options{})
	old := mustCommit(t, s, put("b", "old"))
	h := hold(t, s, d)
	var all sync.WaitGroup
	results := make([]error, 8)
	h.queue(t, results, 0, &all, insert("a", "first"), put("b", "new"))
	h.queue(t, results, 1, &all, insert("a", "second"))
	h.queue(t, results, 2, &all, store.Write{Key: []byte("b"), Value: []byte("x"), If: store.VersionIs(old)})
	h.queue(t, results, 3, &all, store.Write{Key: []byte("a"), Delete: true})
	h.queue(t, results, 4, &all, insert("a", "third"))
	h.queue(t, results, 5, &all, insert("a", "fourth"))
	h.queue(t, results, 6, &all, put("c", "1"), store.Write{Key: []byte("a"), If: store.Absent(), Check: true})
	h.queue(t, results, 7, &all, insert("c", "2"), store.Write{Key: []byte("d"), If: store.Absent(), Check: true})
	h.let(nil)
	all.Wait()
	for i, won := range []bool{true, false, false, true, true, false, false, true} {
		var lost *store.Conflict
		switch {
		case won && results[i] != nil:
			t.Errorf("batch %d: %v, want it to land", i, results[i])
		case !won && !errors.As(results[i], &lost):
			t.Errorf("batch %d: %v, want a conflict", i, results[i])
		}
	}
	var lost *store.Conflict
	if errors.As(results[1], &lost) && (lost.Found == nil || string(lost.Found.Value) != "first") {
		t.Errorf("batch 1 was shown %+v, want what the batch before it wrote", lost.Found)
	}
	if errors.As(results[5], &lost) && (lost.Found == nil || string(lost.Found.Value) != "third") {
		t.Errorf("batch 5 was shown %+v, want what the batch before it wrote", lost.Found)
	}
	wantValue(t, s, "a", "third")
	wantValue(t, s, "b", "new")
	if commits := d.count("commit"); commits != 3 {
		t.Errorf("%d Badger transactions, want 3", commits)
	}
}

func TestLargeGroupIsSplit(t *testing.T) {
	s, d := newFaulty(t, Options{})
	h := hold(t, s, d)
	const n = 12
	var all sync.WaitGroup
	results := make([]error, n)
	for i := range n {
		var writes []store.Write
		for j := range 20 {
			writes = append(writes, store.Write{Key: fmt.Appendf(nil, "%02d-%02d", i, j), Value: make([]byte, store.MaxValue)})
		}
		h.queue(t, results, i, &all, writes...)
	}
	h.let(nil)
	all.Wait()
	if err := errors.Join(results...); err != nil {
		t.Fatal(err)
	}
	if commits := d.count("commit"); commits < 3 {
		t.Errorf("%d Badger transactions for 15 MiB, which cannot fit", commits)
	}
	seen := 0
	for _, err := range s.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		seen++
	}
	if want := n*20 + 1; seen != want {
		t.Errorf("%d entries, want %d", seen, want)
	}
}

// P2: nothing is visible before its sync has returned, and reads do not wait for it.
func TestReadsSeeOnlyWhatIsDurable(t *testing.T) {
	s, d := newFaulty(t, Options{})
	mustCommit(t, s, put("a", "0"))
	changed, cancel := s.Watch([]byte("a"))
	defer cancel()
	entered, release := make(chan struct{}), make(chan struct{})
	d.set(func() {
		d.landed = func() error { // Badger has it, but the sync has not returned
			close(entered)
			<-release
			return nil
		}
	})
	answered := make(chan error, 1)
	go func() {
		_, err := s.Commit(t.Context(), put("a", "1"))
		answered <- err
	}()
	goOn := sync.OnceFunc(func() { close(release) })
	t.Cleanup(goOn) // before the store is closed
	wait(t, entered)
	wantValue(t, s, "a", "0")
	for e, err := range s.Scan(t.Context(), store.Range{}) {
		if err != nil || string(e.Value) != "0" {
			t.Errorf("scan beside a commit: %q, %v", e.Value, err)
		}
	}
	select {
	case <-changed:
		t.Error("woken by a commit that is not durable")
	case <-answered:
		t.Error("answered before the sync returned")
	default:
	}
	goOn()
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	wait(t, changed)
	wantValue(t, s, "a", "1")
}

// The batch may be on disk: the only answer is ErrUnknown.
func TestFailedSyncOfWhatWasWritten(t *testing.T) {
	s, d := newFaulty(t, Options{})
	mustCommit(t, s, put("a", "0"))
	d.set(func() { d.landed = func() error { return errDisk } })
	_, err := s.Commit(t.Context(), put("a", "1"))
	wantErr(t, "commit", err, store.ErrUnknown)
	_, err = s.Get(t.Context(), []byte("a"))
	wantErr(t, "get", err, store.ErrUnhealthy)
	dir := s.dir
	must(t, s.Close())
	again := reopenWith(t, dir, Options{}, osDisk{})
	wantValue(t, again, "a", "1") // known again only now
}

// P4, P6: after a failed sync the store answers ErrUnknown, then ErrUnhealthy.
func TestFailedSync(t *testing.T) {
	s, d := newFaulty(t, Options{})
	mustCommit(t, s, put("there", "1"))
	h := hold(t, s, d)
	var all sync.WaitGroup
	results := make([]error, 4)
	h.queue(t, results, 0, &all, insert("a", "1"))
	h.queue(t, results, 1, &all, insert("a", "2"))
	h.queue(t, results, 2, &all, insert("there", "2"))
	h.queue(t, results, 3, &all, put("b", "1"))
	watched, cancel := s.Watch([]byte("elsewhere"))
	defer cancel()
	h.let(func() error { return errDisk })
	all.Wait()
	wantErr(t, "a batch of the group", results[0], store.ErrUnknown)
	wantErr(t, "the loser to a batch of the group", results[1], store.ErrUnknown)
	wantErr(t, "another batch of the group", results[3], store.ErrUnknown)
	var lost *store.Conflict
	if !errors.As(results[2], &lost) {
		t.Errorf("the loser to a durable entry: %v, want a conflict", results[2])
	}

	d.reset()
	wait(t, watched)
	_, err := s.Get(t.Context(), []byte("there"))
	wantErr(t, "get", err, store.ErrUnhealthy)
	_, err = s.Commit(t.Context(), put("c", "1"))
	wantErr(t, "commit", err, store.ErrUnhealthy)
	_, err = s.Now(t.Context())
	wantErr(t, "now", err, store.ErrUnhealthy)
	for _, scanErr := range s.Scan(t.Context(), store.Range{}) {
		err = scanErr
	}
	wantErr(t, "scan", err, store.ErrUnhealthy)
	wantErr(t, "cause", s.cause(), errDisk)
	if n := d.count("commit"); n != 0 {
		t.Errorf("%d more commits went to the file whose sync had failed", n)
	}

	dir := s.dir
	if err := s.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	again := reopenWith(t, dir, Options{}, osDisk{})
	wantValue(t, again, "there", "1")
	wantValue(t, again, "held", "1")
	// The injected error replaced the write, so nothing was written.
	for _, key := range []string{"a", "b", "c"} {
		_, err := again.Get(t.Context(), []byte(key))
		wantErr(t, "get "+key, err, store.ErrNotFound)
	}
}

// P4: below MinFree nothing new begins. P6: running executions are still completed.
func TestFullDisk(t *testing.T) {
	s, d := newFaulty(t, Options{MinFree: 1000})
	look := func(left uint64) {
		d.set(func() { d.left = left })
		s.checkSpace()
	}
	replace := func(key, value string, v store.Version) store.Write {
		return store.Write{Key: []byte(key), Value: []byte(value), If: store.VersionIs(v)}
	}
	body := store.Write{Key: []byte("body"), Value: []byte("b"), Expires: time.Now().Add(time.Hour), Bulk: true}
	running := mustCommit(t, s, insert("a", "running"))
	refused := uint64(0)
	refuse := func(what string, writes ...store.Write) {
		t.Helper()
		_, err := s.Commit(t.Context(), writes...)
		wantErr(t, what, err, errFull)
		if refused++; s.Stats().Full != refused {
			t.Errorf("%s: %d refusals counted, want %d", what, s.Stats().Full, refused)
		}
	}

	look(999)
	refuse("a claim", insert("b", "1"))
	refuse("a write without a condition", put("b", "1"))
	refuse("a claim with a conditional extra write", insert("b", "1"), replace("a", "other", running))
	refuse("a bulk value", body)
	refuse("an outcome with a bulk value", replace("a", "done", running), body)
	wantValue(t, s, "a", "running")

	look(250)
	done := mustCommit(t, s, replace("a", "done", running), put("index", ""), insert("extra", "1"))
	wantValue(t, s, "a", "done")
	wantValue(t, s, "extra", "1")

	look(249)
	refuse("an outcome below the floor", replace("a", "again", done))
	refuse("a release below the floor", store.Write{Key: []byte("a"), If: store.VersionIs(done), Delete: true})
	wantValue(t, s, "a", "done")

	look(999) // a release, from the floor up
	mustCommit(t, s, store.Write{Key: []byte("a"), If: store.VersionIs(done), Delete: true})
	refuse("a claim of what was released", insert("a", "1"))

	look(1000)
	mustCommit(t, s, insert("a", "1"), body)
}
