package ect_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// TestLevels: minimum L2 refuses L1, L1 needs no iss and no aud, and what has dots is
// never read as L1 (14, 15).
func TestLevels(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	set := parseSet(t, clinical, a.jwk(t, nil))
	l1, l2 := verifier(t, set, func(p *ect.Policy) { p.MinLevel = ect.L1 }), verifier(t, set, nil)
	unsigned := func(changes map[string]any) string {
		raw := a.send(t, a.header(), with(changes))
		return strings.Split(raw, ".")[1]
	}
	check := func(v *ect.Verifier, raw, peer string, want ect.Code) {
		t.Helper()
		token, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at, Peer: peer})
		wantCode(t, err, want)
		if err == nil && token.Level() != ect.L1 {
			t.Errorf("level %v", token.Level())
		}
	}
	check(l1, unsigned(nil), "", "")
	check(l1, unsigned(map[string]any{"iss": nil, "aud": nil}), "", "")
	check(l1, unsigned(nil), clinical, "")
	check(l1, unsigned(nil), "spiffe://example.com/agent/x", ect.CodeIssuer)
	check(l1, unsigned(map[string]any{"aud": "x"}), "", ect.CodeAudience)
	check(l1, unsigned(map[string]any{"jti": nil}), "", ect.CodeID)
	check(l1, unsigned(map[string]any{"exp": issued - 3600}), "", ect.CodeExpired)
	check(l2, unsigned(nil), "", ect.CodeLevel)
	check(l1, "{}", "", ect.CodeMalformed)
	check(l1, "e30", "", ect.CodeExpires)

	// A broken signature, or none, does not make a token of level L1.
	signed := a.send(t, a.header(), figure())
	parts := strings.Split(signed, ".")
	check(l1, parts[0]+"."+parts[1]+"."+strings.Repeat("A", 86), "", ect.CodeSignature)
	check(l1, parts[0]+"."+parts[1]+".", "", ect.CodeSignature)
	check(l1, parts[1]+".", "", ect.CodeMalformed)
	none := a.header()
	none["alg"] = "none"
	check(l1, a.send(t, none, figure()), "", ect.CodeAlgorithm)
}

// Whose a token of level L1 is, the connection alone can prove; what it says of itself
// names nobody, and stands under no id of somebody's.
func TestAuthor(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) { p.MinLevel = ect.L1 })
	signed := a.send(t, a.header(), figure())
	unsigned := strings.Split(signed, ".")[1]
	nameless := strings.Split(a.send(t, a.header(), with(map[string]any{"iss": nil})), ".")[1]
	seen := map[string]string{}
	for _, c := range []struct {
		raw, peer, want string
	}{
		{signed, "", clinical},
		{signed, "spiffe://example.com/gateway", clinical},
		{unsigned, clinical, clinical},
		{unsigned, "", ""},
		{nameless, "", ""},
		{nameless, clinical, ""},
	} {
		token, err := v.Verify(t.Context(), c.raw, ect.Presentation{Now: at, Peer: c.peer})
		if err != nil {
			t.Fatal(err)
		}
		again, err := v.VerifyAgain(t.Context(), c.raw, c.peer)
		if err != nil {
			t.Fatal(err)
		}
		for _, token := range []*ect.Token{token, again} {
			if token.Author() != c.want || token.Proven() != (c.want != "") {
				t.Errorf("from %q it is %q's (proven: %v), want %q", c.peer, token.Author(), token.Proven(), c.want)
			}
			apart := token.NodeID() == ect.UnprovenID(token.ID())
			if apart == token.Proven() || !apart && token.NodeID() != token.ID() || token.Node().ID != token.NodeID() {
				t.Errorf("proven: %v, and it stands under %s", token.Proven(), token.NodeID())
			}
			if other, met := seen[token.NodeID()]; met && other != c.want {
				t.Errorf("%s is of %q and %q", token.NodeID(), other, c.want)
			}
			seen[token.NodeID()] = c.want
		}
	}
	_, err := v.VerifyAgain(t.Context(), unsigned, "spiffe://example.com/agent/x")
	wantCode(t, err, ect.CodeIssuer)
	stored, err := v.VerifyStored(t.Context(), unsigned)
	if err != nil || stored.Proven() {
		t.Errorf("a record without a signature is proven: %v", err)
	}
}

// book is a ledger that can fail.
type book struct {
	appended []string
	err      error
}

func (b *book) Append(_ context.Context, t *ect.Token) error {
	if b.err == nil {
		b.appended = append(b.appended, t.ID())
	}
	return b.err
}

// TestL3: at level L3 a token is appended before anybody relies on it, or nothing is
// known; where only L2 is asked for it stays L2.
func TestL3(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	set := parseSet(t, clinical, a.jwk(t, nil))
	raw := a.send(t, a.header(), figure())
	if _, err := ect.NewVerifier(ect.Policy{Audience: []string{gateway}, Sources: []ect.Source{set}, MinLevel: ect.L3}); err == nil {
		t.Error("level L3 without a ledger")
	}
	ledger := &book{}
	strict := verifier(t, set, func(p *ect.Policy) { p.MinLevel, p.Ledger = ect.L3, ledger })
	token, err := strict.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: graph{}})
	if err != nil || token.Level() != ect.L3 || token.Worth() != ect.L3 || len(ledger.appended) != 1 {
		t.Errorf("%v, %v", token, err)
	}
	ledger.err = errors.New("disk full")
	_, err = strict.Verify(t.Context(), raw, ect.Presentation{Now: at})
	if !errors.Is(err, ect.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	lenient := verifier(t, set, func(p *ect.Policy) { p.Ledger = ledger })
	token, err = lenient.Verify(t.Context(), raw, ect.Presentation{Now: at})
	if err != nil || token.Level() != ect.L2 {
		t.Errorf("%v, %v", token, err)
	}
}

// TestL3ByTheCaller: who records tokens in the commit that they are used for gets them as
// L2, and only with parents that are recorded or come along.
func TestL3ByTheCaller(t *testing.T) {
	policy := func(p *ect.Policy) { p.MinLevel, p.CallerAppends = ect.L3, true }
	f := newFamily(t, policy)
	send := func(n int, parents ...string) string {
		return f.a.send(t, f.a.header(), with(map[string]any{"jti": id(n), "par": append([]string{}, parents...)}))
	}
	verify := func(raws ...string) error {
		tokens, err := f.v.VerifyAll(t.Context(), raws, ect.Presentation{Now: at, DAG: f.g})
		for _, token := range tokens {
			if token.Level() != ect.L2 {
				t.Errorf("nobody has recorded it, and it is %v", token.Level())
			}
		}
		return err
	}
	f.g.add(ect.Node{ID: id(1), Workflow: workflow, Level: ect.L3})
	f.g.add(ect.Node{ID: id(2), Workflow: workflow, Level: ect.L2})
	if err := verify(send(3, id(1))); err != nil {
		t.Error(err)
	}
	wantCode(t, verify(send(4, id(2))), ect.CodeLevel)
	wantCode(t, verify(send(5, id(9))), ect.CodeParentUnknown)
	if err := verify(send(5, id(9)), send(9)); err != nil {
		t.Error(err)
	}
	set := parseSet(t, clinical, f.a.jwk(t, nil))
	both := ect.Policy{Audience: []string{gateway}, Sources: []ect.Source{set}, Ledger: &book{}, CallerAppends: true}
	if _, err := ect.NewVerifier(both); err == nil {
		t.Error("appended by two")
	}
}
