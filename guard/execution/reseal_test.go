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
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
)

// rotate gives the rig's ring another key, as a gateway does.
func (r *rig) rotate() {
	r.t.Helper()
	next, err := r.ring.Rotated()
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.ring.Adopt(next, nil, func(id uint32) error { return r.Keys().Hold(ctx, id) }); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) reseal() execution.ResealProgress {
	r.t.Helper()
	p, err := r.Reseal(ctx, 0, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if p.Finished.IsZero() {
		r.t.Error("a Reseal without an error is not finished")
	}
	return p
}

// under counts the sealed values of a space by their key.
func (r *rig) under(space string) map[uint32]int {
	r.t.Helper()
	n := map[uint32]int{}
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte(space))) {
		if err != nil {
			r.t.Fatal(err)
		}
		n[r.ring.KeyOf(entry.Value)]++
	}
	return n
}

func (r *rig) inUse() []execution.KeyUse {
	r.t.Helper()
	uses, err := r.Keys().InUse(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return uses
}

func (r *rig) wantInUse(want ...uint32) {
	r.t.Helper()
	var got []uint32
	for _, use := range r.inUse() {
		got = append(got, use.ID)
	}
	if !slices.Equal(got, want) {
		r.t.Errorf("keys in use: %v, want %v", got, want)
	}
}

func (r *rig) replays(c *execution.Call, body []byte) {
	r.t.Helper()
	result, err := r.Result(ctx, c.Key, r.status(c, execution.Replayable))
	if err != nil {
		r.t.Fatal(err)
	}
	if got, err := io.ReadAll(result.Body(ctx)); err != nil || !bytes.Equal(got, body) {
		r.t.Errorf("P1: a replay of %d bytes, %v", len(got), err)
	}
}

// lacking is the rig's ring less its first keys. It seals nothing for the rig.
func (r *rig) lacking(first int) *seal.Ring {
	r.t.Helper()
	text, err := r.ring.MarshalText()
	if err != nil {
		r.t.Fatal(err)
	}
	head, rows, _ := strings.Cut(string(text), "[")
	parts := strings.SplitAfter(rows, "}")
	less, err := seal.Parse([]byte(head + "[" + strings.TrimLeft(strings.Join(parts[first:], ""), ",")))
	if err != nil {
		r.t.Fatal(err)
	}
	return less
}

// P1: a retry after a rotation is a replay: at once, while values are sealed anew,
// afterwards, and after a restart. When all is done, the old key is needed until the
// last answer under it has expired, and no longer.
func TestP1RetryAfterRotationReplays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		type kept struct {
			call *execution.Call
			body []byte
		}
		var all []kept
		for i := range 700 { // more than two pages
			c := r.call(fmt.Sprint(i))
			body := bytes.Repeat([]byte("x"), i)
			if i == 0 {
				body = make([]byte, 600<<10)
			}
			e := r.claim(c)
			r.settle(e, answered(e, body))
			all = append(all, kept{c, body})
		}
		doubt := r.call("doubt")
		r.settle(r.claim(doubt), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
		decided := r.call("decided")
		r.settle(r.claim(decided), execution.Outcome{Verdict: execution.InDoubt})
		found, err := r.Get(ctx, decided.Key)
		if err == nil {
			err = r.SettleDoubt(ctx, found, execution.Resolution{By: execution.ByOperator, Operator: "ada", Reason: "the bank says so"})
		}
		if err != nil {
			t.Fatal(err)
		}
		first := r.lacking(0) // which has key 1 only
		check := func(when string) {
			t.Helper()
			if all, err := r.Resolutions(ctx, decided.Key); err != nil || len(all) != 1 || all[0].Operator != "ada" {
				t.Errorf("%s: resolutions %+v, %v", when, all, err)
			}
			for _, k := range all {
				r.replays(k.call, k.body)
			}
			if found := r.status(doubt, execution.Doubtful); found.Record.Cause != execution.CauseLost {
				t.Errorf("%s: the cause is %q", when, found.Record.Cause)
			}
		}
		r.rotate()
		check("after the rotation")
		r.wantInUse(1, 2)
		steps, between := 0, 0
		p, err := r.Reseal(ctx, 0, func(p execution.ResealProgress) {
			steps++
			if n := r.under("x")[1]; n > 0 && n < len(all) {
				between++
				r.replays(all[steps].call, all[steps].body)
			}
		})
		if err != nil || p.Key != 2 || p.Resealed != len(all)+3 || p.Seen < p.Resealed || p.Damaged != 0 || between == 0 {
			t.Errorf("progress %+v after %d steps, %d in the middle; %v", p, steps, between, err)
		}
		if x, m := r.under("x"), r.under("mkey"); x[1] != 0 || x[2] != len(all)+1 || m[1] != 0 || m[2] != 1 {
			t.Errorf("records by key: %v, key check: %v", x, m)
		}
		for entry, err := range r.mem.Scan(ctx, store.Range{}) {
			if err != nil {
				t.Fatal(err)
			}
			if _, err := first.Open(nil, entry.Value, entry.Key); err == nil && entry.Key[0] != 'r' {
				t.Fatalf("P8: the old key still opens a value in space %q", entry.Key[0])
			}
		}
		pieces := r.under("r")
		left := p.Left[0]
		if pieces[1] == 0 || left.Results != pieces[1] || left.Records != 0 || left.Until.Before(time.Now().Add(24*time.Hour)) {
			t.Errorf("pieces by key: %v; left %+v", pieces, left)
		}
		check("after all was sealed anew")
		again := r.reseal()
		if again.Resealed != 0 || again.Left[0] != left {
			t.Errorf("a second pass: %+v", again)
		}

		// As long as answers stand under it, a ring without the old key is refused.
		r.restart()
		check("after a restart")
		less := r.lacking(1)
		if _, _, err := execution.Open(ctx, r.mem, less); !errors.Is(err, execution.ErrMissingKey) || !strings.Contains(err.Error(), "sealing key 1") {
			t.Errorf("a ring without key 1: %v", err)
		}
		r.wantInUse(1, 2)
		time.Sleep(time.Until(left.Until))
		r.wantInUse(2)
		r.ring = less
		r.restart()
		for _, k := range all {
			r.status(k.call, execution.ResultExpired)
		}
		r.status(doubt, execution.Doubtful)
		if n := r.reseal().Left; len(n) != 0 {
			t.Errorf("left in the end: %v", n)
		}
	})
}

// A record whose execution runs is not touched: its outcome is conditional on what
// stands there, and would be lost (P6).
func TestP6ResealWaitsForRunningExecutions(t *testing.T) {
	for name, end := range map[string]func(*rig, *execution.Execution){
		"completed": func(r *rig, e *execution.Execution) { r.settle(e, answered(e, []byte("x"))) },
		"released": func(r *rig, e *execution.Execution) {
			r.settle(e, execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent})
		},
		"unrecorded": func(r *rig, e *execution.Execution) {
			cut, cancel := context.WithCancel(ctx)
			cancel()
			if err := e.Settle(cut, execution.Outcome{Verdict: execution.InDoubt}); !errors.Is(err, execution.ErrUnrecorded) {
				r.t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				for i := range 3 {
					e := r.claim(r.call(fmt.Sprint(i)))
					r.settle(e, answered(e, nil))
				}
				c := r.call("runs")
				e := r.claim(c)
				r.rotate()
				done := make(chan execution.ResealProgress, 1)
				go func() { done <- r.reseal() }()
				synctest.Wait()
				if x := r.under("x"); x[1] != 1 || x[2] != 3 {
					t.Errorf("records by key: %v", x)
				}
				end(r, e)
				if p := <-done; len(p.Left) != 0 {
					t.Errorf("left: %+v", p.Left)
				}
				if x := r.under("x"); x[1] != 0 {
					t.Errorf("records by key: %v", x)
				}
				r.wantInUse(2)
				if name == "unrecorded" {
					r.status(c, execution.Doubtful)
				}
			})
		})
	}
}

// A commit under way may carry a value under the old key. A pass that went ahead of it
// would call that key free.
func TestResealWaitsForCommitsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, f := newFailing(t)
		held, let := make(chan struct{}), make(chan struct{})
		f.fails(func(batch []store.Write) error {
			if batch[0].Key[0] == 'x' {
				close(held)
				<-let
			}
			return nil
		})
		c := r.call("a")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			e := r.claim(c)
			r.settle(e, answered(e, nil))
		}()
		<-held
		r.rotate()
		done := make(chan execution.ResealProgress, 1)
		cut, cancel := context.WithCancel(ctx)
		go func() {
			// One that gives up leaves the next to wait for the same.
			if _, err := r.Reseal(cut, 0, nil); !errors.Is(err, context.Canceled) {
				t.Errorf("a pass that was stopped: %v", err)
			}
			done <- r.reseal()
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		select {
		case p := <-done:
			t.Errorf("done before the commit was: %+v", p)
		default:
		}
		f.fails(nil)
		close(let)
		<-ended
		<-done
		if x := r.under("x"); x[1] != 0 || x[2] != 1 {
			t.Errorf("records by key: %v", x)
		}
		r.wantInUse(2)
	})
}

// P1, P6: claims, outcomes and rotations at once; every outcome lands.
func TestP1ResealBesideTraffic(t *testing.T) {
	r := newRig(t)
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for n := range 150 {
				c := r.call(fmt.Sprint(worker, "-", n))
				found, err := r.LookUp(ctx, c.Key, c.Fingerprint)
				if err != nil {
					t.Error(err)
					return
				}
				e, err := r.Claim(ctx, c, found)
				if err != nil {
					t.Error(err)
					return
				}
				if err := e.Settle(ctx, answered(e, bytes.Repeat([]byte("x"), n*10))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 10 {
		r.rotate()
		r.reseal()
	}
	wg.Wait()
	r.rotate()
	r.reseal()
	if x := r.under("x"); len(x) != 1 || x[12] != 600 {
		t.Errorf("records by key: %v", x)
	}
	r.restart()
	for worker := range 4 {
		for n := range 150 {
			r.replays(r.call(fmt.Sprint(worker, "-", n)), bytes.Repeat([]byte("x"), n*10))
		}
	}
}

// A pass that is stopped, by a cancellation or by the store, is finished by the next.
func TestResealGoesOnWhereItWasStopped(t *testing.T) {
	r, f := newFailing(t)
	const records = 300
	for i := range records {
		e := r.claim(r.call(fmt.Sprint(i)))
		r.settle(e, answered(e, nil))
	}
	r.rotate()
	for name, stop := range map[string]func(cancel func()) error{
		"cancelled":    func(cancel func()) error { cancel(); return nil },
		"disk is full": func(func()) error { return errDisk },
	} {
		cut, cancel := context.WithCancel(ctx)
		commits := 0
		f.fails(func(batch []store.Write) error {
			// Room that a full disk keeps for outcomes is not taken.
			if !batch[0].If.Holds(nil) {
				t.Error("a batch begins with a change, as outcomes do")
			}
			if commits++; commits == 2 {
				return stop(cancel)
			}
			return nil
		})
		before := r.under("x")[1]
		p, err := r.Reseal(cut, 0, nil)
		cancel()
		if err == nil || !p.Finished.IsZero() || p.Resealed == 0 || p.Resealed >= records {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
		if after := r.under("x")[1]; after == 0 || before-after > p.Resealed {
			t.Errorf("%s: %d records are left of %d, told were %d", name, after, before, p.Resealed)
		}
		r.wantInUse(1, 2)
	}
	f.fails(nil)
	left := r.under("x")[1]
	if p := r.reseal(); p.Resealed != left {
		t.Errorf("%d were left, %d were sealed anew", left, p.Resealed)
	}
	r.wantInUse(2)
}

// What has expired is no work, and keeps no key.
func TestResealPassesOverWhatHasExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		e := r.claim(r.call("a"))
		r.settle(e, answered(e, make([]byte, 1000)))
		time.Sleep(30 * 24 * time.Hour)
		r.rotate()
		if p := r.reseal(); p.Resealed != 1 || len(p.Left) != 0 { // the key check
			t.Errorf("progress %+v", p)
		}
		r.wantInUse(2)
	})
}

// A value that does not open stays as it is, and so does the key that it names: it
// may be another fault than the key's. A key number that is itself damaged is no key.
func TestResealLeavesDamageAlone(t *testing.T) {
	r := newRig(t)
	for i := range 3 {
		e := r.claim(r.call(fmt.Sprint(i)))
		r.settle(e, answered(e, nil))
	}
	doubt := r.call("doubt")
	r.settle(r.claim(doubt), execution.Outcome{Verdict: execution.InDoubt})
	n := 0
	var damaged [][]byte
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("x"))) {
		if err != nil {
			t.Fatal(err)
		}
		switch n++; n {
		case 1, 2: // one of them may be the doubtful one
			entry.Value[len(entry.Value)-1] ^= 1
		case 3:
			copy(entry.Value, []byte{0, 0, 0, 0})
		case 4:
			continue
		}
		if _, err := r.mem.Commit(ctx, store.Write{Key: entry.Key, Value: entry.Value, Expires: entry.Expires}); err != nil {
			t.Fatal(err)
		}
		damaged = append(damaged, entry.Value)
	}
	r.rotate()
	if p := r.reseal(); p.Damaged != 3 || p.Left[0].Records != 2 || len(p.Left) != 1 {
		t.Errorf("progress %+v", p)
	}
	n = 0
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("x"))) {
		if err != nil {
			t.Fatal(err)
		}
		if n < 3 && !bytes.Equal(entry.Value, damaged[n]) {
			t.Error("a damaged value was changed")
		}
		n++
	}
	r.wantInUse(1, 2)
	r.restart()
}

// A store of before the note may need any key of its ring.
func TestKeysInUseWithoutANote(t *testing.T) {
	r := newRig(t)
	r.rotate()
	if _, err := r.mem.Commit(ctx, store.Write{Key: []byte("mkeys"), Delete: true}); err != nil {
		t.Fatal(err)
	}
	r.restart()
	r.wantInUse(1, 2)
	r.reseal()
	r.wantInUse(2)
}

// A key that cannot be noted is not used: the store would not know that it needs it.
func TestKeyIsNotedBeforeItIsUsed(t *testing.T) {
	r, f := newFailing(t)
	f.fails(func([]store.Write) error { return errDisk })
	next, err := r.ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	note := func(id uint32) error { return r.Keys().Hold(ctx, id) }
	if _, err := r.ring.Adopt(next, nil, note); !errors.Is(err, execution.ErrStore) {
		t.Errorf("Adopt: %v", err)
	}
	f.fails(nil)
	e := r.claim(r.call("a"))
	r.settle(e, answered(e, nil))
	if x := r.under("x"); x[1] != 1 {
		t.Errorf("records by key: %v", x)
	}
	// A ring that has it opens the store, and from then on it is needed.
	r.ring = next
	r.restart()
	r.wantInUse(1, 2)
}

// What is settled between the look at a record and its commit stays settled.
func TestP1ResealLosesToWhatChangedMeanwhile(t *testing.T) {
	r, f := newFailing(t)
	c, gone := r.call("a"), r.call("gone")
	for _, c := range []*execution.Call{c, gone} {
		r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt})
	}
	found, lost := r.status(c, execution.Doubtful), r.status(gone, execution.Doubtful)
	r.rotate()
	f.fails(func(batch []store.Write) error {
		if len(batch) < 3 || batch[1].Key[0] != 'x' {
			return nil
		}
		f.fails(nil)
		if err := r.SettleDoubt(ctx, execution.Recorded{Key: c.Key, Finding: found}, execution.Resolution{By: execution.ByProbe, Applied: true, Answer: &execution.Head{Status: 200}, Body: []byte("proof")}); err != nil {
			t.Error(err)
		}
		e, err := r.Claim(ctx, gone, lost)
		if err != nil {
			t.Fatal(err)
		}
		r.settle(e, execution.Outcome{Verdict: execution.Released})
		return nil
	})
	if p := r.reseal(); p.Resealed != 1 || len(p.Left) != 0 { // the key check
		t.Errorf("progress %+v", p)
	}
	r.replays(c, []byte("proof"))
	r.status(gone, execution.Free)
	r.wantInUse(2)
}

// Under which key a damaged value was sealed is not known: no older key is given up for it.
func TestResealKeepsTheKeysOfDamagedValues(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	e := r.claim(c)
	r.settle(e, answered(e, make([]byte, 1000)))
	bad := &storetest.Damaged{Store: r.mem, Keys: map[string]bool{"x" + string(c.Key[:]): true}}
	g, _, err := execution.Open(ctx, bad, r.ring)
	if err != nil {
		t.Fatal(err)
	}
	r.Guard = g
	r.rotate()
	if p := r.reseal(); p.Damaged != 1 {
		t.Errorf("%+v", p)
	}
	for _, use := range r.inUse() {
		if !use.Until.IsZero() {
			t.Errorf("key %d is needed until %v only", use.ID, use.Until)
		}
	}
	r.wantInUse(1, 2)
	clear(bad.Keys) // back from a backup
	if p := r.reseal(); p.Damaged != 0 {
		t.Errorf("%+v", p)
	}
	if uses := r.inUse(); len(uses) != 2 || uses[0].Until.IsZero() {
		t.Errorf("%v, and only an answer is left", uses)
	}
}
