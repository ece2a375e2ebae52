package execution_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
)

var ctx = context.Background()

// rig is a guard over a memory store that outlives it.
type rig struct {
	t    *testing.T
	mem  *memory.Store
	ring *seal.Ring
	*execution.Guard
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, mem: memory.New(memory.Options{}), ring: seal.Generate()}
	r.restart()
	return r
}

// restart begins another life of the node on the same store.
func (r *rig) restart() execution.Recovery {
	r.t.Helper()
	g, recovery, err := execution.Open(ctx, r.mem, r.ring)
	if err != nil {
		r.t.Fatal(err)
	}
	r.Guard = g
	return recovery
}

func (r *rig) call(id string) *execution.Call {
	scope := execution.Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/v1/charges", ID: id}
	return &execution.Call{
		Key: r.Key(scope), Scope: scope, Origin: execution.OriginGiven, Action: "charge", Workflow: "w-1",
		Deadline: time.Minute, KeepResult: 24 * time.Hour, KeepKey: 30 * 24 * time.Hour, ResultCap: 8 << 20,
	}
}

func (r *rig) find(c *execution.Call) execution.Finding {
	r.t.Helper()
	found, err := r.LookUp(ctx, c.Key, c.Fingerprint)
	if err != nil {
		r.t.Fatal(err)
	}
	return found
}

func (r *rig) status(c *execution.Call, want execution.Status) execution.Finding {
	r.t.Helper()
	found := r.find(c)
	if found.Status != want {
		r.t.Fatalf("status %d, want %d", found.Status, want)
	}
	return found
}

func (r *rig) claim(c *execution.Call) *execution.Execution {
	r.t.Helper()
	e, err := r.Claim(ctx, c, r.find(c))
	if err != nil {
		r.t.Fatal(err)
	}
	return e
}

func answered(e *execution.Execution, body []byte) execution.Outcome {
	e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}, "X-Empty": {""}, "Server": nil})
	for len(body) > 0 {
		n := min(len(body), 10_000)
		e.Write(body[:n], false)
		body = body[n:]
	}
	return execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true}
}

func (r *rig) settle(e *execution.Execution, o execution.Outcome) {
	r.t.Helper()
	if err := e.Settle(ctx, o); err != nil {
		r.t.Fatal(err)
	}
}

func TestP1CompletedExecutionIsReplayed(t *testing.T) {
	for _, size := range []int{0, 1, 100, 600, 40_000, 256 << 10, 256<<10 + 1, 700_000, 3 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			r := newRig(t)
			c := r.call("a")
			body := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)[:size]
			e := r.claim(c)
			o := answered(e, body)
			e.Recording().SetTrailer(map[string][]string{"X-Sum": {"1"}})
			r.settle(e, o)

			for range 2 {
				found := r.status(c, execution.Replayable)
				result, err := r.Result(ctx, c.Key, found)
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(result.Body(ctx))
				if err != nil || !bytes.Equal(got, body) {
					t.Fatalf("body of %d bytes, %v", len(got), err)
				}
				h := result.Head
				if h.Status != 201 || h.Size != int64(size) || h.Header["Content-Type"][0] != "application/json" ||
					h.Header["X-Empty"][0] != "" || h.Trailer["X-Sum"][0] != "1" {
					t.Errorf("head %+v", h)
				}
				if removed, ok := h.Header["Server"]; !ok || removed != nil {
					t.Errorf("the removal of a field was not kept: %v", h.Header)
				}
				r.restart()
			}
		})
	}
}

func TestP1OneOwnerAKey(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	var owners atomic.Int32
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			_, err := r.Claim(ctx, c, execution.Finding{})
			if err == nil {
				owners.Add(1)
			} else if !errors.Is(err, execution.ErrTaken) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := owners.Load(); n != 1 {
		t.Errorf("%d owners", n)
	}
}

func TestAnotherFingerprintIsAMismatch(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	other := *c
	other.Fingerprint[0] = 1
	e := r.claim(c)
	r.status(&other, execution.Mismatch)
	r.settle(e, answered(e, nil))
	r.status(&other, execution.Mismatch)
	r.status(c, execution.Replayable)
}

// P3: the key separates callers, guards, methods, paths and ids.
func TestP3KeysSeparateScopes(t *testing.T) {
	r := newRig(t)
	base := execution.Scope{Caller: "c", Guard: "g", Method: "POST", Path: "/p", ID: "i"}
	seen := map[execution.Key]execution.Scope{}
	for _, s := range []execution.Scope{
		base,
		{"C", "", "g", "POST", "/p", "i"}, {"c", "", "G", "POST", "/p", "i"}, {"c", "", "g", "PUT", "/p", "i"},
		{"c", "", "g", "POST", "/P", "i"}, {"c", "", "g", "POST", "/p", "I"}, {"cg", "", "", "POST", "/p", "i"}, {"c", "", "gPOST", "", "/p", "i"},
		{"c", "t", "g", "POST", "/p", "i"}, {"ct", "", "g", "POST", "/p", "i"},
	} {
		key := r.Key(s)
		if other, ok := seen[key]; ok {
			t.Errorf("%v and %v share a key", s, other)
		}
		seen[key] = s
	}
}

// A release by proof elects exactly one waiter to run; nobody stampedes.
func TestRetentionsOfResultAndKeyAreApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		e := r.claim(c)
		r.settle(e, answered(e, []byte("x")))
		time.Sleep(24*time.Hour - time.Nanosecond)
		r.status(c, execution.Replayable)
		time.Sleep(time.Nanosecond)
		r.status(c, execution.ResultExpired)
		time.Sleep(29*24*time.Hour - time.Nanosecond)
		r.status(c, execution.ResultExpired)
		time.Sleep(time.Nanosecond)
		r.status(c, execution.Free)
		if n := entries(r); n > 4 {
			t.Errorf("%d living entries are left of a forgotten execution", n)
		}
	})
}

func entries(r *rig) int {
	n := 0
	for _, err := range r.mem.Scan(ctx, store.Range{}) {
		if err != nil {
			r.t.Fatal(err)
		}
		n++
	}
	return n
}

// P1: time alone is never evidence.
func TestP1DoubtNeverExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost, Status: 0})
		for range 3 {
			time.Sleep(100 * 365 * 24 * time.Hour / 3)
			if found := r.status(c, execution.Doubtful); found.Record.Cause != execution.CauseLost {
				t.Errorf("cause %q", found.Record.Cause)
			}
			r.restart()
		}
	})
}

func TestP1DeadProcessLeavesDoubt(t *testing.T) {
	r := newRig(t)
	c, done := r.call("open"), r.call("done")
	r.claim(c)
	e := r.claim(done)
	r.settle(e, answered(e, nil))
	if got := r.restart(); got != (execution.Recovery{InDoubt: 1}) {
		t.Errorf("recovery %+v", got)
	}
	if found := r.status(c, execution.Doubtful); found.Record.Cause != execution.CauseDied {
		t.Errorf("cause %q", found.Record.Cause)
	}
	r.status(done, execution.Replayable)
	if got := r.restart(); got != (execution.Recovery{}) {
		t.Errorf("second recovery %+v", got)
	}
}

func TestEvidenceLetsADoubtfulCallRunAgain(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	found := r.status(c, execution.Doubtful)
	e, err := r.Claim(ctx, c, found)
	if err != nil {
		t.Fatal(err)
	}
	r.settle(e, answered(e, []byte("second")))
	if _, err := r.Claim(ctx, c, found); !errors.Is(err, execution.ErrTaken) {
		t.Errorf("claim over a finding of old: %v", err)
	}
	r.status(c, execution.Replayable)
}

func TestAppliedSettlesDoubt(t *testing.T) {
	for _, answer := range []*execution.Head{nil, {Status: 200, Header: map[string][]string{"A": {"b"}}}} {
		r := newRig(t)
		c := r.call("a")
		r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt})
		found := r.status(c, execution.Doubtful)
		if err := r.SettleDoubt(ctx, execution.Recorded{Key: c.Key, Finding: found}, execution.Resolution{By: execution.ByProbe, Applied: true, Answer: answer, Body: bytes.Repeat([]byte("x"), 1000)}); err != nil {
			t.Fatal(err)
		}
		if err := r.SettleDoubt(ctx, execution.Recorded{Key: c.Key, Finding: found}, execution.Resolution{By: execution.ByProbe, Applied: true, Answer: answer}); !errors.Is(err, execution.ErrTaken) {
			t.Errorf("applied twice: %v", err)
		}
		if answer == nil {
			r.status(c, execution.ResultUnavailable)
			continue
		}
		result, err := r.Result(ctx, c.Key, r.status(c, execution.Replayable))
		if err != nil || result.Head.Status != 200 || result.Head.Size != 1000 {
			t.Errorf("result %+v, %v", result, err)
		}
	}
}

func TestDrainLetsRunningExecutionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		e := r.claim(r.call("a"))
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if left := r.Drain(short); left != 1 {
			t.Errorf("%d left", left)
		}
		if _, err := r.Claim(ctx, r.call("b"), execution.Finding{}); !errors.Is(err, execution.ErrDraining) {
			t.Errorf("claim while draining: %v", err)
		}
		go func() {
			time.Sleep(time.Second)
			r.settle(e, answered(e, nil))
		}()
		if left := r.Drain(ctx); left != 0 {
			t.Errorf("%d left", left)
		}
	})
}

func TestExtraWritesLandWithTheClaimOrNothingDoes(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	extra := store.Write{Key: []byte("zz"), Value: []byte("1"), If: store.Absent()}
	e, err := r.Claim(ctx, c, execution.Finding{}, store.NewBatch(extra))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.mem.Get(ctx, []byte("zz")); err != nil {
		t.Errorf("the extra write did not land: %v", err)
	}
	if err := e.Settle(ctx, execution.Outcome{Verdict: execution.Completed}, store.NewBatch(store.Write{Key: []byte("yy")})); err != nil {
		t.Fatal(err)
	}
	if _, err := r.mem.Get(ctx, []byte("yy")); err != nil {
		t.Errorf("the extra write of the outcome did not land: %v", err)
	}
	other := r.call("b")
	var lost *store.Conflict
	if _, err := r.Claim(ctx, other, execution.Finding{}, store.NewBatch(extra)); !errors.As(err, &lost) || string(lost.Key) != "zz" {
		t.Errorf("claim with a losing extra write: %v", err)
	}
	r.status(other, execution.Free)
}

// A batch is ended once with what became of its commit, also where there is none.
func TestBatchesAreEndedWhateverHappens(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	ended := func(name string, want error, commit func(b *store.Batch) error) {
		t.Helper()
		var got []error
		b := store.NewBatch(store.Write{Key: []byte("zz " + name)})
		b.OnDone(func(err error) error { got = append(got, err); return err })
		if err := commit(b); !errors.Is(err, want) || len(got) != 1 || !errors.Is(got[0], want) {
			t.Errorf("%s: %v, ended with %v", name, err, got)
		}
	}
	var e *execution.Execution
	claim := func(b *store.Batch) error {
		claimed, err := r.Claim(ctx, c, execution.Finding{}, b)
		if err == nil {
			e = claimed
		}
		return err
	}
	ended("claim", nil, claim)
	ended("claim of a running call", execution.ErrTaken, claim)
	ended("outcome", nil, func(b *store.Batch) error {
		return e.Settle(ctx, execution.Outcome{Verdict: execution.InDoubt}, b)
	})
	ended("claim of a recorded call", execution.ErrTaken, claim)
	doubt := r.status(c, execution.Doubtful)
	ended("resolution without an operator", execution.ErrResolution, func(b *store.Batch) error {
		return r.SettleDoubt(ctx, execution.Recorded{Key: c.Key, Finding: doubt}, execution.Resolution{By: execution.ByOperator}, b)
	})
	applied := func(b *store.Batch) error {
		return r.SettleDoubt(ctx, execution.Recorded{Key: c.Key, Finding: doubt}, execution.Resolution{By: execution.ByProbe, Applied: true}, b)
	}
	ended("evidence", nil, applied)
	ended("evidence again", execution.ErrTaken, applied)
	r.Drain(ctx)
	ended("claim while shutting down", execution.ErrDraining, claim)
}

// P8: nothing of a call is readable in the store.
func TestP8StoreShowsNothing(t *testing.T) {
	r := newRig(t)
	secret := "Secret4242"
	c := r.call("id-" + secret)
	c.Scope.Caller, c.Scope.Path, c.Action, c.Workflow = "user:"+secret, "/"+secret, secret, secret
	c.Key = r.Key(c.Scope)
	for _, size := range []int{1, 100, 300 << 10} {
		c.Scope.ID = fmt.Sprint(secret, size)
		c.Key = r.Key(c.Scope)
		e := r.claim(c)
		e.Recording().Start(200, map[string][]string{"X": {secret}})
		e.Write([]byte(strings.Repeat(secret, size)), false)
		r.settle(e, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
	}
	for entry, err := range r.mem.Scan(ctx, store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(entry.Key, []byte("4242")) || bytes.Contains(entry.Value, []byte("4242")) {
			t.Errorf("entry %q shows the secret", entry.Key[:1])
		}
	}
}

func TestOpenRefusesAnotherKeyRing(t *testing.T) {
	r := newRig(t)
	if _, _, err := execution.Open(ctx, r.mem, seal.Generate()); !errors.Is(err, execution.ErrWrongKey) {
		t.Errorf("another ring: %v", err)
	}
	if fresh, err := execution.Fresh(ctx, r.mem); fresh || err != nil {
		t.Errorf("fresh: %v, %v", fresh, err)
	}
	strange := memory.New(memory.Options{})
	if _, err := strange.Commit(ctx, store.Write{Key: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := execution.Open(ctx, strange, seal.Generate()); !errors.Is(err, execution.ErrLayout) {
		t.Errorf("a store of something else: %v", err)
	}
	lost, err := r.mem.Get(ctx, []byte("mlayout"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.mem.Commit(ctx, store.Write{Key: lost.Key, Delete: true}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := execution.Open(ctx, r.mem, r.ring); !errors.Is(err, execution.ErrLayout) {
		t.Errorf("a store whose layout is lost: %v", err)
	}
}

func TestDerivedIDsFollowWhatTheCallIs(t *testing.T) {
	r := newRig(t)
	s := execution.Scope{Caller: "c", Guard: "g", Method: "POST", Path: "/p"}
	a := r.Derive(s, body.Fingerprint{1})
	if a != r.Derive(s, body.Fingerprint{1}) || a == r.Derive(s, body.Fingerprint{2}) {
		t.Error("a derived id must depend on the request and nothing else")
	}
}

// failing is a store whose commits can be made to fail.
type failing struct {
	store.Store
	fail atomic.Pointer[func(batch []store.Write) error]
}

// fails has commits fail with what fail returns; nil ends that.
func (f *failing) fails(fail func(batch []store.Write) error) { f.fail.Store(&fail) }

func (f *failing) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if fail := f.fail.Load(); fail != nil && *fail != nil {
		if err := (*fail)(batch); err != nil {
			return 0, err
		}
	}
	return f.Store.Commit(ctx, batch...)
}

func newFailing(t *testing.T) (*rig, *failing) {
	r := &rig{t: t, mem: memory.New(memory.Options{}), ring: seal.Generate()}
	f := &failing{Store: r.mem}
	g, _, err := execution.Open(ctx, f, r.ring)
	if err != nil {
		t.Fatal(err)
	}
	r.Guard = g
	return r, f
}

var errDisk = errors.New("no space left on device")

// P4: what cannot be recorded is not run.
func TestP4ClaimFailsClosed(t *testing.T) {
	r, f := newFailing(t)
	c := r.call("a")
	f.fails(func([]store.Write) error { return errDisk })
	if _, err := r.Claim(ctx, c, execution.Finding{}); !errors.Is(err, execution.ErrStore) {
		t.Errorf("claim: %v", err)
	}
	f.fails(nil)
	r.status(c, execution.Free)
	r.claim(c)
}

// An outcome that does not reach the store is never told as done (P6), and its key
// is not free (P1): neither in this life nor in the next.
func TestP1UnrecordedOutcomeIsDoubt(t *testing.T) {
	for _, verdict := range []execution.Verdict{execution.Completed, execution.Released, execution.InDoubt} {
		r, f := newFailing(t)
		c := r.call("a")
		e := r.claim(c)
		follower := r.find(c).Flight.Follow()
		o := answered(e, []byte("body"))
		o.Verdict = verdict
		f.fails(func([]store.Write) error { return store.ErrUnknown })
		if err := e.Settle(ctx, o); !errors.Is(err, execution.ErrUnrecorded) {
			t.Errorf("%v: settle: %v", verdict, err)
		}
		p := make([]byte, 10)
		_, _ = follower.Read(ctx, p)
		if _, err := follower.Read(ctx, p); !errors.Is(err, execution.ErrCut) {
			t.Errorf("%v: a follower was shown an end that is not recorded: %v", verdict, err)
		}
		follower.Close()
		f.fails(nil)
		if found := r.status(c, execution.Doubtful); found.Record.Cause != execution.CauseUnrecorded {
			t.Errorf("%v: the cause is %q", verdict, found.Record.Cause)
		}
		r.restart()
		r.status(c, execution.Doubtful)
	}
}

// An answer that cannot be stored does not cost the key.
func TestP1KeyIsKeptWhereTheAnswerCannotBe(t *testing.T) {
	for _, size := range []int{1000, 300 << 10} {
		r, f := newFailing(t)
		c := r.call("a")
		e := r.claim(c)
		f.fails(func(batch []store.Write) error {
			for _, w := range batch {
				if w.Bulk {
					return errDisk
				}
			}
			return nil
		})
		r.settle(e, answered(e, make([]byte, size)))
		r.status(c, execution.ResultUnavailable)
	}
}

// Nor does it keep evidence from being recorded.
func TestAppliedWithoutRoomForTheAnswer(t *testing.T) {
	r, f := newFailing(t)
	c := r.call("a")
	r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt})
	f.fails(func(batch []store.Write) error {
		for _, w := range batch {
			if w.Bulk {
				return errDisk
			}
		}
		return nil
	})
	if err := r.SettleDoubt(ctx, execution.Recorded{Key: c.Key, Finding: r.status(c, execution.Doubtful)}, execution.Resolution{By: execution.ByProbe, Applied: true, Answer: &execution.Head{Status: 200}, Body: make([]byte, 1000)}); err != nil {
		t.Fatal(err)
	}
	r.status(c, execution.ResultUnavailable)
}

// P1, P7: what has nothing to do with the answer does not cost it. A store that is away for a moment leaves a doubt, which
// evidence settles with its answer later; a call whose client has seen the answer is never one without a result.
func TestAnswerIsKeptWhereTheStoreWasAway(t *testing.T) {
	const answer, piece = false, true
	for _, away := range []error{store.ErrUnavailable, store.ErrUnknown} {
		for _, c := range []struct {
			size  int
			of    bool
			times int
			want  execution.Status
		}{
			{100, answer, 1, execution.Doubtful},
			{3000, answer, 1, execution.Doubtful},
			{300 << 10, answer, 1, execution.Doubtful},
			{300 << 10, piece, 1, execution.Replayable}, // it is stored before the end
			{300 << 10, piece, 1000, execution.Doubtful},
		} {
			r, f := newFailing(t)
			call := r.call("a")
			e := r.claim(call)
			fails := func(of bool, times int) func([]store.Write) error {
				var done atomic.Int64
				return func(batch []store.Write) error {
					if (batch[0].Key[0] == 'r') != of || done.Add(1) > int64(times) {
						return nil
					}
					return away
				}
			}
			f.fails(fails(c.of, c.times))
			if err := e.Settle(ctx, answered(e, make([]byte, c.size))); errors.Is(err, execution.ErrUnrecorded) != (c.want == execution.Doubtful) {
				t.Errorf("%v, %+v: %v", away, c, err)
			}
			found := r.find(call)
			if found.Status != c.want {
				t.Errorf("%v, %+v: status %d", away, c, found.Status)
			}
			if found.Status != execution.Doubtful {
				continue
			}
			f.fails(fails(answer, 1))
			for _, want := range []error{away, nil} {
				if err := r.SettleDoubt(ctx, execution.Recorded{Key: call.Key, Finding: found}, execution.Resolution{By: execution.ByProbe, Applied: true, Answer: &execution.Head{Status: 200}, Body: make([]byte, 4000)}); !errors.Is(err, want) {
					t.Errorf("%v, %+v: %v", away, c, err)
				}
			}
			r.status(call, execution.Replayable)
		}
	}
}

// A result that is missing or altered is reported, and never a reason to run again.
func TestDamagedResultIsUnavailable(t *testing.T) {
	for _, size := range []int{1000, 600 << 10} {
		for piece := range 1 + size/(256<<10) {
			for _, damage := range []func(e store.Entry) store.Write{
				func(e store.Entry) store.Write { return store.Write{Key: e.Key, Delete: true} },
				func(e store.Entry) store.Write {
					e.Value[len(e.Value)/2] ^= 1
					return store.Write{Key: e.Key, Value: e.Value, Expires: e.Expires, Bulk: true}
				},
			} {
				r := newRig(t)
				c := r.call("a")
				e := r.claim(c)
				r.settle(e, answered(e, make([]byte, size)))
				pieces := r.pieces()
				if want := 1 + size/(256<<10); len(pieces) != want {
					t.Fatalf("%d pieces, want %d", len(pieces), want)
				}
				r.write(damage(pieces[piece]))
				found := r.status(c, execution.Replayable)
				if _, err := r.Result(ctx, c.Key, found); !errors.Is(err, execution.ErrResultUnavailable) {
					t.Errorf("%d bytes, piece %d: %v", size, piece, err)
				}
			}
		}
	}
}

// pieces are the stored pieces of answers, the heads of keys first.
func (r *rig) pieces() (all []store.Entry) {
	r.t.Helper()
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte{'r'})) {
		if err != nil {
			r.t.Fatal(err)
		}
		all = append(all, entry)
	}
	return all
}

func (r *rig) write(batch ...store.Write) {
	r.t.Helper()
	if _, err := r.mem.Commit(ctx, batch...); err != nil {
		r.t.Fatal(err)
	}
}

// Sealing alone tells pieces apart: one of another key, of another claim, or in another place
// does not open under its new name; a whole head of an earlier claim names that claim.
func TestMixedUpAnswersAreUnavailable(t *testing.T) {
	put := func(name []byte, e store.Entry) store.Write {
		return store.Write{Key: name, Value: e.Value, Expires: e.Expires, Bulk: true}
	}
	synctest.Test(t, func(t *testing.T) {
		const size = 600 << 10
		answeredAs := func(r *rig, c *execution.Call) []store.Entry {
			known := len(r.pieces())
			e := r.claim(c)
			r.settle(e, answered(e, make([]byte, size)))
			all := r.pieces()
			if len(all) != known+3 {
				t.Fatalf("%d pieces after %d", len(all), known)
			}
			return slices.DeleteFunc(all, func(e store.Entry) bool { return !bytes.HasPrefix(e.Key[1:], c.Key[:]) })
		}
		for name, mix := range map[string]func(mine, other, earlier []store.Entry) []store.Write{
			"the head of another key":  func(mine, other, _ []store.Entry) []store.Write { return []store.Write{put(mine[0].Key, other[0])} },
			"a piece of another key":   func(mine, other, _ []store.Entry) []store.Write { return []store.Write{put(mine[1].Key, other[1])} },
			"a piece of another claim": func(mine, _, earlier []store.Entry) []store.Write { return []store.Write{put(mine[1].Key, earlier[1])} },
			"two pieces exchanged": func(mine, _, _ []store.Entry) []store.Write {
				return []store.Write{put(mine[1].Key, mine[2]), put(mine[2].Key, mine[1])}
			},
			"one piece twice":            func(mine, _, _ []store.Entry) []store.Write { return []store.Write{put(mine[2].Key, mine[1])} },
			"a piece in place of a head": func(mine, _, _ []store.Entry) []store.Write { return []store.Write{put(mine[0].Key, mine[1])} },
		} {
			r := newRig(t)
			c := r.call("a")
			c.KeepKey = c.KeepResult
			earlier := answeredAs(r, c)
			time.Sleep(c.KeepResult + time.Hour)
			r.status(c, execution.Free)
			mine, other := answeredAs(r, c), answeredAs(r, r.call("b"))
			if result, err := r.Result(ctx, c.Key, r.status(c, execution.Replayable)); err != nil || result.Head.Size != size {
				t.Fatal(err)
			}
			r.write(mix(mine, other, earlier)...)
			if _, err := r.Result(ctx, c.Key, r.status(c, execution.Replayable)); !errors.Is(err, execution.ErrResultUnavailable) {
				t.Errorf("%s: %v", name, err)
			}
		}

		// The whole head of an earlier claim opens under its key. Its time is in it, so that it is not
		// replayed however long the store keeps it; and it is no answer of the claim that is recorded.
		r := newRig(t)
		c := r.call("a")
		c.KeepKey = c.KeepResult
		earlier := answeredAs(r, c)[0]
		time.Sleep(c.KeepResult + time.Hour)
		answeredAs(r, c)
		earlier.Expires = time.Now().Add(time.Hour)
		r.write(put(earlier.Key, earlier))
		r.status(c, execution.ResultExpired)
		found, err := r.Get(ctx, c.Key)
		if err != nil || found.Status != execution.Replayable {
			t.Fatalf("the record: %d, %v", found.Status, err)
		}
		if _, err := r.Result(ctx, c.Key, found.Finding); !errors.Is(err, execution.ErrResultUnavailable) {
			t.Errorf("an earlier claim's head: %v", err)
		}

		r = newRig(t)
		c = r.call("a")
		answeredAs(r, c)
		for _, pieces := range []int{1, 3} {
			found, err := r.Get(ctx, c.Key)
			if err != nil {
				t.Fatal(err)
			}
			found.Record.Result.Pieces = pieces
			if _, err := r.Result(ctx, c.Key, found.Finding); !errors.Is(err, execution.ErrResultUnavailable) {
				t.Errorf("with %d pieces in place of 2: %v", pieces, err)
			}
		}
	})
}

// counted counts what a replay asks of its store and its sealer.
type counted struct {
	store.Store
	store.Sealer
	found, opened int
}

func (c *counted) Get(ctx context.Context, key []byte) (store.Entry, error) {
	e, err := c.Store.Get(ctx, key)
	if err == nil {
		c.found++
	}
	return e, err
}

func (c *counted) Open(dst, sealed, name []byte) ([]byte, error) {
	c.opened++
	return c.Sealer.Open(dst, sealed, name)
}

// An answer of up to 4 KiB, and more, is one entry that is found and one value that is opened. What
// is not there costs nothing: the store knows that without a look.
func TestReplayIsOneLookUpAndOneUnseal(t *testing.T) {
	for _, size := range []int{0, 100, 600, 1 << 10, 4 << 10, 40 << 10} {
		r := newRig(t)
		count := &counted{Store: r.mem, Sealer: r.ring}
		g, _, err := execution.Open(ctx, count, count)
		if err != nil {
			t.Fatal(err)
		}
		r.Guard = g
		c := r.call("a")
		e := r.claim(c)
		r.settle(e, answered(e, make([]byte, size)))
		count.found, count.opened = 0, 0
		result, err := r.Result(ctx, c.Key, r.status(c, execution.Replayable))
		if err != nil || count.found != 1 || count.opened != 1 {
			t.Fatalf("%d bytes: %d found, %d opened, %v", size, count.found, count.opened, err)
		}
		if body, err := io.ReadAll(result.Body(ctx)); err != nil || len(body) != size {
			t.Errorf("%d bytes: %d, %v", size, len(body), err)
		}
	}
}

// An answer is not replayed once its call was undone, and lists do not open it.
func TestAnswerGoesWithItsRecord(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	r.settle(e, answered(e, make([]byte, 1000)))
	if n := len(r.pieces()); n != 1 {
		t.Fatalf("%d pieces", n)
	}
	if err := r.Undone(ctx, execution.Undoing{Key: c.Key}); err != nil {
		t.Fatal(err)
	}
	r.status(c, execution.RolledBack)
	if n := len(r.pieces()); n != 0 {
		t.Errorf("%d pieces of a call that was undone", n)
	}
}

// An altered record is an error, never a free key.
func TestP1AlteredRecordIsNotAFreeKey(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	r.settle(e, answered(e, nil))
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte{'x'})) {
		if err != nil {
			t.Fatal(err)
		}
		entry.Value[len(entry.Value)-1] ^= 1
		if _, err := r.mem.Commit(ctx, store.Write{Key: entry.Key, Value: entry.Value}); err != nil {
			t.Fatal(err)
		}
	}
	if found, err := r.LookUp(ctx, c.Key, c.Fingerprint); !errors.Is(err, execution.ErrStore) {
		t.Errorf("found %+v, %v", found, err)
	}
}

// P4: a store without room does not keep the gateway from starting. What was open is in
// doubt all the same, and is recorded so once there is room.
func TestP4RecoveryOnAFullDisk(t *testing.T) {
	r, full := newFailing(t)
	c := r.call("a")
	r.claim(c)
	full.fails(func([]store.Write) error { return fmt.Errorf("disk: %w", store.ErrFull) })
	g, recovery, err := execution.Open(ctx, full, r.ring)
	if err != nil || recovery != (execution.Recovery{Unrecorded: 1}) {
		t.Fatalf("%+v, %v", recovery, err)
	}
	r.Guard = g
	r.status(c, execution.Doubtful)

	full.fails(nil)
	if g, recovery, err = execution.Open(ctx, full, r.ring); err != nil || recovery != (execution.Recovery{InDoubt: 1}) {
		t.Fatalf("with room again: %+v, %v", recovery, err)
	}
	r.Guard = g
	r.status(c, execution.Doubtful)
}

func TestFollowerGetsBytesAtOnceAndTheEndOnlyOnceSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		e := r.claim(c)
		flight := r.status(c, execution.RunningHere).Flight
		f := flight.Follow()
		defer f.Close()

		type read struct {
			text string
			err  error
		}
		reads := make(chan read, 10)
		go func() {
			if head, err := f.Head(ctx); err != nil || head.Status != 200 {
				t.Errorf("head %v, %v", head, err)
			}
			for {
				p := make([]byte, 10)
				n, err := f.Read(ctx, p)
				reads <- read{string(p[:n]), err}
				if err != nil {
					return
				}
			}
		}()
		e.Recording().Start(200, nil)
		e.Write([]byte("one"), false)
		if got := <-reads; got.text != "one" {
			t.Errorf("read %v", got)
		}
		e.Write([]byte("two"), false)
		if got := <-reads; got.text != "two" {
			t.Errorf("read %v", got)
		}
		synctest.Wait()
		if len(reads) != 0 {
			t.Fatal("the end came before the outcome was recorded")
		}
		r.settle(e, execution.Outcome{Verdict: execution.Completed, Whole: true})
		if got := <-reads; got.err != io.EOF {
			t.Errorf("read %v", got)
		}
	})
}

func TestTruncatedOwnerTruncatesItsFollowers(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	f := r.find(c).Flight.Follow()
	defer f.Close()
	e.Recording().Start(200, nil)
	e.Write([]byte("half"), false)
	r.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseTruncated})
	p := make([]byte, 10)
	if n, err := f.Read(ctx, p); string(p[:n]) != "half" || err != nil {
		t.Errorf("read %q, %v", p[:n], err)
	}
	if _, err := f.Read(ctx, p); !errors.Is(err, execution.ErrCut) {
		t.Errorf("end of a truncated answer: %v", err)
	}
	r.status(c, execution.Doubtful)
}

func TestReleaseByStatusAnswersAllWaiters(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	f := r.find(c).Flight.Follow()
	defer f.Close()
	e.Recording().Start(429, nil)
	e.Write([]byte("slow down"), false)
	r.settle(e, execution.Outcome{Verdict: execution.Released, Status: 429, Whole: true})
	p := make([]byte, 20)
	n, err := f.Read(ctx, p)
	if string(p[:n]) != "slow down" || err != nil {
		t.Errorf("read %q, %v", p[:n], err)
	}
	if _, err := f.Read(ctx, p); err != io.EOF {
		t.Errorf("end: %v", err)
	}
	r.status(c, execution.Free)
}

func TestReleaseByProofElectsOneWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		owner := r.claim(c)
		var claims, running, most atomic.Int32
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				for {
					found, err := r.LookUp(ctx, c.Key, c.Fingerprint)
					if err != nil {
						t.Error(err)
						return
					}
					switch found.Status {
					case execution.Replayable:
						return
					case execution.RunningHere:
						f := found.Flight.Follow()
						if f == nil {
							continue
						}
						_, err := f.Head(ctx)
						f.Close()
						if err == nil {
							return // it has the answer
						}
						<-found.Flight.Done()
					case execution.Free:
						e, err := r.Claim(ctx, c, found)
						if errors.Is(err, execution.ErrTaken) {
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						most.Store(max(most.Load(), running.Add(1)))
						time.Sleep(time.Second)
						n := claims.Add(1)
						running.Add(-1)
						if n < 3 {
							r.settle(e, execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent})
							return
						}
						r.settle(e, answered(e, []byte("done")))
						return
					default:
						t.Errorf("status %d", found.Status)
						return
					}
				}
			})
		}
		synctest.Wait()
		r.settle(owner, execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent})
		wg.Wait()
		if claims.Load() != 3 || most.Load() != 1 {
			t.Errorf("%d claims, %d at once; want 3, one at a time", claims.Load(), most.Load())
		}
	})
}

func TestTooLargeAnswerFlowsOnAndKeepsItsKey(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	c.ResultCap = 1000
	e := r.claim(c)
	flight := r.find(c).Flight
	follower := flight.Follow()
	defer follower.Close()
	e.Recording().Start(200, nil)
	var got []byte
	p := make([]byte, 700)
	for i := range 10 {
		e.Write(bytes.Repeat([]byte{byte('0' + i)}, 700), false)
		n, err := follower.Read(ctx, p)
		if err != nil {
			t.Fatalf("after %d bytes: %v", len(got), err)
		}
		got = append(got, p[:n]...)
	}
	if flight.Follow() != nil {
		t.Error("a newcomer may follow from a beginning that is gone")
	}
	r.settle(e, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
	rest, err := io.ReadAll(reader{follower})
	if got = append(got, rest...); err != nil || len(got) != 7000 || got[6999] != '9' {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	r.status(c, execution.ResultUnavailable)
}

// P7: an answer that is too large to keep waits for who reads it slowly, and goes on
// without them where they have been waited for long enough.
func TestRecordingWaitsForSlowReaders(t *testing.T) {
	begin := func(t *testing.T, patience time.Duration) (*rig, *execution.Call, *execution.Execution, *execution.Follower, func() time.Duration) {
		r := newRig(t)
		c := r.call("a")
		c.ResultCap = 1000
		e := r.claim(c)
		e.Recording().SetReadAhead(2000)
		var waited time.Duration
		e.Recording().SetPace(func(ready <-chan struct{}) bool {
			began := time.Now()
			defer func() { waited += time.Since(began) }()
			select {
			case <-ready:
				return true
			case <-time.After(patience - waited):
				return false
			}
		})
		f := r.find(c).Flight.Follow()
		e.Recording().Start(200, nil)
		return r, c, e, f, func() time.Duration { return waited }
	}
	t.Run("waited for", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r, c, e, f, waited := begin(t, time.Hour)
			defer f.Close()
			written := make(chan struct{})
			go func() {
				defer close(written)
				for i := range 50 {
					e.Write(bytes.Repeat([]byte{byte(i)}, 100), false)
				}
			}()
			synctest.Wait()
			if size := e.Recording().Size(); size != 2000 {
				t.Errorf("%d bytes were taken from the upstream, want 2000: what can be read back", size)
			}
			time.Sleep(time.Minute)
			var got []byte
			p := make([]byte, 300)
			for len(got) < 5000 {
				n, err := f.Read(ctx, p)
				if err != nil {
					t.Fatalf("after %d bytes: %v", len(got), err)
				}
				got = append(got, p[:n]...)
			}
			<-written
			for i, b := range got {
				if b != byte(i/100) {
					t.Fatalf("byte %d is %d", i, b)
				}
			}
			if waited() != time.Minute {
				t.Errorf("the upstream waited for %v", waited())
			}
			r.settle(e, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
			r.status(c, execution.ResultUnavailable)
		})
	})
	t.Run("too slow", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r, c, e, f, waited := begin(t, time.Minute)
			defer f.Close()
			quick := r.find(c).Flight.Follow()
			defer quick.Close()
			all := make(chan int)
			go func() {
				got, err := io.ReadAll(reader{quick})
				if err != nil {
					t.Errorf("the quick one: %v", err)
				}
				all <- len(got)
			}()
			back := e.Recording().ReadBack(0)
			for range 50 {
				e.Write(make([]byte, 100), true)
				synctest.Wait()
			}
			if waited() != time.Minute {
				t.Errorf("the upstream waited for %v", waited())
			}
			r.settle(e, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
			if _, err := f.Read(ctx, make([]byte, 10)); !errors.Is(err, execution.ErrCut) {
				t.Errorf("the slow one: %v", err)
			}
			if n, err := back.Read(make([]byte, 10)); n > 0 || err == nil || err == io.EOF {
				t.Errorf("the owner's client read %d bytes, %v", n, err)
			}
			_ = back.Close()
			if got := <-all; got != 5000 {
				t.Errorf("the quick one got %d bytes", got)
			}
			r.status(c, execution.ResultUnavailable)
		})
	})
}

// What nobody reads of an answer that is too large is not stored; what the owner's client
// needs of it then is.
func TestReadBack(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	c.ResultCap = 1000
	e := r.claim(c)
	e.Recording().Start(200, nil)
	if !e.Write([]byte(strings.Repeat("a", 1000)), false) {
		t.Error("an answer that is kept was not recorded")
	}
	if e.Write([]byte(strings.Repeat("b", 500)), false) {
		t.Error("what nobody reads was recorded")
	}
	for i, text := range []string{"needed", "again"} {
		back := e.Recording().ReadBack(e.Recording().Size())
		if !e.Write([]byte(text), true) {
			t.Error("what is needed was not recorded")
		}
		p := make([]byte, 100)
		if n, err := back.Read(p); string(p[:n]) != text || err != nil {
			t.Errorf("%d: read %q, %v", i, p[:n], err)
		}
		if n, err := back.Read(p); n != 0 || err != io.EOF {
			t.Errorf("%d: then %d, %v", i, n, err)
		}
		_ = back.Close()
		if e.Write([]byte("skipped"), false) {
			t.Error("what nobody reads any more was recorded")
		}
	}
	last := e.Recording().ReadBack(e.Recording().Size())
	e.Write([]byte("last"), true)
	r.settle(e, execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
	if got, err := io.ReadAll(last); string(got) != "last" || err != nil {
		t.Errorf("after the settling: %q, %v", got, err)
	}
	_ = last.Close()
}

type reader struct{ f *execution.Follower }

func (r reader) Read(p []byte) (int, error) { return r.f.Read(ctx, p) }

func TestFollowerStopsWaitingWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("a")
		e := r.claim(c)
		f := r.find(c).Flight.Follow()
		defer f.Close()
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := f.Head(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("head: %v", err)
		}
		r.settle(e, execution.Outcome{Verdict: execution.Released})
		if _, err := f.Head(ctx); !errors.Is(err, execution.ErrNoAnswer) {
			t.Errorf("head after the release: %v", err)
		}
	})
}

// P1, P4: a damaged record is an earlier call that cannot be read, and no store that does not answer:
// it is not forwarded unguarded, and does not hold up what asks for it forever.
func TestP1DamagedRecordIsUnreadable(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	r.settle(e, answered(e, []byte("done")))
	bad := &storetest.Damaged{Store: r.mem, Keys: map[string]bool{"x" + string(c.Key[:]): true}}
	g, _, err := execution.Open(ctx, bad, r.ring)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Get(ctx, c.Key); !errors.Is(err, execution.ErrStore) || !errors.Is(err, execution.ErrUnreadable) {
		t.Errorf("a damaged record: %v", err)
	}
	bad.Keys["r"+string(c.Key[:])] = true
	if _, err := g.LookUp(ctx, c.Key, c.Fingerprint); !errors.Is(err, execution.ErrUnreadable) {
		t.Errorf("a damaged record, and its answer too: %v", err)
	}
}

// P1: a clock that was far ahead and is set back brings back an expired answer. It is not given for
// the claim that was made meanwhile, whose outcome is another.
func TestP1NoAnswerOfAnEarlierClaimAfterTheClockWasSetBack(t *testing.T) {
	start := time.Now()
	for name, late := range map[string]func(r *rig, c *execution.Call){
		"running": func(r *rig, c *execution.Call) {
			r.claim(c)
		},
		"in doubt": func(r *rig, c *execution.Call) {
			if err := r.claim(c).Settle(ctx, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost}); err != nil {
				r.t.Fatal(err)
			}
		},
		"released": func(r *rig, c *execution.Call) {
			if err := r.claim(c).Settle(ctx, execution.Outcome{Verdict: execution.Released}); err != nil {
				r.t.Fatal(err)
			}
		},
		"rolled back": func(r *rig, c *execution.Call) {
			if err := r.Undone(ctx, undoing(c, "")); err != nil {
				r.t.Fatal(err)
			}
		},
	} {
		now := start
		r := &rig{t: t, mem: memory.New(memory.Options{Now: func() time.Time { return now }}), ring: seal.Generate()}
		r.restart()
		c := r.call("a")
		e := r.claim(c)
		r.settle(e, answered(e, make([]byte, 1000)))
		now = start.Add(c.KeepKey + time.Hour)
		r.status(c, execution.Free)
		late(r, c)
		want := r.status(c, r.find(c).Status).Status
		now = start.Add(time.Minute)
		if got := r.find(c).Status; got != want || got == execution.Replayable {
			t.Errorf("%s: status %d with the clock set back, before %d", name, got, want)
		}
		if n := len(r.pieces()); n != 0 {
			t.Errorf("%s: %d pieces of an earlier answer are back", name, n)
		}
	}
}
