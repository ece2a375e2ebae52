package breaker_test

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

var (
	ok       = breaker.Outcome{Class: breaker.Success}
	failed   = breaker.Outcome{Class: breaker.Failure, Cause: "status 502", Evidence: "error-1"}
	neutral  = breaker.Outcome{}
	upstream = breaker.Key{Upstream: "localhost:9001"}
)

// bubble runs a test in time of its own. pass lets time go by and everything happen
// that is due then.
func bubble(t *testing.T, test func(t *testing.T, pass func(time.Duration))) {
	t.Helper()
	crowd(t, func(t *testing.T, pass, _ func(time.Duration)) { test(t, pass) })
}

// crowd is bubble for many callers at once: they wait with sleep. Timers with channels,
// many of them due at the same instant of a bubble, crash the race detector
// (golang/go#78156).
func crowd(t *testing.T, test func(t *testing.T, pass, sleep func(time.Duration))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		test(t, func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}, time.Sleep)
	})
}

func mustRules(t testing.TB, s breaker.Settings) *breaker.Rules {
	t.Helper()
	rules, err := breaker.NewRules(s)
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

func newBreaker(t testing.TB, s breaker.Settings, hook breaker.Hook) *breaker.Breaker {
	t.Helper()
	return breaker.New(upstream, mustRules(t, s), hook)
}

// acquire asks for a safe call that has to be let through.
func acquire(t testing.TB, b *breaker.Breaker) *breaker.Permit {
	t.Helper()
	permit, err := b.Acquire(breaker.Op{Safe: true})
	if err != nil {
		t.Fatalf("refused: %v", err)
	}
	return &permit
}

// calls makes n calls with that outcome, all of which have to be let through.
func calls(t testing.TB, b *breaker.Breaker, n int, o breaker.Outcome) {
	t.Helper()
	for range n {
		acquire(t, b).Done(o)
	}
}

// refused asks for a call that has to be refused.
func refused(t testing.TB, b *breaker.Breaker, op breaker.Op) *breaker.OpenError {
	t.Helper()
	permit, err := b.Acquire(op)
	var open *breaker.OpenError
	if !errors.As(err, &open) {
		t.Fatalf("let through in %v, error %v", b.Status().State, err)
	}
	permit.Done(failed) // of nothing, so it does nothing
	return open
}

func want(t testing.TB, b *breaker.Breaker, state breaker.State) {
	t.Helper()
	if got := b.Status().State; got != state {
		t.Fatalf("state %v, want %v", got, state)
	}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// trip opens a closed breaker with ten failures at most.
func trip(t testing.TB, b *breaker.Breaker) {
	t.Helper()
	for n := 0; n < 10 && b.Status().State == breaker.Closed; n++ {
		calls(t, b, 1, failed)
	}
	want(t, b, breaker.Open)
}

// recorder is a hook that keeps what it hears.
type recorder struct {
	mu        sync.Mutex
	heard     []breaker.Event
	permanent []breaker.Event
}

func (r *recorder) Transition(e breaker.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heard = append(r.heard, e)
}

func (r *recorder) PermanentlyOpen(e breaker.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.permanent = append(r.permanent, e)
}

func (r *recorder) last(t testing.TB) breaker.Event {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.heard) == 0 {
		t.Fatal("no transition was heard")
	}
	return r.heard[len(r.heard)-1]
}
