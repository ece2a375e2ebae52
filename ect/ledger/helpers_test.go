package ledger

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const testOrigin = "example.com/ledger/a"

// The keys of the tests' heads. Nothing else is signed with them.
var testSigner, testKeys = newHeadKey("ledger.example")

func newHeadKey(name string) (note.Signer, note.Verifiers) {
	// Deterministic, so that a failure can be repeated.
	private, public, err := note.GenerateKey(bytes.NewReader(bytes.Repeat([]byte(name[:1]), 64)), name)
	if err != nil {
		panic(err)
	}
	signer, err := note.NewSigner(private)
	if err != nil {
		panic(err)
	}
	verifier, err := note.NewVerifier(public)
	if err != nil {
		panic(err)
	}
	return signer, note.VerifierList(verifier)
}

// clearSealer seals nothing, so that only the tree can find alterations.
type clearSealer struct{ *seal.Ring }

func (clearSealer) Seal(dst, plaintext, _ []byte) []byte       { return append(dst, plaintext...) }
func (clearSealer) Open(dst, sealed, _ []byte) ([]byte, error) { return append(dst, sealed...), nil }
func (clearSealer) KeyIDs() []uint32                           { return []uint32{1} }
func (clearSealer) KeyOf([]byte) uint32                        { return 1 }
func (s clearSealer) Index(d string, parts ...string) [32]byte { return s.Ring.Index(d, parts...) }

var testRing = seal.Generate()

func testOptions(st store.Store) Options {
	return Options{Store: st, Sealer: testRing, Origin: testOrigin, HeadSigner: testSigner, HeadKeys: testKeys}
}

func mustOpen(t testing.TB, o Options) *Log {
	t.Helper()
	l := must(Open(t.Context(), o))(t)
	return l
}

func testEvent(n int) Event {
	e := Event{
		ID: fmt.Sprintf("id-%d", n), Workflow: fmt.Sprintf("workflow-%d", n%3), Action: "pay", Issuer: "spiffe://example.com/a",
		Time: time.Unix(int64(n), 0), Payload: []byte(fmt.Sprintf("payload-%d", n)),
	}
	if n%3 == 0 {
		e.Workflow = ""
	}
	if n > 0 {
		e.Parents = []string{fmt.Sprintf("id-%d", n-1)}
	}
	return e
}

func appendEvents(t testing.TB, l *Log, from, to int) {
	t.Helper()
	for n := from; n < to; n++ {
		mustAppend(t, l, testEvent(n))
	}
}

func mustAppend(t testing.TB, l *Log, events ...Event) {
	t.Helper()
	if err := l.Append(t.Context(), events); err != nil {
		t.Fatal(err)
	}
}

// mustPrune prunes everything that may go, which must be n entries, or some for -1.
func mustPrune(t testing.TB, l *Log, n int) {
	t.Helper()
	if got, err := l.Prune(t.Context(), time.Now().Add(time.Hour)); err != nil || got != n && (n != -1 || got == 0) {
		t.Fatalf("%d pruned: %v", got, err)
	}
}

func mustVerify(t testing.TB, l *Log) Report {
	t.Helper()
	r := must(l.Verify(t.Context()))(t)
	if err := faultsOf(&r); err != nil {
		t.Fatal(err)
	}
	return r
}

// naive is the reference tree: all leaf hashes, and what tlog makes of them.
type naive struct{ stored []tlog.Hash }

func (n *naive) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	hashes := make([]tlog.Hash, len(indexes))
	for i, at := range indexes {
		hashes[i] = n.stored[at]
	}
	return hashes, nil
}

func naiveTree(t testing.TB, leaves []tlog.Hash) *naive {
	t.Helper()
	n := &naive{}
	for i, h := range leaves {
		stored := must(tlog.StoredHashesForRecordHash(int64(i), h, n))(t)
		n.stored = append(n.stored, stored...)
	}
	return n
}

func (n *naive) root(t testing.TB, size int) tlog.Hash {
	t.Helper()
	h := must(tlog.TreeHash(int64(size), n))(t)
	return h
}

func numbered(n int) tlog.Hash {
	return tlog.RecordHash(binary.BigEndian.AppendUint64(nil, uint64(n)))
}

var errCrash = errors.New("crashed")

// crashing is a store that fails from its n-th commit on, which may have landed.
type crashing struct {
	store.Store
	mu     sync.Mutex
	left   int
	landed bool
	dead   bool
}

func (s *crashing) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dead {
		return 0, errCrash
	}
	s.left--
	if s.left > 0 {
		return s.Store.Commit(ctx, batch...)
	}
	s.dead = true
	if s.landed {
		if _, err := s.Store.Commit(ctx, batch...); err != nil {
			return 0, err
		}
	}
	return 0, errCrash
}

// contents is everything in a store.
func contents(t testing.TB, st store.Store) []store.Entry {
	t.Helper()
	var all []store.Entry
	for e, err := range st.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

// filled is a store with those contents.
func filled(t testing.TB, all []store.Entry) *memory.Store {
	t.Helper()
	st := memory.New(memory.Options{})
	for len(all) > 0 {
		n := min(len(all), store.MaxBatch)
		batch := make([]store.Write, n)
		for i := range batch {
			batch[i] = store.Write{Key: all[i].Key, Value: all[i].Value}
		}
		if _, err := st.Commit(t.Context(), batch...); err != nil {
			t.Fatal(err)
		}
		all = all[n:]
	}
	return st
}

func faultsNaming(r *Report, index int64) bool {
	for _, f := range r.Faults {
		if indexOf(f) == index {
			return true
		}
	}
	return false
}

// indexOf is the entry of a fault, -1 for none.
func indexOf(f Fault) int64 {
	if f.Index == nil {
		return -1
	}
	return *f.Index
}

func allFaults(r *Report) string {
	var b strings.Builder
	for _, f := range r.Faults {
		fmt.Fprintf(&b, "\n\tentry %d: %s", indexOf(f), f.What)
	}
	return b.String()
}

func faultsOf(r *Report) error {
	if r.Count == 0 {
		return nil
	}
	return fmt.Errorf("%d faults: %s", r.Count, allFaults(r))
}

// verifyStored verifies a log that is not open, and may not open any more.
func verifyStored(t testing.TB, o Options, known ...Head) (Report, error) {
	t.Helper()
	if err := o.complete(); err != nil {
		t.Fatal(err)
	}
	return newLogStore(&o).verify(t.Context(), append(known, o.Known...))
}

// must makes a failed call fatal: must(f())(t).
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// encodeLeaf appends e as the entry at index.
func (e *Event) encodeLeaf(b []byte, index int64, recorded time.Time) []byte {
	x := extension{after: &state{tree: &tree{merkleState: merkleState{size: index}}, recorded: recorded}}
	x.encode(e.encodeFields(store.Encoder{}))
	return append(b, x.leaf...)
}
