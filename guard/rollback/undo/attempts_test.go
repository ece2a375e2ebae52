package undo_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// attempt is the task that undoes a call by what is known of its nth attempt.
func attempt(n int, way checkpoint.Way, spec undo.Spec) undo.Task {
	t := task(way, spec)
	if n > 1 {
		s := t.Checkpoint.Snapshot
		s.ID, s.First = fmt.Sprint("ckpt-", n), checkpointID
		t.Checkpoint.Result.Answer.Body = fmt.Appendf(nil, `{"id":"ch_%d"}`, n)
	}
	return t
}

// P1: the attempts of a call are undone under one key, whichever of them is known at the
// time, and what was begun by what is known of one goes on by another.
func TestP1AttemptsAreUndoneUnderOneKey(t *testing.T) {
	named := undo.Spec{Compensate: &template.Spec{Method: "POST", URL: "/refunds?for={checkpoint.id}", ContentType: "application/json", Body: `{{"a":1}}`}}
	for way, spec := range map[checkpoint.Way]undo.Spec{checkpoint.Compensate: named, checkpoint.Delegate: {}} {
		for _, order := range [][2]int{{1, 2}, {2, 1}, {3, 2}} {
			for _, crashed := range []bool{false, true} {
				bubble(t, func(t *testing.T, r *rig) {
					r.answers(303)
					if crashed {
						r.answer = func(*undo.Outgoing) (*undo.Answer, error) { r.die(); return nil, errLost }
					}
					first := attempt(order[0], way, spec)
					if got, err := r.Undo(r.life, first); err == nil && (got.Done || !got.Unknown) {
						t.Fatalf("%+v", got)
					}
					r.restart(-1)
					r.answers(200)
					second := attempt(order[1], way, spec)
					if !crashed {
						second.Again = "second"
					}
					if got := r.undo(second); !got.Done {
						t.Errorf("%v: %+v", order, got)
					}
					if len(r.sent) != 2 {
						t.Fatalf("sent %d times", len(r.sent))
					}
					for _, o := range r.sent {
						if o.Header.Get("Idempotency-Key") != key || o.Checkpoint != checkpointID || !bytes.Equal(o.Body, r.sent[0].Body) || o.URL != r.sent[0].URL {
							t.Errorf("%v: %+v", order, o)
						}
					}
				})
			}
		}
	}
}

// Who looks at a rollback finds its undo by the checkpoint that it names.
func TestOutgoingNamesItsStep(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(200)
		task := attempt(3, checkpoint.Compensate, undo.Spec{})
		task.Step = "ckpt-2"
		r.undo(task)
		if o := r.sent[0]; o.Step != "ckpt-2" || o.Checkpoint != checkpointID {
			t.Errorf("%+v", o)
		}
	})
}

// P6: a key that was forgotten says nothing of what was sent under it. One that an operator
// has freed does.
func TestP6ForgottenDoubt(t *testing.T) {
	for name, c := range map[string]struct {
		forgotten, settled bool
		answer             any
		spec               undo.Spec
		want               undo.Result
	}{
		"refused":    {true, false, 409, undo.Spec{}, undo.Result{Unknown: true, Reason: undo.ReasonRefused, Status: 409, Attempts: 2}},
		"done":       {true, false, 200, undo.Spec{}, undo.Result{Done: true, Status: 200, Attempts: 2}},
		"not sent":   {true, false, 200, undo.Spec{OnLost: undo.Escalate}, undo.Result{Unknown: true, Reason: undo.ReasonLost, Attempts: 1}},
		"remembered": {false, false, 409, undo.Spec{}, undo.Result{Reason: undo.ReasonRefused, Status: 409, Attempts: 1}},
		"settled":    {true, true, 409, undo.Spec{}, undo.Result{Reason: undo.ReasonRefused, Status: 409, Attempts: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				if c.settled {
					r.answers(500)
					r.undo(task(checkpoint.Compensate, undo.Spec{OnLost: undo.Escalate}))
					page, err := r.guard.List(context.Background(), guard.Filter{States: []guard.State{guard.StateInDoubt}}, "", 10)
					if err != nil || len(page.Executions) != 1 {
						t.Fatal(page, err)
					}
					word := guard.Resolution{Operator: "ada", Reason: "asked them"}
					if err := r.guard.Resolve(context.Background(), page.Executions[0], word, nil, nil); err != nil {
						t.Fatal(err)
					}
				}
				r.answers(c.answer)
				task := r.again(checkpoint.Compensate, c.spec, "second")
				task.Forgotten = c.forgotten
				r.wants(task, c.want)
			})
		})
	}
}

// untold is a store that does not tell what became of a commit.
type untold struct {
	store.Store
	mute *bool
}

func (u untold) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	version, err := u.Store.Commit(ctx, batch...)
	if *u.mute {
		return 0, store.ErrUnknown
	}
	return version, err
}

// An answer that the store has taken is not kept beside it, also where only that was not told.
func TestUntoldAnswerIsNotKept(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		mute := false
		g, _, err := guard.Open(context.Background(), untold{r.mem, &mute}, r.ring)
		if err != nil {
			t.Fatal(err)
		}
		u := undo.New(undo.Options{Guard: g, Vault: r.vault, Sender: r})
		r.answer = func(*undo.Outgoing) (*undo.Answer, error) {
			mute = true
			return &undo.Answer{Status: 200}, nil
		}
		task := task(checkpoint.Compensate, undo.Spec{})
		if _, err := u.Undo(context.Background(), task); err == nil || u.Unkept() != 1 {
			t.Fatalf("%v, with %d kept", err, u.Unkept())
		}
		mute = false
		r.pass(time.Minute)
		if got, err := u.Undo(context.Background(), task); err != nil || !got.Done || u.Unkept() != 0 {
			t.Errorf("%+v, %v, with %d kept", got, err, u.Unkept())
		}
	})
}
