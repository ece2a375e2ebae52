package caddymodule

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// watching runs do on the watch's goroutine, and waits until what it returns was acted on.
func watching(e *engine, do func(ctx context.Context) []cascade.Change) {
	done := make(chan struct{})
	e.cascades.later(do)
	e.cascades.later(func(context.Context) []cascade.Change { close(done); return nil })
	<-done
}

// found has the watch learn of a finding.
func found(e *engine, kind cascade.ChangeKind, f cascade.Finding) {
	watching(e, func(context.Context) []cascade.Change { return []cascade.Change{{Kind: kind, Finding: f}} })
}

// spreading is a finding in one workflow, with so many agents that have failed.
func spreading(id, workflow string, n int) cascade.Finding {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprint("spiffe://example.com/agent/", i))
	}
	failure := uuid.NewSHA1(uuid.Nil, []byte(workflow)).String()
	return cascade.Finding{
		ID: id, Pattern: cascade.DepthFirst, Class: cascade.Agent, Failed: n, Affected: n, Began: time.Now(), Last: time.Now(),
		Root:  cascade.Root{Workflow: workflow, Error: failure, Agent: names[0]},
		Parts: []cascade.Part{{Workflow: workflow, Errors: []string{failure}, Failed: names, BlastRadius: names}},
	}
}

// failing is a chain of three calls in which the last one fails, and then those that wait for it.
func failing(d *cascade.Detector, kind cascade.Kind) []cascade.Change {
	now := time.Now()
	up := ""
	for _, to := range []string{"b", "c", "d"} {
		n := cascade.Node{ID: "to " + to, Workflow: "w", Agent: string(to[0] - 1), Upstream: cascade.Upstream{Pool: to, Agent: to}}
		if up != "" {
			n.Parents = []string{up}
		}
		d.Node(now, n)
		up = n.ID
	}
	changes := d.Fail(now, cascade.Failure{Workflow: "w", Node: "to d", Error: "1", Kind: kind, Address: "a:1"})
	changes = append(changes, d.Fail(now.Add(time.Millisecond), cascade.Failure{Workflow: "w", Node: "to c", Error: "2"})...)
	return append(changes, d.Fail(now.Add(2*time.Millisecond), cascade.Failure{Workflow: "w", Node: "to b", Error: "3"})...)
}

// C-3.4.1-a, C-3.4.1-e: memory above its threshold is a resource that is exhausted, in the metrics and as a
// reason for the root of what fails meanwhile; a slow upstream is one, too.
func TestSignalsAreReasons(t *testing.T) {
	app := started(t, t.TempDir(), "")
	e := app.held
	w := e.cascades
	memory := [2]string{"", "memory"}
	limit := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(limit) })
	done := make(chan struct{})
	w.later(func(ctx context.Context) []cascade.Change {
		w.settings.full = 0.5
		used := []metrics.Sample{{Name: "/memory/classes/total:bytes"}}
		metrics.Read(used)
		debug.SetMemoryLimit(int64(used[0].Value.Uint64()) * 100)
		w.exhausted(time.Now(), w.readings(app))
		if full := w.exhaustion.Exhausted(); len(full) != 0 {
			t.Errorf("far from the limit: %v", full)
		}
		debug.SetMemoryLimit(int64(used[0].Value.Uint64()) * 5 / 4)
		w.exhausted(time.Now(), w.readings(app))
		if n := w.report().Exhausted[memory]; n != 1 {
			t.Errorf("near the limit the metric is %v", n)
		}
		// The configuration has no guard: the one of this upstream stands here.
		w.topology.Store(&topology{guards: map[string][]string{"a:1": {"d"}}})
		w.detector.Pool("d", []string{"a:1", "a:2"})
		circuitHook{e}.Slow("a:1", true)
		changes := (<-w.input)(ctx)
		w.later(func(context.Context) []cascade.Change { close(done); return nil })
		return append(changes, failing(w.detector, cascade.Exhausted)...)
	})
	<-done
	all := w.cascadeList()
	if len(all) != 1 || all[0].Class != string(cascade.Infrastructure) || all[0].Root.Upstream != "a:1" ||
		!slices.Contains(all[0].Root.Reasons, string(cascade.IsExhausted)) || !slices.Contains(all[0].Root.Reasons, string(cascade.IsSlow)) {
		t.Errorf("%+v", all)
	}
	debug.SetMemoryLimit(limit)
	watching(e, func(context.Context) []cascade.Change { w.exhausted(time.Now(), w.readings(app)); return nil })
	if n := w.report().Exhausted[memory]; n != 0 {
		t.Errorf("without a limit the metric is %v", n)
	}
}

// someDisk opens a memory store whose disk is what a test says.
type someDisk struct {
	storeModule
	at atomic.Pointer[DiskReport]
}

func (d *someDisk) ReportDisk(store.Store) *DiskReport { return d.at.Load() }

// C-3.4.1-e: the disk, and how long commits take, are read where the store is.
func TestStoreSignals(t *testing.T) {
	app, disk := validApp(t, t.TempDir(), ""), new(someDisk)
	app.spec.opener = disk
	t.Cleanup(func() { cleanUp(t, app) })
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	e := app.held
	w := e.cascades
	after := func(watermark Watermark, commits time.Duration, full float64) {
		t.Helper()
		watching(e, func(context.Context) []cascade.Change {
			w.exhausted(time.Now(), w.readings(app))
			disk.at.Store(&DiskReport{Watermark: watermark})
			e.counts.commits.Add(1000)
			e.counts.commitTime.Add(int64(1000 * commits))
			w.exhausted(time.Now(), w.readings(app))
			for _, name := range []string{"disk", "store"} {
				if n := w.report().Exhausted[[2]string{"", name}]; n != full {
					t.Errorf("watermark %d and commits of %s: the metric of %s is %v", watermark, commits, name, n)
				}
			}
			return nil
		})
	}
	after(DiskEnough, time.Millisecond, 0)
	after(DiskLow, 600*time.Millisecond, 1)
	after(DiskEnough, time.Millisecond, 0)
}

// Nothing waits for the watch: what does not fit into its queue is dropped and counted.
func TestCascadeEventsAreDropped(t *testing.T) {
	e := started(t, t.TempDir(), "").held
	w := e.cascades
	busy, free := make(chan struct{}), make(chan struct{})
	w.later(func(context.Context) []cascade.Change { close(busy); <-free; return nil })
	<-busy
	event := ledger.Event{ID: "1", Workflow: "w", Action: "error", Issuer: "spiffe://example.com/agent/a"}
	for range maxCascadeInput + 3 { // a queue that blocks hangs here
		w.placed(&event, time.Now())
	}
	circuitHook{e}.Slow("a:1", true)
	healthy := ledger.Event{ID: "2", Workflow: "other", Action: "pay", Issuer: event.Issuer}
	w.placed(&healthy, time.Now())
	if n := w.report().Dropped; n != 4 {
		t.Errorf("%d are counted", n)
	}
	close(free)
}

// A cascade is recorded, and people are asked, once, and again when it has doubled, over a restart, too.
func TestCascadesThatDouble(t *testing.T) {
	dir := t.TempDir()
	identity := withIdentity(filepath.Join(dir, "identity"), "")
	workflow := uuid.NewString()
	look := func(e *engine, when string, alerts, asked int) (last string) {
		t.Helper()
		kept := e.cascades.cascadeList()
		if len(kept) != 1 || len(kept[0].Workflows) != 1 || len(kept[0].Workflows[0].Alerts) != alerts {
			t.Fatalf("%s: %+v", when, kept)
		}
		page, err := e.escalations.store.List(t.Context(), hitl.Filter{}, "", 10)
		if err != nil || len(page.Escalations) != asked {
			t.Fatalf("%s: %+v %v", when, page.Escalations, err)
		}
		return kept[0].Workflows[0].Escalation
	}
	var second string
	t.Run("before", func(t *testing.T) {
		e := started(t, dir, identity).held
		found(e, cascade.Opened, spreading("1", workflow, 4))
		first := look(e, "found", 1, 1)
		found(e, cascade.Grown, spreading("1", workflow, 7))
		look(e, "larger", 1, 1)
		if _, err := e.escalations.store.Decide(t.Context(), first, hitl.Vote{By: "ann", Every: true, Reason: "known"}); err != nil {
			t.Fatal(err)
		}
		found(e, cascade.Grown, spreading("1", workflow, 8))
		second = look(e, "doubled", 2, 2)
		found(e, cascade.Rerooted, spreading("1", workflow, 16))
		look(e, "another root", 2, 2)
		if first == second {
			t.Error("what was answered is asked no more")
		}
	})
	e := started(t, dir, identity).held
	found(e, cascade.Opened, spreading("2", workflow, 8))
	look(e, "after a restart", 2, 2)
	found(e, cascade.Grown, spreading("2", workflow, 15))
	look(e, "larger after a restart", 2, 2)
	found(e, cascade.Grown, spreading("2", workflow, 16))
	if last := look(e, "doubled after a restart", 3, 2); last != second {
		t.Error("what waits for an answer is asked again")
	}
}

// cascade 3.4.1: what is usual of an upstream's latency is known after a restart.
func TestLatencyIsKeptOverARestart(t *testing.T) {
	dir := t.TempDir()
	const usual = 40 * time.Millisecond
	t.Run("before", func(t *testing.T) {
		leadingTo(t, "a:1")
		e := started(t, dir, "").held
		if !e.circuits.RestoreLatency("a:1", cascade.LatencyState{Baseline: usual}) {
			t.Fatal("no transport has the upstream")
		}
		watching(e, func(context.Context) []cascade.Change { return nil }) // it has begun
	})
	leadingTo(t, "a:1")
	if all := started(t, dir, "").held.circuits.Latencies(); len(all) != 1 || all["a:1"].Baseline != usual {
		t.Errorf("%v", all)
	}
}

// ATD, "Coordinated Circuit Breaking": breakers that probe as one do so after a restart, too, until their
// cascade is over.
func TestSharedProbesOverARestart(t *testing.T) {
	const shared = "spiffe://example.com/agent/shared"
	dir := t.TempDir()
	transport := func(t *testing.T) func() []*breaker.Breaker {
		c, err := proxy.Open(proxy.Settings{
			Consecutive: 1, Cooldown: caddy.Duration(100 * time.Millisecond), Downstream: map[string]string{"a:1": shared, "b:1": shared},
		}, []string{"a:1", "b:1"}, false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
		return func() []*breaker.Breaker { return []*breaker.Breaker{c.Breaker("a:1", "GET"), c.Breaker("b:1", "GET")} }
	}
	t.Run("before", func(t *testing.T) {
		breakers := transport(t)
		e := started(t, dir, "").held
		for _, b := range breakers() {
			permit, err := b.Acquire(breaker.Op{})
			if err != nil {
				t.Fatal(err)
			}
			permit.Done(breaker.Outcome{Class: breaker.Failure})
		}
		found(e, cascade.Opened, cascade.Finding{
			ID: "1", Pattern: cascade.Clustering, Class: cascade.Service, Downstream: shared, Breakers: []string{"a:1", "b:1"}, OneProbe: true,
			Began: time.Now(), Last: time.Now(),
		})
	})
	breakers := transport(t)
	e := started(t, dir, "").held
	watching(e, func(context.Context) []cascade.Change { return nil }) // it has begun
	all := breakers()
	probe := breaker.Op{Safe: true}
	end := time.Now().Add(patience)
	for _, b := range all {
		for b.RefusalOf(probe) != nil {
			if time.Now().After(end) {
				t.Fatal("no breaker probes")
			}
			<-time.After(time.Millisecond)
		}
	}
	if _, err := all[0].Acquire(probe); err != nil {
		t.Fatal(err)
	}
	if _, err := all[1].Acquire(probe); err == nil {
		t.Error("both probe")
	}
	watching(e, func(ctx context.Context) []cascade.Change {
		e.cascades.kept.closeQuiet(ctx, time.Now().Add(time.Hour), e.cascades.detector)
		return nil
	})
	if _, err := all[1].Acquire(probe); err != nil {
		t.Errorf("when the cascade is over, one waits for the probe of another: %v", err)
	}
}

// Re-sealing reaches what is stored of cascades, of upstreams that are gone, too, and what is sealed anew
// can be changed.
func TestCascadesAreSealedAnew(t *testing.T) {
	leadingTo(t, "a:1")
	e := started(t, t.TempDir(), "").held
	found(e, cascade.Opened, spreading("1", "w", 3))
	if err := e.cascades.kept.storeLatencies(t.Context(), map[string]cascade.LatencyState{
		"a:1": {Baseline: time.Millisecond}, "gone:1": {Baseline: time.Millisecond},
	}); err != nil {
		t.Fatal(err)
	}
	id := rotateKeys(t, e)
	resealed(t, e, id)
	n := 0
	for entry, err := range e.store.Scan(t.Context(), store.Prefix([]byte{spaceCascade})) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if e.ring.KeyOf(entry.Value) != id || entry.Expires.IsZero() {
			t.Errorf("%q is under the key %d and expires %v", entry.Key[:2], e.ring.KeyOf(entry.Value), entry.Expires)
		}
	}
	if n != 3 {
		t.Errorf("%d values are stored", n)
	}
	found(e, cascade.Grown, spreading("1", "w", 6))
	if all := e.cascades.cascadeList(); len(all) != 1 || all[0].Failed != 6 {
		t.Errorf("%+v", all)
	}
}
