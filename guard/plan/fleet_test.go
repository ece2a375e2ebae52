package plan_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// member is a gateway's store of plans in a fleet.
type member struct {
	*Store
	*memory.Member
	t *testing.T
}

// newFleet are two gateways on one store, and a way to begin further ones.
func newFleet(t *testing.T) (a, b *member, join func(node string) *member) {
	t.Helper()
	st, ring := memory.New(memory.Options{}), seal.Generate()
	join = func(node string) *member {
		t.Helper()
		m := st.Join(node)
		s := NewStore(m, ring)
		if n, err := s.Load(ctx); n != 0 || err != nil {
			t.Fatal(n, err)
		}
		return &member{s, m, t}
	}
	return join("a"), join("b"), join
}

// puts puts a plan, and returns its version.
func (m *member) puts(p Putting) error {
	m.t.Helper()
	_, _, err := m.Put(ctx, p)
	return err
}

// binds is the version of the plan that binds everybody in a workflow, and whether it has begun; empty without one.
func (m *member) binds(workflow string) string {
	m.t.Helper()
	a, err := m.Of(ctx, workflow, inAll)
	if err != nil {
		m.t.Fatal(err)
	}
	if a == nil {
		return ""
	}
	return fmt.Sprint(a.Plan.Version(), " ", !a.Begun.IsZero())
}

// claims claims a call that was admitted behind a fence, with what the plan store adds.
func (m *member) claims(at store.Fence, b *store.Batch, err error) error {
	if err != nil {
		return err
	}
	claim := store.NewBatch(store.Write{Key: fmt.Appendf(nil, "call %p", &at)})
	claim.Join(b)
	return store.Bind(claim, at).Commit(ctx, m.Member)
}

func (m *member) fence(workflow string) store.Fence {
	m.t.Helper()
	at, err := m.Fence(ctx, workflow)
	if err != nil {
		m.t.Fatal(err)
	}
	return at
}

// What one gateway knows of the plan of a workflow the others know: who has put it, its versions, that it has begun, and
// that it has not been put yet.
func TestFleetSeesPlans(t *testing.T) {
	a, b, join := newFleet(t)
	first, second := trip(t, "first"), trip(t, "second")
	if a.binds("w") != "" || b.binds("w") != "" || b.Has("w") {
		t.Fatal("there is none")
	}
	if err := a.puts(Putting{Workflow: "w", By: "operator", Plan: first}); err != nil {
		t.Fatal(err)
	}
	if !b.Has("w") || b.Has("another") || b.binds("w") != first.Version()+" false" {
		t.Errorf("at the other one: %v %q", b.Has("w"), b.binds("w"))
	}
	if err := b.puts(Putting{Workflow: "w", By: "operator", Plan: second}); !errors.Is(err, ErrExists) {
		t.Errorf("another one without the name of the first: %v", err)
	}
	if err := b.puts(Putting{Workflow: "w", By: "operator", Plan: second, Replaces: []string{first.Version()}}); err != nil {
		t.Error(err)
	}
	if err := a.puts(Putting{Workflow: "w", By: "operator", Plan: trip(t, "third"), Replaces: []string{first.Version()}}); !errors.Is(err, ErrChanged) {
		t.Errorf("a change of what was replaced elsewhere: %v", err)
	}
	of, err := a.Of(ctx, "w", inAll)
	if err != nil || of == nil || of.Version != second.Version() || len(of.Earlier) != 1 {
		t.Fatalf("%+v %v", of, err)
	}
	begun, err := a.Begin(ctx, of, "call", no)
	if err := a.claims(a.fence("w"), begun, err); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*member{a, b, join("c")} {
		if got := m.binds("w"); got != second.Version()+" true" {
			t.Errorf("%s: %q", m.Self().Node, got)
		}
		if err := m.puts(Putting{Workflow: "w", By: "operator", Plan: first, Replaces: []string{"*"}}); !errors.Is(err, ErrBegun) {
			t.Errorf("%s: it has begun: %v", m.Self().Node, err)
		}
	}
	// An offer of an agent is one at all gateways, and counted by all.
	if err := b.puts(Putting{Workflow: "offered", Issuer: "agent", By: "agent", Plan: first}); err != nil {
		t.Fatal(err)
	}
	if o, err := a.Offered(ctx, "offered", "agent"); err != nil || o == nil || !a.Offers("offered") {
		t.Errorf("%+v %v", o, err)
	}
}

// A plan has its nodes in the same order at all gateways, in whatever order they were written.
func TestFleetPlansHaveOneOrder(t *testing.T) {
	a, b, _ := newFleet(t)
	if err := a.puts(Putting{Workflow: "w", By: "operator", Plan: parse(t, `{"wf_id": "w", "nodes": [{"id": "c"}, {"id": "a"}, {"id": "b"}]}`)}); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*member{a, b} {
		of, err := m.Of(ctx, "w", inAll)
		if err != nil {
			t.Fatal(err)
		}
		if ids := fmt.Sprint(of.Plan.Nodes[0].ID, of.Plan.Nodes[1].ID, of.Plan.Nodes[2].ID); ids != "abc" {
			t.Errorf("%s: %s", m.Self().Node, ids)
		}
	}
}

// A call is claimed under the plan that it was admitted under: a change at another gateway has it look again, whether it
// was admitted under a plan or under none.
func TestFleetPlanChangesBeforeTheClaim(t *testing.T) {
	a, b, _ := newFleet(t)
	first, second := trip(t, "first"), trip(t, "second")
	none := a.fence("w")
	if err := b.puts(Putting{Workflow: "w", By: "operator", Plan: first}); err != nil {
		t.Fatal(err)
	}
	if err := a.claims(none, nil, nil); !errors.Is(err, store.ErrFenced) {
		t.Errorf("a call without a plan beside one that was put: %v", err)
	}
	at := a.fence("w")
	of, err := a.Of(ctx, "w", inAll)
	if err != nil || of == nil {
		t.Fatal(of, err)
	}
	if err := b.puts(Putting{Workflow: "w", By: "operator", Plan: second, Replaces: []string{"*"}}); err != nil {
		t.Fatal(err)
	}
	begun, err := a.Begin(ctx, of, "call", no)
	if err = a.claims(at, begun, err); !errors.Is(err, ErrChanged) && !errors.Is(err, store.ErrFenced) {
		t.Errorf("a first call under a plan that was replaced: %v", err)
	}
	at = a.fence("w")
	if of, err = a.Of(ctx, "w", inAll); err != nil || of.Version != second.Version() {
		t.Fatalf("%+v %v", of, err)
	}
	begun, err = a.Begin(ctx, of, "call", no)
	if err := a.claims(at, begun, err); err != nil {
		t.Error(err)
	}
	if err := b.claims(b.fence("w"), nil, nil); err != nil {
		t.Errorf("a second call at the other one: %v", err)
	}
	if err := b.claims(b.fence("another"), nil, nil); err != nil {
		t.Errorf("a call of another workflow: %v", err)
	}
}

// Of a change of a plan and the first call under it, at two gateways at once, one comes first, and the other one finds
// that; both gateways say which.
func TestFleetPutAndFirstCallRace(t *testing.T) {
	begun, replaced := 0, 0
	for i := range 100 {
		a, b, _ := newFleet(t)
		first, second := trip(t, "first"), trip(t, "second")
		if err := a.puts(Putting{Workflow: "w", Plan: first}); err != nil {
			t.Fatal(err)
		}
		var both sync.WaitGroup
		var claim, change error
		both.Go(func() {
			at, err := b.Fence(ctx, "w")
			var of *Assigned
			if err == nil {
				of, err = b.Of(ctx, "w", inAll)
			}
			var batch *store.Batch
			if err == nil {
				batch, err = b.Begin(ctx, of, "call", no)
			}
			claim = b.claims(at, batch, err)
		})
		both.Go(func() { change = a.puts(Putting{Workflow: "w", Plan: second, Replaces: []string{first.Version()}}) })
		both.Wait()
		want := first.Version() + " true"
		switch {
		case claim == nil && errors.Is(change, ErrBegun):
			begun++
		case claim == nil && change == nil: // the call has come to the change already
			want = second.Version() + " true"
		case change == nil && (errors.Is(claim, ErrChanged) || errors.Is(claim, store.ErrFenced)):
			replaced, want = replaced+1, second.Version()+" false"
		default:
			t.Fatalf("round %d: the claim %v, the change %v", i, claim, change)
		}
		for _, m := range []*member{a, b} {
			if got := m.binds("w"); got != want {
				t.Fatalf("round %d at %s: %q, want %q", i, m.Self().Node, got, want)
			}
		}
	}
	t.Logf("%d times the call came first, %d times the change", begun, replaced)
}

// Of two first calls at two gateways at once, of which one brings an offered plan and the other none, one looks again: no
// plan begins behind a call, and no call runs beside a plan that binds it.
func TestFleetPlanAndCallWithoutOneRace(t *testing.T) {
	began, without := 0, 0
	for i := range 100 {
		a, b, _ := newFleet(t)
		if err := a.puts(Putting{Workflow: "w", Issuer: "agent", By: "agent", Plan: trip(t, "mine")}); err != nil {
			t.Fatal(err)
		}
		of, err := b.Offered(ctx, "w", "agent")
		if err != nil {
			t.Fatal(err)
		}
		var called atomic.Bool // set behind a commit, as the ledger has it
		atB, atA := b.fence("w"), a.fence("w")
		var both sync.WaitGroup
		var first, other error
		both.Go(func() {
			batch, err := b.Begin(ctx, of, "call", func() (bool, error) { return called.Load(), nil })
			first = b.claims(atB, batch, err)
		})
		both.Go(func() {
			batch, err := a.Beside(ctx, "w", inAll)
			if other = a.claims(atA, batch, err); other == nil {
				called.Store(true)
			}
		})
		both.Wait()
		again := func(err error) bool { return errors.Is(err, ErrChanged) || errors.Is(err, store.ErrFenced) }
		switch {
		case first == nil && again(other):
			began++
		case other == nil && again(first):
			without++
		default:
			t.Fatalf("round %d: %v, %v", i, first, other)
		}
	}
	t.Logf("%d times the plan began, %d times the call without one came first", began, without)
}

// Two gateways that change plans of one workflow at the same time come one after the other; what each returns holds.
func TestFleetPutsAtOnce(t *testing.T) {
	a, b, _ := newFleet(t)
	for i := range 50 {
		workflow := fmt.Sprint("w", i)
		var both sync.WaitGroup
		errs := make([]error, 2)
		for n, m := range []*member{a, b} {
			both.Go(func() {
				errs[n] = m.puts(Putting{Workflow: workflow, By: m.Self().Node, Plan: trip(t, m.Self().Node), Fresh: true})
			})
		}
		both.Wait()
		if (errs[0] == nil) == (errs[1] == nil) || !errors.Is(errors.Join(errs...), ErrChanged) {
			t.Fatalf("round %d: %v", i, errs)
		}
		winner := a
		if errs[1] == nil {
			winner = b
		}
		want := trip(t, winner.Self().Node).Version() + " false"
		if a.binds(workflow) != want || b.binds(workflow) != want {
			t.Fatalf("round %d: %q and %q, want %q", i, a.binds(workflow), b.binds(workflow), want)
		}
	}
}

// A gateway that was removed changes nothing, and what it has put stays.
func TestFleetRemovedGatewayPutsNothing(t *testing.T) {
	a, b, join := newFleet(t)
	first := trip(t, "first")
	if err := a.puts(Putting{Workflow: "w", By: "operator", Plan: first}); err != nil {
		t.Fatal(err)
	}
	at := a.fence("w")
	of, err := a.Of(ctx, "w", inAll)
	if err != nil {
		t.Fatal(err)
	}
	a.Remove()
	if err := a.puts(Putting{Workflow: "v", By: "operator", Plan: first}); !errors.Is(err, ErrStore) {
		t.Errorf("it puts a plan: %v", err)
	}
	if _, err := a.Fence(ctx, "w"); !errors.Is(err, ErrStore) {
		t.Errorf("it admits a call under the plan: %v", err)
	}
	batch, err := a.Begin(ctx, of, "call", no)
	if err := a.claims(at, batch, err); !errors.Is(err, store.ErrUnhealthy) {
		t.Errorf("it claims: %v", err)
	}
	for _, m := range []*member{b, join("a")} {
		if got := m.binds("w"); got != first.Version()+" false" || m.binds("v") != "" {
			t.Errorf("%q and %q", got, m.binds("v"))
		}
	}
}

// lossy is a member that hears of changes without knowing what they are about.
type lossy struct{ *memory.Member }

func (l lossy) Follow(prefix []byte, changed func(key []byte)) (cancel func()) {
	return l.Member.Follow(prefix, func([]byte) { changed(nil) })
}

// Where a gateway only knows that something has changed, it finds out what.
func TestFleetMissesWhatHasChanged(t *testing.T) {
	st, ring := memory.New(memory.Options{}), seal.Generate()
	a := NewStore(st.Join("a"), ring)
	m := st.Join("b")
	b := &member{NewStore(lossy{m}, ring), m, t}
	first := trip(t, "first")
	for i := range 3 {
		workflow := fmt.Sprint("w", i)
		if got := b.binds(workflow); got != "" {
			t.Fatal(got)
		}
		if _, _, err := a.Put(ctx, Putting{Workflow: workflow, Issuer: "agent", By: "agent", Plan: first}); err != nil {
			t.Fatal(err)
		}
		if o, err := b.Offered(ctx, workflow, "agent"); err != nil || o == nil || o.Version != first.Version() {
			t.Errorf("%d: %+v %v", i, o, err)
		}
	}
	if !b.Offers("w0") || b.binds("x") != "" || b.Has("x") {
		t.Error("what was looked up is known")
	}
}

// The offers of an agent are counted over all gateways.
func TestFleetCountsOffers(t *testing.T) {
	const most = 1000
	a, b, _ := newFleet(t)
	d := trip(t, "mine")
	for i := range most {
		m := a
		if i == most-1 {
			m = b
		}
		if err := m.puts(Putting{Workflow: fmt.Sprint("w", i), Issuer: "agent", By: "agent", Plan: d}); err != nil {
			t.Fatal(i, err)
		}
	}
	for _, m := range []*member{a, b} {
		if err := m.puts(Putting{Workflow: "one more", Issuer: "agent", By: "agent", Plan: d}); !errors.Is(err, ErrFull) {
			t.Errorf("%s: %v", m.Self().Node, err)
		}
		if err := m.puts(Putting{Workflow: "of another", Issuer: "other" + m.Self().Node, By: "other", Plan: d}); err != nil {
			t.Error(err)
		}
	}
}

// On a store that one gateway has there is no fence, and nothing is read for it.
func TestNoFenceForOneGateway(t *testing.T) {
	f, s := newRig(t)
	at, err := s.Fence(ctx, "w")
	if err != nil || s.CatchUp(context.Background()) != nil {
		t.Fatal(err)
	}
	if b := store.Bind(nil, at); b != nil {
		t.Errorf("%+v", b)
	}
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: trip(t, "first")}); err != nil {
		t.Fatal(err)
	}
	for entry, err := range f.Scan(ctx, store.Prefix([]byte("gf"))) {
		t.Errorf("a fence: %q %v", entry.Key, err)
	}
}
