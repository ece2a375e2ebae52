package evidence_test

import (
	"bytes"
	"context"
	"encoding"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

const (
	identity = "spiffe://example.com/gateway"
	patience = 20 * time.Second
)

// bench is a store with its evidence, and an agent.
type bench struct {
	store    store.Store
	sealer   *seal.Ring
	ring     *ect.Ring
	evidence *evidence.Evidence
	builder  *evidence.EventBuilder
	agent    *ect.Issuer

	headFile string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{store: memory.New(memory.Options{}), sealer: seal.Generate(), ring: newRing(t)}
	var err error
	if b.agent, err = ect.NewIssuer("spiffe://example.com/agent", newRing(t)); err != nil {
		t.Fatal(err)
	}
	b.open(t)
	return b
}

func newRing(t testing.TB) *ect.Ring {
	t.Helper()
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// open begins a life of the gateway.
func (b *bench) open(t *testing.T) {
	t.Helper()
	opened, err := evidence.Open(t.Context(), evidence.Options{Store: b.store, Sealer: b.sealer, Node: "n1", Ring: b.ring, HeadFile: b.headFile})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = opened.Close(context.Background()) })
	if b.builder, err = opened.EventBuilder(identity); err != nil {
		t.Fatal(err)
	}
	if err := opened.SignWhenShown(t.Context(), b.ring); err != nil {
		t.Fatal(err)
	}
	b.evidence = opened
}

// close ends it.
func (b *bench) close(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := b.evidence.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) token(t *testing.T, c ect.Claims) *ect.Token {
	t.Helper()
	c.Audience = []string{identity}
	if c.Action == "" {
		c.Action = "pay"
	}
	token, err := b.agent.Issue(time.Now(), c)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// entry is the token that the ledger has of an event.
func (b *bench) entry(t *testing.T, workflow, id string) *ect.Token {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	entry, err := b.evidence.Log().Lookup(ctx, workflow, id)
	if err != nil {
		t.Fatal(err)
	}
	owner, err := ect.ParseOwner(identity)
	if err != nil {
		t.Fatal(err)
	}
	v, err := ect.NewVerifier(ect.Policy{Audience: []string{identity}, Sources: []ect.Source{b.ring.Source(owner)}})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := b.evidence.Log().Token(ctx, &entry)
	if err != nil {
		t.Fatal(err)
	}
	token, err := v.VerifyStored(ctx, string(raw))
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func call(workflow string, parents ...string) *evidence.Call {
	return &evidence.Call{
		Key: execution.Key{1, 2}, Caller: execution.CallerHash{3}, Action: "charge", Workflow: workflow, Parents: parents,
		Target: "POST api.example.com/v1/charges", RollbackURI: "https://api.example.com/.well-known/cascade/rollback", TTL: time.Hour,
	}
}

// recordCall records a call: its checkpoint and what came of it. It returns their ids.
func (b *bench) recordCall(t *testing.T, c *evidence.Call, o evidence.Outcome, tokens ...*ect.Token) []*ect.Draft {
	t.Helper()
	now := time.Now()
	checkpoint, err := b.builder.Checkpoint(now, c)
	if err != nil {
		t.Fatal(err)
	}
	keep := now.Add(time.Hour)
	if err := b.evidence.Append(t.Context(), keep, tokens, checkpoint); err != nil {
		t.Fatal(err)
	}
	o.Checkpoint = checkpoint.ID()
	drafts, err := b.builder.Outcome(now, c, &o)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.evidence.Append(t.Context(), keep, nil, drafts...); err != nil {
		t.Fatal(err)
	}
	return append([]*ect.Draft{checkpoint}, drafts...)
}

// The key of the heads belongs to the store: it is the same in every life, and another
// store's is another.
func TestHeadKey(t *testing.T) {
	b := newBench(t)
	key := b.evidence.HeadKey()
	b.close(t)
	b.open(t)
	if b.evidence.HeadKey() != key {
		t.Error("another key in the next life")
	}
	if other := newBench(t); other.evidence.HeadKey() == key {
		t.Error("two stores have one key")
	}
}

// An older copy of the whole store is betrayed by the head that was kept beside it, and
// so is a log that is not the one that it was.
func TestOlderCopies(t *testing.T) {
	file := filepath.Join(t.TempDir(), "identity.head")
	b := newBench(t)
	b.close(t)
	b.headFile = file
	b.open(t)
	old := copyOf(t, b.store)
	b.recordCall(t, call(""), evidence.Outcome{Verdict: execution.Completed, Status: 200})
	b.close(t) // keeps the head
	newer := b.store
	b.store = old
	if _, err := evidence.Open(t.Context(), evidence.Options{Store: old, Sealer: b.sealer, Node: "n1", Ring: b.ring, HeadFile: file}); !errors.Is(err, ledger.ErrTampered) {
		t.Errorf("the older copy: %v", err)
	}
	b.store = newer
	b.open(t)
	b.close(t)
	if err := os.WriteFile(file, []byte("no head"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := evidence.Open(t.Context(), evidence.Options{Store: newer, Sealer: b.sealer, Node: "n1", Ring: b.ring, HeadFile: file}); err == nil {
		t.Error("what is no head was taken for one")
	}
}

func copyOf(t *testing.T, from store.Store) store.Store {
	t.Helper()
	to := memory.New(memory.Options{})
	for e, err := range from.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		if _, err := to.Commit(t.Context(), store.Write{Key: e.Key, Value: e.Value, Expires: e.Expires}); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// P8: neither a token nor an id can be read in the store.
func TestP8NothingIsReadable(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	token := b.token(t, ect.Claims{Workflow: workflow, Action: "marker-action"})
	c := call(workflow, token.ID())
	c.Target = "POST marker-target"
	b.recordCall(t, c, evidence.Outcome{Verdict: execution.Completed, Status: 200}, token)
	b.link(t, call(workflow), "marker-id", uuid.NewString())
	if _, err := b.store.Commit(t.Context(), b.evidence.UseWrite(token, evidence.Use{1}, time.Time{})); err != nil {
		t.Fatal(err)
	}
	b.close(t)
	for e, err := range b.store.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		text := string(e.Key) + string(e.Value)
		for _, secret := range []string{"marker-", workflow, token.ID(), token.Raw(), "spiffe://example.com/agent"} {
			if strings.Contains(text, secret) {
				t.Errorf("%q can be read under %q", secret, e.Key)
			}
		}
	}
}

// A store holds a ledger from its first opening on, so that a lost key is not replaced.
func TestBegun(t *testing.T) {
	if begun, err := evidence.Exists(t.Context(), memory.New(memory.Options{})); err != nil || begun {
		t.Errorf("an empty store: %v %v", begun, err)
	}
	b := newBench(t)
	if begun, err := evidence.Exists(t.Context(), b.store); err != nil || !begun {
		t.Errorf("an open ledger: %v %v", begun, err)
	}
}

// issued is an entry with a token of that name under that ring.
func issued(t *testing.T, ring *ect.Ring, name string) *ledger.Entry {
	t.Helper()
	issuer, err := ect.NewIssuer(name, ring)
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Issue(time.Now(), ect.Claims{Audience: []string{name}, Action: "pay"})
	if err != nil {
		t.Fatal(err)
	}
	return &ledger.Entry{Event: ledger.Event{ID: token.ID(), Issuer: name, Payload: []byte(token.Raw())}}
}

// ADR 0040: what the gateway has signed under an earlier name is its own, and nothing
// else of that name: it may have been another's before, or be so by now.
func TestNamesOfBefore(t *testing.T) {
	const before, agent = "spiffe://example.com/before", "spiffe://example.com/agent/a"
	b := newBench(t)
	named := func(name string) {
		t.Helper()
		if err := b.evidence.RecordName(t.Context(), name, b.ring); err != nil {
			t.Fatal(err)
		}
	}
	builder := func(name string) *evidence.EventBuilder {
		t.Helper()
		w, err := b.evidence.EventBuilder(name)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	if w := builder(identity); len(w.Former()) != 0 || w.Own(issued(t, b.ring, before)) {
		t.Error("a name that was never its own")
	}
	named(before)
	named(agent) // by mistake: it is an agent's
	named(identity)
	named(identity)
	theirs := newRing(t)
	old, foreign, late := issued(t, b.ring, before), issued(t, theirs, before), issued(t, b.ring, "spiffe://example.com/other")
	held := func(when string) {
		t.Helper()
		w := builder(identity)
		if !slices.Equal(w.Names(), []string{identity, before, agent}) {
			t.Errorf("%s: %q", when, w.Names())
		}
		for range 2 { // the second time it is remembered
			if !w.Own(old) || w.Own(foreign) || w.Own(late) || w.Own(issued(t, theirs, agent)) {
				t.Errorf("%s: %v %v %v", when, w.Own(old), w.Own(foreign), w.Own(late))
			}
		}
		if w := builder(before); !w.Own(issued(t, b.ring, identity)) || slices.Contains(w.Names()[1:], before) {
			t.Errorf("%s: back to the name of before", when)
		}
	}
	held("noted")
	b.close(t)
	if _, err := b.sealer.Rotate(textFile(t, b.sealer), func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	b.open(t)
	held("opened again")
	if err := b.evidence.Reseal(t.Context()); err != nil {
		t.Fatal(err)
	}
	sealed, err := b.store.Get(t.Context(), []byte("n"))
	if ids := b.sealer.KeyIDs(); err != nil || b.sealer.KeyOf(sealed.Value) != ids[len(ids)-1] || bytes.Contains(sealed.Value, []byte("example.com")) {
		t.Errorf("not sealed anew: %v", err)
	}
	if lacks := b.evidence.MissingKeys(b.ring); len(lacks) != 0 {
		t.Errorf("lacks %q", lacks)
	}
	if lacks := b.evidence.MissingKeys(theirs); len(lacks) != 1 || lacks[0] != b.ring.List()[0].ID {
		t.Errorf("lacks %q", lacks)
	}
	b.close(t)
	b.open(t)
	held("sealed anew")
	// Nobody adds a name without the key of the store.
	b.close(t)
	if _, err := b.store.Commit(t.Context(), store.Write{Key: []byte("n"), Value: []byte(`[{"name":"spiffe://example.com/agent/b"}]`)}); err != nil {
		t.Fatal(err)
	}
	_, err = evidence.Open(t.Context(), evidence.Options{Store: b.store, Sealer: b.sealer, Node: "n1", Ring: b.ring})
	if !errors.Is(err, ledger.ErrTampered) {
		t.Errorf("forged names: %v", err)
	}
}

// textFile writes a ring of keys to a file.
func textFile(t *testing.T, ring encoding.TextMarshaler) string {
	t.Helper()
	text, err := ring.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
