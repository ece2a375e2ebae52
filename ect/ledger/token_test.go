package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// laterEvent is an event whose token is signed when it is asked for.
func laterEvent(n int) *Event {
	e := testEvent(n)
	e.Header = []byte(`{"kid":"key"}`)
	e.Payload = []byte(fmt.Sprintf(`{"jti":%q,"dots":"a.b"}`, e.ID))
	return &e
}

// testSignature signs by repeating what is signed.
func testSignature(header, payload []byte) ([]byte, error) {
	return bytes.Join([][]byte{[]byte("signed"), header, payload}, []byte("|")), nil
}

func keyGone(_, _ []byte) ([]byte, error) { return nil, errors.New("the key is gone") }

func laterToken(n int) string {
	e := laterEvent(n)
	signature, _ := testSignature(e.Header, e.Payload)
	enc := base64.RawURLEncoding.EncodeToString
	return enc(e.Header) + "." + enc(e.Payload) + "." + enc(signature)
}

// laterOptions are those of a log in which each second event has a header.
func laterOptions(st store.Store) Options {
	o := testOptions(st)
	o.Signature = testSignature
	o.Verifies = func(header, payload, signature []byte) (holds, known bool) {
		want, _ := testSignature(header, payload)
		return bytes.Equal(signature, want), strings.Contains(string(header), `"key"`)
	}
	return o
}

func appendMixed(t testing.TB, l *Log, from, to int) {
	t.Helper()
	for n := from; n < to; n++ {
		if n%2 == 0 {
			mustAppend(t, l, testEvent(n))
		} else {
			mustAppend(t, l, *laterEvent(n))
		}
	}
}

func tokenAt(t testing.TB, l *Log, index int64) (string, error) {
	t.Helper()
	e := must(l.Entry(t.Context(), index))(t)
	token, err := l.Token(t.Context(), &e)
	return string(token), err
}

func wantTokens(t testing.TB, l *Log, size int) {
	t.Helper()
	for n := range size {
		want := string(testEvent(n).Payload)
		if n%2 == 1 {
			want = laterToken(n)
		}
		for range 2 {
			if got, err := tokenAt(t, l, int64(n)); err != nil || got != want {
				t.Fatalf("entry %d: %q, want %q: %v", n, got, want, err)
			}
		}
	}
}

// exportedTokens are what an export has under the indexes, and an entry that keeps its
// header has no token.
func exportedTokens(t testing.TB, text []byte) (tokens map[int64]string) {
	t.Helper()
	tokens = map[int64]string{}
	_, err := VerifyExport(bytes.NewReader(text), testOrigin, testKeys, func(e Entry) error {
		if e.Header == nil {
			tokens[e.Index] = string(e.Payload)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// ADR 0064, "Signing when a token is shown": the token of an entry has the same bytes each
// time it is asked for, after a restart, and in an export; the leaf is what the tree proves.
func TestTokenWhenShown(t *testing.T) {
	const size = tileWidth + 20
	st := memory.New(memory.Options{})
	l := mustOpen(t, laterOptions(st))
	appendMixed(t, l, 0, size)
	for range 2 {
		wantTokens(t, l, size)
		mustVerify(t, l)
		for n, token := range exportedTokens(t, exported(t, l)) {
			if want := laterToken(int(n)); n%2 == 1 && token != want {
				t.Errorf("exported as %q, want %q", token, want)
			}
		}
		e := must(l.Entry(t.Context(), 5))(t)
		receipt := must(l.Receipt(t.Context(), 5))(t)
		if _, err := receipt.Check(e.Leaf, testOrigin, testKeys); err != nil || !bytes.Contains(e.Leaf, e.Payload) || !bytes.Contains(e.Leaf, e.Header) {
			t.Errorf("%q: %v", e.Leaf, err)
		}
		l = mustOpen(t, laterOptions(st))
	}
	// An event keeps its header over a restart.
	mustAppend(t, l, *laterEvent(1001))
	l = mustOpen(t, laterOptions(st))
	if got, err := tokenAt(t, l, size); err != nil || got != laterToken(1001) {
		t.Errorf("%q %v", got, err)
	}
}

// What breaks a limit is not recorded, and without a signer nothing that needs one.
func TestHeaderRefused(t *testing.T) {
	l := mustOpen(t, laterOptions(memory.New(memory.Options{})))
	for name, change := range map[string]func(*Event){
		"an empty header": func(e *Event) { e.Header = []byte{} },
		"a long header":   func(e *Event) { e.Header = make([]byte, maxHeader+1) },
		"a long payload":  func(e *Event) { e.Payload = make([]byte, MaxClaims+1) },
	} {
		e := laterEvent(1)
		change(e)
		if err := l.Append(t.Context(), []Event{*e}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	without := mustOpen(t, testOptions(memory.New(memory.Options{})))
	if err := without.Append(t.Context(), []Event{*laterEvent(1)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("no signer: %v", err)
	}
}

// P8: a key signs only what the signed head covers. Who alters the store, even with the
// sealing keys, gets no signature, neither of an entry nor in an export.
func TestNothingForgedIsSigned(t *testing.T) {
	for name, size := range map[string]int{"in a full tile": tileWidth + 2, "in the last tile": 8} {
		o := laterOptions(memory.New(memory.Options{}))
		o.Sealer = clearSealer{seal.Generate()}
		var signed [][]byte
		o.Signature = func(header, payload []byte) ([]byte, error) {
			signed = append(signed, bytes.Clone(payload))
			return testSignature(header, payload)
		}
		l := mustOpen(t, o)
		appendMixed(t, l, 0, size)
		e := must(l.Entry(t.Context(), 3))(t)
		forged := e.Event
		forged.Payload = bytes.Replace(e.Payload, []byte("a.b"), []byte("a.c"), 1)
		leaf := forged.encodeLeaf(nil, 3, e.Recorded)
		if _, err := o.Store.Commit(t.Context(), store.Write{Key: l.entryKey(3), Value: leaf}); err != nil {
			t.Fatal(err)
		}
		check := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, ErrTampered) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
			for _, payload := range signed {
				if bytes.Contains(payload, []byte("a.c")) {
					t.Errorf("%s, %s: %s was signed", name, what, payload)
				}
			}
		}
		got, err := tokenAt(t, l, 3)
		check("its token "+got, err)
		// The genuine leaf proves nothing for a payload beside it.
		e.Payload = forged.Payload
		_, err = l.Token(t.Context(), &e)
		check("beside its leaf", err)
		var text bytes.Buffer
		_, err = l.Export(t.Context(), &text)
		check("exported", err)
		n, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true })
		if check("stored", err); n != size/2-1 {
			t.Errorf("%s: %d signatures of the other %d entries", name, n, size/2-1)
		}
	}
}

// Without the key an entry has no token, and says so; its content is proven and exported as
// before.
func TestTokenWithoutItsKey(t *testing.T) {
	o := laterOptions(memory.New(memory.Options{}))
	l := mustOpen(t, o)
	appendMixed(t, l, 0, 4)
	o.Signature = keyGone
	l = mustOpen(t, o)
	if got, err := tokenAt(t, l, 1); !errors.Is(err, ErrNoToken) || got != "" {
		t.Errorf("%q %v", got, err)
	}
	if got, err := tokenAt(t, l, 2); err != nil || got != "payload-2" {
		t.Errorf("%q %v", got, err)
	}
	text := exported(t, l)
	if tokens := exportedTokens(t, text); len(tokens) != 2 || bytes.Contains(text, []byte(exportSignature)) {
		t.Errorf("%v\n%s", tokens, text)
	}
	if n, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true }); n != 0 || !errors.Is(err, ErrNoToken) {
		t.Errorf("%d %v", n, err)
	}
	mustVerify(t, l)
}

// A key goes only after all that names it was signed: the signatures are stored, survive a
// new sealing key, and are pruned with their entries.
func TestStoredSignatures(t *testing.T) {
	const size = tileWidth + 10
	st := memory.New(memory.Options{})
	o := laterOptions(st)
	ring := &rotating{Ring: seal.Generate()}
	o.Sealer = ring
	l := mustOpen(t, o)
	appendMixed(t, l, 0, size)
	none := func(header []byte) bool { return !strings.Contains(string(header), "key") }
	if n, err := l.StoreSignatures(t.Context(), none); n != 0 || err != nil {
		t.Errorf("%d %v", n, err)
	}
	for _, want := range []int{size / 2, 0} { // the second walk finds them
		if n, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true }); n != want || err != nil {
			t.Errorf("%d signatures, want %d: %v", n, want, err)
		}
	}
	ring.rotate()
	if n, err := l.Reseal(t.Context()); n != size+size/2 || err != nil {
		t.Errorf("%d sealed anew: %v", n, err)
	}
	ring.forget()
	o.Signature = keyGone
	l = mustOpen(t, o)
	wantTokens(t, l, size)
	if tokens := exportedTokens(t, exported(t, l)); len(tokens) != size || tokens[7] != laterToken(7) {
		t.Errorf("%d tokens, %q", len(tokens), tokens[7])
	}
	mustVerify(t, l)

	mustPrune(t, l, tileWidth)
	left := 0
	for range st.Scan(t.Context(), store.Prefix(logKey(spaceSigned, l.id, 0))) {
		left++
	}
	if left != 5 {
		t.Errorf("%d signatures are left of 10 entries", left)
	}
	mustVerify(t, l)
	if got, err := tokenAt(t, l, size-1); err != nil || got != laterToken(size-1) {
		t.Errorf("%q %v", got, err)
	}

	if _, err := st.Commit(t.Context(), store.Write{Key: signedKey(l.id, size+5), Value: []byte("?")}); err != nil {
		t.Fatal(err)
	}
	r := must(l.Verify(t.Context()))(t)
	if r.Count != 2 || !faultsNaming(&r, size+5) {
		t.Errorf("%s", allFaults(&r))
	}
}

// P8: whoever writes the store with the sealing keys can replace a stored signature. It is
// neither shown nor exported, and reported; so is one that belongs to no entry.
func TestForgedStoredSignatures(t *testing.T) {
	st := memory.New(memory.Options{})
	l := mustOpen(t, laterOptions(st))
	appendMixed(t, l, 0, 10)
	foreign := *laterEvent(11)
	foreign.Header = []byte(`{"kid":"of another gateway"}`)
	mustAppend(t, l, foreign)
	if _, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true }); err != nil {
		t.Fatal(err)
	}
	l.options.Signature = keyGone
	put := func(w store.Write) {
		t.Helper()
		if _, err := st.Commit(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	forge := func(index int64) {
		t.Helper()
		key := signedKey(l.id, index)
		put(store.Write{Key: key, Value: l.sealer.Seal(nil, []byte("forged"), key)})
	}
	mustVerify(t, l)
	for index, what := range map[int64]string{3: "does not hold", 4: "beside a token that has its own"} {
		before, err := st.Get(t.Context(), signedKey(l.id, index))
		forge(index)
		if r := must(l.Verify(t.Context()))(t); r.Count != 1 || indexOf(r.Faults[0]) != index || !strings.Contains(r.Faults[0].What, what) {
			t.Errorf("%d: %s", index, allFaults(&r))
		}
		if err != nil { // it has none
			put(store.Write{Key: signedKey(l.id, index), Delete: true})
			continue
		}
		if got, err := tokenAt(t, l, index); !errors.Is(err, ErrTampered) || got != "" {
			t.Errorf("%d: %q %v", index, got, err)
		}
		if _, err := l.Export(t.Context(), io.Discard); !errors.Is(err, ErrTampered) {
			t.Errorf("%d exported: %v", index, err)
		}
		put(store.Write{Key: signedKey(l.id, index), Value: before.Value})
	}
	mustVerify(t, l)
	// What nobody here has the public part of is shown as it is stored.
	forge(10)
	if got, err := tokenAt(t, l, 10); err != nil || !strings.HasSuffix(got, base64.RawURLEncoding.EncodeToString([]byte("forged"))) {
		t.Errorf("%q %v", got, err)
	}
	mustVerify(t, l)
	// Its entry is gone, and nobody vouches for that; nor for the signature.
	put(store.Write{Key: l.entryKey(5), Delete: true})
	r := must(l.Verify(t.Context()))(t)
	if !strings.Contains(allFaults(&r), "a signature stands without its entry") {
		t.Errorf("%s", allFaults(&r))
	}
}

// A crash within the walk loses nothing: the next one goes on.
func TestCrashWhileStoringSignatures(t *testing.T) {
	const size = 2*tileWidth + 8
	base := memory.New(memory.Options{})
	appendMixed(t, mustOpen(t, laterOptions(base)), 0, size)
	all := contents(t, base)
	for left := 1; left <= 5; left++ {
		for _, landed := range []bool{false, true} {
			st := filled(t, all)
			l := mustOpen(t, laterOptions(&crashing{Store: st, left: left, landed: landed}))
			before, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true })
			if !errors.Is(err, errCrash) {
				t.Fatalf("%d commits are all: %v", left, err)
			}
			l = mustOpen(t, laterOptions(st))
			after, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true })
			if err != nil || before+after > size/2 || !landed && before+after != size/2 {
				t.Errorf("%d and %d signatures: %v", before, after, err)
			}
			o := laterOptions(st)
			o.Signature = keyGone
			wantTokens(t, mustOpen(t, o), size)
		}
	}
}

// Another node's entry has a token here if the keys of that log are known, with which its tree is verified.
func TestTokenOfAnotherLog(t *testing.T) {
	st := memory.New(memory.Options{})
	other := laterOptions(st)
	other.Origin = "example.com/ledger/b"
	mustAppend(t, mustOpen(t, other), *laterEvent(1))
	o := laterOptions(st)
	mine := mustOpen(t, o)
	e := must(mine.Lookup(t.Context(), "workflow-1", "id-1"))(t)
	if got, err := mine.Token(t.Context(), &e); !errors.Is(err, ErrNotFound) || got != nil {
		t.Errorf("%q %v", got, err)
	}
	o.KeysOf = func(string) (note.Verifiers, error) { return other.HeadKeys, nil }
	if got, err := mustOpen(t, o).Token(t.Context(), &e); err != nil || string(got) != laterToken(1) {
		t.Errorf("%q %v", got, err)
	}
}

// A signature stands before the entry that it belongs to, and nowhere else.
func TestExportedSignatures(t *testing.T) {
	l := mustOpen(t, laterOptions(memory.New(memory.Options{})))
	appendMixed(t, l, 0, 3)
	lines := bytes.SplitAfter(exported(t, l), []byte("\n")) // title, head, entry, signature, entry, entry, end
	if !bytes.HasPrefix(lines[3], []byte(exportSignature)) || string(lines[0]) != exportTitle+"\n" {
		t.Fatalf("%q", lines)
	}
	signature := lines[3]
	for name, order := range map[string][]int{
		"twice": {0, 1, 2, 3, 3, 4, 5, 6}, "before a token": {0, 1, 3, 2, 4, 5, 6}, "behind the last": {0, 1, 2, 3, 4, 5, 3, 6},
		"before the head": {0, 3, 1, 2, 4, 5, 6}, "behind the end": {0, 1, 2, 4, 5, 6, 3},
	} {
		var text []byte
		for _, i := range order {
			text = append(text, lines[i]...)
		}
		if _, err := VerifyExport(bytes.NewReader(text), testOrigin, testKeys, nil); !errors.Is(err, ErrProof) {
			t.Errorf("%s: %v", name, err)
		}
	}
	long := []byte(exportSignature + base64.StdEncoding.EncodeToString(make([]byte, maxSignature+1)) + "\n")
	text := bytes.Replace(exported(t, l), signature, long, 1)
	if _, err := VerifyExport(bytes.NewReader(text), testOrigin, testKeys, nil); !errors.Is(err, ErrProof) {
		t.Errorf("too long: %v", err)
	}
}

// An event whose commit is under way when the walk begins is signed by it: it has chosen its
// key already.
func TestStoreSignaturesWaitsForCommits(t *testing.T) {
	l := mustOpen(t, laterOptions(memory.New(memory.Options{})))
	failing, landing := must(l.Record(*laterEvent(1)))(t), must(l.Record(*laterEvent(2)))(t)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := l.StoreSignatures(over, func([]byte) bool { return true }); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d signatures, and the commits are not waited for: %v", n, err)
	}
	stored := make(chan int)
	go func() {
		n, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true })
		if err != nil {
			t.Error(err)
		}
		stored <- n
	}()
	if err := landing.Commit(t.Context(), l.store); err != nil {
		t.Fatal(err)
	}
	_ = failing.Done(errCrash)
	if n := <-stored; n != 1 {
		t.Errorf("%d signatures", n)
	}
}

// An altered tile costs no token: its entries are named, and signed once it is put back. An
// export has them without signatures.
func TestAlteredTilesAreNotSigned(t *testing.T) {
	const size = 2*tileWidth + 10
	st := memory.New(memory.Options{})
	l := mustOpen(t, laterOptions(st))
	appendMixed(t, l, 0, size)
	key := l.tileKey(0, 0)
	found := must(st.Get(t.Context(), key))(t)
	put := func(key, value []byte) {
		t.Helper()
		if _, err := st.Commit(t.Context(), store.Write{Key: key, Value: value}); err != nil {
			t.Fatal(err)
		}
	}
	altered := bytes.Clone(found.Value)
	altered[0] ^= 1
	put(key, altered)
	all := func([]byte) bool { return true }
	n, err := l.StoreSignatures(t.Context(), all)
	if n != (size-tileWidth)/2 || !errors.Is(err, ErrTampered) || !strings.Contains(err.Error(), "entries [1 3 5 ") ||
		!strings.Contains(err.Error(), "and 108 more") {
		t.Errorf("%d signatures: %v", n, err)
	}
	if tokens := exportedTokens(t, exported(t, l)); len(tokens) != size-tileWidth/2 || tokens[tileWidth+1] != laterToken(tileWidth+1) {
		t.Errorf("%d tokens", len(tokens))
	}
	put(key, found.Value)

	key = l.entryKey(4)
	entry := must(st.Get(t.Context(), key))(t)
	if _, err := st.Commit(t.Context(), store.Write{Key: key, Delete: true}); err != nil {
		t.Fatal(err)
	}
	n, err = l.StoreSignatures(t.Context(), all)
	if n != tileWidth/2 || !errors.Is(err, ErrTampered) || !strings.Contains(err.Error(), "entries [4]") {
		t.Errorf("%d signatures: %v", n, err)
	}
	put(key, entry.Value)
	if n, err := l.StoreSignatures(t.Context(), all); n != 0 || err != nil {
		t.Errorf("%d signatures: %v", n, err)
	}
	wantTokens(t, l, size)
}

// A commit that never ends does not hold the signatures up silently.
func TestStoreSignaturesGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := mustOpen(t, laterOptions(memory.New(memory.Options{})))
		open := must(l.Record(*laterEvent(1)))(t)
		defer func() { _ = open.Done(errCrash) }()
		if n, err := l.StoreSignatures(t.Context(), func([]byte) bool { return true }); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d signatures: %v", n, err)
		}
	})
}
