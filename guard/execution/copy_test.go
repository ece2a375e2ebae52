package execution_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// target is a store whose commits fail from some on, or are changed.
type target struct {
	store.Store
	after  int // commits that succeed; negative is all
	err    error
	change func(batch []store.Write) []store.Write
}

func (f *target) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if f.after == 0 {
		return 0, f.err
	}
	f.after--
	if f.change != nil {
		batch = f.change(batch)
	}
	return f.Store.Commit(ctx, batch...)
}

// copied fails unless the copy succeeds.
func copied(t *testing.T, from, to store.Store) execution.Copied {
	t.Helper()
	done, err := execution.Copy(ctx, from, to, execution.CopyOptions{Kept: []string{"le"}})
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// entriesOf are the entries of a store, without versions.
func entriesOf(t *testing.T, st store.Store) (all []string) {
	t.Helper()
	for e, err := range st.Scan(ctx, store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		expires := int64(0)
		if !e.Expires.IsZero() {
			expires = e.Expires.UnixMicro()
		}
		all = append(all, fmt.Sprintf("%x %x %d", e.Key, e.Value, expires))
	}
	return all
}

// filledRig is a gateway's store with executions in all states, large answers, and more entries than
// fit into a batch.
func filledRig(t *testing.T) (r *rig, bodies map[string][]byte) {
	r, bodies = newRig(t), map[string][]byte{}
	for i, size := range []int{0, 100, 40_000, 256<<10 + 1, 3 << 20} {
		id := fmt.Sprint("done", i)
		bodies[id] = bytes.Repeat([]byte{byte('a' + i)}, size)
		e := r.claim(r.call(id))
		r.settle(e, answered(e, bodies[id]))
	}
	r.claim(r.call("open"))
	var batch []store.Write
	for i := range 3 * store.MaxBatch {
		batch = append(batch, store.Write{Key: fmt.Appendf(nil, "le%08d", i), Value: bytes.Repeat([]byte{byte(i)}, 300), Bulk: true})
		if len(batch) == store.MaxBatch {
			if _, err := r.mem.Commit(ctx, batch...); err != nil {
				t.Fatal(err)
			}
			batch = nil
		}
	}
	return r, bodies
}

// resumed opens a gateway on a copy, which must know what the one before has executed.
func resumed(t *testing.T, before *rig, st store.Store, bodies map[string][]byte) {
	t.Helper()
	g, recovery, err := execution.Open(ctx, st, before.ring)
	if err != nil {
		t.Fatal(err)
	}
	if g.Node() != before.Node() || recovery.InDoubt != 1 {
		t.Errorf("the copy is of node %s and has %d in doubt, want %s and 1", g.Node(), recovery.InDoubt, before.Node())
	}
	for id, want := range bodies {
		c := before.call(id)
		found, err := g.LookUp(ctx, c.Key, c.Fingerprint)
		if err != nil || found.Status != execution.Replayable {
			t.Fatalf("%s: status %d, %v", id, found.Status, err)
		}
		result, err := g.Result(ctx, c.Key, found)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(result.Body(ctx)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, %v; want %d", id, len(got), err, len(want))
		}
	}
	c := before.call("open")
	if found, err := g.LookUp(ctx, c.Key, c.Fingerprint); err != nil || found.Status != execution.Doubtful {
		t.Errorf("what was open: status %d, %v", found.Status, err)
	}
}

// P1: a copy has every entry with its value and its expiry, and a gateway on it goes on where the one
// on the source has stopped; a copy of the copy is the same again.
func TestCopy(t *testing.T) {
	r, bodies := filledRig(t)
	path := filepath.Join(t.TempDir(), "store")
	embedded, err := badger.Open(path, badger.Options{MinFree: -1})
	if err != nil {
		t.Fatal(err)
	}
	back := memory.New(memory.Options{})
	first := copied(t, r.mem, embedded)
	second := copied(t, embedded, back)
	want := entriesOf(t, r.mem)
	for name, st := range map[string]store.Store{"Badger": embedded, "back in memory": back} {
		if got := entriesOf(t, st); strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("%s has %d entries, want the %d of the source", name, len(got), len(want))
		}
	}
	// The layout is written apart, behind everything.
	if first.Digest != second.Digest || first.Entries != int64(len(want)-1) || first.Written != first.Entries || first.Bytes < 3<<20 {
		t.Errorf("first %+v, second %+v, want %d entries", first, second, len(want)-1)
	}
	resumed(t, r, embedded, bodies)
	resumed(t, r, back, bodies)
	if err := embedded.Close(); err != nil {
		t.Fatal(err)
	}
	kept, err := filepath.Glob(filepath.Join(path, "bodies", "kept-*"))
	if err != nil || len(kept) == 0 {
		t.Errorf("entries of the ledger are not kept apart: %v, %v", kept, err)
	}
}

// P1: what is left of an interrupted copy opens no gateway, is no source, and is gone on with: only what
// is missing or has changed meanwhile is written.
func TestCopyIsInterruptedAndGoesOn(t *testing.T) {
	r, bodies := filledRig(t)
	to := memory.New(memory.Options{})
	cut := errors.New("cut off")
	for n := range 3 { // commits of a run
		_, err := execution.Copy(ctx, r.mem, &target{Store: to, after: n, err: cut}, execution.CopyOptions{})
		if !errors.Is(err, cut) {
			t.Fatalf("a copy that is cut off after %d commits: %v", n, err)
		}
		if n == 0 {
			continue // nothing was written yet
		}
		if _, _, err := execution.Open(ctx, to, r.ring); !errors.Is(err, execution.ErrUnfinished) {
			t.Fatalf("a gateway on half of a copy: %v", err)
		}
		if _, err := execution.Copy(ctx, to, memory.New(memory.Options{}), execution.CopyOptions{}); !errors.Is(err, execution.ErrUnfinished) {
			t.Fatalf("a copy of half of a copy: %v", err)
		}
	}
	// The gateway has gone on with the source meanwhile.
	e := r.claim(r.call("later"))
	bodies["later"] = []byte("later")
	r.settle(e, answered(e, bodies["later"]))
	if _, err := r.mem.Commit(ctx, store.Write{Key: []byte("a-1"), Value: []byte("changed")}, store.Write{Key: []byte("le00000000"), Delete: true}); err != nil {
		t.Fatal(err)
	}
	done := copied(t, r.mem, to)
	if got, want := entriesOf(t, to), entriesOf(t, r.mem); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("the copy has %d entries, want the %d of the source", len(got), len(want))
	}
	if done.Written >= done.Entries || done.Written == 0 {
		t.Errorf("%d of %d entries were written by the run that went on", done.Written, done.Entries)
	}
	resumed(t, r, to, bodies)
	if _, err := execution.Copy(ctx, r.mem, to, execution.CopyOptions{}); !errors.Is(err, execution.ErrTarget) {
		t.Errorf("a copy into a finished copy: %v", err)
	}
}

// What is no store of a gateway is not copied, and what holds something is not overwritten.
func TestCopyRefuses(t *testing.T) {
	r := newRig(t)
	empty, other := memory.New(memory.Options{}), newRig(t).mem
	foreign, newer := memory.New(memory.Options{}), memory.New(memory.Options{})
	for st, w := range map[store.Store]store.Write{
		foreign: {Key: []byte("x"), Value: []byte("1")}, newer: {Key: []byte("mlayout"), Value: []byte("1000")},
	} {
		if _, err := st.Commit(ctx, w); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name     string
		from, to store.Store
		want     error
	}{
		{"an empty source", empty, memory.New(memory.Options{}), execution.ErrNoSource},
		{"a source of another layout", newer, memory.New(memory.Options{}), execution.ErrLayout},
		{"a target in use", r.mem, other, execution.ErrTarget},
		{"a target with something else", r.mem, foreign, execution.ErrTarget},
	} {
		before := entriesOf(t, c.to)
		if _, err := execution.Copy(ctx, c.from, c.to, execution.CopyOptions{}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if after := entriesOf(t, c.to); len(after) != len(before) {
			t.Errorf("%s: it was written to", c.name)
		}
	}
}

// damaged is a store with a value that cannot be read.
type damaged struct{ store.Store }

func (d damaged) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		for e, err := range d.Store.Scan(ctx, r) {
			if len(e.Key) > 0 && e.Key[0] == 'x' && r.Limit == 0 {
				yield(store.Entry{Key: e.Key}, store.ErrDamaged)
				return
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

// P1: a copy that lacks something, whatever the reason, is none: no gateway opens it.
func TestCopyIsVerified(t *testing.T) {
	r, _ := filledRig(t)
	dropped := func(batch []store.Write) []store.Write {
		if len(batch) > 1 {
			return batch[1:]
		}
		return batch
	}
	altered := func(batch []store.Write) []store.Write {
		for i := range batch {
			if !batch[i].Expires.IsZero() {
				batch[i].Expires = batch[i].Expires.Add(time.Microsecond)
			}
		}
		return batch
	}
	for name, c := range map[string]struct {
		from store.Store
		to   target
		want error
	}{
		"a write is lost":        {r.mem, target{after: -1, change: dropped}, execution.ErrDiffers},
		"an expiry is altered":   {r.mem, target{after: -1, change: altered}, execution.ErrDiffers},
		"the source is damaged":  {damaged{r.mem}, target{after: -1}, store.ErrDamaged},
		"the source is not ours": {&target{Store: r.mem, err: store.ErrUnhealthy}, target{after: -1}, store.ErrUnhealthy},
	} {
		to := memory.New(memory.Options{})
		c.to.Store = to
		_, err := execution.Copy(ctx, c.from, &c.to, execution.CopyOptions{})
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if _, _, err := execution.Open(ctx, to, r.ring); (c.want != nil) != errors.Is(err, execution.ErrUnfinished) {
			t.Errorf("%s: a gateway on it: %v", name, err)
		}
	}
}

// What expires during the copy, or by one of two clocks, is no difference.
func TestCopyWhileEntriesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 3000 {
			w := store.Write{Key: fmt.Appendf(nil, "q%05d", i), Value: []byte("1"), Expires: time.Now().Add(time.Duration(i) * 10 * time.Millisecond)}
			if _, err := r.mem.Commit(ctx, w); err != nil {
				t.Fatal(err)
			}
		}
		// The target's clock is 7 s ahead.
		to := memory.New(memory.Options{Now: func() time.Time { return time.Now().Add(7 * time.Second) }})
		n := 0
		slow := &target{Store: to, after: -1, change: func(batch []store.Write) []store.Write {
			if n++; n > 1 {
				time.Sleep(time.Second)
			}
			return batch
		}}
		if _, err := execution.Copy(ctx, r.mem, slow, execution.CopyOptions{Progress: func(p execution.CopyProgress) {
			if p.Step == execution.CopyVerifies {
				time.Sleep(time.Second)
			}
		}}); err != nil {
			t.Fatal(err)
		}
	})
}

// Progress says how far each step has come, of a number that was counted before.
func TestCopyReports(t *testing.T) {
	r, _ := filledRig(t)
	steps, last := map[execution.CopyStep]int{}, execution.CopyProgress{}
	done, err := execution.Copy(ctx, r.mem, memory.New(memory.Options{}), execution.CopyOptions{Count: true, Progress: func(p execution.CopyProgress) {
		if p.Step == last.Step && p.Entries <= last.Entries || p.Step != execution.CopyCounts && p.Of < p.Entries {
			t.Errorf("%+v after %+v", p, last)
		}
		last = p
		steps[p.Step]++
	}})
	if err != nil {
		t.Fatal(err)
	}
	if steps[execution.CopyCounts] < 10 || steps[execution.CopyCopies] < 10 || steps[execution.CopyVerifies] < 10 || last.Of != done.Entries+1 {
		t.Errorf("reports %v, the last %+v of %d", steps, last, done.Entries)
	}
}
