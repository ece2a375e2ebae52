package undo_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// participant takes compensations, idempotent by their key, and can be asked.
type participant struct {
	calls   int
	effects map[string]int // by key
}

func (p *participant) serve(o *undo.Outgoing) (*undo.Answer, error) {
	if p.effects == nil {
		p.effects = map[string]int{}
	}
	if o.Method == http.MethodGet {
		if len(p.effects) == 0 {
			return &undo.Answer{Status: 404}, nil
		}
		return &undo.Answer{Status: 200}, nil
	}
	p.calls++
	p.effects[o.Header.Get("Idempotency-Key")]++
	return &undo.Answer{Status: 200}, nil
}

// lives runs the task in lives that die after so many steps each, and then in one that
// does not.
func (r *rig) lives(t undo.Task, steps ...int) undo.Result {
	r.t.Helper()
	r.crashes = 0
	for _, n := range steps {
		r.restart(n)
		got, err := r.Undo(r.life, t)
		if err == nil && !r.dead {
			return got
		}
		if !r.dead {
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
		for name, spec := range map[string]undo.Spec{
			"resend": {}, "escalate": {OnLost: undo.Escalate}, "status": {Status: status}, "status or escalate": {Status: status, OnLost: undo.Escalate},
		} {
			crashes := 0
			for n := range 12 {
				t.Run(fmt.Sprint(way, name, n), func(t *testing.T) {
					bubble(t, func(t *testing.T, r *rig) {
						p := new(participant)
						r.answer = p.serve
						got := r.lives(task(way, spec), n)
						crashes += r.crashes
						switch {
						case got.Done && len(p.effects) == 1 && p.effects[key] == p.calls:
						case spec.OnLost == undo.Escalate && got.Unknown && got.Reason == undo.ReasonLost:
						default:
							t.Errorf("%+v after %v", got, p.effects)
						}
						if most := 2; p.calls > most || spec.OnLost == undo.Escalate && p.calls > 1 || spec.Status != nil && p.calls > 1 {
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
	for _, c := range [][2]state{{"old", "new"}, {"old", nothing}, {nothing, "new"}} {
		for _, tags := range []bool{true, false} {
			for n := range 400 {
				bubble(t, func(t *testing.T, r *rig) {
					u := &resource{tags: tags}
					r.answer = u.serve
					got := r.lives(restoring(u, c[0], c[1], undo.Spec{Verify: true}), n%20, n/20)
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
		bubble(t, func(t *testing.T, r *rig) {
			calls := 0
			r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
				if o.Method != http.MethodGet {
					calls++
					return accepted("/jobs/1"), nil
				}
				return &undo.Answer{Status: 200}, nil
			}
			got := r.lives(task(checkpoint.Compensate, undo.Spec{}), n)
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
		bubble(t, func(t *testing.T, r *rig) { randomHistory(t, r, rand.New(rand.NewPCG(seed, 7))) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func randomHistory(t *testing.T, r *rig, rnd *rand.Rand) {
	way := []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate}[rnd.IntN(2)]
	spec := undo.Spec{OnLost: []string{undo.Resend, undo.Escalate}[rnd.IntN(2)]}
	asks := rnd.IntN(2) == 0
	if asks {
		spec.Status = status
	}
	took := 0 // attempts that may have had their effect
	effect, failed, finished := false, false, false
	r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
		if rnd.IntN(3) == 0 {
			return nil, errUnsent
		}
		if o.Method == http.MethodGet {
			switch {
			case rnd.IntN(3) == 0:
				return nil, errLost
			case effect:
				return &undo.Answer{Status: []int{200, 410}[rnd.IntN(2)]}, nil
			case failed:
				return &undo.Answer{Status: 409}, nil
			}
			return &undo.Answer{Status: 404}, nil
		}
		if o.Header.Get("Idempotency-Key") != key {
			t.Errorf("key %q", o.Header.Get("Idempotency-Key"))
		}
		if finished {
			t.Error("sent after a final answer was recorded")
		}
		switch rnd.IntN(8) {
		case 0:
			return &undo.Answer{Status: 429}, nil
		case 1:
			took++
			return nil, errLost // before it arrived
		case 2:
			took, effect = took+1, !failed
			return nil, errLost
		case 3:
			took, effect = took+1, !failed
			return &undo.Answer{Status: 503}, nil
		case 4:
			if !effect {
				failed = true
				return &undo.Answer{Status: 409}, nil
			}
		case 5:
			if !effect {
				return &undo.Answer{Status: []int{401, 404, 418}[rnd.IntN(3)]}, nil
			}
		}
		if failed {
			return &undo.Answer{Status: 409}, nil
		}
		took, effect = took+1, true
		return &undo.Answer{Status: 200}, nil
	}
	task := task(way, spec)
	for range 6 {
		r.restart([]int{-1, rnd.IntN(12)}[rnd.IntN(2)])
		got, err := r.Undo(r.life, task)
		if r.dead {
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
		if spec.OnLost == undo.Escalate && took > 1 {
			t.Errorf("%d attempts in doubt", took)
		}
		key := r.guard.Key(guard.Scope{Caller: "agent_guard undo", Guard: "default", Method: "(undo)", Path: "/", ID: key})
		if found, err := r.guard.Find(context.Background(), key, guard.Fingerprint{}); err == nil && found.Standing == guard.Replayable {
			finished = true
		}
	}
}

// Two at once: one sends, the other waits for what came of it.
func TestTwoAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		p := new(participant)
		r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
			r.pass(time.Second)
			return p.serve(o)
		}
		results := make(chan undo.Result)
		for range 5 {
			go func() { results <- r.undo(task(checkpoint.Compensate, undo.Spec{})) }()
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
	bubble(t, func(t *testing.T, r *rig) {
		p := new(participant)
		r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
			r.pass(10 * time.Second)
			return p.serve(o)
		}
		over := make(chan undo.Result)
		go func() { over <- r.undo(task(checkpoint.Compensate, undo.Spec{})) }()
		r.pass(time.Second)
		late := task(checkpoint.Compensate, undo.Spec{})
		late.Due = time.Now().Add(time.Second)
		r.wants(late, undo.Result{Unknown: true, Reason: undo.ReasonTimeout, Attempts: 1})
		if got := <-over; !got.Done {
			t.Errorf("%+v", got)
		}
	})
}

// The store is down or ctx ends: that is an error, and the same task goes on later.
func TestErrorsSayNothingOfTheUndo(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		p := new(participant)
		r.answer = p.serve
		r.steps = 0 // P4: nothing is sent without a claim
		if _, err := r.Undo(context.Background(), task(checkpoint.Compensate, undo.Spec{})); !errors.Is(err, guard.ErrStore) || p.calls > 0 {
			t.Errorf("%v, called %d times", err, p.calls)
		}
		r.restart(-1)
		r.guard.Drain(context.Background())
		if _, err := r.Undo(context.Background(), task(checkpoint.Compensate, undo.Spec{})); !errors.Is(err, guard.ErrDraining) {
			t.Errorf("%v", err)
		}
		r.restart(-1)
		ctx, cancel := context.WithCancel(context.Background())
		r.answer = func(o *undo.Outgoing) (*undo.Answer, error) {
			cancel()
			_, _ = p.serve(o)
			return nil, ctx.Err()
		}
		if _, err := r.Undo(ctx, task(checkpoint.Compensate, undo.Spec{})); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		r.answer = p.serve
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 2})
	})
	for _, answer := range []any{503, errUnsent, accepted("/jobs/1")} { // while it waits
		bubble(t, func(t *testing.T, r *rig) {
			n := 0
			r.answer = func(*undo.Outgoing) (*undo.Answer, error) {
				if n++; n > 1 && answer != any(errUnsent) {
					return nil, errLost
				}
				if status, ok := answer.(int); ok {
					return &undo.Answer{Status: status}, nil
				}
				if a, ok := answer.(*undo.Answer); ok {
					return a, nil
				}
				return nil, errUnsent
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
			defer cancel()
			if _, err := r.Undo(ctx, task(checkpoint.Compensate, undo.Spec{})); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v: %v", answer, err)
			}
			n = 0
			u := new(resource)
			ctx, cancel = context.WithTimeout(context.Background(), 10*time.Minute)
			defer cancel()
			if _, err := r.Undo(ctx, restoring(u, "old", "new", undo.Spec{})); answer == any(errUnsent) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v: %v", answer, err)
			}
		})
	}
}

// An answer that came while everything ends is recorded all the same (P7).
func TestP7AnswerIsRecordedWhenCtxEnds(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answer = func(*undo.Outgoing) (*undo.Answer, error) {
			r.die()
			return &undo.Answer{Status: 200}, nil
		}
		want := undo.Result{Done: true, Status: 200, Attempts: 1}
		if got, err := r.Undo(r.life, task(checkpoint.Compensate, undo.Spec{})); err != nil || got != want {
			t.Errorf("%+v, %v", got, err)
		}
		r.restart(-1)
		r.wants(task(checkpoint.Compensate, undo.Spec{}), want)
		if len(r.sent) != 1 {
			t.Errorf("sent %d times", len(r.sent))
		}
	})
}

// A sender that panics leaves a doubt, and no execution that runs for ever.
func TestSenderPanics(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answer = func(*undo.Outgoing) (*undo.Answer, error) { panic("a fault of ours") }
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was lost")
				}
			}()
			r.undo(task(checkpoint.Compensate, undo.Spec{}))
		}()
		r.answers(200)
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 2})
	})
}

// A request that takes too long is cut off, and in doubt.
func TestRequestTimeout(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.options.Timeout = 5 * time.Second
		r.restart(-1)
		n := 0
		r.Undoer = undo.New(undo.Options{Guard: r.guard, Vault: r.vault, Timeout: 5 * time.Second, Sender: senderFunc(
			func(ctx context.Context, _ *undo.Outgoing) (*undo.Answer, error) {
				if n++; n == 1 {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return &undo.Answer{Status: 200}, nil
			})})
		began := time.Now()
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Done: true, Status: 200, Attempts: 2})
		if took := time.Since(began); took != 6*time.Second {
			t.Errorf("took %v", took)
		}
	})
}

type senderFunc func(context.Context, *undo.Outgoing) (*undo.Answer, error)

func (f senderFunc) Send(ctx context.Context, o *undo.Outgoing) (*undo.Answer, error) {
	return f(ctx, o)
}
