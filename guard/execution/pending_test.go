package execution_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// leaving is a member whose store can be away.
type leaving struct {
	*memory.Member
	mu    sync.Mutex
	why   error // what its commits get; nil where they are taken
	lands bool  // they are written all the same
	held  [][]store.Write
	asked int // since it is away
}

func (l *leaving) set(why error, lands bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.why, l.lands, l.asked = why, lands, 0
}

func (l *leaving) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked++; errors.Is(l.why, store.ErrUnavailable) {
		return l.why
	}
	return nil
}

func (l *leaving) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	l.mu.Lock()
	why, lands := l.why, l.lands
	l.asked++
	if why != nil && !lands {
		var kept []store.Write
		for _, w := range batch {
			w.Key, w.Value = bytes.Clone(w.Key), bytes.Clone(w.Value)
			kept = append(kept, w)
		}
		l.held = append(l.held, kept)
	}
	l.mu.Unlock()
	if why == nil || lands {
		if v, err := l.Member.Commit(ctx, batch...); why == nil || err != nil {
			return v, err
		}
	}
	return 0, why
}

func (l *leaving) Now(ctx context.Context) (time.Time, error) {
	if err := l.failure(); err != nil {
		return time.Time{}, err
	}
	return l.Member.Now(ctx)
}

func (l *leaving) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if err := l.failure(); err != nil {
		return store.Entry{}, err
	}
	return l.Member.Get(ctx, key)
}

func (l *leaving) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	if err := l.failure(); err != nil {
		return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, err) }
	}
	return l.Member.Scan(ctx, r)
}

// owner is the owner of an execution whose outcome carries a write of its own.
type owner struct {
	mu    sync.Mutex
	name  string
	size  int64
	again int
	hook  func()
}

func (o *owner) key() []byte { return []byte("z" + o.name) }

// batch is what the commit of the outcome carries, at most once.
func (o *owner) batch() *store.Batch {
	return store.NewBatch(store.Write{Key: o.key(), If: store.Absent()})
}

func (o *owner) Size() int64 { return o.size }

func (o *owner) Again(context.Context) []*store.Batch {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.again++
	if o.hook != nil {
		o.hook()
	}
	return []*store.Batch{o.batch()}
}

// lateFleet is a fleet of two members, of which the store of the first can be away.
func lateFleet(t *testing.T, test func(t *testing.T, a, b *node, st *leaving)) {
	bubble(t, func(t *testing.T, f *fleet) {
		m := f.mem.Join("a")
		st := &leaving{Member: m}
		test(t, f.open(m, st), f.join("b"), st)
	})
}

// loses runs a call whose outcome cannot be recorded.
func (n *node) loses(c *execution.Call, st *leaving, why error, lands bool, o *owner, verdict execution.Verdict, body []byte) {
	n.t.Helper()
	e := n.claim(c)
	outcome := answered(e, body)
	if outcome.Verdict = verdict; verdict != execution.Completed {
		outcome.Whole = false
		outcome.Cause = execution.CauseLost
	}
	st.set(why, lands)
	if err := e.SettleWith(ctx, outcome, o, o.batch()); !errors.Is(err, execution.ErrUnrecorded) {
		n.t.Fatalf("settled: %v", err)
	}
}

// body reads the recorded answer.
func (n *node) body(c *execution.Call) []byte {
	n.t.Helper()
	result, err := n.Result(ctx, c.Key, n.status(c, execution.Replayable))
	if err != nil {
		n.t.Fatal(err)
	}
	all, err := io.ReadAll(result.Body(ctx))
	if err != nil {
		n.t.Fatal(err)
	}
	return all
}

// away is for longer than anything is tried.
const away = 20 * time.Second

var failures = map[string]struct {
	why   error
	lands bool
}{
	"away":              {store.ErrUnavailable, false},
	"unknown, not done": {store.ErrUnknown, false},
	"unknown, and done": {store.ErrUnknown, true},
	"full":              {store.ErrFull, false},
}

// P6, P7: an outcome that came while the store was away is recorded when it is back, under its own claim and with what
// its commit carried, once. Until then it is in doubt at its member, and runs for the others.
func TestOutcomeIsRecordedWhenTheStoreIsBack(t *testing.T) {
	for name, c := range failures {
		for _, size := range []int{0, 100, 600_000} {
			for verdict, want := range map[execution.Verdict]execution.Status{
				execution.Completed: execution.Replayable, execution.Released: execution.Free, execution.InDoubt: execution.Doubtful,
			} {
				t.Run(fmt.Sprint(name, "/", size, "/", verdict), func(t *testing.T) {
					lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
						call, o, body := a.call("a"), &owner{name: "a"}, bytes.Repeat([]byte("0123456789"), size/10)
						a.loses(call, st, c.why, c.lands, o, verdict, body)
						if !c.lands {
							<-time.After(away)
							b.status(call, execution.RunningElsewhere)
						}
						st.set(nil, false)
						<-time.After(2 * time.Second)
						for _, n := range []*node{a, b} {
							found := n.status(call, want)
							switch {
							case want == execution.Replayable && !bytes.Equal(n.body(call), body):
								t.Error("the answer is another one")
							case want == execution.Doubtful && found.Record.Cause != execution.CauseLost:
								t.Errorf("the cause is %s", found.Record.Cause)
							}
						}
						if _, err := b.mem.Get(ctx, o.key()); err != nil {
							t.Errorf("what the commit carried: %v", err)
						}
						if n, _, err := b.Doubts(ctx); err != nil || (n == 1) != (want == execution.Doubtful) {
							t.Errorf("%d doubts, %v", n, err)
						}
						pieces := len(b.pieces())
						// One of which it was never said that it is there is left to its expiry.
						if kept := want == execution.Replayable && size > 512; !c.lands && kept != (pieces > 0) {
							t.Errorf("%d pieces", pieces)
						}
						o.mu.Lock()
						tried := o.again
						o.mu.Unlock()
						<-time.After(time.Minute)
						if o.again != tried {
							t.Error("it is tried after its end")
						}
					})
				})
			}
		}
	}
}

// A commit whose end is unknown may come after the one that repeats it. Then it changes nothing.
func TestUnknownCommitComesAfterItsRepetition(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
		call, o := a.call("a"), &owner{name: "a"}
		a.loses(call, st, store.ErrUnknown, false, o, execution.Completed, []byte("once"))
		st.mu.Lock()
		held := st.held[len(st.held)-1]
		st.mu.Unlock()
		st.set(nil, false)
		<-time.After(2 * time.Second)
		version := b.entry(call)
		lost := (*store.Conflict)(nil)
		if _, err := st.Member.Commit(ctx, held...); !errors.As(err, &lost) || lost.Index != 0 {
			t.Errorf("the first commit: %v", err)
		}
		if string(b.body(call)) != "once" || b.entry(call) != version {
			t.Error("it has changed the record")
		}
	})
}

// entry is the version of the record.
func (n *node) entry(c *execution.Call) store.Version {
	n.t.Helper()
	entry, err := n.mem.Get(ctx, append([]byte{'x'}, c.Key[:]...))
	if err != nil {
		n.t.Fatal(err)
	}
	return entry.Version
}

// Whoever settles the execution before has the last word.
func TestOutcomeComesAfterItsExecutionWasSettled(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
		call, o := a.call("a"), &owner{name: "a"}
		a.loses(call, st, store.ErrUnavailable, false, o, execution.Completed, []byte("late"))
		o.hook = func() { // a probe is faster than the commit
			head := &execution.Head{Status: 200}
			if err := a.SettleDoubt(ctx, execution.Recorded{Key: call.Key, Finding: a.status(call, execution.Doubtful)}, execution.Resolution{By: execution.ByProbe, Applied: true, Answer: head, Body: []byte("probed")}); err != nil {
				t.Error(err)
			}
		}
		st.set(nil, false)
		<-time.After(10 * time.Second)
		if got := string(b.body(call)); got != "probed" {
			t.Errorf("the record has %q", got)
		}
		if _, err := b.mem.Get(ctx, o.key()); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("what the commit carried: %v", err)
		}
	})
}

// A retry at the member that has the outcome waits for its record, and does not find the doubt in between.
func TestRetryFindsAnOutcomeThatWaits(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, _ *node, st *leaving) {
		call, o := a.call("a"), &owner{name: "a"}
		a.loses(call, st, store.ErrUnavailable, false, o, execution.Completed, []byte("late"))
		<-time.After(away + 500*time.Millisecond) // between two rounds
		st.set(nil, false)
		begun := time.Now()
		a.status(call, execution.Replayable)
		if waited := time.Since(begun); waited != 0 {
			t.Errorf("it waited for %v", waited)
		}
	})
}

// A call whose outcome waits, too, does not wait for that of its earlier attempt, which is tried at this moment.
func TestOutcomeDoesNotWaitForThatOfAnEarlierAttempt(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
		call, first, second := a.call("a"), &owner{name: "a"}, &owner{name: "b"}
		a.loses(call, st, store.ErrUnavailable, false, first, execution.Completed, []byte("first"))
		trying, hang := make(chan struct{}), make(chan struct{})
		var once sync.Once
		first.hook = func() { // from here on its commit takes long
			once.Do(func() {
				close(trying)
				<-hang
			})
		}
		st.set(nil, false)
		<-trying
		found := a.status(call, execution.Doubtful)
		e, err := a.Claim(ctx, call, found)
		if err != nil {
			t.Fatal(err)
		}
		st.set(store.ErrUnavailable, false)
		begun := time.Now()
		go func() {
			<-time.After(7 * time.Second)
			close(hang)
		}()
		if err := e.SettleWith(ctx, answered(e, []byte("second")), second); !errors.Is(err, execution.ErrUnrecorded) {
			t.Fatal(err)
		}
		if waited := time.Since(begun); waited != 0 {
			t.Errorf("it waited for %v", waited)
		}
		<-time.After(away)
		st.set(nil, false)
		<-time.After(2 * time.Second)
		if got := string(b.body(call)); got != "second" {
			t.Errorf("the record has %q", got)
		}
	})
}

// A listing does not wait for outcomes that wait: a store that is full can be read, and has many of them.
func TestListingOfOutcomesThatWait(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, _ *node, st *leaving) {
		for i := range 3 {
			o := &owner{name: fmt.Sprint(i)}
			a.loses(a.call(o.name), st, store.ErrFull, false, o, execution.Completed, []byte("late"))
			st.set(nil, false)
		}
		st.set(store.ErrFull, false)
		begun := time.Now()
		page, err := a.List(ctx, execution.Filter{States: []execution.State{execution.StateInDoubt}}, "", 10)
		if err != nil || len(page.Executions) != 3 {
			t.Errorf("%d are listed, %v", len(page.Executions), err)
		}
		if waited := time.Since(begun); waited != 0 {
			t.Errorf("it waited for %v", waited)
		}
	})
}

// What cannot be recorded with what it carries is recorded without.
func TestOutcomeWhoseEvidenceIsThereAlready(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
		call, o := a.call("a"), &owner{name: "a"}
		b.write(store.Write{Key: o.key()})
		a.loses(call, st, store.ErrUnavailable, false, o, execution.Completed, []byte("late"))
		st.set(nil, false)
		<-time.After(2 * time.Second)
		if got := string(b.body(call)); got != "late" {
			t.Errorf("the record has %q", got)
		}
	})
}

// A store that is away is asked by one, however many outcomes wait. Those beyond the bound are recorded as in doubt.
func TestOutcomesThatWaitAreBounded(t *testing.T) {
	t.Run("their number", func(t *testing.T) {
		lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
			const most, more = 2048, 20
			owners := make([]owner, most+more)
			open := make([]*execution.Execution, len(owners))
			for i := range owners {
				owners[i].name, owners[i].size = fmt.Sprint(i), 32<<10-int64(len("late"))
				open[i] = a.claim(a.call(owners[i].name))
			}
			st.set(store.ErrUnavailable, false)
			for i, e := range open {
				if err := e.SettleWith(ctx, answered(e, []byte("late")), &owners[i]); !errors.Is(err, execution.ErrUnrecorded) {
					t.Fatal(err)
				}
			}
			st.set(store.ErrUnavailable, false)
			<-time.After(away)
			st.mu.Lock()
			asked := st.asked
			st.mu.Unlock()
			if seconds := int(away / time.Second); asked > 4*seconds {
				t.Errorf("the store was asked %d times in %d s", asked, seconds)
			}
			st.set(nil, false)
			<-time.After(3 * time.Second)
			for i := range owners {
				want := execution.Replayable
				if i >= most {
					want = execution.Doubtful
				}
				for _, n := range []*node{a, b} {
					n.status(n.call(owners[i].name), want)
				}
			}
			if n, _, err := b.Doubts(ctx); n != more || err != nil {
				t.Errorf("%d doubts, %v", n, err)
			}
			synctest.Wait() // or what was told is still being written
			if a.recovered.InDoubt != more || !a.recovered.Own {
				t.Errorf("told as %+v", a.recovered)
			}
		})
	})
	t.Run("with their answers", func(t *testing.T) {
		lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
			a.BodyMemory().SetLimit(1 << 30)
			owners := []owner{{name: "0", size: 62 << 20}, {name: "1", size: 1 << 20}, {name: "2"}, {name: "3", size: 64 << 20}}
			answers := []int{1_500_000, 1_500_000, 100_000, 0}
			var open []*execution.Execution
			for i := range owners {
				open = append(open, a.claim(a.call(owners[i].name)))
			}
			st.set(store.ErrUnavailable, false)
			for i, e := range open {
				if err := e.SettleWith(ctx, answered(e, make([]byte, answers[i])), &owners[i]); !errors.Is(err, execution.ErrUnrecorded) {
					t.Fatal(err)
				}
			}
			st.set(nil, false)
			<-time.After(2 * time.Second)
			for i, want := range []execution.Status{execution.Replayable, execution.Doubtful, execution.Replayable, execution.Doubtful} {
				b.status(b.call(owners[i].name), want)
			}
			if used := a.BodyMemory().Used(); used != 0 {
				t.Errorf("%d bytes of answers are left", used)
			}
		})
	})
}

// What is open and nobody has an outcome of is recorded as in doubt: where the outcome is too large to be held, where
// the store refuses it for another reason, and where it was never said whether a claim has landed.
func TestWhatNobodyHasAnOutcomeOfIsInDoubt(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
		large, refused, claimed := a.call("large"), a.call("refused"), a.call("claimed")
		e := a.claim(large)
		e.Write(make([]byte, 600_000), false)
		synctest.Wait()
		st.set(store.ErrUnavailable, false)
		if err := e.SettleWith(ctx, answered(e, nil), &owner{name: "large", size: 65 << 20}); !errors.Is(err, execution.ErrUnrecorded) {
			t.Fatal(err)
		}
		st.set(nil, false)
		e = a.claim(refused)
		st.set(errDisk, false)
		if err := e.SettleWith(ctx, answered(e, nil), new(owner)); !errors.Is(err, execution.ErrUnrecorded) {
			t.Fatal(err)
		}
		st.set(nil, false)
		found := a.status(claimed, execution.Free)
		st.set(store.ErrUnknown, true)
		if _, err := a.Claim(ctx, claimed, found); !errors.Is(err, store.ErrUnknown) {
			t.Fatal(err)
		}
		st.set(nil, false)
		running := a.call("running")
		a.claim(running)
		b.status(large, execution.RunningElsewhere)
		<-time.After(2 * time.Second)
		for _, c := range []*execution.Call{large, refused, claimed} {
			if found := b.status(c, execution.Doubtful); found.Record.Cause != execution.CauseUnrecorded {
				t.Errorf("the cause is %s", found.Record.Cause)
			}
		}
		if n, _, err := b.Doubts(ctx); n != 3 || err != nil {
			t.Errorf("%d doubts, %v", n, err)
		}
		if n := len(b.pieces()); n != 0 {
			t.Errorf("%d pieces are left", n)
		}
		a.status(running, execution.RunningHere)
	})
}

// A gateway that ends while an outcome waits leaves the doubt to whoever finds it.
func TestGatewayEndsWhileAnOutcomeWaits(t *testing.T) {
	lateFleet(t, func(t *testing.T, a, b *node, st *leaving) {
		call, o := a.call("a"), &owner{name: "a"}
		a.loses(call, st, store.ErrUnavailable, false, o, execution.Completed, []byte("late"))
		_ = a.Close(ctx) // its store is away
		st.set(nil, false)
		st.Remove()
		<-time.After(2 * time.Second)
		b.status(call, execution.Doubtful)
	})
}

// Quotas count an outcome that waits as a doubt, and what becomes of it as that.
func TestQuotaOfOutcomesThatWait(t *testing.T) {
	for name, c := range failures {
		t.Run(name, func(t *testing.T) {
			lateFleet(t, func(t *testing.T, a, _ *node, st *leaving) {
				quota := execution.Quota{Open: 2}
				call := func(id string) *execution.Call {
					c := a.call(id)
					c.Quota = quota
					return c
				}
				admits := func(id string, want bool) *execution.Execution {
					t.Helper()
					c := call(id)
					e, err := a.Claim(ctx, c, a.find(c))
					if over := (*execution.QuotaError)(nil); errors.As(err, &over) == want {
						t.Fatalf("%s: %v", id, err)
					}
					return e
				}
				a.loses(call("done"), st, c.why, c.lands, &owner{name: "done"}, execution.Completed, []byte("late"))
				st.set(nil, false)
				<-time.After(2 * time.Second)
				a.loses(call("doubt"), st, c.why, c.lands, &owner{name: "doubt"}, execution.InDoubt, nil)
				st.set(nil, false)
				if !c.lands {
					e := admits("while it waits", true)
					admits("one more", false)
					a.settle(e, answered(e, nil))
				}
				<-time.After(2 * time.Second)
				e := admits("beside the doubt", true)
				admits("too many", false)
				a.settle(e, answered(e, nil))
				admits("again", true)
			})
		})
	}
}

// The pieces of an answer are being stored when the call ends. The race detector sees where the two share something.
func TestOutcomeThatWaitsBesideItsPieces(t *testing.T) {
	r, f := newFailing(t)
	defer func() { _ = r.Close(ctx) }()
	f.fails(func(batch []store.Write) error {
		if batch[0].Bulk {
			return store.ErrFull
		}
		return nil
	})
	for i := range 50 {
		e := r.claim(r.call(fmt.Sprint(i)))
		e.Recording().Start(200, nil)
		for range 4 {
			e.Write(make([]byte, 256<<10), false)
		}
		if err := e.SettleWith(ctx, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true}, &owner{name: "a"}); err != nil {
			t.Fatal(err)
		}
	}
}

// The same at a gateway that has its store alone.
func TestQuotaOfAnOutcomeThatWaitsAtOneGateway(t *testing.T) {
	for _, why := range []error{store.ErrUnavailable, store.ErrFull} {
		synctest.Test(t, func(t *testing.T) {
			r, f := newFailing(t)
			defer func() { _ = r.Close(ctx) }()
			call := func(id string) *execution.Call {
				c := r.call(id)
				c.Quota = execution.Quota{Open: 1}
				return c
			}
			e := r.claim(call("a"))
			f.fails(func([]store.Write) error { return why })
			if err := e.SettleWith(ctx, answered(e, []byte("late")), &owner{name: "a"}); !errors.Is(err, execution.ErrUnrecorded) {
				t.Fatal(err)
			}
			f.fails(nil)
			if _, err := r.Claim(ctx, call("b"), execution.Finding{}); !errors.As(err, new(*execution.QuotaError)) {
				t.Errorf("while it waits: %v", err)
			}
			<-time.After(2 * time.Second)
			e, err := r.Claim(ctx, call("b"), execution.Finding{})
			if err != nil {
				t.Fatalf("once it is recorded: %v", err)
			}
			r.settle(e, answered(e, nil))
		})
	}
}

// A member that is removed while an outcome is pending, or before it comes, settles the doubt that others have recorded,
// once it is back: an answer is evidence.
func TestMemberIsRemovedBeforeItsOutcomeIsRecorded(t *testing.T) {
	for _, pending := range []bool{true, false} {
		for _, verdict := range []execution.Verdict{execution.Completed, execution.Released, execution.InDoubt} {
			bubble(t, func(t *testing.T, f *fleet) {
				m := f.mem.Join("a")
				st := &leaving{Member: m}
				a, b := f.open(m, st), f.join("b")
				call, o := a.call(verdict.String()), &owner{name: verdict.String()}
				why := store.ErrUnavailable
				if !pending {
					why = store.ErrUnhealthy // as its commits get from now on
				}
				a.loses(call, st, why, false, o, verdict, []byte("late"))
				<-time.After(away)
				m.Remove()
				st.set(nil, false)
				synctest.Wait()
				if found := b.status(call, execution.Doubtful); found.Record.Cause != execution.CauseDied {
					t.Errorf("the cause is %s", found.Record.Cause)
				}
				<-time.After(2 * time.Second)
				fenced, again := a.Fenced(), f.join("a")
				none := func(*execution.Record, *execution.Resolution) *store.Batch { return nil }
				for range 2 { // it changes nothing more
					for i := range fenced {
						if err := again.SettleFenced(ctx, &fenced[i], none); err != nil {
							t.Fatal(err)
						}
					}
				}
				switch verdict {
				case execution.InDoubt:
					b.status(call, execution.Doubtful)
				case execution.Released:
					b.status(call, execution.Free)
				default:
					if got := string(b.body(call)); got != "late" {
						t.Errorf("the record has %q", got)
					}
				}
			})
		}
	}
}
