package execution_test

import (
	"bytes"
	"compress/gzip"
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

// export fails unless the export succeeds.
func export(t *testing.T, from store.Store) *bytes.Reader {
	t.Helper()
	var out bytes.Buffer
	if _, err := execution.Export(ctx, from, &out); err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(out.Bytes())
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

// P1: an import has every entry with its value and its expiry, and a gateway on it goes on where the one on the source
// has stopped; an export of the import has the same bytes again.
func TestExportAndImport(t *testing.T) {
	r, bodies := filledRig(t)
	path := filepath.Join(t.TempDir(), "store")
	embedded, err := badger.Open(path, badger.Options{MinFree: -1})
	if err != nil {
		t.Fatal(err)
	}
	back := memory.New(memory.Options{})
	want := entriesOf(t, r.mem)
	file := export(t, r.mem)
	for _, to := range []store.Store{embedded, back} {
		n, err := execution.Import(ctx, to, file, []string{"le"})
		if err != nil || n != int64(len(want)-1) { // the layout is written apart, behind everything
			t.Fatalf("%d entries, %v; want %d", n, err, len(want)-1)
		}
		if got := entriesOf(t, to); strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("%T has %d entries, want the %d of the source", to, len(got), len(want))
		}
		again := export(t, to)
		must(file.Seek(0, io.SeekStart))
		if !bytes.Equal(must(io.ReadAll(again)), must(io.ReadAll(file))) {
			t.Errorf("the export of %T differs from the one that it was made of", to)
		}
		file = again
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

// P1: what is left of an import that did not end opens no gateway, is not exported, and is not imported into.
func TestImportIsInterrupted(t *testing.T) {
	r, _ := filledRig(t)
	file := export(t, r.mem)
	cut := errors.New("cut off")
	for n := range 5 { // commits
		to := memory.New(memory.Options{})
		if _, err := execution.Import(ctx, &target{Store: to, after: n, err: cut}, file, nil); !errors.Is(err, cut) {
			t.Fatalf("an import that is cut off after %d commits: %v", n, err)
		}
		if n == 0 {
			continue // nothing was written yet
		}
		if _, _, err := execution.Open(ctx, to, r.ring); !errors.Is(err, execution.ErrUnfinished) {
			t.Errorf("a gateway on a part of an import: %v", err)
		}
		if _, err := execution.Export(ctx, to, io.Discard); !errors.Is(err, execution.ErrUnfinished) {
			t.Errorf("an export of a part of an import: %v", err)
		}
		if _, err := execution.Import(ctx, to, file, nil); !errors.Is(err, execution.ErrTarget) {
			t.Errorf("an import into a part of one: %v", err)
		}
	}
}

// What is no store of a gateway is not exported, and what holds something is not overwritten.
func TestExportAndImportRefuse(t *testing.T) {
	empty, newer, foreign := memory.New(memory.Options{}), memory.New(memory.Options{}), memory.New(memory.Options{})
	for st, w := range map[store.Store]store.Write{
		foreign: {Key: []byte("x"), Value: []byte("1")}, newer: {Key: []byte("mlayout"), Value: []byte("1000")},
	} {
		must(st.Commit(ctx, w))
	}
	for st, want := range map[store.Store]error{empty: execution.ErrNoSource, foreign: execution.ErrNoSource, newer: execution.ErrLayout} {
		if _, err := execution.Export(ctx, st, io.Discard); !errors.Is(err, want) {
			t.Errorf("an export: %v, want %v", err, want)
		}
	}
	r := newRig(t)
	file := export(t, r.mem)
	for name, to := range map[string]store.Store{"a gateway's store": newRig(t).mem, "something else": foreign} {
		before := entriesOf(t, to)
		if _, err := execution.Import(ctx, to, file, nil); !errors.Is(err, execution.ErrTarget) {
			t.Errorf("an import into %s: %v", name, err)
		}
		if after := entriesOf(t, to); len(after) != len(before) {
			t.Errorf("%s was written to", name)
		}
	}
	must(file.Seek(0, io.SeekStart))
	whole := must(io.ReadAll(file))
	other := bytes.Clone(whole)
	other[len(other)/2] ^= 1
	for name, text := range map[string][]byte{
		"nothing": nil, "a part": whole[:len(whole)-1], "with a byte more": append(bytes.Clone(whole), 'x'),
		"altered": other, "no export": []byte("{}"), "another export": zipped(`{"export":"agent-guard store","layout":"1000"}`),
	} {
		if _, err := execution.Import(ctx, empty, bytes.NewReader(text), nil); !errors.Is(err, execution.ErrExport) || len(entriesOf(t, empty)) > 0 {
			t.Errorf("an import of %s: %v", name, err)
		}
	}
}

func zipped(text string) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, text)
	w.Close()
	return b.Bytes()
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

// P1: an export that may lack something fails.
func TestExportIsWhole(t *testing.T) {
	r, _ := filledRig(t)
	full := errors.New("the disk is full")
	for name, c := range map[string]struct {
		from store.Store
		to   io.Writer
		want error
	}{
		"the store is damaged":  {damaged{r.mem}, io.Discard, store.ErrDamaged},
		"the store is not ours": {&target{Store: r.mem, err: store.ErrUnhealthy}, io.Discard, store.ErrUnhealthy},
		"the disk is full":      {r.mem, fullDisk{full}, full},
	} {
		if _, err := execution.Export(ctx, c.from, c.to); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if _, err := execution.Export(ctx, &target{Store: r.mem, err: store.ErrFull}, io.Discard); err != nil {
		t.Errorf("the store has no space left: %v", err)
	}
}

type fullDisk struct{ err error }

func (f fullDisk) Write([]byte) (int, error) { return 0, f.err }

// P1: a store that lacks something of the export opens no gateway.
func TestImportIsCompared(t *testing.T) {
	r, _ := filledRig(t)
	file := export(t, r.mem)
	for name, change := range map[string]func(batch []store.Write) []store.Write{
		"a write is lost": func(batch []store.Write) []store.Write { return batch[min(1, len(batch)-1):] },
		"an expiry is altered": func(batch []store.Write) []store.Write {
			for i := range batch {
				if !batch[i].Expires.IsZero() {
					batch[i].Expires = batch[i].Expires.Add(time.Microsecond)
				}
			}
			return batch
		},
		"a value is altered": func(batch []store.Write) []store.Write {
			if len(batch) > 1 {
				batch[1].Value = []byte("other")
			}
			return batch
		},
		"a key is altered": func(batch []store.Write) []store.Write {
			if len(batch) > 1 {
				batch[len(batch)-1].Key = append(batch[len(batch)-1].Key, '+')
			}
			return batch
		},
	} {
		to := memory.New(memory.Options{})
		if _, err := execution.Import(ctx, &target{Store: to, after: -1, change: change}, file, nil); !errors.Is(err, execution.ErrDiffers) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := execution.Open(ctx, to, r.ring); !errors.Is(err, execution.ErrUnfinished) {
			t.Errorf("%s: a gateway on it: %v", name, err)
		}
	}
}

// What expires during an import, or by one of two clocks, is no difference.
func TestImportWhileEntriesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 3000 {
			w := store.Write{Key: fmt.Appendf(nil, "q%05d", i), Value: []byte("1"), Expires: time.Now().Add(time.Duration(i) * 10 * time.Millisecond)}
			must(r.mem.Commit(ctx, w))
		}
		// The target's clock is 7 s ahead.
		to := memory.New(memory.Options{Now: func() time.Time { return time.Now().Add(7 * time.Second) }})
		slow := &target{Store: to, after: -1, change: func(batch []store.Write) []store.Write {
			time.Sleep(time.Second)
			return batch
		}}
		if _, err := execution.Import(ctx, slow, export(t, r.mem), nil); err != nil {
			t.Fatal(err)
		}
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
