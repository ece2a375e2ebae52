package caddymodule

import (
	"bytes"
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard/circuits"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// tripped opens the breaker of an upstream.
func tripped(t *testing.T, upstream string) *breaker.Breaker {
	t.Helper()
	c := leadingTo(t, upstream)
	permit, err := c.Breaker(upstream).Acquire(breaker.Op{})
	if err != nil {
		t.Fatal(err)
	}
	permit.Done(breaker.Outcome{Class: breaker.Failure, Cause: "connection refused"})
	if c.Refusal("GET", nil) == nil {
		t.Fatal("a failure has not opened the breaker")
	}
	return c.Breaker(upstream)
}

func leadingTo(t *testing.T, upstream string) *proxy.Circuits {
	t.Helper()
	c, err := proxy.Open(proxy.Settings{Settings: breaker.Settings{Consecutive: 1}}, []string{upstream}, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// keptCircuits are the entries of breakers in the store.
func keptCircuits(t *testing.T, st store.Store) (all []store.Entry) {
	t.Helper()
	for entry, err := range st.Scan(t.Context(), store.Prefix([]byte{circuits.Space})) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, entry)
	}
	return all
}

// The state of a breaker is recorded with each change, sealed, and moves to a new sealing
// key; that of a closed one expires, and that of a new one is none.
func TestCircuitStateIsRecorded(t *testing.T) {
	e := started(t, t.TempDir(), "").held
	tripped(t, "a:1")
	kept := keptCircuits(t, e.store)
	if len(kept) != 1 || !kept[0].Expires.IsZero() || bytes.Contains(append(kept[0].Key, kept[0].Value...), []byte("a:1")) {
		t.Fatalf("an open breaker is recorded as %v", kept)
	}
	id := rotateKeys(t, e)
	resealed(t, e, id)
	if kept = keptCircuits(t, e.store); len(kept) != 1 || e.ring.KeyOf(kept[0].Value) != id {
		t.Errorf("after a rotation: %v", kept)
	}
	for _, mode := range []breaker.Mode{breaker.ForcedClosed, breaker.Auto} {
		if known, err := (storeView{e}).SetCircuitMode(t.Context(), breaker.Key{Upstream: "a:1"}, mode); !known || err != nil {
			t.Fatal(known, err)
		}
		// What an operator has set does not expire.
		if kept = keptCircuits(t, e.store); len(kept) != 1 || kept[0].Expires.IsZero() != (mode != breaker.Auto) {
			t.Errorf("%v is recorded as %v", mode, kept)
		}
	}
	if kept = keptCircuits(t, e.store); len(kept) != 1 || kept[0].Expires.IsZero() {
		t.Errorf("a closed breaker is recorded as %v", kept)
	}
	leadingTo(t, "b:1").Breaker("b:1")
	if kept = keptCircuits(t, e.store); len(kept) != 1 {
		t.Errorf("a breaker that has never opened is recorded: %v", kept)
	}
}

// What is counted of a breaker goes with it: upstreams that come and go leave nothing.
func TestOpeningsGoWithTheBreaker(t *testing.T) {
	e := started(t, t.TempDir(), "").held
	for range 2 {
		t.Run("", func(t *testing.T) {
			tripped(t, "a:1")
			all := slices.DeleteFunc(e.circuits.Status(), func(s breaker.Status) bool { return s.Key.Upstream != "a:1" })
			if len(all) != 1 || all[0].Openings != 1 { // other tests leave breakers of undos
				t.Errorf("%+v", all)
			}
		})
	}
}

// cascade 3.2.4: what changes while the store is open and the ledger is not yet is recorded
// once it is.
func TestChangesWaitForTheLedger(t *testing.T) {
	dir := t.TempDir()
	app := validApp(t, dir, withIdentity(filepath.Join(dir, "identity"), ""))
	e, err := app.acquire() // as a request does that comes before the start
	if err != nil {
		t.Fatal(err)
	}
	b := tripped(t, "a:1")
	recorded := make(chan struct{})
	e.recorder.later(func(context.Context) { close(recorded) })
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	<-recorded
	opened := b.Status().Reference
	entry, err := e.latestPolicy().Evidence.Log().Lookup(t.Context(), "", opened)
	if err != nil || entry.Action != "circuit_breaker_open" {
		t.Errorf("%q: %v %+v", opened, err, entry)
	}
	cleanUp(t, app)
	if err := e.release(); err != nil {
		t.Error(err)
	}
}

// An operator who cuts an upstream off leaves no error of it in the ledger.
func TestOperatorsLeaveNoErrors(t *testing.T) {
	dir := t.TempDir()
	e := started(t, dir, withIdentity(filepath.Join(dir, "identity"), "")).held
	b := leadingTo(t, "a:1").Breaker("a:1")
	b.SetMode(breaker.ForcedOpen)
	recorded := make(chan struct{})
	e.recorder.later(func(context.Context) { close(recorded) }) // in its turn
	<-recorded
	opened := b.Status().Reference
	log := e.latestPolicy().Evidence.Log()
	entry, err := log.Lookup(t.Context(), "", opened)
	if err != nil || entry.Action != "circuit_breaker_open" || len(entry.Parents) != 0 {
		t.Errorf("%v %+v", err, entry)
	}
	if head := log.Head(); head.Size != 1 {
		t.Errorf("%d entries are in the ledger, not 1", head.Size)
	}
}

// What is recorded of an upstream goes with the configuration that has led there last,
// and comes back with nothing; the end of the last configuration leaves it.
func TestCircuitStateGoesWithItsUpstream(t *testing.T) {
	dir := t.TempDir()
	e := started(t, dir, "").held
	old, err := proxy.Open(proxy.Settings{Settings: breaker.Settings{Consecutive: 1}}, []string{"a:1", "b:1", "c:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, upstream := range []string{"a:1", "b:1"} {
		permit, err := old.Breaker(upstream).Acquire(breaker.Op{})
		if err != nil {
			t.Fatal(err)
		}
		permit.Done(breaker.Outcome{Class: breaker.Failure})
	}
	old.Breaker("c:1")
	forced := breaker.Key{Upstream: "c:1"}
	if known, err := (storeView{e}).SetCircuitMode(t.Context(), forced, breaker.ForcedClosed); !known || err != nil {
		t.Fatal(known, err)
	}
	if kept := keptCircuits(t, e.store); len(kept) != 3 {
		t.Fatalf("%d states are recorded, not 3", len(kept))
	}
	now := leadingTo(t, "a:1")
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	kept := keptCircuits(t, e.store)
	if len(kept) != 1 {
		t.Fatalf("%d states are left, not 1", len(kept))
	}
	if now.Breaker("a:1").Status().State != breaker.Open {
		t.Error("the upstream that has stayed was forgotten")
	}
	if s := leadingTo(t, "c:1").Breaker("c:1").Status(); s.Mode != breaker.Auto {
		t.Errorf("an upstream that is back: %+v", s)
	}
	// A configuration that ends takes its transports with it, in any order.
	ended, end := caddy.NewContext(caddy.Context{Context: t.Context()})
	end()
	e.activeConfigs.latest().ctx = ended
	if err := now.Close(); err != nil {
		t.Fatal(err)
	}
	if kept = keptCircuits(t, e.store); len(kept) != 1 {
		t.Errorf("%d states are left after the end, not 1", len(kept))
	}
}

// What opens shortly before an orderly stop is still open after the start: its recording in the ledger may come
// when the transports, and with them the breakers, are gone already.
func TestCircuitStateOutlivesALateRecording(t *testing.T) {
	dir := t.TempDir()
	e := started(t, dir, withIdentity(filepath.Join(dir, "identity"), "")).held
	c, err := proxy.Open(proxy.Settings{Settings: breaker.Settings{Consecutive: 1}}, []string{"a:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	free, recorded := make(chan struct{}), make(chan struct{})
	e.recorder.later(func(context.Context) { <-free })
	permit, err := c.Breaker("a:1").Acquire(breaker.Op{})
	if err != nil {
		t.Fatal(err)
	}
	permit.Done(breaker.Outcome{Class: breaker.Failure})
	ended, end := caddy.NewContext(caddy.Context{Context: t.Context()})
	end()
	e.activeConfigs.latest().ctx = ended
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	close(free)
	e.recorder.later(func(context.Context) { close(recorded) })
	<-recorded
	if kept := keptCircuits(t, e.store); len(kept) != 1 {
		t.Errorf("%d states are left after the end, not 1", len(kept))
	}
}

// What is of an upstream that is gone goes, and what cannot be read stays as it is, such
// as a mode that a newer version has recorded; the rest is restored.
func TestCircuitStateIsRead(t *testing.T) {
	dir := t.TempDir()
	app := validApp(t, dir, "")
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	here, err := proxy.Open(proxy.Settings{Settings: breaker.Settings{Consecutive: 1}}, []string{"a:1", "gone:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, upstream := range []string{"a:1", "gone:1"} {
		permit, err := here.Breaker(upstream).Acquire(breaker.Op{})
		if err != nil {
			t.Fatal(err)
		}
		permit.Done(breaker.Outcome{Class: breaker.Failure})
	}
	until := here.Breaker("a:1").Status().NextProbe
	newer := app.held.ring.Index("circuit", "newer:1", "")
	unread := map[string]*breaker.Snapshot{
		"damaged": nil, "no state": {}, string(newer[:16]): {Version: 2, Upstream: "newer:1", Mode: breaker.ForcedOpen},
	}
	for name, state := range unread {
		w := store.Write{Key: append([]byte{circuits.Space}, name...), Value: []byte(name)}
		if state != nil {
			w.Value = app.held.ring.Seal(nil, store.Encode(nil, state), w.Key)
		}
		if _, err := app.held.store.Commit(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	// The end of the process, as far as breakers go.
	cleanUp(t, app)
	if err := here.Close(); err != nil {
		t.Fatal(err)
	}

	after := leadingTo(t, "a:1")
	leadingTo(t, "newer:1").Breaker("newer:1") // a call that came first
	e := started(t, dir, "").held
	if s := after.Breaker("a:1").Status(); s.State != breaker.Open || s.NextProbe.Sub(until).Abs() > 2*time.Second {
		t.Errorf("restored as %+v, want open until %v", s, until)
	}
	kept := keptCircuits(t, e.store)
	for _, entry := range kept {
		name := string(entry.Key[1:])
		_, bad := unread[name]
		plain, err := e.ring.Open(nil, entry.Value, entry.Key)
		var s breaker.Snapshot
		if err == nil {
			err = store.Decode(plain, &s)
		}
		if err == nil {
			err = s.Check()
		}
		if (err != nil) != bad {
			t.Errorf("%q is read: %v", name, err)
		} else if name == string(newer[:16]) && !strings.Contains(err.Error(), "newer:1") {
			t.Errorf("the upstream is known, and not named: %v", err)
		}
	}
	if len(kept) != 1+len(unread) {
		t.Errorf("%d states are left, not %d", len(kept), 1+len(unread))
	}
}
