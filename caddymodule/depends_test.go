package caddymodule_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// Cascade 3.3.2: while a breaker behind the upstream is open, calls that need it are refused. Nothing
// waits for the other gateway, which is asked once a second while there are calls; when its cooldown is
// over it gets one call for each answer as its probe; and who knows nothing refuses nothing.
func TestDependency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const agent = "spiffe://example.com/agent/c"
		var mu sync.Mutex // of what the other gateway says, which is asked beside the calls
		asked, failing := 0, error(nil)
		is := proxy.Circuit{Downstream: agent, State: "closed", Mode: "auto"}
		now := func(change func()) {
			mu.Lock()
			defer mu.Unlock()
			change()
		}
		w := caddymodule.NewDependencyWatch([]string{"spiffe://example.com/agent/b", agent}, func(ctx context.Context) ([]proxy.Circuit, error) {
			mu.Lock()
			asked++
			current, err := is, failing
			mu.Unlock()
			time.Sleep(100 * time.Millisecond) // nobody waits for it
			other := proxy.Circuit{Downstream: "spiffe://example.com/agent/other", State: "open", Mode: "forced_open"}
			undo := proxy.Circuit{Downstream: agent, Class: "undo", State: "open", Mode: "forced_open"}
			return []proxy.Circuit{other, undo, current}, err
		})
		// refused makes calls at once, and says how many of them are refused.
		refused := func(calls int) (n int) {
			begun := time.Now()
			for range calls {
				if open, name := w(); open != nil {
					if n++; name != agent || open.Key.Upstream != agent || open.RetryAfter() <= 0 {
						t.Errorf("%q: %+v", name, open)
					}
				}
			}
			if time.Since(begun) != 0 {
				t.Error("a call has waited for another gateway")
			}
			return n
		}
		// news lets the other gateway be asked, and its answer come.
		news := func() {
			time.Sleep(2 * time.Second)
			refused(1)
			time.Sleep(200 * time.Millisecond)
		}
		expect := func(when string, want int) {
			t.Helper()
			if got := refused(3); got != want {
				t.Errorf("%s: %d of 3 calls are refused, want %d", when, got, want)
			}
		}
		expect("nothing is known", 0)
		news()
		expect("closed", 0)

		now(func() { is.State, is.CooldownRemaining = "open", 4 })
		expect("open, and not asked yet", 0)
		before := 0
		now(func() { before = asked })
		news()
		expect("open", 3)
		refused(100)
		now(func() {
			if asked != before+1 {
				t.Errorf("asked %d times within a second", asked-before)
			}
			failing = errors.New("no connection")
		})
		time.Sleep(time.Second)
		refused(1)
		time.Sleep(200 * time.Millisecond)
		expect("the other gateway does not answer, and was open", 3)
		time.Sleep(2800 * time.Millisecond) // 4.1 s after the answer
		expect("the cooldown is over", 2)
		time.Sleep(2 * time.Second)
		expect("what is known is old", 0)

		now(func() { failing, is.CooldownRemaining = nil, 0 })
		for _, state := range []string{"open", "half_open"} {
			now(func() { is.State = state })
			news()
			expect("waiting for its probe: "+state, 2)
			expect("waiting for its probe, after one call: "+state, 3)
		}
		now(func() { is.Mode = "forced_open" })
		news()
		expect("forced open", 3)
		for _, mode := range []string{"observe", "forced_closed"} {
			now(func() { is.Mode = mode })
			news()
			expect(mode, 0)
		}
		now(func() { is.Mode, is.State, is.CooldownRemaining = "auto", "open", 1<<40 })
		news()
		expect("open for ages", 3)
		if open, _ := w(); open.RetryAfter() > time.Hour {
			t.Errorf("callers are sent away for %v", open.RetryAfter())
		}
		now(func() { is.State = "closed" })
		news()
		expect("closed again", 0)
		time.Sleep(time.Second)
	})
}
