package evidence_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// issued is an entry with a token of that name under that ring.
func issued(t *testing.T, ring *ect.Ring, name string) *ledger.Entry {
	t.Helper()
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: name, Ring: ring})
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
		if err := b.told.Named(t.Context(), name, b.ring); err != nil {
			t.Fatal(err)
		}
	}
	witness := func(name string) *evidence.Witness {
		t.Helper()
		w, err := b.told.Witness(name, ect.Draft00, 0)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	if w := witness(identity); len(w.Former()) != 0 || w.Own(issued(t, b.ring, before)) {
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
		w := witness(identity)
		if !slices.Equal(w.Names(), []string{identity, before, agent}) {
			t.Errorf("%s: %q", when, w.Names())
		}
		for range 2 { // the second time it is remembered
			if !w.Own(old) || w.Own(foreign) || w.Own(late) || w.Own(issued(t, theirs, agent)) || !w.Own(&ledger.Entry{Event: ledger.Event{Issuer: before, Unsigned: true}}) {
				t.Errorf("%s: %v %v %v", when, w.Own(old), w.Own(foreign), w.Own(late))
			}
		}
		if w := witness(before); !w.Own(issued(t, b.ring, identity)) || slices.Contains(w.Names()[1:], before) {
			t.Errorf("%s: back to the name of before", when)
		}
	}
	held("noted")
	b.close(t)
	if _, err := b.sealer.Rotate(ringFile(t, b), func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	b.open(t)
	held("opened again")
	if err := b.told.Reseal(t.Context()); err != nil {
		t.Fatal(err)
	}
	sealed, err := b.store.Get(t.Context(), []byte("n"))
	if ids := b.sealer.KeyIDs(); err != nil || b.sealer.KeyOf(sealed.Value) != ids[len(ids)-1] || bytes.Contains(sealed.Value, []byte("example.com")) {
		t.Errorf("not sealed anew: %v", err)
	}
	if lacks := b.told.Lacks(b.ring); len(lacks) != 0 {
		t.Errorf("lacks %q", lacks)
	}
	if lacks := b.told.Lacks(theirs); len(lacks) != 1 || lacks[0] != b.ring.List()[0].ID {
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

func ringFile(t *testing.T, b *bench) string {
	t.Helper()
	text, err := b.sealer.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
