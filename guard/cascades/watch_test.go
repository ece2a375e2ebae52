package cascades

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// rig is a watch on a memory store, which a test can open again, and what it has the breakers do.
type rig struct {
	*Watch
	t           *testing.T
	store       store.Store
	sealer      *seal.Ring
	escalations *hitl.Store
	recorder    evidence.Recorder
	anonymous   atomic.Bool // no identity: nothing is recorded in a ledger

	mu       sync.Mutex
	look     Look
	shared   map[string]bool
	tripped  []string
	tripping func() // is called when breakers are opened, if it is set

	watching atomic.Pointer[Watch] // gets what is recorded
}

func newRig(t *testing.T) *rig {
	t.Helper()
	return rigOn(t, memory.New(memory.Options{}), seal.Generate())
}

func rigOn(t *testing.T, st store.Store, sealer *seal.Ring) *rig {
	t.Helper()
	r := &rig{
		t: t, store: st, sealer: sealer, shared: map[string]bool{},
	}
	r.escalations = hitl.NewStore(r.store, r.sealer)
	keys, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	r.recorder.Evidence, err = evidence.Open(t.Context(), evidence.Options{
		Store: r.store, Sealer: r.sealer, Node: "n1", Ring: keys,
		Placed: func(log string, e *ledger.Event, recorded time.Time) {
			if w := r.watching.Load(); w != nil {
				w.Placed(log, e, recorded)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.recorder.Evidence.Close(context.Background()) })
	if r.recorder.EventBuilder, err = r.recorder.Evidence.EventBuilder("spiffe://example.com/gateway"); err != nil {
		t.Fatal(err)
	}
	if err := r.recorder.Evidence.SignWhenShown(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	if r.look.Settings, err = (Settings{}).Check(); err != nil {
		t.Fatal(err)
	}
	r.open()
	return r
}

// open begins a life of the process.
func (r *rig) open() {
	r.t.Helper()
	w, err := Open(r.t.Context(), Options{
		Store: r.store, Sealer: r.sealer, Escalations: r.escalations, Settings: r.look.Settings, KeepTokens: time.Hour,
		Log: slog.New(slog.DiscardHandler), Emit: func(map[string]any) {},
		Recorder: func() (evidence.Recorder, bool) { return r.recorder, !r.anonymous.Load() },
		Circuits: Circuits{
			Downstream: func(upstream string) string { return upstream },
			Status:     func() []breaker.Status { return nil },
			Trip: func(downstream string) []string {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.tripped = append(r.tripped, downstream)
				if r.tripping != nil {
					r.tripping()
				}
				return []string{downstream}
			},
			ShareProbes: func(downstream string, share bool) {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.shared[downstream] = share
			},
		},
		Look: func() (Look, bool) {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.look, true
		},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.Watch = w
	r.watching.Store(w)
	w.Start()
	r.t.Cleanup(w.Close)
}

// restart ends the process and begins another.
func (r *rig) restart() {
	r.Close()
	r.shared = map[string]bool{}
	r.open()
}

// does runs do on the watch's goroutine, and waits until what it returns was acted on.
func (r *rig) does(do func(ctx context.Context) []cascade.Change) {
	done := make(chan struct{})
	r.later(do)
	r.later(func(context.Context) []cascade.Change { close(done); return nil })
	<-done
}

// finds has the watch learn of a finding.
func (r *rig) finds(kind cascade.ChangeKind, f cascade.Finding) {
	r.does(func(context.Context) []cascade.Change { return []cascade.Change{{Kind: kind, Finding: f}} })
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

// C-3.4.1-a, C-3.4.1-e: a resource that is exhausted, and a slow upstream, are reasons for the root of what fails
// meanwhile.
func TestSignalsAreReasons(t *testing.T) {
	r := newRig(t)
	r.anonymous.Store(true)
	r.mu.Lock()
	r.look.Topology = Topology{Pools: map[string][]string{"d": {"a:1", "a:2"}}, Guards: map[string][]string{"a:1": {"d"}}}
	r.look.Readings = []cascade.Reading{{Resource: "memory", Used: 8, Limit: 10}}
	r.mu.Unlock()
	reports := func(n int) bool { return len(r.Report().Exhausted) == n }
	r.does(func(context.Context) []cascade.Change { r.inspect(); return nil })
	if !reports(0) {
		t.Errorf("far from the limit: %+v", r.Report())
	}
	r.mu.Lock()
	r.look.Readings[0].Used = 9
	r.mu.Unlock()
	r.Slow("a:1", true)
	r.does(func(context.Context) []cascade.Change { r.inspect(); return nil })
	if !reports(1) {
		t.Errorf("at the limit: %+v", r.Report())
	}
	r.does(func(context.Context) []cascade.Change { return failing(r.detector, cascade.Exhausted) })
	all := r.List()
	if len(all) != 1 || all[0].Class != string(cascade.Infrastructure) || all[0].Root.Upstream != "a:1" ||
		!slices.Contains(all[0].Root.Reasons, "exhausted") || !slices.Contains(all[0].Root.Reasons, "slow") {
		t.Errorf("%+v", all)
	}
	r.mu.Lock()
	r.look.Readings = nil
	r.mu.Unlock()
	r.does(func(context.Context) []cascade.Change { r.inspect(); return nil })
	if !reports(0) {
		t.Errorf("what is not read any more: %+v", r.Report())
	}
}

// Nothing waits for the watch: what does not fit into its queue is dropped and counted.
func TestCascadeEventsAreDropped(t *testing.T) {
	w := newRig(t)
	busy, free := make(chan struct{}), make(chan struct{})
	w.later(func(context.Context) []cascade.Change { close(busy); <-free; return nil })
	<-busy
	event := ledger.Event{ID: "1", Workflow: "w", Action: "error", Issuer: "spiffe://example.com/agent/a"}
	for range maxInput + 3 { // a queue that blocks hangs here
		w.Placed("", &event, time.Now())
	}
	w.Slow("a:1", true)
	healthy := ledger.Event{ID: "2", Workflow: "other", Action: "pay", Issuer: event.Issuer}
	w.Placed("", &healthy, time.Now())
	if n := w.Report().Dropped; n != 4 {
		t.Errorf("%d are counted", n)
	}
	close(free)
}

// A cascade is recorded, and people are asked, once, and again when it has doubled, over a restart, too.
func TestCascadesThatDouble(t *testing.T) {
	r := newRig(t)
	workflow := uuid.NewString()
	look := func(when string, alerts, asked int) (last string) {
		t.Helper()
		kept := r.List()
		if len(kept) != 1 || len(kept[0].Workflows) != 1 || len(kept[0].Workflows[0].Alerts) != alerts {
			t.Fatalf("%s: %+v", when, kept)
		}
		page, err := r.escalations.List(t.Context(), hitl.Filter{}, "", 10)
		if err != nil || len(page.Escalations) != asked {
			t.Fatalf("%s: %+v %v", when, page.Escalations, err)
		}
		return kept[0].Workflows[0].Escalation
	}
	r.finds(cascade.Opened, spreading("1", workflow, 4))
	first := look("found", 1, 1)
	r.finds(cascade.Grown, spreading("1", workflow, 7))
	look("larger", 1, 1)
	if _, err := r.escalations.Decide(t.Context(), first, hitl.Vote{By: "ann", Every: true, Reason: "known"}); err != nil {
		t.Fatal(err)
	}
	r.finds(cascade.Grown, spreading("1", workflow, 8))
	second := look("doubled", 2, 2)
	r.finds(cascade.Rerooted, spreading("1", workflow, 16))
	look("another root", 2, 2)
	if first == second {
		t.Error("what was answered is asked no more")
	}
	r.restart()
	r.finds(cascade.Opened, spreading("2", workflow, 8))
	look("after a restart", 2, 2)
	r.finds(cascade.Grown, spreading("2", workflow, 15))
	look("larger after a restart", 2, 2)
	r.finds(cascade.Grown, spreading("2", workflow, 16))
	if last := look("doubled after a restart", 3, 2); last != second {
		t.Error("what waits for an answer is asked again")
	}
}

// One failure is one question (ADR 0127): where people are asked about a call that has failed, and that failure
// turns out to spread, the same escalation says so, and is delivered again. One that holds the workflow takes its
// place.
func TestOneQuestionForAFailureThatSpreads(t *testing.T) {
	r := newRig(t)
	s := r.escalations
	about := func(f *cascade.Finding, cause hitl.Cause) hitl.Escalation {
		t.Helper()
		asked, err := s.Open(t.Context(), hitl.Opening{
			Key: "failed call " + f.ID, Level: hitl.Approval, Cause: cause, Workflow: f.Root.Workflow, Summary: "A call has failed.",
			Links: hitl.Links{Error: f.Root.Error},
		})
		if err != nil {
			t.Fatal(err)
		}
		return asked
	}
	pending := func(workflow string) []hitl.Escalation {
		t.Helper()
		page, err := s.List(t.Context(), hitl.Filter{Workflow: workflow, Status: hitl.Pending}, "", 10)
		if err != nil {
			t.Fatal(err)
		}
		return page.Escalations
	}
	for i, cause := range []hitl.Cause{hitl.CauseFailed, hitl.CauseIrreversible} {
		f := spreading(fmt.Sprint("alert ", i), uuid.NewString(), 4)
		first := about(&f, cause)
		r.finds(cascade.Opened, f)
		all := pending(f.Root.Workflow)
		if len(all) != 1 || all[0].ID != first.ID || all[0].Cause != cause || all[0].Round != 1 ||
			!strings.Contains(all[0].Summary, f.ID) || !strings.HasSuffix(all[0].Summary, first.Summary) {
			t.Fatalf("%s: %+v", cause, all)
		}
		if doc := r.Get(f.ID); doc == nil || doc.Workflows[0].Escalation != first.ID {
			t.Errorf("%s: the cascade does not name its question: %+v", cause, doc)
		}
		r.finds(cascade.Grown, spreading(f.ID, f.Root.Workflow, 8))
		if all = pending(f.Root.Workflow); len(all) != 1 || all[0].Round != 1 {
			t.Errorf("%s, when it has doubled: %+v", cause, all)
		}
	}
	// Where several questions about it are pending, that which says so already is the one that grows.
	several := spreading("several", uuid.NewString(), 4)
	first := about(&several, hitl.CauseIrreversible)
	r.finds(cascade.Opened, several)
	if _, err := s.Open(t.Context(), hitl.Opening{
		Key: "beside", Level: hitl.Approval, Cause: hitl.CauseReach, Workflow: several.Root.Workflow, Summary: "Many agents.", Links: hitl.Links{Error: several.Root.Error},
	}); err != nil {
		t.Fatal(err)
	}
	r.finds(cascade.Grown, spreading("several", several.Root.Workflow, 8))
	for _, e := range pending(several.Root.Workflow) {
		if strings.Contains(e.Summary, "several") != (e.ID == first.ID) {
			t.Errorf("the question of the cascade is %s: %+v", first.ID, e)
		}
	}
	// Another failure of the workflow is another question.
	other, f := spreading("2", uuid.NewString(), 4), spreading("3", uuid.NewString(), 4)
	other.Root.Workflow = f.Root.Workflow
	about(&other, hitl.CauseFailed)
	r.finds(cascade.Opened, f)
	if all := pending(f.Root.Workflow); len(all) != 2 {
		t.Errorf("two failures: %+v", all)
	}
	r.mu.Lock()
	r.look.Settings.Do = Pause
	r.mu.Unlock()
	for i, cause := range []hitl.Cause{hitl.CauseFailed, hitl.CauseIrreversible} {
		f := spreading(fmt.Sprint("pause ", i), uuid.NewString(), 4)
		first := about(&f, cause)
		r.does(func(context.Context) []cascade.Change {
			r.inspect()
			return []cascade.Change{{Kind: cascade.Opened, Finding: f}}
		})
		all := pending(f.Root.Workflow)
		holds := slices.IndexFunc(all, func(e hitl.Escalation) bool { return e.Held })
		if holds < 0 || all[holds].ID == first.ID || len(all) != 1+i {
			t.Errorf("%s: %+v", cause, all)
		}
	}
}

// ATD, "Coordinated Circuit Breaking": breakers that probe as one do so after a restart, too, until their
// cascade is over.
func TestSharedProbesOverARestart(t *testing.T) {
	r := newRig(t)
	const shared = "spiffe://example.com/agent/shared"
	shares := func() (share, there bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		share, there = r.shared[shared]
		return share, there
	}
	r.finds(cascade.Opened, cascade.Finding{
		ID: "1", Pattern: cascade.Clustering, Class: cascade.Service, Downstream: shared, Breakers: []string{"a:1", "b:1"}, OneProbe: true,
		Began: time.Now(), Last: time.Now(),
	})
	if share, _ := shares(); !share {
		t.Fatal("each probes by itself")
	}
	r.restart()
	r.does(func(context.Context) []cascade.Change { return nil }) // it has begun
	if share, _ := shares(); !share {
		t.Error("each probes by itself after a restart")
	}
	r.does(func(ctx context.Context) []cascade.Change {
		r.kept.closeQuiet(ctx, time.Now().Add(time.Hour), r.detector)
		return nil
	})
	if share, there := shares(); share || !there {
		t.Error("they probe as one when the cascade is over")
	}
}

// Re-sealing reaches what is stored of cascades, and what is sealed anew can be changed.
func TestCascadesAreSealedAnew(t *testing.T) {
	r := newRig(t)
	r.anonymous.Store(true)
	r.finds(cascade.Opened, spreading("1", "w", 3))
	next, err := r.sealer.Rotated()
	if err == nil {
		_, err = r.sealer.Adopt(next, nil, func(uint32) error { return nil })
	}
	if err != nil {
		t.Fatal(err)
	}
	id := r.sealer.KeyOf(r.sealer.Seal(nil, nil, nil))
	if err := r.Reseal(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := 0
	for entry, err := range r.store.Scan(t.Context(), store.Prefix([]byte{evidence.SpaceCascade})) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if r.sealer.KeyOf(entry.Value) != id || entry.Expires.IsZero() {
			t.Errorf("%q is under the key %d and expires %v", entry.Key[:2], r.sealer.KeyOf(entry.Value), entry.Expires)
		}
	}
	if n != 1 {
		t.Errorf("%d values are stored", n)
	}
	r.finds(cascade.Grown, spreading("1", "w", 6))
	if all := r.List(); len(all) != 1 || all[0].Failed != 6 {
		t.Errorf("%+v", all)
	}
}

// Whoever reads a cascade while its breakers are opened sees a record that nobody changes.
func TestRecordsAreNotChangedInPlace(t *testing.T) {
	r := newRig(t)
	r.mu.Lock()
	r.look.Settings.Do = TripRoot
	var before *record
	r.tripping = func() { before = r.kept.all["1"] }
	r.mu.Unlock()
	r.does(func(context.Context) []cascade.Change {
		r.inspect()
		return []cascade.Change{{Kind: cascade.Opened, Finding: spreading("1", uuid.NewString(), 3)}}
	})
	if before == nil || len(before.Doc.Opened) != 0 {
		t.Errorf("a record that readers may have was changed: %+v", before)
	}
	if all := r.List(); len(all) != 1 || len(all[0].Opened) == 0 {
		t.Errorf("%+v", all)
	}
}
