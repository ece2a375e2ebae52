package checkpoint_test

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

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
			if c := r.open(id, checkpoint.Want{Sum: p.Sum()}); c.Result != nil || c.Mark.State != checkpoint.Standing {
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
		g, _, err := guard.Open(ctx, r.st, r.ring)
		if err != nil {
			t.Fatal(err)
		}
		scope := guard.Scope{Caller: "ada", Guard: "default", Method: "PUT", Path: "/a", ID: "1"}
		call := &guard.Call{Key: g.Key(scope), Scope: scope, Deadline: time.Minute, KeepKey: time.Hour, Checkpoint: "c"}

		p := r.prepare(full("c", 400<<10), checkpoint.Terms{})
		fail := func([]store.Write) error { return errDisk }
		r.st.fail.Store(&fail)
		_, err = g.Claim(ctx, call, guard.Finding{}, p.Writes()...)
		if err = p.Done(err); !errors.Is(err, errDisk) {
			t.Fatal(err)
		}
		r.st.fail.Store(nil)
		if n := r.count("k"); n != 0 {
			t.Errorf("%d entries of a claim that failed", n)
		}

		p = r.prepare(full("c", 400<<10), checkpoint.Terms{})
		e, err := g.Claim(ctx, call, guard.Finding{}, p.Writes()...)
		if err = p.Done(err); err != nil {
			t.Fatal(err)
		}
		r.restart() // the process dies before the outcome: the checkpoint stands
		r.open("c", checkpoint.Want{Sum: p.Sum()})

		done, err := r.Record(ctx, p.Handle(), result(400<<10), 0)
		if err != nil {
			t.Fatal(err)
		}
		err = e.Settle(ctx, guard.Outcome{Verdict: guard.Completed, Status: 200, Whole: true}, done.Writes()...)
		if err = done.Done(err); err != nil {
			t.Fatal(err)
		}
		if c := r.open("c", checkpoint.Want{Sum: p.Sum(), Result: done.Sum()}); len(c.Result.Image.Body) != 400<<10 {
			t.Errorf("a result of %d bytes", len(c.Result.Image.Body))
		}

		// Another call under the same checkpoint's id claims nothing.
		call.Scope.ID = "2"
		call.Key = g.Key(call.Scope)
		again := r.prepare(full("c", 1), checkpoint.Terms{})
		_, err = g.Claim(ctx, call, guard.Finding{}, again.Writes()...)
		if err = again.Done(err); !errors.Is(err, checkpoint.ErrTaken) {
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
	if p := r.landed(r.prepare(full("b", 100), checkpoint.Terms{MaxImage: 99})); p.Snapshot().Reversible() {
		t.Error("the configured size is not looked at")
	}
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
		r.landed(r.Release(p.Handle()))
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
	for _, terms := range []checkpoint.Terms{{}, {TTL: checkpoint.MaxTTL + 1}, {TTL: ttl, MaxImage: -1}, {TTL: ttl, MaxImage: checkpoint.MaxImage + 1}} {
		if _, err := r.Prepare(ctx, full("c", 1), nil, terms); !errors.Is(err, checkpoint.ErrInvalid) {
			t.Errorf("%+v: %v", terms, err)
		}
	}
	if _, err := r.Record(ctx, checkpoint.Handle{}, result(1), 0); !errors.Is(err, checkpoint.ErrInvalid) {
		t.Error(err)
	}
}

func TestWordsOfWays(t *testing.T) {
	for _, w := range []checkpoint.Way{checkpoint.Restore, checkpoint.Compensate, checkpoint.Delegate, checkpoint.Irreversible} {
		if got, err := checkpoint.ParseWay(w.String()); err != nil || got != w {
			t.Errorf("%v: %v, %v", w, got, err)
		}
	}
	if _, err := checkpoint.ParseWay("undo"); err == nil {
		t.Error("no error for a word that is no way")
	}
}

// A released checkpoint is never called tampered, also by who reads it at that moment.
func TestReleasedWhileItIsRead(t *testing.T) {
	r := newRig(t)
	p := r.kept(full("c", 300<<10))
	get := func(key []byte) error {
		if bytes.HasPrefix(key, []byte("kp")) {
			r.st.get.Store(nil)
			r.landed(r.Release(p.Handle()))
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
