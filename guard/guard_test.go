package guard_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

var ctx = context.Background()

// rig is a guard over a memory store that outlives it.
type rig struct {
	t    *testing.T
	mem  *memory.Store
	ring *seal.Ring
	*guard.Guard
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, mem: memory.New(memory.Options{}), ring: seal.Generate()}
	r.restart()
	return r
}

// restart begins another life of the node on the same store.
func (r *rig) restart() guard.Recovery {
	r.t.Helper()
	g, recovery, err := guard.Open(ctx, r.mem, r.ring)
	if err != nil {
		r.t.Fatal(err)
	}
	r.Guard = g
	return recovery
}

func (r *rig) call(id string) *guard.Call {
	scope := guard.Scope{Caller: "user:ada", Guard: "default", Method: "POST", Path: "/v1/charges", ID: id}
	return &guard.Call{
		Key: r.Key(scope), Scope: scope, Origin: guard.OriginGiven, Action: "charge", Workflow: "w-1",
		Deadline: time.Minute, KeepResult: 24 * time.Hour, KeepKey: 30 * 24 * time.Hour, ResultCap: 8 << 20,
	}
}

func (r *rig) find(c *guard.Call) guard.Finding {
	r.t.Helper()
	found, err := r.Find(ctx, c.Key, c.Fingerprint)
	if err != nil {
		r.t.Fatal(err)
	}
	return found
}

func (r *rig) standing(c *guard.Call, want guard.Standing) guard.Finding {
	r.t.Helper()
	found := r.find(c)
	if found.Standing != want {
		r.t.Fatalf("standing %d, want %d", found.Standing, want)
	}
	return found
}

func (r *rig) claim(c *guard.Call) *guard.Execution {
	r.t.Helper()
	e, err := r.Claim(ctx, c, r.find(c))
	if err != nil {
		r.t.Fatal(err)
	}
	return e
}

func answered(e *guard.Execution, body []byte) guard.Outcome {
	e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}, "X-Empty": {""}, "Server": nil})
	for len(body) > 0 {
		n := min(len(body), 10_000)
		e.Write(body[:n])
		body = body[n:]
	}
	return guard.Outcome{Verdict: guard.Completed, Status: 201, Whole: true}
}

func (r *rig) settle(e *guard.Execution, o guard.Outcome) {
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
				found := r.standing(c, guard.Replayable)
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
			_, err := r.Claim(ctx, c, guard.Finding{})
			if err == nil {
				owners.Add(1)
			} else if !errors.Is(err, guard.ErrTaken) {
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
	r.standing(&other, guard.Mismatch)
	r.settle(e, answered(e, nil))
	r.standing(&other, guard.Mismatch)
	r.standing(c, guard.Replayable)
}

// P3: the key separates callers, guards, methods, paths and ids.
func TestP3KeysSeparateScopes(t *testing.T) {
	r := newRig(t)
	base := guard.Scope{Caller: "c", Guard: "g", Method: "POST", Path: "/p", ID: "i"}
	seen := map[guard.Key]guard.Scope{}
	for _, s := range []guard.Scope{
		base,
		{"C", "g", "POST", "/p", "i"}, {"c", "G", "POST", "/p", "i"}, {"c", "g", "PUT", "/p", "i"},
		{"c", "g", "POST", "/P", "i"}, {"c", "g", "POST", "/p", "I"}, {"cg", "", "POST", "/p", "i"}, {"c", "gPOST", "", "/p", "i"},
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
		r.standing(c, guard.Replayable)
		time.Sleep(time.Nanosecond)
		r.standing(c, guard.ResultExpired)
		time.Sleep(29*24*time.Hour - time.Nanosecond)
		r.standing(c, guard.ResultExpired)
		time.Sleep(time.Nanosecond)
		r.standing(c, guard.Free)
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
		r.settle(r.claim(c), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost, Status: 0})
		for range 3 {
			time.Sleep(100 * 365 * 24 * time.Hour / 3)
			if found := r.standing(c, guard.Doubtful); found.Record.Cause != guard.CauseLost {
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
	if got := r.restart(); got.InDoubt != 1 || got.Released != 0 {
		t.Errorf("recovery %+v", got)
	}
	if found := r.standing(c, guard.Doubtful); found.Record.Cause != guard.CauseDied {
		t.Errorf("cause %q", found.Record.Cause)
	}
	r.standing(done, guard.Replayable)
	if got := r.restart(); got != (guard.Recovery{}) {
		t.Errorf("second recovery %+v", got)
	}
}

func TestEvidenceLetsADoubtfulCallRunAgain(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	r.settle(r.claim(c), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost})
	found := r.standing(c, guard.Doubtful)
	e, err := r.Claim(ctx, c, found)
	if err != nil {
		t.Fatal(err)
	}
	r.settle(e, answered(e, []byte("second")))
	if _, err := r.Claim(ctx, c, found); !errors.Is(err, guard.ErrTaken) {
		t.Errorf("claim over a finding of old: %v", err)
	}
	r.standing(c, guard.Replayable)
}

func TestAppliedSettlesDoubt(t *testing.T) {
	for _, answer := range []*guard.Head{nil, {Status: 200, Header: map[string][]string{"A": {"b"}}}} {
		r := newRig(t)
		c := r.call("a")
		r.settle(r.claim(c), guard.Outcome{Verdict: guard.InDoubt})
		found := r.standing(c, guard.Doubtful)
		if err := r.Applied(ctx, c.Key, found, answer, bytes.Repeat([]byte("x"), 1000)); err != nil {
			t.Fatal(err)
		}
		if err := r.Applied(ctx, c.Key, found, answer, nil); !errors.Is(err, guard.ErrTaken) {
			t.Errorf("applied twice: %v", err)
		}
		if answer == nil {
			r.standing(c, guard.ResultUnavailable)
			continue
		}
		result, err := r.Result(ctx, c.Key, r.standing(c, guard.Replayable))
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
		if _, err := r.Claim(ctx, r.call("b"), guard.Finding{}); !errors.Is(err, guard.ErrDraining) {
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

func TestRidersLandWithTheClaimOrNothingDoes(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	rider := store.Write{Key: []byte("zz"), Value: []byte("1"), If: store.Absent()}
	e, err := r.Claim(ctx, c, guard.Finding{}, rider)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.mem.Get(ctx, []byte("zz")); err != nil {
		t.Errorf("the rider did not land: %v", err)
	}
	if err := e.Settle(ctx, guard.Outcome{Verdict: guard.Completed}, store.Write{Key: []byte("yy")}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.mem.Get(ctx, []byte("yy")); err != nil {
		t.Errorf("the rider of the outcome did not land: %v", err)
	}
	other := r.call("b")
	var lost *store.Conflict
	if _, err := r.Claim(ctx, other, guard.Finding{}, rider); !errors.As(err, &lost) || string(lost.Key) != "zz" {
		t.Errorf("claim with a losing rider: %v", err)
	}
	r.standing(other, guard.Free)
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
		e.Write([]byte(strings.Repeat(secret, size)))
		r.settle(e, guard.Outcome{Verdict: guard.Completed, Status: 200, Whole: true})
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
	if _, _, err := guard.Open(ctx, r.mem, seal.Generate()); !errors.Is(err, guard.ErrWrongKey) {
		t.Errorf("another ring: %v", err)
	}
	if fresh, err := guard.Fresh(ctx, r.mem); fresh || err != nil {
		t.Errorf("fresh: %v, %v", fresh, err)
	}
	strange := memory.New(memory.Options{})
	if _, err := strange.Commit(ctx, store.Write{Key: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := guard.Open(ctx, strange, seal.Generate()); !errors.Is(err, guard.ErrLayout) {
		t.Errorf("a store of something else: %v", err)
	}
}

func TestDerivedIDsFollowWhatTheCallIs(t *testing.T) {
	r := newRig(t)
	s := guard.Scope{Caller: "c", Guard: "g", Method: "POST", Path: "/p"}
	a := r.Derive(s, guard.Fingerprint{1})
	if a != r.Derive(s, guard.Fingerprint{1}) || a == r.Derive(s, guard.Fingerprint{2}) {
		t.Error("a derived id must depend on the request and nothing else")
	}
	p := r.Inherit(s, "parent", "act", guard.Fingerprint{1})
	if p != r.Inherit(s, "parent", "act", guard.Fingerprint{1}) || p == r.Inherit(s, "other", "act", guard.Fingerprint{1}) ||
		p == r.Inherit(s, "parent", "other", guard.Fingerprint{1}) || p == a {
		t.Error("an inherited id must depend on parent, action and request")
	}
}
