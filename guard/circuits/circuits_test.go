package circuits_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard/circuits"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// gateway is one process: its breakers, and their states in the store.
type gateway struct {
	t        *testing.T
	registry *breaker.Registry
	keeper   *circuits.Keeper
	rules    *breaker.Rules

	mu    sync.Mutex
	heard []breaker.Event
	log   bytes.Buffer
}

// process begins a gateway on a store, as a process does.
func process(t *testing.T, st store.Store, ring *seal.Ring) *gateway {
	t.Helper()
	rules, err := breaker.NewRules(breaker.Settings{Consecutive: 1, Cooldown: jsontime.Duration(time.Minute), ProbeLease: jsontime.Duration(10 * time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{t: t, rules: rules}
	g.registry = breaker.NewRegistry(0, g)
	g.keeper = circuits.New(circuits.Options{
		Store: st, Sealer: ring, Log: slog.New(slog.NewTextHandler(&g.log, nil)),
		Breakers: circuits.Breakers{
			Snapshot: func(key breaker.Key) (s breaker.Snapshot, keep, there bool) {
				b := g.registry.Find(key)
				if b == nil {
					return s, false, false
				}
				s = b.Snapshot()
				return s, !s.Blank(), true
			},
			Restore: func(s breaker.Snapshot) (bool, error) { return s.Upstream != "gone:1", g.registry.Restore(s, rules) },
			Status:  g.registry.Status,
			Follow: func(key breaker.Key, p breaker.PeerProbe) bool {
				b := g.registry.Find(key)
				return b != nil && b.Follow(p)
			},
		},
	})
	g.keeper.Restore(t.Context())
	g.keeper.Follow()
	t.Cleanup(g.end)
	return g
}

// end ends the process: its breakers are gone before its keeper.
func (g *gateway) end() {
	g.registry.Drop(func(breaker.Key) bool { return true })
	g.keeper.Close()
}

func (g *gateway) Transition(ev breaker.Event) {
	g.mu.Lock()
	g.heard = append(g.heard, ev)
	g.mu.Unlock()
	if err := g.keeper.Transition(context.Background(), ev); err != nil && !errors.Is(err, store.ErrUnhealthy) && !errors.Is(err, errAway) {
		g.t.Error(err)
	}
}

func (g *gateway) PermanentlyOpen(breaker.Event) {}

var upstream = breaker.Key{Upstream: "a:1"}

func (g *gateway) breaker() *breaker.Breaker { return g.registry.Get(upstream, g.rules) }

func (g *gateway) state() breaker.State { return g.breaker().Status().State }

// reasons are those of the transitions to a state.
func (g *gateway) reasons(to breaker.State) (all []breaker.Reason) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, ev := range g.heard {
		if ev.To == to {
			all = append(all, ev.Reason)
		}
	}
	return all
}

// fail opens the breaker.
func (g *gateway) fail() {
	g.t.Helper()
	permit, err := g.breaker().Acquire(breaker.Op{})
	if err != nil {
		g.t.Fatal(err)
	}
	permit.Done(breaker.Outcome{Class: breaker.Failure, Cause: "status 503"})
	if g.state() != breaker.Open {
		g.t.Fatal("a failure has not opened the breaker")
	}
}

// probing is a probe under way.
type probing struct {
	permit  breaker.Permit
	release func()
}

// probe asks for a probe, as the transport does. until is when to ask again if it is refused.
func (g *gateway) probe() (p *probing, until time.Time) {
	g.t.Helper()
	permit, err := g.breaker().Acquire(breaker.Op{})
	if err != nil {
		return nil, err.(*breaker.OpenError).Until
	}
	if !permit.Probe() {
		g.t.Fatalf("no probe is asked for: the breaker is %v", g.state())
	}
	release, until, ok := g.keeper.Probe(g.t.Context(), upstream, time.Minute)
	if !ok {
		return nil, permit.Yield(until).Until
	}
	return &probing{permit, release}, time.Time{}
}

func (p *probing) end(class breaker.Class) {
	p.permit.Done(breaker.Outcome{Class: class, Cause: "status 502"})
	p.release()
}

// members are processes on one store, by the names of their nodes.
func members(t *testing.T, nodes ...string) (*memory.Store, *seal.Ring, []*memory.Member, []*gateway) {
	t.Helper()
	st, ring := memory.New(memory.Options{}), seal.Generate()
	t.Cleanup(func() { _ = st.Close() })
	var joined []*memory.Member
	var all []*gateway
	for _, node := range nodes {
		joined = append(joined, st.Join(node))
		all = append(all, process(t, joined[len(joined)-1], ring))
	}
	return st, ring, joined, all
}

// stored counts the states of breakers in a store, and leases.
func stored(t *testing.T, st store.Store) int {
	t.Helper()
	n := 0
	for _, err := range st.Scan(t.Context(), store.Prefix([]byte{circuits.Space})) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

// A breaker's state is its node's: two gateways on one store do not overwrite each other's, each finds its own
// again after a restart, and both see the other's.
func TestStatesOfTwoNodes(t *testing.T) {
	st, ring, joined, all := members(t, "a", "b")
	a, b := all[0], all[1]
	a.fail()
	b.breaker().SetMode(breaker.ForcedClosed)
	if err := b.keeper.Keep(t.Context(), upstream, false); err != nil {
		t.Fatal(err)
	}
	if n := stored(t, st); n != 2 {
		t.Fatalf("%d states are stored, not 2", n)
	}
	others, err := b.keeper.Others(t.Context(), nil)
	if err != nil || len(others) != 1 {
		t.Fatalf("%+v, %v", others, err)
	}
	if o := others[0]; o.Node != "a" || o.Status.Key != upstream || o.Status.State != breaker.Open || o.Status.Cause != "status 503" || o.Status.CooldownRemaining <= 0 || o.Status.ErrorRate != 1 {
		t.Errorf("%+v", o)
	}
	// What was never open is closed, and is not stored.
	idle := breaker.Key{Upstream: "idle:1"}
	if others, err = a.keeper.Others(t.Context(), []breaker.Key{idle}); err != nil || len(others) != 2 ||
		others[0].Status.Mode != breaker.ForcedClosed || others[1].Status.Key != idle || others[1].Status.State != breaker.Closed {
		t.Errorf("%+v, %v", others, err)
	}

	a.end()
	joined[0].Remove()
	if others, err = b.keeper.Others(t.Context(), nil); err != nil || len(others) != 0 {
		t.Errorf("of a node that is gone: %+v, %v", others, err)
	}
	back := process(t, st.Join("a"), ring)
	if s := back.breaker().Status(); s.State != breaker.Open || s.Mode != breaker.Auto {
		t.Errorf("a is back with %+v", s)
	}
	if s := process(t, st.Join("c"), ring).breaker().Status(); s.State != breaker.Closed {
		t.Errorf("a new node begins with %+v", s)
	}
}

// What a gateway has stored that had the store alone is continued by the first member that comes, once.
func TestStatesOfAGatewayThatWasAlone(t *testing.T) {
	st, ring := memory.New(memory.Options{}), seal.Generate()
	alone := process(t, st, ring)
	alone.fail()
	alone.end()
	a := process(t, st.Join("a"), ring)
	if a.state() != breaker.Open {
		t.Errorf("the state of before is lost: %v", a.state())
	}
	if b := process(t, st.Join("b"), ring); b.state() != breaker.Closed {
		t.Errorf("it was taken twice: %v", b.state())
	}
	if n := stored(t, st); n != 1 {
		t.Errorf("%d states are stored, not 1", n)
	}
}

// The log tells of a breaker that was not closed when its process ended: an open one has a time until which it stays
// so, a half-open one has none.
func TestLogOfRestoredStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, ring := memory.New(memory.Options{}), seal.Generate()
		g := process(t, st, ring)
		g.fail()
		g.end()
		g = process(t, st, ring)
		if text := g.log.String(); !strings.Contains(text, "state=open until="+time.Now().Add(time.Minute).UTC().Format("2006-01-02T15:04:05")) {
			t.Errorf("open: %s", text)
		}
		<-time.After(time.Minute)
		synctest.Wait()
		g.probe()
		g.end()
		g = process(t, st, ring)
		if text := g.log.String(); !strings.Contains(text, "state=half_open cause=") {
			t.Errorf("half-open: %s", text)
		}
	})
}

// A state is deleted with its upstream, and not with the process.
func TestForgottenStates(t *testing.T) {
	st, ring := memory.New(memory.Options{}), seal.Generate()
	g := process(t, st, ring)
	g.fail()
	g.registry.Drop(func(breaker.Key) bool { return true })
	if err := g.keeper.Keep(t.Context(), upstream, false); err != nil || stored(t, st) != 1 {
		t.Errorf("%v, and %d states are left of a process that ends, not 1", err, stored(t, st))
	}
	if err := g.keeper.Keep(t.Context(), upstream, true); err != nil || stored(t, st) != 0 {
		t.Errorf("%v, and %d states are left of an upstream that is gone", err, stored(t, st))
	}
}

// ATD, "Coordinated Circuit Breaking": of all nodes with an open breaker one probes, and its success closes them.
func TestOneProbeCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, _, all := members(t, "a", "b", "c")
		a, b, c := all[0], all[1], all[2]
		a.fail()
		b.fail()
		<-time.After(30 * time.Second)
		c.fail() // its cooldown is not over with the others'
		<-time.After(30 * time.Second)
		synctest.Wait()

		p, _ := a.probe()
		if p == nil {
			t.Fatal("nobody may probe")
		}
		for range 2 { // from the store, and from memory
			if q, until := b.probe(); q != nil || time.Until(until) != time.Minute {
				t.Fatalf("a second probe goes out, or is refused until %v", until)
			}
		}
		p.end(breaker.Success)
		synctest.Wait()
		if a.state() != breaker.Closed || b.state() != breaker.Closed || c.state() != breaker.Closed {
			t.Errorf("after the probe: %v, %v, %v", a.state(), b.state(), c.state())
		}
		if got := b.reasons(breaker.Closed); !slices.Equal(got, []breaker.Reason{breaker.PeerPassed}) {
			t.Errorf("b has closed because of %v", got)
		}
	})
}

// Its failure keeps all open for as long as itself, and counts once.
func TestOneProbeFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, _, all := members(t, "a", "b", "c")
		a, b, c := all[0], all[1], all[2]
		a.fail()
		b.fail()
		<-time.After(30 * time.Second)
		c.fail()
		<-time.After(30 * time.Second)
		synctest.Wait()
		p, _ := a.probe()
		p.end(breaker.Failure)
		synctest.Wait()
		for _, g := range all {
			if s := g.breaker().Status(); s.State != breaker.Open || s.CooldownRemaining != 2*time.Minute || s.FailedProbes != 1 || s.Cause != "status 502" {
				t.Errorf("%+v", s)
			}
		}
		if got := b.reasons(breaker.Open); !slices.Equal(got, []breaker.Reason{breaker.Consecutive, breaker.PeerFailed}) {
			t.Errorf("b has opened because of %v", got)
		}
		if got := c.reasons(breaker.Open); !slices.Equal(got, []breaker.Reason{breaker.Consecutive}) {
			t.Errorf("c, which was open, has opened because of %v", got)
		}
		// The next one is sent by another.
		<-time.After(2 * time.Minute)
		synctest.Wait()
		if p, _ = c.probe(); p == nil {
			t.Fatal("nobody may probe after the cooldown")
		}
		p.end(breaker.Failure)
		synctest.Wait()
		if s := a.breaker().Status(); s.State != breaker.Open || s.FailedProbes != 2 || s.CooldownRemaining != 4*time.Minute {
			t.Errorf("%+v", s)
		}
	})
}

// A probe that says nothing gives its place to another node; so does one whose node is gone, at once, and one
// whose lease has ended.
func TestProbeTakenOver(t *testing.T) {
	for name, free := range map[string]func(p *probing, holder *memory.Member){
		"it says nothing":      func(p *probing, _ *memory.Member) { p.end(breaker.Neutral) },
		"its node is gone":     func(_ *probing, holder *memory.Member) { holder.Remove() },
		"its lease has ended ": func(*probing, *memory.Member) { <-time.After(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, _, joined, all := members(t, "a", "b")
				a, b := all[0], all[1]
				a.fail()
				b.fail()
				<-time.After(time.Minute)
				synctest.Wait()
				p, _ := a.probe()
				free(p, joined[0])
				synctest.Wait()
				q, _ := b.probe()
				if q == nil {
					t.Fatal("nobody else may probe")
				}
				if name != "it says nothing" { // what the first one still says is too late for the others
					p.end(breaker.Failure)
					synctest.Wait()
					if b.state() != breaker.HalfOpen {
						t.Fatalf("the probe of before counts: %v", b.state())
					}
				}
				q.end(breaker.Success)
				synctest.Wait()
				if b.state() != breaker.Closed {
					t.Errorf("%v", b.state())
				}
			})
		})
	}
}

// A result says nothing about a breaker that has opened since the probe was sent.
func TestProbeOfBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, _, all := members(t, "a", "b")
		a, b := all[0], all[1]
		a.fail()
		<-time.After(time.Minute)
		synctest.Wait()
		p, _ := a.probe()
		b.fail()
		p.end(breaker.Success)
		synctest.Wait()
		if a.state() != breaker.Closed || b.state() != breaker.Open {
			t.Errorf("%v, %v", a.state(), b.state())
		}
	})
}

var errAway = errors.New("the store is away")

// away is a store that can be away.
type away struct {
	store.Shared
	is atomic.Bool
}

func (s *away) Now(ctx context.Context) (time.Time, error) {
	if s.is.Load() {
		return time.Time{}, errAway
	}
	return s.Shared.Now(ctx)
}

// A breaker does not stay open because of the store: while that is away, each node probes.
func TestProbesWithoutTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, ring := memory.New(memory.Options{}), seal.Generate()
		at := []*away{{Shared: st.Join("a")}, {Shared: st.Join("b")}}
		a, b := process(t, at[0], ring), process(t, at[1], ring)
		a.fail()
		b.fail()
		<-time.After(59 * time.Second)
		at[0].is.Store(true)
		at[1].is.Store(true)
		<-time.After(time.Second)
		synctest.Wait()
		for _, g := range []*gateway{a, b} {
			p, _ := g.probe()
			if p == nil {
				t.Fatal("a probe waits for the store")
			}
			p.end(breaker.Success)
			if g.state() != breaker.Closed {
				t.Errorf("%v", g.state())
			}
		}
	})
}

// A node that was away finds what the others' probe has said meanwhile.
func TestProbeWhileAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, ring, joined, all := members(t, "a", "b")
		a, b := all[0], all[1]
		a.fail()
		b.fail()
		b.end()
		joined[1].Remove()
		<-time.After(time.Minute)
		synctest.Wait()
		p, _ := a.probe()
		p.end(breaker.Success)
		synctest.Wait()
		b = process(t, st.Join("b"), ring)
		synctest.Wait()
		if b.state() != breaker.Closed {
			t.Errorf("%v", b.state())
		}
	})
}

// One gateway on a store of its own asks nobody.
func TestProbeAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, ring := memory.New(memory.Options{}), seal.Generate()
		g := process(t, st, ring)
		g.fail()
		<-time.After(time.Minute)
		synctest.Wait()
		p, _ := g.probe()
		if n := stored(t, st); n != 1 || p == nil {
			t.Errorf("%d entries are stored with a probe, not 1", n)
		}
		p.end(breaker.Success)
	})
}

// All states move to a new sealing key, those of other nodes and of nodes that are gone too.
func TestReseal(t *testing.T) {
	st, ring, joined, all := members(t, "a", "b")
	all[0].fail()
	all[1].fail()
	all[0].end()
	joined[0].Remove()
	next, err := ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Adopt(next, nil, func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := all[1].keeper.Reseal(t.Context()); err != nil {
		t.Fatal(err)
	}
	ids := ring.KeyIDs()
	for entry, err := range st.Scan(t.Context(), store.Prefix([]byte{circuits.Space})) {
		if err != nil || ring.KeyOf(entry.Value) != ids[len(ids)-1] {
			t.Errorf("%v, under key %d", err, ring.KeyOf(entry.Value))
		}
	}
	if back := process(t, st.Join("a"), ring); back.state() != breaker.Open {
		t.Errorf("%v", back.state())
	}
}
