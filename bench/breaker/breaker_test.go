// Package breaker_test compares the cost of a call through our breaker with that through
// other Go breakers, in one run:
//
//	go test -run '^$' -bench . ./breaker
//
// All have a window of 60 s, the threshold 50 % and a minimum volume of 10. The guarded
// call does nothing, so that what is shown is the breaker alone. "ours in full" is what
// a gateway uses: looked up in a registry, watched for hanging, answered, with evidence
// of failures; the others have nothing like it.
package breaker_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/sony/gobreaker/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

var errUpstream = errors.New("status 502")

const (
	window  = 60 * time.Second
	volume  = 10
	percent = 50
)

// subject is one way to guard a call. call makes one, which fails or not, and reports
// whether it was let through.
type subject struct {
	name string
	new  func(tb testing.TB) (call func(fail bool) bool)
}

var subjects = []subject{
	{"ours", ours},
	{"ours in full", oursInFull},
	{"gobreaker Execute", gobreakerExecute},
	{"gobreaker two-step", gobreakerTwoStep},
	{"failsafe executor", failsafeExecutor},
	{"failsafe permit", failsafePermit},
}

func rules(tb testing.TB) *breaker.Rules {
	r, err := breaker.NewRules(breaker.Settings{Window: jsontime.Duration(window), MinVolume: volume})
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

var upstream = breaker.Key{Upstream: "localhost:9001"}

func ours(tb testing.TB) func(bool) bool {
	b := breaker.New(upstream, rules(tb), nil)
	return func(fail bool) bool {
		permit, err := b.Acquire(breaker.Op{})
		if err != nil {
			return false
		}
		if fail {
			permit.Done(breaker.Outcome{Class: breaker.Failure})
		} else {
			permit.Done(breaker.Outcome{Class: breaker.Success})
		}
		return true
	}
}

func oursInFull(tb testing.TB) func(bool) bool {
	registry, r := breaker.NewRegistry(0, nil), rules(tb)
	return func(fail bool) bool {
		permit, err := registry.Get(upstream, r).Acquire(breaker.Op{Safe: true, Patience: 30 * time.Second})
		if err != nil {
			return false
		}
		if fail {
			permit.Done(breaker.Outcome{Class: breaker.Failure, Cause: "status 502", Evidence: "token"})
		} else {
			permit.Answered(time.Millisecond)
			permit.Done(breaker.Outcome{Class: breaker.Success})
		}
		return true
	}
}

func gobreakerSettings() gobreaker.Settings {
	return gobreaker.Settings{
		Interval: window, BucketPeriod: window / 60, Timeout: time.Hour,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return c.Requests >= volume && c.TotalFailures*100 > c.Requests*percent
		},
	}
}

func gobreakerExecute(testing.TB) func(bool) bool {
	b := gobreaker.NewCircuitBreaker[int](gobreakerSettings())
	return func(fail bool) bool {
		_, err := b.Execute(func() (int, error) {
			if fail {
				return 0, errUpstream
			}
			return 0, nil
		})
		return err == nil || err == errUpstream
	}
}

func gobreakerTwoStep(testing.TB) func(bool) bool {
	b := gobreaker.NewTwoStepCircuitBreaker[int](gobreakerSettings())
	return func(fail bool) bool {
		done, err := b.Allow()
		if err != nil {
			return false
		}
		if fail {
			done(errUpstream)
		} else {
			done(nil)
		}
		return true
	}
}

func failsafeBreaker() circuitbreaker.CircuitBreaker[int] {
	return circuitbreaker.NewBuilder[int]().
		WithFailureRateThreshold(float64(percent+1)/100, volume, window).WithDelay(time.Hour).Build()
}

func failsafeExecutor(testing.TB) func(bool) bool {
	with := failsafe.With[int](failsafeBreaker())
	return func(fail bool) bool {
		_, err := with.Get(func() (int, error) {
			if fail {
				return 0, errUpstream
			}
			return 0, nil
		})
		return err == nil || err == errUpstream
	}
}

func failsafePermit(testing.TB) func(bool) bool {
	b := failsafeBreaker()
	return func(fail bool) bool {
		if !b.TryAcquirePermit() {
			return false
		}
		if fail {
			b.RecordFailure()
		} else {
			b.RecordSuccess()
		}
		return true
	}
}

// scenes are what upstreams do.
var scenes = []struct {
	name string
	fail func(i int) bool
	open bool
}{
	{name: "good", fail: func(int) bool { return false }},
	{name: "one in four fails", fail: func(i int) bool { return i%4 == 3 }},
	{name: "open", open: true},
}

func BenchmarkBreaker(b *testing.B) {
	for _, scene := range scenes {
		for _, s := range subjects {
			prepare := func(b *testing.B) func(int) {
				call := s.new(b)
				if scene.open {
					open(b, call)
					return func(int) { call(false) }
				}
				for range 2 * volume {
					call(false)
				}
				b.Cleanup(func() {
					if !call(false) {
						b.Error("the breaker opened")
					}
				})
				return func(i int) { call(scene.fail(i)) }
			}
			b.Run(scene.name+"/"+s.name+"/serial", func(b *testing.B) {
				call := prepare(b)
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					call(i)
				}
			})
			b.Run(scene.name+"/"+s.name+"/parallel", func(b *testing.B) {
				call := prepare(b)
				b.ReportAllocs()
				b.RunParallel(func(pb *testing.PB) {
					for i := 0; pb.Next(); i++ {
						call(i)
					}
				})
			})
		}
	}
}

// open makes calls that fail until one is refused.
func open(tb testing.TB, call func(bool) bool) {
	for range 10 * volume {
		if !call(true) {
			return
		}
	}
	tb.Fatal("the breaker does not open")
}

// BenchmarkClock is what one look at the clock costs, which the others take at least
// once for a call.
func BenchmarkClock(b *testing.B) {
	var sum int64
	b.Run("serial", func(b *testing.B) {
		for b.Loop() {
			sum += int64(time.Now().Nanosecond())
		}
	})
	b.Run("parallel", func(b *testing.B) {
		var all atomic.Int64
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				sum := time.Now().Nanosecond()
				if sum < 0 {
					all.Add(1)
				}
			}
		})
	})
	_ = sum
}

// What is compared does the same: it lets good calls through, counts, and opens.
func TestSubjectsAreBreakers(t *testing.T) {
	for _, s := range subjects {
		t.Run(s.name, func(t *testing.T) {
			call := s.new(t)
			for i := range 100 {
				if !call(i%4 == 3) {
					t.Fatalf("call %d was refused", i)
				}
			}
			open(t, call)
			if call(false) {
				t.Error("a call was let through while open")
			}
		})
	}
}
