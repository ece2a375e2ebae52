package ect_test

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// TestFigure: the draft's example passes and says what it says.
func TestFigure(t *testing.T) {
	a := newAgent(t, "agent-a-key", "ES256")
	v := verifier(t, parseSet(t, "spiffe://example.com", a.jwk(t, nil)), nil)
	raw := a.send(t, a.header(), figure())
	token := must(v.Verify(t.Context(), raw, ect.Presentation{Now: at}))(t)
	if token.Raw() != raw || token.Level() != ect.L2 || token.Key().ID() != "agent-a-key" {
		t.Errorf("envelope: %v %v", token.Level(), token.Key().ID())
	}
	if token.Issuer() != clinical || len(token.Audience()) != 1 || token.Audience()[0] != gateway {
		t.Errorf("from %s to %v", token.Issuer(), token.Audience())
	}
	if !token.IssuedAt().Equal(at) || !token.Expires().Equal(time.Unix(expires, 0)) {
		t.Errorf("from %v until %v", token.IssuedAt(), token.Expires())
	}
	if token.ID() != taskID || token.Workflow() != workflow || token.Action() != "recommend_treatment" || token.Event() != "" {
		t.Errorf("%s in %s does %s", token.ID(), token.Workflow(), token.Action())
	}
	if token.Parents() == nil || len(token.Parents()) != 0 {
		t.Errorf("parents %v", token.Parents())
	}
	if token.InputHash() != ect.Sum([]byte("test")) || token.OutputHash() != ect.Sum([]byte("foo")) {
		t.Errorf("hashes %s and %s", token.InputHash(), token.OutputHash())
	}
	if token.Lineage().Checked {
		t.Error("nobody has looked at the parents")
	}
}

// TestHashVectors: known values.
func TestHashVectors(t *testing.T) {
	for octets, want := range map[string]string{
		"test": "n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg",
		"foo":  "LCa0a2j_xo_5m0U8HTBBNBNCLXBkg7-g-YpeiGJm564",
		"":     "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU",
	} {
		h := ect.Sum([]byte(octets))
		if h.String() != want || h.Prefixed() != "sha256:"+want {
			t.Errorf("hash of %q is %s", octets, h)
		}
		if back, ok := ect.ParseHash(want); !ok || back != h {
			t.Errorf("%s is not read back", want)
		}
	}
	if zero := (ect.Hash{}); !zero.IsZero() || zero.String() != "" || zero.Prefixed() != "" {
		t.Error("no hash has a form")
	}
}

// TestAlgorithms: every allowed algorithm passes with a raw signature of its length;
// none, HMAC, RSA, an unlisted one and that of another key do not.
func TestAlgorithms(t *testing.T) {
	for _, alg := range []string{"ES256", "ES384", "EdDSA"} {
		a := newAgent(t, "k", alg)
		set := parseSet(t, "spiffe://example.com", a.jwk(t, nil))
		raw := a.send(t, a.header(), figure())
		all := verifier(t, set, func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
		if _, err := all.Verify(t.Context(), raw, ect.Presentation{Now: at}); err != nil {
			t.Errorf("%s: %v", alg, err)
		}
		wanted := ect.Code("")
		if alg != "ES256" {
			wanted = ect.CodeAlgorithm
		}
		_, err := verifier(t, set, nil).Verify(t.Context(), raw, ect.Presentation{Now: at})
		wantCode(t, err, wanted)
		for _, lie := range []string{"none", "None", "NONE", "HS256", "HS512", "RS256", "PS256", "ES512", "es256", "", "ES256 "} {
			header := a.header()
			header["alg"] = lie
			wantCode(t, refusal(t, all, a.send(t, header, figure())), ect.CodeAlgorithm)
		}
		for _, lie := range []string{"ES256", "ES384", "EdDSA"} {
			if lie == alg {
				continue
			}
			header := a.header()
			header["alg"] = lie
			wantCode(t, refusal(t, all, a.send(t, header, figure())), ect.CodeAlgorithm)
		}
	}
}

// TestType: both types pass, in any case and with their prefix; others do not.
func TestType(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, "spiffe://example.com", a.jwk(t, nil)), nil)
	for typ, want := range map[string]ect.Code{
		"wimse-exec+jwt": "", "exec+jwt": "", "Exec+JWT": "", "application/exec+jwt": "", "Application/WIMSE-exec+jwt": "",
		"JWT": ect.CodeType, "act+jwt": ect.CodeType, "wit+jwt": ect.CodeType, "": ect.CodeType,
		"application/": ect.CodeType, "text/exec+jwt": ect.CodeType, "exec+jwt ": ect.CodeType,
	} {
		header := a.header()
		header["typ"] = typ
		wantCode(t, refusal(t, v, a.send(t, header, figure())), want)
	}
	header := a.header()
	delete(header, "typ")
	wantCode(t, refusal(t, v, a.send(t, header, figure())), ect.CodeType)
}

// TestSignature: unknown names, other keys, changed bytes, wrong numbers of parts and
// second spellings of a signature are refused.
func TestSignature(t *testing.T) {
	a, b := newAgent(t, "k", "ES256"), newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, "spiffe://example.com", a.jwk(t, nil)), nil)
	check := func(raw string, want ect.Code) {
		t.Helper()
		wantCode(t, refusal(t, v, raw), want)
	}
	good := a.send(t, a.header(), figure())
	check(good, "")
	check(b.send(t, a.header(), figure()), ect.CodeSignature)

	unknown := a.header()
	unknown["kid"] = "x"
	check(a.send(t, unknown, figure()), ect.CodeKeyID)
	unnamed := a.header()
	delete(unnamed, "kid")
	check(a.send(t, unnamed, figure()), ect.CodeKeyID)

	parts := strings.Split(good, ".")
	changed := []byte(b64Decode(t, parts[1]))
	changed[len(changed)/2] ^= 1
	check(parts[0]+"."+b64.EncodeToString(changed)+"."+parts[2], ect.CodeSignature)
	check(parts[0]+"."+parts[1], ect.CodeMalformed)
	check(good+"."+parts[2], ect.CodeMalformed)
	check(good+".", ect.CodeMalformed)
	check("."+good, ect.CodeMalformed)
	check(parts[0]+"."+parts[1]+".", ect.CodeSignature)
	check(good[:len(good)-2], ect.CodeSignature)
	check(good+"A", ect.CodeSignature)
	check(good+"==", ect.CodeMalformed)
	check(parts[0]+"."+parts[1]+".\n"+parts[2], ect.CodeMalformed)
	check("", ect.CodeMalformed)
	check("..", ect.CodeMalformed)
	check(strings.Repeat("a", ect.MaxToken+1), ect.CodeTooLarge)

	// The last character of 64 octets has four bits that mean nothing.
	last := strings.IndexByte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", good[len(good)-1])
	twin := "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"[last^1]
	check(good[:len(good)-1]+string(twin), ect.CodeMalformed)

	// DER is not the form of a JWS.
	digest := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
	der := must(a.private.Sign(rand.Reader, digest[:], crypto.SHA256))(t)
	check(parts[0]+"."+parts[1]+"."+b64.EncodeToString(der), ect.CodeSignature)

	critical := a.header()
	critical["crit"] = []string{"exp"}
	check(a.send(t, critical, figure()), ect.CodeCritical)
}

func b64Decode(t testing.TB, text string) []byte {
	t.Helper()
	out := must(b64.DecodeString(text))(t)
	return out
}

// TestEveryByte: a token with any one character changed is refused.
func TestEveryByte(t *testing.T) {
	a := newAgent(t, "k", "EdDSA")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	good := a.send(t, a.header(), figure())
	for i := range good {
		for _, c := range []byte{'A', 'B', '.', '-', '='} {
			if good[i] == c {
				continue
			}
			if _, err := v.Verify(t.Context(), good[:i]+string(c)+good[i+1:], ect.Presentation{Now: at}); err == nil {
				t.Fatalf("accepted with %q at %d", c, i)
			}
		}
	}
}

// TestIssuer: iss must be whom the key belongs to.
func TestIssuer(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	for _, c := range []struct {
		owner string
		iss   any
		want  ect.Code
	}{
		{"spiffe://example.com", clinical, ""},
		{"spiffe://example.com", "spiffe://example.com/x", ""},
		{"spiffe://example.com", "spiffe://example.com.evil.org/x", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://evil.org/example.com", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://example.com", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://example.com/", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://example.com/a/../b", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://example.com//a", ect.CodeIssuer},
		{"spiffe://example.com", "SPIFFE://example.com/a", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://Example.com/a", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://example.com/a?b", ect.CodeIssuer},
		{"spiffe://example.com", "https://example.com/a", ect.CodeIssuer},
		{"spiffe://example.com", "spiffe://example.com/" + strings.Repeat("a", 2048-21), ""},
		{"spiffe://example.com", "spiffe://example.com/" + strings.Repeat("a", 2049-21), ect.CodeIssuer},
		{clinical, clinical, ""},
		{clinical, clinical + "/child", ect.CodeIssuer},
		{clinical, strings.ToUpper(clinical), ect.CodeIssuer},
		{"https://agents.example.com", "https://agents.example.com", ""},
		{"urn:uuid:" + taskID, "urn:uuid:" + taskID, ""},
		{clinical, nil, ect.CodeIssuer},
		{clinical, "", ect.CodeIssuer},
		{clinical, 7, ect.CodeIssuer},
	} {
		v := verifier(t, parseSet(t, c.owner, a.jwk(t, nil)), nil)
		_, err := v.Verify(t.Context(), a.send(t, a.header(), with(map[string]any{"iss": c.iss})), ect.Presentation{Now: at})
		if t.Run(c.owner, func(t *testing.T) { wantCode(t, err, c.want) }); t.Failed() {
			t.Errorf("iss was %v", c.iss)
		}
	}
}

// TestSameName: two owners may have given their keys one name; each signs for itself.
func TestSameName(t *testing.T) {
	a, b := newAgent(t, "key-1", "ES256"), newAgent(t, "key-1", "ES256")
	bID := "spiffe://other.org/b"
	for _, sources := range [][]ect.Source{
		{parseSet(t, clinical, a.jwk(t, nil)), parseSet(t, bID, b.jwk(t, nil))},
		{parseSet(t, "", a.jwk(t, map[string]any{"sub": clinical}), b.jwk(t, map[string]any{"sub": bID}))},
	} {
		v := verifier(t, nil, func(p *ect.Policy) { p.Sources = sources })
		for _, c := range []struct {
			from *agent
			iss  string
			want ect.Code
		}{{a, clinical, ""}, {b, bID, ""}, {a, bID, ect.CodeIssuer}, {b, clinical, ect.CodeIssuer}} {
			wantCode(t, refusal(t, v, c.from.send(t, c.from.header(), with(map[string]any{"iss": c.iss}))), c.want)
		}
	}
}

// TestAudience: a string or a list; the verifier must be in it.
func TestAudience(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) { p.Audience = []string{gateway, "urn:ledger"} })
	for _, c := range []struct {
		aud  any
		want ect.Code
	}{
		{gateway, ""}, {"urn:ledger", ""}, {[]string{gateway}, ""}, {[]string{"x", gateway}, ""},
		{[]string{"spiffe://example.com/agent/next", "spiffe://example.com/system/ledger"}, ect.CodeAudience},
		{"x", ect.CodeAudience}, {[]string{}, ect.CodeAudience}, {"", ect.CodeAudience}, {nil, ect.CodeAudience},
		{[]any{gateway, 1}, ect.CodeAudience}, {7, ect.CodeAudience}, {gateway + "/", ect.CodeAudience},
	} {
		wantCode(t, refusal(t, v, a.send(t, a.header(), with(map[string]any{"aud": c.aud}))), c.want)
	}
}

// TestTimes: exp and iat with their skew, to the second.
func TestTimes(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	set := parseSet(t, clinical, a.jwk(t, nil))
	v := verifier(t, set, nil)
	for _, c := range []struct {
		after time.Duration // of iat
		life  int
		want  ect.Code
	}{
		{0, 600, ""},
		{600 * time.Second, 600, ""},
		{630 * time.Second, 600, ""},
		{630*time.Second + 1, 600, ect.CodeExpired},
		{-30 * time.Second, 600, ""},
		{-30*time.Second - 1, 600, ect.CodeNotYet},
		{900 * time.Second, 3600, ""},
		{900*time.Second + 1, 3600, ect.CodeTooOld},
	} {
		raw := a.send(t, a.header(), with(map[string]any{"exp": issued + c.life}))
		_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at.Add(c.after)})
		wantCode(t, err, c.want)
	}
	for _, wrong := range []any{nil, "1772064150", 1772064150.5, -1, 0, 1772064150000, true, []int{1}} {
		for name, want := range map[string]ect.Code{"iat": ect.CodeIssuedAt, "exp": ect.CodeExpires} {
			wantCode(t, refusal(t, v, a.send(t, a.header(), with(map[string]any{name: wrong}))), want)
		}
	}
}

// A token that ends before it begins contradicts itself, also within the skew.
func TestEndBeforeBeginning(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) { p.MinLevel = ect.L1 })
	for end, want := range map[int]ect.Code{issued: "", issued - 1: ect.CodeExpires, issued - 30: ect.CodeExpires, issued - 31: ect.CodeExpired} {
		raw := a.send(t, a.header(), with(map[string]any{"exp": end}))
		for _, raw := range []string{raw, strings.Split(raw, ".")[1]} {
			_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
			wantCode(t, err, want)
			if _, err := v.VerifyStored(t.Context(), raw); err != nil {
				t.Errorf("a record that was believed: %v", err)
			}
		}
	}
}

// TestStored: a record is verified whatever its age, also under a replaced key, but
// not under a revoked one, nor if it was altered.
func TestStored(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), nil)
	raw := a.send(t, a.header(), figure())
	_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at.Add(24 * time.Hour)})
	wantCode(t, err, ect.CodeExpired)
	if _, err := v.VerifyStored(t.Context(), raw); err != nil {
		t.Error(err)
	}
	_, err = v.VerifyStored(t.Context(), raw[:len(raw)-4]+"AAAA")
	wantCode(t, err, ect.CodeSignature)

	old := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"exp": issued})), nil)
	if _, err := old.VerifyStored(t.Context(), raw); err != nil {
		t.Error(err)
	}
	_, err = old.VerifyStored(t.Context(), a.send(t, a.header(), with(map[string]any{"iat": issued + 1})))
	wantCode(t, err, ect.CodeKeyRevoked)

	revoked := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"revoked": map[string]any{"revoked_at": issued}})), nil)
	_, err = revoked.VerifyStored(t.Context(), raw)
	wantCode(t, err, ect.CodeKeyRevoked)
	wantCode(t, refusal(t, revoked, raw), ect.CodeKeyRevoked)
}

// down is a source that knows nothing at the moment.
type down struct{}

func (down) Keys(context.Context, string) ([]*ect.Key, error) { return nil, errors.New("timeout") }

// TestUnavailable: where a source fails and no other has the key, nothing is known of
// the token, which is no refusal (P4).
func TestUnavailable(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	raw := a.send(t, a.header(), figure())
	v := verifier(t, down{}, nil)
	_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
	if refused := (*ect.Error)(nil); !errors.Is(err, ect.ErrUnavailable) || errors.As(err, &refused) {
		t.Errorf("got %v", err)
	}
	v = verifier(t, down{}, func(p *ect.Policy) { p.Sources = append(p.Sources, parseSet(t, clinical, a.jwk(t, nil))) })
	wantCode(t, refusal(t, v, raw), "")
}

// TestStatus: what cannot be parsed is 400, everything else 403, nothing 401, and no
// refusal repeats what was sent (P3).
func TestStatus(t *testing.T) {
	a := newAgent(t, "secret-key-name", "ES256")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), nil)
	for raw, want := range map[string]int{
		"":                         http.StatusBadRequest,
		"a.b.c":                    http.StatusBadRequest,
		strings.Repeat("a", 1<<17): http.StatusBadRequest,
		a.send(t, a.header(), with(map[string]any{"aud": "x"})):           http.StatusForbidden,
		a.send(t, a.header(), with(map[string]any{"jti": "secret-id"})):   http.StatusForbidden,
		newAgent(t, "unknown", "ES256").send(t, a.header(), figure()):     http.StatusForbidden,
		a.sendJSON(t, a.header(), `{"iss":"`+clinical+`","iss":"twice"}`): http.StatusBadRequest,
	} {
		_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
		var refused *ect.Error
		if !errors.As(err, &refused) {
			t.Errorf("got %v", err)
			continue
		}
		if refused.Status() != want {
			t.Errorf("%v has status %d, want %d", refused, refused.Status(), want)
		}
		if strings.Contains(refused.Error()+refused.Detail(), "secret") {
			t.Errorf("%v repeats the token", refused)
		}
	}
}

// TestPolicy: a verifier that could not refuse anything is not made.
func TestPolicy(t *testing.T) {
	set := parseSet(t, clinical, newAgent(t, "k", "EdDSA").jwk(t, nil))
	for name, p := range map[string]ect.Policy{
		"no name":    {Sources: []ect.Source{set}},
		"empty name": {Audience: []string{""}, Sources: []ect.Source{set}},
		"no keys":    {Audience: []string{gateway}},
		"level":      {Audience: []string{gateway}, Sources: []ect.Source{set}, MinLevel: 4},
		"algorithm":  {Audience: []string{gateway}, Sources: []ect.Source{set}, Algorithms: []ect.Algorithm{0}},
		"no ledger":  {Audience: []string{gateway}, Sources: []ect.Source{set}, MinLevel: ect.L3},
	} {
		if _, err := ect.NewVerifier(p); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for _, name := range []string{"none", "HS256", "RS256", ""} {
		if _, err := ect.ParseAlgorithm(name); err == nil {
			t.Errorf("%q is an algorithm", name)
		}
	}
}

// TestInsecure: a token is shown whoever signed it, and never as a Token.
func TestInsecure(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	raw := a.send(t, a.header(), figure())
	u, err := ect.ParseInsecure(raw[:len(raw)-4])
	if err != nil || u.ID() != taskID || u.Level() != ect.L2 {
		t.Errorf("%+v, %v", u, err)
	}
	u, err = ect.ParseInsecure(strings.Split(raw, ".")[1])
	if err != nil || u.Level() != ect.L1 || u.Action() != "recommend_treatment" {
		t.Errorf("%+v, %v", u, err)
	}
	raw = a.send(t, a.header(), with(map[string]any{"jti": strings.ToUpper(taskID)}))
	u, err = ect.ParseInsecure(raw)
	if err != nil || u.ID() != taskID || u.InputHash() != ect.Sum([]byte("test")) {
		t.Errorf("%+v, %v", u, err)
	}
	_, err = ect.ParseInsecure("x.y.z")
	wantCode(t, err, ect.CodeMalformed)
}

// TestLevels: minimum L2 refuses L1, L1 needs no iss and no aud, and what has dots is
// never read as L1.
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
		token := must(v.Verify(t.Context(), c.raw, ect.Presentation{Now: at, Peer: c.peer}))(t)
		again := must(v.VerifyAgain(t.Context(), c.raw, c.peer))(t)
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

// TestL3: the caller records tokens in the commit that they are used for; they come out as
// L2, and only with parents that are recorded or in the same request.
func TestL3(t *testing.T) {
	policy := func(p *ect.Policy) { p.MinLevel, p.CallerAppends = ect.L3, true }
	f := newFamily(t, policy)
	send := func(n int, parents ...string) string {
		return f.a.send(t, f.a.header(), with(map[string]any{"jti": id(n), "par": append([]string{}, parents...)}))
	}
	verify := func(raws ...string) error {
		tokens, err := f.v.VerifyAll(t.Context(), raws, ect.Presentation{Now: at, DAG: always(f.g)})
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
}

// TestOrderOfSteps: a token with several faults is refused for the first of them in the
// order of verification, also where a claim has the wrong type.
func TestOrderOfSteps(t *testing.T) {
	a, thief := newAgent(t, "k", "ES256"), newAgent(t, "k", "ES256")
	good := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), nil)
	ended := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"exp": issued - 5000})), nil)
	revoked := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"revoked": true})), nil)
	recorded := graph{}
	recorded.add(ect.Node{ID: id(9), Workflow: workflow})
	deep := map[string]any{"a": []any{[]any{[]any{[]any{[]any{}}}}}}
	for _, wrongTypes := range []bool{false, true} {
		header, claims := a.header(), figure()
		from, v, cut := a, good, false
		claim := func(name string, value, wrongType any) func() {
			return func() {
				claims[name] = value
				if wrongType != nil && wrongTypes {
					claims[name] = wrongType
				}
			}
		}
		steps := []struct {
			want ect.Code
			set  func()
		}{
			{ect.CodeMalformed, func() { cut = true }},
			{ect.CodeType, func() { header["typ"] = "JWT" }},
			{ect.CodeAlgorithm, func() { header["alg"] = "none" }},
			{ect.CodeKeyID, func() { header["kid"] = "x" }},
			{ect.CodeSignature, func() { from = thief }},
			{ect.CodeKeyRevoked, func() { v = revoked }},
			{ect.CodeKeyRevoked, func() { v = ended }},
			{ect.CodeIssuer, claim("iss", "spiffe://example.com/agent/x", 7)},
			{ect.CodeAudience, claim("aud", "x", []any{gateway, 7})},
			{ect.CodeExpires, claim("exp", 0, "soon")},
			{ect.CodeExpired, func() { claims["exp"] = issued - 901 }},
			{ect.CodeIssuedAt, claim("iat", 0, true)},
			{ect.CodeTooOld, func() { claims["exp"], claims["iat"] = issued, issued-901 }},
			{ect.CodeID, claim("jti", nil, 7)},
			{ect.CodeAction, claim("exec_act", nil, []any{})},
			{ect.CodeParents, claim("par", nil, []any{7})},
			{ect.CodeID, func() { claims["jti"] = "task-1" }},
			{ect.CodeWorkflow, claim("wid", "w", 7)},
			{ect.CodeAction, func() { claims["exec_act"] = "" }},
			{ect.CodeDuplicateParent, func() { claims["par"] = []string{id(1), id(1)} }},
			{ect.CodeInputHash, claim("inp_hash", "x", 7)},
			{ect.CodeOutputHash, claim("out_hash", "x", 7)},
			{ect.CodeExt, claim("ext", deep, "x")},
			{ect.CodeReplayed, func() { claims["jti"] = id(9) }},
			{ect.CodeParentUnknown, func() { claims["par"] = []string{id(1)} }},
		}
		for n, step := range steps {
			header, claims, from, v, cut = a.header(), figure(), a, good, false
			for later := len(steps) - 1; later >= n; later-- {
				steps[later].set()
			}
			for name, value := range claims {
				if value == nil {
					delete(claims, name)
				}
			}
			raw := from.send(t, header, claims)
			if cut {
				raw += "="
			}
			_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: always(recorded)})
			if t.Run("", func(t *testing.T) { wantCode(t, err, step.want) }); t.Failed() {
				t.Fatalf("step %d, wrong types %v", n, wrongTypes)
			}
		}
	}
	// A key that was revoked has nothing of its tokens read.
	wantCode(t, refusal(t, revoked, a.sendJSON(t, a.header(), `{"iss":`)), ect.CodeKeyRevoked)
}
