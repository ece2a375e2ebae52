package execution

import (
	"context"
	"errors"
	"fmt"
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

// twin is a member whose calls equal those of the others.
type twin struct {
	*alike
	member *memory.Member
	unsure *atomic.Bool // the next entry of a group that it writes has an unknown outcome
}

// twins runs a test with two of them.
func twins(t *testing.T, test func(a, b *twin)) {
	synctest.Test(t, func(t *testing.T) {
		mem, ring := memory.New(memory.Options{}), seal.Generate()
		test(joinTwin(t, mem, ring, "a"), joinTwin(t, mem, ring, "b"))
	})
}

func joinTwin(t *testing.T, mem *memory.Store, ring *seal.Ring, name string) *twin {
	t.Helper()
	n := &twin{&alike{T: t, mem: mem, ring: ring, n: 1000 * int(name[0])}, mem.Join(name), new(atomic.Bool)}
	g, _, err := Open(context.Background(), lateAnswers{n.member, n.unsure}, ring)
	if err != nil {
		t.Fatal(err)
	}
	n.g = g
	t.Cleanup(func() { _ = g.Close(context.Background()) }) // one that was removed cannot write
	return n
}

// lateAnswers is a store in which what members say of each other's questions comes a moment after it was found out.
type lateAnswers struct {
	*memory.Member
	unsure *atomic.Bool
}

func (l lateAnswers) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if batch[0].Key[0] == spaceLive && batch[0].Key[1] == kindSays {
		<-time.After(time.Millisecond)
	}
	v, err := l.Member.Commit(ctx, batch...)
	if key := batch[0].Key; err == nil && key[0] == spaceLive && key[1] == kindGroup && l.unsure.Swap(false) {
		return 0, store.ErrUnknown
	}
	return v, err
}

// die ends a member without order.
func (n *twin) die() { n.member.Remove() }

// attached waits like a client of a retry whose execution runs: it gets the answer with this status.
func (o *one) attached(status int) *one {
	o.Answering(status, false)
	o.End()
	return o
}

// P1: what a retry finds by evidence does not depend on the node that it comes to, nor does what is meant anew.
func TestRetriesAtAnotherNode(t *testing.T) {
	for name, test := range map[string]func(a, b *twin){
		"answered: the next is meant": func(a, b *twin) {
			a.call(0).settle(Completed, 200).answer(200)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			a.call(0).is(nil, "")
		},
		"answered a moment ago, and its mark is not written": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			first.answer(200)
			b.call(0).is(nil, "")
		},
		"its client has left": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).lost()
			b.call(0).is(first, evidenceUnanswered).attached(200)
			a.call(0).is(nil, "")
		},
		"its client leaves while it runs": func(a, b *twin) {
			first := a.call(0)
			first.leave()
			retry := b.call(0).is(first, evidenceUnanswered)
			first.settle(Completed, 200).answer(200)
			retry.attached(200)
			a.call(0).is(nil, "")
			b.call(0).is(nil, "")
		},
		"its client waits, and leaves after its retry has come": func(a, b *twin) {
			first := a.call(0)
			time.AfterFunc(10*time.Millisecond, first.leave)
			b.call(0).is(first, evidenceUnanswered)
		},
		"its client waits": func(a, b *twin) {
			first := a.call(0)
			second := b.call(0).is(nil, "")
			first.settle(Completed, 200).answer(200)
			second.settle(Completed, 200).answer(200)
		},
		"in doubt": func(a, b *twin) {
			first := a.call(0).settle(InDoubt, 0).answer(500)
			b.call(0).is(first, evidenceInDoubt)
		},
		"a status that clients retry": func(a, b *twin) {
			first := a.call(0).settle(Completed, 500).answer(500)
			b.call(0).is(first, evidenceAnswer)
		},
		"refused: the next runs": func(a, b *twin) {
			a.call(0).settle(Released, 429).answer(429)
			second := b.call(0).is(nil, "").settle(Completed, 200).lost()
			a.call(0).is(second, evidenceUnanswered)
		},
		"it says that it is a retry": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).answer(200)
			b.call(1).is(first, evidenceStated)
		},
		"a retry at another node has left, too": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).lost()
			b.call(0).is(first, evidenceUnanswered).lost()
			a.call(0).is(first, evidenceUnanswered).attached(200)
			b.call(0).is(nil, "")
		},
		"a retry at its own node has left, and one at another node was answered": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).lost()
			a.call(0).is(first, evidenceUnanswered).lost()
			<-time.After(3 * time.Second)
			b.call(0).is(first, evidenceUnanswered).attached(200)
			<-time.After(3 * time.Second)
			b.call(0).is(nil, "")
		},
		"a retry at another node waits": func(a, b *twin) {
			first := a.call(0)
			first.leave()
			retry := b.call(0).is(first, evidenceUnanswered)
			a.call(0).is(nil, "")
			retry.leave()
			a.call(0).is(first, evidenceUnanswered)
		},
		"after the window": func(a, b *twin) {
			a.call(0).settle(Completed, 200).lost()
			<-time.After(testWindow + time.Second)
			b.call(0).is(nil, "")
		},
	} {
		t.Run(name, func(t *testing.T) { twins(t, test) })
	}
}

// A crash of a node is evidence for what it ran, and for what had ended in the two seconds before; an end in order is
// not. What its marks say holds.
func TestRetriesOfAGoneNode(t *testing.T) {
	for name, test := range map[string]func(a, b *twin){
		"it ran": func(a, b *twin) {
			first := a.call(0)
			a.die()
			b.call(0).is(first, evidenceInDoubt)
		},
		"it was answered just now": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).answer(200)
			a.die()
			b.call(0).is(first, evidenceUnanswered).attached(200)
			b.call(0).is(nil, "")
		},
		"it was answered two seconds ago": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).answer(200)
			<-time.After(crashEvidence - time.Millisecond)
			a.die()
			b.call(0).is(first, evidenceUnanswered)
		},
		"it was answered a while ago": func(a, b *twin) {
			a.call(0).settle(Completed, 200).answer(200)
			<-time.After(crashEvidence + markEvery + time.Millisecond)
			a.die()
			b.call(0).is(nil, "")
		},
		"it was not answered a while ago": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).lost()
			<-time.After(3 * time.Second)
			a.die()
			b.call(0).is(first, evidenceUnanswered)
		},
		"it has ended in order": func(a, b *twin) {
			a.call(0).settle(Completed, 200).answer(200)
			if err := a.g.Close(context.Background()); err != nil {
				t.Fatal(err)
			}
			a.die()
			b.call(0).is(nil, "")
		},
		"it had taken another node's": func(a, b *twin) {
			first := b.call(0).settle(Completed, 200).lost()
			a.call(0).is(first, evidenceUnanswered)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			a.die()
			b.call(0).is(first, evidenceUnanswered)
		},
	} {
		t.Run(name, func(t *testing.T) { twins(t, test) })
	}
}

// P1: of equal retries that come to all nodes at once, each takes another execution, and those that are too many are
// new calls.
func TestRetriesAtAllNodesAtOnce(t *testing.T) {
	twins(t, func(a, b *twin) {
		const earlier, retries = 3, 8
		var before []*one
		for i := range earlier {
			before = append(before, []*twin{a, b}[i%2].call(0).is(nil, ""))
		}
		for _, o := range before {
			o.settle(Completed, 200).lost()
		}
		var all sync.WaitGroup
		var fresh atomic.Int64
		var of sync.Map
		for i := range retries {
			n := []*twin{a, b}[i%2]
			id := fmt.Sprint("retry ", i)
			all.Go(func() {
				o := n.make(id, false, 0)
				if o.Evidence == "" {
					fresh.Add(1)
				} else if other, taken := of.LoadOrStore(o.ID, id); taken {
					t.Errorf("%s is taken by %v and by %s", o.ID, other, id)
				}
			})
		}
		all.Wait()
		if fresh.Load() != retries-earlier {
			t.Errorf("%d of %d are new, of %d earlier calls", fresh.Load(), retries, earlier)
		}
	})
}

// A retry of which nobody knows whether it has taken its execution ends with an error. One that comes later takes it,
// whichever node has run it, and only one.
func TestRetriesAfterATakeOfUnknownOutcome(t *testing.T) {
	for _, here := range []bool{true, false} { // ran where the attempt failed
		for _, again := range []bool{true, false} { // where it failed
			t.Run(fmt.Sprintf("ran here %v, again here %v", here, again), func(t *testing.T) {
				twins(t, func(a, b *twin) {
					runs, next := a, a
					if !here {
						runs = b
					}
					if !again {
						next = b
					}
					first := runs.call(0).settle(Completed, 200).lost()
					<-time.After(3 * time.Second)
					a.unsure.Store(true)
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					defer cancel()
					q := Question{
						Scope: Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/"}, Fingerprint: body.Fingerprint{1},
						Whole: body.Fingerprint{1}, NewID: func() string { return "retry" }, Window: testWindow, Gone: ctx,
					}
					if _, err := a.g.Recognize(ctx, q); !errors.Is(err, ErrStore) {
						t.Fatal(err)
					}
					<-time.After(3 * time.Second)
					r, err := next.g.Recognize(ctx, q)
					if err != nil || r.ID != first.ID || r.Evidence != evidenceUnanswered {
						t.Fatalf("%+v, %v", r, err)
					}
					for _, n := range []*twin{a, b} { // it is taken
						n.call(0).is(nil, "").settle(Completed, 200).answer(200)
					}
					r.Answering(200, false)
					r.End()
					for _, n := range []*twin{a, b} { // and answered
						n.call(0).is(nil, "").settle(Completed, 200).answer(200)
					}
				})
			})
		}
	}
}

// settleDoubt settles the doubt that a call has ended in: it was applied.
func (n *twin) settleDoubt(of *one) {
	n.Helper()
	found, err := n.g.Get(context.Background(), of.Key)
	if err == nil {
		err = n.g.SettleDoubt(context.Background(), found, Resolution{By: ByOperator, Applied: true, Operator: "o", Reason: "r", Answer: &Head{Status: 200}})
	}
	if err != nil {
		n.Fatal(err)
	}
}

// P1: once the client of a retry has the answer of a doubt that was settled, the next call is meant, whichever nodes have
// run it, settled it and answered it. Before that, and where the client has left, it is a retry.
func TestRetriesOfASettledDoubt(t *testing.T) {
	for i := range 8 {
		at := func(bit int, a, b *twin) *twin { return []*twin{a, b}[i>>bit&1] }
		name := func(bit int) string { return string("ab"[i>>bit&1]) }
		t.Run(fmt.Sprintf("settled at %s, retried at %s, called at %s", name(0), name(1), name(2)), func(t *testing.T) {
			for _, late := range []time.Duration{0, 3 * time.Second} {
				for _, during := range []bool{false, true} {
					twins(t, func(a, b *twin) {
						settles, retries, calls := at(0, a, b), at(1, a, b), at(2, a, b)
						first := a.call(0).settle(InDoubt, 502)
						first.End()
						var r *one
						if during {
							r = retries.call(0).is(first, evidenceInDoubt)
						}
						settles.settleDoubt(first)
						if !during {
							if r = retries.call(0); r.ID != first.ID {
								t.Fatalf("%+v", r)
							}
						}
						r.Completed(context.Background())
						r.lost()
						<-time.After(late)
						again := calls.call(0)
						if again.ID != first.ID {
							t.Fatalf("late %v, during %v: its client has left, and the next runs", late, during)
						}
						again.Completed(context.Background())
						again.answer(200)
						<-time.After(late)
						for _, n := range []*twin{calls, a, b} {
							meant := n.call(0)
							if meant.run == nil {
								t.Fatalf("late %v, during %v: %s by %q", late, during, meant.ID, meant.Evidence)
							}
							meant.settle(Completed, 200).answer(200)
							<-time.After(late)
						}
						last := calls.call(1)
						if last.Evidence != evidenceStated {
							t.Errorf("%+v", last)
						}
					})
				}
			}
		})
	}
}

// An answer of a doubt says nothing of it once it is settled: a retry finds it.
func TestRetriesOfADoubtThatWasTakenWhileItRan(t *testing.T) {
	for i := range 8 {
		twins(t, func(a, b *twin) {
			first := a.call(0)
			first.leave()
			r := b.call(0).is(first, evidenceUnanswered)
			first.settle(InDoubt, 0).answer(502)
			r.answer(502)
			<-time.After(time.Duration(i&1) * 3 * time.Second)
			[]*twin{a, b}[i>>1&1].settleDoubt(first)
			if again := []*twin{a, b}[i>>2&1].call(0); again.ID != first.ID {
				t.Errorf("%d: it runs again", i)
			}
		})
	}
}
