package breaker_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

func key(i int) breaker.Key { return breaker.Key{Upstream: fmt.Sprintf("10.0.0.%03d:80", i)} }

// C-3.2-a: a breaker for every downstream agent, and none affects another.
func TestUpstreamsDoNotAffectEachOther(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		hook := &recorder{}
		r := breaker.NewRegistry(0, hook)
		rules := mustRules(t, breaker.Settings{})
		write, read := breaker.Key{Upstream: "a:1", Class: "write"}, breaker.Key{Upstream: "a:1", Class: "read"}
		other := breaker.Key{Upstream: "b:1"}
		for _, k := range []breaker.Key{other, write, read} {
			calls(t, r.Get(k, rules), 5, ok)
		}
		trip(t, r.Get(write, rules))
		for _, k := range []breaker.Key{other, read} {
			calls(t, r.Get(k, rules), 5, ok)
			equal(t, "failures", r.Get(k, rules).Status().Failures, 0)
		}
		refused(t, r.Get(write, rules), breaker.Op{})
		equal(t, "key of the event", hook.last(t).Key, write)
		equal(t, "text of a key", write.String(), "a:1 (write)")
		var keys []breaker.Key
		for _, s := range r.Status() {
			keys = append(keys, s.Key)
		}
		equal(t, "keys", fmt.Sprint(keys), "[a:1 (read) a:1 (write) b:1]")
		equal(t, "found", r.Find(write).Key(), write)
		if r.Find(breaker.Key{Upstream: "c:1"}) != nil {
			t.Error("found what nobody asked for")
		}
	})
}

// A reload brings other rules; the state stays.
func TestRegistryKeepsStateOverRules(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		r := breaker.NewRegistry(0, nil)
		before, after := mustRules(t, breaker.Settings{}), mustRules(t, breaker.Settings{MinVolume: 12})
		b := r.Get(upstream, before)
		calls(t, b, 9, failed)
		if r.Get(upstream, after) != b {
			t.Fatal("another breaker")
		}
		calls(t, r.Get(upstream, after), 2, failed)
		want(t, b, breaker.Closed)
		calls(t, r.Get(upstream, after), 1, failed)
		refused(t, r.Get(upstream, before), breaker.Op{})
	})
}

// Only breakers make room that have nothing to remember.
func TestRegistryIsBounded(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		r := breaker.NewRegistry(16, nil)
		rules := mustRules(t, breaker.Settings{})
		for i := range 16 {
			calls(t, r.Get(key(i), rules), 1, ok)
			pass(time.Second)
		}
		trip(t, r.Get(key(0), rules))
		r.Get(key(1), rules).SetMode(breaker.Observe)

		// All are busy: those that come now share one that refuses nobody.
		stranger := r.Get(key(100), rules)
		calls(t, stranger, 100, failed)
		equal(t, "overflowed", r.Overflowed(), 1)
		if r.Get(key(101), rules) != stranger {
			t.Error("there are several breakers for those that found no room")
		}
		equal(t, "breakers", len(r.Status()), 16)

		pass(2 * time.Minute)
		calls(t, r.Get(key(2), rules), 1, ok) // busy again
		for i := 100; i < 200; i++ {
			r.Get(key(i), rules)
			equal(t, "room", len(r.Status()) <= 16, true)
		}
		for i := range 3 {
			equal(t, fmt.Sprint("kept ", i), r.Find(key(i)) != nil, true)
		}
		equal(t, "state of the first", r.Find(key(0)).Status().State, breaker.HalfOpen)
		equal(t, "overflowed", r.Overflowed(), 2)
	})
}

// The one that has been idle for longest goes first.
func TestRegistryEvictsTheLongestIdle(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		r := breaker.NewRegistry(3, nil)
		rules := mustRules(t, breaker.Settings{})
		for _, i := range []int{2, 0, 1} {
			calls(t, r.Get(key(i), rules), 1, ok)
			pass(2 * time.Minute)
		}
		r.Get(key(3), rules)
		equal(t, "kept", r.Find(key(2)) == nil && r.Find(key(0)) != nil && r.Find(key(1)) != nil, true)
	})
}

// A breaker that would open for longer than a new one has something to remember.
func TestRegistryKeepsTheRelapsing(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		r := breaker.NewRegistry(1, nil)
		rules := mustRules(t, breaker.Settings{})
		trip(t, r.Get(key(0), rules))
		pass(30 * time.Second)
		calls(t, r.Get(key(0), rules), 1, ok)
		pass(9 * time.Minute)
		r.Get(key(1), rules)
		equal(t, "kept", r.Find(key(0)) != nil, true)
		pass(time.Minute)
		r.Get(key(1), rules)
		equal(t, "kept", r.Find(key(0)) != nil, false)
	})
}

// What was dropped is forgotten and says nothing more, though calls still hold it.
func TestRegistryDrops(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		r := breaker.NewRegistry(0, hook)
		rules := mustRules(t, breaker.Settings{})
		open, closed := r.Get(key(0), rules), r.Get(key(1), rules)
		r.Get(key(2), rules)
		trip(t, open)
		held := acquire(t, closed)
		r.Drop(func(k breaker.Key) bool { return k != key(2) })
		equal(t, "breakers", len(r.Status()), 1)
		pass(time.Hour)
		held.Done(failed)
		calls(t, closed, 20, failed)
		closed.SetMode(breaker.ForcedOpen)
		pass(time.Hour)
		equal(t, "transitions", len(hook.heard), 1)
		calls(t, r.Get(key(0), rules), 9, failed)
	})
}

// State goes over a restart; what a new breaker would not know better is left out.
func TestRegistrySnapshot(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		r := breaker.NewRegistry(0, nil)
		rules := mustRules(t, breaker.Settings{})
		for i := range 4 {
			calls(t, r.Get(key(i), rules), 1, ok)
		}
		trip(t, r.Get(key(2), rules))
		r.Get(key(0), rules).SetMode(breaker.Observe)
		var all []breaker.Snapshot
		for _, s := range r.Status() {
			if s := r.Find(s.Key).Snapshot(); !s.Blank() {
				all = append(all, s)
			}
		}
		equal(t, "snapshots", len(all), 2)
		equal(t, "first", all[0].Upstream, key(0).Upstream)

		hook := &recorder{}
		again := breaker.NewRegistry(0, hook)
		lives, blank := again.Get(key(0), rules), again.Get(key(2), rules)
		lives.SetMode(breaker.ForcedClosed)
		calls(t, blank, 1, ok)
		for _, s := range all {
			if err := again.Restore(s, rules); err != nil {
				t.Fatal(err)
			}
		}
		equal(t, "what lives knows better", again.Get(key(0), rules).Status().Mode, breaker.ForcedClosed)
		equal(t, "what lives stays", again.Find(key(0)), lives)
		if again.Find(key(2)) == blank {
			t.Error("a breaker that knows nothing has kept out what is recorded")
		}
		refused(t, again.Get(key(2), rules), breaker.Op{})
		pass(30 * time.Second)
		equal(t, "to", hook.last(t).To, breaker.HalfOpen)
		if err := again.Restore(breaker.Snapshot{Upstream: "c"}, rules); err == nil {
			t.Error("an empty snapshot was restored")
		}

		full := breaker.NewRegistry(1, hook)
		trip(t, full.Get(key(9), rules))
		heard := len(hook.heard)
		const tries = 300 // its cooldown is over, and its timer may be as fast as who finds no room
		for range tries {
			if err := full.Restore(all[1], rules); err != nil {
				t.Fatal(err)
			}
		}
		equal(t, "overflowed", full.Overflowed(), tries)
		pass(29 * time.Second)
		equal(t, "transitions of one without room", len(hook.heard), heard)
	})
}

// What is recorded is not lost to calls that come at the same moment.
func TestRegistryRestoresWhileCallsCome(t *testing.T) {
	rules := mustRules(t, breaker.Settings{})
	from := breaker.NewRegistry(0, nil)
	from.Get(key(0), rules).SetMode(breaker.ForcedOpen)
	recorded := from.Find(from.Status()[0].Key).Snapshot()
	for range 200 {
		r := breaker.NewRegistry(0, nil)
		var callers sync.WaitGroup
		restored := make(chan struct{})
		for range 2 {
			callers.Go(func() {
				for {
					r.Get(key(0), rules)
					select {
					case <-restored:
						return
					default:
					}
				}
			})
		}
		err := r.Restore(recorded, rules)
		close(restored)
		callers.Wait()
		if mode := r.Get(key(0), rules).Status().Mode; err != nil || mode != breaker.ForcedOpen {
			t.Fatalf("%v, %v", mode, err)
		}
	}
}

func TestRegistryAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		r := breaker.NewRegistry(8, nil)
		rules := mustRules(t, breaker.Settings{})
		var group sync.WaitGroup
		for range 16 {
			group.Go(func() {
				for i := range 300 {
					p, err := r.Get(key(i%12), rules).Acquire(breaker.Op{})
					if err == nil {
						p.Done(ok)
					}
					if i%100 == 0 {
						r.Status()
						if b := r.Find(key(i % 12)); b != nil {
							b.Snapshot()
						}
					}
				}
			})
		}
		group.Wait()
		equal(t, "breakers", len(r.Status()), 8)
	})
}

// A-coordinated-circuit-breaking-c: while people look at what is behind several breakers, one of them
// probes in place of all; what it finds out is what the others wait for.
func TestSharedProbes(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		r := breaker.NewRegistry(0, nil)
		rules := mustRules(t, breaker.Settings{Cooldown: jsontime.Duration(10 * time.Second)})
		var all []*breaker.Breaker
		var keys []breaker.Key
		for i := range 3 {
			keys = append(keys, key(i))
			all = append(all, r.Get(key(i), rules))
			trip(t, all[i])
		}
		r.ShareProbes(true, append(keys, key(9))...)
		pass(10 * time.Second)
		safe := breaker.Op{Safe: true}

		probe := acquire(t, all[1])
		if open := refused(t, all[0], safe); !open.Until.IsZero() {
			t.Errorf("another one may probe at %v while one does", open.Until)
		}
		refused(t, all[2], safe)
		probe.Done(failed)
		want(t, all[1], breaker.Open)
		for _, b := range all { // 20 s from now on, for all of them
			if left := time.Until(refused(t, b, safe).Until); left != 20*time.Second {
				t.Errorf("the next probe is due in %v", left)
			}
		}
		pass(20 * time.Second)
		probe = acquire(t, all[0])
		refused(t, all[1], safe)
		probe.Done(neutral) // it says nothing, and leaves the probe to the others
		probe = acquire(t, all[2])
		probe.Done(ok)
		want(t, all[2], breaker.Closed)

		probe = acquire(t, all[0])
		refused(t, all[1], safe)
		r.ShareProbes(false, keys...)
		acquire(t, all[1]).Done(ok)
		probe.Done(ok)
		want(t, all[0], breaker.Closed)
		want(t, all[1], breaker.Closed)
	})
}

// A breaker that is forgotten while it probes, or whose probe hangs, does not keep the others waiting.
func TestSharedProbeIsNotLost(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		r := breaker.NewRegistry(0, nil)
		rules := mustRules(t, breaker.Settings{Cooldown: jsontime.Duration(10 * time.Second), ProbeLease: jsontime.Duration(5 * time.Second)})
		a, b := r.Get(key(0), rules), r.Get(key(1), rules)
		trip(t, a)
		trip(t, b)
		pass(10 * time.Second)
		hangs := acquire(t, a) // it was under way before they were put together
		r.ShareProbes(true, key(0), key(1))
		refused(t, b, breaker.Op{Safe: true})
		pass(5 * time.Second) // the lease is over: a opens again
		want(t, a, breaker.Open)
		refused(t, b, breaker.Op{Safe: true})
		pass(20 * time.Second)
		hangs.Done(ok)
		acquire(t, a)
		refused(t, b, breaker.Op{Safe: true})
		r.Drop(func(k breaker.Key) bool { return k == key(0) })
		acquire(t, b).Done(ok)
		want(t, b, breaker.Closed)
	})
}
