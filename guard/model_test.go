package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// modelCall is what the obviously right model knows of one call.
type modelCall struct {
	call    Call
	open    *Execution // running here
	state   Standing
	expires time.Time // of the result
	forgets time.Time // of the key
	effects int       // since its key was last free by right
}

// TestP1Model drives a guard through random histories, with deaths of its process
// and jumps of time, and compares every look-up with a slow model. It also holds
// that exactly the index entries of the living records are there.
func TestP1Model(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pass := func(d time.Duration) { time.Sleep(d) }
				runModel(t, rand.New(rand.NewPCG(seed, 1)), pass)
			})
		})
	}
}

func runModel(t *testing.T, rnd *rand.Rand, pass func(time.Duration)) {
	ctx := context.Background()
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	open := func() *Guard {
		g, _, err := Open(ctx, mem, ring)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	g := open()
	calls := make([]*modelCall, 5)
	for i := range calls {
		c := Call{
			Scope: Scope{Caller: fmt.Sprint(i % 2), Path: "/", ID: fmt.Sprint(i)}, Workflow: []string{"", "w"}[i%2],
			Deadline: time.Minute, KeepResult: time.Hour, KeepKey: 3 * time.Hour, ResultCap: 1 << 20,
		}
		c.Key = g.Key(c.Scope)
		calls[i] = &modelCall{call: c}
	}
	for range 300 {
		m := calls[rnd.IntN(len(calls))]
		now := time.Now()
		if rnd.IntN(80) == 0 {
			modelUndo(t, g, m)
		}
		switch op := rnd.IntN(20); {
		case op < 8:
			modelClaim(t, g, m, rnd)
		case op < 16:
			if m.open != nil {
				modelSettle(t, m, rnd)
			}
		case op < 17:
			g = open() // the process died and came back
			for _, m := range calls {
				if m.open != nil {
					m.open, m.state = nil, Doubtful
				}
			}
		case op < 18: // the sealing key rotates, and running executions are not waited for
			modelRotate(t, g, ring)
			now = time.Now()
		default:
			pass(time.Duration(rnd.Int64N(int64(2 * time.Hour))))
			now = time.Now()
		}
		for _, m := range calls {
			if m.state == Replayable && !now.Before(m.expires) {
				m.state = ResultExpired
			}
			if m.state == ResultExpired && !now.Before(m.forgets) {
				m.state, m.effects = Free, 0
			}
			found, err := g.Find(ctx, m.call.Key, m.call.Fingerprint)
			if err != nil || found.Standing != m.state {
				t.Fatalf("call %s: standing %d, %v; the model says %d", m.call.Scope.ID, found.Standing, err, m.state)
			}
			if m.effects > 1 {
				t.Fatalf("call %s: %d effects", m.call.Scope.ID, m.effects)
			}
		}
		checkIndex(t, g)
	}
}

func modelRotate(t *testing.T, g *Guard, ring *seal.Ring) {
	next, err := ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := ring.Adopt(next, nil, func(id uint32) error { return g.UseKey(ctx, id) }); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Reseal(ctx, nil); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

// modelUndo undoes a call, or keeps it from running.
func modelUndo(t *testing.T, g *Guard, m *modelCall) {
	err := g.Undone(context.Background(), Undoing{
		Key: m.call.Key, Caller: g.Caller(m.call.Scope.Caller), Workflow: m.call.Workflow, ID: m.call.Scope.ID,
	})
	switch {
	case m.state == RunningHere && !errors.Is(err, ErrRunning), m.state != RunningHere && err != nil:
		t.Fatalf("call %s, which is %d, undone: %v", m.call.Scope.ID, m.state, err)
	case err == nil:
		m.state = RolledBack
	}
}

func modelClaim(t *testing.T, g *Guard, m *modelCall, rnd *rand.Rand) {
	found, err := g.Find(context.Background(), m.call.Key, m.call.Fingerprint)
	if err != nil {
		t.Fatal(err)
	}
	if m.state != Free && (m.state != Doubtful || rnd.IntN(3) > 0) {
		found = Finding{} // somebody who saw the key free long ago
	}
	e, err := g.Claim(context.Background(), &m.call, found)
	switch may := m.state == Free || found.Standing == Doubtful; {
	case err == nil && !may:
		t.Fatalf("claimed a key that is %d", m.state)
	case err != nil && (may || !errors.Is(err, ErrTaken)):
		t.Fatal(err)
	case err == nil:
		if found.Standing == Doubtful {
			m.effects = 0 // there was evidence that it was not applied
		}
		m.open, m.state = e, RunningHere
	}
}

func modelSettle(t *testing.T, m *modelCall, rnd *rand.Rand) {
	o := Outcome{Verdict: Verdict(1 + rnd.IntN(3)), Whole: rnd.IntN(2) == 0}
	m.open.Recording().Start(200, nil)
	m.open.Write(bytes.Repeat([]byte("x"), rnd.IntN(3)*400))
	if err := m.open.Settle(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	m.open = nil
	switch o.Verdict {
	case Completed:
		m.state, m.effects = Replayable, m.effects+1
		m.expires, m.forgets = time.Now().Add(time.Hour), time.Now().Add(3*time.Hour)
	case Released:
		m.state = Free
	case InDoubt:
		m.state, m.effects = Doubtful, m.effects+1
	}
}

// checkIndex compares the index entries with those that the records ask for.
func checkIndex(t *testing.T, g *Guard) {
	t.Helper()
	want, have := map[string]bool{}, map[string]bool{}
	accounts, found := map[string]string{}, map[string]string{}
	for entry, err := range g.store.Scan(context.Background(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		switch entry.Key[0] {
		case spaceRecord:
			r, err := g.open(entry.Value, entry.Key)
			if err != nil {
				t.Fatal(err)
			}
			key := Key(entry.Key[1:])
			want[string(stateKey(r.State, r.Created, key))] = true
			if r.State.Open() {
				continue
			}
			want[string(g.callerKey(r, key))] = true
			accounts[string(g.callerKey(r, key))] = string(accountOf(r, r.size()).encode())
			if r.Workflow != "" {
				want[string(g.workflowKey(r, key))] = true
			}
		case spaceCaller:
			found[string(entry.Key)] = string(entry.Value)
			have[string(entry.Key)] = true
		case spaceState, spaceWorkflow:
			have[string(entry.Key)] = true
		}
	}
	for k := range want {
		if !have[k] {
			t.Fatalf("an entry of index %q is missing", k[0])
		}
	}
	for k := range have {
		if !want[k] {
			t.Fatalf("an entry of index %q belongs to no record", k[0])
		}
	}
	if !maps.Equal(accounts, found) {
		t.Fatal("an account does not tell what its record does")
	}
}

// A claim that was never sent is free again after a crash; one of another node, or
// of this life, is not touched.
func TestRecoveryTellsClaimedFromSending(t *testing.T) {
	ctx := context.Background()
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	g, _, err := Open(ctx, mem, ring)
	if err != nil {
		t.Fatal(err)
	}
	plant := func(id, node string, state State) Call {
		c := Call{Scope: Scope{ID: id}}
		c.Key = g.Key(c.Scope)
		r := g.newRecord(&c, g.Caller(c.Scope.Caller), time.Now())
		r.State, r.Node, r.Boot = state, node, "another life"
		if _, err := mem.Commit(ctx, g.put(c.Key, nil, &r, store.Absent())...); err != nil {
			t.Fatal(err)
		}
		return c
	}
	claimed, sending := plant("1", g.node, StateClaimed), plant("2", g.node, StateSending)
	foreign, undone := plant("3", "elsewhere", StateSending), plant("4", g.node, StateRolledBack)

	g, recovery, err := Open(ctx, mem, ring)
	if err != nil || recovery != (Recovery{InDoubt: 1, Released: 1}) {
		t.Fatalf("recovery %+v, %v", recovery, err)
	}
	for _, row := range []struct {
		call Call
		want Standing
	}{{claimed, Free}, {sending, Doubtful}, {foreign, RunningElsewhere}, {undone, RolledBack}} {
		found, err := g.Find(ctx, row.call.Key, row.call.Fingerprint)
		if err != nil || found.Standing != row.want {
			t.Errorf("%s: standing %d, %v, want %d", row.call.Scope.ID, found.Standing, err, row.want)
		}
	}
	checkIndex(t, g)
}

// Another node's running execution holds the version of its record: it is left alone,
// and so the key stays in use. What an earlier life of this node left is nobody's.
func TestResealLeavesOtherNodesRunning(t *testing.T) {
	ctx := context.Background()
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	g, _, err := Open(ctx, mem, ring)
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range []string{g.node, "elsewhere"} {
		c := Call{Scope: Scope{ID: node}}
		c.Key = g.Key(c.Scope)
		r := g.newRecord(&c, g.Caller(""), time.Now())
		r.Node = node
		if _, err := mem.Commit(ctx, g.put(c.Key, nil, &r, store.Absent())...); err != nil {
			t.Fatal(err)
		}
	}
	modelRotate(t, g, ring)
	var keys []uint32
	for entry, err := range mem.Scan(ctx, store.Prefix([]byte{spaceRecord})) {
		if err != nil {
			t.Fatal(err)
		}
		r, err := g.open(entry.Value, entry.Key)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, ring.KeyOf(entry.Value))
		if want := map[bool]uint32{true: 2, false: 1}[r.Node == g.node]; keys[len(keys)-1] != want {
			t.Errorf("the record of node %s is under key %d, want %d", r.Node, keys[len(keys)-1], want)
		}
	}
	uses, err := g.KeysInUse(ctx)
	if err != nil || len(keys) != 2 || len(uses) != 2 || !uses[0].Until.IsZero() {
		t.Errorf("%d records; in use %+v, %v", len(keys), uses, err)
	}
}
