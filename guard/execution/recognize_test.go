package execution

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// alike is a node whose calls are all equal, and have no key.
type alike struct {
	*testing.T
	mem   *memory.Store
	reads *reads // of mem
	ring  *seal.Ring
	g     *Guard
	n     int
	fast  atomic.Int64  // by how much the store's clock is
	room  int64         // for executions in memory; 0 leaves it
	asks  *atomic.Int64 // how often it was asked whether a client has left; nil where nobody counts
}

func newAlike(t *testing.T) *alike {
	b := &alike{T: t, ring: seal.Generate()}
	b.mem = memory.New(memory.Options{Now: func() time.Time {
		return time.Now().Add(time.Duration(b.fast.Load()))
	}})
	b.start()
	return b
}

func (b *alike) start() {
	b.Helper()
	b.reads = &reads{Store: b.mem}
	g, _, err := Open(context.Background(), b.reads, b.ring)
	if err != nil {
		b.Fatal(err)
	}
	if b.room > 0 {
		g.groups.room = b.room
	}
	b.g = g
}

// full is a store that writes nothing.
type full struct{ store.Store }

func (full) Commit(context.Context, ...store.Write) (store.Version, error) {
	return 0, store.ErrFull
}

// kill ends the process: nothing is written any more. Another one begins.
func (b *alike) kill() {
	b.g.groups.flushing <- struct{}{}
	b.g.groups.closed = true
	b.g.groups.flushing.leave()
	b.start()
}

// stop ends the process in order.
func (b *alike) stop() {
	b.Helper()
	if err := b.g.Close(context.Background()); err != nil {
		b.Fatal(err)
	}
	b.start()
}

// one is a call under test.
type one struct {
	*Attempt
	b     *alike
	leave func()
	call  *Call
	run   *Execution // nil for a retry that found the execution
}

const (
	testWindow = 10 * time.Minute
	longBefore = crashEvidence + 2*markEvery // a crash, which is no evidence for it then
)

// call makes a call, and claims it where it has to run.
func (b *alike) call(count int) *one {
	b.Helper()
	b.n++
	return b.make(fmt.Sprint("id-", b.n), false, count)
}

// keyed makes a call with a key of its caller's.
func (b *alike) keyed(id string) *one { return b.make(id, true, 0) }

func (b *alike) make(id string, given bool, count int) *one {
	b.Helper()
	gone, leave := context.WithCancel(context.Background())
	if b.asks != nil {
		gone = watched{gone, b.asks}
	}
	scope := Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/", ID: id}
	a, err := b.g.Recognize(context.Background(), Question{
		Scope: scope, Fingerprint: body.Fingerprint{1}, Whole: body.Fingerprint{1}, Given: given, NewID: func() string { return id }, Count: count, Window: testWindow, Gone: gone,
	})
	if err != nil {
		b.Fatal(err)
	}
	scope.ID = a.ID
	o := &one{Attempt: a, b: b, leave: leave, call: &Call{
		Key: a.Key, Fingerprint: body.Fingerprint{1}, Scope: scope, KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 1 << 20, Attempt: a,
	}}
	for {
		found, err := b.g.LookUp(context.Background(), a.Key, body.Fingerprint{1})
		if err == nil && found.Status == Free {
			o.run, err = b.g.Claim(context.Background(), o.call, found)
		}
		switch {
		case err == nil:
			return o
		case !errors.Is(err, ErrTaken): // else its retry was first
			b.Fatal(err)
		}
	}
}

func (o *one) settle(v Verdict, status int) *one {
	o.run.Recording().Start(status, nil)
	if err := o.run.Settle(context.Background(), Outcome{Verdict: v, Status: status, Whole: v != InDoubt}); err != nil {
		o.b.Fatal(err)
	}
	return o
}

func (o *one) answer(status int) *one {
	o.Answering(status, false)
	o.End()
	return o
}

// lost is a call whose client leaves when it has been executed.
func (o *one) lost() *one {
	o.leave()
	o.answer(200)
	return o
}

// is compares what the call was recognised as: nil is a new call.
func (o *one) is(of *one, why Evidence) *one {
	o.b.Helper()
	if of == nil && (o.Evidence != "" || o.run == nil) {
		o.b.Errorf("recognised as %s by %q, want a new call", o.ID, o.Evidence)
	}
	if of != nil && (o.ID != of.ID || o.Evidence != why) {
		o.b.Errorf("recognised as %q by %q, want %s by %q", o.ID, o.Evidence, of.ID, why)
	}
	return o
}

// dead is a context that has ended.
func (b *alike) dead() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func TestRecognize(t *testing.T) {
	for name, test := range map[string]func(b *alike){
		"both answered": func(b *alike) {
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
		},
		"both wait": func(b *alike) {
			b.call(0)
			begin := time.Now()
			b.call(0).is(nil, "")
			if took := time.Since(begin); took != retryWait {
				b.Errorf("the second one has waited for %v", took)
			}
		},
		"left while it runs": func(b *alike) {
			a := b.call(0)
			a.leave()
			begin := time.Now()
			r := b.call(0).is(a, evidenceUnanswered)
			if took := time.Since(begin); took != 0 {
				b.Errorf("the retry has waited for %v", took)
			}
			a.settle(Completed, 200).lost()
			r.answer(200)
			b.call(0).is(nil, "")
		},
		"the news comes after the retry": func(b *alike) {
			a := b.call(0)
			time.AfterFunc(20*time.Millisecond, a.leave)
			b.call(0).is(a, evidenceUnanswered)
		},
		"the first is answered while another one waits for its leave": func(b *alike) {
			a := b.call(0)
			time.AfterFunc(10*time.Millisecond, func() { a.settle(Completed, 200).answer(200) })
			begin := time.Now()
			b.call(0).is(nil, "")
			if took := time.Since(begin); took != 10*time.Millisecond {
				b.Errorf("the second one has waited for %v", took)
			}
		},
		"three leave while three wait": func(b *alike) {
			three := []*one{b.call(0), b.call(0), b.call(0)}
			time.AfterFunc(10*time.Millisecond, func() {
				for _, o := range three {
					o.leave()
				}
			})
			begin := time.Now()
			var all sync.WaitGroup
			var taken sync.Map
			for i := range three {
				all.Go(func() {
					o := b.make(fmt.Sprint("retry-", i), false, 0)
					if _, twice := taken.LoadOrStore(o.ID, true); twice || o.Evidence != evidenceUnanswered {
						b.Errorf("%s by %q", o.ID, o.Evidence)
					}
				})
			}
			all.Wait()
			if took := time.Since(begin); took != 10*time.Millisecond {
				b.Errorf("they have waited for %v", took)
			}
		},
		"in doubt while three wait": func(b *alike) {
			a := b.call(0)
			time.AfterFunc(10*time.Millisecond, func() { a.settle(InDoubt, 502) })
			begin := time.Now()
			var all sync.WaitGroup
			for i := range 3 {
				all.Go(func() { b.make(fmt.Sprint("retry-", i), false, 0).is(a, evidenceInDoubt) })
			}
			all.Wait()
			if took := time.Since(begin); took != 10*time.Millisecond {
				b.Errorf("they have waited for %v", took)
			}
		},
		"one that waits leaves when it could be told": func(b *alike) {
			for i := range 20 { // it is up to the scheduler which it sees first
				a := b.call(0)
				ctx, leave := context.WithCancel(context.Background())
				both := []func(){a.leave, leave}
				time.AfterFunc(10*time.Millisecond, func() {
					both[i%2]()
					both[1-i%2]()
				})
				var all sync.WaitGroup
				all.Go(func() {
					q := Question{NewID: func() string { return "leaves" }, Window: testWindow, Gone: ctx}
					q.Scope, q.Whole = Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/"}, body.Fingerprint{1}
					if left, err := b.g.Recognize(ctx, q); err == nil {
						left.End()
					}
				})
				synctest.Wait()
				begin := time.Now()
				b.call(0).is(a, evidenceUnanswered).answer(200)
				if took := time.Since(begin); took > 10*time.Millisecond {
					b.Fatalf("the other one has waited for %v", took)
				}
				all.Wait()
				a.settle(Completed, 200).End()
			}
		},
		"three have left": func(b *alike) {
			var all []string
			three := []*one{b.call(0), b.call(0), b.call(0)}
			for _, o := range three {
				o.leave()
			}
			for range three {
				o := b.call(0)
				if o.Evidence != evidenceUnanswered || slices.Contains(all, o.ID) {
					b.Errorf("%s by %q, after %v", o.ID, o.Evidence, all)
				}
				all = append(all, o.ID)
			}
			b.call(0).is(nil, "")
		},
		"a retry that has left too": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			b.call(0).is(a, evidenceUnanswered).lost()
			b.call(0).is(a, evidenceUnanswered).answer(200)
			b.call(0).is(nil, "")
		},
		"the end could not be written": func(b *alike) {
			a := b.call(0).settle(Completed, 200)
			a.Answering(200, false)
			a.Unanswered()
			a.End()
			b.call(0).is(a, evidenceUnanswered)
		},
		"closed at once": func(b *alike) {
			a := b.call(0).settle(Completed, 200)
			a.Answering(200, false)
			a.leave()
			b.call(0).is(nil, "")
			a.End()
		},
		"an answer that clients retry": func(b *alike) {
			a := b.call(0).settle(Completed, 500)
			a.Answering(500, false) // and the retry is there before it has ended
			r := b.call(0).is(a, evidenceAnswer)
			a.End()
			r.answer(500)
			b.call(0).is(a, evidenceAnswer).answer(500)
			<-time.After(testWindow)
			b.call(0).is(nil, "")
		},
		"an internal error in an answer": func(b *alike) { // ADR 0070: also after a crash
			o := b.call(0)
			o.run.Recording().Start(200, nil)
			if err := o.run.Settle(context.Background(), Outcome{Verdict: Completed, Status: 200, Whole: true, Internal: true}); err != nil {
				b.Fatal(err)
			}
			o.answer(200)
			b.call(0).is(o, evidenceAnswer).answer(200)
			<-time.After(time.Minute)
			b.kill()
			b.call(0).is(o, evidenceAnswer).answer(200)
			<-time.After(testWindow)
			b.call(0).is(nil, "")
		},
		"in doubt": func(b *alike) {
			a := b.call(0).settle(InDoubt, 502)
			a.End()
			for range 3 { // any number at a time
				b.call(0).is(a, evidenceInDoubt)
			}
			<-time.After(testWindow - 1)
			b.call(0).is(a, evidenceInDoubt).End()
		},
		"three in doubt": func(b *alike) { // each may be settled by a probe of its own
			three := []*one{b.call(0), b.call(0), b.call(0)}
			for _, o := range three {
				o.settle(InDoubt, 502).End()
			}
			taken := map[string]bool{}
			for range three {
				taken[b.call(0).ID] = true
			}
			if len(taken) != len(three) {
				b.Errorf("three retries were recognised as %v", taken)
			}
			if o := b.call(0); o.Evidence != evidenceInDoubt {
				b.Errorf("a fourth one was recognised by %q", o.Evidence)
			}
		},
		"in doubt, later": func(b *alike) {
			b.call(0).settle(InDoubt, 502).End()
			<-time.After(testWindow)
			b.call(0).is(nil, "")
		},
		"released": func(b *alike) {
			b.call(0).settle(Released, 529).answer(529)
			b.call(1).is(nil, "").settle(Completed, 200).answer(200)
			b.call(0).is(nil, "")
		},
		"stated": func(b *alike) {
			a := b.call(0).settle(Completed, 200).answer(200)
			b.call(1).is(a, evidenceStated).answer(200)
			b.call(0).is(nil, "")
		},
		"stated while the first one waits": func(b *alike) {
			a := b.call(0)
			b.call(1).is(a, evidenceStated)
			other := b.call(1).is(nil, "") // of another one, which has never come
			b.call(2).is(other, evidenceStated)
		},
		"the youngest attempt decides": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(1)
			b.call(0).settle(Released, 529).answer(529)
			b.call(1).is(nil, "").settle(Completed, 200).answer(200)
			<-time.After(1)
			b.call(0).settle(Released, 529).answer(529)
			<-time.After(1)
			c := b.call(0).settle(Completed, 200).answer(200)
			b.call(1).is(c, evidenceStated)
		},
		"attempts have numbers": func(b *alike) {
			first := b.call(0).settle(Completed, 200).lost()
			second := b.call(1).is(first, evidenceUnanswered).lost()
			other := b.call(0).is(second, evidenceUnanswered).lost()
			fresh := b.call(0).is(other, evidenceUnanswered)
			b.call(2).is(fresh, evidenceStated)
		},
		"a window counts from the end": func(b *alike) {
			a := b.call(0)
			a.leave()
			<-time.After(3 * testWindow)
			r := b.call(0).is(a, evidenceUnanswered)
			r.leave()
			r.End()
			<-time.After(3 * testWindow)
			b.call(0).is(a, evidenceUnanswered).lost()
			a.settle(Completed, 200).lost()
			<-time.After(testWindow - 1)
			b.call(0).is(a, evidenceUnanswered).lost()
			<-time.After(testWindow)
			b.call(0).is(nil, "")
		},
		"refused before its claim": func(b *alike) {
			gone := context.Background()
			a, err := b.g.Recognize(gone, Question{NewID: func() string { return "" }, Window: testWindow, Gone: gone})
			if err != nil {
				b.Fatal(err)
			}
			a.End()
			if n := b.g.groups.n.Load(); n != 0 {
				b.Errorf("%d are known", n)
			}
		},
		"killed after an answer": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(longBefore)
			late := b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			b.kill()
			<-time.After(time.Second)
			b.call(0).is(late, evidenceUnanswered).answer(200)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			if r := b.call(1); r.Evidence != evidenceStated {
				b.Errorf("%q", r.Evidence)
			}
		},
		"a refusal whose retry is in doubt": func(b *alike) {
			b.call(0).settle(Released, 529).answer(529)
			<-time.After(1)
			doubt := b.call(1).is(nil, "").settle(InDoubt, 502)
			doubt.End()
			<-time.After(1)
			b.call(0).is(doubt, evidenceInDoubt).End()
			b.call(1).is(doubt, evidenceInDoubt).End()
			b.kill()
			b.call(1).is(doubt, evidenceInDoubt)
		},
		"a refusal before a doubt": func(b *alike) {
			b.call(0).settle(Released, 529).answer(529)
			<-time.After(1)
			doubt := b.call(0).is(nil, "").settle(InDoubt, 502)
			doubt.End()
			b.call(1).is(doubt, evidenceInDoubt)
		},
		"refused while another one waits": func(b *alike) {
			a := b.call(0)
			b.call(0).is(nil, "")
			a.settle(Released, 529).answer(529)
			last := b.call(1).is(nil, "")
			b.call(2).is(last, evidenceStated)
		},
		"a refusal whose retry was refused before its claim": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(1)
			b.call(0).settle(Released, 529).answer(529)
			ctx := context.Background()
			scope := Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/", ID: "refused"}
			a, err := b.g.Recognize(ctx, Question{Scope: scope, Fingerprint: body.Fingerprint{1}, Whole: body.Fingerprint{1}, NewID: func() string { return "refused" }, Count: 1, Window: testWindow, Gone: ctx})
			if err != nil || a.refused == nil {
				b.Fatal(a, err)
			}
			a.End()
			b.call(1).is(nil, "")
		},
		"unsent, and its retry leaves before it runs it": func(b *alike) {
			a := b.call(0)
			a.leave()
			r := b.call(0).is(a, evidenceUnanswered)
			if err := a.run.Settle(context.Background(), Outcome{Verdict: Released, Cause: CauseNotSent}); err != nil {
				b.Fatal(err)
			}
			a.End()
			r.leave()
			b.call(0).is(a, evidenceUnanswered) // so that one of the two claims the key
		},
		"a doubt that was settled, and answered": func(b *alike) {
			a := b.call(0).settle(InDoubt, 502)
			a.End()
			found, err := b.g.Get(context.Background(), a.Key)
			if err == nil {
				err = b.g.SettleDoubt(context.Background(), found, Resolution{By: ByOperator, Applied: true, Operator: "o", Reason: "r", Answer: &Head{Status: 200}})
			}
			if err != nil {
				b.Fatal(err)
			}
			r := b.call(0).is(a, evidenceInDoubt)
			r.Completed(context.Background())
			r.answer(200)
			<-time.After(longBefore)
			b.kill()
			b.call(0).is(nil, "")
		},
		"a doubt that is settled after its window": func(b *alike) {
			for _, asks := range []bool{false, true} {
				a := b.call(0).settle(InDoubt, 502)
				a.End()
				<-time.After(testWindow)
				if asks {
					b.call(0).is(nil, "").settle(Completed, 200).answer(200)
				}
				found, err := b.g.Get(context.Background(), a.Key)
				if err == nil {
					err = b.g.SettleDoubt(context.Background(), found, Resolution{By: ByOperator, Applied: true, Operator: "o", Reason: "r", Answer: &Head{Status: 200}})
				}
				if err != nil {
					b.Fatal(err)
				}
				b.call(1).is(a, evidenceUnanswered).answer(200)
			}
			b.call(0).is(nil, "")
		},
		"a doubt whose client may get its answer elsewhere": func(b *alike) {
			a := b.call(0)
			if err := a.run.Settle(context.Background(), Outcome{Verdict: InDoubt, Status: 200, Cause: CauseElsewhere}); err != nil {
				b.Fatal(err)
			}
			a.lost()
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			<-time.After(longBefore)
			b.kill()
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			<-time.After(longBefore)
			found, err := b.g.Get(context.Background(), a.Key)
			if err == nil {
				err = b.g.SettleDoubt(context.Background(), found, Resolution{By: ByAnswer, Applied: true, Answer: &Head{Status: 200}})
			}
			if err != nil {
				b.Fatal(err)
			}
			b.kill() // right after it, too
			b.call(0).is(nil, "")
		},
		"memory is full": func(b *alike) {
			t := &b.g.groups
			lost := b.call(0)
			a := b.call(0)
			lost.settle(Completed, 200).lost()
			if err := a.run.Settle(b.dead(), Outcome{Verdict: InDoubt}); err == nil {
				b.Fatal("it was recorded")
			}
			a.End()
			q := Question{Window: testWindow, Gone: context.Background()}
			other := &Attempt{at: t, group: a.group, window: testWindow, gone: q.Gone}
			var v view
			if err := t.view(context.Background(), other, &q, &v); err != nil {
				b.Fatal(err)
			}
			v.asked = true // of the store, before it was forgotten
			<-time.After(longBefore)
			t.n.Add(mostKnown)
			t.shrink()
			if next := t.decide(other, &q, &v); next != viewAnew {
				b.Error("decided by what was forgotten")
			}
			b.call(0).is(lost, evidenceUnanswered) // which a row says
			b.call(0).is(a, evidenceInDoubt)       // which none says
		},
		"in doubt, and the store is full": func(b *alike) {
			a := b.call(0)
			g, recovery, err := Open(context.Background(), full{b.mem}, b.ring)
			if err != nil || recovery.Unrecorded != 1 {
				b.Fatal(recovery, err)
			}
			b.g = g
			b.call(0).is(a, evidenceInDoubt)
		},
		"the clock was set back": func(b *alike) {
			b.fast.Store(int64(time.Hour))
			a := b.call(0).settle(Completed, 200).answer(200)
			<-time.After(longBefore)
			late := b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			b.fast.Store(0)
			b.kill()
			if r := b.call(0); r.ID != late.ID || r.Evidence != evidenceUnanswered {
				b.Errorf("%q, after %s and %s: %q", r.ID, a.ID, late.ID, r.Evidence)
			}
		},
		"killed twice": func(b *alike) {
			late := b.call(0).settle(Completed, 200).answer(200)
			b.kill()
			b.call(7) // makes it write its marks
			<-time.After(longBefore)
			b.kill()
			if o := b.call(0); o.Evidence == "" {
				b.Errorf("%s is new, after %s", o.ID, late.ID)
			}
		},
		"killed while it runs": func(b *alike) {
			a := b.call(0)
			b.kill()
			b.call(0).is(a, evidenceInDoubt)
		},
		"killed long after a client has left": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			b.call(0).is(a, evidenceUnanswered).lost()
			<-time.After(time.Minute)
			b.kill()
			b.call(0).is(a, evidenceUnanswered).answer(200)
			<-time.After(time.Minute)
			b.kill()
			b.call(0).is(nil, "")
		},
		"killed while a client reads slowly": func(b *alike) {
			a := b.call(0).settle(Completed, 200)
			<-time.After(time.Minute)
			b.kill()
			b.call(0).is(a, evidenceUnanswered)
		},
		"killed after a refusal": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(5 * time.Second)
			b.call(0).settle(Released, 529).answer(529)
			b.kill()
			b.call(1).is(nil, "")
		},
		"stopped": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			slow := b.call(0).settle(Completed, 200)
			<-time.After(1)
			b.stop()
			<-time.After(1)
			b.call(0).is(slow, evidenceUnanswered)
		},
		"stopped after an answer": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(1)
			b.stop()
			b.call(0).is(nil, "")
		},
		"a failure that clients retry, after a restart": func(b *alike) {
			a := b.call(0).settle(Completed, 500).answer(500)
			<-time.After(time.Minute)
			b.kill()
			b.call(0).is(a, evidenceAnswer)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(newAlike(t)) })
		})
	}
}

// Keys that are advisory (ADR 0070): a new one is looked up by evidence, a known one is its caller's
// word.
func TestRecognizeNewKeys(t *testing.T) {
	repeats := func(o, of *one) *one {
		o.b.Helper()
		if o.Evidence != "" || o.ID != of.ID || o.run != nil {
			o.b.Errorf("%s by %q, want %s by its key", o.ID, o.Evidence, of.ID)
		}
		return o
	}
	for name, test := range map[string]func(b *alike){
		"its first attempt was lost": func(b *alike) {
			a := b.keyed("a").is(nil, "").settle(Completed, 200).lost()
			b.keyed("b").is(a, evidenceUnanswered).answer(200)
			b.keyed("c").is(nil, "").settle(Completed, 200).answer(200)
			b.keyed("b").is(a, evidenceKey).answer(200) // and none of what has come since
		},
		"answered under its key meanwhile": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).lost()
			repeats(b.keyed("a"), a).answer(200)
			b.keyed("b").is(nil, "")
		},
		"answered under its key after a restart": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).lost()
			<-time.After(longBefore)
			b.kill()
			<-time.After(1)
			repeats(b.keyed("a"), a).answer(200)
			b.keyed("b").is(nil, "").settle(Completed, 200).answer(200)
			<-time.After(longBefore)
			b.kill()
			b.keyed("c").is(nil, "")
		},
		"lost again under its key": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).answer(200)
			repeats(b.keyed("a"), a).lost()
			b.keyed("b").is(a, evidenceUnanswered)
		},
		"all answered": func(b *alike) {
			b.keyed("a").settle(Completed, 200).answer(200)
			b.keyed("b").is(nil, "")
		},
		"among calls without a key": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).lost()
			b.call(0).is(a, evidenceUnanswered).answer(200)
			c := b.call(0).is(nil, "").settle(Completed, 200).lost()
			b.keyed("b").is(c, evidenceUnanswered)
		},
		"in doubt": func(b *alike) {
			a := b.keyed("a").settle(InDoubt, 502)
			a.End()
			b.keyed("b").is(a, evidenceInDoubt).End()
			b.kill()
			<-time.After(testWindow)
			b.keyed("c").is(nil, "").settle(Completed, 200).answer(200)
			b.keyed("b").is(a, evidenceKey) // a key has no window
		},
		"three new keys at a time": func(b *alike) {
			three := []*one{b.keyed("a"), b.keyed("b"), b.keyed("c")}
			for _, o := range three {
				o.settle(Completed, 200).lost()
			}
			for i := range three { // the youngest first
				b.keyed(fmt.Sprint("new-", i)).is(three[len(three)-1-i], evidenceUnanswered)
			}
			b.keyed("d").is(nil, "")
		},
		"one new key twice at a time": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).lost()
			b.keyed("b").is(a, evidenceUnanswered)
			b.keyed("b").is(a, evidenceKey)
		},
		"killed after it was recognised": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).lost()
			b.keyed("b").is(a, evidenceUnanswered).answer(200)
			<-time.After(longBefore)
			b.kill()
			<-time.After(testWindow)
			b.keyed("b").is(a, evidenceKey)
			b.keyed("c").is(nil, "")
		},
		"the store is full when it is recognised": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).lost()
			b.g.store = full{b.mem}
			gone := context.Background()
			scope := Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/", ID: "b"}
			if _, err := b.g.Recognize(gone, Question{Scope: scope, Fingerprint: body.Fingerprint{1}, Whole: body.Fingerprint{1}, Given: true, Window: testWindow, Gone: gone}); !errors.Is(err, ErrStore) {
				b.Fatal(err) // else it would be answered by what a crash forgets
			}
			b.g.store = b.mem
			b.keyed("b").is(a, evidenceUnanswered)
		},
		"refused": func(b *alike) {
			b.keyed("a").settle(Released, 529).answer(529)
			b.keyed("a").is(nil, "").settle(Released, 529).answer(529)
			b.keyed("b").is(nil, "").settle(Completed, 200).answer(200)
			b.keyed("a").is(nil, "")
		},
		"of another content": func(b *alike) {
			a := b.keyed("a").settle(Completed, 200).lost()
			b.keyed("b").is(a, evidenceUnanswered).lost()
			ctx := context.Background()
			for _, id := range []string{"a", "b"} { // which the record of a refuses
				scope := Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/", ID: id}
				other, err := b.g.Recognize(ctx, Question{Scope: scope, Fingerprint: body.Fingerprint{2}, Whole: body.Fingerprint{2}, Given: true, Window: testWindow, Gone: ctx})
				if err != nil || other.Key != a.Key {
					b.Fatal(other, err)
				}
				other.End()
			}
			b.keyed("c").is(a, evidenceUnanswered)
		},
		"as long as the execution's record": func(b *alike) {
			done := b.keyed("a").settle(Completed, 200).lost()
			b.keyed("b").is(done, evidenceUnanswered).answer(200)
			running := b.keyed("c").is(nil, "")
			running.leave()
			r := b.keyed("d").is(running, evidenceUnanswered)
			running.settle(Completed, 200)
			r.answer(200)
			<-time.After(2 * markEvery)
			for _, id := range []string{"b", "d"} {
				scope := Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/", ID: id}
				entry, err := b.mem.Get(context.Background(), aliasKey(b.g.Key(scope)))
				if err != nil || entry.Expires.Sub(time.Now().Add(time.Hour)).Abs() > 3*time.Second {
					b.Errorf("%s until %v: %v", id, entry.Expires, err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(newAlike(t)) })
		})
	}
}

// reader asks for the answer of an execution by another request (ADR 0091).
func (o *one) reader(ctx context.Context) *Reader {
	o.b.Helper()
	found, err := o.b.g.Get(context.Background(), o.Key)
	if err != nil {
		o.b.Fatal(err)
	}
	return o.b.g.Reader(ctx, &found)
}

// A caller that has read the answer of a call has got it, unless a client of a call waits for it.
func TestReader(t *testing.T) {
	for name, test := range map[string]func(b *alike){
		"when its client had left": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			a.reader(context.Background()).Answering(200, false)
			b.call(0).is(nil, "")
		},
		"over a restart": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			<-time.After(longBefore)
			b.kill()
			a.reader(context.Background()).Answering(200, false)
			<-time.After(longBefore)
			b.kill()
			b.call(0).is(nil, "")
		},
		"while it runs without a client": func(b *alike) {
			a := b.call(0)
			a.leave()
			r := a.reader(context.Background())
			a.settle(Completed, 200)
			r.Answering(200, false)
			a.Answering(200, false)
			a.Unanswered()
			a.End()
			b.call(0).is(nil, "")
		},
		"while its client waits, and leaves then": func(b *alike) {
			a := b.call(0).settle(Completed, 200)
			a.reader(context.Background()).Answering(200, false)
			a.lost()
			b.call(0).is(a, evidenceUnanswered)
		},
		"and a retry is lost then": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			r := a.reader(context.Background())
			b.call(0).is(a, evidenceUnanswered).lost()
			r.Answering(200, false)
			b.call(1).is(a, evidenceStated).lost()
			b.call(0).is(a, evidenceUnanswered)
		},
		"not, as the write fails": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			r := a.reader(context.Background())
			r.Answering(200, false)
			r.Unanswered()
			b.call(0).is(a, evidenceUnanswered)
		},
		"once more after a retry, as the first write fails": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			r := a.reader(context.Background())
			r.Answering(200, false)
			b.call(1).is(a, evidenceStated).lost()
			a.reader(context.Background()).Answering(200, false)
			r.Unanswered()
			b.call(0).is(nil, "")
		},
		"not, as its own client has left": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			a.reader(b.dead()).Answering(200, false)
			b.call(0).is(a, evidenceUnanswered)
		},
		"a failure that clients retry": func(b *alike) {
			a := b.call(0).settle(Completed, 500).lost()
			a.reader(context.Background()).Answering(500, false)
			b.call(0).is(a, evidenceAnswer)
		},
		"of a call that nobody recognises": func(b *alike) {
			a := b.call(0).settle(Completed, 200).lost()
			found, err := b.g.Get(context.Background(), a.Key)
			if err != nil {
				b.Fatal(err)
			}
			found.Record.Group = groupHash{}
			if r := b.g.Reader(context.Background(), &found); r != nil {
				b.Error("it has a reader")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(newAlike(t)) })
		})
	}
}

// Thousands of equal refusals cost the calls that equal them no more than a few.
func TestRecognizeAfterManyRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newAlike(t)
		for range 10 * mostAlike {
			b.call(0).settle(Released, 529).answer(529)
		}
		<-time.After(longBefore)
		rows := 0
		for _, err := range b.mem.Scan(context.Background(), store.Prefix([]byte{spaceGroup})) {
			if rows++; err != nil {
				t.Fatal(err)
			}
		}
		if n := b.g.groups.n.Load(); n != mostAlike || rows != mostAlike {
			t.Errorf("%d are known, %d have a row, want %d", n, rows, mostAlike)
		}
		b.call(1).is(nil, "").settle(Completed, 200).answer(200) // of the youngest
	})
}

// A crash is evidence for what had ended in the two seconds before it, whatever marks were written meanwhile, and
// for what ended before them it is none. An end in order is none for anything.
func TestCrashIsEvidenceForTwoSeconds(t *testing.T) {
	for name, test := range map[string]func(b *alike){
		"two seconds before": func(b *alike) {
			first := b.call(0).settle(Completed, 200).answer(200)
			<-time.After(crashEvidence - time.Millisecond)
			b.kill()
			b.call(0).is(first, evidenceUnanswered).answer(200)
			b.call(0).is(nil, "")
		},
		"marks of another call were written in between": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(markEvery - time.Millisecond)
			first := b.call(0).settle(Completed, 200).answer(200)
			<-time.After(2 * time.Millisecond)
			b.kill()
			b.call(0).is(first, evidenceUnanswered)
		},
		"longer before": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(crashEvidence + markEvery + time.Millisecond)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			<-time.After(crashEvidence + 2*markEvery + time.Millisecond)
			b.kill()
			b.call(0).is(nil, "")
		},
		"an end in order": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(time.Millisecond)
			b.stop()
			b.call(0).is(nil, "")
		},
		"an end in order, and a crash after it": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(time.Millisecond)
			b.stop()
			<-time.After(time.Millisecond)
			lost := b.call(0).is(nil, "").settle(Completed, 200).lost()
			<-time.After(markEvery + time.Millisecond) // and marks are written
			b.kill()
			b.call(0).is(lost, evidenceUnanswered).answer(200)
			b.call(0).is(nil, "")
		},
		"two crashes": func(b *alike) {
			first := b.call(0).settle(Completed, 200).answer(200)
			<-time.After(crashEvidence - time.Millisecond)
			b.kill()
			<-time.After(time.Millisecond)
			b.kill()
			b.call(0).is(first, evidenceUnanswered)
		},
		"the clock was set back since the start": func(b *alike) {
			b.fast.Store(int64(time.Hour))
			b.stop()
			b.fast.Store(0)
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(markEvery - time.Millisecond)
			first := b.call(0).settle(Completed, 200).answer(200)
			<-time.After(2 * time.Millisecond)
			b.kill()
			b.call(0).is(first, evidenceUnanswered)
		},
		"longer before, and a moment of it without the store": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(markEvery + time.Millisecond)
			with := func(st store.Store) {
				b.g.groups.flushing <- struct{}{}
				defer b.g.groups.flushing.leave()
				b.g.store = st
			}
			with(full{b.reads})
			<-time.After(crashEvidence)
			with(b.reads)
			<-time.After(crashEvidence + 2*markEvery)
			b.kill()
			b.call(0).is(nil, "")
		},
		"an end in order, while marks were to be written": func(b *alike) {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(time.Millisecond)
			for _, last := range []bool{true, false} {
				if err := b.g.groups.flush(context.Background(), last); err != nil {
					b.Fatal(err)
				}
			}
			b.start()
			b.call(0).is(nil, "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(newAlike(t)) })
		})
	}
}

// A model of recognition: callers with intended calls, all equal, that are answered, lose their
// answers, retry or give up; some are refused, some end in doubt, and the process is killed. No more
// is executed than was intended, and no call that is not a retry is taken for one of a call that was
// answered.
func TestRecognitionModel(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 70))
			b := newAlike(t)
			if seed%4 < 2 {
				b.room = 1 // every execution that can be is forgotten once a second
			}
			b.start()
			intended, executed := 0, 0
			unlearned := map[string]bool{} // executions whose last attempt was not answered
			stated := seed%2 == 0          // retries say that they are
			var running []*one
			counts := map[*one]int{}
			var retries []int // the counts of the attempts to come
			for range 300 {
				switch n := random.IntN(20); {
				case n < 7 || n < 12 && len(retries) > 0:
					count := 0
					if n >= 7 {
						count, retries = retries[0], retries[1:]
					} else {
						intended++
					}
					said := 0
					if stated {
						said = count
					}
					o := b.call(said)
					if o.run != nil {
						executed++
					} else if said == 0 && !unlearned[o.ID] {
						t.Fatalf("seed %d: a call was taken for a retry of %s (%s), which was answered: %+v", seed, o.ID, o.Evidence, o.known)
					}
					if o.Evidence == evidenceInDoubt { // it is refused
						o.End()
						continue
					}
					unlearned[o.ID] = false
					counts[o] = count
					running = append(running, o)
				case n < 19 && len(running) > 0:
					i := random.IntN(len(running))
					o := running[i]
					running = slices.Delete(running, i, i+1)
					lost := random.IntN(3) == 0
					if lost {
						o.leave()
						unlearned[o.ID] = true
					}
					switch end := random.IntN(10); {
					case o.run != nil && end == 0:
						o.settle(Released, 529).answer(529)
						executed-- // it was not
						retries = append(retries, counts[o]+1)
						continue
					case o.run != nil:
						o.settle(Completed, 200)
					}
					o.answer(200)
					if lost && random.IntN(4) > 0 {
						retries = append(retries, counts[o]+1)
					}
				case n == 19 && seed%3 == 0:
					for _, o := range running {
						unlearned[o.ID] = true
						retries = append(retries, counts[o]+1)
					}
					running = nil
					for id := range unlearned {
						unlearned[id] = true // or it was, in the last seconds
					}
					b.kill()
				}
				if executed > intended {
					t.Fatalf("seed %d: %d were executed, %d intended", seed, executed, intended)
				}
				<-time.After(time.Duration(random.IntN(400)) * time.Millisecond)
			}
		})
	}
}

// fits says of which execution a call with this count is a retry by looking at each (ADR 0070).
func fits(all []*known, count int, now time.Time) (best *known) {
	rank := -1
	evidence := func(k *known) Evidence {
		if e := k.evidence(); e != evidenceAnswer || now.Sub(k.ended) < testWindow || k.runner != nil {
			return e
		}
		return ""
	}
	other := func(k *known) bool { // it was answered, and so was its own retry of this count
		waits := k.holder != nil && k.holder.waits()
		return evidence(k) == "" && !waits && !k.refused() && k.count >= count
	}
	var youngest *known // that may have been executed, and that nobody waits for
	for _, k := range all {
		if !k.refused() && (k.holder == nil || !k.holder.waits()) && !k.over(now) && !other(k) && (youngest == nil || k.younger(youngest)) {
			youngest = k
		}
	}
	for _, k := range all {
		e := evidence(k)
		free := k.holder == nil || !k.holder.waits() || k.state == StateInDoubt || k.count < count
		if k.over(now) || !free || k.taken || other(k) || count == 0 && e == "" {
			continue
		}
		r := 0
		if count > 0 && k.count == count-1 {
			r += 8
		}
		if e != "" || k.refused() && (youngest == nil || k.younger(youngest)) {
			r += 4
		}
		if k.state != StateInDoubt {
			r += 2
		} else if k.holder == nil || !k.holder.waits() {
			r++
		}
		if r > rank || r == rank && k.younger(best) {
			best, rank = k, r
		}
	}
	return best
}

// P1: of the executions of a group a call takes the one that fits best: too old ones are none, and what was answered is
// none for a retry whose count was answered too.
func TestChoice(t *testing.T) {
	now := time.Now()
	left, leave := context.WithCancel(context.Background())
	leave()
	chosen := 0
	for seed := range uint64(5000) {
		random := rand.New(rand.NewPCG(seed, 91))
		tab := &groups{g: &Guard{}}
		tab.armed.Store(true) // nothing is written
		s := &tab.shards[0]
		var all []*known
		for i := range random.IntN(12) {
			ended := now.Add(-time.Duration(random.Int64N(int64(testWindow * 5 / 4))))
			k := &known{
				key: Key{byte(i)}, window: testWindow, count: random.IntN(3), ended: ended,
				began: ended.Add(-time.Duration(random.IntN(int(testWindow)))), state: StateCompleted,
			}
			switch random.IntN(8) {
			case 0:
				k.state = StateInDoubt
			case 1:
				k.released = true
			case 2:
				k.unanswered = true
			case 3:
				k.retriable = true
			case 4:
				k.state = StateSending
				k.runner = &Attempt{}
			}
			if random.IntN(3) == 0 || k.runner != nil {
				k.holder = &Attempt{at: tab, known: k, answered: random.IntN(2) == 0, gone: []context.Context{left, context.Background()}[random.IntN(2)]}
			}
			k.taken = k.refused() && random.IntN(3) == 0
			all = append(all, k)
			tab.add(s, k)
		}
		a := &Attempt{at: tab, count: random.IntN(4)}
		want := fits(all, a.count, now)
		g := s.group(a.group)
		tab.expire(s, g, now, testWindow)
		got := g.choose(a)
		if got != want {
			t.Fatalf("seed %d: a call with count %d is the retry of %+v, want %+v", seed, a.count, got, want)
		}
		if got != nil {
			chosen++
		}
	}
	if chosen < 1000 {
		t.Errorf("only %d calls were a retry", chosen)
	}
}

// reads counts what is asked of a store.
type reads struct {
	store.Store
	scans, gets atomic.Int64
	before      func() // a read of one entry; nil for nothing
}

func (r *reads) Scan(ctx context.Context, of store.Range) iter.Seq2[store.Entry, error] {
	r.scans.Add(1)
	return r.Store.Scan(ctx, of)
}

func (r *reads) Get(ctx context.Context, key []byte) (store.Entry, error) {
	r.gets.Add(1)
	if r.before != nil {
		r.before()
	}
	return r.Store.Get(ctx, key)
}

// asked counts what recognition reads of the store for a call.
func (b *alike) asked(call func()) (scans, gets int64) {
	b.reads.scans.Store(0)
	b.reads.gets.Store(0)
	call()
	return b.reads.scans.Load(), b.reads.gets.Load()
}

// recognize makes a call that ends before it is claimed.
func (b *alike) recognize(path string, count int) *Attempt {
	b.Helper()
	b.n++
	a, err := b.g.Recognize(context.Background(), Question{
		Scope: Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: path}, Fingerprint: body.Fingerprint{1}, Whole: body.Fingerprint{1},
		NewID: func() string { return fmt.Sprint("id-", b.n) }, Count: count, Window: testWindow, Gone: context.Background(),
	})
	if err != nil {
		b.Fatal(err)
	}
	a.End()
	return a
}

// A group of equal calls is bounded: what was only answered is forgotten, in memory and in the store, before what has
// evidence, and a call for which there is no room is new, as is its retry. No call that was meant is swallowed for that.
func TestGroupsAreBounded(t *testing.T) {
	rows := func(b *alike) (n int) {
		for _, err := range b.mem.Scan(context.Background(), store.Prefix([]byte{spaceGroup})) {
			if n++; err != nil {
				b.Fatal(err)
			}
		}
		return n
	}
	for name, test := range map[string]func(b *alike){
		"evidence stays": func(b *alike) {
			lost := b.call(0)
			for range 2 * mostAlike {
				b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			}
			lost.settle(Completed, 200).lost()
			<-time.After(longBefore)
			if n := rows(b); n > mostAlike {
				b.Errorf("%d rows, want %d at most", n, mostAlike)
			}
			b.call(0).is(lost, evidenceUnanswered).answer(200)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
		},
		"evidence stays over a kill": func(b *alike) {
			lost := b.call(0)
			for range 2 * mostAlike {
				b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			}
			lost.settle(Completed, 200).lost()
			<-time.After(longBefore)
			b.kill()
			b.call(0).is(lost, evidenceUnanswered).answer(200)
			b.call(0).is(nil, "")
		},
		"no room": func(b *alike) {
			var running []*one
			for range mostAlike + 8 {
				running = append(running, b.call(0).is(nil, ""))
			}
			for _, o := range running {
				o.settle(Completed, 200).lost()
			}
			ran := 0
			for range running {
				if o := b.call(0); o.run != nil {
					ran++
					o.settle(Completed, 200).answer(200)
				} else {
					o.answer(200)
				}
			}
			if ran != 8 {
				b.Errorf("%d retries ran, want 8", ran)
			}
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			<-time.After(longBefore)
			if n := rows(b); n > mostAlike {
				b.Errorf("%d rows, want %d at most", n, mostAlike)
			}
			b.kill()
			b.call(0).is(nil, "") // what had no room has left nothing
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(newAlike(t)) })
		})
	}
}

// P1: rows that have outlived their records do not hide another answered call.
func TestRetriesBehindRowsWithoutRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newAlike(t)
		b.room = 1
		b.start()
		var all []*one
		for range 12 {
			all = append(all, b.call(0).settle(Completed, 200).answer(200))
			<-time.After(time.Millisecond)
		}
		<-time.After(longBefore)
		for _, o := range all[1:11] {
			if _, err := b.mem.Commit(context.Background(), store.Write{Key: recordKey(o.Key), Delete: true}); err != nil {
				t.Fatal(err)
			}
		}
		b.call(1).is(all[11], evidenceStated)
		b.call(1).is(all[0], evidenceStated)
		b.call(1).is(nil, "")
	})
}

// P1: after a restart all of a group is read, since any of it may have evidence.
func TestManyAnsweredCallsAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newAlike(t)
		for range 8 {
			b.call(0).settle(Completed, 200).answer(200)
		}
		lost := b.call(0).settle(Completed, 200).lost()
		<-time.After(time.Minute)
		b.stop()
		b.call(0).is(lost, evidenceUnanswered)
	})
}

// P1: what another retry has taken, between the reading of it and the choice, is not all that there is.
func TestRetriesTakeFromEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newAlike(t)
		b.room = 1
		b.start()
		for range 4 {
			b.call(0).settle(Completed, 200).answer(200)
			<-time.After(time.Millisecond)
		}
		<-time.After(longBefore)
		b.call(1)
		var first, second *one
		b.reads.before = func() {
			b.reads.before = nil
			first = b.call(1)
		}
		second = b.call(1)
		if first == nil || first.Evidence != evidenceStated || second.Evidence != evidenceStated || first.ID == second.ID {
			t.Errorf("%+v and %+v", first, second)
		}
	})
}

// A store that no process has used before is not scanned: memory has everything. After a restart it is once for
// each group of which it has rows, until the window is over.
func TestScansOfTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newAlike(t)
		expect := func(when, path string, count int, want int64) {
			t.Helper()
			if scans, gets := b.asked(func() { b.recognize(path, count) }); scans != want || want == 0 && gets != 0 {
				t.Errorf("%s: %d scans and %d reads, want %d scans", when, scans, gets, want)
			}
		}
		expect("a new store", "/", 0, 0)
		first := b.call(0).settle(Completed, 200).answer(200)
		expect("a retry that says so", "/", 1, 0)
		<-time.After(longBefore)
		b.kill()
		expect("another group after a restart", "/other", 0, 0)
		expect("a retry of another group", "/other", 1, 0)
		expect("the group of a row", "/", 0, 1)
		expect("the group of a row, once more", "/", 0, 0)
		expect("a retry that says so, after a restart", "/", 1, 0)
		if a := b.recognize("/", 1); a.ID != first.ID {
			t.Errorf("%s is not %s", a.ID, first.ID)
		}
		b.kill()
		<-time.After(testWindow)
		expect("after the window", "/", 0, 0)
		expect("a retry after the window", "/", 1, 0)
	})
}

// More rows than are looked at when the store is opened: of the groups behind them any may have some.
func TestRowsThatAreNotLookedAt(t *testing.T) {
	e := earlier{groups: []uint64{1, 5}, upTo: 5}
	for at, want := range map[byte]bool{0: false, 1: true, 4: false, 5: true, 6: true} {
		if got := e.has(groupHash{7: at}); got != want {
			t.Errorf("%d: %t", at, got)
		}
	}
}

// watched is a context of a client, which counts how often it is asked.
type watched struct {
	context.Context
	asked *atomic.Int64
}

func (w watched) Err() error {
	w.asked.Add(1)
	return w.Context.Err()
}

func (w watched) AfterFunc(f func()) (stop func() bool) {
	w.asked.Add(1)
	return context.AfterFunc(w.Context, f)
}

// What a call costs is bounded, however many equal it: while all run at once, and once they have ended.
func TestManyEqualCalls(t *testing.T) {
	for name, test := range map[string]struct {
		count int // of half of them
		each  func(o *one)
	}{
		"that are answered": {0, func(o *one) { o.settle(Completed, 200).answer(200) }},
		"that are lost":     {0, func(o *one) { o.settle(Completed, 200).lost() }},
		"of retries":        {1, func(o *one) { o.settle(Completed, 200).answer(200) }},
	} {
		t.Run(name, func(t *testing.T) {
			each := func(n int) (perCall float64) {
				synctest.Test(t, func(t *testing.T) {
					b := newAlike(t)
					b.asks = new(atomic.Int64)
					var all sync.WaitGroup
					for i := range n {
						all.Go(func() {
							o := b.make(fmt.Sprint("id-", i), false, i%2*test.count)
							<-time.After(time.Duration(i%100) * time.Millisecond)
							if o.run != nil {
								test.each(o)
							} else {
								o.answer(200)
							}
						})
					}
					all.Wait()
					if scans, gets := b.asked(func() { b.recognize("/", 0) }); scans+gets > 0 {
						t.Errorf("%d scans, %d reads", scans, gets)
					}
					perCall = float64(b.asks.Load()) / float64(n)
				})
				return perCall
			}
			if n := each(800); n > 320 { // ten for each that it may be a retry of
				t.Errorf("a call asks for the clients of its equals %.1f times among 800", n)
			}
		})
	}
}

// indexing counts the keyed hashes that are computed.
type indexing struct {
	store.Sealer
	n int
}

func (s *indexing) Index(domain string, parts ...string) [32]byte {
	s.n++
	return s.Sealer.Index(domain, parts...)
}

// P3: the hash of a group that is remembered is that of its whole name, whatever other groups have its place. One that
// was asked for a moment ago is not computed again.
func TestHashesOfGroups(t *testing.T) {
	sealer := &indexing{Sealer: seal.Generate()}
	h := hashes{seed: maphash.MakeSeed()}
	random := rand.New(rand.NewPCG(1, 1))
	words := []string{"", "a", "aa", "b", "\x01a", strings.Repeat("a", 150)}
	word := func() string { return words[random.IntN(len(words))] }
	for range 20_000 {
		q := Question{
			Scope: Scope{Caller: word(), Tenant: word(), Guard: word(), Method: word(), Path: word()}, Peer: word(), Whole: body.Fingerprint{31: byte(random.IntN(3))},
		}
		sum := sealer.Index("group", q.Scope.Caller, q.Scope.Tenant, q.Scope.Guard, q.Scope.Method, q.Scope.Path, q.Peer, string(q.Whole[:]))
		if got := h.of(sealer, &q); got != groupHash(sum[:]) {
			t.Fatalf("the hash of %+v is that of another group", q)
		}
		computed := sealer.n
		short := len(q.Scope.Caller)+len(q.Scope.Tenant)+len(q.Scope.Guard)+len(q.Scope.Method)+len(q.Scope.Path)+len(q.Peer) < 400
		if got := h.of(sealer, &q); got != groupHash(sum[:]) || short && sealer.n != computed {
			t.Fatalf("the hash of %+v is another one, or was computed again", q)
		}
	}
}
