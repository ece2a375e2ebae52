package execution_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// fleet is a shared store, and the guards of its members.
type fleet struct {
	t    *testing.T
	mem  *memory.Store
	ring *seal.Ring
}

func newFleet(t *testing.T) *fleet {
	return &fleet{t: t, mem: memory.New(memory.Options{}), ring: seal.Generate()}
}

// node is a member's guard.
type node struct {
	*rig
	member    *memory.Member
	opened    execution.Recovery
	recovered execution.Recovery // of members that have left; read it after synctest.Wait
}

func (f *fleet) join(name string) *node {
	f.t.Helper()
	m := f.mem.Join(name)
	return f.open(m, m)
}

// open is a guard over the store as its member sees it.
func (f *fleet) open(m *memory.Member, st store.Store) *node {
	f.t.Helper()
	g, opened, err := execution.Open(ctx, st, f.ring)
	if err != nil {
		f.t.Fatal(err)
	}
	n := &node{&rig{t: f.t, mem: f.mem, ring: f.ring, Guard: g}, m, opened, execution.Recovery{}}
	g.OnRecovery(func(r execution.Recovery) {
		n.recovered.Own = r.Own
		n.recovered.InDoubt += r.InDoubt
		n.recovered.Unrecorded += r.Unrecorded
	})
	f.t.Cleanup(func() { _ = g.Close(ctx) }) // one that was removed cannot write
	return n
}

// bubble runs a test whose guards are closed before its end.
func bubble(t *testing.T, test func(t *testing.T, f *fleet)) {
	synctest.Test(t, func(t *testing.T) { test(t, newFleet(t)) })
}

// P6: what runs at a member that is not gone runs elsewhere. Once the member is gone it is in doubt for all, at
// once, and is recorded by one of those that notice. It is never free.
func TestMembersSettleWhatOthersLeaveOpen(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b, c := f.join("a"), f.join("b"), f.join("c")
		const open = 20
		for i := range open {
			a.claim(a.call(fmt.Sprint(i)))
		}
		mine := b.call("of b")
		b.claim(mine)
		d := f.join("d")
		synctest.Wait()
		if d.opened != (execution.Recovery{}) {
			t.Errorf("a member that joins settles what others run: %+v", d.opened)
		}
		for _, n := range []*node{b, c, d} {
			found := n.status(n.call("0"), execution.RunningElsewhere)
			if r := found.Record; r.Node != "a" || r.Boot != a.member.Self().Boot {
				t.Errorf("it runs at %s, %s", r.Node, r.Boot)
			}
			other := n.call("0")
			other.Fingerprint[0] = 1
			if found := n.status(other, execution.Mismatch); found.State() != execution.StateSending {
				t.Errorf("another content meets a call that is %v", found.State())
			}
		}
		a.member.Remove()
		for i := range open {
			found := b.status(b.call(fmt.Sprint(i)), execution.Doubtful)
			if found.Record.Cause != execution.CauseDied {
				t.Errorf("cause %v", found.Record.Cause)
			}
		}
		synctest.Wait()
		if sum := b.recovered.InDoubt + c.recovered.InDoubt + d.recovered.InDoubt; sum != open {
			t.Errorf("b, c and d have settled %d, %d and %d of %d", b.recovered.InDoubt, c.recovered.InDoubt, d.recovered.InDoubt, open)
		}
		if n, _, err := c.Doubts(ctx); n != open || err != nil {
			t.Errorf("%d doubts, %v", n, err)
		}
		c.status(mine, execution.RunningElsewhere)
		b.status(mine, execution.RunningHere)
	})
}

// P6: the doubt holds before it can be recorded, and for other contents of the call.
func TestDoubtOfAGoneMemberBeforeItIsRecorded(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a := f.join("a")
		m := f.mem.Join("b")
		b := f.open(m, readOnly{m})
		if _, _, err := execution.Open(ctx, readOnly{f.mem.Join("full")}, f.ring); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("a member whose keys have no room: %v", err)
		}
		call := a.call("a")
		a.claim(call)
		over := make(chan error, 1)
		go func() { over <- b.Await(ctx, call.Key) }()
		synctest.Wait()
		a.member.Remove()
		if err := <-over; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if b.recovered.Unrecorded == 0 {
			t.Fatal("the doubt was recorded: this test shows nothing")
		}
		b.status(call, execution.Doubtful)
		other := *call
		other.Fingerprint[0] = 1
		if found := b.status(&other, execution.Mismatch); found.State() != execution.StateInDoubt {
			t.Errorf("another content meets a call that is %v", found.State())
		}
		all, err := b.Tally(ctx, 10)
		if err != nil || all[execution.StateInDoubt].N != 1 || all[execution.StateSending].N != 0 {
			t.Errorf("%+v, %v", all, err)
		}
	})
}

// readOnly is a shared store without room for records. A member that cannot record its keys does not open it at all.
type readOnly struct{ *memory.Member }

func (r readOnly) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if slices.ContainsFunc(batch, func(w store.Write) bool {
		return w.Key[0] == 'x' || string(w.Key) == "mkeys" && r.Self().Node == "full"
	}) {
		return 0, store.ErrFull
	}
	return r.Member.Commit(ctx, batch...)
}

// A gateway that comes back is another member: what it had open is in doubt for it as well, and what its earlier
// life still believes cannot be written.
func TestAMemberThatComesBack(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a := f.join("a")
		call := a.call("a")
		e := a.claim(call)
		a.member.Remove()
		again := f.join("a")
		if again.opened.InDoubt != 1 || again.Node() != "a" || again.Boot() == a.Boot() {
			t.Errorf("%+v as %s, %s", again.opened, again.Node(), again.Boot())
		}
		again.status(call, execution.Doubtful)
		if err := e.Settle(ctx, answered(e, []byte("late"))); !errors.Is(err, execution.ErrUnrecorded) {
			t.Errorf("a removed member has recorded an outcome: %v", err)
		}
		again.status(call, execution.Doubtful)
	})
}

// Await waits for what runs at another member, also when that leaves.
func TestAwaitAtAnotherMember(t *testing.T) {
	for name, end := range map[string]func(a *node, e *execution.Execution){
		"it ends":    func(a *node, e *execution.Execution) { a.settle(e, answered(e, nil)) },
		"it is gone": func(a *node, _ *execution.Execution) { a.member.Remove() },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, f *fleet) {
				a, b := f.join("a"), f.join("b")
				call := a.call("a")
				e := a.claim(call)
				over := make(chan error, 1)
				go func() { over <- b.Await(ctx, call.Key) }()
				synctest.Wait()
				select {
				case err := <-over:
					t.Fatalf("it is over before its end: %v", err)
				default:
				}
				end(a, e)
				if err := <-over; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// P1: of the calls that wait at all members for one that was not sent, one runs.
func TestOneRunsAfterAnUnsentCall(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.join("a"), f.join("b")
		call := a.call("a")
		e := a.claim(call)
		var all sync.WaitGroup
		var ran atomic.Int64
		for i := range 8 {
			n := []*node{a, b}[i%2]
			all.Go(func() {
				for {
					found := n.find(call)
					switch found.Status {
					case execution.Replayable:
						return
					case execution.Free:
						e, err := n.Claim(ctx, call, found)
						if errors.Is(err, execution.ErrTaken) {
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						ran.Add(1)
						<-time.After(time.Second)
						n.settle(e, answered(e, nil))
						return
					}
					flight, follower := n.Follow(call.Key, found)
					if follower != nil {
						_, err := follower.Head(ctx)
						follower.Close()
						if err != nil && flight.Ending() == execution.EndedInDoubt {
							t.Error("it is in doubt")
						}
					}
					<-flight.Done()
				}
			})
		}
		synctest.Wait()
		a.settle(e, execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent})
		all.Wait()
		if ran.Load() != 1 {
			t.Errorf("%d calls have run", ran.Load())
		}
	})
}

// P7: the bytes of a long answer come whole to those who follow at another member, and nothing is stored for them
// where nobody does.
func TestFollowALongAnswer(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.join("a"), f.join("b")
		body := make([]byte, 3<<20)
		for i := range body {
			body[i] = byte(i * i >> 7)
		}
		for _, followed := range []bool{false, true} {
			call := a.call(fmt.Sprint(followed))
			e := a.claim(call)
			var got bytes.Buffer
			read := make(chan error, 1)
			if followed {
				_, follower := b.Follow(call.Key, b.find(call))
				go func() {
					defer follower.Close()
					_, err := io.Copy(&got, readerOf{follower})
					read <- err
				}()
				synctest.Wait()
			}
			e.Recording().Start(200, nil)
			for from := 0; from < len(body); from += 100_000 {
				e.Write(body[from:min(from+100_000, len(body))], false)
				<-time.After(30 * time.Millisecond)
			}
			a.settle(e, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
			if followed {
				if err := <-read; err != nil || !bytes.Equal(got.Bytes(), body) {
					t.Errorf("%d bytes of %d, %v", got.Len(), len(body), err)
				}
			}
			stored := 0
			for _, err := range f.mem.Scan(ctx, store.Prefix([]byte{'v'})) {
				if stored++; err != nil {
					t.Fatal(err)
				}
			}
			if (stored > 0) != followed {
				t.Errorf("%d entries are stored for others, who follow: %v", stored, followed)
			}
		}
	})
}

// readerOf reads a follower to its end.
type readerOf struct{ *execution.Follower }

func (r readerOf) Read(p []byte) (int, error) { return r.Follower.Read(ctx, p) }

// An owner stores parts for as long as somebody is interested. Who comes after that gets the answer at its end.
func TestInterestThatEnds(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.join("a"), f.join("b")
		call := a.call("a")
		e := a.claim(call)
		e.Recording().Start(200, nil)
		parts := func() int {
			n := 0
			for range f.mem.Scan(ctx, store.Prefix([]byte{'v', 'p'})) {
				n++
			}
			return n
		}
		_, follower := b.Follow(call.Key, b.find(call))
		write := func(n int) {
			for range n {
				e.Write([]byte("x"), false)
				<-time.After(time.Second)
			}
		}
		write(25)
		if n := parts(); n < 25 {
			t.Fatalf("%d parts", n)
		}
		follower.Close()
		write(60)
		before := parts()
		write(20)
		if n := parts(); n != before {
			t.Errorf("%d parts are stored for nobody", n-before)
		}
		flight, follower := b.Follow(call.Key, b.find(call))
		defer follower.Close()
		head, err := follower.Head(ctx)
		if err != nil || head.Status != 200 {
			t.Fatalf("%+v, %v", head, err)
		}
		a.settle(e, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
		if got, err := io.ReadAll(readerOf{follower}); err != nil || len(got) != 105 {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		<-flight.Done()
	})
}

// What another member runs is listed, and neither an operator nor a rollback settles it; once that member is gone both
// may.
func TestWhatAnotherMemberRuns(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		a, b := f.join("a"), f.join("b")
		first, second := a.call("1"), a.call("2")
		a.claim(first)
		a.claim(second)
		seen := func(state execution.State) []execution.Recorded {
			all := b.listed(execution.Filter{States: []execution.State{state}}, 10)
			if len(all) != 2 || all[0].Record.Node != "a" {
				t.Fatalf("%v: %+v", state, all)
			}
			return all
		}
		decided := execution.Resolution{By: execution.ByOperator, Applied: true, Operator: "eve", Reason: "seen at the upstream"}
		for _, e := range seen(execution.StateSending) {
			if err := b.SettleDoubt(ctx, e, decided); !errors.Is(err, execution.ErrNotInDoubt) {
				t.Errorf("what runs is resolved: %v", err)
			}
			if err := b.Undone(ctx, execution.Undoing{Key: e.Key}); !errors.Is(err, execution.ErrRunning) {
				t.Errorf("what runs is undone: %v", err)
			}
		}
		a.member.Remove()
		synctest.Wait()
		all := seen(execution.StateInDoubt)
		if err := b.SettleDoubt(ctx, all[0], decided); err != nil {
			t.Error(err)
		}
		if err := b.Undone(ctx, execution.Undoing{Key: all[1].Key}); err != nil {
			t.Error(err)
		}
	})
}
