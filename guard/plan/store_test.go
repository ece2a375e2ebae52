package plan_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

var ctx = context.Background()

// rig is a store of plans whose process can end before, or after, its Nth commit.
type rig struct {
	store.Store
	t    *testing.T
	ring *seal.Ring
	now  time.Time

	mu      sync.Mutex
	left    int // commits until the process ends; negative is never
	unknown bool
}

func newRig(t *testing.T) (*rig, *Store) {
	f := &rig{t: t, ring: seal.Generate(), now: time.Date(2026, 11, 26, 5, 0, 0, 0, time.UTC), left: -1}
	f.Store = memory.New(memory.Options{Now: func() time.Time { return f.now }})
	return f, f.open()
}

// open is the store of the next process.
func (f *rig) open() *Store {
	f.t.Helper()
	s := NewStore(f, f.ring)
	if n, err := s.Load(ctx); n != 0 || err != nil {
		f.t.Fatal(n, err)
	}
	return s
}

var errEnded = errors.New("the process has ended")

func (f *rig) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left == 0 {
		return 0, errEnded
	}
	if f.left > 0 {
		f.left--
	}
	v, err := f.Store.Commit(ctx, batch...)
	if f.unknown && err == nil {
		err = store.ErrUnknown
	}
	return v, err
}

// trip is a plan whose description makes its version.
func trip(t *testing.T, description string) *Descriptor {
	t.Helper()
	return parse(t, `{"wf_id": "trip", "description": "`+description+`", "nodes": [{"id": "hold"}, {"id": "pay"}], "edges": [{"from": "hold", "to": "pay"}]}`)
}

// inAll takes part in everything, and no says that nothing was called before.
func inAll(string) (bool, error) { return true, nil }

func no() (bool, error) { return false, nil }

// begin claims the first call under the workflow's plan.
func begin(t *testing.T, s *Store, f *rig, a *Assigned) {
	t.Helper()
	b, err := s.Begin(ctx, a, "call", no)
	if err == nil {
		err = b.Commit(ctx, f)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A-optional-c: versions are kept, a change names what it replaces, and a workflow stays on the version
// that it began with, over a restart too.
func TestVersionsOfAWorkflow(t *testing.T) {
	f, s := newRig(t)
	first, second, third := trip(t, "first"), trip(t, "second"), trip(t, "third")
	put := func(d *Descriptor, replaces ...string) (bool, error) {
		_, created, err := s.Put(ctx, Putting{Workflow: "w", By: "ann", Plan: d, Replaces: replaces})
		return created, err
	}
	of := func() *Assigned {
		t.Helper()
		a, err := s.Of(ctx, "w", inAll)
		if a == nil || err != nil {
			t.Fatal(a, err)
		}
		return a
	}
	if a, err := s.Of(ctx, "w", inAll); a != nil || err != nil {
		t.Fatal(a, err)
	}
	if _, err := put(first, first.Version()); !errors.Is(err, ErrChanged) {
		t.Errorf("there is none to replace: %v", err)
	}
	if created, err := put(first); !created || err != nil {
		t.Fatal(created, err)
	}
	for name, want := range map[string]error{"": ErrExists, third.Version(): ErrChanged} {
		replaces := []string{name}
		if name == "" {
			replaces = nil
		}
		if _, err := put(second, replaces...); !errors.Is(err, want) {
			t.Errorf("replacing %q: %v, want %v", name, err, want)
		}
	}
	if created, err := put(first); created || err != nil {
		t.Errorf("the same once more: %v %v", created, err)
	}
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: second, Fresh: true}); !errors.Is(err, ErrChanged) {
		t.Errorf("there must be none: %v", err)
	}
	if created, err := put(second, "x", first.Version()); created || err != nil {
		t.Fatal(created, err)
	}
	s = f.open()
	a := of()
	if a.Version != second.Version() || a.Plan.Description != "second" || fmt.Sprint(a.Earlier) != fmt.Sprint([]string{first.Version()}) || !a.Begun.IsZero() || a.By != "ann" {
		t.Errorf("%+v", a)
	}
	if d, err := s.Version(ctx, a, first.Version()); err != nil || d.Description != "first" {
		t.Errorf("the earlier one: %+v %v", d, err)
	}
	if d, err := s.Version(ctx, a, third.Version()); d != nil || err != nil {
		t.Errorf("one that there never was: %+v %v", d, err)
	}
	begin(t, s, f, a)
	if b, err := s.Begin(ctx, of(), "call", no); b != nil || err != nil {
		t.Errorf("a second call has nothing to write: %v %v", b, err)
	}
	for _, now := range []*Store{s, f.open()} {
		s = now
		if _, err := put(third, second.Version()); !errors.Is(err, ErrBegun) {
			t.Errorf("it has begun: %v", err)
		}
		if a := of(); a.Version != second.Version() || a.Begun.IsZero() {
			t.Errorf("%+v", a)
		}
	}
}

// A call that was admitted under a plan which somebody has replaced since has to look again, and a plan
// cannot be replaced once a call begins under it: one of the two comes first.
func TestPutAndFirstCallRace(t *testing.T) {
	begun, replaced := 0, 0
	for i := range 200 {
		f, s := newRig(t)
		first, second := trip(t, "first"), trip(t, "second")
		if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: first}); err != nil {
			t.Fatal(err)
		}
		a, err := s.Of(ctx, "w", inAll)
		if err != nil {
			t.Fatal(err)
		}
		var both sync.WaitGroup
		var claim, change error
		both.Go(func() {
			b, err := s.Begin(ctx, a, "call", no)
			if claim = err; err == nil {
				claim = b.Commit(ctx, f)
			}
		})
		both.Go(func() {
			_, _, change = s.Put(ctx, Putting{Workflow: "w", Plan: second, Replaces: []string{first.Version()}})
		})
		both.Wait()
		want := first.Version()
		switch {
		case claim == nil && errors.Is(change, ErrBegun):
			begun++
		case change == nil && errors.Is(claim, ErrChanged):
			replaced, want = replaced+1, second.Version()
		default:
			t.Fatalf("round %d: the claim %v, the change %v", i, claim, change)
		}
		for _, s := range []*Store{s, f.open()} {
			if a, err := s.Of(ctx, "w", inAll); err != nil || a.Version != want || a.Begun.IsZero() == (claim == nil) {
				t.Fatalf("round %d: %+v %v", i, a, err)
			}
		}
	}
	t.Logf("%d times the call came first, %d times the change", begun, replaced)
}

// P5: a process that ends between the commits of a change leaves the plan of before, whole, or the new
// one; and so does the commit of a first call.
func TestCrashBetweenCommits(t *testing.T) {
	large := parse(t, `{"wf_id": "large", "description": "`+strings.Repeat("d", 4000)+`", "nodes": [`+manyNodes(4000)+`]}`)
	if len(large.Canonical()) < 600<<10 {
		t.Fatal("it is one piece only")
	}
	for left := range 3 {
		f, s := newRig(t)
		first := trip(t, "first")
		if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: first}); err != nil {
			t.Fatal(err)
		}
		f.left = left
		_, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: large, Replaces: []string{"*"}})
		if (err == nil) != (left == 2) {
			t.Fatalf("after %d commits: %v", left, err)
		}
		f.left = -1
		want := first
		if err == nil {
			want = large
		}
		for i, s := range []*Store{s, f.open()} {
			a, err := s.Of(ctx, "w", inAll)
			if err != nil || a.Version != want.Version() || !bytes.Equal(a.Plan.Canonical(), want.Canonical()) {
				t.Errorf("after %d commits, process %d: %v %v", left, i, a.Version, err)
			}
		}
		s = f.open()
		a, err := s.Of(ctx, "w", inAll)
		if err != nil {
			t.Fatal(err)
		}
		f.left = 0
		b, err := s.Begin(ctx, a, "call", no)
		if err == nil {
			err = b.Commit(ctx, f)
		}
		if !errors.Is(err, errEnded) {
			t.Fatal(err)
		}
		f.left = -1
		if a, err := f.open().Of(ctx, "w", inAll); err != nil || !a.Begun.IsZero() {
			t.Errorf("%+v %v", a, err)
		}
	}
}

func manyNodes(n int) string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf(`{"id": "n%d", "label": "%s"}`, i, strings.Repeat("l", 150)))
	}
	return strings.Join(all, ",")
}

// P4: whether a commit came about that the store cannot say is asked of the store, and not guessed.
func TestUnknownCommit(t *testing.T) {
	f, s := newRig(t)
	f.unknown = true
	d := trip(t, "first")
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: d}); !errors.Is(err, store.ErrUnknown) {
		t.Fatal(err) // of its pieces
	}
	f.unknown = false
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: d}); err != nil {
		t.Fatal(err)
	}
	a, err := s.Of(ctx, "w", inAll)
	if err != nil {
		t.Fatal(err)
	}
	f.unknown = true
	b, err := s.Begin(ctx, a, "call", no)
	if err == nil {
		err = b.Commit(ctx, f)
	}
	if !errors.Is(err, store.ErrUnknown) {
		t.Fatal(err)
	}
	f.unknown = false
	if a, err = s.Of(ctx, "w", inAll); err != nil || a.Begun.IsZero() {
		t.Errorf("%+v %v", a, err)
	}
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: trip(t, "second"), Replaces: []string{"*"}}); !errors.Is(err, ErrBegun) {
		t.Errorf("it has begun: %v", err)
	}
}

// P3: what an agent offers binds nobody, does not show whether others have a plan, and is in force from
// the first call on that the agent has led to, for who takes part in that.
func TestOfferedPlans(t *testing.T) {
	f, s := newRig(t)
	mine, theirs := trip(t, "mine"), trip(t, "theirs")
	if _, created, err := s.Put(ctx, Putting{Workflow: "w", By: "ann", Plan: theirs}); !created || err != nil {
		t.Fatal(err)
	}
	offer := func(s *Store, workflow string, d *Descriptor, replaces ...string) (bool, error) {
		_, created, err := s.Put(ctx, Putting{Workflow: workflow, Issuer: "agent", By: "agent", Plan: d, Replaces: replaces})
		return created, err
	}
	for _, workflow := range []string{"w", "free"} {
		if created, err := offer(s, workflow, mine); !created || err != nil {
			t.Errorf("%s: %v %v", workflow, created, err)
		}
	}
	if a, err := s.Of(ctx, "w", inAll); err != nil || a.Version != theirs.Version() {
		t.Errorf("%+v %v", a, err)
	}
	if a, err := s.Of(ctx, "free", inAll); a != nil || err != nil {
		t.Errorf("%+v %v", a, err)
	}
	takesPartIn := func(first string) func(string) (bool, error) {
		return func(call string) (bool, error) { return call == first, nil }
	}
	if a, err := s.Offered(ctx, "free", "another"); a != nil || err != nil {
		t.Errorf("%+v %v", a, err)
	}
	s = f.open()
	a, err := s.Offered(ctx, "free", "agent")
	if err != nil {
		t.Fatal(err)
	}
	begin(t, s, f, a)
	for _, s := range []*Store{s, f.open()} {
		a, err := s.Of(ctx, "free", takesPartIn("call"))
		if err != nil || a == nil || a.Version != mine.Version() || a.Begun.IsZero() || a.First != "call" {
			t.Fatalf("%+v %v", a, err)
		}
		for _, part := range []func(string) (bool, error){nil, takesPartIn("another")} {
			if a, err := s.Of(ctx, "free", part); a != nil || err != nil {
				t.Errorf("it binds strangers: %+v %v", a, err)
			}
		}
		unknown := func(string) (bool, error) { return false, errEnded }
		if a, err := s.Of(ctx, "free", unknown); a != nil || !errors.Is(err, errEnded) {
			t.Errorf("whether it binds is not known: %+v %v", a, err)
		}
		if _, err := offer(s, "free", theirs, "*"); !errors.Is(err, ErrBegun) {
			t.Errorf("it has begun: %v", err)
		}
		all, err := s.List(ctx)
		if err != nil || len(all) != 3 {
			t.Errorf("%+v %v", all, err)
		}
	}
	// A later call keeps it, and changes neither when it began nor with which call.
	f.now = f.now.Add(DefaultKeep * 2 / 3)
	if a, err = s.Of(ctx, "free", inAll); err != nil {
		t.Fatal(err)
	}
	if b, err := s.Begin(ctx, a, "later", no); err != nil || b.Commit(ctx, f) != nil {
		t.Fatal(b, err)
	}
	if later, err := s.Of(ctx, "free", inAll); err != nil || later.First != "call" || !later.Begun.Equal(a.Begun) || !later.Expires.After(a.Expires) {
		t.Errorf("%+v %v", later, err)
	}
	// Others who use the name are bound by what a coordinator puts, and those who have begun stay with theirs.
	whole, created, err := s.Put(ctx, Putting{Workflow: "free", By: "ann", Plan: theirs})
	if err != nil || !created {
		t.Fatal(err)
	}
	if n, err := s.Others(ctx, whole); n != 1 || err != nil {
		t.Errorf("%d others, %v", n, err)
	}
	for first, want := range map[string]*Descriptor{"call": mine, "another": theirs} {
		if a, err := s.Of(ctx, "free", takesPartIn(first)); err != nil || a.Version != want.Version() {
			t.Errorf("%s: %+v %v", first, a, err)
		}
	}
	// Of two that parts of the workflow have begun with, the first counts where the parts are linked.
	if _, _, err := s.Put(ctx, Putting{Workflow: "both", Issuer: "z", By: "z", Plan: mine}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Put(ctx, Putting{Workflow: "both", Issuer: "a", By: "a", Plan: theirs}); err != nil {
		t.Fatal(err)
	}
	for _, issuer := range []string{"z", "a"} {
		if a, err = s.Offered(ctx, "both", issuer); err != nil {
			t.Fatal(err)
		}
		begin(t, s, f, a)
		f.now = f.now.Add(time.Minute)
	}
	if a, err := s.Of(ctx, "both", inAll); err != nil || a.Version != mine.Version() {
		t.Errorf("%+v %v", a, err)
	}
	// One whose plan a coordinator has replaced meanwhile looks again.
	if created, err := offer(s, "late", mine); !created || err != nil {
		t.Fatal(err)
	}
	if a, err = s.Offered(ctx, "late", "agent"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Put(ctx, Putting{Workflow: "late", By: "ann", Plan: theirs}); err != nil {
		t.Fatal(err)
	}
	if b, err := s.Begin(ctx, a, "call", no); !errors.Is(err, ErrChanged) {
		t.Errorf("%v %v", b, err)
	}
}

// Of two first calls at once, of which one brings a plan and the other none: the plan begins where nothing was
// called before, in the commit of the claim, or the other call looks again.
func TestPlanAndCallWithoutOneRace(t *testing.T) {
	began, without := 0, 0
	for i := range 200 {
		f, s := newRig(t)
		if _, _, err := s.Put(ctx, Putting{Workflow: "w", Issuer: "agent", By: "agent", Plan: trip(t, "mine")}); err != nil {
			t.Fatal(err)
		}
		a, err := s.Offered(ctx, "w", "agent")
		if err != nil {
			t.Fatal(err)
		}
		var called atomic.Bool
		var both sync.WaitGroup
		var first, other error
		both.Go(func() {
			var b *store.Batch
			if b, first = s.Begin(ctx, a, "call", func() (bool, error) { return called.Load(), nil }); first == nil {
				first = b.Commit(ctx, f)
			}
		})
		both.Go(func() {
			b, err := s.Beside(ctx, "w", inAll)
			if other = err; err == nil {
				called.Store(true)
				other = b.Commit(ctx, f)
			}
		})
		both.Wait()
		switch {
		case first == nil && errors.Is(other, ErrChanged):
			began++
		case other == nil && errors.Is(first, ErrChanged):
			without++
		default:
			t.Fatalf("round %d: %v, %v", i, first, other)
		}
	}
	t.Logf("%d times the plan began, %d times the call without one came first", began, without)
}

// Plans go when nothing of their workflow was called for long, and not before: calls keep them.
func TestPlansExpire(t *testing.T) {
	const keep = 10 * 24 * time.Hour
	f, s := newRig(t)
	s.Configure(keep)
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: trip(t, "first")}); err != nil {
		t.Fatal(err)
	}
	for day := range 40 {
		f.now = f.now.Add(24 * time.Hour)
		if day%8 == 0 {
			s = f.open() // also what a restart knows
			s.Configure(keep)
		}
		a, err := s.Of(ctx, "w", inAll)
		if a == nil || err != nil {
			t.Fatalf("day %d: %v %v", day, a, err)
		}
		if b, err := s.Begin(ctx, a, "call", no); err != nil || b.Commit(ctx, f) != nil {
			t.Fatalf("day %d: %v", day, err)
		}
	}
	f.now = f.now.Add(keep + time.Second)
	for _, s := range []*Store{s, f.open()} {
		if a, err := s.Of(ctx, "w", inAll); a != nil || err != nil {
			t.Errorf("%+v %v", a, err)
		}
		if all, err := s.List(ctx); len(all) != 0 || err != nil {
			t.Errorf("%+v %v", all, err)
		}
	}
	f.now = f.now.Add(keep)
	for entry, err := range f.Scan(ctx, store.Range{}) {
		t.Errorf("%q is left, %v", entry.Key[:2], err)
	}
}

// Many workflows have a plan, and few are in memory: each keeps its own, over restarts, and none is invented.
func TestManyPlannedWorkflows(t *testing.T) {
	f, s := newRig(t)
	s.Know(10)
	first, second := trip(t, "first"), trip(t, "second")
	of := func(i int) *Descriptor { return []*Descriptor{first, second}[i%2] }
	name := func(i int) string { return fmt.Sprint("w", i) }
	issuer := func(i int) string { return []string{"", "", "", "agent"}[i%4] } // every fourth is an agent's
	for i := range 40 {
		if s.Has(name(i)) {
			if a, err := s.Of(ctx, name(i), inAll); a != nil || err != nil || s.Has(name(i)) {
				t.Fatalf("%d has none: %+v %v", i, a, err)
			}
		}
		if issuer(i) != "" { // a file of the configuration, as guard has it
			begin(t, s, f, &Assigned{Workflow: name(i), Issuer: "agent", By: "file", Version: of(i).Version(), Plan: of(i)})
			continue
		}
		if _, created, err := s.Put(ctx, Putting{Workflow: name(i), By: "ann", Plan: of(i)}); !created || err != nil {
			t.Fatal(i, err)
		}
	}
	for round := range 3 {
		for i := range 40 {
			a, err := s.Of(ctx, name(i), inAll)
			if err != nil || a == nil || a.Version != of(i).Version() || !s.Has(name(i)) {
				t.Fatalf("round %d, %d: %+v %v", round, i, a, err)
			}
			if _, _, err := s.Put(ctx, Putting{Workflow: name(i), Issuer: issuer(i), By: "ann", Plan: of(i + 1)}); !errors.Is(err, ErrExists) && !errors.Is(err, ErrBegun) {
				t.Errorf("round %d, %d: %v", round, i, err)
			}
			if a, err := s.Of(ctx, name(i)+" of others", inAll); a != nil || err != nil {
				t.Errorf("%+v %v", a, err)
			}
		}
		if n := s.Known(); n > 10 {
			t.Errorf("%d are known", n)
		}
		if all, err := s.List(ctx); len(all) != 40 || err != nil {
			t.Errorf("%d are listed, %v", len(all), err)
		}
		s = NewStore(f, f.ring)
		s.Know(10)
		if _, err := s.Load(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// A plan that is put while those of others are counted keeps its text.
func TestPlansArePutBesideEachOther(t *testing.T) {
	_, s := newRig(t)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for n := range 100 {
				workflow := fmt.Sprint(i, "-", n)
				if _, _, err := s.Put(ctx, Putting{Workflow: workflow, Issuer: "issuer:" + fmt.Sprint(i), By: "issuer:" + fmt.Sprint(i), Plan: trip(t, workflow)}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	for i := range 8 {
		for n := range 100 {
			workflow := fmt.Sprint(i, "-", n)
			if a, err := s.Offered(ctx, workflow, "issuer:"+fmt.Sprint(i)); err != nil || a == nil || a.Plan.Description != workflow {
				t.Errorf("%s: %+v %v", workflow, a, err)
			}
		}
	}
}

// What has begun counts for its issuer for a day.
func TestPlansInForceGiveTheirRoomBack(t *testing.T) {
	f, s := newRig(t)
	large := strings.Repeat("x", 7<<20)
	put := func(i int) error {
		d := parse(t, fmt.Sprintf(`{"wf_id": "w%d", "nodes": [{"id": "a", "constraints": {"x": "%s"}}]}`, i, large))
		a, _, err := s.Put(ctx, Putting{Workflow: fmt.Sprint("w", i), Issuer: "agent", By: "agent", Plan: d})
		if err == nil {
			begin(t, s, f, a)
		}
		return err
	}
	n := 0
	for ; n < 20 && put(n) == nil; n++ {
	}
	f.now = f.now.Add(24*time.Hour - time.Second)
	if err := put(n); n != 9 || !errors.Is(err, ErrFull) {
		t.Errorf("%d plans of 7 MiB, then %v", n, err)
	}
	f.now = f.now.Add(time.Second)
	if err := put(n); err != nil {
		t.Error(err)
	}
}

// One agent cannot fill the store with plans.
func TestPlansOfOneIssuerAreBounded(t *testing.T) {
	f, s := newRig(t)
	d := trip(t, "first")
	offer := func(i int) error {
		_, _, err := s.Put(ctx, Putting{Workflow: fmt.Sprint("w", i), Issuer: "agent", By: "agent", Plan: d})
		return err
	}
	n := 0
	for ; n < 5000; n++ {
		if err := offer(n); err != nil {
			if !errors.Is(err, ErrFull) {
				t.Fatal(err)
			}
			break
		}
	}
	if n != 1000 {
		t.Errorf("%d plans", n)
	}
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", By: "ann", Plan: d}); err != nil {
		t.Errorf("a coordinator has room: %v", err)
	}
	f.now = f.now.Add(DefaultKeep)
	if err := offer(n); err != nil {
		t.Errorf("those of before are gone: %v", err)
	}
}

// Who sends several plans slowly keeps nobody else from putting one; all of them together are bounded.
func TestPlacesForPlansThatAreReceived(t *testing.T) {
	_, s := newRig(t)
	var dones []func()
	taken := func(by string) (n int) {
		for done := s.Receive(by); done != nil; done = s.Receive(by) {
			dones = append(dones, done)
			n++
		}
		return n
	}
	for by, want := range []int{4, 4, 4, 4, 0} {
		if got := taken(fmt.Sprint(by)); got != want {
			t.Errorf("%d has %d places, want %d", by, got, want)
		}
	}
	for _, done := range dones[:6] {
		done()
	}
	if first, fifth := taken("0"), taken("4"); first != 4 || fifth != 2 {
		t.Errorf("of six places again one takes %d, and another %d", first, fifth)
	}
}

// Nor by changing one again and again.
func TestChangesOfOneIssuerAreBounded(t *testing.T) {
	_, s := newRig(t)
	large := strings.Repeat("x", 7<<20)
	n := 0
	for ; n < 20; n++ {
		d := parse(t, fmt.Sprintf(`{"wf_id": "w%d", "nodes": [{"id": "a", "constraints": {"x": "%s"}}]}`, n, large))
		if _, _, err := s.Put(ctx, Putting{Workflow: "w", Issuer: "agent", By: "agent", Plan: d, Replaces: []string{"*"}[:min(n, 1)]}); errors.Is(err, ErrFull) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n != 9 {
		t.Errorf("%d versions of 7 MiB", n)
	}
}

// P4: a plan that cannot be read is not taken for none.
func TestDamagedPlans(t *testing.T) {
	for _, kind := range []byte{'h', 'p'} {
		f, s := newRig(t)
		if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: trip(t, "first")}); err != nil {
			t.Fatal(err)
		}
		for entry, err := range f.Scan(ctx, store.Prefix([]byte{'g', kind})) {
			if err != nil {
				t.Fatal(err)
			}
			entry.Value[len(entry.Value)-1] ^= 1
			if _, err := f.Commit(ctx, store.Write{Key: entry.Key, Value: entry.Value, Expires: entry.Expires, Bulk: kind == 'p'}); err != nil {
				t.Fatal(err)
			}
		}
		s = NewStore(f, f.ring)
		if n, err := s.Load(ctx); err != nil || (n == 1) != (kind == 'h') {
			t.Errorf("%c: %d %v", kind, n, err)
		}
		if a, err := s.Of(ctx, "w", inAll); !errors.Is(err, ErrUnreadable) {
			t.Errorf("%c: %+v %v", kind, a, err)
		}
		if a, err := s.Of(ctx, "another", inAll); a != nil || err != nil {
			t.Errorf("%c: %+v %v", kind, a, err)
		}
	}
}

// Everything of a plan is sealed anew with the newest key.
func TestPlansAreSealedAnew(t *testing.T) {
	f, s := newRig(t)
	if _, _, err := s.Put(ctx, Putting{Workflow: "w", Plan: trip(t, "first")}); err != nil {
		t.Fatal(err)
	}
	next, err := f.ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	f.ring = next
	s = f.open()
	if err := s.Reseal(ctx); err != nil {
		t.Fatal(err)
	}
	ids, n := next.KeyIDs(), 0
	for entry, err := range f.Scan(ctx, store.Range{}) {
		if n++; err != nil || next.KeyOf(entry.Value) != ids[len(ids)-1] || entry.Expires.IsZero() {
			t.Errorf("%q %v", entry.Key[:2], err)
		}
	}
	if a, err := f.open().Of(ctx, "w", inAll); n != 2 || err != nil || a == nil {
		t.Errorf("%d entries, %+v %v", n, a, err)
	}
}

// A workflow without a plan costs a look into a map, however many others have one.
func BenchmarkNoPlan(b *testing.B) {
	s := NewStore(memory.New(memory.Options{}), seal.Generate())
	d, err := Parse([]byte(`{"wf_id": "w", "nodes": [{"id": "a"}]}`))
	if err != nil {
		b.Fatal(err)
	}
	for i := range 10_000 {
		if _, _, err := s.Put(ctx, Putting{Workflow: fmt.Sprint("w", i), Plan: d}); err != nil {
			b.Fatal(err)
		}
	}
	for name, workflow := range map[string]string{"without": "another", "with": "w77"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Of(ctx, workflow, inAll); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
