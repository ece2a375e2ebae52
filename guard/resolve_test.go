package guard_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

func (r *rig) doubtful(id string) (*guard.Call, guard.Recorded) {
	r.t.Helper()
	c := r.call(id)
	r.settle(r.claim(c), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost, Status: 502})
	found, err := r.Look(ctx, c.Key)
	if err != nil {
		r.t.Fatal(err)
	}
	return c, found
}

// P1: an operator's word frees a key or makes a result, once, and stays on record.
func TestP1OperatorResolvesADoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		applied, found := r.doubtful("applied")
		head := &guard.Head{Status: 201, Header: map[string][]string{"Content-Type": {"application/json"}}}
		decision := guard.Resolution{Applied: true, Operator: "ada@example.com", Reason: "charge ch_1 is there"}
		body := strings.Repeat("x", 3000)
		if err := r.Resolve(ctx, found, decision, head, []byte(body)); err != nil {
			t.Fatal(err)
		}
		result, err := r.Result(ctx, applied.Key, r.standing(applied, guard.Replayable))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(result.Body(ctx)); err != nil || string(got) != body || result.Head.Status != 201 {
			t.Errorf("replays %d, %d bytes, %v", result.Head.Status, len(got), err)
		}
		if err := r.Resolve(ctx, found, decision, nil, nil); !errors.Is(err, guard.ErrTaken) {
			t.Errorf("resolved twice: %v", err)
		}

		without, found := r.doubtful("without a result")
		if err := r.Resolve(ctx, found, decision, nil, nil); err != nil {
			t.Fatal(err)
		}
		r.standing(without, guard.ResultUnavailable)

		free, found := r.doubtful("not applied")
		time.Sleep(time.Hour)
		decision = guard.Resolution{Operator: "bob", Reason: "no charge"}
		if err := r.Resolve(ctx, found, decision, nil, nil); err != nil {
			t.Fatal(err)
		}
		r.standing(free, guard.Free)
		r.settle(r.claim(free), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseDeadline})
		time.Sleep(time.Hour)
		if found, err = r.Look(ctx, free.Key); err != nil {
			t.Fatal(err)
		}
		decision.Reason = "again none"
		if err := r.Resolve(ctx, found, decision, nil, nil); err != nil {
			t.Fatal(err)
		}

		r.restart()
		all, err := r.Resolutions(ctx, free.Key)
		if err != nil || len(all) != 2 {
			t.Fatalf("%+v, %v", all, err)
		}
		first := all[0]
		if first.Applied || first.Operator != "bob" || first.Reason != "no charge" || first.Cause != guard.CauseLost ||
			first.Action != "charge" || !first.At.Equal(time.Now().Add(-time.Hour)) || all[1].Cause != guard.CauseDeadline {
			t.Errorf("recorded %+v", all)
		}
	})
}

func TestResolveRefuses(t *testing.T) {
	r := newRig(t)
	good := guard.Resolution{Operator: "ada", Reason: "seen"}
	c, found := r.doubtful("a")
	for name, bad := range map[string]guard.Resolution{
		"no operator": {Reason: "seen"}, "no reason": {Operator: "ada"},
		"long": {Operator: "ada", Reason: strings.Repeat("x", 1025)},
	} {
		if err := r.Resolve(ctx, found, bad, nil, nil); !errors.Is(err, guard.ErrResolution) {
			t.Errorf("%s: %v", name, err)
		}
	}
	yes := good
	yes.Applied = true
	for name, answer := range map[string]struct {
		head *guard.Head
		body int
	}{
		"body":   {&guard.Head{Status: 200}, 256<<10 + 1},
		"header": {&guard.Head{Status: 200, Header: map[string][]string{"X": {strings.Repeat("x", 1<<20)}}}, 0},
	} {
		if err := r.Resolve(ctx, found, yes, answer.head, make([]byte, answer.body)); !errors.Is(err, guard.ErrAnswerTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.standing(c, guard.Doubtful)

	done := r.call("done")
	e := r.claim(done)
	r.settle(e, answered(e, nil))
	look, err := r.Look(ctx, done.Key)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Resolve(ctx, look, good, nil, nil); !errors.Is(err, guard.ErrNotInDoubt) {
		t.Errorf("a completed execution: %v", err)
	}
	if err := r.Resolve(ctx, found, good, nil, nil); err != nil {
		t.Error(err)
	}
}
