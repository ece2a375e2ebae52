package proxy_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// Section 7.1: a reload keeps the state, under other thresholds too, and what the new
// configuration has no more is forgotten.
func TestReload(t *testing.T) {
	old, err := proxy.Open(proxy.Settings{}, []string{"a:1", "b:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	trip(t, old.Breaker("a:1"))
	trip(t, old.Breaker("b:1"))
	until := old.Breaker("a:1").Status().NextProbe

	now := open(t, proxy.Settings{Settings: breaker.Settings{MinVolume: 99, Cooldown: jsontime.Duration(time.Second)}}, []string{"a:1"}, false)
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	a := now.Breaker("a:1").Status()
	if a.State != breaker.Open || !a.NextProbe.Equal(until) || a.MinVolume != 99 {
		t.Errorf("after the reload: %+v, want open until %v", a, until)
	}
	if state := now.Breaker("b:1").Status().State; state != breaker.Closed {
		t.Errorf("the breaker of an upstream that was gone is %v", state)
	}
}

// Breakers do not outlive all that hold them.
func TestNobodyHoldsThem(t *testing.T) {
	c, err := proxy.Open(proxy.Settings{}, []string{"a:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	trip(t, c.Breaker("a:1"))
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if state := open(t, proxy.Settings{}, []string{"a:1"}, false).Breaker("a:1").Status().State; state != breaker.Closed {
		t.Errorf("a breaker that nobody held is %v", state)
	}
}

// Every upstream has to refuse for a call to be refused before it is claimed, and every
// one has to be known.
func TestRefusal(t *testing.T) {
	c := open(t, proxy.Settings{}, []string{"a:1", "b:1"}, false)
	if c.Refusal("POST", nil) != nil {
		t.Error("closed breakers refuse")
	}
	trip(t, c.Breaker("b:1"))
	if c.Refusal("POST", nil) != nil {
		t.Error("one open breaker of two refuses")
	}
	trip(t, c.Breaker("a:1"))
	// Of the two it names the one that is back first.
	if r := c.Refusal("POST", nil); r == nil || r.Key.Upstream != "b:1" || r.Cause != "connection refused" {
		t.Errorf("two open breakers: %+v", r)
	}
	for _, unknown := range [][]string{{"{env.UPSTREAM}"}, {"a:1", "b:1", "x:1-2"}} {
		if r := open(t, proxy.Settings{}, unknown, len(unknown) > 1).Refusal("POST", nil); r != nil {
			t.Errorf("%v: upstreams that are not known refuse: %v", unknown, r)
		}
	}
}

// While a half-open breaker waits for a safe probe, others are refused before anything
// is claimed for them; and what is back at a known time is back first.
func TestRefusalOfUnsuitedProbes(t *testing.T) {
	c := open(t, proxy.Settings{}, []string{"a:1"}, false)
	c.Breaker("a:1").SetMode(breaker.ForcedOpen)
	two := open(t, proxy.Settings{}, []string{"a:1", "b:1"}, false)
	trip(t, two.Breaker("b:1"))
	if r := two.Refusal("POST", nil); r == nil || r.Key.Upstream != "b:1" {
		t.Errorf("%+v", r)
	}
	if r := c.Refusal("GET", nil); r == nil { // so that another one is expected
		t.Error("GET is not refused while the breaker is forced open")
	}
	c.Breaker("a:1").SetMode(breaker.Auto)
	if r := c.Refusal("POST", nil); r == nil || r.State != breaker.HalfOpen || r.RetryAfter() == 0 {
		t.Errorf("POST: %+v", r)
	}
	if r := c.Refusal("GET", nil); r != nil {
		t.Errorf("GET: %+v", r)
	}
	c.Breaker("a:1").SetMode(breaker.Observe)
	if r := c.Refusal("POST", nil); r != nil {
		t.Errorf("observed: %+v", r)
	}
}

// listener notes what it hears.
type listener struct {
	m      *proxy.Member
	heard  []breaker.Event
	ended  []breaker.Event
	states []breaker.State // of the snapshots
	gone   []breaker.Status
}

func (l *listener) Transition(e breaker.Event) {
	l.heard = append(l.heard, e)
	s, _, _ := l.m.Snapshot(e.Key)
	l.states = append(l.states, s.State)
}
func (l *listener) PermanentlyOpen(e breaker.Event) { l.ended = append(l.ended, e) }
func (l *listener) Slow(string, bool)               {}
func (l *listener) Probe(context.Context, breaker.Key, time.Duration) (func(), time.Time, bool) {
	return nil, time.Time{}, true
}
func (l *listener) Dropped(gone []breaker.Status) { l.gone = append(l.gone, gone...) }

// What a configuration leaves behind is told as it stood, once nothing else leads there.
func TestDropped(t *testing.T) {
	old, err := proxy.Open(proxy.Settings{}, []string{"a:1", "b:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	hear := new(listener)
	hear.m = proxy.Join()
	defer hear.m.Leave()
	hear.m.Listen(hear)
	trip(t, old.Breaker("a:1"))
	trip(t, old.Breaker("b:1"))
	open(t, proxy.Settings{}, []string{"a:1"}, false)
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	if len(hear.gone) != 1 || hear.gone[0].Key.Upstream != "b:1" || hear.gone[0].State != breaker.Open {
		t.Errorf("dropped: %+v", hear.gone)
	}
	if _, there, _ := hear.m.Snapshot(breaker.Key{Upstream: "b:1"}); there {
		t.Error("what was dropped has a snapshot")
	}
}

// The member that joined last hears of each transition, and may ask back.
func TestMembers(t *testing.T) {
	c := open(t, proxy.Settings{Downstream: map[string]string{"a:1": "spiffe://example.com/a"}}, []string{"a:1"}, false)
	first, second := new(listener), new(listener)
	first.m, second.m = proxy.Join(), proxy.Join()
	first.m.Listen(first)
	second.m.Listen(second)
	defer first.m.Leave()
	trip(t, c.Breaker("a:1"))
	if len(first.heard) != 0 || len(second.heard) != 1 || !slices.Equal(second.states, []breaker.State{breaker.Open}) {
		t.Errorf("heard: %v and %v", first.heard, second.heard)
	}
	second.m.Keep(second.heard[0], "token")
	if s, ok, _ := second.m.Snapshot(breaker.Key{Upstream: "a:1"}); !ok || s.Reference != "token" {
		t.Errorf("%+v", s)
	}
	second.m.Leave()
	c.Breaker("a:1").SetMode(breaker.ForcedClosed)
	if len(first.heard) != 1 || len(second.heard) != 1 {
		t.Errorf("heard after the last has left: %v and %v", first.heard, second.heard)
	}
	if all := first.m.Status(); len(all) != 1 || all[0].Key.Upstream != "a:1" {
		t.Errorf("status %+v", all)
	}
	if a, b := first.m.Downstream("a:1"), first.m.Downstream("b:1"); a != "spiffe://example.com/a" || b != "b:1" {
		t.Errorf("downstream %s and %s", a, b)
	}
}

// Section 7.1: OPEN stays OPEN over a restart, with the same deadline. A call that came
// first does not undo it; a breaker that has something to remember is left alone.
func TestRestore(t *testing.T) {
	before, err := proxy.Open(proxy.Settings{}, []string{"a:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	old := proxy.Join()
	trip(t, before.Breaker("a:1"))
	key := breaker.Key{Upstream: "a:1"}
	s, ok, _ := old.Snapshot(key)
	if !ok {
		t.Fatal("an open breaker has no snapshot")
	}
	old.Leave()
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}

	after := open(t, proxy.Settings{}, []string{"a:1"}, false)
	m := proxy.Join()
	defer m.Leave()
	permit, err := after.Breaker("a:1").Acquire(breaker.Op{})
	if err != nil {
		t.Fatal(err)
	}
	permit.Done(breaker.Outcome{Class: breaker.Success})
	if kept, err := m.Restore(s); !kept || err != nil {
		t.Fatal(kept, err)
	}
	is := after.Breaker("a:1").Status()
	if late := is.NextProbe.Sub(s.Until).Abs(); is.State != breaker.Open || late > time.Millisecond {
		t.Errorf("restored %+v, want open until %v", is, s.Until)
	}
	s.State, s.Until, s.Cooldown = breaker.Closed, time.Time{}, 0
	if kept, err := m.Restore(s); !kept || err != nil || after.Breaker("a:1").Status().State != breaker.Open {
		t.Errorf("an older snapshot has changed the breaker: %v, %v", kept, err)
	}
	s.Upstream = "gone:1"
	if kept, err := m.Restore(s); kept || err != nil {
		t.Errorf("an upstream that nothing leads to: %v, %v", kept, err)
	}
	if _, err := m.Restore(breaker.Snapshot{Upstream: "a:1", Class: "odd"}); err == nil {
		t.Error("a snapshot that no breaker can have made is accepted")
	}
}

func TestAddress(t *testing.T) {
	for dial, want := range map[string]string{
		"localhost:9001": "localhost:9001", "tcp/[::1]:80": "[::1]:80", "unix//run/a.sock": "unix//run/a.sock",
		"tcp6/host:1": "tcp6/host:1",
	} {
		if got, err := proxy.Address(dial); err != nil || got != want {
			t.Errorf("%s: %s, %v", dial, got, err)
		}
	}
	if got, err := proxy.Address("host:x"); err == nil {
		t.Errorf("host:x: %s", got)
	}
}

// ADR 0053: a breaker of the gateway's own calls opens with five failures in a row, for 5 s
// and for 30 s at most, and lives in the next process.
func TestOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := proxy.Join()
		for i := range 9 {
			for range 5 { // a probe is the first that fails
				p, err := m.UndoBreaker("a:1").Acquire(breaker.Op{})
				if err != nil {
					break
				}
				p.Done(breaker.Outcome{Class: breaker.Failure, RetryAfter: time.Hour * time.Duration(min(i, 1))})
			}
			refusal := m.UndoBreaker("a:1").Refusal()
			if refusal == nil {
				t.Fatal("it is not open")
			}
			wait := refusal.RetryAfter()
			if i == 0 && wait != 5*time.Second || wait > 30*time.Second {
				t.Errorf("opening %d is for %v", i, wait)
			}
			if i < 8 {
				time.Sleep(wait)
				synctest.Wait() // the timer that ends the cooldown fires at the same instant
			}
		}
		s, ok, _ := m.Snapshot(breaker.Key{Upstream: "a:1", Class: proxy.UndoClass})
		m.Leave()
		if !ok {
			t.Fatal("nothing of it is kept")
		}
		m = proxy.Join()
		defer m.Leave()
		if kept, err := m.Restore(s); !kept || err != nil || m.UndoBreaker("a:1").Refusal() == nil {
			t.Errorf("the next process has not got it: %v, %v", kept, err)
		}
	})
}

// They are forgotten when nobody asks for them, and bounded, whatever transports lead to:
// but for what an operator has set.
func TestOwnIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := proxy.Open(proxy.Settings{}, nil, true)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		m := proxy.Join()
		defer m.Leave()
		there := func() (n int) {
			for _, s := range m.Status() {
				if s.Key.Class == proxy.UndoClass {
					n++
				}
			}
			return n
		}
		m.UndoBreaker("set:1").SetMode(breaker.ForcedOpen)
		for i := range 300 {
			m.UndoBreaker(fmt.Sprint("a:", i))
			time.Sleep(time.Second)
		}
		if n := there(); n != 128 {
			t.Errorf("there are %d of them", n)
		}
		m.UndoBreaker("a:0")
		time.Sleep(59 * time.Minute)
		m.UndoBreaker("a:1")
		time.Sleep(2 * time.Minute)
		if n := there(); n != 2 || m.UndoBreaker("set:1").Refusal() == nil {
			t.Errorf("there are %d of them, want that of a:1 and that of set:1", n)
		}
	})
}
