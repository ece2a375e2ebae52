package guard

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// awaiting waits for key in the background of a bubble.
func awaiting(ctx context.Context, g *Guard, key Key) <-chan error {
	done := make(chan error, 1)
	go func() { done <- g.Await(ctx, key) }()
	return done
}

// over reports whether the wait is over, once nothing in the bubble moves any more.
func over(t *testing.T, done <-chan error) (bool, error) {
	t.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		return true, err
	default:
		return false, nil
	}
}

func awaitedCall(g *Guard, id string) *Call {
	c := &Call{Scope: Scope{ID: id}, Deadline: time.Minute, KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 1 << 10}
	c.Key = g.Key(c.Scope)
	return c
}

// Section "Endpoints": a wait ends with the execution, however that ends, or with its
// own context; it does not begin where nothing runs.
func TestAwaitEndsWithTheExecution(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, err := Open(t.Context(), memory.New(memory.Options{}), seal.Generate())
		if err != nil {
			t.Fatal(err)
		}
		for name, o := range map[string]Outcome{
			"completed": {Verdict: Completed, Status: 201},
			"in doubt":  {Verdict: InDoubt, Cause: CauseLost},
			"released":  {Verdict: Released, Cause: CauseNotSent},
		} {
			c := awaitedCall(g, name)
			if err := g.Await(t.Context(), c.Key); err != nil {
				t.Errorf("%s: of nothing: %v", name, err)
			}
			e, err := g.Claim(t.Context(), c, Finding{})
			if err != nil {
				t.Fatal(err)
			}
			ctx, leave := context.WithCancel(t.Context())
			first, second := awaiting(t.Context(), g, c.Key), awaiting(ctx, g, c.Key)
			if ended, err := over(t, first); ended {
				t.Fatalf("%s: over while it runs: %v", name, err)
			}
			leave()
			if ended, err := over(t, second); !ended || !errors.Is(err, context.Canceled) {
				t.Errorf("%s: who left: %v, %v", name, ended, err)
			}
			if err := e.Settle(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			if ended, err := over(t, first); !ended || err != nil {
				t.Errorf("%s: %v, %v", name, ended, err)
			}
			if err := g.Await(t.Context(), c.Key); err != nil {
				t.Errorf("%s: afterwards: %v", name, err)
			}
		}
	})
}

// What runs on another node is awaited by the store's watch.
func TestAwaitOfAnotherNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := memory.New(memory.Options{})
		g, _, err := Open(t.Context(), mem, seal.Generate())
		if err != nil {
			t.Fatal(err)
		}
		c := awaitedCall(g, "1")
		running := g.newRecord(c, g.Caller(c.Scope.Caller), time.Now())
		running.Node, running.Boot = "elsewhere", "another life"
		version, err := mem.Commit(t.Context(), g.put(c.Key, nil, &running, store.Absent())...)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := awaiting(ctx, g, c.Key)
		touched := running
		touched.Boot = "yet another"
		if version, err = mem.Commit(t.Context(), g.put(c.Key, &running, &touched, store.VersionIs(version))...); err != nil {
			t.Fatal(err)
		}
		if ended, err := over(t, done); ended {
			t.Fatalf("over after a change that ends nothing: %v", err)
		}
		settled := touched
		settled.State, settled.Settled = StateCompleted, time.Now()
		if _, err := mem.Commit(t.Context(), g.put(c.Key, &touched, &settled, store.VersionIs(version))...); err != nil {
			t.Fatal(err)
		}
		if ended, err := over(t, done); !ended || err != nil {
			t.Errorf("%v, %v", ended, err)
		}
	})
}

// P4: a store that does not answer ends the wait with ErrStore.
func TestP4AwaitOfABrokenStore(t *testing.T) {
	mem := memory.New(memory.Options{})
	g, _, err := Open(t.Context(), mem, seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	if err := mem.Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.Await(t.Context(), awaitedCall(g, "1").Key); !errors.Is(err, ErrStore) {
		t.Errorf("%v", err)
	}
}
