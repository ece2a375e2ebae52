package ledger

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// testToken is a token in compact form with those claims.
func testToken(claims []byte) []byte {
	part := base64.RawURLEncoding.AppendEncode
	token := append(part(nil, []byte(`{"alg":"ES256","typ":"exec+jwt"}`)), '.')
	token = append(part(token, claims), '.')
	return part(token, bytes.Repeat([]byte{0xfe}, 64))
}

// tokenEvent is testEvent with a token in compact form.
func tokenEvent(n int) Event {
	e := testEvent(n)
	e.Payload = testToken(fmt.Appendf(nil, `{"jti":"id-%d","exec_act":"pay"}`, n))
	return e
}

// asBefore puts an entry into the form of earlier builds: its leaf as it is, sealed.
func asBefore(t testing.TB, s *logStore, index int64) {
	t.Helper()
	key := s.entryKey(index)
	found := must(s.store.Get(t.Context(), key))(t)
	e := must(s.openEntry(key, found.Value))(t)
	must(s.store.Commit(t.Context(), store.Write{Key: key, Value: s.sealer.Seal(nil, e.Leaf, key)}))(t)
}

// TestPackedTokens: a token in compact form is stored without its base64, everything else
// as it is, and what is read has the exact bytes again.
func TestPackedTokens(t *testing.T) {
	token := testToken([]byte(`{"jti":"id-7","par":[]}`))
	for name, c := range map[string]struct {
		payload []byte
		packed  bool
	}{
		"a token":           {token, true},
		"no signature":      {append(bytes.Clone(token[:len(token)-86]), ""...), true},
		"claims":            {[]byte(`{"jti":"id-7","par":[]}`), false},
		"two parts":         {token[:len(token)-87], false},
		"four parts":        {append(bytes.Clone(token), ".AAAA"...), false},
		"padded":            {append(bytes.Clone(token), '='), false},
		"a line break":      {append(bytes.Clone(token), '\n'), false},
		"bits left over":    {append(bytes.Clone(token[:len(token)-1]), 'B'), false},
		"another alphabet":  {append(bytes.Clone(token[:len(token)-1]), '+'), false},
		"too small to gain": {[]byte("AA.AA.AA"), false},
		"dots":              {[]byte(".."), false},
	} {
		e := testEvent(7)
		e.Payload = c.payload
		encoded := e.encodeLeaf(nil, 300, e.Time)
		stored := pack([]byte("before"), encoded, e.Payload)[len("before"):]
		if packed := stored[0] == packedVersion; packed != c.packed || packed != (len(stored) < len(encoded)) {
			t.Errorf("%s: it takes %d bytes instead of %d", name, len(stored), len(encoded))
		}
		if back, err := unpack(stored); err != nil || !bytes.Equal(back, encoded) {
			t.Errorf("%s: it became %q: %v", name, back, err)
		}
	}
	for _, broken := range []string{"\x02", "\x02\x00\x00\x00\x00\x00", "\x02\x00\x01\x00\x00\x00\x00", "\x02\x00\x01\x00\x01\x00\x01ab"} {
		if _, err := unpack([]byte(broken)); err != errEncoding {
			t.Errorf("%q: %v", broken, err)
		}
	}
	if e := testEvent(7); e.Workflow != "workflow-1" {
		t.Fatal(e.Workflow)
	}
	small := Event{ID: "x", Payload: []byte("AAAAAAAAAAAAAAAA.AQEBAQEBAQEBAQEB.AgICAgICAgICAgIC")}
	if got, want := hex.EncodeToString(pack(nil, small.encodeLeaf(nil, 0, time.Time{}), small.Payload)),
		"02000c000c000c"+"000000000000000000000000"+"010101010101010101010101"+"020202020202020202020202"+"030178"+"0b32"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// FuzzUnpack: what opens as an entry is stored in one way only.
func FuzzUnpack(f *testing.F) {
	e := testEvent(7)
	e.Payload = testToken([]byte(`{"jti":"id-7"}`))
	f.Add(pack(nil, e.encodeLeaf(nil, 12, e.Time), e.Payload))
	f.Add([]byte{packedVersion, 0, 1, 0, 0, 0, 0, 'a', tagID, 1, 'x', tagPayload, 4})
	f.Fuzz(func(t *testing.T, stored []byte) {
		leaf, err := unpack(stored)
		if err != nil {
			return
		}
		got, err := decode(leaf)
		if err != nil || len(stored) >= len(leaf) {
			return
		}
		if again := pack(nil, leaf, got.Payload); !bytes.Equal(again, stored) {
			t.Errorf("%x is stored as %x too", stored, again)
		}
	})
}

// TestBothForms: entries of both forms are read, verified, exported, sealed anew and pruned.
func TestBothForms(t *testing.T) {
	mem := memory.New(memory.Options{})
	o := testOptions(mem)
	ring := &rotating{Ring: seal.Generate()}
	o.Sealer = ring
	l := mustOpen(t, o)
	const size = tileWidth + 9
	for n := range size {
		mustAppend(t, l, tokenEvent(n))
	}
	for index := int64(0); index < size; index += 2 {
		asBefore(t, l.logStore, index)
	}
	late := testEvent(size)
	late.Payload = testToken([]byte(`{"jti":"late"}`))
	late.Workflow = "workflow-1"
	mustAppend(t, l, late)
	ring.rotate()

	l = mustOpen(t, o)
	if r := mustVerify(t, l); r.Entries != size+1 {
		t.Fatalf("%+v", r)
	}
	if n, err := l.Reseal(t.Context()); err != nil || n != size+1 {
		t.Errorf("%d sealed anew: %v", n, err)
	}
	ring.forget()
	mustAppend(t, l, tokenEvent(size+1))
	for index := range int64(size + 2) {
		want := tokenEvent(int(index)).Payload
		if index == size {
			want = late.Payload
		}
		e := must(l.Entry(t.Context(), index))(t)
		if !bytes.Equal(e.Payload, want) || e.Index != index {
			t.Errorf("entry %d has %q", index, e.Payload)
		}
		receipt := must(l.Receipt(t.Context(), index))(t)
		if _, err := receipt.Check(e.Leaf, testOrigin, testKeys); err != nil {
			t.Errorf("entry %d: %v", index, err)
		}
	}
	mustVerify(t, l)
	var export bytes.Buffer
	must(l.Export(t.Context(), &export))(t)
	n := 0
	visit := func(e Entry) error {
		if _, _, three := bytes.Cut(e.Payload, []byte{'.'}); !three {
			return io.ErrUnexpectedEOF
		}
		n++
		return nil
	}
	if _, err := VerifyExport(&export, testOrigin, testKeys, visit); err != nil || n != size+2 {
		t.Errorf("%d exported: %v", n, err)
	}
	mustPrune(t, l, tileWidth)
	mustVerify(t, l)
	mustVerify(t, mustOpen(t, o))
	if _, err := l.Lookup(t.Context(), "workflow-1", "id-1"); err != ErrNotFound {
		t.Errorf("pruned, and found: %v", err)
	}
}

// TestTwoNodesPacked: what one node has recorded another one of the same store reads with
// the same bytes, and finds under the same names.
func TestTwoNodesPacked(t *testing.T) {
	mem := memory.New(memory.Options{})
	a := mustOpen(t, testOptions(mem))
	other := testOptions(mem)
	other.Origin = "example.com/ledger/b"
	b := mustOpen(t, other)
	for n := range 6 {
		l := a
		if n%2 == 1 {
			l = b
		}
		e := tokenEvent(n)
		e.Workflow = "w"
		mustAppend(t, l, e)
	}
	for n := range 6 {
		for _, l := range []*Log{a, b} {
			e := must(l.Lookup(t.Context(), "w", fmt.Sprintf("id-%d", n)))(t)
			if !bytes.Equal(e.Payload, tokenEvent(n).Payload) {
				t.Errorf("%s reads %q", l.Origin(), e.Payload)
			}
		}
	}
	for _, l := range []*Log{a, b} {
		if page := must(l.List(t.Context(), "w", "", MaxPage))(t); len(page.Entries) != 6 {
			t.Errorf("%s lists %d", l.Origin(), len(page.Entries))
		}
		mustVerify(t, l)
	}
}

// TestBuffersOfACommit: a commit does not keep what it has prepared for the store, and what
// stands there does not change with the next.
func TestBuffersOfACommit(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	for n := range 3 {
		e := tokenEvent(n)
		e.Payload = bytes.Repeat(e.Payload, 1+90*(2-n)) // the first is the largest
		mustAppend(t, l, e)
		for _, w := range l.places.x.batch {
			if w.Key != nil || w.Value != nil {
				t.Fatalf("%q is kept", w.Key)
			}
		}
	}
	if cap(l.places.x.memory.b) > maxKept || cap(l.places.x.leaf) > maxKept || cap(l.places.x.packed) > maxKept {
		t.Errorf("%d, %d and %d bytes are kept", cap(l.places.x.memory.b), cap(l.places.x.leaf), cap(l.places.x.packed))
	}
	mustVerify(t, l)
}
