package guard_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The executions in doubt are counted, those that run or ended otherwise are not, and
// the oldest is the one that was claimed first.
func TestDoubts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		expect := func(n int, oldest time.Time) {
			t.Helper()
			got, at, err := r.Doubts(ctx)
			if err != nil || got != n || !at.Equal(oldest) {
				t.Fatalf("%d doubts, the oldest of %v (%v), want %d of %v", got, at, err, n, oldest)
			}
		}
		expect(0, time.Time{})
		running := r.claim(r.call("running"))
		var began [3]time.Time
		for i := range began {
			time.Sleep(time.Minute)
			began[i] = time.Now()
			e := r.claim(r.call(fmt.Sprint("doubt ", i)))
			time.Sleep(time.Second)
			if err := e.Settle(ctx, guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost}); err != nil {
				t.Fatal(err)
			}
			expect(i+1, began[0])
		}
		if err := r.claim(r.call("released")).Settle(ctx, guard.Outcome{Verdict: guard.Released, Cause: guard.CauseNotSent}); err != nil {
			t.Fatal(err)
		}
		expect(3, began[0])

		first := r.call("doubt 0")
		if err := r.Applied(ctx, first.Key, r.standing(first, guard.Doubtful), nil, nil); err != nil {
			t.Fatal(err)
		}
		expect(2, began[1])

		// What was running when the process died is in doubt from its claim on.
		record := running.Record()
		r.restart()
		expect(3, record.Created)
	})
}

// What cannot be read is not zero.
func TestDoubtsOfAClosedStore(t *testing.T) {
	r := newRig(t)
	if err := r.mem.Close(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := r.Doubts(ctx); !errors.Is(err, guard.ErrStore) || !errors.Is(err, store.ErrClosed) {
		t.Errorf("%d, %v", n, err)
	}
}

// A record that stands there and cannot be read is told from a store that does not
// answer: only there an earlier call is certain.
func TestUnreadableRecord(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	if err := r.claim(c).Settle(ctx, guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost}); err != nil {
		t.Fatal(err)
	}
	name := append([]byte{'x'}, c.Key[:]...)
	if _, err := r.mem.Commit(ctx, store.Write{Key: name, Value: []byte("not what was sealed")}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Find(ctx, c.Key, c.Fingerprint); !errors.Is(err, guard.ErrStore) || !errors.Is(err, guard.ErrUnreadable) {
		t.Errorf("an altered record: %v", err)
	}
	if err := r.mem.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Find(ctx, c.Key, c.Fingerprint); !errors.Is(err, guard.ErrStore) || errors.Is(err, guard.ErrUnreadable) {
		t.Errorf("a closed store: %v", err)
	}
}
