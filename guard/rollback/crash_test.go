package rollback_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// mixed is a workflow with every kind of step.
func mixed(t *testing.T) *rig {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Compensate, guard.Completed, "1")
	r.made("3", checkpoint.Irreversible, guard.Completed, "1")
	r.made("4", checkpoint.Restore, guard.Released, "1")
	r.made("5", checkpoint.Restore, guard.InDoubt, "2")
	r.made("6", checkpoint.Delegate, guard.Completed, "2")
	r.group("g", "c1", "c2")
	r.world.answers["c6"] = undo.Result{Reason: undo.ReasonRefused, Status: 409}
	return r
}

const mixedEnds = "c6=failed(refused) c5=completed c4=completed(cancelled) c3=escalated(irreversible) c2=completed c1=completed g=completed"

// standing is all that a rollback leaves behind, but for times and ids of tokens.
func (r *rig) leftBehind(q rollback.Request) string {
	r.t.Helper()
	b, err := r.Get(ctx, q.ID)
	if err != nil {
		r.t.Fatal(err)
	}
	said := r.said()
	var told []string
	for words, n := range said {
		told = append(told, fmt.Sprint(n, " ", strings.ReplaceAll(words, q.ID, "")))
	}
	slices.Sort(told)
	var marks []string
	for _, s := range b.Steps {
		m, err := r.vault.Mark(ctx, s.Checkpoint)
		if err != nil {
			r.t.Fatal(err)
		}
		marks = append(marks, s.Checkpoint+" "+m.State.String())
	}
	var effects []string
	for id, keys := range r.world.effects {
		effects = append(effects, fmt.Sprint(id, " ", len(keys)))
	}
	slices.Sort(effects)
	var calls []string
	for _, id := range []string{"1", "2", "3", "4", "5", "6"} {
		c := r.call(id)
		found, err := r.guard.Find(ctx, c.Key, c.Fingerprint)
		if err != nil {
			r.t.Fatal(err)
		}
		calls = append(calls, fmt.Sprint(id, " ", found.Standing))
	}
	unexpired := 0
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("u"))) {
		if err != nil {
			r.t.Fatal(err)
		}
		if entry.Expires.IsZero() {
			unexpired++
		}
	}
	return fmt.Sprint(b.State, b.Status, b.Mixed, b.Unknown, len(b.Escalations), "\n", ends(b), "\n", told, "\n", marks, "\n", effects,
		"\n", calls, "\n", slices.Sorted(maps.Keys(r.escalations())), r.escalations(), "\nwithout expiry: ", unexpired)
}

// through carries a rollback out whatever dies, and returns what it leaves behind.
func (r *rig) through(q rollback.Request) string {
	r.t.Helper()
	if _, err := r.Execute(ctx, q); err != nil && !r.st.gone() {
		r.t.Fatal(err)
	}
	if r.st.dies >= 0 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if !r.st.gone() {
				_, _ = r.Wait(ctx, q.ID)
			}
		}()
		select {
		case <-r.st.dead:
		case <-done:
		}
		stop(r.Coordinator)
		<-done
		r.open()
		r.start()
		if _, err := r.Execute(ctx, q); err != nil { // the client asks again
			r.t.Fatal(err)
		}
	}
	r.wait(q.ID)
	if err := r.Stop(ctx); err != nil { // and what comes after the end
		r.t.Fatal(err)
	}
	return r.leftBehind(q)
}

// P5 and DESIGN, "Checkpoints and rollback": after an end of the process between any two
// commits, whether or not the last one landed, the rollback goes on by itself, and leaves
// behind what an undisturbed one does: no step undone twice, none lost.
func TestP5KilledBetweenAnyTwoCommits(t *testing.T) {
	r := mixed(t)
	r.start()
	r.st.commits = 0
	want := r.through(request("g", plan.SubDAG))
	all := r.st.commits
	b, err := r.List(ctx, "", 1)
	if err != nil || len(b.Rollbacks) != 1 || !strings.Contains(want, mixedEnds) || b.Rollbacks[0].Status != rollback.Partial || all < 20 {
		t.Fatalf("undisturbed, with %d commits: %s, %v", all, want, err)
	}
	for dies := range all {
		for _, lands := range []bool{false, true} {
			t.Run(fmt.Sprint(dies, lands), func(t *testing.T) {
				r := mixed(t)
				r.start()
				r.st.mu.Lock()
				r.st.commits, r.st.dies, r.st.lands = 0, dies, lands
				r.st.mu.Unlock()
				if got := r.through(request("g", plan.SubDAG)); got != want {
					t.Errorf("got\n%s\nwant\n%s", got, want)
				}
			})
		}
	}
}

// The same with several deaths in a row.
func TestP5KilledAgainAndAgain(t *testing.T) {
	r := mixed(t)
	r.start()
	want := r.through(request("g", plan.SubDAG))
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 6))
		r := mixed(t)
		q := request("g", plan.SubDAG)
		for range 6 {
			r.st.mu.Lock()
			r.st.commits, r.st.dies, r.st.lands = 0, rnd.IntN(8), rnd.IntN(2) == 0
			r.st.mu.Unlock()
			if err := r.Start(ctx); err != nil && !r.st.gone() {
				t.Fatal(err)
			}
			if _, err := r.Execute(ctx, q); err == nil {
				select {
				case <-r.st.dead:
				case <-finished(r, q.ID):
				}
			}
			stop(r.Coordinator)
			r.open()
		}
		r.start()
		if got := r.through(q); got != want {
			t.Fatalf("seed %d: got\n%s\nwant\n%s", seed, got, want)
		}
	}
}

func finished(r *rig, id string) <-chan struct{} {
	done := make(chan struct{})
	c := r.Coordinator
	go func() {
		defer close(done)
		_, _ = c.Wait(ctx, id)
	}()
	return done
}

// A stopped coordinator begins nothing, and says so.
func TestStopBeginsNothingNew(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed, "1")
	r.start()
	asked, hold := make(chan string, 10), make(chan struct{})
	r.undoer.asked, r.world.hold["c2"] = asked, hold
	q := request("c1", plan.SubDAG)
	r.execute(q)
	if id := <-asked; id != "c2" {
		t.Errorf("begun with %s", id)
	}
	stopped := make(chan error)
	go func() { stopped <- r.Stop(ctx) }()
	if _, err := r.Wait(ctx, q.ID); !errors.Is(err, rollback.ErrStopping) {
		t.Errorf("waiting: %v", err)
	}
	close(hold)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if _, err := r.Execute(ctx, request("c1", plan.Single)); !errors.Is(err, rollback.ErrStopping) {
		t.Errorf("executing: %v", err)
	}
	b, err := r.Get(ctx, q.ID)
	if err != nil || ends(b) != "c2=completed c1=" {
		t.Errorf("%s, %v", ends(b), err)
	}
	r.open()
	r.start()
	wantEnd(t, r.wait(q.ID), rollback.Completed, "c2=completed c1=completed")
	if len(r.world.order) != 2 {
		t.Errorf("undone %v", r.world.order)
	}
}
