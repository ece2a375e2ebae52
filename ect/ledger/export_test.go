package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

func exported(t testing.TB, l *Log) []byte {
	t.Helper()
	var b bytes.Buffer
	if _, err := l.Export(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestExportRoundTrip: an export needs nothing but itself and the public keys, at every
// size around that of a tile, with what was pruned.
func TestExportRoundTrip(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	var known []Head
	last := 0
	for _, size := range []int{0, 1, 2, 255, 256, 257, 600} {
		appendEvents(t, l, last, size)
		last = size
		known = append(known, l.Head())
		if size == 600 {
			mustPrune(t, l, 512)
		}
		text := exported(t, l)
		var ids []string
		x, err := VerifyExport(bytes.NewReader(text), testOrigin, testKeys, func(e Entry) error {
			at, err := l.Entry(t.Context(), e.Index)
			if err != nil || at.ID != e.ID || !bytes.Equal(at.Leaf, e.Leaf) || e.Log != testOrigin {
				t.Errorf("entry %d: %v", e.Index, err)
			}
			ids = append(ids, e.ID)
			return nil
		}, known...)
		if err != nil {
			t.Fatalf("size %d: %v", size, err)
		}
		pruned := int64(0)
		if size == 600 {
			pruned = 512
		}
		if x.Entries != int64(size)-pruned || x.Pruned != pruned || x.Head.Size != int64(size) || len(ids) != int(x.Entries) {
			t.Errorf("size %d: %d entries, %d pruned, head of %d, %d visited", size, x.Entries, x.Pruned, x.Head.Size, len(ids))
		}
	}
	stop := errors.New("enough")
	if _, err := VerifyExport(bytes.NewReader(exported(t, l)), testOrigin, testKeys, func(Entry) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the visitor's error became %v", err)
	}
}

// TestExportTampered: every changed byte of an export is found, and so are lines that
// were taken away, repeated or swapped, another log's, and an older state.
func TestExportTampered(t *testing.T) {
	l := mustOpen(t, testOptions(memory.New(memory.Options{})))
	appendEvents(t, l, 0, 5)
	text := exported(t, l)
	refuse := func(what string, altered []byte, known ...Head) error {
		t.Helper()
		_, err := VerifyExport(bytes.NewReader(altered), testOrigin, testKeys, nil, known...)
		if !errors.Is(err, ErrProof) {
			t.Errorf("%s: %v", what, err)
		}
		return err
	}
	for i := range text {
		for _, mask := range []byte{1, 0x20, 0x80} {
			altered := bytes.Clone(text)
			altered[i] ^= mask
			refuse(fmt.Sprintf("byte %d changed by %#x", i, mask), altered)
		}
		if i > 0 {
			refuse(fmt.Sprintf("cut at byte %d", i), text[:i])
		}
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	lines = lines[:len(lines)-1]
	join := func(l ...[]byte) []byte { return bytes.Join(l, nil) }
	for i := range lines {
		refuse(fmt.Sprintf("line %d taken away", i), join(append(append([][]byte{}, lines[:i]...), lines[i+1:]...)...))
		refuse(fmt.Sprintf("line %d twice", i), join(append(append([][]byte{}, lines[:i+1]...), lines[i:]...)...))
		refuse(fmt.Sprintf("an empty line before %d", i), join(append(append(append([][]byte{}, lines[:i]...), []byte("\n")), lines[i:]...)...))
		refuse(fmt.Sprintf("line %d with a carriage return", i), join(append(append(append([][]byte{}, lines[:i]...), append(bytes.TrimSuffix(lines[i], []byte("\n")), "\r\n"...)), lines[i+1:]...)...))
	}
	swapped := append([][]byte{}, lines...)
	swapped[3], swapped[4] = swapped[4], swapped[3]
	if err := refuse("two entries swapped", join(swapped...)); !strings.Contains(err.Error(), "entry 1: reordered") {
		t.Errorf("not named: %v", err)
	}
	refuse("something behind the end", append(bytes.Clone(text), '\n'))
	refuse("an endless line", append([]byte(exportTitle+"\nhead "), bytes.Repeat([]byte("A"), 2*maxLine)...))

	if _, err := VerifyExport(bytes.NewReader(text), "another", testKeys, nil); !errors.Is(err, ErrProof) {
		t.Errorf("as another log: %v", err)
	}
	_, others := newHeadKey("other.example")
	if _, err := VerifyExport(bytes.NewReader(text), testOrigin, others, nil); !errors.Is(err, ErrProof) {
		t.Errorf("with another key: %v", err)
	}
	appendEvents(t, l, 5, 6)
	refuse("an older state", text, l.Head())
	forged := l.Head()
	forged.Size, forged.Root = 3, tlog.Hash{1}
	refuse("another history", text, forged)
}

// TestExportOfTampered: what does not fit its head is not exported as if it did.
func TestExportOfTampered(t *testing.T) {
	o := testOptions(memory.New(memory.Options{}))
	o.Sealer = clearSealer{seal.Generate()}
	l := mustOpen(t, o)
	appendEvents(t, l, 0, 5)
	e := must(l.Entry(t.Context(), 2))(t)
	for _, w := range []store.Write{
		{Key: l.entryKey(2), Value: append(bytes.Clone(e.Leaf[:len(e.Leaf)-1]), '?')},
		{Key: l.entryKey(2), Delete: true},
	} {
		if _, err := o.Store.Commit(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Export(t.Context(), &bytes.Buffer{}); !errors.Is(err, ErrTampered) {
			t.Errorf("exported: %v", err)
		}
	}
}

// errForged ends the reading of an entry that the log does not have: at the end its
// root would not fit.
var errForged = errors.New("not an entry of the log")

// FuzzVerifyExport: whatever is read, an export that verifies holds nothing but entries
// of the tree of its head, at their places, and is spelt as Export spells it.
func FuzzVerifyExport(f *testing.F) {
	good := exported(f, smallLog(f, 3))
	f.Add(good)
	f.Add([]byte(exportTitle + "\nhead AAAA\nentry AQ==\npruned AA==\nend 2\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, text []byte) {
		seen := 0
		x, err := VerifyExport(bytes.NewReader(text), testOrigin, testKeys, func(e Entry) error {
			seen++
			if !bytes.Contains(good, []byte("\nentry "+exportBase64.EncodeToString(e.Leaf)+"\n")) {
				return errForged
			}
			return nil
		})
		if err != nil {
			if !errors.Is(err, ErrProof) && !errors.Is(err, errForged) {
				t.Errorf("reading from memory failed: %v", err)
			}
			return
		}
		// Nothing but the log itself was ever signed; what it holds can only be left out.
		whole := x.Pruned == 0
		if seen != int(x.Entries) || x.Entries+x.Pruned != 3 || whole != bytes.Equal(text, good) {
			t.Errorf("forged: %q", text)
		}
	})
}
