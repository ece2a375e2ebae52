package evidence_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// ringPath writes the bench's ring of signing keys to a file.
func ringPath(t *testing.T, b *bench) string {
	t.Helper()
	return textFile(t, b.ring)
}

// record records a draft, and returns it with the token that it has if signed at once.
func (b *bench) record(t *testing.T) (*ect.Draft, string) {
	t.Helper()
	draft, err := b.builder.Checkpoint(time.Now(), call(uuid.NewString()))
	if err != nil {
		t.Fatal(err)
	}
	token, err := b.builder.Sign(draft)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Append(t.Context(), time.Now().Add(time.Hour), nil, draft); err != nil {
		t.Fatal(err)
	}
	return draft, token.Raw()
}

func (b *bench) recorded(t *testing.T, d *ect.Draft) ledger.Entry {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	e, err := b.evidence.Log().Lookup(ctx, d.Workflow(), d.ID())
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// signReplaced makes the signatures that are missing, and returns the keys that may go.
func (b *bench) signReplaced(t *testing.T) (done []string, stored int, err error) {
	t.Helper()
	stored, err = b.evidence.SignReplaced(t.Context())
	done, forgetting := b.evidence.ForgetSigned(t.Context())
	return done, stored, errors.Join(err, forgetting)
}

// rotate makes a new key sign, and returns the replaced one.
func (b *bench) rotate(t *testing.T, path string) (replaced string) {
	t.Helper()
	keys := b.ring.List()
	_, err := b.ring.Rotate(path, ect.ES256, time.Now(), time.Hour, b.evidence.KeysToSign()...)
	if err == nil {
		err = b.evidence.SignWhenShown(t.Context(), b.ring)
	}
	if err != nil {
		t.Fatal(err)
	}
	return keys[len(keys)-1].ID
}

func (b *bench) wantToken(t *testing.T, d *ect.Draft, want string) {
	t.Helper()
	e := b.recorded(t, d)
	if got, err := b.evidence.Log().Token(t.Context(), &e); err != nil || string(got) != want {
		t.Errorf("%q, want %q: %v", got, want, err)
	}
}

// A private part goes only once each entry that names its key has a signature: an altered
// entry may be put back.
func TestAlteredEntriesKeepTheirKey(t *testing.T) {
	b := newBench(t)
	path := ringPath(t, b)
	draft, want := b.record(t)
	b.recorded(t, draft)
	var entry store.Entry
	for found, err := range b.store.Scan(t.Context(), store.Prefix([]byte("le"))) {
		if err != nil {
			t.Fatal(err)
		}
		entry = store.Entry{Key: bytes.Clone(found.Key), Value: bytes.Clone(found.Value)}
	}
	put := func(value []byte) {
		t.Helper()
		if _, err := b.store.Commit(t.Context(), store.Write{Key: entry.Key, Value: value}); err != nil {
			t.Fatal(err)
		}
	}
	altered := bytes.Clone(entry.Value)
	altered[len(altered)-1] ^= 1
	put(altered)
	first := b.rotate(t, path)
	if done, stored, err := b.signReplaced(t); !errors.Is(err, ledger.ErrTampered) || stored != 0 || len(done) != 0 ||
		!slices.Contains(b.evidence.KeysToSign(), first) {
		t.Errorf("%q, %d signatures: %v", done, stored, err)
	}
	put(entry.Value)
	if done, stored, err := b.signReplaced(t); err != nil || stored != 1 || !slices.Equal(done, []string{first}) {
		t.Errorf("put back: %q, %d signatures: %v", done, stored, err)
	} else if err := b.ring.Retire(path, done...); err != nil {
		t.Fatal(err)
	}
	b.wantToken(t, draft, want)
}

// Once a store is shared, what was recorded before is signed, also under the key that signs: other
// nodes show it, and the key file can be replaced.
func TestSignedOnceTheStoreIsShared(t *testing.T) {
	b := newBench(t)
	draft, want := b.record(t)
	b.recorded(t, draft)
	b.close(t)
	b.store = b.store.(*memory.Store).Join("n1")
	b.open(t)
	if done, stored, err := b.signReplaced(t); err != nil || stored != 1 || done != nil || len(b.evidence.KeysToSign()) != 0 {
		t.Errorf("%q, %d signatures, %q are needed: %v", done, stored, b.evidence.KeysToSign(), err)
	}
	b.ring.Reload(newRing(t))
	b.wantToken(t, draft, want)
}

// Nothing is signed under a revoked key, so it needs no private part, and holds no other back.
func TestRevokedKeysAreForgotten(t *testing.T) {
	b := newBench(t)
	path := ringPath(t, b)
	b.record(t)
	revoked := b.rotate(t, path)
	draft, want := b.record(t)
	second := b.rotate(t, path)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte(`"kid": "`+revoked+`"`), []byte(`"revoked": true, "kid": "`+revoked+`"`), 1)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	ring, err := ect.LoadRing(path)
	if err != nil || !ring.List()[0].Revoked {
		t.Fatal(err)
	}
	b.ring.Reload(ring)
	done, stored, err := b.signReplaced(t)
	if err != nil || stored != 1 || !slices.Equal(done, []string{revoked, second}) || len(b.evidence.KeysToSign()) != 1 {
		t.Errorf("%q, %d signatures, %q are needed: %v", done, stored, b.evidence.KeysToSign(), err)
	}
	if err := b.ring.Retire(path, done...); err != nil {
		t.Fatal(err)
	}
	b.wantToken(t, draft, want)
}

// A replaced key that a reload brings back while its signatures are made is not forgotten,
// also if it is replaced again before they are.
func TestKeyBroughtBackIsKept(t *testing.T) {
	for _, replacedAgain := range []bool{false, true} {
		b := newBench(t)
		path := ringPath(t, b)
		before, err := ect.LoadRing(path)
		if err != nil {
			t.Fatal(err)
		}
		b.record(t)
		first := b.rotate(t, path)
		after, err := ect.LoadRing(path)
		if err != nil {
			t.Fatal(err)
		}
		if stored, err := b.evidence.SignReplaced(t.Context()); err != nil || stored != 1 {
			t.Fatalf("%d signatures: %v", stored, err)
		}
		load := func(ring *ect.Ring) {
			if err := b.evidence.SignWhenShown(t.Context(), ring); err != nil {
				t.Fatal(err)
			}
			b.ring.Reload(ring)
		}
		load(before)
		draft, want := b.record(t)
		if replacedAgain {
			load(after)
		}
		if done, err := b.evidence.ForgetSigned(t.Context()); err != nil || done != nil || !slices.Contains(b.evidence.KeysToSign(), first) {
			t.Errorf("replaced again %v: %q, %q are needed: %v", replacedAgain, done, b.evidence.KeysToSign(), err)
		}
		if !replacedAgain {
			// Until it is replaced, its private part stays.
			if done, stored, err := b.signReplaced(t); err != nil || stored != 0 || done != nil {
				t.Errorf("%q, %d signatures: %v", done, stored, err)
			}
			load(after)
		}
		if done, stored, err := b.signReplaced(t); err != nil || stored != 1 || !slices.Equal(done, []string{first}) {
			t.Errorf("replaced again %v: %q, %d signatures: %v", replacedAgain, done, stored, err)
		} else if err := b.ring.Retire(path, done...); err != nil {
			t.Fatal(err)
		}
		b.wantToken(t, draft, want)
	}
}

// A key that signed nothing, as of a configuration that could not be loaded, is not noted for
// good.
func TestUnusedKeysAreForgotten(t *testing.T) {
	for _, used := range []bool{false, true} {
		b := newBench(t)
		path := ringPath(t, b)
		mine, err := ect.LoadRing(path)
		if err != nil {
			t.Fatal(err)
		}
		b.record(t)
		other := newRing(t)
		if err := b.evidence.SignWhenShown(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		b.ring.Reload(other)
		if used {
			b.record(t)
		}
		b.ring.Reload(mine)
		if err := b.evidence.SignWhenShown(t.Context(), b.ring); err != nil {
			t.Fatal(err)
		}
		want := []string{mine.List()[0].ID}
		if used {
			want = append(want, other.List()[0].ID)
		}
		if got := b.evidence.KeysToSign(); !slices.Equal(got, want) {
			t.Errorf("used %v: %q are noted, want %q", used, got, want)
		}
	}
}

// ADR 0064, "Signing when a token is shown": an event is recorded without a signature, and
// its token has the bytes that it would have had: in this life and the next, after a
// rotation, and after the key went. It is the same token to whoever presents it.
func TestSignedWhenShown(t *testing.T) {
	b := newBench(t)
	path := ringPath(t, b)
	draft, want := b.record(t)
	held := func(when string) {
		t.Helper()
		e := b.recorded(t, draft)
		if e.Header == nil || string(e.Payload) != draft.Payload() {
			t.Errorf("%s: %s is signed in the ledger", when, e.Payload)
		}
		for range 2 {
			if got, err := b.evidence.Log().Token(t.Context(), &e); err != nil || string(got) != want {
				t.Errorf("%s: %v\n%s\n%s", when, err, got, want)
			}
		}
		presented := b.entry(t, draft.Workflow(), draft.ID())
		if status, err := b.evidence.LedgerStatus(t.Context(), presented); err != nil || status != evidence.Same {
			t.Errorf("%s: %v %v", when, status, err)
		}
		nodes, err := b.evidence.GraphOf(presented).Nodes(t.Context(), presented.ID())
		if err != nil || len(nodes) != 1 || nodes[0].Digest != presented.Digest() {
			t.Errorf("%s: %+v %v", when, nodes, err)
		}
	}
	again := func() {
		t.Helper()
		b.close(t)
		ring, err := ect.LoadRing(path)
		if err != nil {
			t.Fatal(err)
		}
		b.ring = ring
		b.open(t)
	}
	held("recorded")
	again()
	held("opened again")

	first := b.ring.List()[0].ID
	if got := b.evidence.KeysToSign(); !slices.Equal(got, []string{first}) {
		t.Errorf("%q are noted", got)
	}
	if _, err := b.ring.Rotate(path, ect.ES256, time.Now(), time.Hour, b.evidence.KeysToSign()...); err != nil {
		t.Fatal(err)
	}
	// Until the new key is noted the sequencer signs: what names it must be found again.
	early, _ := b.record(t)
	if e := b.recorded(t, early); e.Header != nil {
		t.Errorf("%s names a key that is not noted", e.Header)
	}
	held("rotated")
	again() // a crash between the rotation and the walk
	held("opened after the rotation")
	if err := b.evidence.SignWhenShown(t.Context(), b.ring); err != nil {
		t.Fatal(err)
	}
	later, wantLater := b.record(t)
	if e := b.recorded(t, later); ect.HeaderKeyID(e.Header) != b.ring.List()[1].ID {
		t.Errorf("%s does not name the new key", e.Header)
	}

	done, stored, err := b.signReplaced(t)
	if err != nil || stored != 1 || !slices.Equal(done, []string{first}) {
		t.Errorf("%q, %d signatures: %v", done, stored, err)
	}
	if got := b.evidence.KeysToSign(); !slices.Equal(got, []string{b.ring.List()[1].ID}) {
		t.Errorf("%q are noted", got)
	}
	again() // a crash before the key goes
	if done, stored, err = b.signReplaced(t); err != nil || stored != 0 || !slices.Equal(done, []string{first}) {
		t.Errorf("%q, %d signatures: %v", done, stored, err)
	}
	if err := b.ring.Retire(path, done...); err != nil {
		t.Fatal(err)
	}
	held("without the key")
	again()
	held("opened without the key")
	e := b.recorded(t, later)
	if got, err := b.evidence.Log().Token(t.Context(), &e); err != nil || string(got) != wantLater {
		t.Errorf("%v %s", err, got)
	}
	if done, stored, err := b.signReplaced(t); err != nil || stored != 0 || done != nil {
		t.Errorf("%q, %d signatures: %v", done, stored, err)
	}

	// P8: another signature in its place is not shown, also if it was sealed.
	for found, err := range b.store.Scan(t.Context(), store.Prefix([]byte("ls"))) {
		if err != nil {
			t.Fatal(err)
		}
		forged := b.sealer.Seal(nil, make([]byte, 64), found.Key)
		if _, err := b.store.Commit(t.Context(), store.Write{Key: found.Key, Value: forged}); err != nil {
			t.Fatal(err)
		}
	}
	e = b.recorded(t, draft)
	if got, err := b.evidence.Log().Token(t.Context(), &e); !errors.Is(err, ledger.ErrTampered) || got != nil {
		t.Errorf("%s %v", got, err)
	}
}

// What is presented under the id of a recorded event is the same only with the same bytes; no
// digest is not the digest of anything. Whoever has no key for it compares what was signed.
func TestSameAsSignedLater(t *testing.T) {
	b := newBench(t)
	path := ringPath(t, b)
	fresh, _ := b.record(t)
	old, _ := b.record(t)
	presented := b.entry(t, old.Workflow(), old.ID())
	thief, err := ect.NewIssuer(identity, b.ring)
	if err != nil {
		t.Fatal(err)
	}
	compare := func(when string, token *ect.Token, want evidence.TokenStatus) {
		t.Helper()
		if got, err := b.evidence.LedgerStatus(t.Context(), token); err != nil || got != want {
			t.Errorf("%s: %v %v", when, got, err)
		}
		nodes, err := b.evidence.GraphOf(token).Nodes(t.Context(), token.ID())
		if err != nil || len(nodes) != 1 || (nodes[0].Digest == token.Digest()) != (want == evidence.Same) {
			t.Errorf("%s: %+v %v", when, nodes, err)
		}
	}
	another := func(d *ect.Draft) *ect.Token {
		t.Helper()
		token, err := thief.Issue(time.Now(), ect.Claims{ID: d.ID(), Workflow: d.Workflow(), Action: "pay", Audience: []string{identity}})
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	compare("another token of the same key", another(fresh), evidence.Other)
	compare("another token of an older event", another(old), evidence.Other)
	if _, err := b.ring.Rotate(path, ect.ES256, time.Now(), 0); err != nil { // after a theft
		t.Fatal(err)
	}
	b.close(t)
	b.open(t)
	compare("another token, without the key", another(old), evidence.Other)
	compare("the token, without the key", presented, evidence.Same)
}

// An ancestor needs no signature, and no tile of the tree: an altered one does not stop the
// calls that follow from its entries. Only who presents the token itself needs it whole.
func TestAncestorsAreNotSigned(t *testing.T) {
	b := newBench(t)
	first, _ := b.record(t)
	presented := b.entry(t, first.Workflow(), first.ID())
	for range 260 { // more than a tile has
		b.record(t)
	}
	last, _ := b.record(t)
	b.recorded(t, last)
	b.close(t)
	for found, err := range b.store.Scan(t.Context(), store.Prefix([]byte("lt"))) {
		if err != nil {
			t.Fatal(err)
		}
		if level := found.Key[len(found.Key)-9]; level != 0 {
			continue
		}
		altered := bytes.Clone(found.Value)
		altered[0] ^= 1
		if _, err := b.store.Commit(t.Context(), store.Write{Key: found.Key, Value: altered}); err != nil {
			t.Fatal(err)
		}
	}
	b.open(t) // which remembers nothing
	child := b.token(t, ect.Claims{Workflow: first.Workflow(), Parents: []string{first.ID()}})
	nodes, err := b.evidence.GraphOf(child).Nodes(t.Context(), first.ID())
	if err != nil || len(nodes) != 1 || nodes[0].Level != ect.L3 || nodes[0].Digest != [32]byte{} {
		t.Errorf("%+v %v", nodes, err)
	}
	if nodes, err := b.evidence.GraphOf(presented).Nodes(t.Context(), first.ID()); !errors.Is(err, ledger.ErrTampered) {
		t.Errorf("%+v %v", nodes, err)
	}
	if status, err := b.evidence.LedgerStatus(t.Context(), presented); !errors.Is(err, ledger.ErrTampered) {
		t.Errorf("%v %v", status, err)
	}
}

// What is recorded beside a rotation is signed by its walk, or names the next key: never a
// key that is gone.
func TestRotationBesideRecords(t *testing.T) {
	b := newBench(t)
	path := ringPath(t, b)
	var all sync.WaitGroup
	var mu sync.Mutex
	var drafts []*ect.Draft
	ended := make(chan struct{})
	for range 3 {
		all.Go(func() {
			for range 100 {
				draft, err := b.builder.Checkpoint(time.Now(), call(uuid.NewString()))
				if err == nil {
					err = b.evidence.Append(t.Context(), time.Now().Add(time.Hour), nil, draft)
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				drafts = append(drafts, draft)
				mu.Unlock()
			}
		})
	}
	go func() { all.Wait(); close(ended) }()
	for going := true; going; {
		select {
		case <-ended:
			going = false
		default:
		}
		_, err := b.ring.Rotate(path, ect.ES256, time.Now(), time.Hour, b.evidence.KeysToSign()...)
		if err == nil {
			err = b.evidence.SignWhenShown(t.Context(), b.ring)
		}
		var done []string
		if err == nil {
			done, _, err = b.signReplaced(t)
		}
		if err == nil {
			err = b.ring.Retire(path, done...)
		}
		if err != nil {
			t.Error(err)
		}
	}
	for _, d := range drafts {
		e := b.recorded(t, d)
		if _, err := b.evidence.Log().Token(t.Context(), &e); err != nil {
			t.Fatalf("of %d: %s: %v", len(drafts), e.Header, err)
		}
	}
}

// Which keys are still needed is sealed: nobody takes one away unnoticed.
func TestKeysToSignAreSealed(t *testing.T) {
	b := newBench(t)
	b.record(t)
	if _, err := b.sealer.Rotate(textFile(t, b.sealer), func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Reseal(t.Context()); err != nil {
		t.Fatal(err)
	}
	sealed, err := b.store.Get(t.Context(), []byte("ns"))
	if ids := b.sealer.KeyIDs(); err != nil || b.sealer.KeyOf(sealed.Value) != ids[len(ids)-1] {
		t.Errorf("not sealed anew: %v", err)
	}
	b.close(t)
	b.open(t)
	if got := b.evidence.KeysToSign(); len(got) != 1 {
		t.Errorf("%q", got)
	}
	if err := b.evidence.ForgetKeys(t.Context(), b.ring.List()[0].ID); err != nil || len(b.evidence.KeysToSign()) != 0 {
		t.Errorf("not forgotten: %v", err)
	}
	b.close(t)
	if _, err := b.store.Commit(t.Context(), store.Write{Key: []byte("ns"), Value: []byte("[]")}); err != nil {
		t.Fatal(err)
	}
	if _, err := evidence.Open(t.Context(), evidence.Options{Store: b.store, Sealer: b.sealer, Node: "n1", Ring: b.ring}); !errors.Is(err, ledger.ErrTampered) {
		t.Errorf("forged: %v", err)
	}
}
