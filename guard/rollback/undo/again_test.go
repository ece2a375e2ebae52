package undo_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// again is the task of another rollback that takes up what the first has left in doubt.
func (r *rig) again(way checkpoint.Way, spec undo.Spec, id string) undo.Task {
	t := task(way, spec)
	t.Again = id
	return t
}

// P1: an answer that says nothing of the effect is tried again by another rollback, and under
// the same key, so that nothing is paid twice.
func TestP1UnexpectedAnswerGoesOnUnderItsKey(t *testing.T) {
	for _, c := range []struct {
		way   checkpoint.Way
		first any
	}{
		{checkpoint.Compensate, 303}, {checkpoint.Compensate, 404}, {checkpoint.Compensate, 418},
		{checkpoint.Delegate, 404}, {checkpoint.Delegate, "<html>"}, {checkpoint.Delegate, `{"status":"partial"}`},
	} {
		t.Run(fmt.Sprint(c.way, " ", c.first), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(c.first)
				if got := r.undo(task(c.way, undo.Spec{})); got.Done || !got.Unknown {
					t.Fatalf("%+v", got)
				}
				second := r.again(c.way, undo.Spec{}, "second")
				got := r.undo(second)
				if got.Done || !got.Unknown || len(r.sent) != 2 {
					t.Errorf("sent %d times: %+v", len(r.sent), got)
				}
				r.restart(-1) // what the second was answered is its own
				if again := r.undo(second); again != got || len(r.sent) != 2 {
					t.Errorf("sent %d times: %+v, want %+v", len(r.sent), again, got)
				}
				r.answers(409)
				// A refusal says nothing of those before it.
				third := r.undo(r.again(c.way, undo.Spec{}, "third"))
				if third.Done || !third.Unknown || third.Reason != undo.ReasonRefused {
					t.Errorf("%+v", third)
				}
				r.answers(503, 204)
				if last := r.undo(r.again(c.way, undo.Spec{}, "fourth")); !last.Done || last.Unknown {
					t.Errorf("%+v", last)
				}
				for _, o := range r.sent {
					if o.Header.Get("Idempotency-Key") != key || o.Rollback != rollbackID {
						t.Errorf("%v for %s", o.Header, o.Rollback)
					}
				}
			})
		})
	}
}

// Where a status can be asked for it is asked before anything is sent again, and what is
// not to be sent twice is not.
func TestP1UnexpectedAnswerIsAskedFor(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(303, 200)
		spec := undo.Spec{Status: status}
		r.undo(task(checkpoint.Compensate, spec))
		r.wants(r.again(checkpoint.Compensate, spec, "second"), undo.Result{Done: true, Status: 200, Attempts: 1})
		if len(r.changing()) != 1 {
			t.Errorf("sent %d times", len(r.changing()))
		}
	})
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(303)
		spec := undo.Spec{OnLost: undo.Escalate}
		r.undo(task(checkpoint.Compensate, spec))
		r.wants(r.again(checkpoint.Compensate, spec, "second"), undo.Result{Unknown: true, Reason: undo.ReasonLost, Status: 303, Attempts: 1})
		if len(r.changing()) != 1 {
			t.Errorf("sent %d times", len(r.changing()))
		}
	})
}

// What stands at the target says more than an answer that says nothing.
func TestP6UnexpectedAnswerToARestore(t *testing.T) {
	for name, c := range map[string]struct {
		applied bool
		want    undo.Result
	}{
		"not applied": {false, undo.Result{Reason: undo.ReasonUnexpected, Status: 418, Attempts: 1}},
		"applied":     {true, undo.Result{Done: true, Status: 418, Attempts: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				u := &resource{tags: true}
				odd := func(*undo.Outgoing) (*undo.Answer, error) { return &undo.Answer{Status: http.StatusTeapot}, nil }
				if c.applied {
					u.after = odd
				} else {
					u.before = odd
				}
				r.answer = u.serve
				got := r.undo(restoring(u, "old", "new", undo.Spec{}))
				got.Before, got.After = [32]byte{}, [32]byte{}
				if got != c.want {
					t.Errorf("got %+v, want %+v", got, c.want)
				}
			})
		})
	}
}
