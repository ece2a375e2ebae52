package execution_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// backend is a store that members share: in memory, or a database.
type backend struct {
	*fleet
	// join returns another member of the store, and what removes it.
	join func(name string) (m store.Shared, remove func())
	// pass waits until members may have heard of each other: up to d.
	pass func(d time.Duration)
}

// inMemory has the test run in a bubble.
func inMemory(t *testing.T, test func(t *testing.T, b backend)) {
	bubble(t, func(t *testing.T, f *fleet) {
		join := func(name string) (store.Shared, func()) {
			m := f.mem.Join(name)
			return m, m.Remove
		}
		test(t, backend{f, join, func(d time.Duration) { <-time.After(d); synctest.Wait() }})
	})
}

// node is a gateway's guard over a member of the store.
func (b backend) node(name string) *node {
	b.t.Helper()
	m, _ := b.join(name)
	return b.open(nil, m)
}

// unsure is a member of a store that does not always learn whether a commit has landed.
type unsure struct {
	store.Shared
	remove func()
	random *rand.Rand
	mu     sync.Mutex
	off    bool
}

func (u *unsure) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	u.mu.Lock()
	n := u.random.IntN(40)
	if u.off {
		n = 2
	}
	u.mu.Unlock()
	switch n {
	case 0:
		return 0, store.ErrUnknown
	case 1:
		if _, err := u.Shared.Commit(ctx, batch...); err != nil {
			return 0, err
		}
		return 0, store.ErrUnknown
	}
	return u.Shared.Commit(ctx, batch...)
}

// limited are members with random operations of one caller.
type limited struct {
	backend
	random  *rand.Rand
	quota   execution.Quota
	nodes   []*node
	stores  []*unsure
	running []map[string]*execution.Execution // by node
	ids     []string
	joined  int
}

func (l *limited) add() {
	l.joined++
	st := &unsure{random: rand.New(rand.NewPCG(l.random.Uint64(), 2)), off: true}
	st.Shared, st.remove = l.join(fmt.Sprint("n", l.joined))
	l.nodes, l.stores = append(l.nodes, l.open(nil, st)), append(l.stores, st)
	l.running = append(l.running, map[string]*execution.Execution{})
	st.surely(false)
}

// surely has the store say of all commits what has become of them, or not.
func (u *unsure) surely(sure bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.off = sure
}

// remove ends a member as the others do that find its lease over.
func (l *limited) remove(i int) {
	l.stores[i].remove()
	l.nodes, l.stores, l.running = slices.Delete(l.nodes, i, i+1), slices.Delete(l.stores, i, i+1), slices.Delete(l.running, i, i+1)
}

// holds is how many executions are open, by what every member finds.
func (l *limited) holds() (n int) {
	for _, id := range l.ids {
		for _, d := range l.nodes {
			c := d.bounded("a", id, l.quota)
			if s := d.find(c).Status; s == execution.RunningHere || s == execution.RunningElsewhere || s == execution.Doubtful {
				n++
				break
			}
		}
	}
	return n
}

// claims claims a call at a member, or reports that there is no room.
func (l *limited) claims(i int, id string) bool {
	d := l.nodes[i]
	c := d.bounded("a", id, l.quota)
	found := d.find(c)
	if found.Status != execution.Free && found.Status != execution.Doubtful {
		return false
	}
	e, err := d.Claim(ctx, c, found)
	switch {
	case errors.As(err, new(*execution.QuotaError)):
		if found.Status == execution.Doubtful {
			l.t.Error("a doubt cannot be run again")
		}
		return false
	case errors.Is(err, execution.ErrTaken), errors.Is(err, execution.ErrStore):
		return false
	case err != nil:
		l.t.Fatal(err)
	}
	l.running[i][id] = e
	return true
}

// acts does something at a member.
func (l *limited) acts(i int) {
	d, own := l.nodes[i], l.running[i]
	switch n := l.random.IntN(20); {
	case n < 8:
		id := fmt.Sprint(len(l.ids))
		l.ids = append(l.ids, id)
		l.claims(i, id)
	case n < 14:
		if len(own) > 0 {
			id := slices.Sorted(maps.Keys(own))[l.random.IntN(len(own))]
			e := own[id]
			o := []execution.Outcome{
				{Verdict: execution.Released}, {Verdict: execution.InDoubt, Cause: execution.CauseLost}, answered(e, []byte("x")),
			}[l.random.IntN(3)]
			delete(own, id)
			_ = e.Settle(ctx, o) // whose record may be lost
		}
	case n < 15 && len(l.nodes) > 2:
		l.remove(i)
		l.add()
	case n < 16:
		l.pass(time.Duration(l.random.IntN(3000)) * time.Millisecond)
	case len(l.ids) > 0:
		id := l.ids[l.random.IntN(len(l.ids))]
		c := d.bounded("a", id, l.quota)
		all, err := d.ByID(ctx, d.Caller("a"), id)
		if err != nil || len(all) == 0 {
			return
		}
		switch l.random.IntN(3) {
		case 0:
			l.claims(i, id)
		case 1:
			_ = d.SettleDoubt(ctx, all[0], execution.Resolution{By: execution.ByOperator, Operator: "o", Reason: "r", Applied: l.random.IntN(2) == 0})
		default:
			_ = d.Undone(ctx, execution.Undoing{Key: c.Key, Caller: d.Caller("a"), ID: id})
		}
	}
}

// ADR 0137: the open executions of a caller are never more than the limit at all gateways together, whatever becomes
// of them and of the gateways; and in the end there is room for as many as that.
func TestFleetQuotaOfOpenExecutions(t *testing.T) {
	for seed := range uint64(20) {
		inMemory(t, func(t *testing.T, b backend) { quotaOfOpenExecutions(t, b, seed, 150) })
	}
}

func quotaOfOpenExecutions(t *testing.T, b backend, seed uint64, steps int) {
	l := &limited{backend: b, random: rand.New(rand.NewPCG(seed, 1)), quota: execution.Quota{Open: 4 + int(seed%9)}}
	for range 3 {
		l.add()
	}
	for step := range steps {
		l.acts(l.random.IntN(len(l.nodes)))
		if n := l.holds(); n > l.quota.Open {
			t.Fatalf("seed %d, step %d: %d open executions, at most %d", seed, step, n, l.quota.Open)
		}
	}
	for _, st := range l.stores {
		st.surely(true)
	}
	for range 3 { // until all have noticed who has left
		l.pass(2 * time.Second)
	}
	for i := 0; l.holds() < l.quota.Open; i++ {
		id := fmt.Sprint("more", i)
		l.ids = append(l.ids, id)
		if i > 20*l.quota.Open {
			t.Fatalf("seed %d: %d open executions, and no room for %d", seed, l.holds(), l.quota.Open)
		}
		if !l.claims(i%len(l.nodes), id) {
			l.pass(2 * time.Second)
		}
	}
	l.ids = append(l.ids, "over")
	for i := range l.nodes {
		if l.claims(i, "over") {
			t.Errorf("seed %d: %d open executions, at most %d", seed, l.holds(), l.quota.Open)
		}
	}
}

// notifiedLate is a member that does not hear of those that leave, and with whom something happens before a commit.
type notifiedLate struct {
	*memory.Member
	before func(batch []store.Write)
}

func (n *notifiedLate) Left() <-chan struct{} { return nil }

func (n *notifiedLate) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if n.before != nil {
		n.before(batch)
	}
	return n.Member.Commit(ctx, batch...)
}

// What a gateway has left open counts from its removal on, also while nobody has recorded that it is in doubt; what it
// has set aside and not used is free.
func TestFleetOpenExecutionsOfWhoIsGone(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		q := execution.Quota{Open: 10}
		a := f.join("a")
		for i := range 3 {
			a.claim(a.bounded("a", fmt.Sprint("a", i), q))
		}
		crashes := &notifiedLate{Member: f.mem.Join("b")}
		b := f.open(crashes.Member, crashes)
		crashes.before = func(batch []store.Write) {
			if batch[0].Key[0] == 'x' { // it has raised its cap, and not used it
				crashes.Remove()
			}
		}
		if _, err := b.Claim(ctx, b.bounded("a", "b", q), execution.Finding{}); !errors.Is(err, execution.ErrStore) {
			t.Fatalf("a gateway that is gone has claimed a call: %v", err)
		}
		late := f.mem.Join("c")
		c := f.open(late, &notifiedLate{Member: late})
		claims := func(id string) bool {
			_, err := c.Claim(ctx, c.bounded("a", id, q), execution.Finding{})
			if err != nil && !errors.As(err, new(*execution.QuotaError)) {
				t.Fatal(err)
			}
			return err == nil
		}
		if !claims("c") {
			t.Fatal("no room")
		}
		a.member.Remove()
		n := 4
		for i := range 40 {
			if claims(fmt.Sprint("c", i)) {
				n++
			} else {
				<-time.After(2 * time.Second)
			}
		}
		if n != 10 {
			t.Errorf("%d open executions, and there is room for 10", n)
		}
	})
}

// What runs for longer than a record of caps is kept counts all the same.
func TestFleetQuotaOfWhatRunsForDays(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		q := execution.Quota{Open: 2}
		a, b := f.join("a"), f.join("b")
		a.claim(a.bounded("a", "1", q))
		a.claim(a.bounded("a", "2", q))
		<-time.After(3 * 24 * time.Hour)
		if over := b.refused(b.bounded("a", "3", q)); over.Open != 2 {
			t.Errorf("%+v", over)
		}
	})
}

// Below its own cap a gateway asks the store for nothing, and on a store that it has alone never.
func TestFleetQuotaCostsNothingBelowTheCap(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		q := execution.Quota{Open: 100, Bytes: 1 << 20}
		st := &counting{Member: f.mem.Join("a")}
		a := f.open(st.Member, st)
		a.claim(a.bounded("a", "first", q))
		synctest.Wait() // until it has looked for what others have left open
		st.asked()
		for i := range 20 {
			if _, err := a.Claim(ctx, a.bounded("a", fmt.Sprint(i), q), execution.Finding{}); err != nil {
				t.Fatal(err)
			}
		}
		if calls := st.asked(); len(calls) != 20 {
			t.Errorf("20 claims make %d calls of the store: %q", len(calls), calls)
		}
	})
}

// counting counts what is asked of a store.
type counting struct {
	*memory.Member
	mu    sync.Mutex
	calls []string
}

func (c *counting) note(call string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, call)
}

// asked returns the calls since the last time.
func (c *counting) asked() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	calls := c.calls
	c.calls = nil
	return calls
}

func (c *counting) Get(ctx context.Context, key []byte) (store.Entry, error) {
	c.note("get " + string(key[:1]))
	return c.Member.Get(ctx, key)
}

func (c *counting) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	c.note(fmt.Sprintf("scan %q", r.From))
	return c.Member.Scan(ctx, r)
}

func (c *counting) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	c.note("commit " + string(batch[0].Key[:1]))
	return c.Member.Commit(ctx, batch...)
}

// Gateways that meet at a limit with many calls at once admit as many as there is room for, and not one more.
func TestFleetQuotaAtOnce(t *testing.T) {
	inMemory(t, func(t *testing.T, b backend) { quotaAtOnce(t, b, 12) })
}

func quotaAtOnce(t *testing.T, b backend, rounds int) {
	const most = 20
	q := execution.Quota{Open: most}
	nodes := []*node{b.node("a"), b.node("b"), b.node("c")}
	var mu sync.Mutex
	claimed := 0
	for round, full := 0, 0; round < rounds && full < 3; round++ {
		if claimed == most {
			full++
		}
		var all sync.WaitGroup
		for i, d := range nodes {
			for n := range 8 {
				all.Go(func() {
					c := d.bounded("a", fmt.Sprint(round, "-", i, "-", n), q)
					_, err := d.Claim(ctx, c, execution.Finding{})
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						claimed++
					} else if !errors.As(err, new(*execution.QuotaError)) {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		if claimed > most {
			t.Fatalf("%d open executions, at most %d", claimed, most)
		}
		b.pass(2 * time.Second) // what is not used is given back
	}
	if claimed != most {
		t.Errorf("%d open executions, and there is room for %d", claimed, most)
	}
}

// blind is a member whose scans, or commits of caps, fail.
type blind struct {
	*memory.Member
	scans, caps atomic.Bool
}

func (b *blind) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	if b.scans.Load() {
		return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, store.ErrUnhealthy) }
	}
	return b.Member.Scan(ctx, r)
}

func (b *blind) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if b.caps.Load() && bytes.Contains(batch[0].Value, []byte("asked")) {
		return 0, store.ErrUnhealthy
	}
	return b.Member.Commit(ctx, batch...)
}

// A gateway that could not count what a caller has admits nothing before it has: what stands counts.
func TestFleetQuotaAfterACountThatFailed(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		q := execution.Quota{Open: 4}
		st := &blind{Member: f.mem.Join("a")}
		a := f.open(st.Member, st)
		n := 0
		for i := range 20 {
			c := a.bounded("a", fmt.Sprint(i), q)
			e, err := a.Claim(ctx, c, execution.Finding{})
			if err != nil {
				st.scans.Store(i < 5)
				continue
			}
			n++
			if err := e.Settle(ctx, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost}); err != nil {
				t.Fatal(err)
			}
			st.scans.Store(n == 3)
		}
		if n != 4 {
			t.Errorf("%d doubts, and there is room for 4", n)
		}
	})
}

// P4: that the others could not be asked for room is an error of the store, and no refusal of the caller.
func TestFleetQuotaThatCannotBeAskedFor(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		q := execution.Quota{Open: 8}
		b := f.join("b")
		b.claim(b.bounded("a", "b", q))
		st := &blind{Member: f.mem.Join("a")}
		a := f.open(st.Member, st)
		var err error
		for i := 0; err == nil; i++ {
			_, err = a.Claim(ctx, a.bounded("a", fmt.Sprint(i), q), execution.Finding{})
			st.caps.Store(true)
		}
		if !errors.Is(err, execution.ErrStore) {
			t.Error(err)
		}
	})
}
