package rollback_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// participant takes compensations, idempotent by their key, and can be asked.
type participant struct {
	calls   int
	effects map[string]int // by key
}

func (p *participant) serve(o *rollback.Outgoing) (*rollback.Answer, error) {
	if p.effects == nil {
		p.effects = map[string]int{}
	}
	if o.Method == http.MethodGet {
		if len(p.effects) == 0 {
			return &rollback.Answer{Status: 404}, nil
		}
		return &rollback.Answer{Status: 200}, nil
	}
	p.calls++
	p.effects[o.Header.Get("Idempotency-Key")]++
	return &rollback.Answer{Status: 200}, nil
}

// lives runs the task in lives that die after so many steps each, and then in one that
// does not.
func (r *undoRig) lives(t rollback.Task, steps ...int) rollback.Result {
	r.t.Helper()
	r.crashes = 0
	for _, n := range steps {
		r.restart(n)
		got, err := r.Undo(r.life, t)
		if err == nil && !r.died() {
			return got
		}
		if !r.died() {
			r.t.Fatal(err)
		}
		r.crashes++
	}
	r.restart(-1)
	return r.undo(t)
}

// A life can end between any two steps: before and after each commit, before and after
// the upstream has the request. The next goes on: what was answered is not sent again,
// and what may have been sent is not, either, but by the contract.
func TestCrashBetweenAnyTwoSteps(t *testing.T) {
	for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
		for name, spec := range map[string]rollback.Spec{
			"resend": {}, "escalate": {OnLost: rollback.UndoEscalate}, "status": {Status: status}, "status or escalate": {Status: status, OnLost: rollback.UndoEscalate},
		} {
			crashes := 0
			for n := range 12 {
				t.Run(fmt.Sprint(way, name, n), func(t *testing.T) {
					bubble(t, func(t *testing.T, r *undoRig) {
						p := new(participant)
						r.answer = p.serve
						got := r.lives(task(way, spec), n)
						crashes += r.crashes
						switch {
						case got.Done && len(p.effects) == 1 && p.effects[key] == p.calls:
						case spec.OnLost == rollback.UndoEscalate && got.Unknown && got.Reason == rollback.ReasonLost:
						default:
							t.Errorf("%+v after %v", got, p.effects)
						}
						if most := 2; p.calls > most || spec.OnLost == rollback.UndoEscalate && p.calls > 1 || spec.Status != nil && p.calls > 1 {
							t.Errorf("called %d times", p.calls)
						}
					})
				})
			}
			if crashes < 6 { // two commits and one request, of two steps each
				t.Errorf("only %d lives ended early", crashes)
			}
		}
	}
}

func TestCrashOfARestore(t *testing.T) {
	for _, c := range [][2]undoState{{"old", "new"}, {"old", nothing}, {nothing, "new"}} {
		for _, tags := range []bool{true, false} {
			for n := range 400 {
				bubble(t, func(t *testing.T, r *undoRig) {
					u := &resource{tags: tags}
					r.answer = u.serve
					got := r.lives(restoring(u, c[0], c[1], rollback.Spec{Verify: true}), n%20, n/20)
					if !got.Done || u.state() != c[0] || u.writes != 1 || got.After != c[0].hash() || got.Before != c[1].hash() {
						t.Errorf("%v, %d, %d: %+v, %q after %d writes", c, n%20, n/20, got, u.state(), u.writes)
					}
				})
			}
		}
	}
}

// 202 is answered, and then the process dies: the next asks, and sends nothing.
func TestCrashWhileItIsUnderWay(t *testing.T) {
	for n := range 16 {
		bubble(t, func(t *testing.T, r *undoRig) {
			calls := 0
			r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
				if o.Method != http.MethodGet {
					calls++
					return accepted("/jobs/1"), nil
				}
				return &rollback.Answer{Status: 200}, nil
			}
			got := r.lives(task(checkpoint.Compensate, rollback.Spec{}), n)
			if !got.Done || calls > 2 || calls == 2 && n > 6 {
				t.Errorf("%d: %+v, called %d times", n, got, calls)
			}
		})
	}
}

// Whatever is answered, and whenever the process dies: the result is defined, and says no
// more than what is known (P6); all that is sent bears one key (P1).
func TestP6RandomHistories(t *testing.T) {
	for seed := range uint64(1500) {
		bubble(t, func(t *testing.T, r *undoRig) { randomHistory(t, r, rand.New(rand.NewPCG(seed, 7))) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func randomHistory(t *testing.T, r *undoRig, rnd *rand.Rand) {
	way := []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate}[rnd.IntN(2)]
	spec := rollback.Spec{OnLost: []string{rollback.Resend, rollback.UndoEscalate}[rnd.IntN(2)]}
	asks := rnd.IntN(2) == 0
	if asks {
		spec.Status = status
	}
	took := 0 // attempts that may have had their effect
	effect, failed, finished := false, false, false
	r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
		if rnd.IntN(3) == 0 {
			return nil, errUnsent
		}
		if o.Method == http.MethodGet {
			switch {
			case rnd.IntN(3) == 0:
				return nil, errLost
			case effect:
				return &rollback.Answer{Status: []int{200, 410}[rnd.IntN(2)]}, nil
			case failed:
				return &rollback.Answer{Status: 409}, nil
			}
			return &rollback.Answer{Status: 404}, nil
		}
		if o.Header.Get("Idempotency-Key") != key {
			t.Errorf("key %q", o.Header.Get("Idempotency-Key"))
		}
		if finished {
			t.Error("sent after a final answer was recorded")
		}
		switch rnd.IntN(8) {
		case 0:
			return &rollback.Answer{Status: 429}, nil
		case 1:
			took++
			return nil, errLost // before it arrived
		case 2:
			took, effect = took+1, !failed
			return nil, errLost
		case 3:
			took, effect = took+1, !failed
			return &rollback.Answer{Status: 503}, nil
		case 4:
			if !effect {
				failed = true
				return &rollback.Answer{Status: 409}, nil
			}
		case 5:
			if !effect {
				return &rollback.Answer{Status: []int{401, 404, 418}[rnd.IntN(3)]}, nil
			}
		}
		if failed {
			return &rollback.Answer{Status: 409}, nil
		}
		took, effect = took+1, true
		return &rollback.Answer{Status: 200}, nil
	}
	task := task(way, spec)
	for range 6 {
		r.restart([]int{-1, rnd.IntN(12)}[rnd.IntN(2)])
		got, err := r.Undo(r.life, task)
		if r.died() {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case got.Done && (got.Unknown || got.Reason != "" || !effect):
			t.Errorf("%+v, with the effect: %v", got, effect)
		case !got.Done && got.Reason == "":
			t.Errorf("%+v", got)
		case !got.Done && !got.Unknown && effect:
			t.Errorf("%+v, and it had its effect", got)
		}
		if spec.OnLost == rollback.UndoEscalate && took > 1 {
			t.Errorf("%d attempts in doubt", took)
		}
		key := r.guard.Key(execution.Scope{Caller: "agent_guard undo", Guard: "default", Method: "(undo)", Path: "/", ID: key})
		if found, err := r.guard.LookUp(context.Background(), key, body.Fingerprint{}); err == nil && found.Status == execution.Replayable {
			finished = true
		}
	}
}

// Two at once: one sends, the other waits for what came of it.
func TestTwoAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		p := new(participant)
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			r.pass(time.Second)
			return p.serve(o)
		}
		results := make(chan rollback.Result)
		for range 5 {
			go func() { results <- r.undo(task(checkpoint.Compensate, rollback.Spec{})) }()
		}
		for range 5 {
			if got := <-results; !got.Done || got.Attempts != 1 {
				t.Errorf("%+v", got)
			}
		}
		if p.calls != 1 {
			t.Errorf("called %d times", p.calls)
		}
	})
}

// One that runs longer than the other has time.
func TestTwoAtOnceAndOneIsLate(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		p := new(participant)
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			r.pass(10 * time.Second)
			return p.serve(o)
		}
		over := make(chan rollback.Result)
		go func() { over <- r.undo(task(checkpoint.Compensate, rollback.Spec{})) }()
		r.pass(time.Second)
		late := task(checkpoint.Compensate, rollback.Spec{})
		late.Due = time.Now().Add(time.Second)
		r.wants(late, rollback.Result{Unknown: true, Reason: rollback.ReasonTimeout, Attempts: 1})
		if got := <-over; !got.Done {
			t.Errorf("%+v", got)
		}
	})
}

// The store is down or ctx ends: that is an error, and the same task goes on later.
func TestErrorsSayNothingOfTheUndo(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		p := new(participant)
		r.answer = p.serve
		r.mu.Lock()
		r.steps = 0 // P4: nothing is sent without a claim
		r.mu.Unlock()
		if _, err := r.Undo(context.Background(), task(checkpoint.Compensate, rollback.Spec{})); !errors.Is(err, execution.ErrStore) || p.calls > 0 {
			t.Errorf("%v, called %d times", err, p.calls)
		}
		r.restart(-1)
		r.guard.Drain(context.Background())
		if _, err := r.Undo(context.Background(), task(checkpoint.Compensate, rollback.Spec{})); !errors.Is(err, execution.ErrDraining) {
			t.Errorf("%v", err)
		}
		r.restart(-1)
		ctx, cancel := context.WithCancel(context.Background())
		r.answer = func(o *rollback.Outgoing) (*rollback.Answer, error) {
			cancel()
			_, _ = p.serve(o)
			return nil, ctx.Err()
		}
		if _, err := r.Undo(ctx, task(checkpoint.Compensate, rollback.Spec{})); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		r.answer = p.serve
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 2})
	})
	for _, answer := range []any{503, errUnsent, accepted("/jobs/1")} { // while it waits
		bubble(t, func(t *testing.T, r *undoRig) {
			n := 0
			r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
				if n++; n > 1 && answer != any(errUnsent) {
					return nil, errLost
				}
				if status, ok := answer.(int); ok {
					return &rollback.Answer{Status: status}, nil
				}
				if a, ok := answer.(*rollback.Answer); ok {
					return a, nil
				}
				return nil, errUnsent
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
			defer cancel()
			if _, err := r.Undo(ctx, task(checkpoint.Compensate, rollback.Spec{})); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v: %v", answer, err)
			}
			n = 0
			u := new(resource)
			ctx, cancel = context.WithTimeout(context.Background(), 10*time.Minute)
			defer cancel()
			if _, err := r.Undo(ctx, restoring(u, "old", "new", rollback.Spec{})); answer == any(errUnsent) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v: %v", answer, err)
			}
		})
	}
}

// An answer that came while everything ends is recorded all the same (P7).
func TestP7AnswerIsRecordedWhenCtxEnds(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
			r.die()
			return &rollback.Answer{Status: 200}, nil
		}
		want := rollback.Result{Done: true, Status: 200, Attempts: 1}
		if got, err := r.Undo(r.life, task(checkpoint.Compensate, rollback.Spec{})); err != nil || got != want {
			t.Errorf("%+v, %v", got, err)
		}
		r.restart(-1)
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), want)
		if len(r.sent) != 1 {
			t.Errorf("sent %d times", len(r.sent))
		}
	})
}

// A sender that panics leaves a doubt, and no execution that runs for ever.
func TestSenderPanics(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) { panic("a fault of ours") }
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was lost")
				}
			}()
			r.undo(task(checkpoint.Compensate, rollback.Spec{}))
		}()
		r.answers(200)
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 2})
	})
}

// A request that takes too long is cut off, and in doubt.
func TestRequestTimeout(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.options.Timeout = 5 * time.Second
		r.restart(-1)
		n := 0
		r.Undoer = rollback.NewUndoer(rollback.UndoerOptions{Guard: r.guard, Checkpoints: r.checkpoints, Timeout: 5 * time.Second, Sender: senderFunc(
			func(ctx context.Context, _ *rollback.Outgoing) (*rollback.Answer, error) {
				if n++; n == 1 {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return &rollback.Answer{Status: 200}, nil
			})})
		began := time.Now()
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Done: true, Status: 200, Attempts: 2})
		if took := time.Since(began); took != 6*time.Second {
			t.Errorf("took %v", took)
		}
	})
}

type senderFunc func(context.Context, *rollback.Outgoing) (*rollback.Answer, error)

func (f senderFunc) Send(ctx context.Context, o *rollback.Outgoing) (*rollback.Answer, error) {
	return f(ctx, o)
}

// A lost answer is asked for where there is somebody to ask: the compensation itself is
// sent once.
func TestLostAnswerIsAskedFor(t *testing.T) {
	for _, c := range []struct {
		answers []any
		want    rollback.Result
		sent    int
	}{
		{[]any{errLost, 200}, rollback.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{500, 410}, rollback.Result{Done: true, Status: 410, Attempts: 1}, 1},
		{[]any{errLost, errLost, errUnsent, 503, 429, 202, 202, 204}, rollback.Result{Done: true, Status: 204, Attempts: 1}, 1},
		{[]any{errLost, 409}, rollback.Result{Reason: rollback.ReasonRefused, Status: 409, Attempts: 1}, 1},
		{[]any{errLost, "FailedToCompensate"}, rollback.Result{Reason: rollback.ReasonRefused, Status: 200, Attempts: 1}, 1},
		// P6: an upstream that knows the refund need not have made it.
		{[]any{`{"id": "re_1", "status": "failed"}`}, rollback.Result{Reason: rollback.ReasonRefused, Status: 200, Attempts: 1}, 1},
		{[]any{`{"id": "order", "status": "canceled"}`}, rollback.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, `{"status": "pending"}`, `{"status": "succeeded"}`}, rollback.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, `{"status": "failed"}`}, rollback.Result{Reason: rollback.ReasonRefused, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, `{"status":"Compensating"}`, `"Compensated"`}, rollback.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, 403}, rollback.Result{Unknown: true, Reason: rollback.ReasonUnauthorized, Attempts: 1}, 1},
		{[]any{errLost, 418}, rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Attempts: 1}, 1},
		// Nothing has arrived: sent again.
		{[]any{errLost, 404, 200}, rollback.Result{Done: true, Status: 200, Attempts: 2}, 2},
		{[]any{errLost, "Active", 200}, rollback.Result{Done: true, Status: 200, Attempts: 2}, 2},
		// 202 without a Location: the status is asked for.
		{[]any{202, 202, 200}, rollback.Result{Done: true, Status: 200, Attempts: 1}, 1},
	} {
		t.Run(fmt.Sprint(c.answers...), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(c.answers...)
				r.wants(task(checkpoint.Compensate, rollback.Spec{Status: status}), c.want)
				if len(r.changing()) != c.sent {
					t.Errorf("sent %d times", len(r.changing()))
				}
				for _, o := range r.sent {
					if o.Method == http.MethodGet && (o.URL != "/refunds/"+rollbackID || o.Host != "api.example") {
						t.Errorf("asked %+v", o)
					}
				}
			})
		})
	}
	bubble(t, func(t *testing.T, r *undoRig) { // the status says it later, in another life
		r.answers(errLost, 500)
		task := task(checkpoint.Compensate, rollback.Spec{Status: status, OnLost: rollback.UndoEscalate})
		r.wants(task, rollback.Result{Unknown: true, Reason: rollback.ReasonTimeout, Attempts: 1})
		r.restart(-1)
		r.answers(200)
		r.wants(task, rollback.Result{Done: true, Status: 200, Attempts: 1})
		r.restart(-1)
		asked := r.asked()
		r.wants(task, rollback.Result{Done: true, Status: 200, Attempts: 1})
		if len(r.changing()) != 1 || r.asked() != asked {
			t.Errorf("sent %d times, asked %d times more", len(r.changing()), r.asked()-asked)
		}
	})
}

// With on_lost escalate nothing that is in doubt is sent again.
func TestOnLostEscalate(t *testing.T) {
	for _, answer := range []any{errLost, 500, 408, 202} {
		for _, spec := range []rollback.Spec{{OnLost: rollback.UndoEscalate}, {OnLost: rollback.UndoEscalate, Status: status}} {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(answer, 404)
				for range 2 {
					got := r.undo(task(checkpoint.Compensate, spec))
					if got.Done || !got.Unknown || got.Reason != rollback.ReasonLost || got.Attempts != 1 || len(r.changing()) != 1 {
						t.Errorf("%v: %+v", answer, got)
					}
					r.restart(-1)
				}
			})
		}
	}
	bubble(t, func(t *testing.T, r *undoRig) { // what was not executed is sent again
		r.answers(429, errUnsent, 200)
		r.wants(task(checkpoint.Compensate, rollback.Spec{OnLost: rollback.UndoEscalate}), rollback.Result{Done: true, Status: 200, Attempts: 2})
	})
}

// 202: called once, then asked for where its Location leads, if that is the same origin.
func TestAccepted(t *testing.T) {
	for _, c := range []struct {
		way      checkpoint.Way
		location string
		asked    string
	}{
		{checkpoint.Compensate, "/jobs/1?x=2", "/jobs/1?x=2"},
		{checkpoint.Compensate, "jobs/1", "/jobs/1"},
		{checkpoint.Compensate, "http://api.example/jobs/1#f", "/jobs/1"},
		{checkpoint.Compensate, "//API.example/jobs/1", "/jobs/1"},
		{checkpoint.Compensate, "http://evil.example/jobs/1", ""},
		{checkpoint.Compensate, "//evil.example/jobs/1", ""},
		{checkpoint.Compensate, "ftp://api.example/jobs/1", ""},
		{checkpoint.Compensate, "http://user@api.example/jobs/1", ""},
		{checkpoint.Compensate, "mailto:jobs", ""},
		{checkpoint.Compensate, "/jobs/\x01", ""},
		{checkpoint.Delegate, "/jobs/1", "https://agent.example/jobs/1"},
		{checkpoint.Delegate, "https://agent.example/jobs/1", "https://agent.example/jobs/1"},
		{checkpoint.Delegate, "http://agent.example/jobs/1", ""},
		{checkpoint.Delegate, "https://agent.example:8443/jobs/1", ""},
	} {
		t.Run(c.way.String()+" "+c.location, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(accepted(c.location), 202, 500, errLost, later(202, "100"), 200)
				began := time.Now()
				want := rollback.Result{Done: true, Status: 200, Attempts: 1}
				if c.asked == "" { // sent again under the same key
					want.Attempts = 6
					r.wants(task(c.way, rollback.Spec{}), want)
					if len(r.changing()) != 6 {
						t.Errorf("sent %d times", len(r.changing()))
					}
					return
				}
				r.wants(task(c.way, rollback.Spec{}), want)
				if took := time.Since(began); took != 130*time.Second { // 2 + 4 + 8 + 16 + 100
					t.Errorf("took %v", took)
				}
				for i, o := range r.sent {
					if i > 0 && (o.Method != http.MethodGet || o.URL != c.asked || o.Delegated != (c.way == checkpoint.Delegate)) {
						t.Errorf("asked %+v", o)
					}
				}
				// Another life asks, and sends nothing.
				r.restart(-1)
				r.wants(task(c.way, rollback.Spec{}), want)
				if len(r.changing()) != 1 {
					t.Errorf("sent %d times", len(r.changing()))
				}
			})
		})
	}
	bubble(t, func(t *testing.T, r *undoRig) { // who lost the job does not say what came of it
		r.answers(accepted("/jobs/1"), 404)
		r.wants(task(checkpoint.Compensate, rollback.Spec{}), rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Status: 202, Attempts: 1})
	})
}

// Cascade Figure 12: a compensation has the hashes of the state before and after it too, where
// `status` can be read. Where it cannot, that keeps nothing from being done.
func TestCascadeFigure12OfCompensations(t *testing.T) {
	for what, c := range map[string]struct {
		answers       []any
		before, after string // "-" is nothing there, "" is not known
	}{
		"a refund that comes to be":   {[]any{404, 201, `{"refund": 1}`}, "-", `{"refund": 1}`},
		"a state that changes":        {[]any{"open", 200, "refunded"}, "open", "refunded"},
		"a state that cannot be read": {[]any{errLost, 200, 500}, "", ""},
		"an answer that was lost":     {[]any{"open", errLost, `{"status": "succeeded"}`, `{"status": "succeeded"}`}, "open", `{"status": "succeeded"}`},
		"nothing but the state after": {[]any{503, 200, "refunded"}, "", "refunded"},
	} {
		t.Run(what, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				rollback.SeeStatus(r.Undoer)
				r.answers(c.answers...)
				hash := func(text string) [32]byte {
					if text == "" {
						return [32]byte{}
					}
					return undoState(text).hash()
				}
				got := r.undo(task(checkpoint.Compensate, rollback.Spec{Status: status}))
				if !got.Done || got.Before != hash(c.before) || got.After != hash(c.after) || len(r.changing()) != 1 {
					t.Errorf("%+v, sent %d times", got, len(r.changing()))
				}
				// P5: asked again, it is done already, and what it was before is known.
				again := r.undo(task(checkpoint.Compensate, rollback.Spec{Status: status}))
				if again.Before != got.Before || len(r.changing()) != 1 {
					t.Errorf("again %+v, sent %d times", again, len(r.changing()))
				}
			})
		})
	}
}

// Cascade Figure 12: without a `status` that can be asked for, what is hashed is the target, where the
// action restores as well.
func TestCascadeFigure12OfTargets(t *testing.T) {
	for what, c := range map[string]struct {
		spec          rollback.Spec
		answers       []any
		before, after string // "-" is nothing there, "" is not known
	}{
		"a target that changes":        {rollback.Spec{Target: true}, []any{"new", 200, "old"}, "new", "old"},
		"a target that goes":           {rollback.Spec{Target: true}, []any{"new", 200, 404}, "new", "-"},
		"a target that cannot be read": {rollback.Spec{Target: true}, []any{errLost, 200, 503}, "", ""},
		"a status is asked for first":  {rollback.Spec{Target: true, Status: status}, []any{"open", 200, "refunded"}, "open", "refunded"},
		"nothing that shows it":        {rollback.Spec{}, []any{200}, "", ""},
	} {
		t.Run(what, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				rollback.SeeStatus(r.Undoer)
				r.answers(c.answers...)
				hash := func(text string) [32]byte {
					if text == "" {
						return [32]byte{}
					}
					return undoState(text).hash()
				}
				got := r.undo(task(checkpoint.Compensate, c.spec))
				if !got.Done || got.Before != hash(c.before) || got.After != hash(c.after) || len(r.changing()) != 1 {
					t.Errorf("%+v, sent %d times", got, len(r.changing()))
				}
			})
		})
	}
}

// again is the task of another rollback that takes up what the first has left in doubt.
func (r *undoRig) again(way checkpoint.Way, spec rollback.Spec, id string) rollback.Task {
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
			bubble(t, func(t *testing.T, r *undoRig) {
				r.answers(c.first)
				if got := r.undo(task(c.way, rollback.Spec{})); got.Done || !got.Unknown {
					t.Fatalf("%+v", got)
				}
				second := r.again(c.way, rollback.Spec{}, "second")
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
				third := r.undo(r.again(c.way, rollback.Spec{}, "third"))
				if third.Done || !third.Unknown || third.Reason != rollback.ReasonRefused {
					t.Errorf("%+v", third)
				}
				r.answers(503, 204)
				if last := r.undo(r.again(c.way, rollback.Spec{}, "fourth")); !last.Done || last.Unknown {
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
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(303, 200)
		spec := rollback.Spec{Status: status}
		r.undo(task(checkpoint.Compensate, spec))
		r.wants(r.again(checkpoint.Compensate, spec, "second"), rollback.Result{Done: true, Status: 200, Attempts: 1})
		if len(r.changing()) != 1 {
			t.Errorf("sent %d times", len(r.changing()))
		}
	})
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(303)
		spec := rollback.Spec{OnLost: rollback.UndoEscalate}
		r.undo(task(checkpoint.Compensate, spec))
		r.wants(r.again(checkpoint.Compensate, spec, "second"), rollback.Result{Unknown: true, Reason: rollback.ReasonLost, Status: 303, Attempts: 1})
		if len(r.changing()) != 1 {
			t.Errorf("sent %d times", len(r.changing()))
		}
	})
}

// What stands at the target says more than an answer that says nothing.
func TestP6UnexpectedAnswerToARestore(t *testing.T) {
	for name, c := range map[string]struct {
		applied bool
		want    rollback.Result
	}{
		"not applied": {false, rollback.Result{Reason: rollback.ReasonUnexpected, Status: 418, Attempts: 1}},
		"applied":     {true, rollback.Result{Done: true, Status: 418, Attempts: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				u := &resource{tags: true}
				odd := func(*rollback.Outgoing) (*rollback.Answer, error) {
					return &rollback.Answer{Status: http.StatusTeapot}, nil
				}
				if c.applied {
					u.after = odd
				} else {
					u.before = odd
				}
				r.answer = u.serve
				got := r.undo(restoring(u, "old", "new", rollback.Spec{}))
				got.Before, got.After, got.Version = [32]byte{}, [32]byte{}, checkpoint.Version{}
				if got != c.want {
					t.Errorf("got %+v, want %+v", got, c.want)
				}
			})
		})
	}
}

// attempt is the task that undoes a call by what is known of its nth attempt.
func attempt(n int, way checkpoint.Way, spec rollback.Spec) rollback.Task {
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
	named := rollback.Spec{Compensate: &template.Spec{Method: "POST", URL: "/refunds?for={checkpoint.id}", ContentType: "application/json", Body: `{{"a":1}}`}}
	for way, spec := range map[checkpoint.Way]rollback.Spec{checkpoint.Compensate: named, checkpoint.Delegate: {}} {
		for _, order := range [][2]int{{1, 2}, {2, 1}, {3, 2}} {
			for _, crashed := range []bool{false, true} {
				bubble(t, func(t *testing.T, r *undoRig) {
					r.answers(303)
					if crashed {
						r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) { r.die(); return nil, errLost }
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
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(200)
		task := attempt(3, checkpoint.Compensate, rollback.Spec{})
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
		spec               rollback.Spec
		want               rollback.Result
	}{
		"refused":    {true, false, 409, rollback.Spec{}, rollback.Result{Unknown: true, Reason: rollback.ReasonRefused, Status: 409, Attempts: 2}},
		"done":       {true, false, 200, rollback.Spec{}, rollback.Result{Done: true, Status: 200, Attempts: 2}},
		"not sent":   {true, false, 200, rollback.Spec{OnLost: rollback.UndoEscalate}, rollback.Result{Unknown: true, Reason: rollback.ReasonLost, Attempts: 1}},
		"remembered": {false, false, 409, rollback.Spec{}, rollback.Result{Reason: rollback.ReasonRefused, Status: 409, Attempts: 1}},
		"settled":    {true, true, 409, rollback.Spec{}, rollback.Result{Reason: rollback.ReasonRefused, Status: 409, Attempts: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *undoRig) {
				if c.settled {
					r.answers(500)
					r.undo(task(checkpoint.Compensate, rollback.Spec{OnLost: rollback.UndoEscalate}))
					page, err := r.guard.List(context.Background(), execution.Filter{States: []execution.State{execution.StateInDoubt}}, "", 10)
					if err != nil || len(page.Executions) != 1 {
						t.Fatal(page, err)
					}
					word := execution.Resolution{By: execution.ByOperator, Operator: "ada", Reason: "asked them"}
					if err := r.guard.SettleDoubt(context.Background(), page.Executions[0], word); err != nil {
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

// silent is a store that does not say what became of a commit.
type silent struct {
	store.Store
	mute *atomic.Bool
}

func (u silent) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	version, err := u.Store.Commit(ctx, batch...)
	if u.mute.Load() {
		return 0, store.ErrUnknown
	}
	return version, err
}

// An answer that the store does not confirm is no result yet, and the same task finds it once the store has it.
func TestUnconfirmedAnswer(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		var mute atomic.Bool
		g, _, err := execution.Open(context.Background(), silent{r.mem, &mute}, r.ring)
		if err != nil {
			t.Fatal(err)
		}
		u := rollback.NewUndoer(rollback.UndoerOptions{Guard: g, Checkpoints: r.checkpoints, Sender: r})
		r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
			mute.Store(true)
			return &rollback.Answer{Status: 200}, nil
		}
		task := task(checkpoint.Compensate, rollback.Spec{})
		if _, err := u.Undo(context.Background(), task); err == nil {
			t.Fatal("without an error")
		}
		mute.Store(false)
		r.pass(time.Minute)
		if got, err := u.Undo(context.Background(), task); err != nil || !got.Done || got.Attempts != 1 {
			t.Errorf("%+v, %v", got, err)
		}
	})
}
