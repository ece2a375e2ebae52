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
	// Text that ends anywhere within the extensions, where most kinds of values are.
	whole := extOf(`{"cascade.ttl":-8.64e+4,"a\u00e9":"\ud83d\ude00\\","b":[true,null,[{"c":"\""}]]},"ect_ext":{"b":[ ]}`)
	for end := strings.Index(whole, `"ext"`); end < len(whole); end++ {
		f.Add(whole[:end])
		f.Add(whole[:end] + `\`)
	}
	for _, seed := range []string{
		extOf("{}"), extOf(`{"a":[1,{"b":"c"}]},"ect_ext":{ "a" : [1.0,{"\u0062":"c"}] }`), extOf(`{"cascade.ttl":86400,"atd.cascaded":[{"agent":"a","status":"b"}]}`), `{"par":[],"pred":["x"]}`,
		`{"iat":1e3}`, `{"ext":{"a":"\`, `{"a":"\ud83d\ude00","b":[[[[]]]],"c":{"d":null}}`, "{}", "", `{"":0,"":0}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		raw := a.sendJSON(t, a.header(), payload)
		again, failed := ect.ParseInsecure(raw)
		if failed != nil {
			wantAnyCode(t, failed)
		}
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
		if failed != nil || again.ID() != strings.ToLower(token.ID()) && again.ID() != token.ID() && !strings.EqualFold(again.ID(), token.ID()) {
			t.Fatalf("read again as %v, %v", again, failed)
		}
		token.Lacks()
		token.Ext().Texts("cascade.blast_radius")
		token.Ext().Outcomes(ect.MemberCascaded)
		for _, m := range []ect.Member{ect.MemberTTL, ect.MemberCascaded, "a", "a\u00e9", "none"} {
			if value, there := token.Ext().Raw(m); there != json.Valid([]byte(value)) {
				t.Fatalf("%s is %q %v", m, value, there)
			}
		}
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
	for _, json := range []string{`{"ext":{"a":"\`, `{"ext":{"a":"\u00`, `{"ext":{"a":[-`, `{"ext":{"a":tru`, `{"alg":"EdDSA","typ":"exec+jwt","kid":"k\`} {
		cut := b64.EncodeToString([]byte(json))
		for _, seed := range []string{cut, parts[0] + "." + cut + "." + parts[2], cut + "." + parts[1] + "." + parts[2]} {
			f.Add(seed)
		}
	}
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

// FuzzHeader: whatever the protected header says, nothing is accepted whose signature is of
// another one.
func FuzzHeader(f *testing.F) {
	a := newAgent(f, "k", "EdDSA")
	v := verifier(f, parseSet(f, clinical, a.jwk(f, nil)), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	good := a.send(f, a.header(), figure())
	parts := strings.Split(good, ".")
	header := string(b64Decode(f, parts[0]))
	for end := range len(header) + 1 {
		f.Add(header[:end])
		f.Add(header[:end] + `\`)
	}
	f.Add(`{"alg":"EdDSA","typ":"Application/Exec+JWT","kid":"k","crit":["x"],"jwk":{"a":[[[]]]},"x5c":["\ud800"]}`)
	f.Fuzz(func(t *testing.T, text string) {
		raw := b64.EncodeToString([]byte(text)) + "." + parts[1] + "." + parts[2]
		_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
		if (err == nil) != (text == header) {
			t.Fatalf("%q: %v", text, err)
		}
		if err != nil {
			wantAnyCode(t, err)
		}
		if _, err := ect.ParseInsecure(raw); err != nil {
			wantAnyCode(t, err)
		}
	})
}

// FuzzBody: of a body no token comes out that is empty, and never more than a token may
// have parents.
func FuzzBody(f *testing.F) {
	f.Add("application/json", `["a.b.c", "d\u002ee.f"]`)
	f.Add("application/json; charset=utf-8", `["a","\`)
	f.Add("application/exec+jwt", " a.b.c\n")
	f.Fuzz(func(t *testing.T, media, body string) {
		tokens, ours, err := ect.ParseBody(media, []byte(body))
		if err != nil {
			wantAnyCode(t, err)
			return
		}
		if ours != (len(tokens) > 0) || len(tokens) > ect.MaxParents {
			t.Fatalf("%d tokens, ours %v", len(tokens), ours)
		}
		for _, token := range tokens {
			if token == "" {
				t.Fatal("an empty token")
			}
		}
	})
}

// FuzzIssue: what is issued keeps its limits, is JSON for everybody, and is read back as it
// was meant, whatever is put into it.
func FuzzIssue(f *testing.F) {
	ring, err := ect.GenerateRing(ect.EdDSA)
	if err != nil {
		f.Fatal(err)
	}
	issuer, err := ect.NewIssuer(clinical, ring)
	if err != nil {
		f.Fatal(err)
	}
	f.Add("checkpoint", `{"a":[1e3,"\u00e9"]}`, "text", uint16(3), uint8(0))
	f.Add("error", ` "\ud83d\ude00\\" `, "\xff\x00\u2028", uint16(4000), uint8(1))
	f.Add("circuit_breaker_close", `[[[[[]]]]]`, strings.Repeat("x", 5000), uint16(1), uint8(2))
	f.Add("a", `"\`, "", uint16(0), uint8(0))
	f.Add("a", `{"a":"\`, `"`, uint16(0), uint8(0))
	f.Fuzz(func(t *testing.T, action, value, text string, n uint16, vocabulary uint8) {
		list := make([]string, n%5000)
		outcomes := make([]ect.Outcome, n%300)
		for i := range list {
			list[i] = text[:min(len(text), i%40)]
		}
		for i := range outcomes {
			outcomes[i] = ect.Outcome{Agent: text[:min(len(text), i%40)], Status: "failed"}
		}
		ext := new(ect.ExtBuilder).JSON("com.example.x", value).Text(ect.MemberReason, text).
			Texts("cascade.blast_radius", list).Outcomes(ect.MemberCascaded, outcomes)
		d, err := issuer.Draft(at, ect.Claims{
			Audience: []string{gateway}, Action: action, Ext: ext, Vocabulary: ect.Vocabulary(vocabulary % 3),
		})
		if err != nil {
			return
		}
		again, err := ect.ParseDraft(d.Payload())
		if err != nil || !json.Valid([]byte(d.Payload())) || len(d.Ext().JSON()) > 4096 || again.Ext().JSON() != d.Ext().JSON() {
			t.Fatalf("%v: %s", err, d.Payload())
		}
		want := strings.ToValidUTF8(text, "")
		if got, ok := again.Ext().Text(ect.MemberReason); !ok || strings.ReplaceAll(got, "\ufffd", "") != strings.ReplaceAll(want, "\ufffd", "") {
			t.Fatalf("%q became %q", text, got)
		}
		// Lists are cut only where all of them do not fit, by no more than an element too much.
		const least = 4096 - 6*40 - 64
		size := len(d.Ext().JSON())
		if got, ok := again.Ext().Texts("cascade.blast_radius"); !ok || len(got) > len(list) || size < least && len(got) != len(list) {
			t.Fatalf("%d of %d, in %d bytes", len(got), len(list), size)
		}
		if got, ok := again.Ext().Outcomes(ect.MemberCascaded); !ok || len(got) > len(outcomes) || size < least && len(got) != len(outcomes) {
			t.Fatalf("%d of %d, in %d bytes", len(got), len(outcomes), size)
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
			if token == "" || len(token) > 8<<10 || strings.Contains(token, ",") || strings.Trim(token, " \t") != token {
				t.Fatalf("%q", token)
			}
		}
		if size > 16<<10 {
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
		owner := must(ect.ParseOwner("spiffe://example.com"))(t)
		set, err := ect.ParseSet(text, owner)
		if err != nil {
			return
		}
		for _, k := range set.All() {
			if k.ID() == "" || k.Owner() == (ect.Owner{}) || k.Algorithm() == 0 {
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
		written := must(ring.MarshalText())(t)
		again, err := ect.ParseRing(written)
		if err != nil || len(again.List()) != len(ring.List()) {
			t.Fatalf("%s: %v", written, err)
		}
	})
}
