package guard_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// failing is a store whose commits can be made to fail.
type failing struct {
	store.Store
	fail func(batch []store.Write) error
}

func (f *failing) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if f.fail != nil {
		if err := f.fail(batch); err != nil {
			return 0, err
		}
	}
	return f.Store.Commit(ctx, batch...)
}

func newFailing(t *testing.T) (*rig, *failing) {
	r := &rig{t: t, mem: memory.New(memory.Options{}), ring: seal.Generate()}
	f := &failing{Store: r.mem}
	g, _, err := guard.Open(ctx, f, r.ring)
	if err != nil {
		t.Fatal(err)
	}
	r.Guard = g
	return r, f
}

var errDisk = errors.New("no space left on device")

// P4: what cannot be recorded is not run.
func TestP4ClaimFailsClosed(t *testing.T) {
	r, f := newFailing(t)
	c := r.call("a")
	f.fail = func([]store.Write) error { return errDisk }
	if _, err := r.Claim(ctx, c, guard.Finding{}); !errors.Is(err, guard.ErrStore) {
		t.Errorf("claim: %v", err)
	}
	f.fail = nil
	r.standing(c, guard.Free)
	r.claim(c)
}

// An outcome that does not reach the store is never told as done (P6), and its key
// is not free (P1): neither in this life nor in the next.
func TestP1UnrecordedOutcomeIsDoubt(t *testing.T) {
	for _, verdict := range []guard.Verdict{guard.Completed, guard.Released, guard.InDoubt} {
		r, f := newFailing(t)
		c := r.call("a")
		e := r.claim(c)
		follower := r.find(c).Flight.Follow()
		o := answered(e, []byte("body"))
		o.Verdict = verdict
		f.fail = func([]store.Write) error { return store.ErrUnknown }
		if err := e.Settle(ctx, o); !errors.Is(err, guard.ErrUnrecorded) {
			t.Errorf("%v: settle: %v", verdict, err)
		}
		p := make([]byte, 10)
		_, _ = follower.Read(ctx, p)
		if _, err := follower.Read(ctx, p); !errors.Is(err, guard.ErrCut) {
			t.Errorf("%v: a follower was shown an end that is not recorded: %v", verdict, err)
		}
		follower.Close()
		f.fail = nil
		if found := r.standing(c, guard.Doubtful); found.Record.Cause != guard.CauseUnrecorded {
			t.Errorf("%v: the cause is %q", verdict, found.Record.Cause)
		}
		r.restart()
		r.standing(c, guard.Doubtful)
	}
}

// An answer that cannot be stored does not cost the key.
func TestP1KeyIsKeptWhereTheAnswerCannotBe(t *testing.T) {
	for _, size := range []int{1000, 300 << 10} {
		r, f := newFailing(t)
		c := r.call("a")
		e := r.claim(c)
		f.fail = func(batch []store.Write) error {
			for _, w := range batch {
				if w.Bulk {
					return errDisk
				}
			}
			return nil
		}
		r.settle(e, answered(e, make([]byte, size)))
		r.standing(c, guard.ResultUnavailable)
	}
}

// Nor does it keep evidence from being recorded.
func TestAppliedWithoutRoomForTheAnswer(t *testing.T) {
	r, f := newFailing(t)
	c := r.call("a")
	r.settle(r.claim(c), guard.Outcome{Verdict: guard.InDoubt})
	f.fail = func(batch []store.Write) error {
		for _, w := range batch {
			if w.Bulk {
				return errDisk
			}
		}
		return nil
	}
	if err := r.Applied(ctx, c.Key, r.standing(c, guard.Doubtful), &guard.Head{Status: 200}, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	r.standing(c, guard.ResultUnavailable)
}

// A result that is missing or altered is reported, and never a reason to run again.
func TestDamagedResultIsUnavailable(t *testing.T) {
	for _, size := range []int{1000, 600 << 10} {
		for _, damage := range []func(e store.Entry) store.Write{
			func(e store.Entry) store.Write { return store.Write{Key: e.Key, Delete: true} },
			func(e store.Entry) store.Write {
				e.Value[len(e.Value)/2] ^= 1
				return store.Write{Key: e.Key, Value: e.Value, Expires: e.Expires, Bulk: true}
			},
		} {
			r := newRig(t)
			c := r.call("a")
			e := r.claim(c)
			r.settle(e, answered(e, make([]byte, size)))
			var pieces []store.Entry
			for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte{'r'})) {
				if err != nil {
					t.Fatal(err)
				}
				pieces = append(pieces, entry)
			}
			if want := 1 + size/(256<<10); len(pieces) != want {
				t.Fatalf("%d pieces, want %d", len(pieces), want)
			}
			if _, err := r.mem.Commit(ctx, damage(pieces[len(pieces)-1])); err != nil {
				t.Fatal(err)
			}
			found := r.standing(c, guard.Replayable)
			if _, err := r.Result(ctx, c.Key, found); !errors.Is(err, guard.ErrResultUnavailable) {
				t.Errorf("result: %v", err)
			}
		}
	}
}

// An altered record is an error, never a free key.
func TestP1AlteredRecordIsNotAFreeKey(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	r.settle(e, answered(e, nil))
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte{'x'})) {
		if err != nil {
			t.Fatal(err)
		}
		entry.Value[len(entry.Value)-1] ^= 1
		if _, err := r.mem.Commit(ctx, store.Write{Key: entry.Key, Value: entry.Value}); err != nil {
			t.Fatal(err)
		}
	}
	if found, err := r.Find(ctx, c.Key, c.Fingerprint); !errors.Is(err, guard.ErrStore) {
		t.Errorf("found %+v, %v", found, err)
	}
}

// P4: a store without room does not keep the gateway from starting. What was open is in
// doubt all the same, and is recorded so once there is room.
func TestP4RecoveryOnAFullDisk(t *testing.T) {
	r, full := newFailing(t)
	c := r.call("a")
	r.claim(c)
	full.fail = func([]store.Write) error { return fmt.Errorf("disk: %w", store.ErrFull) }
	g, recovery, err := guard.Open(ctx, full, r.ring)
	if err != nil || recovery != (guard.Recovery{Unrecorded: 1}) {
		t.Fatalf("%+v, %v", recovery, err)
	}
	r.Guard = g
	r.standing(c, guard.Doubtful)

	full.fail = nil
	if g, recovery, err = guard.Open(ctx, full, r.ring); err != nil || recovery != (guard.Recovery{InDoubt: 1}) {
		t.Fatalf("with room again: %+v, %v", recovery, err)
	}
	r.Guard = g
	r.standing(c, guard.Doubtful)
}
