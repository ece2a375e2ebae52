package undo_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// Every answer of MicroProfile LRA's contract has a defined meaning, and what is final is
// sent once, in this life and in the next (C-4.1.2-b, B-normative-g).
func TestCascade412FinalAnswers(t *testing.T) {
	for _, c := range []struct {
		answer  int
		reason  undo.Reason
		unknown bool
	}{
		{200, "", false},
		{201, "", false},
		{204, "", false},
		{410, "", false},
		{409, undo.ReasonRefused, false},
		{401, undo.ReasonUnauthorized, false},
		{403, undo.ReasonUnauthorized, false},
		// Turned away for what the request is: nothing was done.
		{405, undo.ReasonUnexpected, false},
		{411, undo.ReasonUnexpected, false},
		{413, undo.ReasonUnexpected, false},
		{414, undo.ReasonUnexpected, false},
		{415, undo.ReasonUnexpected, false},
		{421, undo.ReasonUnexpected, false},
		{426, undo.ReasonUnexpected, false},
		{431, undo.ReasonUnexpected, false},
		{501, undo.ReasonUnexpected, false},
		// P6: the contract does not know it, and it says nothing of the effect.
		{404, undo.ReasonUnexpected, true},
		{418, undo.ReasonUnexpected, true},
		{400, undo.ReasonUnexpected, true},
		{302, undo.ReasonUnexpected, true},
		{303, undo.ReasonUnexpected, true},
		{422, undo.ReasonUnexpected, true},
		{412, undo.ReasonUnexpected, true},
		{99, undo.ReasonUnexpected, true},
		{999, undo.ReasonUnexpected, true},
		{0, undo.ReasonUnexpected, true},
	} {
		for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
			t.Run(fmt.Sprint(c.answer, " ", way), func(t *testing.T) {
				bubble(t, func(t *testing.T, r *rig) {
					r.answers(c.answer)
					want := undo.Result{Done: c.reason == "", Unknown: c.unknown, Reason: c.reason, Status: c.answer, Attempts: 1}
					r.wants(task(way, undo.Spec{}), want)
					r.restart(-1)
					r.wants(task(way, undo.Spec{}), want)
					if len(r.sent) != 1 {
						t.Errorf("sent %d times", len(r.sent))
					}
				})
			})
		}
	}
}

// The body of a compensation's 2xx need not be one that anybody can read.
func TestCompensationAnswersGarbage(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers("garbage \x00{")
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 1})
	})
}

// What passes is tried again, later each time, under one key.
func TestCompensationIsTriedAgain(t *testing.T) {
	for _, first := range []any{408, 425, 429, 500, 502, 503, 504, errLost, errUnsent} {
		t.Run(fmt.Sprint(first), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(first, first, first, 200)
				began := time.Now()
				want := undo.Result{Done: true, Status: 200, Attempts: 4}
				if first == any(errUnsent) {
					want.Attempts = 1
				}
				r.wants(task(checkpoint.Compensate, undo.Spec{}), want)
				if took := time.Since(began); took != 7*time.Second { // 1 + 2 + 4
					t.Errorf("took %v", took)
				}
				for _, o := range r.sent {
					if o.Header.Get("Idempotency-Key") != key || o.URL != "/refunds" {
						t.Errorf("%s %v", o.URL, o.Header)
					}
				}
				r.restart(-1)
				r.wants(task(checkpoint.Compensate, undo.Spec{}), want)
				if len(r.sent) != 4 {
					t.Errorf("sent %d times", len(r.sent))
				}
			})
		})
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	for _, after := range []string{"90", time.Date(2000, 1, 1, 0, 1, 30, 0, time.UTC).Format(http.TimeFormat)} {
		bubble(t, func(t *testing.T, r *rig) {
			r.answers(later(429, after), 200)
			began := time.Now()
			r.undo(task(checkpoint.Compensate, undo.Spec{}))
			if took := time.Since(began); took != 90*time.Second {
				t.Errorf("%q: took %v", after, took)
			}
		})
	}
}

// ATD, "Rollback Timeout and Escalation": what asks for more time than there is left does not
// end an undo. It is tried until it is due, and nothing is called a timeout before.
func TestLongRetryAfterEndsNothing(t *testing.T) {
	for _, status := range []int{429, 503} {
		bubble(t, func(t *testing.T, r *rig) {
			answers := []any{later(status, "999999"), later(status, "999999"), 200}
			r.answers(answers...)
			began := time.Now()
			r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 3})
			if took := time.Since(began); took != due*3/4 { // half of what is left, twice
				t.Errorf("took %v", took)
			}
		})
		bubble(t, func(t *testing.T, r *rig) {
			r.answers(later(status, "999999"))
			task := task(checkpoint.Compensate, undo.Spec{})
			got := r.undo(task)
			if got.Reason != undo.ReasonTimeout || got.Attempts < 5 || got.Attempts > 20 || !time.Now().Equal(task.Due) {
				t.Errorf("%v before it was due: %+v", time.Until(task.Due), got)
			}
		})
	}
	bubble(t, func(t *testing.T, r *rig) { // what is asked how it stands
		r.answers(accepted("/jobs/1"), later(202, "999999"), later(503, "999999"), 200)
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 1})
	})
}

// P6: what was not done in time says whether it may have had its effect.
func TestP6Timeout(t *testing.T) {
	for _, c := range []struct {
		answers []any
		reason  undo.Reason
		unknown bool
		status  int
	}{
		{[]any{429}, undo.ReasonTimeout, false, 429},
		{[]any{425}, undo.ReasonTimeout, false, 425},
		{[]any{errUnsent}, undo.ReasonUnreachable, false, 0},
		{[]any{429, errUnsent}, undo.ReasonUnreachable, false, 429},
		{[]any{500}, undo.ReasonTimeout, true, 500},
		{[]any{408}, undo.ReasonTimeout, true, 408},
		{[]any{errLost}, undo.ReasonTimeout, true, 0},
		{[]any{errLost, errUnsent}, undo.ReasonTimeout, true, 0},
		{[]any{errLost, 429}, undo.ReasonTimeout, true, 429},
		{[]any{202}, undo.ReasonTimeout, true, 202},
		{[]any{accepted("/jobs/1"), 202}, undo.ReasonTimeout, true, 202},
		// A refusal says nothing of an earlier attempt.
		{[]any{errLost, 401}, undo.ReasonUnauthorized, true, 401},
		{[]any{503, 404}, undo.ReasonUnexpected, true, 404},
		{[]any{503, 409}, undo.ReasonRefused, true, 409},
		{[]any{429, 409}, undo.ReasonRefused, false, 409},
	} {
		t.Run(fmt.Sprint(c.answers...), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(c.answers...)
				task := task(checkpoint.Compensate, undo.Spec{})
				check := func(got undo.Result) {
					t.Helper()
					got.Attempts = 0
					if want := (undo.Result{Reason: c.reason, Unknown: c.unknown, Status: c.status}); got != want {
						t.Errorf("got %+v, want %+v", got, want)
					}
				}
				check(r.undo(task))
				if time.Now().After(task.Due) {
					t.Errorf("it took %v too long", time.Since(task.Due))
				}
				n := len(r.changing())
				r.pass(time.Until(task.Due)) // and nothing is sent after it
				r.restart(-1)
				if got := r.undo(task); got.Done || got.Unknown != c.unknown {
					t.Errorf("afterwards: %+v", got)
				}
				if len(r.changing()) != n {
					t.Errorf("sent after the due time")
				}
			})
		})
	}
}

// A template that needs what nobody knows is no request; one that does not is sent for a
// call that is itself in doubt.
func TestCompensationOfACallInDoubt(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(200)
		doubtful := task(checkpoint.Compensate, undo.Spec{})
		doubtful.Checkpoint.Result = nil
		r.wants(doubtful, undo.Result{Unknown: true, Reason: undo.ReasonUnfilled})
		if !undo.Lacks(doubtful.Checkpoint) || undo.Lacks(task(checkpoint.Compensate, undo.Spec{}).Checkpoint) {
			t.Error("it cannot be told before")
		}
		if len(r.sent) > 0 {
			t.Error("sent all the same")
		}
		enough := task(checkpoint.Compensate, undo.Spec{Compensate: &template.Spec{Method: "DELETE", URL: "/orders/{execution.id}"}})
		enough.Checkpoint.Result = nil
		if undo.Lacks(enough.Checkpoint) {
			t.Error("it lacks nothing")
		}
		r.wants(enough, undo.Result{Done: true, Status: 200, Attempts: 1})
	})
}

// What cannot be undone is told, and nothing is sent (C-4.2.1-g).
func TestIrreversible(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		declared := task(checkpoint.Irreversible, undo.Spec{})
		late := task(checkpoint.Compensate, undo.Spec{})
		late.Checkpoint.Result.Reason = checkpoint.ReasonTooLarge
		declared.Checkpoint.Snapshot.Reason = checkpoint.ReasonDeclared
		r.wants(declared, undo.Result{Reason: undo.ReasonIrreversible, Cause: checkpoint.ReasonDeclared})
		r.wants(late, undo.Result{Reason: undo.ReasonIrreversible, Cause: checkpoint.ReasonTooLarge})
		for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
			unreadable := task(way, undo.Spec{})
			unreadable.Checkpoint.Snapshot.Undo = []byte(`{"guard":"default","later":1}`)
			r.wants(unreadable, undo.Result{Reason: undo.ReasonUnfilled})
			unreadable.Checkpoint.Snapshot.Undo = []byte(`{"guard":"default"}`)
			r.wants(unreadable, undo.Result{Reason: undo.ReasonUnfilled})
		}
	})
}

// What the configuration does not lead to any more is not tried again, and sent by the
// next life if it does then.
func TestSenderKnowsNoWay(t *testing.T) {
	for _, why := range []undo.Reason{undo.ReasonNoUpstream, undo.ReasonNoCredentials} {
		for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(&undo.SendError{Reason: why, Err: errLost}, 200)
				r.wants(task(way, undo.Spec{}), undo.Result{Reason: why})
				r.wants(task(way, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 1})
			})
		}
	}
}

// An operator's word about a doubt counts.
func TestOperatorSettlesTheDoubt(t *testing.T) {
	for _, c := range []struct {
		doubt   any
		applied bool
		answer  *guard.Head
		want    undo.Result
	}{
		{500, true, nil, undo.Result{Done: true, Status: 500, Attempts: 1}},
		{202, true, nil, undo.Result{Done: true, Status: 202, Attempts: 1}},
		{errLost, true, nil, undo.Result{Done: true, Attempts: 1}},
		{500, true, &guard.Head{Status: 201}, undo.Result{Done: true, Status: 201, Attempts: 1}},
		{500, true, &guard.Head{Status: 409}, undo.Result{Reason: undo.ReasonRefused, Status: 409, Attempts: 1}},
		{500, false, nil, undo.Result{Done: true, Status: 200, Attempts: 1}},
	} {
		bubble(t, func(t *testing.T, r *rig) {
			r.answers(c.doubt)
			task := task(checkpoint.Compensate, undo.Spec{OnLost: undo.Escalate})
			r.undo(task)
			ctx := context.Background()
			page, err := r.guard.List(ctx, guard.Filter{States: []guard.State{guard.StateInDoubt}}, "", 10)
			if err != nil {
				t.Fatal(err)
			}
			all := page.Executions
			if len(all) != 1 || all[0].Record.Action != "undo" || all[0].Record.Workflow != "w-1" {
				t.Fatalf("%+v", all)
			}
			word := guard.Resolution{Applied: c.applied, Operator: "ada", Reason: "asked them"}
			if err := r.guard.Resolve(ctx, all[0], word, c.answer, nil); err != nil {
				t.Fatal(err)
			}
			r.answers(200)
			r.wants(task, c.want)
		})
	}
}

func TestTaskMustBeWhole(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		for _, task := range []undo.Task{{}, {Rollback: "a/b"}, {Rollback: "a"}, {Rollback: "a", Checkpoint: new(checkpoint.Checkpoint)}} {
			if _, err := r.Undo(context.Background(), task); !errors.Is(err, undo.ErrTask) {
				t.Errorf("%v", err)
			}
		}
	})
}

// A pause before the next try does not hold up the end of the process, and nothing is sent
// after it. The next life goes on under the same key.
func TestQuitEndsAPause(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(later(503, "3600"), 200)
		quit := make(chan struct{})
		first := task(checkpoint.Compensate, undo.Spec{})
		first.Due, first.Quit = time.Now().Add(12*time.Hour), quit
		time.AfterFunc(time.Minute, func() { close(quit) })
		began := time.Now()
		if _, err := r.Undo(context.Background(), first); !errors.Is(err, undo.ErrQuit) || time.Since(began) != time.Minute {
			t.Fatalf("after %v: %v", time.Since(began), err)
		}
		if len(r.sent) != 1 {
			t.Errorf("sent %d times", len(r.sent))
		}
		r.restart(-1)
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 2})
		if a, b := r.sent[0].Header.Get("Idempotency-Key"), r.sent[1].Header.Get("Idempotency-Key"); len(r.sent) != 2 || a != b {
			t.Errorf("%d requests, with the keys %q and %q", len(r.sent), a, b)
		}
	})
}
