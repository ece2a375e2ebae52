package checkpoint_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func small(id string) checkpoint.Snapshot {
	s := full(id, 1)
	s.Way, s.Reason = checkpoint.Irreversible, checkpoint.ReasonDeclared
	return s
}

// over wants the checkpoint to be refused by a quota, without a trace of it.
func (r *rig) over(s checkpoint.Snapshot, t checkpoint.Terms, of, what string) *checkpoint.QuotaError {
	r.t.Helper()
	before := r.count("k")
	if t.TTL == 0 {
		t.TTL = ttl
	}
	_, err := r.Prepare(ctx, s, nil, t)
	over := (*checkpoint.QuotaError)(nil)
	if !errors.As(err, &over) || over.Of != of || over.Over != what {
		r.t.Fatalf("%v, want over the %s of the %s", err, what, of)
	}
	if n := r.count("k"); n != before {
		r.t.Errorf("%d entries of a refused checkpoint", n-before)
	}
	return over
}

// C-6.3-e: at most so many stand of one workflow and of one caller, also after a crash.
func TestQuotaBoundsTheCount(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		for of, terms := range map[string]checkpoint.Terms{
			checkpoint.OfWorkflow: {Workflow: checkpoint.Quota{Count: 3}},
			checkpoint.OfCaller:   {Caller: checkpoint.Quota{Count: 3}},
		} {
			id := func(i int) string { return number(of, i) }
			mine := func(i int) checkpoint.Snapshot {
				s := small(id(i))
				s.Workflow = of
				s.Caller[1] = of[0]
				return s
			}
			for i := range 2 {
				r.landed(r.prepare(mine(i), terms))
			}
			p := r.landed(r.prepare(mine(2), terms))
			r.over(mine(3), terms, of, checkpoint.OverCount)
			r.restart()
			r.over(mine(3), terms, of, checkpoint.OverCount)
			r.release(p) // makes room
			r.landed(r.prepare(mine(3), terms))
			r.over(mine(4), terms, of, checkpoint.OverCount)

			other := mine(5)
			other.Workflow, other.Caller[1] = "another", 'a'
			r.landed(r.prepare(other, terms))
		}
	})
}

// A checkpoint whose commit has failed counts for nothing, one that may have landed
// counts.
func TestQuotaCountsWhatMayStand(t *testing.T) {
	r := newRig(t)
	terms := checkpoint.Terms{Workflow: checkpoint.Quota{Count: 1}}
	for range 3 {
		fail := func([]store.Write) error { return errDisk }
		r.st.fail.Store(&fail)
		if err := r.commit(r.prepare(small("a"), terms).Batch); !errors.Is(err, errDisk) {
			t.Fatal(err)
		}
	}
	fail := func([]store.Write) error { return store.ErrUnknown }
	r.st.fail.Store(&fail)
	if err := r.commit(r.prepare(small("a"), terms).Batch); !errors.Is(err, store.ErrUnknown) {
		t.Fatal(err)
	}
	r.over(small("b"), terms, checkpoint.OfWorkflow, checkpoint.OverCount)
	r.st.fail.Store(nil)
	r.restart() // it has not
	r.landed(r.prepare(small("b"), terms))
}

// What refuses in one scope takes no room in the other.
func TestQuotaOfOneScopeTakesNothingOfTheOther(t *testing.T) {
	r := newRig(t)
	workflow := checkpoint.Terms{Caller: checkpoint.Quota{Count: 2}, Workflow: checkpoint.Quota{Count: 1}}
	r.landed(r.prepare(small("a"), workflow))
	for range 5 {
		r.over(small("b"), workflow, checkpoint.OfWorkflow, checkpoint.OverCount)
	}
	s := small("c")
	s.Workflow = "w-2"
	r.landed(r.prepare(s, workflow))
	s.ID, s.Workflow = "d", ""
	r.over(s, workflow, checkpoint.OfCaller, checkpoint.OverCount)
}

// C-6.3-e: so many bytes, with those of large results; room comes with expiry, and is
// said when.
func TestQuotaBoundsTheBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		terms := checkpoint.Terms{Caller: checkpoint.Quota{Bytes: 300_000}}
		p := r.landed(r.prepare(full("a", 50_000), terms)) // two bodies
		r.landed(r.prepare(full("b", 50_000), terms))
		r.over(full("c", 50_000), terms, checkpoint.OfCaller, checkpoint.OverBytes)
		r.landed(r.prepare(full("d", 10_000), terms))
		r.record(p.Handle(), result(50_000))
		for range 2 {
			over := r.over(full("e", 1), terms, checkpoint.OfCaller, checkpoint.OverBytes)
			if wait := time.Until(over.Retry); wait < ttl || wait > 2*ttl {
				t.Errorf("room in %v", wait)
			}
			r.restart()
		}
		over := r.over(full("e", 1), terms, checkpoint.OfCaller, checkpoint.OverBytes)
		time.Sleep(time.Until(over.Retry))
		r.landed(r.prepare(full("e", 50_000), terms))
		r.landed(r.prepare(full("f", 50_000), terms))
	})
}

// A quota that is set while checkpoints stand counts what is made from then on, and in
// another life the same.
func TestQuotaThatIsSetLater(t *testing.T) {
	r := newRig(t)
	none, terms := checkpoint.Terms{}, checkpoint.Terms{Workflow: checkpoint.Quota{Count: 2}}
	r.landed(r.prepare(small("a"), none))
	r.landed(r.prepare(small("b"), terms))
	r.restart()
	r.landed(r.prepare(small("c"), terms))
	r.over(small("d"), terms, checkpoint.OfWorkflow, checkpoint.OverCount)
}

// Who has no bound is not counted, and costs the store nothing.
func TestOnlyWhatIsBoundedIsCounted(t *testing.T) {
	for name, c := range map[string]struct {
		terms  checkpoint.Terms
		writes int
		caller int
	}{
		"no bound":           {checkpoint.Terms{}, 1, 0},
		"a workflow's count": {checkpoint.Terms{Workflow: checkpoint.Quota{Count: 9}}, 3, 0}, // with its note
		"a workflow's rate":  {checkpoint.Terms{Rate: 9}, 3, 0},
		"a caller's bytes":   {checkpoint.Terms{Caller: checkpoint.Quota{Bytes: 1 << 30}}, 3, 1},
	} {
		r := newRig(t)
		p := r.landed(r.prepare(small("a"), c.terms))
		if n := len(p.Writes()); n != c.writes || r.count("ko") != c.caller || r.count("kw")+r.count("ko") != min(c.writes-1, 1) {
			t.Errorf("%s: %d writes, %d accounts of workflows, %d of callers", name, n, r.count("kw"), r.count("ko"))
		}
		// A large result, also one that another life records, is counted in the same scopes.
		before := r.count("kw") + r.count("ko")
		r.restart()
		r.record(r.open("a", checkpoint.Want{Sum: p.Sum()}).Handle, result(300<<10))
		if n := r.count("kw") + r.count("ko"); n != before {
			t.Errorf("%s: %d accounts after the result, %d before", name, n, before)
		}
	}
}

// C-6.3-e, A-checkpoint-flooding-c: a workflow makes so many in a minute, also over a
// restart.
func TestRateOfAWorkflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		terms := checkpoint.Terms{Rate: 6}
		n := 0
		more := func() bool {
			n++
			p, err := r.Prepare(ctx, small(number("c", n)), nil, checkpoint.Terms{TTL: ttl, Rate: terms.Rate})
			if err != nil {
				return false
			}
			r.landed(p)
			return true
		}
		for i := range 6 {
			if !more() {
				t.Fatalf("checkpoint %d of 6 is refused", i)
			}
		}
		for range 2 {
			over := r.over(small("x"), terms, checkpoint.OfWorkflow, checkpoint.OverRate)
			if wait := time.Until(over.Retry); wait != 10*time.Second {
				t.Errorf("room in %v", wait)
			}
			r.restart()
		}
		time.Sleep(10 * time.Second)
		if !more() || more() {
			t.Error("one a sixth of a minute, not none and not two")
		}
		time.Sleep(time.Hour)
		made := 0
		for more() {
			made++
		}
		if made != 6 {
			t.Errorf("%d at a time after a pause", made)
		}
	})
}

// A checkpoint whose commit has failed draws on no rate, also where another call of the
// workflow has another rate; one that may have landed does.
func TestRateCountsWhatMayStand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		slow, fast := checkpoint.Terms{Rate: 2}, checkpoint.Terms{Rate: 60}
		fail := func([]store.Write) error { return errDisk }
		for range 5 {
			first := r.prepare(small("a"), slow)
			r.landed(r.prepare(small(number("f", int(time.Now().Unix()))), fast))
			r.st.fail.Store(&fail)
			if err := r.commit(first.Batch); !errors.Is(err, errDisk) {
				t.Fatal(err)
			}
			r.st.fail.Store(nil)
			time.Sleep(time.Second)
		}
		unknown := func([]store.Write) error { return store.ErrUnknown }
		r.st.fail.Store(&unknown)
		for _, id := range []string{"b", "c"} {
			if err := r.commit(r.prepare(small(id), slow).Batch); !errors.Is(err, store.ErrUnknown) {
				t.Fatal(err)
			}
		}
		r.over(small("d"), slow, checkpoint.OfWorkflow, checkpoint.OverRate)
	})
}

// Of many at a time exactly as many get through as are allowed.
func TestQuotaHoldsUnderConcurrency(t *testing.T) {
	onStores(t, func(t *testing.T, r *rig) {
		terms := checkpoint.Terms{TTL: ttl, Workflow: checkpoint.Quota{Count: 10}, Caller: checkpoint.Quota{Count: 11}}
		r.landed(r.prepare(small("before"), terms))
		r.restart()
		var made, refused atomic.Int64
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() {
				p, err := r.Prepare(ctx, small(number("c", i)), nil, terms)
				if err == nil {
					err = r.commit(p.Batch)
				}
				switch {
				case err == nil:
					made.Add(1)
				case errors.As(err, new(*checkpoint.QuotaError)):
					refused.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		all.Wait()
		if made.Load() != 9 || refused.Load() != 41 {
			t.Errorf("%d made, %d refused", made.Load(), refused.Load())
		}
		if n := r.count("kb"); n != 10 {
			t.Errorf("%d stand", n)
		}
	})
}

// A workflow that is new costs the store no scan, and most are new.
func TestNewWorkflowsAreNotScanned(t *testing.T) {
	r := newRig(t)
	terms := checkpoint.Terms{Workflow: checkpoint.Quota{Count: 2}, Caller: checkpoint.Quota{Count: 100}, Rate: 10}
	for i := range 20 {
		s := small(number("c", i))
		s.Workflow = number("w", i)
		r.landed(r.prepare(s, terms))
	}
	if n := r.st.scans.Load(); n != 0 {
		t.Errorf("%d scans", n)
	}
	r.restart()
	s := small("again")
	s.Workflow = "w-1"
	r.landed(r.prepare(s, terms))
	s.ID = "once more"
	r.over(s, terms, checkpoint.OfWorkflow, checkpoint.OverCount)
}

// A checkpoint that stands long is counted also after others that stand short have come
// and gone, in another life.
func TestQuotaCountsTheLongBesideTheShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		many := checkpoint.Quota{Count: 9}
		r.landed(r.prepare(small("long"), checkpoint.Terms{TTL: 30 * ttl, Caller: many}))
		r.restart()
		r.landed(r.prepare(small("short"), checkpoint.Terms{TTL: time.Hour, Caller: many}))
		time.Sleep(29 * ttl)
		r.restart()
		r.over(small("more"), checkpoint.Terms{Caller: checkpoint.Quota{Count: 1}}, checkpoint.OfCaller, checkpoint.OverCount)
	})
}

func TestQuotaErrorsSayWhichBound(t *testing.T) {
	for want, e := range map[string]checkpoint.QuotaError{
		"checkpoint: the workflow makes more than 6 checkpoints in a minute":  {Of: checkpoint.OfWorkflow, Over: checkpoint.OverRate, Most: 6},
		"checkpoint: the caller has 3 checkpoints standing already":           {Of: checkpoint.OfCaller, Over: checkpoint.OverCount, Most: 3},
		"checkpoint: the caller would have more than 10 bytes of checkpoints": {Of: checkpoint.OfCaller, Over: checkpoint.OverBytes, Most: 10},
	} {
		if got := e.Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
