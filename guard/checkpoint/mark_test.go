package checkpoint_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func (r *rig) mark(id string) checkpoint.Mark {
	r.t.Helper()
	m, err := r.Mark(ctx, id)
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

func (r *rig) step(id string, to checkpoint.State, rollback string) error {
	r.t.Helper()
	return r.Advance(ctx, id, r.mark(id), checkpoint.Step{To: to, Rollback: rollback})
}

// P5: what was undone is never undone again, by whichever rollback and after a restart.
func TestP5UndoneIsFinal(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		p := r.kept(full("c", 1))
		for _, to := range []checkpoint.State{checkpoint.Undoing, checkpoint.Undone} {
			if err := r.step("c", to, "r1"); err != nil {
				t.Fatal(err)
			}
		}
		r.restart()
		if m := r.mark("c"); m.State != checkpoint.Undone || m.Rollback != "r1" || m.At.IsZero() {
			t.Errorf("%+v", m)
		}
		for to := checkpoint.Active; to <= checkpoint.Escalated; to++ {
			for _, id := range []string{"r1", "r2"} {
				if err := r.step("c", to, id); !errors.Is(err, checkpoint.ErrStep) {
					t.Errorf("from undone to %v by %s: %v", to, id, err)
				}
			}
		}
		if _, err := r.Credentials(ctx, "c"); !errors.Is(err, checkpoint.ErrUnknown) {
			t.Errorf("the credentials of what was undone: %v", err)
		}
		if c := r.open("c", checkpoint.Want{Sum: p.Sum()}); c.Mark.State != checkpoint.Undone {
			t.Errorf("%+v", c.Mark)
		}
	})
}

// Every way through the states, and who may take it.
func TestStepsOfAnUndo(t *testing.T) {
	type move struct {
		to checkpoint.State
		by string
		ok bool
	}
	for name, moves := range map[string][]move{
		"undone":                  {{checkpoint.Undoing, "a", true}, {checkpoint.Undone, "a", true}},
		"not without beginning":   {{checkpoint.Undone, "a", false}, {checkpoint.Failed, "a", false}},
		"begun once":              {{checkpoint.Undoing, "a", true}, {checkpoint.Undoing, "a", false}, {checkpoint.Undoing, "b", false}},
		"only who is at it":       {{checkpoint.Undoing, "a", true}, {checkpoint.Undone, "b", false}, {checkpoint.Active, "b", false}},
		"gives way":               {{checkpoint.Undoing, "a", true}, {checkpoint.Active, "a", true}, {checkpoint.Undoing, "b", true}},
		"another after a failure": {{checkpoint.Undoing, "a", true}, {checkpoint.Failed, "a", true}, {checkpoint.Undoing, "b", true}, {checkpoint.Undone, "b", true}},
		"escalated at once":       {{checkpoint.Escalated, "a", true}, {checkpoint.Undone, "person", true}},
		"escalated, then failed":  {{checkpoint.Escalated, "a", true}, {checkpoint.Active, "a", false}, {checkpoint.Failed, "a", true}},
	} {
		r := newRig(t)
		for i, m := range moves {
			if err := r.step("c", m.to, m.by); (err == nil) != m.ok || err != nil && !errors.Is(err, checkpoint.ErrStep) {
				t.Errorf("%s: step %d to %v by %s: %v", name, i, m.to, m.by, err)
			}
		}
	}
	if err := newRig(t).step("c", checkpoint.Undoing, ""); !errors.Is(err, checkpoint.ErrInvalid) {
		t.Error(err)
	}
}

// Of many rollbacks that come at the same time one begins.
func TestOneRollbackBegins(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		found := r.mark("c")
		var begun, late atomic.Int64
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				err := r.Advance(ctx, "c", found, checkpoint.Step{To: checkpoint.Undoing, Rollback: number("r", i)},
					store.Write{Key: []byte("extra"), Value: []byte(number("r", i))})
				switch {
				case err == nil:
					begun.Add(1)
				case errors.Is(err, checkpoint.ErrChanged):
					late.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		all.Wait()
		if begun.Load() != 1 || late.Load() != 19 {
			t.Errorf("%d begun, %d late", begun.Load(), late.Load())
		}
		entry, err := r.st.Get(ctx, []byte("extra"))
		if m := r.mark("c"); err != nil || m.Rollback != string(entry.Value) {
			t.Errorf("%+v, and the extra write is %q, %v", m, entry.Value, err)
		}
	})
}

// A mark is kept as long as it was once said, and never shorter than its snapshot.
func TestMarkIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		now := time.Now()
		r.kept(full("short", 1))
		advance := func(id string, to checkpoint.State, keep time.Time) {
			if err := r.Advance(ctx, id, r.mark(id), checkpoint.Step{To: to, Rollback: "r", Keep: keep}); err != nil {
				t.Fatal(err)
			}
		}
		advance("short", checkpoint.Undoing, now.Add(time.Hour))
		advance("long", checkpoint.Undoing, now.Add(30*ttl))
		advance("long", checkpoint.Undone, now.Add(time.Hour))
		advance("ever", checkpoint.Undoing, time.Time{})
		advance("ever", checkpoint.Undone, now.Add(time.Hour))
		states := func(want ...checkpoint.State) {
			t.Helper()
			for i, id := range []string{"short", "long", "ever"} {
				if m := r.mark(id); m.State != want[i] {
					t.Errorf("after %v %s is %v", time.Since(now), id, m.State)
				}
			}
		}
		time.Sleep(ttl * 5 / 4)
		states(checkpoint.Undoing, checkpoint.Undone, checkpoint.Undone)
		time.Sleep(10 * ttl)
		states(checkpoint.Active, checkpoint.Undone, checkpoint.Undone)
		time.Sleep(1000 * ttl)
		states(checkpoint.Active, checkpoint.Active, checkpoint.Undone)
	})
}

// P4: a step that did not reach the store was not taken.
func TestP4StepFailsClosed(t *testing.T) {
	r := newRig(t)
	fail := func([]store.Write) error { return errDisk }
	r.st.fail.Store(&fail)
	if err := r.step("c", checkpoint.Undoing, "r"); !errors.Is(err, checkpoint.ErrStore) {
		t.Error(err)
	}
	r.st.fail.Store(nil)
	if m := r.mark("c"); m.State != checkpoint.Active {
		t.Errorf("%+v", m)
	}
}
