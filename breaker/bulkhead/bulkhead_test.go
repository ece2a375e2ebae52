package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

func newPool(t testing.TB, s bulkhead.Settings) *bulkhead.Pool {
	t.Helper()
	checked, err := s.Check()
	if err != nil {
		t.Fatal(err)
	}
	return bulkhead.New(checked)
}

func of(workflow string) bulkhead.Sharer { return bulkhead.Sharer{Workflow: workflow} }

// acquire takes a permit, or fails the test.
func acquire(t testing.TB, p *bulkhead.Pool, workflow string) *bulkhead.Permit {
	t.Helper()
	permit := new(bulkhead.Permit)
	if err := p.Acquire(t.Context(), &bulkhead.Call{Sharer: of(workflow)}, permit); err != nil {
		t.Fatal(err)
	}
	return permit
}

// wait has a call wait for a permit. done gets its name once it has one; it gives it back at once.
func wait(t testing.TB, p *bulkhead.Pool, c bulkhead.Call, done chan<- bulkhead.Call) {
	t.Helper()
	go func() {
		var permit bulkhead.Permit
		if err := p.Acquire(t.Context(), &c, &permit); err != nil {
			t.Error(err)
		}
		done <- c
		permit.Release()
	}()
	synctest.Wait()
}

func refused(t testing.TB, err error, want bulkhead.Reason) *bulkhead.FullError {
	t.Helper()
	var full *bulkhead.FullError
	if !errors.As(err, &full) || full.Reason != want {
		t.Fatalf("refused with %v, want %v", err, want)
	}
	if full.RetryAfter < time.Second || full.RetryAfter > time.Minute {
		t.Errorf("retry after %s", full.RetryAfter)
	}
	return full
}

func empty(t testing.TB, p *bulkhead.Pool) {
	t.Helper()
	if s := p.Status(); s.InUse != 0 || s.Waiting != 0 || s.Workflows != 0 {
		t.Errorf("in the end %d permits are in use, %d calls wait, and %d workflows count", s.InUse, s.Waiting, s.Workflows)
	}
	if n := bulkhead.Retrying(p); n != 0 {
		t.Errorf("in the end %d retries count as under way", n)
	}
}

// load makes calls of one workflow over and over, until ctx ends, and counts what they got.
type load struct {
	workflow string
	class    bulkhead.Class
	callers  int
	hold     time.Duration

	calls   atomic.Int64
	longest atomic.Int64 // wait, in ns
}

func (l *load) run(ctx context.Context, t testing.TB, p *bulkhead.Pool, all *sync.WaitGroup) {
	for range l.callers {
		all.Go(func() {
			for ctx.Err() == nil {
				var permit bulkhead.Permit
				begun := time.Now()
				if err := p.Acquire(ctx, &bulkhead.Call{Sharer: of(l.workflow), Class: l.class}, &permit); err != nil {
					if ctx.Err() == nil {
						t.Errorf("%s: %v", l.workflow, err)
					}
					return
				}
				waited := int64(time.Since(begun))
				for {
					old := l.longest.Load()
					if old >= waited || l.longest.CompareAndSwap(old, waited) {
						break
					}
				}
				<-time.After(l.hold)
				l.calls.Add(1)
				permit.Release()
			}
		})
	}
}

func share(t *testing.T, p *bulkhead.Pool, during time.Duration, loads ...*load) {
	ctx, stop := context.WithTimeout(t.Context(), during)
	defer stop()
	var all sync.WaitGroup
	for _, l := range loads {
		l.run(ctx, t, p, &all)
	}
	all.Wait()
	for _, l := range loads {
		t.Logf("%-8s %-8s %4d callers: %6d calls, longest wait %s", l.workflow, l.class, l.callers, l.calls.Load(), time.Duration(l.longest.Load()))
	}
	empty(t, p)
}

// cascade 3.3.3: a flood of one workflow does not keep another one waiting longer than one call
// takes.
func TestFloodLeavesOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 8, Wait: jsontime.Duration(time.Hour)})
		flood := &load{workflow: "flood", callers: 1000, hold: 100 * time.Millisecond}
		one := &load{workflow: "one", callers: 1, hold: 100 * time.Millisecond}
		share(t, p, 100*time.Second, flood, one)
		if longest := time.Duration(one.longest.Load()); longest > 100*time.Millisecond {
			t.Errorf("one call of another workflow waited %s, want at most the time of one call", longest)
		}
		if calls := flood.calls.Load() + one.calls.Load(); calls < 7900 {
			t.Errorf("%d calls were made, want all eight permits at work all the time: 8000", calls)
		}
	})
}

// Everything at once: a workflow of a thousand callers, one of a single caller, and all four classes, at eight
// permits. docs/performance.md has the table.
func TestFairness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const call, during = 100 * time.Millisecond, 1000 * time.Second
		p := newPool(t, bulkhead.Settings{Total: 8, Wait: jsontime.Duration(time.Hour)})
		loads := map[string]*load{}
		var all []*load
		for _, l := range []*load{
			{workflow: "flood", callers: 1000}, {workflow: "single", callers: 1},
			{workflow: "critical", class: bulkhead.Critical, callers: 1}, {workflow: "high", class: bulkhead.High, callers: 20},
			{workflow: "low", class: bulkhead.Low, callers: 20},
		} {
			l.hold = call
			loads[l.workflow] = l
			all = append(all, l)
		}
		share(t, p, during, all...)
		total, permits := 0.0, map[string]float64{}
		for name, l := range loads {
			permits[name] = float64(l.calls.Load()) * call.Seconds() / during.Seconds()
			total += permits[name]
		}
		if total < 7.9 {
			t.Errorf("%.2f of 8 permits were in use, though calls waited all the time", total)
		}
		// Whoever has one call at a time is never kept waiting by the others' backlogs.
		for _, name := range []string{"single", "critical"} {
			if longest := time.Duration(loads[name].longest.Load()); longest > call || permits[name] < 0.5 {
				t.Errorf("%s waited up to %s and used %.2f permits, want at most the time of one call, and half of them", name, longest, permits[name])
			}
		}
		// Each of the others has its whole base share of one permit, and the higher class what is left.
		for _, name := range []string{"flood", "high", "low"} {
			if permits[name] < 0.9 {
				t.Errorf("%s used %.2f permits, want its base share of one", name, permits[name])
			}
		}
		if permits["high"] < permits["flood"] || permits["flood"] < permits["low"] {
			t.Errorf("the classes used %v permits, want the higher one at least as many", permits)
		}
		// The class low is served all the time: its calls wait for one another, not for the others.
		if longest := time.Duration(loads["low"].longest.Load()); longest > 2*20*call {
			t.Errorf("a call of class low waited %s", longest)
		}
	})
}

// ATD, "Fair-Share Scheduling", 1: by the time used, not by the number of calls or callers.
func TestEqualShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 8, Wait: jsontime.Duration(time.Hour)})
		long := &load{workflow: "long", callers: 40, hold: 500 * time.Millisecond}
		short := &load{workflow: "short", callers: 400, hold: 50 * time.Millisecond}
		share(t, p, 200*time.Second, long, short)
		if ratio := float64(long.calls.Load()) * 10 / float64(short.calls.Load()); ratio < 0.9 || ratio > 1.1 {
			t.Errorf("they used permits for times of %.2f to 1, want 1 to 1 within a tenth", ratio)
		}
	})
}

// With more workflows than permits, each has its share in turn.
func TestMoreWorkflowsThanPermits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 3, Wait: jsontime.Duration(time.Hour)})
		var loads []*load
		for i := range 10 {
			loads = append(loads, &load{workflow: fmt.Sprint(i), callers: 5 + 5*i, hold: time.Duration(1+i) * 100 * time.Millisecond})
		}
		share(t, p, 1000*time.Second, loads...)
		for _, l := range loads {
			if used := time.Duration(l.calls.Load()) * l.hold; used < 270*time.Second || used > 330*time.Second {
				t.Errorf("%s used permits for %s, want 300s within a tenth", l.workflow, used)
			}
		}
	})
}

// ATD, "Fair-Share Scheduling", 2: what is left of the base shares goes to the higher class.
func TestWhatIsLeftGoesToTheHigherClass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 9, Wait: jsontime.Duration(time.Hour)})
		low := &load{workflow: "low", class: bulkhead.Low, callers: 1, hold: 100 * time.Millisecond}
		normal := &load{workflow: "normal", callers: 30, hold: 100 * time.Millisecond}
		high := &load{workflow: "high", class: bulkhead.High, callers: 30, hold: 100 * time.Millisecond}
		share(t, p, 100*time.Second, low, normal, high)
		// Three each; low needs one at most, so that two are left. Shared evenly, normal and high would have 4000 each. Who
		// comes first of those that come at once is chance.
		for l, want := range map[*load][2]int64{low: {450, 1000}, normal: {2700, 3600}, high: {4500, 5700}} {
			if got := l.calls.Load(); got < want[0] || got > want[1] {
				t.Errorf("%s made %d calls, want %d to %d", l.workflow, got, want[0], want[1])
			}
		}
	})
}

// The order of those that wait for one permit.
func TestOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 1, Wait: jsontime.Duration(time.Hour)})
		permit := acquire(t, p, "a")
		done := make(chan bulkhead.Call, 10)
		wait(t, p, bulkhead.Call{Sharer: of("starved"), Class: bulkhead.Low}, done)
		<-time.After(5*time.Minute - time.Second)
		for _, c := range []bulkhead.Call{
			{Sharer: of("b"), Class: bulkhead.Low}, {Sharer: of("a"), Class: bulkhead.High}, {Sharer: of("c")},
			{Sharer: of("d")}, {Sharer: of("e"), Class: bulkhead.High}, {Sharer: of("f"), Class: bulkhead.Critical},
		} {
			wait(t, p, c, done)
			<-time.After(time.Millisecond)
		}
		<-time.After(time.Second)
		permit.Release()
		// a is last of its class, since it has used time.
		for _, want := range []string{"starved", "f", "e", "a", "c", "d", "b"} {
			if got := <-done; got.Workflow != want {
				t.Errorf("%s has the permit, want %s", got.Workflow, want)
			}
		}
		synctest.Wait()
		empty(t, p)
	})
}

// ATD, "Fair-Share Scheduling", 3.
func TestLowIsServedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 4, Wait: jsontime.Duration(time.Hour), PerWorkflow: 4})
		var loads []*load
		for i := range 12 { // more than there are permits: a base share of none
			loads = append(loads, &load{workflow: fmt.Sprint("high", i), class: bulkhead.High, callers: 20, hold: 2 * time.Second})
		}
		critical := &load{workflow: "critical", class: bulkhead.Critical, callers: 2, hold: time.Second}
		low := &load{workflow: "low", class: bulkhead.Low, callers: 1, hold: time.Second}
		share(t, p, time.Hour, append(loads, critical, low)...)
		if longest := time.Duration(low.longest.Load()); longest > 302*time.Second {
			t.Errorf("a call of class low waited %s, want 300s and the time of a call at most", longest)
		}
		if low.calls.Load() < 10 {
			t.Errorf("class low made %d calls in an hour, want one in about 302s", low.calls.Load())
		}
		if longest := time.Duration(critical.longest.Load()); longest > 2*time.Second {
			t.Errorf("a critical call waited %s, want the time of one call at most", longest)
		}
	})
}

func TestPerWorkflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 10, PerWorkflow: 2, Queue: 1})
		first, second := acquire(t, p, "a"), acquire(t, p, "a")
		done := make(chan bulkhead.Call, 10)
		wait(t, p, bulkhead.Call{Sharer: of("a")}, done)
		var none bulkhead.Permit
		refused(t, p.Acquire(t.Context(), &bulkhead.Call{Sharer: of("a")}, &none), bulkhead.QueueFull)
		other := acquire(t, p, "b") // does not wait for those that may have no more
		if s := p.Status(); s.InUse != 3 || s.Waiting != 1 || s.Workflows != 2 || s.Counts.Refused[bulkhead.QueueFull] != 1 {
			t.Errorf("status %+v", s)
		}
		second.Release()
		<-done
		for _, permit := range []*bulkhead.Permit{first, second, other, &none} {
			permit.Release()
			permit.Release() // nothing
		}
		synctest.Wait()
		empty(t, p)
	})
}

// A call whose client has left gets no permit.
func TestWhoLeavesGetsNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 1})
		permit := acquire(t, p, "a")
		gone := errors.New("gone")
		ctx, leave := context.WithCancelCause(t.Context())
		left := make(chan error)
		go func() {
			var none bulkhead.Permit
			left <- p.Acquire(ctx, &bulkhead.Call{Sharer: of("b")}, &none)
		}()
		synctest.Wait()
		leave(gone)
		if err := <-left; err != gone {
			t.Errorf("Acquire: %v, want the cause", err)
		}
		permit.Release()
		if s := p.Status(); s.Counts.Granted != 1 || s.Counts.Left != 1 {
			t.Errorf("%+v, want one permit granted, and one call that left", s.Counts)
		}
		empty(t, p)
	})
}

// A client that leaves in the moment in which its call gets the permit gives it to the next one.
func TestLeavesWithThePermit(t *testing.T) {
	for range 200 {
		p := newPool(t, bulkhead.Settings{Total: 1})
		permit := acquire(t, p, "a")
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() {
			var permit bulkhead.Permit
			if p.Acquire(ctx, &bulkhead.Call{Sharer: of("b")}, &permit) == nil {
				permit.Release()
			}
		})
		all.Go(leave)
		all.Go(permit.Release)
		all.Go(func() {
			var permit bulkhead.Permit
			if err := p.Acquire(t.Context(), &bulkhead.Call{Sharer: of("c")}, &permit); err != nil {
				t.Error(err)
			}
			permit.Release()
		})
		all.Wait()
		empty(t, p)
	}
}

func TestWaitsEnd(t *testing.T) {
	for _, c := range []struct {
		class  bulkhead.Class
		within time.Duration // the deadline
		want   time.Duration
	}{
		{bulkhead.Normal, 0, 5 * time.Second},
		{bulkhead.Critical, 0, 5 * time.Second},
		{bulkhead.Low, 0, 300 * time.Second},
		{bulkhead.Low, 3 * time.Second, 3 * time.Second},
	} {
		t.Run(fmt.Sprint(c.class, c.within), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPool(t, bulkhead.Settings{Total: 1, Wait: jsontime.Duration(5 * time.Second)})
				defer empty(t, p)
				defer acquire(t, p, "a").Release()
				begun, unserved := time.Now(), time.Duration(0)
				call := bulkhead.Call{Sharer: of("b"), Class: c.class, Unserved: func() { unserved = time.Since(begun) }}
				if c.within > 0 {
					call.Deadline = begun.Add(c.within)
				}
				var none bulkhead.Permit
				refused(t, p.Acquire(t.Context(), &call, &none), bulkhead.WaitedTooLong)
				if waited := time.Since(begun); waited != c.want {
					t.Errorf("it waited %s, want %s", waited, c.want)
				}
				if want := min(c.want, bulkhead.UnservedAfter); unserved != want {
					t.Errorf("it was unserved after %s, want %s", unserved, want)
				}
			})
		})
	}
}

// What cannot be in time is refused at once, with the time to come back.
func TestTooLateIsRefusedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 2, Wait: jsontime.Duration(time.Hour)})
		for range 20 { // learn how long calls take
			permit := acquire(t, p, "a")
			<-time.After(10 * time.Second)
			permit.Release()
		}
		held := []*bulkhead.Permit{acquire(t, p, "a"), acquire(t, p, "a")}
		done := make(chan bulkhead.Call, 10)
		for range 3 {
			wait(t, p, bulkhead.Call{Sharer: of("a")}, done)
		}
		var none bulkhead.Permit
		begun := time.Now()
		err := p.Acquire(t.Context(), &bulkhead.Call{Sharer: of("a"), Deadline: begun.Add(15 * time.Second)}, &none)
		if full := refused(t, err, bulkhead.TooLate); full.RetryAfter != 20*time.Second || time.Since(begun) != 0 {
			t.Errorf("refused after %s, and to come back in %s; want at once, and 20s: four calls of 10s by two permits", time.Since(begun), full.RetryAfter)
		}
		// The other workflow's queue is empty.
		go wait(t, p, bulkhead.Call{Sharer: of("b"), Deadline: begun.Add(15 * time.Second)}, done)
		<-time.After(time.Second)
		for _, permit := range held {
			permit.Release()
		}
		for range 4 {
			<-done
		}
		synctest.Wait()
		empty(t, p)
	})
}

func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Rate: 10})
		begun, granted := time.Now(), 0
		for time.Since(begun) < 10*time.Second {
			var permit bulkhead.Permit
			if err := p.Acquire(t.Context(), &bulkhead.Call{Sharer: of("a")}, &permit); err == nil {
				granted++
			} else {
				refused(t, err, bulkhead.OverRate)
			}
			permit.Release()
			<-time.After(7 * time.Millisecond)
		}
		if granted < 108 || granted > 110 {
			t.Errorf("%d calls in 10 s, want ten at once and ten a second", granted)
		}
		acquire(t, p, "b").Release()
		empty(t, p)
	})
}

func TestConfigure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 2})
		held := []*bulkhead.Permit{acquire(t, p, "a"), acquire(t, p, "b")}
		done := make(chan bulkhead.Call, 2)
		wait(t, p, bulkhead.Call{Sharer: of("c")}, done)
		smaller, _ := bulkhead.Settings{Total: 1}.Check()
		p.Configure(smaller)
		held[0].Release()
		synctest.Wait()
		if len(done) > 0 {
			t.Error("a permit was given that is over the new total")
		}
		larger, _ := bulkhead.Settings{Total: 3}.Check()
		p.Configure(larger)
		<-done
		held[1].Release()
		synctest.Wait()
		empty(t, p)
	})
}

// Random calls, with every way to end: no permit is lost, and none is invented.
func TestNoPermitIsLostOrInvented(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			p := newPool(t, bulkhead.Settings{Total: 5, PerWorkflow: 3, Queue: 6, Wait: jsontime.Duration(2 * time.Second), RetryFloor: 2})
			var inUse atomic.Int64
			var of [4]atomic.Int64
			var all sync.WaitGroup
			for i := range uint64(60) {
				random := rand.New(rand.NewPCG(seed, i))
				all.Go(func() {
					for range 50 {
						<-time.After(time.Duration(random.IntN(500)) * time.Millisecond)
						one(t, p, random, &inUse, &of)
					}
				})
			}
			all.Wait()
			empty(t, p)
			if s := p.Status(); s.Counts.Granted == 0 || s.Counts.Left == 0 || s.Counts.Refused[bulkhead.WaitedTooLong] == 0 || s.Counts.Refused[bulkhead.QueueFull] == 0 ||
				s.Counts.Retries == 0 || s.Counts.Refused[bulkhead.OverRetries] == 0 {
				t.Errorf("seed %d did not see everything: %+v", seed, s.Counts)
			}
		})
	}
}

func one(t *testing.T, p *bulkhead.Pool, random *rand.Rand, inUse *atomic.Int64, holds *[4]atomic.Int64) {
	ctx := t.Context()
	if random.IntN(3) == 0 {
		limited, cancel := context.WithTimeout(ctx, time.Duration(random.IntN(800))*time.Millisecond)
		defer cancel()
		ctx = limited
	}
	w := random.IntN(len(holds))
	c := bulkhead.Call{Sharer: of(fmt.Sprint(w)), Class: bulkhead.Class(random.IntN(4)) + bulkhead.Low, Key: random.Uint64N(40)}
	if random.IntN(3) == 0 {
		c.Deadline = time.Now().Add(time.Duration(random.IntN(3000)) * time.Millisecond)
	}
	defer func() { _ = recover() }()
	var permit bulkhead.Permit
	defer permit.Release()
	if p.Acquire(ctx, &c, &permit) != nil {
		return
	}
	if n := inUse.Add(1); n > 5 {
		t.Errorf("%d of 5 permits are held", n)
	}
	if n := holds[w].Add(1); n > 3 {
		t.Errorf("a workflow holds %d of 3 permits", n)
	}
	<-time.After(time.Duration(random.IntN(400)) * time.Millisecond)
	if random.IntN(3) > 0 {
		permit.Sent()
		p.Failed(c.Key)
	}
	holds[w].Add(-1)
	inUse.Add(-1)
	if random.IntN(10) == 0 {
		panic("in the call")
	}
}

func TestNamesOfWorkflowsAreForgotten(t *testing.T) {
	p := newPool(t, bulkhead.Settings{})
	size := func() int { return bulkhead.Lots(p) }
	for i := range 10_000 {
		acquire(t, p, fmt.Sprint(i)).Release()
	}
	if n := size(); n > 200 {
		t.Errorf("%d workflows are kept of 10,000 that have ended", n)
	}
}

func TestCheckNamesTheOption(t *testing.T) {
	for _, c := range []struct {
		set  bulkhead.Settings
		want string
	}{
		{bulkhead.Settings{Total: -1}, "total is -1; it must be from 1 to 1000000"},
		{bulkhead.Settings{PerWorkflow: 2_000_000}, "per_workflow is 2000000; it must be from 1 to 1000000"},
		{bulkhead.Settings{Queue: 2_000_000}, "queue is 2000000; it must be at most 1000000"},
		{bulkhead.Settings{Wait: -1}, "wait is -1ns; it must be over 0 and at most 1h"},
		{bulkhead.Settings{Rate: -1}, "rate is -1; it must be from 1 to 1000000 calls a second, or 0 for any number"},
		{bulkhead.Settings{Retries: 101}, "retries is 101; it must be from 1 to 100 percent, or negative for any number"},
		{bulkhead.Settings{RetryFloor: 2_000_000}, "retry_floor is 2000000; it must be from 1 to 1000000 retries a second, or negative for none"},
	} {
		if _, err := c.set.Check(); err == nil || err.Error() != c.want {
			t.Errorf("%+v: %v, want %s", c.set, err, c.want)
		}
	}
	if s, err := (bulkhead.Settings{}).Check(); err != nil || s.Total == 0 || s.PerWorkflow == 0 || s.Queue == 0 || s.Wait == 0 || s.Retries != 20 || s.RetryFloor != 10 {
		t.Errorf("defaults %+v, %v", s, err)
	}
	if s, err := (bulkhead.Settings{Queue: -1}).Check(); err != nil || s.Queue != 0 {
		t.Errorf("without a queue: %+v, %v", s, err)
	}
}

func TestClassNames(t *testing.T) {
	want := []bulkhead.Class{bulkhead.Low, bulkhead.Normal, bulkhead.High, bulkhead.Critical}
	for i, name := range bulkhead.Classes() {
		if c, ok := bulkhead.ParseClass(name); !ok || c != want[i] || c.String() != name {
			t.Errorf("%s is %v, %v", name, c, ok)
		}
	}
	if _, ok := bulkhead.ParseClass("urgent"); ok {
		t.Error("urgent is a class")
	}
	if !slices.IsSorted(want) {
		t.Error("the classes are not in order")
	}
}

// A call that finds a permit allocates nothing.
func TestAdmissionAllocatesNothing(t *testing.T) {
	p := newPool(t, bulkhead.Settings{Rate: 1_000_000})
	ctx, call := t.Context(), bulkhead.Call{Sharer: of("a"), Key: 1}
	if n := testing.AllocsPerRun(1000, func() {
		var permit bulkhead.Permit
		if err := p.Acquire(ctx, &call, &permit); err != nil {
			t.Fatal(err)
		}
		permit.Sent()
		permit.Release()
	}); n != 0 {
		t.Errorf("%v allocations for each call", n)
	}
}

func BenchmarkAcquire(b *testing.B) {
	b.Run("uncontended", func(b *testing.B) {
		p := newPool(b, bulkhead.Settings{})
		b.ReportAllocs()
		ctx, call := b.Context(), bulkhead.Call{Sharer: of("a")}
		for b.Loop() {
			var permit bulkhead.Permit
			if err := p.Acquire(ctx, &call, &permit); err != nil {
				b.Fatal(err)
			}
			permit.Release()
		}
	})
	b.Run("parallel", func(b *testing.B) {
		p := newPool(b, bulkhead.Settings{})
		b.ReportAllocs()
		b.RunParallel(func(loop *testing.PB) {
			ctx, call := b.Context(), bulkhead.Call{Sharer: of("a")}
			for loop.Next() {
				var permit bulkhead.Permit
				if err := p.Acquire(ctx, &call, &permit); err != nil {
					b.Error(err)
				}
				permit.Release()
			}
		})
	})
	for _, workflows := range []int{10, 1000} {
		b.Run(fmt.Sprintf("%d workflows wait", workflows), func(b *testing.B) {
			p := newPool(b, bulkhead.Settings{Total: 1, Wait: jsontime.Duration(time.Hour)})
			stop := make(chan struct{})
			var all sync.WaitGroup
			for i := range workflows {
				all.Go(func() {
					call := bulkhead.Call{Sharer: of(fmt.Sprint(i))}
					for {
						var permit bulkhead.Permit
						if err := p.Acquire(context.Background(), &call, &permit); err != nil {
							b.Error(err)
						}
						permit.Release()
						select {
						case <-stop:
							return
						default:
						}
					}
				})
			}
			call := bulkhead.Call{Sharer: of("measured"), Class: bulkhead.Critical}
			for b.Loop() {
				var permit bulkhead.Permit
				if err := p.Acquire(b.Context(), &call, &permit); err != nil {
					b.Fatal(err)
				}
				permit.Release()
			}
			close(stop)
			all.Wait()
		})
	}
}

func Example() {
	settings, err := bulkhead.Settings{Total: 8, PerWorkflow: 4, Wait: jsontime.Duration(5 * time.Second)}.Check()
	if err != nil {
		panic(err)
	}
	pool := bulkhead.New(settings)
	call := bulkhead.Call{Sharer: bulkhead.Sharer{Workflow: "order-1183"}, Class: bulkhead.High}
	var permit bulkhead.Permit
	if err := pool.Acquire(context.Background(), &call, &permit); err != nil {
		panic(err) // nothing was sent
	}
	defer permit.Release()
	fmt.Println(pool.Status().InUse)
	// Output: 1
}

// leaving is the context of a client whose end is noticed only by who looks.
type leaving struct {
	context.Context
	gone atomic.Bool
}

func (l *leaving) Err() error {
	if l.gone.Load() {
		return context.Canceled
	}
	return nil
}

// A call that has its permit when its client is found gone is not sent, and gives it back.
func TestPermitOfWhoHasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 1})
		permit, ctx := acquire(t, p, "a"), &leaving{Context: t.Context()}
		got := make(chan error, 1)
		go func() {
			var permit bulkhead.Permit
			got <- p.Acquire(ctx, &bulkhead.Call{Sharer: of("b")}, &permit)
		}()
		synctest.Wait()
		ctx.gone.Store(true)
		permit.Release()
		if err := <-got; !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		empty(t, p)
	})
}

// ATD, "Fair-Share Scheduling", 1: who did not use its share before has no claim to it now.
func TestWhoWasAwayHasNoClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, bulkhead.Settings{Total: 1, Wait: jsontime.Duration(time.Hour)})
		share(t, p, 200*time.Second, &load{workflow: "busy", callers: 5, hold: time.Second})
		busy, away := &load{workflow: "busy", callers: 5, hold: time.Second}, &load{workflow: "away", callers: 5, hold: time.Second}
		share(t, p, 100*time.Second, busy, away)
		if b, a := busy.calls.Load(), away.calls.Load(); a < 45 || b < 45 {
			t.Errorf("%d calls of who was there, %d of who came", b, a)
		}
	})
}
