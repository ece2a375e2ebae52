package guard

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// writer is a gateway of several that share a store.
type writer struct {
	*WriteTracker
	t      *testing.T
	remove func() // from the store, as another one does that finds it gone
	calls  *execution.Guard
}

// joins makes a member of a store that a test's gateways share.
type joins func(t *testing.T, name string) (m store.Shared, remove func())

// inMemory runs a test on a store in memory, in a bubble.
func inMemory(t *testing.T, test func(t *testing.T, join joins)) {
	synctest.Test(t, func(t *testing.T) {
		mem := memory.New(memory.Options{})
		test(t, func(_ *testing.T, name string) (store.Shared, func()) {
			m := mem.Join(name)
			return m, m.Remove
		})
	})
}

func writers(t *testing.T, join joins) (a, b *writer) {
	ring := seal.Generate()
	open := func(name string) *writer {
		m, remove := join(t, name)
		w := &writer{new(WriteTracker), t, remove, nil}
		var err error
		if w.calls, _, err = execution.Open(t.Context(), m, ring); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = w.calls.Close(context.Background()) }) // one that was removed cannot write
		w.Follow(m, ring, w.calls)
		return w
	}
	return open("a"), open("b")
}

func (w *writer) call(id string) *execution.Call {
	c := &execution.Call{Scope: execution.Scope{Caller: "ada", Method: "PUT", Path: "/doc", ID: id}, Deadline: time.Minute, KeepKey: time.Hour}
	c.Key = w.calls.Key(c.Scope)
	return c
}

// begins is a call that writes to a target, as a guard makes it.
func (w *writer) begins(target, id string) (*execution.Execution, execution.Key, func()) {
	w.t.Helper()
	c := w.call(id)
	found, err := w.calls.LookUp(w.t.Context(), c.Key, c.Fingerprint)
	if err != nil {
		w.t.Fatal(err)
	}
	e, err := w.calls.Claim(w.t.Context(), c, found, store.NewBatch(w.fleet.begins(w.t.Context(), target, c.Key, c.Deadline)))
	if err != nil {
		w.t.Fatal(err)
	}
	return e, c.Key, w.write(target, nil)
}

func (w *writer) writes(target, id string) {
	w.t.Helper()
	e, key, over := w.begins(target, id)
	over()
	if err := e.Settle(w.t.Context(), execution.Outcome{Verdict: execution.Completed, Status: 200}, store.NewBatch(w.fleet.ends(target, key))); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) saw(window *writeWindow, others bool, when string) {
	w.t.Helper()
	if window.end() != others {
		w.t.Errorf("%s: others have written is %t", when, !others)
	}
}

// P6, ADR 0137: who restores or records a target at one gateway notices every call that changes it at another one
// meanwhile, and none that has ended before, or changes something else.
func TestFleetWrites(t *testing.T) { inMemory(t, seesWrites) }

func seesWrites(t *testing.T, join joins) {
	var none execution.Key
	a, b := writers(t, join)
	a.writes("t", "before")
	window := b.Open("t", none)
	a.writes("another", "beside")
	b.saw(window, false, "before it, and beside it")

	window = b.Open("t", none)
	a.writes("t", "within")
	b.saw(window, true, "within it")

	window = b.Open("t", none)
	e, key, over := a.begins("t", "still under way")
	b.saw(window, true, "begun in it")
	window = b.Open("t", none)
	b.saw(window, true, "under way from before it on")
	window = b.Open("t", none)
	over()
	if err := e.Settle(t.Context(), execution.Outcome{Verdict: execution.Released}, store.NewBatch(a.fleet.ends("t", key))); err != nil {
		t.Fatal(err)
	}
	b.saw(window, true, "ended in it")
	window = b.Open("t", none)
	b.saw(window, false, "after it")
}

// An undo at one gateway writes nothing over what a call at another one has written since it has looked, and calls
// there notice the undo.
func TestFleetWritesOfUndos(t *testing.T) { inMemory(t, seesUndos) }

func seesUndos(t *testing.T, join joins) {
	a, b := writers(t, join)
	undone := b.call("undone").Key
	window := b.Open("t", undone)
	look := a.Open("t", a.call("beside").Key)
	over, err := b.WriteUndo("t", undone, window)
	if err != nil || window.Disturbed() {
		t.Fatalf("an undo that nobody disturbs: %v", err)
	}
	under := a.Open("t", a.call("beside").Key)
	over()
	a.saw(look, true, "an undo has begun in it")
	a.saw(under, true, "an undo was under way")
	a.saw(a.Open("t", a.call("beside").Key), false, "an undo has ended")
	window.Close()

	window = b.Open("t", undone)
	a.writes("t", "since the look")
	refused := (*rollback.SendError)(nil)
	if _, err := b.WriteUndo("t", undone, window); !errors.As(err, &refused) || !refused.NotSent || refused.Reason != rollback.ReasonChanged {
		t.Errorf("an undo writes over what another gateway has written: %v", err)
	}
	window.Close()
	if over, err = b.WriteUndo("t", undone, nil); err != nil { // overwrites whatever is there
		t.Fatal(err)
	}
	over()
}

// Of a call and an undo at another gateway that begin at once, at least one sees the other.
func TestFleetWritesAtOnce(t *testing.T) { inMemory(t, seesOneOfTwo) }

func seesOneOfTwo(t *testing.T, join joins) {
	a, b := writers(t, join)
	for round := range 20 {
		id := fmt.Sprint("undone ", round)
		undone := b.call(id).Key
		window, look := b.Open("t", undone), a.Open("t", a.call("call").Key)
		refused := make(chan error, 1)
		go func() {
			over, err := b.WriteUndo("t", undone, window)
			if err == nil {
				over()
			}
			refused <- err
		}()
		e, key, over := a.begins("t", fmt.Sprint("call ", round))
		disturbed := look.end()
		if err := <-refused; err == nil && !disturbed {
			t.Errorf("round %d: a call and an undo have written over each other, and neither knows", round)
		}
		window.Close()
		over()
		if err := e.Settle(t.Context(), execution.Outcome{Verdict: execution.Released}, store.NewBatch(a.fleet.ends("t", key))); err != nil {
			t.Fatal(err)
		}
	}
}

// A gateway that was removed may be writing still. Its write counts until the call may take no longer, or its doubt is
// settled; not for the undo of that very call, which is what settles it.
func TestFleetWritesOfWhoIsGone(t *testing.T) {
	seesWhoIsGone(t, inMemory, map[string]func(b *writer, c *execution.Call){
		"time passes":   func(*writer, *execution.Call) { <-time.After(2*time.Minute + time.Second) },
		"it is undone":  undone,
		"it runs again": runsAgain,
	})
	inMemory(t, seesUndosOfWhoIsGone)
}

func undone(b *writer, c *execution.Call) {
	if err := b.calls.Undone(b.t.Context(), execution.Undoing{Key: c.Key}); err != nil {
		b.t.Fatal(err)
	}
}

func runsAgain(b *writer, _ *execution.Call) { b.writes("t", "gone") }

func seesWhoIsGone(t *testing.T, on func(*testing.T, func(*testing.T, joins)), settled map[string]func(b *writer, c *execution.Call)) {
	for name, settle := range settled {
		t.Run(name, func(t *testing.T) {
			on(t, func(t *testing.T, join joins) {
				a, b := writers(t, join)
				within := b.Open("t", execution.Key{})
				a.begins("t", "gone")
				c := a.call("gone")
				a.remove()
				b.saw(within, true, "begun in it, and its gateway has left")
				b.saw(b.Open("t", execution.Key{}), true, "its gateway has left")
				for doubts := 0; doubts == 0; {
					<-time.After(time.Millisecond)
					var err error
					if doubts, _, err = b.calls.Doubts(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				b.saw(b.Open("t", execution.Key{}), true, "its gateway has left, and its doubt is recorded")
				b.saw(b.Open("t", c.Key), false, "it is the call itself")
				settle(b, c)
				b.saw(b.Open("t", execution.Key{}), false, name)
			})
		})
	}
}

// The same of its undos.
func seesUndosOfWhoIsGone(t *testing.T, join joins) {
	a, b := writers(t, join)
	c := a.call("undone")
	a.writes("t", "undone")
	if _, err := a.WriteUndo("t", c.Key, nil); err != nil {
		t.Fatal(err)
	}
	a.remove()
	b.saw(b.Open("t", execution.Key{}), true, "the gateway that undoes it has left")
	b.saw(b.Open("t", c.Key), false, "the undo goes on elsewhere")
	undone(b, c)
	b.saw(b.Open("t", execution.Key{}), false, "it was undone")
}

// deaf is a member that cannot find out what the others have committed.
type deaf struct{ *memory.Member }

func (deaf) CatchUp(context.Context) error { return store.ErrUnavailable }

// Fail closed: who cannot ask the others takes it that they have written.
func TestFleetWritesWithoutTheStore(t *testing.T) {
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	tracker := new(WriteTracker)
	tracker.Follow(deaf{mem.Join("a")}, ring, nil)
	if window := tracker.Open("t", execution.Key{}); !window.end() {
		t.Error("nobody has written, although nobody could be asked")
	}
}
