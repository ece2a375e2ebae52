package execution

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// twin is a member whose calls equal those of the others.
type twin struct {
	*alike
	member *overtaken
}

// overtaken is a member whose next commit comes behind what before does.
type overtaken struct {
	*memory.Member
	before func()
}

func (m *overtaken) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if before := m.before; before != nil {
		m.before = nil
		before()
	}
	return m.Member.Commit(ctx, batch...)
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
	n := &twin{&alike{T: t, mem: mem, ring: ring, n: 1000 * int(name[0])}, &overtaken{Member: mem.Join(name)}}
	g, _, err := Open(context.Background(), n.member, ring)
	if err != nil {
		t.Fatal(err)
	}
	n.g = g
	t.Cleanup(func() { _ = g.Close(context.Background()) }) // one that was removed cannot write
	return n
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
			b.call(0).is(first, EvidenceUnanswered).attached(200)
			a.call(0).is(nil, "")
		},
		"its client leaves while it runs": func(a, b *twin) {
			first := a.call(0)
			first.leave()
			retry := b.call(0).is(first, EvidenceUnanswered)
			first.settle(Completed, 200).answer(200)
			retry.attached(200)
			a.call(0).is(nil, "")
			b.call(0).is(nil, "")
		},
		"its client waits, and leaves after its retry has come": func(a, b *twin) {
			first := a.call(0)
			time.AfterFunc(10*time.Millisecond, first.leave)
			b.call(0).is(first, EvidenceUnanswered)
		},
		"its client waits": func(a, b *twin) {
			first := a.call(0)
			second := b.call(0).is(nil, "")
			first.settle(Completed, 200).answer(200)
			second.settle(Completed, 200).answer(200)
		},
		"in doubt": func(a, b *twin) {
			first := a.call(0).settle(InDoubt, 0).answer(500)
			b.call(0).is(first, EvidenceInDoubt)
		},
		"a status that clients retry": func(a, b *twin) {
			first := a.call(0).settle(Completed, 500).answer(500)
			b.call(0).is(first, EvidenceAnswer)
		},
		"refused: the next runs": func(a, b *twin) {
			a.call(0).settle(Released, 429).answer(429)
			second := b.call(0).is(nil, "").settle(Completed, 200).lost()
			a.call(0).is(second, EvidenceUnanswered)
		},
		"it says that it is a retry": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).answer(200)
			b.call(1).is(first, EvidenceStated)
		},
		"a retry at another node has left, too": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).lost()
			b.call(0).is(first, EvidenceUnanswered).lost()
			a.call(0).is(first, EvidenceUnanswered).attached(200)
			b.call(0).is(nil, "")
		},
		"a retry at another node waits": func(a, b *twin) {
			first := a.call(0)
			first.leave()
			retry := b.call(0).is(first, EvidenceUnanswered)
			a.call(0).is(nil, "")
			retry.leave()
			a.call(0).is(first, EvidenceUnanswered)
		},
		"its client leaves while a retry at another node waits": func(a, b *twin) {
			first := a.call(0)
			retry := b.call(1).is(first, EvidenceStated)
			first.leave()
			synctest.Wait()
			a.call(0).is(nil, "").settle(Completed, 200).answer(200)
			retry.leave()
			a.call(0).is(first, EvidenceUnanswered)
		},
		"a retry at its own node is faster": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).lost()
			synctest.Wait()
			b.member.before = func() { a.call(0).is(first, EvidenceUnanswered) } // b has decided, and takes it
			b.call(0).is(nil, "")
		},
		"people are asked about it": func(a, b *twin) {
			ask := func(n *twin) string {
				n.n++
				id, gone := fmt.Sprint("id-", n.n), context.Background()
				x, err := n.g.Recognize(gone, Question{
					Scope: Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/"}, Fingerprint: Fingerprint{1}, Whole: Fingerprint{1},
					NewID: func() string { return id }, Window: testWindow, Gone: gone,
				})
				if err != nil || x.Evidence != "" {
					t.Fatal(x, err)
				}
				x.Asked(time.Hour)
				x.Answering(403, false)
				x.End()
				synctest.Wait()
				return x.ID
			}
			first := ask(a)
			for _, n := range []*twin{b, a, b} {
				<-time.After(40 * time.Minute)
				if id := ask(n); id != first {
					t.Errorf("%s, want %s", id, first)
				}
			}
			if o := a.call(0).is(nil, "").settle(Completed, 200).answer(200); o.ID != first {
				t.Errorf("%s runs, want %s", o.ID, first)
			}
			if o := b.call(0).is(nil, ""); o.ID == first {
				t.Error("it runs twice")
			}
		},
		"its answer is read by another request": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).lost()
			synctest.Wait() // others know
			first.reader(context.Background()).Answering(200, false)
			b.call(0).is(nil, "")
		},
		"it gets its answer on another connection": func(a, b *twin) {
			first := a.call(0)
			first.leave()
			synctest.Wait()
			first.settle(Completed, 200).Answering(200, true)
			b.call(0).is(nil, "")
			first.End()
			b.call(0).is(nil, "")
		},
		"in doubt, which is settled at another node, and answered": func(a, b *twin) {
			first := a.call(0).settle(InDoubt, 0).answer(500)
			found, err := b.g.Get(context.Background(), first.Key)
			if err != nil {
				t.Fatal(err)
			}
			retry := a.call(0).is(first, EvidenceInDoubt)
			how := Resolution{By: ByOperator, Applied: true, Operator: "o", Reason: "r", Answer: &Head{Status: 200}}
			if err := b.g.SettleDoubt(context.Background(), found, how); err != nil {
				t.Fatal(err)
			}
			retry.Completed()
			retry.answer(200)
			b.call(0).is(nil, "")
			a.call(0).is(nil, "")
		},
		"its client reads slowly, and its node is gone": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200)
			<-time.After(time.Minute)
			a.die()
			b.call(0).is(first, EvidenceUnanswered)
		},
		"refused while a retry at another node is attached": func(a, b *twin) {
			first := a.call(0)
			first.leave()
			retry := b.call(0).is(first, EvidenceUnanswered)
			first.settle(Released, 429).answer(429)
			a.call(1).is(nil, "") // and not the one whose key the retry may claim
			found, err := b.g.LookUp(context.Background(), first.Key, Fingerprint{1})
			if err != nil || found.Status != Free {
				t.Fatal(found.Status, err)
			}
			if _, err = b.g.Claim(context.Background(), retry.call, found); err != nil {
				t.Fatal(err)
			}
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
			b.call(0).is(first, EvidenceInDoubt)
		},
		"it was answered just now": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).answer(200)
			a.die()
			b.call(0).is(first, EvidenceUnanswered).attached(200)
			b.call(0).is(nil, "")
		},
		"it was answered two seconds ago": func(a, b *twin) {
			first := a.call(0).settle(Completed, 200).answer(200)
			<-time.After(crashEvidence - time.Millisecond)
			a.die()
			b.call(0).is(first, EvidenceUnanswered)
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
			b.call(0).is(first, EvidenceUnanswered)
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
			a.call(0).is(first, EvidenceUnanswered)
			b.call(0).is(nil, "").settle(Completed, 200).answer(200)
			a.die()
			b.call(0).is(first, EvidenceUnanswered)
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

// step is one thing that can happen next in a history; nil where it cannot yet.
type step func()

// P1: over all histories of two clients whose calls are equal, at one node and at two: the first client gives its call
// up, calls again, and calls once more when it was answered; the other one calls once. As much is executed as was meant:
// no retry runs twice, and no call that was meant is swallowed.
func TestAllHistories(t *testing.T) {
	const nodes = 8 // which node each of the first client's later calls and the other client's comes to
	histories := 0
	for at := range nodes {
		// A history is a list of choices. The next one differs in the last choice that has another.
		var choices, of []int
		for more := true; more; histories++ {
			depth, executed := 0, 0
			choose := func(n int) int {
				if depth == len(choices) {
					choices, of = append(choices, 0), append(of, n)
				}
				depth++
				return min(choices[depth-1], n-1) // who takes what may be up to the scheduler
			}
			twins(t, func(a, b *twin) {
				node := func(bit int) *twin {
					if at>>bit&1 == 1 {
						return b
					}
					return a
				}
				unsettled := map[string]*one{}
				call := func(n *twin) *one {
					o := n.call(0)
					if o.run != nil {
						executed++
						unsettled[o.ID] = o
					}
					return o
				}
				ended := func(o *one) bool { return unsettled[o.ID] == nil }
				settle := func(o **one) step {
					if *o == nil || ended(*o) {
						return nil
					}
					return func() {
						owner := unsettled[(*o).ID]
						delete(unsettled, owner.ID)
						owner.settle(Completed, 200)
					}
				}
				var first, retry, again, other *one
				answer := func(o **one, done *bool) step {
					if *o == nil || !ended(*o) || *done {
						return nil
					}
					return func() { *done = true; (*o).answer(200) }
				}
				var left, retried, meant, answered bool
				for {
					var steps []step
					can := func(s step) {
						if s != nil {
							steps = append(steps, s)
						}
					}
					switch {
					case first == nil:
						can(func() { first = call(a) })
					case !left:
						can(func() { left = true; first.leave() })
					case retry == nil:
						can(func() { retry = call(node(0)) })
					case !retried:
						can(answer(&retry, &retried))
					case again == nil:
						can(func() { again = call(node(1)) })
					default:
						can(answer(&again, &meant))
					}
					if other == nil {
						can(func() { other = call(node(2)) })
					} else {
						can(answer(&other, &answered))
					}
					for _, o := range []**one{&first, &retry, &again, &other} {
						if *o != nil && (*o).run != nil {
							can(settle(o))
						}
					}
					if len(steps) == 0 {
						break
					}
					steps[choose(len(steps))]()
				}
				first.End()
				if executed != 3 || !meant || !answered {
					t.Fatalf("nodes %03b, history %v: %d were executed, of 3 that were meant", at, choices, executed)
				}
			})
			if more = false; t.Failed() {
				return
			}
			for i := len(choices) - 1; i >= 0 && !more; i-- {
				if more = choices[i]+1 < of[i]; more {
					choices[i]++
					choices, of = choices[:i+1], of[:i+1]
				}
			}
		}
	}
	t.Log(histories, "histories")
}
