package ect_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// FuzzPayload: whatever is signed, a token that is accepted keeps its limits, is JSON
// for everybody, and means the same when it is read again.
func FuzzPayload(f *testing.F) {
	a := newAgent(f, "k", "EdDSA")
	v := verifier(f, parseSet(f, clinical, a.jwk(f, nil)), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	for _, seed := range []string{
		extOf("{}"), extOf(`{"cascade.ttl":86400,"atd.cascaded":[{"agent":"a","status":"b"}]}`), `{"par":[],"pred":["x"]}`,
		`{"iat":1e3}`, `{"ext":{"a":"\`, `{"a":"\ud83d\ude00","b":[[[[]]]],"c":{"d":null}}`, "{}", "", `{"":0,"":0}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		raw := a.sendJSON(t, a.header(), payload)
		token, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
		if err != nil {
			wantAnyCode(t, err)
			return
		}
		if !json.Valid([]byte(token.Payload())) || token.Payload() != payload {
			t.Fatalf("accepted %q", payload)
		}
		if len(token.Ext().JSON()) > 4096 || len(token.Parents()) > ect.MaxParents || len(token.Action()) > 256 {
			t.Fatalf("over a limit: %q", payload)
		}
		var plain struct {
			Jti string `json:"jti"`
			Act string `json:"exec_act"`
		}
		if err := json.Unmarshal([]byte(payload), &plain); err != nil || !strings.EqualFold(plain.Jti, token.ID()) {
			// Another reader takes names in any case; then the two may differ.
			if !strings.Contains(strings.ToLower(payload), `jti`) {
				t.Fatalf("id %q and %q", plain.Jti, token.ID())
			}
		}
		again, err := ect.ParseInsecure(raw)
		if err != nil || again.ID() != strings.ToLower(token.ID()) && again.ID() != token.ID() && !strings.EqualFold(again.ID(), token.ID()) {
			t.Fatalf("read again as %v, %v", again, err)
		}
		token.Lacks()
		token.Ext().Texts(ect.MemberBlastRadius)
		token.Ext().Outcomes(ect.MemberCascaded)
	})
}

func wantAnyCode(t testing.TB, err error) {
	t.Helper()
	if refused, ok := err.(*ect.Error); !ok || refused.Detail() == "" {
		t.Fatalf("refused with %v", err)
	}
}

// FuzzToken: no text is accepted but the one that was signed, and none panics.
func FuzzToken(f *testing.F) {
	a := newAgent(f, "k", "EdDSA")
	v := verifier(f, parseSet(f, clinical, a.jwk(f, nil)), func(p *ect.Policy) { p.Algorithms, p.MinLevel = ect.Algorithms(), ect.L1 })
	good := a.send(f, a.header(), figure())
	parts := strings.Split(good, ".")
	for _, seed := range []string{good, parts[1], parts[0] + ".." + parts[2], "", ".", "..", "e30", "e30.e30.", good + "." + parts[2]} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		token, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
		if err != nil {
			wantAnyCode(t, err)
			return
		}
		if strings.Contains(raw, ".") != (token.Level() == ect.L2) {
			t.Fatalf("%q has level %v", raw, token.Level())
		}
		if token.Level() == ect.L2 && raw != good {
			t.Fatalf("forged: %q", raw)
		}
	})
}

// FuzzFields: the sizes hold, and what comes out has no commas and no blanks around.
func FuzzFields(f *testing.F) {
	f.Add("a.b.c, d.e.f", "")
	f.Add(strings.Repeat("a", 9<<10), "b")
	f.Add(",,", "\t,")
	f.Fuzz(func(t *testing.T, one, two string) {
		tokens, err := ect.ParseFields([]string{one, two})
		if err != nil {
			wantAnyCode(t, err)
			return
		}
		size := 0
		for _, token := range tokens {
			size += len(token)
			if token == "" || len(token) > ect.MaxField || strings.Contains(token, ",") || strings.Trim(token, " \t") != token {
				t.Fatalf("%q", token)
			}
		}
		if size > ect.MaxFields {
			t.Fatalf("%d bytes", size)
		}
		joined, err := ect.ParseFields([]string{one + "," + two})
		if err == nil && strings.Join(joined, ",") != strings.Join(tokens, ",") {
			t.Fatalf("joined on the way: %q and %q", joined, tokens)
		}
	})
}

// FuzzKeySet: no text panics, and every key that is used has a name, an owner and an
// algorithm.
func FuzzKeySet(f *testing.F) {
	a, b := newAgent(f, "a", "ES256"), newAgent(f, "b", "EdDSA")
	f.Add(keySet(f, a.jwk(f, map[string]any{"sub": clinical}), b.jwk(f, nil)))
	f.Add([]byte(`{"keys":[{"kty":"oct","k":"AAAA"},{"kty":"EC","crv":"P-256","x":"","y":""},{"kty":"OKP","crv":"X25519","x":"AA"}]}`))
	f.Add([]byte(`{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB","x5c":["AAAA"],"exp":1e400,"revoked":null}]}`))
	f.Add([]byte(`{"keys":[null,1,"",[],{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		owner, err := ect.ParseOwner("spiffe://example.com")
		if err != nil {
			t.Fatal(err)
		}
		set, err := ect.ParseSet(text, owner)
		if err != nil {
			return
		}
		for _, k := range set.All() {
			if k.ID() == "" || k.Owner().IsZero() || k.Algorithm() == 0 {
				t.Fatalf("%+v", k)
			}
			if found, err := set.Keys(t.Context(), k.ID()); err != nil || len(found) == 0 {
				t.Fatalf("%s is not found", k.ID())
			}
		}
	})
}

// FuzzRing: no text of a key file panics, and what can be read can be written and read
// again.
func FuzzRing(f *testing.F) {
	for _, alg := range ect.Algorithms() {
		ring, err := ect.GenerateRing(alg)
		if err != nil {
			f.Fatal(err)
		}
		text, err := ring.MarshalText()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"))
	f.Add([]byte(`{"kty":"OKP","crv":"Ed25519","x":"AA","d":"AA"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		ring, err := ect.ParseRing(text)
		if err != nil {
			return
		}
		written, err := ring.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		again, err := ect.ParseRing(written)
		if err != nil || len(again.List()) != len(ring.List()) {
			t.Fatalf("%s: %v", written, err)
		}
	})
}
