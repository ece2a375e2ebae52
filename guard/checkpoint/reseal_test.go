package checkpoint_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func (r *rig) rotate() {
	r.t.Helper()
	next, err := r.ring.Rotated()
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.ring.Adopt(next, nil, func(uint32) error { return nil }); err != nil {
		r.t.Fatal(err)
	}
}

// under counts the sealed values under each key.
func (r *rig) under() map[uint32]int {
	r.t.Helper()
	n := map[uint32]int{}
	for _, kind := range []string{"kb", "ka", "kc", "ku", "kp", "kv"} {
		for entry, err := range r.st.Store.Scan(ctx, store.Prefix([]byte(kind))) {
			if err != nil {
				r.t.Fatal(err)
			}
			n[r.ring.KeyOf(entry.Value)]++
		}
	}
	return n
}

// After a rotation everything is sealed anew, and no hash changes.
func TestReseal(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		p, q := r.kept(full("large", 600<<10)), r.kept(full("small", 1))
		done := r.record(p.Handle(), result(600<<10))
		if err := r.step("small", checkpoint.Undoing, "r"); err != nil {
			t.Fatal(err)
		}
		version := checkpoint.Version{Resource: checkpoint.Resource{Upstream: "up", Host: "h", Path: "/x"}, Tag: `"v3"`, Origin: `"v1"`}
		if err := r.commit(r.PutBack(version, time.Now().Add(time.Hour))); err != nil {
			t.Fatal(err)
		}
		r.rotate()
		for i := range 2 {
			got, err := r.Reseal(ctx)
			if err != nil || got.Damaged != 0 || (got.Resealed == 0) != (i == 1) || got.Seen == 0 {
				t.Fatalf("pass %d: %+v, %v", i, got, err)
			}
		}
		if n := r.under(); n[1] != 0 || n[2] == 0 {
			t.Errorf("values by key: %v", n)
		}
		c := r.open("large", checkpoint.Want{Sum: p.Sum(), Result: done.Sum()})
		if !bytes.Equal(c.Result.Image.Body, result(600<<10).Image.Body) {
			t.Error("the image has changed")
		}
		if c := r.open("small", checkpoint.Want{Sum: q.Sum()}); c.Mark.State != checkpoint.Undoing {
			t.Errorf("%+v", c.Mark)
		}
		if _, err := r.Credentials(ctx, "small"); err != nil {
			t.Error(err)
		}
		for tag, want := range map[string]string{`"v3"`: `"v1"`, `"v2"`: `"v2"`} {
			if got, err := r.Origin(ctx, version.Resource, tag); err != nil || got != want {
				t.Errorf("the origin of %s is %s, %v, want %s", tag, got, err, want)
			}
		}
	})
}

// What is damaged is counted and left, and holds nothing up.
func TestResealLeavesTheDamaged(t *testing.T) {
	r := newRig(t)
	p := r.kept(full("a", 1))
	q := r.kept(full("b", 1))
	for entry, err := range r.st.Store.Scan(ctx, store.Prefix([]byte("kb"))) {
		if err != nil {
			t.Fatal(err)
		}
		entry.Value[len(entry.Value)-1] ^= 1
		if _, err := r.st.Commit(ctx, store.Write{Key: entry.Key, Value: entry.Value, Expires: entry.Expires}); err != nil {
			t.Fatal(err)
		}
		break
	}
	r.rotate()
	got, err := r.Reseal(ctx)
	if err != nil || got.Damaged != 1 || got.Resealed != 3 {
		t.Errorf("%+v, %v", got, err)
	}
	_, errA := r.Open(ctx, "a", checkpoint.Want{Sum: p.Sum()})
	_, errB := r.Open(ctx, "b", checkpoint.Want{Sum: q.Sum()})
	if (errA == nil) == (errB == nil) || !errors.Is(errors.Join(errA, errB), checkpoint.ErrTampered) {
		t.Errorf("%v, %v", errA, errB)
	}
}

// What was sealed before the rotation and is committed later is waited for.
func TestResealWaitsForWhatWasSealedBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := r.prepare(full("a", 1), checkpoint.Terms{})
		r.rotate()
		impatient, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := r.Reseal(impatient); !errors.Is(err, context.Canceled) {
			t.Errorf("has not waited: %v", err)
		}
		ended := make(chan error, 1)
		go func() {
			_, err := r.Reseal(ctx)
			ended <- err
		}()
		synctest.Wait()
		r.kept(full("b", 1)) // others go on
		select {
		case err := <-ended:
			t.Fatalf("has not waited: %v", err)
		default:
		}
		r.landed(p)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if n := r.under(); n[1] != 0 {
			t.Errorf("values by key: %v", n)
		}
	})
}

// A value that changes while it is sealed anew stays as it was changed.
func TestResealLosesToTheTraffic(t *testing.T) {
	r := newRig(t)
	r.kept(full("a", 1))
	if err := r.step("a", checkpoint.Undoing, "r"); err != nil {
		t.Fatal(err)
	}
	r.rotate()
	found := r.mark("a")
	fail := func(batch []store.Write) error {
		if bytes.HasPrefix(batch[len(batch)-1].Key, []byte("ku")) {
			r.st.fail.Store(nil)
			return r.Advance(ctx, "a", found, checkpoint.Step{To: checkpoint.Undone, Rollback: "r"})
		}
		return nil
	}
	r.st.fail.Store(&fail)
	if _, err := r.Reseal(ctx); err != nil {
		t.Fatal(err)
	}
	if m := r.mark("a"); m.State != checkpoint.Undone {
		t.Errorf("%+v", m)
	}
	if n := r.under(); n[1] != 0 {
		t.Errorf("values by key: %v", n)
	}
}
