package ledger

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// smallLog is the same log in every process, so that fuzzing has one to forge.
func smallLog(t testing.TB, size int) *Log {
	t.Helper()
	now := func() time.Time { return time.Unix(1_800_000_000, 0) }
	l := mustOpen(t, testOptions(memory.New(memory.Options{Now: now})))
	appendEvents(t, l, 0, size)
	return l
}

// TestReceipt: a receipt holds over JSON, and not for another leaf, index, proof, head,
// log or key.
func TestReceipt(t *testing.T) {
	l := smallLog(t, 300)
	older := smallLog(t, 299).Head()
	for _, index := range []int64{0, 1, 254, 255, 256, 299} {
		e := must(l.Entry(t.Context(), index))(t)
		made := must(l.Receipt(t.Context(), index))(t)
		text := must(json.Marshal(made))(t)
		var r Receipt
		if err := json.Unmarshal(text, &r); err != nil {
			t.Fatal(err)
		}
		head, err := r.Check(e.Leaf, testOrigin, testKeys)
		if err != nil || head.Size != 300 || head.Root != l.Head().Root {
			t.Fatalf("entry %d: %v", index, err)
		}
		_, others := newHeadKey("other.example")
		leaf := bytes.Clone(e.Leaf)
		leaf[len(leaf)-1] ^= 1
		for name, c := range map[string]struct {
			change func(*Receipt)
			leaf   []byte
			origin string
			keys   note.Verifiers
		}{
			"leaf":   {leaf: leaf},
			"index":  {change: func(r *Receipt) { r.Index = (r.Index + 1) % 300 }},
			"proof":  {change: func(r *Receipt) { r.Proof = append(tlog.RecordProof{}, r.Proof...); r.Proof[0][5] ^= 1 }},
			"short":  {change: func(r *Receipt) { r.Proof = r.Proof[1:] }},
			"long":   {change: func(r *Receipt) { r.Proof = append(r.Proof[:len(r.Proof):len(r.Proof)], tlog.Hash{}) }},
			"huge":   {change: func(r *Receipt) { r.Proof = make(tlog.RecordProof, maxProof+1) }},
			"head":   {change: func(r *Receipt) { r.Head = string(older.Note) }},
			"size":   {change: func(r *Receipt) { r.Head = strings.Replace(r.Head, "\n300\n", "\n301\n", 1) }},
			"log":    {change: func(r *Receipt) { r.Log = "another" }},
			"origin": {origin: "another"},
			"key":    {keys: others},
		} {
			r, leaf, origin, keys := r, e.Leaf, testOrigin, testKeys
			if c.change != nil {
				c.change(&r)
			}
			if c.leaf != nil {
				leaf = c.leaf
			}
			if c.origin != "" {
				origin = c.origin
			}
			if c.keys != nil {
				keys = c.keys
			}
			if _, err := r.Check(leaf, origin, keys); !errors.Is(err, ErrProof) {
				t.Errorf("entry %d with another %s: %v", index, name, err)
			}
		}
	}
	for _, c := range [][2]int64{{-1, 5}, {5, 5}, {5, 301}, {300, 301}} {
		if _, err := l.Prove(t.Context(), c[0], c[1]); !errors.Is(err, ErrNotFound) {
			t.Errorf("entry %d in a tree of %d: %v", c[0], c[1], err)
		}
	}
}

// TestConsistency: between any two heads of a log there is a proof, and none between
// those of two logs.
func TestConsistency(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	heads := []Head{l.Head()}
	for n := range 20 {
		appendEvents(t, l, n, n+1)
		heads = append(heads, l.Head())
	}
	for i := range heads {
		for j := i; j < len(heads); j++ {
			proof := must(l.ProveConsistency(t.Context(), heads[i].Size, heads[j].Size))(t)
			if err := CheckConsistency(proof, heads[i], heads[j]); err != nil {
				t.Errorf("from %d to %d: %v", i, j, err)
			}
			altered := heads[i]
			altered.Root[0] ^= 1
			if err := CheckConsistency(proof, altered, heads[j]); !errors.Is(err, ErrProof) {
				t.Errorf("from an altered %d to %d: %v", i, j, err)
			}
		}
	}
	for _, c := range [][2]int64{{-1, 5}, {6, 5}, {5, 21}} {
		if _, err := l.ProveConsistency(t.Context(), c[0], c[1]); !errors.Is(err, ErrNotFound) {
			t.Errorf("from %d to %d: %v", c[0], c[1], err)
		}
	}
	other := heads[3]
	other.Origin = "another"
	for name, c := range map[string]struct {
		proof    tlog.TreeProof
		old, new Head
	}{
		"back":      {nil, heads[5], heads[4]},
		"two logs":  {nil, other, heads[3]},
		"from none": {tlog.TreeProof{{}}, heads[0], heads[3]},
		"huge":      {make(tlog.TreeProof, maxProof+1), heads[3], heads[4]},
		"negative":  {nil, Head{Origin: testOrigin, Size: -1}, heads[3]},
	} {
		if err := CheckConsistency(c.proof, c.old, c.new); !errors.Is(err, ErrProof) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestParseHead: a head is accepted as its owner wrote it and in no other spelling.
func TestParseHead(t *testing.T) {
	good := smallLog(t, 3).Head()
	if h, err := ParseHead(good.Note, testOrigin, testKeys); err != nil || h.Size != 3 || h.Root != good.Root {
		t.Fatalf("%+v, %v", h, err)
	}
	for i := range good.Note {
		altered := bytes.Clone(good.Note)
		altered[i] ^= 1
		if _, err := ParseHead(altered, testOrigin, testKeys); !errors.Is(err, ErrProof) {
			t.Errorf("byte %d changed: %v", i, err)
		}
	}
	// The last character of the signature has bits that a lax decoder passes over.
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	last := bytes.LastIndexByte(good.Note, '=') - 1
	respelt := bytes.Clone(good.Note)
	respelt[last] = alphabet[strings.IndexByte(alphabet, respelt[last])+1]
	if _, err := note.Open(respelt, testKeys); err != nil {
		t.Errorf("package note has become strict: %v", err)
	}
	if _, err := ParseHead(respelt, testOrigin, testKeys); !errors.Is(err, ErrProof) {
		t.Errorf("a signature in another spelling: %v", err)
	}
	root := good.Root.String()
	for _, text := range []string{
		"", "\n", testOrigin + "\n3\n", testOrigin + "\n03\n" + root + "\n", testOrigin + "\n+3\n" + root + "\n",
		testOrigin + "\n-3\n" + root + "\n", testOrigin + "\n3\n" + root + "\nmore\n", testOrigin + "\n3\n" + root[:43] + "\n",
		testOrigin + "\n99999999999999999999\n" + root + "\n", testOrigin + "\n3 \n" + root + "\n", "other\n3\n" + root + "\n",
		"go.sum database tree\n3\n" + root + "\n",
	} {
		msg, err := note.Sign(&note.Note{Text: text}, testSigner)
		if err != nil {
			continue // not even a note
		}
		if _, err := ParseHead(msg, testOrigin, testKeys); !errors.Is(err, ErrProof) {
			t.Errorf("%q accepted: %v", text, err)
		}
	}
	long := must(note.Sign(&note.Note{Text: strings.Repeat("x", MaxHead) + "\n"}, testSigner))(t)
	if _, err := ParseHead(long, testOrigin, testKeys); !errors.Is(err, ErrProof) {
		t.Errorf("too long: %v", err)
	}
	// A witness may sign beside the owner.
	witness, _ := newHeadKey("witness.example")
	both := must(note.Sign(&note.Note{Text: headText(good.Origin, good.Size, good.Root)}, testSigner, witness))(t)
	if _, err := ParseHead(both, testOrigin, testKeys); err != nil {
		t.Errorf("with a witness: %v", err)
	}
}

// TestHeadKeyRotation: a log goes on under a new key, whose head is a continuation of
// those of the older one.
func TestHeadKeyRotation(t *testing.T) {
	o := testOptions(memory.New(memory.Options{}))
	l := mustOpen(t, o)
	appendEvents(t, l, 0, 5)
	old := l.Head()
	signer, newer := newHeadKey("newer.example")
	o.HeadSigner, o.HeadKeys = signer, newer
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrTampered) {
		t.Errorf("opened without the older key: %v", err)
	}
	o.HeadKeys = either{testKeys, newer}
	l = mustOpen(t, o)
	head, err := ParseHead(l.Head().Note, testOrigin, newer)
	if err != nil || head.Size != 5 {
		t.Errorf("the head is not signed anew: %v", err)
	}
	appendEvents(t, l, 5, 7)
	checkHeads(t, l, []Head{old, head, l.Head()})
	mustVerify(t, l)
	o.HeadKeys = testKeys
	if _, err := Open(t.Context(), o); err == nil {
		t.Error("opened with a signer whose key is not among those of the heads")
	}
}

type either [2]note.Verifiers

func (e either) Verifier(name string, hash uint32) (note.Verifier, error) {
	v, err := e[0].Verifier(name, hash)
	if err != nil {
		return e[1].Verifier(name, hash)
	}
	return v, nil
}

// FuzzReceipt: no bytes make a receipt for what is not in the log.
func FuzzReceipt(f *testing.F) {
	l := smallLog(f, 9)
	leaves := make(map[string]int64)
	for i := range int64(9) {
		e, err := l.Entry(f.Context(), i)
		if err != nil {
			f.Fatal(err)
		}
		r, err := l.Receipt(f.Context(), i)
		if err != nil {
			f.Fatal(err)
		}
		text, err := json.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		leaves[string(e.Leaf)] = i
		f.Add(text, e.Leaf)
	}
	f.Add([]byte(`{"log":"x","index":-1,"proof":[""],"head":"\n"}`), []byte{encodingVersion})
	f.Fuzz(func(t *testing.T, text, leaf []byte) {
		var r Receipt
		if json.Unmarshal(text, &r) != nil {
			return
		}
		_, err := r.Check(leaf, testOrigin, testKeys)
		if err != nil && !errors.Is(err, ErrProof) {
			t.Errorf("another error: %v", err)
		}
		if at, ok := leaves[string(leaf)]; err == nil && (!ok || at != r.Index) {
			t.Errorf("forged for entry %d: %q", r.Index, leaf)
		}
		// The proof as a consistency proof: it may fail, nothing else.
		head := Head{Origin: testOrigin, Size: r.Index, Root: tlog.RecordHash(leaf)}
		if err := CheckConsistency(tlog.TreeProof(r.Proof), head, l.Head()); err == nil && r.Index != 0 && r.Index != 1 {
			t.Errorf("forged consistency from %d", r.Index)
		}
	})
}

// FuzzDecode: what decodes was encoded by nobody else, but for the spelling of numbers.
func FuzzDecode(f *testing.F) {
	e := testEvent(7)
	f.Add(e.encodeLeaf(nil, 12, e.Time))
	f.Add(laterEvent(7).encodeLeaf(nil, 12, e.Time))
	f.Add([]byte{encodingVersion, tagPayload, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := decode(b)
		if err != nil {
			return
		}
		again := must(decode(got.encodeLeaf(nil, got.Index, got.Recorded)))(t)
		again.Leaf, got.Leaf = nil, nil
		if fmt.Sprintf("%+v", again) != fmt.Sprintf("%+v", got) {
			t.Errorf("%+v became %+v", got, again)
		}
	})
}

// What stands in ledgers of earlier builds stays as it is, byte for byte.
func TestStoredBytes(t *testing.T) {
	e := testEvent(7)
	e.Parents, e.KeepUntil = []string{"a", "b"}, time.Unix(1_800_000_000, 123)
	for name, c := range map[string]struct {
		got  []byte
		want string
	}{
		"leaf":   {e.encodeLeaf(nil, 300, time.Unix(1_800_000_000, 0)), "010102d80402098080a0bbd29df1fa31030469642d37040a776f726b666c6f772d31050370617906167370696666653a2f2f6578616d706c652e636f6d2f6107016107016208058098dc93340909f681a0bbd29df1fa310b097061796c6f61642d37"},
		"header": {laterEvent(1).encodeLeaf(nil, 1, time.Time{}), "01010102030469642d31040a776f726b666c6f772d31050370617906167370696666653a2f2f6578616d706c652e636f6d2f61070469642d30080580a8d6b9070b1b7b226a7469223a2269642d31222c22646f7473223a22612e62227d0c0d7b226b6964223a226b6579227d"},
		"sparse": {(&Event{ID: "x"}).encodeLeaf(nil, 0, time.Time{}), "010301780b00"},
	} {
		if got := hex.EncodeToString(c.got); got != c.want {
			t.Errorf("%s:\n%s, want\n%s", name, got, c.want)
		}
	}
}

// What is not exactly what encodeLeaf writes is errEncoding.
func TestBrokenFields(t *testing.T) {
	if want := "ledger: an entry that this build cannot read"; errEncoding.Error() != want {
		t.Errorf("%q, want %q", errEncoding, want)
	}
	if _, err := decode([]byte("\x01\x03\x01x\x0b\x00")); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]string{
		"nothing":           "",
		"another version":   "\x02\x03\x01x\x0b\x00",
		"no length":         "\x01\x03",
		"a length too long": "\x01\x03\x02x",
		"an endless length": "\x01\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		"no number":         "\x01\x01\x00\x03\x01x\x0b\x00",
		"half a number":     "\x01\x01\x01\x80\x03\x01x\x0b\x00",
		"two numbers":       "\x01\x01\x02\x04\x04\x03\x01x\x0b\x00",
		"another order":     "\x01\x0b\x00\x03\x01x",
		"a field twice":     "\x01\x03\x01x\x03\x01x\x0b\x00",
		"a former field":    "\x01\x03\x01x\x0a\x01\x02\x0b\x00",
		"an unknown field":  "\x01\x03\x01x\x0b\x00\x0d\x00",
		"an empty header":   "\x01\x03\x01x\x0b\x01p\x0c\x00",
		"only a header":     "\x01\x03\x01x\x0c\x01h",
		"a header of none":  "\x01\x03\x01x\x0b\x00\x0c\x01h",
		"no payload":        "\x01\x03\x01x",
		"no id":             "\x01\x0b\x00",
	} {
		if _, err := decode([]byte(b)); err != errEncoding {
			t.Errorf("%s: %v", name, err)
		}
	}
}
