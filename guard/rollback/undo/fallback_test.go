package undo_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// full is a store that has no room for anything large.
type full struct{ store.Store }

func (f full) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	for _, w := range batch {
		if w.Bulk {
			return 0, store.ErrFull
		}
	}
	return f.Store.Commit(ctx, batch...)
}

// choked is a store that takes nothing while it is full.
type choked struct {
	store.Store
	full *bool
}

func (c choked) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if *c.full {
		return 0, store.ErrFull
	}
	return c.Store.Commit(ctx, batch...)
}

// P1, P6: an answer that the store does not take is kept while the process lives, and
// recorded before anything is sent again.
func TestP6AnswerOutlivesAFullStore(t *testing.T) {
	for _, answer := range []any{200, 409, 404} {
		for _, spec := range []undo.Spec{{}, {OnLost: undo.Escalate}, {Status: status}} {
			for _, late := range []bool{false, true} {
				bubble(t, func(t *testing.T, r *rig) {
					full := false
					g, _, err := guard.Open(context.Background(), choked{r.mem, &full}, r.ring)
					if err != nil {
						t.Fatal(err)
					}
					u := undo.New(undo.Options{Guard: g, Vault: r.vault, Sender: r})
					r.answers(answer)
					say := r.answer
					r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
						full = true
						return say(o)
					}
					task := task(checkpoint.Compensate, spec)
					for range 3 {
						if got, err := u.Undo(context.Background(), task); err == nil {
							t.Fatalf("not recorded, and told: %+v", got)
						}
					}
					want := undo.Result{Done: answer == 200, Unknown: answer == 404, Status: answer.(int), Attempts: 1}
					switch answer {
					case 409:
						want.Reason = undo.ReasonRefused
					case 404:
						want.Reason = undo.ReasonUnexpected
					}
					if late { // the rollback records it
						r.pass(time.Until(task.Due))
					} else {
						full = false
					}
					if got, err := u.Undo(context.Background(), task); err != nil || got != want {
						t.Errorf("%v %+v: %+v, %v", answer, spec, got, err)
					}
					if len(r.sent) != 1 {
						t.Errorf("%d requests", len(r.sent))
					}
					if !late { // and it stands in the next life
						r.restart(-1)
						r.wants(task, want)
					}
				})
			}
		}
	}
}

// P6: a store that had no room for where to ask does not make it done.
func TestP6LocationIsLost(t *testing.T) {
	long := "/jobs/" + strings.Repeat("x", 2000)
	for _, c := range []struct {
		spec undo.Spec
		want undo.Result
	}{
		{undo.Spec{}, undo.Result{Unknown: true, Reason: undo.ReasonLost, Status: 202, Attempts: 1}},
		{undo.Spec{Status: status}, undo.Result{Done: true, Status: 200, Attempts: 1}},
	} {
		bubble(t, func(t *testing.T, r *rig) {
			g, _, err := guard.Open(context.Background(), full{r.mem}, r.ring)
			if err != nil {
				t.Fatal(err)
			}
			o := undo.Options{Guard: g, Vault: r.vault, Sender: r}
			r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
				if o.URL == long {
					r.die() // before it tells
					return nil, errLost
				}
				if o.Method == http.MethodGet {
					return &undo.Answer{Status: 200}, nil
				}
				return accepted(long), nil
			}
			if _, err := undo.New(o).Undo(r.life, task(checkpoint.Compensate, c.spec)); err == nil {
				t.Fatal("it lived on")
			}
			if got, err := undo.New(o).Undo(context.Background(), task(checkpoint.Compensate, c.spec)); err != nil || got != c.want {
				t.Errorf("%+v, %v", got, err)
			}
			if len(r.changing()) != 1 {
				t.Errorf("sent %d times", len(r.changing()))
			}
		})
	}
	bubble(t, func(t *testing.T, r *rig) { // where there is room it is asked there
		r.answers(accepted(long), 200)
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 1})
		r.restart(-1)
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 1})
		if r.sent[2].URL != long {
			t.Errorf("asked %+v", r.sent[2])
		}
	})
}

// The answer is kept for as long as the rollback may ask for it.
func TestAnswerIsKept(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(200)
		task := task(checkpoint.Compensate, undo.Spec{})
		task.Due = time.Now().Add(100 * 24 * time.Hour)
		r.wantsDone(task)
		r.pass(129 * 24 * time.Hour)
		r.wantsDone(task)
		if len(r.sent) != 1 {
			t.Errorf("sent %d times", len(r.sent))
		}
	})
}

// The status of a delegate is asked with the gateway's token, where it is its own.
func TestStatusOfADelegate(t *testing.T) {
	for url, token := range map[string]bool{"https://agent.example/status": true, "https://other.example/status": false, "/status": false} {
		bubble(t, func(t *testing.T, r *rig) {
			asks := *status
			asks.URL = url
			r.answers(errLost, 200)
			r.wantsDone(task(checkpoint.Delegate, undo.Spec{Status: &asks}))
			if r.sent[1].URL != url || r.sent[1].Delegated != token {
				t.Errorf("%+v", r.sent[1])
			}
		})
	}
	// One that cannot be made is none.
	bubble(t, func(t *testing.T, r *rig) {
		asks := *status
		asks.URL = "/refunds/{response.json./refund}"
		r.answers(errLost, 200)
		r.wants(task(checkpoint.Compensate, undo.Spec{Status: &asks}), undo.Result{Done: true, Status: 200, Attempts: 2})
		if r.asked() > 0 {
			t.Error("asked")
		}
	})
}
