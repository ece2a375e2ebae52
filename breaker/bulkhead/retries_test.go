package bulkhead_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
)

// send makes a call that is sent, and fails it or not.
func send(p *bulkhead.Pool, c bulkhead.Call, fails bool) error {
	var permit bulkhead.Permit
	if err := p.Acquire(context.Background(), &c, &permit); err != nil {
		return err
	}
	permit.Sent()
	if fails {
		p.Failed(c.Key)
	}
	permit.Release()
	return nil
}

// sent makes n such calls with different keys and counts those that were sent.
func sent(t *testing.T, p *bulkhead.Pool, workflow string, from, n int, fails bool) (count int) {
	t.Helper()
	for i := range n {
		err := send(p, bulkhead.Call{Sharer: of(workflow), Key: uint64(from + i)}, fails)
		if err == nil {
			count++
			continue
		}
		refused(t, err, bulkhead.OverRetries)
	}
	return count
}

// Of many calls that fail and are retried at once, a fifth and the floor are sent again. Those of another
// workflow have a budget of their own, and first calls need none.
func TestRetryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{RetryFloor: 1}) // ten in 10 s
		if n := sent(t, p, "a", 1, 1000, true); n != 1000 {
			t.Errorf("%d of 1000 first calls were sent", n)
		}
		if n := sent(t, p, "a", 1, 1000, true); n != 210 {
			t.Errorf("%d of 1000 retries were sent, want a fifth of the calls and ten", n)
		}
		sent(t, p, "b", 5001, 1, true)
		if n := sent(t, p, "b", 5001, 1, true); n != 1 {
			t.Error("a retry of another workflow was not sent")
		}
		if n := sent(t, p, "a", 9001, 100, false); n != 100 {
			t.Errorf("%d of 100 first calls were sent after that", n)
		}
		if c := p.Status().Counts; c.Retries != 211 || c.Refused[bulkhead.OverRetries] != 790 {
			t.Errorf("%+v", c)
		}
		empty(t, p)
	})
}

// A small workflow may retry: of one that fails ten times in a row, each attempt is sent.
func TestRetryFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{})
		for range 101 { // the first call, and ten retries a second for 10 s, at once
			if err := send(p, bulkhead.Call{Sharer: of("a"), Key: 1}, true); err != nil {
				t.Fatal(err)
			}
		}
		full := refused(t, send(p, bulkhead.Call{Sharer: of("a"), Key: 1}, true), bulkhead.OverRetries)
		<-time.After(full.RetryAfter)
		if err := send(p, bulkhead.Call{Sharer: of("a"), Key: 1}, true); err != nil {
			t.Errorf("%v, when it was to come back", err)
		}
		none := newPool(t, bulkhead.Settings{RetryFloor: -1})
		_ = send(none, bulkhead.Call{Sharer: of("a"), Key: 1}, true)
		if full := refused(t, send(none, bulkhead.Call{Sharer: of("a"), Key: 1}, true), bulkhead.OverRetries); full.RetryAfter != time.Minute {
			t.Errorf("to come back in %s; a fifth of one call is never one", full.RetryAfter)
		}
		off := newPool(t, bulkhead.Settings{Retries: -1})
		for range 1000 {
			if err := send(off, bulkhead.Call{Sharer: of("a"), Key: 1, Retry: true}, true); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Under a load that goes on, whose calls all fail and are all retried, one retry is sent for five calls.
func TestRetriesOfASteadyLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{RetryFloor: -1})
		var all sync.WaitGroup
		for i := range 6000 { // a hundred a second
			all.Go(func() {
				<-time.After(time.Duration(i) * 10 * time.Millisecond)
				c := bulkhead.Call{Sharer: of("a"), Key: uint64(i + 1)}
				if err := send(p, c, true); err != nil {
					t.Error(err)
				}
			})
		}
		for i := range 6000 {
			all.Go(func() {
				<-time.After(time.Duration(i)*10*time.Millisecond + 5*time.Millisecond)
				_ = send(p, bulkhead.Call{Sharer: of("a"), Key: uint64(i + 1)}, true)
			})
		}
		all.Wait()
		s := p.Status()
		retries, refused := int(s.Counts.Retries), int(s.Counts.Refused[bulkhead.OverRetries])
		calls := int(s.Counts.Granted) - retries
		t.Logf("%d calls, %d retries sent, %d refused", calls, retries, refused)
		if retries < calls*18/100 || retries > calls*22/100 || retries+refused != 6000 {
			t.Errorf("%d retries for %d calls were sent, want a fifth", retries, calls)
		}
	})
}

// What comes back at once with one key is one retry: whoever finds it running is not sent. A retry that was
// not sent counts for nothing.
func TestOneKeyIsOneRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{RetryFloor: -1})
		sent(t, p, "a", 1, 5, true) // room for one retry
		again := bulkhead.Call{Sharer: of("a"), Key: 1}
		other := bulkhead.Call{Sharer: of("a"), Key: 2}
		for range 10 { // nobody sends
			permits := make([]bulkhead.Permit, 3)
			for i := range permits {
				if err := p.Acquire(t.Context(), &again, &permits[i]); err != nil {
					t.Fatal(err)
				}
			}
			refused(t, send(p, other, false), bulkhead.OverRetries)
			for i := range permits {
				permits[i].Release()
			}
		}
		var first, slow bulkhead.Permit
		for _, permit := range []*bulkhead.Permit{&first, &slow} {
			if err := p.Acquire(t.Context(), &again, permit); err != nil {
				t.Fatal(err)
			}
		}
		first.Sent()
		refused(t, send(p, again, false), bulkhead.OverRetries) // a new attempt
		first.Release()
		slow.Sent() // counts, though nobody asked before
		slow.Release()
		if n := p.Status().Counts.Retries; n != 2 {
			t.Errorf("%d retries were sent, want 2", n)
		}
		sent(t, p, "a", 10, 5, false)
		refused(t, send(p, other, false), bulkhead.OverRetries) // two of ten were sent
		sent(t, p, "a", 20, 5, false)
		if err := send(p, other, false); err != nil {
			t.Errorf("the third retry for 15 calls: %v", err)
		}
		empty(t, p)
	})
}

// A retry whose client leaves while it waits, or that may not wait, was not sent.
func TestRetriesThatAreNotSentDoNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 1, Queue: 1, RetryFloor: -1})
		sent(t, p, "a", 1, 5, true)
		holds := acquire(t, p, "b")
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error)
		go func() {
			var none bulkhead.Permit
			left <- p.Acquire(ctx, &bulkhead.Call{Sharer: of("a"), Key: 1}, &none)
		}()
		synctest.Wait()
		refused(t, send(p, bulkhead.Call{Sharer: of("a"), Key: 1}, false), bulkhead.QueueFull)
		leave()
		if err := <-left; err == nil {
			t.Error("a call whose client left has a permit")
		}
		holds.Release()
		empty(t, p)
		if n := sent(t, p, "a", 2, 4, false); n != 1 {
			t.Errorf("%d retries were sent, want one", n)
		}
		empty(t, p)
	})
}

// A failure is known for five minutes, and not for long after that.
func TestFailuresAreForgotten(t *testing.T) {
	for after, retries := range map[time.Duration]uint64{299 * time.Second: 1, 601 * time.Second: 0} {
		synctest.Test(t, func(t *testing.T) {
			p := newPool(t, bulkhead.Settings{})
			sent(t, p, "a", 1, 1, true)
			<-time.After(after)
			sent(t, p, "a", 1, 1, false)
			if n := p.Status().Counts.Retries; n != retries {
				t.Errorf("after %s: %d retries, want %d", after, n, retries)
			}
			for i := range 100_000 {
				p.Failed(uint64(i))
			}
			if n := bulkhead.Failures(p); n > 1<<16 {
				t.Errorf("%d failures are remembered", n)
			}
		})
	}
}

// Names of workflows that made few calls are forgotten at once, and others when that gives nobody more
// retries.
func TestBudgetsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{RetryFloor: 1})
		names := func(prefix string) {
			for i := range 1000 {
				acquire(t, p, prefix+string(rune('a'+i%26))+time.Duration(i).String()).Release()
			}
		}
		sent(t, p, "a", 1, 1, true)
		for range 10 {
			_ = send(p, bulkhead.Call{Sharer: of("a"), Key: 1}, true)
		}
		names("x")
		refused(t, send(p, bulkhead.Call{Sharer: of("a"), Key: 1}, true), bulkhead.OverRetries)
		<-time.After(20 * time.Second)
		names("y")
		if n := bulkhead.Lots(p); n > 200 {
			t.Errorf("%d workflows are kept", n)
		}
		if err := send(p, bulkhead.Call{Sharer: of("a"), Key: 1}, true); err != nil {
			t.Error(err)
		}
	})
}
