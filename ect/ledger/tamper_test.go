package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// tamperBase is a small log: a full tile of which some entries were pruned, and an
// unfinished one.
func tamperBase(t testing.TB, sealer store.Sealer) (Options, []store.Entry) {
	t.Helper()
	mem := memory.New(memory.Options{})
	o := testOptions(mem)
	o.Sealer = sealer
	l := mustOpen(t, o)
	const size = tileWidth + 6
	for n := range size {
		e := testEvent(n)
		if n >= 4 {
			e.KeepUntil = time.Now().Add(time.Hour + time.Duration(n)*time.Second)
		}
		mustAppend(t, l, e)
	}
	mustPrune(t, l, 4)
	if r := mustVerify(t, l); r.Entries != size-4 || r.Pruned != 4 {
		t.Fatalf("%+v", r)
	}
	return o, contents(t, mem)
}

// tinyBase is a log of a few entries.
func tinyBase(t testing.TB, sealer store.Sealer) (Options, []store.Entry) {
	t.Helper()
	mem := memory.New(memory.Options{})
	o := testOptions(mem)
	o.Sealer = sealer
	l := mustOpen(t, o)
	appendEvents(t, l, 0, 7)
	mustVerify(t, l)
	return o, contents(t, mem)
}

// packedBase is a tiny log whose payloads are tokens in compact form.
func packedBase(t testing.TB, sealer store.Sealer) (Options, []store.Entry) {
	t.Helper()
	mem := memory.New(memory.Options{})
	o := testOptions(mem)
	o.Sealer = sealer
	l := mustOpen(t, o)
	for n := range 4 {
		mustAppend(t, l, tokenEvent(n))
	}
	presented := testEvent(4)
	presented.Payload = testToken([]byte(`{"jti":"id-4"}`))
	mustAppend(t, l, presented)
	mustVerify(t, l)
	return o, contents(t, mem)
}

// owner is the entry that a stored value belongs to, or -1 and why none can be named.
func owner(e store.Entry) int64 {
	switch e.Key[1] {
	case spaceEntry, spaceWorkflow:
		return indexIn(e.Key)
	case spaceID:
		if where, ok := decodeLocation(e.Value); ok {
			return where.index
		}
	}
	return -1
}

// TestTamperEveryByte flips every byte of what a log is in the store, values and keys,
// once with sealed values and once with plain ones, where the tree alone must find it.
// Each time Verify finds it, and names the entry where the byte was one's own. Of a log
// with a full tile some entries are taken, and a byte of each hash.
func TestTamperEveryByte(t *testing.T) {
	type base func(testing.TB, store.Sealer) (Options, []store.Entry)
	for _, c := range []struct {
		name   string
		sealed bool
		make   base
		least  int
	}{
		{"tiny sealed", true, tinyBase, 1500}, {"tiny plain", false, tinyBase, 1200},
		{"packed sealed", true, packedBase, 1500}, {"packed plain", false, packedBase, 1200},
		{"tile sealed", true, tamperBase, 1500}, {"tile plain", false, tamperBase, 1500},
	} {
		t.Run(c.name, func(t *testing.T) {
			var sealer store.Sealer = testRing
			if !c.sealed {
				sealer = clearSealer{seal.Generate()}
			}
			o, all := c.make(t, sealer)
			mem := o.Store
			flips := 0
			// With every entry this would only be slow: those at both ends of both tiles
			// and one between, and all else that there is one of.
			chosen := func(e store.Entry) bool {
				return len(all) < 100 || slices.Contains([]int64{-1, 4, 100, tileWidth - 1, tileWidth, tileWidth + 5}, owner(e))
			}
			check := func(what string, index int64) {
				t.Helper()
				if flips++; raced && flips%10 != 0 {
					return
				}
				r, err := verifyStored(t, o)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if faultsOf(&r) == nil {
					t.Errorf("%s: not found", what)
				} else if index >= 0 && !faultsNaming(&r, index) {
					t.Errorf("%s: entry %d is not named:%s", what, index, allFaults(&r))
				}
			}
			put := func(w ...store.Write) {
				t.Helper()
				if _, err := mem.Commit(t.Context(), w...); err != nil {
					t.Fatal(err)
				}
			}
			for _, e := range all {
				if !chosen(e) || e.Key[1] == spaceGiven { // which tells nothing, and nothing is read of it
					continue
				}
				index := owner(e)
				step := 1
				if e.Key[1] == spaceTile { // 8 KiB: one byte of each hash, and the first hash whole
					step = 32
				}
				for at := 0; at < len(e.Value); at++ {
					if step > 1 && at > step && at%step != at/step%step {
						continue
					}
					altered := bytes.Clone(e.Value)
					altered[at] ^= 1 << (at % 8)
					put(store.Write{Key: e.Key, Value: altered})
					where := index
					if e.Key[1] == spaceTile && e.Key[logKeySize] == 0 {
						if where = int64(at / 32); where < 4 {
							where = 0 // of what was pruned there is nothing else: the tile is named
						}
					}
					check(fmt.Sprintf("byte %d of the value under %q", at, e.Key), where)
				}
				put(store.Write{Key: e.Key, Value: e.Value})
				for at := range e.Key {
					moved := bytes.Clone(e.Key)
					moved[at] ^= 1 << (at % 8)
					if slices.ContainsFunc(all, func(o store.Entry) bool { return bytes.Equal(o.Key, moved) }) {
						continue // swaps are below
					}
					put(store.Write{Key: e.Key, Delete: true}, store.Write{Key: moved, Value: e.Value})
					check(fmt.Sprintf("byte %d of the key %q", at, e.Key), index)
					put(store.Write{Key: moved, Delete: true}, store.Write{Key: e.Key, Value: e.Value})
				}
				put(store.Write{Key: e.Key, Delete: true})
				check(fmt.Sprintf("%q deleted", e.Key), index)
				put(store.Write{Key: e.Key, Value: e.Value})
			}
			if flips < c.least {
				t.Errorf("only %d changes were tried", flips)
			}
			if r, err := verifyStored(t, o); err != nil || faultsOf(&r) != nil {
				t.Errorf("it was not put back: %v, %v", err, faultsOf(&r))
			}
		})
	}
}

// TestTamperWhole: changes of whole values that leave each of them well-formed. Seals
// are plain here, as for somebody who has the sealing key.
func TestTamperWhole(t *testing.T) {
	o, all := tamperBase(t, clearSealer{seal.Generate()})
	s := newLogStore(&o)
	value := func(key []byte) []byte {
		for _, e := range all {
			if bytes.Equal(e.Key, key) {
				return e.Value
			}
		}
		t.Fatalf("nothing under %q", key)
		return nil
	}
	rewritten := func(index int64, change func(*Entry)) []byte {
		e := must(decode(value(s.entryKey(index))))(t)
		recorded := e.Recorded
		change(&e)
		return e.encodeLeaf(nil, index, recorded)
	}
	const size = tileWidth + 6
	for _, c := range []struct {
		name   string
		writes []store.Write
		index  int64
		what   string
	}{
		{"two entries swapped", []store.Write{
			{Key: s.entryKey(10), Value: value(s.entryKey(11))}, {Key: s.entryKey(11), Value: value(s.entryKey(10))},
		}, 10, "reordered"},
		{"two entries of the end swapped", []store.Write{
			{Key: s.entryKey(size - 1), Value: value(s.entryKey(size - 2))}, {Key: s.entryKey(size - 2), Value: value(s.entryKey(size - 1))},
		}, size - 1, "reordered"},
		{"a payload rewritten", []store.Write{
			{Key: s.entryKey(20), Value: rewritten(20, func(e *Entry) { e.Payload = []byte("another") })},
		}, 20, "does not fit its stored hash"},
		{"a payload rewritten at the end", []store.Write{
			{Key: s.entryKey(size - 1), Value: rewritten(size-1, func(e *Entry) { e.Payload = []byte("another") })},
		}, size - 1, "does not fit what stands under its id"},
		{"an entry deleted", []store.Write{{Key: s.entryKey(30), Delete: true}}, 30, "missing"},
		{"an entry deleted and its id with it", []store.Write{
			{Key: s.entryKey(30), Delete: true}, {Key: s.idKey("", "id-30"), Delete: true},
		}, 30, "missing"},
		{"an entry more", []store.Write{{Key: s.entryKey(size), Value: value(s.entryKey(size - 1))}}, size, "stands behind"},
		{"an id more", []store.Write{{Key: s.idKey("w", "forged"), Value: value(s.idKey("", "id-30"))}}, 30, "an id leads here"},
		{"an id that leads behind the end", []store.Write{
			{Key: s.idKey("w", "forged"), Value: (&location{log: s.id, index: size + 7}).encode(nil)},
		}, size + 7, "behind the signed head"},
		{"a place in a list behind the end", []store.Write{{Key: s.workflowKey("forged", s.id, size+7)}}, size + 7, "behind the signed head"},
		{"a place in a list more", []store.Write{{Key: s.workflowKey("forged", s.id, 31)}}, 31, "a workflow that is not its own"},
		{"a pruned entry put back", []store.Write{
			{Key: s.entryKey(1), Value: value(s.entryKey(5))},
		}, 1, "marked as pruned"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := o
			o.Store = filled(t, all)
			if _, err := o.Store.Commit(t.Context(), c.writes...); err != nil {
				t.Fatal(err)
			}
			r := must(verifyStored(t, o))(t)
			found := slices.ContainsFunc(r.Faults, func(f Fault) bool {
				return indexOf(f) == c.index && strings.Contains(f.What, c.what)
			})
			if !found {
				t.Errorf("entry %d is not said to be %q:%s", c.index, c.what, allFaults(&r))
			}
		})
	}
}

// TestTamperRewritten: any earlier head exposes a log that was rewritten with all keys.
func TestTamperRewritten(t *testing.T) {
	true1 := mustOpen(t, testOptions(memory.New(memory.Options{})))
	appendEvents(t, true1, 0, 10)
	seen := true1.Head()

	o := testOptions(memory.New(memory.Options{}))
	l := mustOpen(t, o)
	appendEvents(t, l, 0, 4)
	appendEvents(t, l, 5, 20)
	if r, err := verifyStored(t, o, seen); err != nil || faultsOf(&r) == nil {
		t.Errorf("another history verified against a known head: %v", err)
	}
	o.Known = []Head{seen}
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrTampered) {
		t.Errorf("another history opened: %v", err)
	}
}

// TestVerifyWithoutHead: without a head the rest is still verified, and a forged entry far
// away does not make that endless.
func TestVerifyWithoutHead(t *testing.T) {
	o, all := tamperBase(t, testRing)
	s := newLogStore(&o)
	for _, w := range []store.Write{{Key: s.entryKey(1 << 50)}, {Key: s.entryKey(-1)}, {Key: append(logKey(spaceEntry, s.id, 0), 0)}, {Key: []byte{space, spaceWorkflow}}} {
		o.Store = filled(t, all)
		batch := []store.Write{{Key: s.headKey(), Delete: true}, {Key: s.entryKey(20), Delete: true}, w}
		if _, err := o.Store.Commit(t.Context(), batch...); err != nil {
			t.Fatal(err)
		}
		r, err := verifyStored(t, o)
		if err != nil || !faultsNaming(&r, -1) || !faultsNaming(&r, 20) {
			t.Errorf("with %q: %v%s", w.Key, err, allFaults(&r))
		}
	}
}

// TestOpenRefusesTampered: what Open needs is checked when it is read, and the log
// does not open.
func TestOpenRefusesTampered(t *testing.T) {
	o, all := tamperBase(t, clearSealer{seal.Generate()})
	s := newLogStore(&o)
	for name, w := range map[string]store.Write{
		"head":         {Key: s.headKey(), Delete: true},
		"end":          {Key: s.entryKey(tileWidth + 5), Delete: true},
		"end replaced": {Key: s.entryKey(tileWidth + 5), Value: mustValue(t, all, s.entryKey(tileWidth+4))},
		"upper tile":   {Key: s.tileKey(1, 0), Delete: true},
		"entry more":   {Key: s.entryKey(tileWidth + 6), Value: mustValue(t, all, s.entryKey(tileWidth+4))},
	} {
		o.Store = filled(t, all)
		if _, err := o.Store.Commit(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), o); !errors.Is(err, ErrTampered) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func mustValue(t testing.TB, all []store.Entry, key []byte) []byte {
	t.Helper()
	for _, e := range all {
		if bytes.Equal(e.Key, key) {
			return e.Value
		}
	}
	t.Fatalf("nothing under %q", key)
	return nil
}
