package checkpoint_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

var ctx = context.Background()

const ttl = 24 * time.Hour

// rig is a checkpoint store over a store that outlives it and can be made to fail.
type rig struct {
	*checkpoint.Store
	t    *testing.T
	st   *failing
	ring *seal.Ring
}

type failing struct {
	store.Store
	fail  atomic.Pointer[func(batch []store.Write) error]
	get   atomic.Pointer[func(key []byte) error]
	scans atomic.Int64
}

func (f *failing) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if get := f.get.Load(); get != nil {
		if err := (*get)(key); err != nil {
			return store.Entry{}, err
		}
	}
	return f.Store.Get(ctx, key)
}

func (f *failing) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if fail := f.fail.Load(); fail != nil {
		if err := (*fail)(batch); err != nil {
			return 0, err
		}
	}
	return f.Store.Commit(ctx, batch...)
}

func (f *failing) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	f.scans.Add(1)
	if get := f.get.Load(); get != nil {
		if err := (*get)(r.From); err != nil {
			return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, err) }
		}
	}
	return f.Store.Scan(ctx, r)
}

var errDisk = errors.New("no space left on device")

func newRig(t *testing.T) *rig { return rigOver(t, memory.New(memory.Options{})) }

func rigOver(t *testing.T, st store.Store) *rig {
	r := &rig{t: t, st: &failing{Store: st}, ring: seal.Generate()}
	r.restart()
	return r
}

// restart begins another life on the same store.
func (r *rig) restart() { r.Store = checkpoint.New(r.st, r.ring) }

// onStores runs a test on every store.
func onStores(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Run("memory", func(t *testing.T) { test(t, newRig(t)) })
	t.Run("badger", func(t *testing.T) {
		st, err := badger.Open(t.TempDir(), badger.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := st.Close(); err != nil {
				t.Error(err)
			}
		})
		test(t, rigOver(t, st))
	})
}

func full(id string, body int) checkpoint.Snapshot {
	message := checkpoint.Message{
		Header:      map[string][]string{"X-One": {"1"}, "X-Two": {"", "2"}, "X-None": nil},
		ContentType: "application/json", Body: bytes.Repeat([]byte("b"), body),
	}
	return checkpoint.Snapshot{
		ID: id, Workflow: "w-1", Caller: execution.CallerHash{1}, Execution: execution.Key{2}, Action: "update", Upstream: "up:1",
		Way:     checkpoint.Restore,
		Request: checkpoint.Request{Method: "PUT", Host: "h", Path: "/a%20b", Query: "q=1", Message: message},
		Image:   &checkpoint.Image{Exists: true, Status: 200, ETag: `"v1"`, Message: message},
	}
}

func result(body int) checkpoint.Result {
	image := full("x", body).Image
	return checkpoint.Result{Status: 201, Answer: image.Message, Image: image}
}

var secret = map[string][]string{"Authorization": {"Bearer sesame"}, "Cookie": {"a=1", "b=2"}}

func (r *rig) prepare(s checkpoint.Snapshot, t checkpoint.Terms) *checkpoint.Pending {
	r.t.Helper()
	if t.TTL == 0 {
		t.TTL = ttl
	}
	p, err := r.Prepare(ctx, s, secret, t)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func (r *rig) commit(b *store.Batch) error { return b.Commit(ctx, r.st) }

func (r *rig) release(p *checkpoint.Pending) {
	r.t.Helper()
	if err := r.commit(r.Release(p.Handle())); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) landed(p *checkpoint.Pending) *checkpoint.Pending {
	r.t.Helper()
	if err := r.commit(p.Batch); err != nil {
		r.t.Fatal(err)
	}
	return p
}

// kept records a checkpoint that counts in all its scopes.
func (r *rig) kept(s checkpoint.Snapshot) *checkpoint.Pending {
	r.t.Helper()
	many := checkpoint.Quota{Count: 1_000_000}
	return r.landed(r.prepare(s, checkpoint.Terms{Workflow: many, Caller: many}))
}

func (r *rig) record(h checkpoint.Handle, res checkpoint.Result) *checkpoint.Pending {
	r.t.Helper()
	p, err := r.Record(ctx, h, res)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.landed(p)
}

func (r *rig) open(id string, want checkpoint.Want) *checkpoint.Checkpoint {
	r.t.Helper()
	c, err := r.Open(ctx, id, want)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// refuses wants Open to fail with want.
func (r *rig) refuses(id string, w checkpoint.Want, want error) {
	r.t.Helper()
	if c, err := r.Open(ctx, id, w); !errors.Is(err, want) || c != nil {
		r.t.Errorf("opened %q: %v, want %v", id, err, want)
	}
}

// count counts the living entries under a prefix.
func (r *rig) count(prefix string) int {
	r.t.Helper()
	n := 0
	for _, err := range r.st.Store.Scan(ctx, store.Prefix([]byte(prefix))) {
		if err != nil {
			r.t.Fatal(err)
		}
		n++
	}
	return n
}

func number(prefix string, i int) string { return fmt.Sprint(prefix, "-", i) }

// cascade 4.2.2, 4.2.3: what was recorded is read back whole, against the hashes that
// were given, also by another life of the process.
func TestCheckpointIsReadBack(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		for _, size := range []int{0, 10, 3000, 300 << 10, 1 << 20} {
			id := number("c", size)
			p := r.kept(full(id, size))
			if !p.Snapshot().Reversible() {
				t.Fatalf("%d bytes: %+v", size, p.Snapshot().Reason)
			}
			if c := r.open(id, checkpoint.Want{Sum: p.Sum()}); c.Result != nil || c.Mark.State != checkpoint.Active {
				t.Errorf("%d bytes: before its end %+v", size, c)
			}
			done := r.record(p.Handle(), result(size))
			r.restart()
			c := r.open(id, checkpoint.Want{Sum: p.Sum(), Result: done.Sum()})
			want := *p.Snapshot()
			if !c.Snapshot.Expires.Equal(want.Expires) || !c.Snapshot.Created.Equal(want.Created) {
				t.Errorf("from %v to %v", c.Snapshot.Created, c.Snapshot.Expires)
			}
			c.Snapshot.Created, c.Snapshot.Expires = want.Created, want.Expires
			if size == 0 {
				want.Request.Body, want.Image.Body, c.Result.Image.Body = nil, nil, nil
			}
			if !reflect.DeepEqual(*c.Snapshot, want) {
				t.Errorf("%d bytes: got %+v\nwant %+v", size, *c.Snapshot, want)
			}
			if res := c.Result; res.Status != 201 || len(res.Image.Body) != size || len(res.Answer.Body) != size {
				t.Errorf("%d bytes: result of %d", size, len(res.Image.Body))
			}
			if got, err := r.Credentials(ctx, id); err != nil || !reflect.DeepEqual(got, secret) {
				t.Errorf("credentials %v, %v", got, err)
			}
		}
	})
}

// P2: the claim and its checkpoint are one commit: either both are there or neither is.
func TestP2ClaimAndCheckpointAreOneCommit(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		g, _, err := execution.Open(ctx, r.st, r.ring)
		if err != nil {
			t.Fatal(err)
		}
		scope := execution.Scope{Caller: "ada", Guard: "default", Method: "PUT", Path: "/a", ID: "1"}
		call := &execution.Call{Key: g.Key(scope), Scope: scope, Deadline: time.Minute, KeepKey: time.Hour, Checkpoint: "c"}

		p := r.prepare(full("c", 400<<10), checkpoint.Terms{})
		fail := func([]store.Write) error { return errDisk }
		r.st.fail.Store(&fail)
		if _, err = g.Claim(ctx, call, execution.Finding{}, p.Batch); !errors.Is(err, errDisk) {
			t.Fatal(err)
		}
		r.st.fail.Store(nil)
		if n := r.count("k"); n != 0 {
			t.Errorf("%d entries of a claim that failed", n)
		}

		p = r.prepare(full("c", 400<<10), checkpoint.Terms{})
		e, err := g.Claim(ctx, call, execution.Finding{}, p.Batch)
		if err != nil {
			t.Fatal(err)
		}
		r.restart() // the process dies before the outcome: the checkpoint stands
		r.open("c", checkpoint.Want{Sum: p.Sum()})

		done, err := r.Record(ctx, p.Handle(), result(400<<10))
		if err != nil {
			t.Fatal(err)
		}
		err = e.Settle(ctx, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true}, done.Batch)
		if err != nil {
			t.Fatal(err)
		}
		if c := r.open("c", checkpoint.Want{Sum: p.Sum(), Result: done.Sum()}); len(c.Result.Image.Body) != 400<<10 {
			t.Errorf("a result of %d bytes", len(c.Result.Image.Body))
		}

		// Another call under the same checkpoint's id claims nothing.
		call.Scope.ID = "2"
		call.Key = g.Key(call.Scope)
		again := r.prepare(full("c", 1), checkpoint.Terms{})
		if _, err = g.Claim(ctx, call, execution.Finding{}, again.Batch); !errors.Is(err, checkpoint.ErrTaken) {
			t.Errorf("claimed with a checkpoint's id that is taken: %v", err)
		}
	})
}

// P1: an outcome is not lost because a large result does not fit: the store that is
// nearly full takes the outcome, and the result says what is missing.
func TestP1OutcomeIsNotLostForALargeResult(t *testing.T) {
	r := newRig(t)
	p := r.kept(full("c", 10))
	fail := func(batch []store.Write) error {
		for _, w := range batch {
			if w.Bulk {
				return store.ErrFull
			}
		}
		return nil
	}
	r.st.fail.Store(&fail)
	done := r.record(p.Handle(), result(100<<10))
	c := r.open("c", checkpoint.Want{Sum: p.Sum(), Result: done.Sum()})
	if c.Result.Reason != checkpoint.ReasonUnkept || c.Result.Image != nil || c.Result.Status != 201 {
		t.Errorf("%+v", c.Result)
	}
}

// C-4.2.1-f: what is too large for an undo is said before the call leaves, and after it
// where it shows only then.
func TestTooLargeIsIrreversible(t *testing.T) {
	long := full("d", 1)
	long.Image.Header = map[string][]string{"X": {strings.Repeat("x", 40<<10)}}
	for name, s := range map[string]checkpoint.Snapshot{"body": full("a", 1<<20+1), "header": long} {
		r := newRig(t)
		p := r.kept(s)
		got := r.open(s.ID, checkpoint.Want{Sum: p.Sum()}).Snapshot
		if got.Way != checkpoint.Irreversible || got.Reason != checkpoint.ReasonTooLarge || got.Image != nil || got.Request.Body != nil {
			t.Errorf("%s: %+v", name, got)
		}
		if _, err := r.Credentials(ctx, s.ID); !errors.Is(err, checkpoint.ErrUnknown) {
			t.Errorf("%s: credentials that nobody can use: %v", name, err)
		}
	}
	r := newRig(t)
	p := r.kept(full("c", 1))
	r.record(p.Handle(), result(1<<20+1))
	if c := r.open("c", checkpoint.Want{Sum: p.Sum()}); c.Result.Reason != checkpoint.ReasonTooLarge || c.Result.Image != nil {
		t.Errorf("%+v", c.Result)
	}
}

// C-6.3-f, C-4.2.3-d: a checkpoint stands for its ttl, not longer, and is then purged;
// credentials are gone at the ttl. A rollback that began in time may finish.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p, q := r.kept(full("a", 300<<10)), r.kept(full("b", 1))
		if err := r.Advance(ctx, "b", checkpoint.Mark{}, checkpoint.Step{To: checkpoint.Undoing, Rollback: "r"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(ttl - 1)
		want := checkpoint.Want{Sum: p.Sum(), Expires: p.Snapshot().Expires}
		r.open("a", want)
		if _, err := r.Credentials(ctx, "a"); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Nanosecond)
		r.refuses("a", want, checkpoint.ErrExpired)
		r.refuses("a", checkpoint.Want{Sum: p.Sum()}, checkpoint.ErrExpired)
		if _, err := r.Credentials(ctx, "a"); !errors.Is(err, checkpoint.ErrUnknown) {
			t.Errorf("credentials after the ttl: %v", err)
		}
		r.open("b", checkpoint.Want{Sum: q.Sum(), Rollback: "r"})
		r.refuses("b", checkpoint.Want{Sum: q.Sum(), Rollback: "another"}, checkpoint.ErrExpired)

		time.Sleep(ttl/2 + time.Minute)
		for _, kind := range []string{"kb", "ka", "kc", "kp", "kw", "ko"} {
			if n := r.count(kind); n != 0 {
				t.Errorf("%d entries %q are left", n, kind)
			}
		}
		r.refuses("a", want, checkpoint.ErrExpired)
		r.refuses("a", checkpoint.Want{Sum: p.Sum()}, checkpoint.ErrUnknown)
		r.refuses("never", checkpoint.Want{}, checkpoint.ErrUnknown)
		if m, err := r.Mark(ctx, "b"); err != nil || m.State != checkpoint.Undoing {
			t.Errorf("the mark does not outlive the snapshot: %+v, %v", m, err)
		}
	})
}

// A call that never ran leaves nothing to undo, and says so.
func TestReleased(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		p := r.kept(full("c", 300<<10))
		r.release(p)
		r.refuses("c", checkpoint.Want{Sum: p.Sum()}, checkpoint.ErrReleased)
		for _, kind := range []string{"kb", "kc", "kp", "kw", "ko"} {
			if n := r.count(kind); n != 0 {
				t.Errorf("%d entries %q are left", n, kind)
			}
		}
	})
}

// C-4.2.3-c: every changed byte of what is stored is found, and nothing else is read.
func TestTamperedIsRefused(t *testing.T) {
	r := newRig(t)
	p := r.kept(full("c", 1))
	done := r.record(p.Handle(), result(1))
	want := checkpoint.Want{Sum: p.Sum(), Result: done.Sum()}
	r.open("c", want)
	if err := r.Advance(ctx, "c", checkpoint.Mark{}, checkpoint.Step{To: checkpoint.Undoing, Rollback: "r"}); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"kb", "ka", "ku"} {
		for entry, err := range r.st.Store.Scan(ctx, store.Prefix([]byte(kind))) {
			if err != nil {
				t.Fatal(err)
			}
			put := func(value []byte) {
				if _, err := r.st.Commit(ctx, store.Write{Key: entry.Key, Value: value, Expires: entry.Expires}); err != nil {
					t.Fatal(err)
				}
			}
			for i := range entry.Value {
				value := bytes.Clone(entry.Value)
				value[i] ^= 1
				put(value)
				r.refuses("c", want, checkpoint.ErrTampered)
			}
			for i := range entry.Value {
				put(entry.Value[:i])
				r.refuses("c", want, checkpoint.ErrTampered)
			}
			put(entry.Value)
			r.open("c", want)
		}
	}
}

// C-4.2.3-c: a whole snapshot in the place of another is found, and so is one that was
// sealed anew by who has the keys: the token's hash decides.
func TestAnotherSnapshotIsRefused(t *testing.T) {
	r := newRig(t)
	p, q := r.kept(full("a", 300<<10)), r.kept(full("b", 300<<10))
	for _, want := range []checkpoint.Want{{Sum: q.Sum()}, {}, {Sum: p.Sum(), Result: q.Sum()}} {
		r.refuses("a", want, checkpoint.ErrTampered)
	}
	r.record(p.Handle(), result(1))
	r.refuses("a", checkpoint.Want{Sum: p.Sum(), Result: p.Sum()}, checkpoint.ErrTampered)

	var pieces []store.Entry
	for entry, err := range r.st.Store.Scan(ctx, store.Prefix([]byte("kp"))) {
		if err != nil {
			t.Fatal(err)
		}
		pieces = append(pieces, entry)
	}
	swapped := store.Write{Key: pieces[0].Key, Value: pieces[1].Value, Expires: pieces[0].Expires, Bulk: true}
	for _, w := range []store.Write{swapped, {Key: pieces[0].Key, Delete: true}} {
		if _, err := r.st.Commit(ctx, w); err != nil {
			t.Fatal(err)
		}
		_, errA := r.Open(ctx, "a", checkpoint.Want{Sum: p.Sum()})
		_, errB := r.Open(ctx, "b", checkpoint.Want{Sum: q.Sum()})
		if !errors.Is(errors.Join(errA, errB), checkpoint.ErrTampered) {
			t.Errorf("a piece was changed: %v, %v", errA, errB)
		}
	}
}

// P8: nothing of the call can be read in the store.
func TestP8StoreShowsNothing(t *testing.T) {
	r := newRig(t)
	s := full("checkpoint-id", 0)
	s.Workflow, s.Action, s.Upstream = "workflow-id", "action-name", "upstream:80"
	s.Request.Body = bytes.Repeat([]byte("the body "), 40_000)
	r.record(r.kept(s).Handle(), result(10))
	if err := r.Advance(ctx, s.ID, checkpoint.Mark{}, checkpoint.Step{To: checkpoint.Undoing, Rollback: "rollback-id"}); err != nil {
		t.Fatal(err)
	}
	for entry, err := range r.st.Store.Scan(ctx, store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		all := string(entry.Key) + string(entry.Value)
		for _, word := range []string{"checkpoint-id", "workflow-id", "action-name", "upstream:80", "the body", "sesame", "rollback-id", "X-One"} {
			if strings.Contains(all, word) {
				t.Errorf("%q stands under %q", word, entry.Key[:2])
			}
		}
	}
}

func TestWhatPrepareRefuses(t *testing.T) {
	r := newRig(t)
	change := func(f func(*checkpoint.Snapshot)) checkpoint.Snapshot {
		s := full("c", 1)
		f(&s)
		return s
	}
	for name, s := range map[string]checkpoint.Snapshot{
		"no id":              change(func(s *checkpoint.Snapshot) { s.ID = "" }),
		"a long id":          change(func(s *checkpoint.Snapshot) { s.ID = strings.Repeat("i", 513) }),
		"a long workflow":    change(func(s *checkpoint.Snapshot) { s.Workflow = strings.Repeat("w", 5000) }),
		"no way":             change(func(s *checkpoint.Snapshot) { s.Way = 0 }),
		"no reason":          change(func(s *checkpoint.Snapshot) { s.Way = checkpoint.Irreversible }),
		"a reason too many":  change(func(s *checkpoint.Snapshot) { s.Reason = checkpoint.ReasonDeclared }),
		"a way out of range": change(func(s *checkpoint.Snapshot) { s.Way = checkpoint.Irreversible + 1 }),
	} {
		if _, err := r.Prepare(ctx, s, nil, checkpoint.Terms{TTL: ttl}); !errors.Is(err, checkpoint.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, terms := range []checkpoint.Terms{{}, {TTL: checkpoint.MaxTTL + 1}} {
		if _, err := r.Prepare(ctx, full("c", 1), nil, terms); !errors.Is(err, checkpoint.ErrInvalid) {
			t.Errorf("%+v: %v", terms, err)
		}
	}
	if _, err := r.Record(ctx, checkpoint.Handle{}, result(1)); !errors.Is(err, checkpoint.ErrInvalid) {
		t.Error(err)
	}
}

// A released checkpoint is never called tampered, also by who reads it at that moment.
func TestReleasedWhileItIsRead(t *testing.T) {
	r := newRig(t)
	p := r.kept(full("c", 300<<10))
	get := func(key []byte) error {
		if bytes.HasPrefix(key, []byte("kp")) {
			r.st.get.Store(nil)
			r.release(p)
		}
		return nil
	}
	r.st.get.Store(&get)
	r.refuses("c", checkpoint.Want{Sum: p.Sum()}, checkpoint.ErrReleased)
}

// A doubt that is settled later gets its result then, from what was opened.
func TestResultIsRecordedLater(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		p := r.kept(full("c", 1))
		r.restart()
		first := r.record(r.open("c", checkpoint.Want{Sum: p.Sum()}).Handle, result(300<<10))
		c := r.open("c", checkpoint.Want{Sum: p.Sum(), Result: first.Sum()})
		second := r.record(c.Handle, result(400<<10))
		r.refuses("c", checkpoint.Want{Sum: p.Sum(), Result: first.Sum()}, checkpoint.ErrTampered)
		c = r.open("c", checkpoint.Want{Sum: p.Sum(), Result: second.Sum()})
		if len(c.Result.Image.Body) != 400<<10 {
			t.Errorf("a result of %d bytes", len(c.Result.Image.Body))
		}
	})
}

// P4: what the store does not tell is not guessed.
func TestP4ReadingFailsClosed(t *testing.T) {
	for _, kind := range []string{"kb", "ka", "kp", "ku", "kc", "kn"} {
		r := newRig(t)
		p := r.kept(full("c", 300<<10))
		r.record(p.Handle(), result(300<<10))
		r.restart()
		get := func(key []byte) error {
			if bytes.HasPrefix(key, []byte(kind)) {
				return errDisk
			}
			return nil
		}
		r.st.get.Store(&get)
		var err error
		switch kind {
		case "kc":
			_, err = r.Credentials(ctx, "c")
		case "kn":
			_, err = r.Prepare(ctx, full("d", 1), nil, checkpoint.Terms{TTL: ttl, Rate: 9})
		default:
			_, err = r.Open(ctx, "c", checkpoint.Want{Sum: p.Sum()})
		}
		if !errors.Is(err, checkpoint.ErrStore) || !errors.Is(err, errDisk) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

// Who looks at a checkpoint is told of its call whatever became of it, without its token.
func TestPeek(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		if _, _, err := r.Peek(ctx, "none"); !errors.Is(err, checkpoint.ErrUnknown) {
			t.Errorf("unknown: %v", err)
		}
		for id, body := range map[string]int{"small": 10, "large": 700_000} {
			p := r.kept(full(id, body))
			call, end, err := r.Peek(ctx, id)
			if err != nil || call.Execution != (execution.Key{2}) || call.Request.Path != "/a%20b" || call.Way != checkpoint.Restore || call.Created.IsZero() || end != nil {
				t.Errorf("%s: %+v %+v %v", id, call, end, err)
			}
			r.release(p)
			call, end, err = r.Peek(ctx, id)
			if err != nil || call.Execution != (execution.Key{2}) || call.Action != "update" || call.Way != 0 || end != nil {
				t.Errorf("%s: released: %+v %+v %v", id, call, end, err)
			}
		}
	})
}

// ADR 0052: where undos go is listed without reading every checkpoint, and what stands of a
// place is counted without what never ran and what was undone.
func TestPlacesOfUndos(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		for i, place := range []string{"a", "a", "a", "b", "", "a"} {
			s := full(number("c", i), 10)
			if i == 5 { // nothing undoes it
				s.Way, s.Reason = checkpoint.Irreversible, checkpoint.ReasonDeclared
			}
			p := r.landed(r.prepare(s, checkpoint.Terms{TTL: time.Hour, Place: place}))
			switch i {
			case 1:
				if err := r.commit(r.Release(p.Handle())); err != nil {
					t.Fatal(err)
				}
			case 2:
				for _, to := range []checkpoint.State{checkpoint.Undoing, checkpoint.Undone} {
					mark, err := r.Mark(t.Context(), s.ID)
					if err == nil {
						err = r.Advance(t.Context(), s.ID, mark, checkpoint.Step{To: to, Rollback: "r"})
					}
					if err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		all, err := r.Places(t.Context())
		if err != nil || len(all) != 2 {
			t.Fatalf("%d places, want 2: %v", len(all), err)
		}
		reversible := map[string]int{}
		for _, place := range all {
			count, last, err := r.Reversible(t.Context(), place)
			if err != nil || !last.After(time.Now()) {
				t.Errorf("%v %v", last, err)
			}
			reversible[place.Sample.ID] = count
		}
		if reversible["c-3"] != 1 || reversible["c-0"]+reversible["c-2"] != 1 {
			t.Errorf("reversible checkpoints: %v", reversible)
		}
	})
}

// B-normative-k: of a call that never ran enough is left to cancel it, also where its
// snapshot was large or is irreversible.
func TestReleasedNamesItsCall(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		for id, body := range map[string]int{"small": 10, "large": 700_000} {
			s := full(id, body)
			s.Request.Path = strings.Repeat("/p", 300)
			p := r.kept(s)
			if _, err := r.Released(ctx, id); !errors.Is(err, checkpoint.ErrUnknown) {
				t.Errorf("%s: before: %v", id, err)
			}
			r.release(p)
			r.restart()
			got, err := r.Released(ctx, id)
			want := checkpoint.Released{
				Execution: execution.Key{2}, Caller: execution.CallerHash{1}, Workflow: "w-1", Action: "update",
				Method: "PUT", Host: "h", Path: s.Request.Path[:256],
			}
			if err != nil || got != want {
				t.Errorf("%s: %+v, %v", id, got, err)
			}
			for entry, err := range r.st.Scan(ctx, store.Range{}) {
				if err != nil || strings.Contains(string(entry.Key)+string(entry.Value), "update") {
					t.Errorf("P8: %q, %v", entry.Key, err)
				}
			}
		}
	})
}

// A value that the store reports as damaged is as one that does not open: it heals no more, and must
// not pass for a store that does not answer.
func TestDamagedIsTampered(t *testing.T) {
	r := newRig(t)
	p := r.landed(r.prepare(full("a", 100), checkpoint.Terms{Place: "here"}))
	end := r.record(p.Handle(), result(100))
	want := checkpoint.Want{Sum: p.Sum(), Result: end.Sum()}
	r.open("a", want)
	place, err := r.Places(ctx)
	if err != nil || len(place) != 1 {
		t.Fatalf("%d places, %v", len(place), err)
	}
	damaged := func(kinds string) {
		get := func(key []byte) error {
			if key[0] == 'k' && strings.IndexByte(kinds, key[1]) >= 0 {
				return fmt.Errorf("reading: %w", store.ErrDamaged)
			}
			return nil
		}
		r.st.get.Store(&get)
	}
	for _, kind := range []string{"b", "a", "u"} { // snapshot, result, mark
		damaged(kind)
		r.refuses("a", want, checkpoint.ErrTampered)
		if _, err := r.Open(ctx, "a", want); errors.Is(err, checkpoint.ErrStore) {
			t.Errorf("%s: %v", kind, err)
		}
		if n, _, err := r.Reversible(ctx, place[0]); err != nil || n != 1 {
			t.Errorf("%s: %d reversible, %v", kind, n, err)
		}
	}
	damaged("b")
	if first, err := r.First(ctx, "a"); err != nil || first != "a" {
		t.Errorf("the first attempt is %q, %v", first, err)
	}
	if _, err := r.Places(ctx); err != nil {
		t.Error(err)
	}
	if err := r.Advance(ctx, "a", checkpoint.Mark{}, checkpoint.Step{To: checkpoint.Undoing, Rollback: "r", Keep: time.Now()}); err != nil {
		t.Errorf("a mark beside a damaged snapshot: %v", err)
	}
	damaged("uc")
	if _, err := r.Mark(ctx, "a"); !errors.Is(err, checkpoint.ErrTampered) {
		t.Errorf("the mark: %v", err)
	}
	if _, err := r.Credentials(ctx, "a"); !errors.Is(err, checkpoint.ErrTampered) {
		t.Errorf("the credentials: %v", err)
	}
}
