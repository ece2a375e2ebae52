package rollback_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// P5 and cascade 4.3.4: rollbacks that overlap in every order, over processes that die at
// any commit, all come to their end; each checkpoint is undone once, and nothing of them
// stands for ever.
func TestP5OverlapsAndDeaths(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 34))
			r := overlapping(t)
			asked := anyOf(rnd)
			for range 12 {
				r.st.mu.Lock()
				r.st.commits, r.st.dies, r.st.lands = 0, rnd.IntN(25), rnd.IntN(2) == 0
				r.st.mu.Unlock()
				if err := r.Start(ctx); err != nil && !r.st.gone() {
					t.Fatal(err)
				}
				for _, i := range rnd.Perm(len(asked))[:3] {
					var lost *rollback.ConflictError
					if _, err := r.Execute(ctx, asked[i]); err != nil && !errors.As(err, &lost) && !r.st.gone() {
						t.Fatal(err)
					}
					if rnd.IntN(2) == 0 {
						synctest.Wait()
					}
				}
				synctest.Wait()
				stop(r.Coordinator)
				r.open()
			}
			r.start()
			time.Sleep(time.Minute)
			synctest.Wait()
			r.allCompleted(seed)
			stop(r.Coordinator)
		})
		if t.Failed() {
			return
		}
	}
}

// The same where the store refuses commits, or takes them and cannot tell so.
func TestP5OverlapsOverAnUnsureStore(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 43))
			r := overlapping(t)
			h := r.hook()
			var mu sync.Mutex
			sometimes := func() bool {
				mu.Lock()
				defer mu.Unlock()
				return rnd.IntN(6) == 0
			}
			h.full, h.unknown = sometimes, func([]store.Write) bool { return sometimes() }
			r.start()
			for _, q := range anyOf(rand.New(rand.NewPCG(seed, 44))) {
				for range 3 {
					var lost *rollback.ConflictError
					if _, err := r.Execute(ctx, q); err == nil || errors.As(err, &lost) {
						break
					}
				}
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			r.allCompleted(seed)
			stop(r.Coordinator)
		})
		if t.Failed() {
			return
		}
	}
}

// overlapping is a workflow in which many rollbacks meet.
func overlapping(t *testing.T) *rig {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed, "1")
	r.made("3", checkpoint.Compensate, guard.Completed, "2")
	r.made("4", checkpoint.Compensate, guard.Completed, "2")
	r.made("5", checkpoint.Restore, guard.Released, "1")
	r.group("g", "c2", "c3")
	return r
}

// anyOf are rollbacks of it.
func anyOf(rnd *rand.Rand) (asked []rollback.Request) {
	for range 6 {
		target := []string{"c1", "c2", "c3", "c4", "c5", "g"}[rnd.IntN(6)]
		q := request(target, []plan.Scope{plan.Single, plan.SubDAG, plan.FullWorkflow}[rnd.IntN(3)])
		q.Operator = "op"
		asked = append(asked, q)
	}
	return asked
}

// allCompleted wants that all have come to their end, once.
func (r *rig) allCompleted(seed uint64) {
	t := r.t
	t.Helper()
	page, err := r.List(ctx, "", 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range page.Rollbacks {
		if whole, err := r.Get(ctx, b.ID); err != nil || whole.State != rollback.Finished || whole.Status != rollback.Completed {
			t.Errorf("seed %d: %s of %s: %v, %v", seed, b.Scope, b.Checkpoint, err, fmt.Sprintf("%+v", whole))
		}
	}
	for id, keys := range r.world.effects {
		if len(keys) != 1 {
			t.Errorf("seed %d: %s was undone under %v", seed, id, keys)
		}
	}
	if n := r.unexpired(); n > 0 {
		t.Errorf("seed %d: %d records stand for ever", seed, n)
	}
}
