package execution_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// copyOf is a ring as another process reads it.
func copyOf(t *testing.T, ring *seal.Ring) *seal.Ring {
	t.Helper()
	text, err := ring.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	other, err := seal.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return other
}

func rotatedRing(t *testing.T, ring *seal.Ring) *seal.Ring {
	t.Helper()
	next, err := ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	return copyOf(t, next)
}

// joinWith opens the store with a ring of the member's own.
func (f *fleet) joinWith(name string, ring *seal.Ring) *node {
	f.t.Helper()
	return (&fleet{f.t, f.mem, copyOf(f.t, ring)}).join(name)
}

// tryJoin is the error of a member that opens the store with a ring of its own.
func (f *fleet) tryJoin(name string, ring *seal.Ring) error {
	f.t.Helper()
	m := f.mem.Join(name)
	g, _, err := execution.Open(ctx, m, copyOf(f.t, ring))
	if err == nil {
		_ = g.Close(ctx)
	}
	m.Remove()
	return err
}

// adopt takes a ring over, as a gateway does when its configuration is loaded.
func (n *node) adopt(ring *seal.Ring) error {
	n.t.Helper()
	next := copyOf(n.t, ring)
	_, err := n.ring.Adopt(next, nil, func(uint32) error {
		err := n.Keys().Hold(ctx, next.KeyIDs()...)
		if errors.Is(err, execution.ErrOtherKey) || errors.Is(err, execution.ErrMissingKey) {
			err = fmt.Errorf("%w: %w", seal.ErrRefused, err)
		}
		return err
	})
	if err == nil {
		_, err = n.Keys().Settle(ctx)
	}
	return err
}

func (n *node) takeOver(ring *seal.Ring) {
	n.t.Helper()
	if err := n.adopt(ring); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) complete(c *execution.Call, body string) {
	n.t.Helper()
	e := n.claim(c)
	n.settle(e, answered(e, []byte(body)))
}

// withoutKey is a ring less one of its keys.
func withoutKey(t *testing.T, ring *seal.Ring, id uint32) *seal.Ring {
	t.Helper()
	text, err := ring.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	var doc map[string]any
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	doc["sealing"] = slices.DeleteFunc(doc["sealing"].([]any), func(row any) bool { return row.(map[string]any)["id"] == float64(id) })
	if text, err = json.Marshal(doc); err != nil {
		t.Fatal(err)
	}
	less, err := seal.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return less
}

// seals is the key under which a member seals.
func (n *node) seals() uint32 {
	ids := n.ring.KeyIDs()
	return ids[len(ids)-1]
}

func (n *node) wantWaiting(want string) {
	n.t.Helper()
	waiting, err := n.Keys().Waiting(ctx)
	if got := fmt.Sprint(waiting); err != nil || got != want {
		n.t.Errorf("%s waits for %s, %v; want %s", n.member.Self().Node, got, err, want)
	}
}

// P1: a new key seals once every member has it, and not before. What each of them records opens at all others at any
// time.
func TestKeySealsOnceAllMembersHaveIt(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b, c := f.joinWith("a", f.ring), f.joinWith("b", f.ring), f.joinWith("c", f.ring)
		all := []*node{a, b, c}
		next := rotatedRing(t, f.ring)
		done := 0
		record := func() {
			t.Helper()
			for i, n := range all {
				call := n.call(fmt.Sprint(done, " of ", i))
				n.complete(call, "charged")
				for _, other := range all {
					other.status(call, execution.Replayable)
				}
			}
			done++
		}
		record()
		for i, n := range all {
			n.takeOver(next)
			synctest.Wait()
			record()
			for _, other := range all {
				if want := []uint32{1, 1, 2}[i]; other.seals() != want {
					t.Errorf("%s seals with %d while %d of 3 have key 2", other.member.Self().Node, other.seals(), i+1)
				}
			}
			a.wantWaiting([]string{"[{2 [b c]}]", "[{2 [c]}]", "[]"}[i])
		}
		for _, n := range all {
			if err := n.Keys().Await(ctx, 2); err != nil {
				t.Error(err)
			}
		}
		if n := a.under("x"); n[2] != 3 || n[1] != 9 {
			t.Errorf("records under %v", n)
		}
	})
}

// A member that is gone keeps nobody waiting; one that does not respond does, until it is gone.
func TestKeyWaitsForNobodyWhoIsGone(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.joinWith("a", f.ring), f.joinWith("b", f.ring)
		a.takeOver(rotatedRing(t, f.ring))
		<-time.After(time.Hour)
		if a.seals() != 1 {
			t.Fatal("time alone was enough")
		}
		b.member.Remove()
		synctest.Wait()
		if a.seals() != 2 {
			t.Errorf("a seals with %d once b is gone", a.seals())
		}
		if err := f.tryJoin("b", f.ring); !errors.Is(err, execution.ErrMissingKey) {
			t.Errorf("b comes back without the key: %v", err)
		}
		back := f.joinWith("b", rotatedRing(t, a.ring)) // with one more than it needs
		if back.seals() != 2 {
			t.Errorf("b seals with %d", back.seals())
		}
		back.wantWaiting("[{3 [a]}]")
	})
}

// hooked is a member whose commits can be held up.
type hooked struct {
	*memory.Member
	before atomic.Pointer[func(batch []store.Write)]
}

func (h *hooked) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if before := h.before.Load(); before != nil {
		(*before)(batch)
	}
	return h.Member.Commit(ctx, batch...)
}

func (f *fleet) joinHooked(name string) (*node, *hooked) {
	f.t.Helper()
	h := &hooked{Member: f.mem.Join(name)}
	return (&fleet{f.t, f.mem, copyOf(f.t, f.ring)}).open(h.Member, h), h
}

// P1: a member that joins without the key, or gives it up, in the very moment in which another one lets it seal, keeps it
// from doing so.
func TestKeyDoesNotSealPastAMemberWithoutIt(t *testing.T) {
	for name, meanwhile := range map[string]func(f *fleet, b *node){
		"joins": func(f *fleet, _ *node) { f.joinWith("c", f.ring) },
		"gives it up": func(f *fleet, b *node) {
			if err := b.adopt(f.ring); err != nil {
				b.t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, f *fleet) {
				a, atA := f.joinHooked("a")
				b, atB := f.joinHooked("b")
				next := rotatedRing(t, f.ring)
				b.takeOver(next)
				var once sync.Once // whoever of them is first; the other waits
				tried := false
				before := func(batch []store.Write) {
					if slices.ContainsFunc(batch, comesIntoUse) {
						once.Do(func() { tried = true; meanwhile(f, b) })
					}
				}
				atA.before.Store(&before)
				atB.before.Store(&before)
				a.takeOver(next)
				synctest.Wait()
				if !tried {
					t.Fatal("nothing was tried")
				}
				if a.seals() != 1 {
					t.Errorf("a seals with %d, and another member cannot open it", a.seals())
				}
			})
		})
	}
}

// comesIntoUse reports that a write lets key 2 seal.
func comesIntoUse(w store.Write) bool {
	var record struct {
		Uses []execution.KeyUse `cbor:"uses"`
	}
	return string(w.Key) == "mkeys" && store.Decode(w.Value, &record) == nil &&
		slices.ContainsFunc(record.Uses, func(use execution.KeyUse) bool { return use.ID == 2 })
}

// A key in use cannot be given up by anybody, and a ring that lacks it is refused; nor can another key have its number.
func TestRingsThatDoNotFit(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.joinWith("a", f.ring), f.joinWith("b", f.ring)
		if err := f.tryJoin("c", seal.Generate()); err == nil || !errors.Is(err, execution.ErrWrongKey) {
			t.Errorf("a foreign ring: %v", err)
		}
		next, other := rotatedRing(t, f.ring), rotatedRing(t, f.ring)
		a.takeOver(next)
		if err := b.adopt(other); !errors.Is(err, execution.ErrOtherKey) {
			t.Errorf("another key 2: %v", err)
		}
		if err := f.tryJoin("c", other); !errors.Is(err, execution.ErrOtherKey) {
			t.Errorf("another key 2, of a member that joins: %v", err)
		}
		b.takeOver(next) // what was refused stands in nobody's way
		synctest.Wait()
		if a.seals() != 2 || b.seals() != 2 {
			t.Fatalf("they seal with %d and %d", a.seals(), b.seals())
		}
		var missing *seal.MissingError
		if err := a.adopt(f.ring); !errors.As(err, &missing) {
			t.Errorf("without the key that seals: %v", err)
		}
		if err := a.adopt(withoutKey(t, next, 1)); !errors.Is(err, execution.ErrMissingKey) {
			t.Errorf("without a key of records: %v", err)
		}
		if a.ring.Check(1) == "" {
			t.Error("a ring that was refused is used")
		}
	})
}

// Two members do not make different keys with one number.
func TestOneMemberRotatesAtATime(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.joinWith("a", f.ring), f.joinWith("b", f.ring)
		for range 20 {
			errs := make([]error, 2)
			var both sync.WaitGroup
			for i, n := range []*node{a, b} {
				both.Go(func() { errs[i] = n.Keys().BeginRotation(ctx) })
			}
			both.Wait()
			if (errs[0] == nil) == (errs[1] == nil) || !errors.Is(errors.Join(errs...), execution.ErrKeyElsewhere) {
				t.Fatalf("at once: %v", errs)
			}
			for _, n := range []*node{a, b} { // neither has made one
				if err := n.Keys().Hold(ctx, 1); err != nil {
					t.Fatal(err)
				}
			}
		}
		next := rotatedRing(t, f.ring)
		a.takeOver(next)
		if err := b.Keys().BeginRotation(ctx); !errors.Is(err, execution.ErrKeyElsewhere) {
			t.Errorf("with a key that b does not have: %v", err)
		}
		b.takeOver(next)
		if err := b.Keys().BeginRotation(ctx); err != nil {
			t.Errorf("with the same keys: %v", err)
		}
		b.member.Remove() // in the middle
		if err := a.Keys().BeginRotation(ctx); err != nil {
			t.Errorf("b is gone: %v", err)
		}
	})
}

// P1: nothing under an older key is under way at any member once Await returns, so that what re-sealing then does not
// find is not there. A member that is gone is not waited for.
func TestAwaitWaitsForCommitsOfOthers(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a := f.joinWith("a", f.ring)
		b, at := f.joinHooked("b")
		c, gone := f.joinHooked("c")
		release := make(chan struct{})
		hold := func(batch []store.Write) {
			if slices.ContainsFunc(batch, func(w store.Write) bool { return w.Key[0] == 'x' }) {
				<-release
			}
		}
		at.before.Store(&hold)
		gone.before.Store(&hold)
		var ends sync.WaitGroup
		for _, n := range []*node{b, c} {
			ends.Go(func() {
				call := n.call("of " + n.member.Self().Node)
				_, _ = n.Claim(ctx, call, execution.Finding{}) // its value is sealed by now
			})
		}
		synctest.Wait()
		next := rotatedRing(t, f.ring)
		for _, n := range []*node{a, b, c} {
			n.takeOver(next)
		}
		synctest.Wait()
		if a.seals() != 2 || b.seals() != 2 {
			t.Fatalf("they seal with %d and %d", a.seals(), b.seals())
		}
		awaited := make(chan error, 1)
		go func() { awaited <- a.Keys().Await(ctx, 2) }()
		synctest.Wait()
		c.member.Remove()
		synctest.Wait()
		select {
		case err := <-awaited:
			t.Fatalf("a commit under key 1 is under way at b: %v", err)
		default:
		}
		close(release)
		ends.Wait()
		synctest.Wait()
		if err := <-awaited; err != nil {
			t.Fatal(err)
		}
		if n := a.under("x"); n[1] != 1 || n[2] != 0 {
			t.Errorf("records under %v", n)
		}
	})
}

// Re-sealing waits for what runs at other members, whose outcome is sealed with the new key; then nothing but answers
// needs the old one.
func TestResealWaitsForOtherMembers(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.joinWith("a", f.ring), f.joinWith("b", f.ring)
		a.complete(a.call("done"), "charged")
		runs := a.claim(a.call("runs"))
		b.claim(b.call("left open")) // by a member that is gone before it ends
		c := f.joinWith("c", f.ring)
		next := rotatedRing(t, f.ring)
		for _, n := range []*node{a, b, c} {
			n.takeOver(next)
		}
		synctest.Wait()
		if err := c.Keys().Await(ctx, 2); err != nil {
			t.Fatal(err)
		}
		passed := make(chan execution.ResealProgress, 1)
		go func() { passed <- c.reseal() }()
		synctest.Wait()
		b.member.Remove()
		synctest.Wait()
		select {
		case p := <-passed:
			t.Fatalf("it has not waited for the call at a: %+v", p)
		default:
		}
		a.settle(runs, execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true})
		synctest.Wait()
		if p := <-passed; p.Damaged != 0 || len(p.Left) != 0 {
			t.Errorf("%+v", p)
		}
		if n := a.under("x"); n[1] != 0 || n[2] != 3 {
			t.Errorf("records under %v", n)
		}
		if uses := c.inUse(); len(uses) != 1 || uses[0].ID != 2 {
			t.Errorf("in use: %v", uses)
		}
	})
}

// The member that has joined first re-seals, and the next one when that is gone. Two that do so all the same harm nothing.
func TestFirstMemberReseals(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		all := []*node{f.joinWith("a", f.ring)}
		for _, name := range []string{"b", "c"} {
			<-time.After(time.Second)
			all = append(all, f.joinWith(name, f.ring))
		}
		a, b, c := all[0], all[1], all[2]
		for i := range 300 {
			a.complete(a.call(fmt.Sprint(i)), "charged")
		}
		next := rotatedRing(t, f.ring)
		for _, n := range all {
			n.takeOver(next)
		}
		who := func(want *node) {
			t.Helper()
			for _, n := range all {
				if mine, err := n.Keys().Reseals(ctx); err != nil || mine != (n == want) {
					t.Errorf("%s: %t, %v", n.member.Self().Node, mine, err)
				}
			}
		}
		who(a)
		a.member.Remove()
		all = all[1:]
		who(b)
		var both sync.WaitGroup
		for _, n := range []*node{b, c} {
			both.Go(func() { n.reseal() })
		}
		both.Wait()
		if n := b.under("x"); n[1] != 0 || n[2] != 300 {
			t.Errorf("records under %v", n)
		}
		b.status(b.call("7"), execution.Replayable)
	})
}

// A member that was removed waits for nobody.
func TestKeysOfARemovedMember(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		_, b := f.joinWith("a", f.ring), f.joinWith("b", f.ring)
		awaited := make(chan error, 1)
		go func() { awaited <- b.Keys().Await(ctx, 9) }()
		synctest.Wait()
		b.member.Remove()
		if err := <-awaited; !errors.Is(err, store.ErrUnhealthy) {
			t.Errorf("b waits: %v", err)
		}
		if err := b.adopt(rotatedRing(t, f.ring)); !errors.Is(err, execution.ErrStore) {
			t.Errorf("b has another key: %v", err)
		}
	})
}

// A member that was removed does not re-seal, also when it was the last one.
func TestRemovedMemberDoesNotReseal(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		m := f.mem.Join("a")
		a := f.open(m, m)
		m.Remove()
		if mine, err := a.Keys().Reseals(ctx); mine {
			t.Error(mine, err)
		}
	})
}
