package execution_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func (r *rig) doubtful(id string) (*execution.Call, execution.Recorded) {
	r.t.Helper()
	c := r.call(id)
	r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost, Status: 502})
	found, err := r.Get(ctx, c.Key)
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
		head := &execution.Head{Status: 201, Header: map[string][]string{"Content-Type": {"application/json"}}}
		decision := execution.Resolution{By: execution.ByOperator, Applied: true, Operator: "ada@example.com", Reason: "charge ch_1 is there"}
		body := strings.Repeat("x", 3000)
		with := decision
		with.Answer, with.Body = head, []byte(body)
		if err := r.SettleDoubt(ctx, found, with); err != nil {
			t.Fatal(err)
		}
		result, err := r.Result(ctx, applied.Key, r.status(applied, execution.Replayable))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(result.Body(ctx)); err != nil || string(got) != body || result.Head.Status != 201 {
			t.Errorf("replays %d, %d bytes, %v", result.Head.Status, len(got), err)
		}
		if err := r.SettleDoubt(ctx, found, decision); !errors.Is(err, execution.ErrTaken) {
			t.Errorf("resolved twice: %v", err)
		}

		without, found := r.doubtful("without a result")
		if err := r.SettleDoubt(ctx, found, decision); err != nil {
			t.Fatal(err)
		}
		r.status(without, execution.ResultUnavailable)

		free, found := r.doubtful("not applied")
		time.Sleep(time.Hour)
		decision = execution.Resolution{By: execution.ByOperator, Operator: "bob", Reason: "no charge"}
		if err := r.SettleDoubt(ctx, found, decision); err != nil {
			t.Fatal(err)
		}
		r.status(free, execution.Free)
		r.settle(r.claim(free), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseDeadline})
		time.Sleep(time.Hour)
		if found, err = r.Get(ctx, free.Key); err != nil {
			t.Fatal(err)
		}
		decision.Reason = "again none"
		if err := r.SettleDoubt(ctx, found, decision); err != nil {
			t.Fatal(err)
		}

		r.restart()
		all, err := r.Resolutions(ctx, free.Key)
		if err != nil || len(all) != 2 {
			t.Fatalf("%+v, %v", all, err)
		}
		first := all[0]
		if first.Applied || first.Operator != "bob" || first.Reason != "no charge" || first.Cause != execution.CauseLost ||
			first.Action != "charge" || !first.At.Equal(time.Now().Add(-time.Hour)) || all[1].Cause != execution.CauseDeadline {
			t.Errorf("recorded %+v", all)
		}
	})
}

func TestResolveRefuses(t *testing.T) {
	r := newRig(t)
	good := execution.Resolution{By: execution.ByOperator, Operator: "ada", Reason: "seen"}
	c, found := r.doubtful("a")
	for name, bad := range map[string]execution.Resolution{
		"no operator": {By: execution.ByOperator, Reason: "seen"}, "no reason": {By: execution.ByOperator, Operator: "ada"},
		"long":                             {By: execution.ByOperator, Operator: "ada", Reason: strings.Repeat("x", 1025)},
		"a probe that says it did not run": {By: execution.ByProbe},
	} {
		if err := r.SettleDoubt(ctx, found, bad); !errors.Is(err, execution.ErrResolution) {
			t.Errorf("%s: %v", name, err)
		}
	}
	yes := good
	yes.Applied = true
	for name, answer := range map[string]struct {
		head *execution.Head
		body int
	}{
		"body":   {&execution.Head{Status: 200}, 256<<10 + 1},
		"header": {&execution.Head{Status: 200, Header: map[string][]string{"X": {strings.Repeat("x", 1<<20)}}}, 0},
	} {
		yes.Answer, yes.Body = answer.head, make([]byte, answer.body)
		if err := r.SettleDoubt(ctx, found, yes); !errors.Is(err, execution.ErrAnswerTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.status(c, execution.Doubtful)

	done := r.call("done")
	e := r.claim(done)
	r.settle(e, answered(e, nil))
	look, err := r.Get(ctx, done.Key)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SettleDoubt(ctx, look, good); !errors.Is(err, execution.ErrNotInDoubt) {
		t.Errorf("a completed execution: %v", err)
	}
	if err := r.SettleDoubt(ctx, found, good); err != nil {
		t.Error(err)
	}
}

func (r *rig) announced(id, checkpoint string) *execution.Call {
	c := r.call(id)
	c.Fingerprint = body.Fingerprint{1}
	c.Checkpoint = checkpoint
	return c
}

func undoing(c *execution.Call, checkpoint string) execution.Undoing {
	return execution.Undoing{Key: c.Key, Checkpoint: checkpoint, Workflow: "w-1", Method: "POST", Path: "/v1/charges"}
}

var extra = store.Write{Key: []byte("z extra"), If: store.Absent(), Value: []byte("1")}

// A late duplicate of an undone request is refused for
// ever, whatever came of the call, and after a restart.
func TestLateDuplicateIsRefusedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		calls := map[string]*execution.Call{}
		for name, o := range map[string]execution.Outcome{
			"completed": {Verdict: execution.Completed, Status: 201},
			"in doubt":  {Verdict: execution.InDoubt, Cause: execution.CauseLost},
			"released":  {Verdict: execution.Released, Cause: execution.CauseNotSent},
		} {
			c := r.announced(name, "ckpt "+name)
			calls[name] = c
			r.settle(r.claim(c), o)
		}
		calls["never came"] = r.announced("never came", "ckpt never came")
		for name, c := range calls {
			for range 2 { // the second changes nothing
				if err := r.Undone(ctx, undoing(c, "ckpt "+name)); err != nil {
					t.Fatal(name, err)
				}
			}
		}
		if n, _, err := r.Doubts(ctx); n != 0 || err != nil {
			t.Errorf("%d doubts are left, %v", n, err)
		}
		for range 2 {
			for name, c := range calls {
				r.status(c, execution.RolledBack)
				if _, err := r.Claim(ctx, c, execution.Finding{}); !errors.Is(err, execution.ErrTaken) {
					t.Errorf("%s: claimed by somebody who saw the key free: %v", name, err)
				}
			}
			time.Sleep(400 * 24 * time.Hour)
			r.restart()
		}
		page, err := r.List(ctx, execution.Filter{States: []execution.State{execution.StateRolledBack}, Workflow: "w-1"}, "", 10)
		if err != nil || len(page.Executions) != len(calls) {
			t.Errorf("listed %d, %v", len(page.Executions), err)
		}
	})
}

// What runs is waited for and not overwritten: its outcome lands.
func TestUndoneWaitsForWhatRuns(t *testing.T) {
	r := newRig(t)
	c := r.announced("a", "ckpt")
	e := r.claim(c)
	if err := r.Undone(ctx, undoing(c, "ckpt"), extra); !errors.Is(err, execution.ErrRunning) {
		t.Errorf("while it runs: %v", err)
	}
	r.settle(e, answered(e, nil))
	if err := r.Undone(ctx, undoing(c, "ckpt"), extra); err != nil {
		t.Fatal(err)
	}
	if _, err := r.mem.Get(ctx, extra.Key); err != nil {
		t.Errorf("the extra write: %v", err)
	}
	r.status(c, execution.RolledBack)
}

// A key that was released and claimed again belongs to another checkpoint.
func TestUndoneLeavesOtherCallsAlone(t *testing.T) {
	r := newRig(t)
	first, again := r.announced("a", "ckpt 1"), r.announced("a", "ckpt 2")
	r.settle(r.claim(first), execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent})
	e := r.claim(again)
	for range 2 {
		if err := r.Undone(ctx, undoing(first, "ckpt 1"), extra); !errors.Is(err, execution.ErrOtherCall) {
			t.Errorf("%v", err)
		}
		if e != nil {
			r.settle(e, answered(e, nil))
			e = nil
		}
	}
	r.status(again, execution.Replayable)
	if _, err := r.mem.Get(ctx, extra.Key); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the extra write landed: %v", err)
	}
}

// An extra write that loses keeps everything as it was, and says which one it is.
func TestUndoneLandsWithItsExtraWritesOrNotAtAll(t *testing.T) {
	r := newRig(t)
	if _, err := r.mem.Commit(ctx, extra); err != nil {
		t.Fatal(err)
	}
	done, free := r.announced("a", "ckpt"), r.announced("b", "ckpt b")
	e := r.claim(done)
	r.settle(e, answered(e, nil))
	for c, checkpoint := range map[*execution.Call]string{done: "ckpt", free: "ckpt b"} {
		var lost *store.Conflict
		if err := r.Undone(ctx, undoing(c, checkpoint), extra); !errors.As(err, &lost) || string(lost.Key) != string(extra.Key) {
			t.Errorf("%v", err)
		}
	}
	r.status(done, execution.Replayable)
	r.status(free, execution.Free)
}

// P1: of a call and the record that it must not run, one wins.
func TestP1BlockOrClaim(t *testing.T) {
	for range 200 {
		r := newRig(t)
		c := r.announced("a", "ckpt")
		found := r.find(c)
		blocked := make(chan error)
		go func() { blocked <- r.Undone(ctx, undoing(c, "ckpt")) }()
		e, err := r.Claim(ctx, c, found)
		switch undone := <-blocked; {
		case undone == nil && !errors.Is(err, execution.ErrTaken):
			t.Fatalf("blocked, and claimed: %v", err)
		case undone != nil && (err != nil || !errors.Is(undone, execution.ErrRunning) && !errors.Is(undone, execution.ErrTaken)):
			t.Fatalf("not blocked: %v; claimed: %v", undone, err)
		}
		if e != nil {
			r.settle(e, answered(e, nil))
		}
	}
}

// P4: without a store nothing is recorded.
func TestP4UndoneOnABrokenStore(t *testing.T) {
	r := newRig(t)
	c := r.announced("a", "ckpt")
	if err := r.mem.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.Undone(ctx, undoing(c, "ckpt")); !errors.Is(err, execution.ErrStore) {
		t.Errorf("%v", err)
	}
}

// What a caller holds is the same whether it was counted on the way or is counted anew.
func TestQuotaOfUndoneExecutions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		held := func() (open int, bytes int64) {
			c := r.announced("probe", "")
			for _, q := range []execution.Quota{{Open: 1}, {Bytes: 1}} {
				c.Quota = q
				var full *execution.QuotaError
				e, err := r.Claim(ctx, c, execution.Finding{})
				if errors.As(err, &full) {
					open, bytes = full.Open, full.Bytes
				} else if err != nil {
					t.Fatal(err)
				} else {
					r.settle(e, execution.Outcome{Verdict: execution.Released})
				}
			}
			return open, bytes
		}
		quota := execution.Quota{Open: 100, Bytes: 1 << 30}
		for _, name := range []string{"done", "doubt"} {
			c := r.announced(name, "ckpt "+name)
			c.Quota = quota
			e := r.claim(c)
			o := answered(e, make([]byte, 5000))
			if name == "doubt" {
				o = execution.Outcome{Verdict: execution.InDoubt}
			}
			r.settle(e, o)
		}
		for _, name := range []string{"done", "doubt", "free"} {
			u := undoing(r.announced(name, ""), "ckpt "+name)
			u.Caller = r.Caller("user:ada")
			if err := r.Undone(ctx, u); err != nil {
				t.Fatal(err)
			}
		}
		for _, age := range []time.Duration{0, 25 * time.Hour, 60 * 24 * time.Hour} {
			time.Sleep(age)
			open, bytes := held()
			r.restart()
			if again, anew := held(); open != again || bytes != anew || open != 0 {
				t.Errorf("after %v: %d open and %d bytes, counted anew %d and %d", age, open, bytes, again, anew)
			}
		}
	})
}
