package ect_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

func issuerOf(t testing.TB, ring *ect.Ring) *ect.Issuer {
	t.Helper()
	i := must(ect.NewIssuer(clinical, ring))(t)
	return i
}

func issue(t testing.TB, ring *ect.Ring) *ect.Token {
	t.Helper()
	token := must(issuerOf(t, ring).Issue(at, ect.Claims{Audience: []string{gateway}, Action: "a"}))(t)
	return token
}

// published is the public set, without secrets.
func published(t testing.TB, ring *ect.Ring, now time.Time) *ect.Set {
	t.Helper()
	text := must(ring.PublicSet(now, clinical))(t)
	for _, secret := range []string{`"d"`, `"k"`} {
		if bytes.Contains(text, []byte(secret)) {
			t.Fatalf("published: %s", text)
		}
	}
	set := must(ect.ParseSet(text, ect.Owner{}))(t)
	return set
}

// TestRingFile: created with mode 0600 and never over another file, read back, and
// what it signs verifies under what it publishes, for every algorithm.
func TestRingFile(t *testing.T) {
	for _, alg := range ect.Algorithms() {
		path := filepath.Join(t.TempDir(), "keys", "ect.jwks")
		if _, err := ect.LoadRing(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a missing file: %v", err)
		}
		ring := must(ect.CreateRing(path, alg))(t)
		info := must(os.Stat(path))(t)
		if runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
			t.Errorf("mode %v", info.Mode())
		}
		if _, err := ect.CreateRing(path, alg); !errors.Is(err, fs.ErrExist) {
			t.Errorf("written over: %v", err)
		}
		again := must(ect.LoadRing(path))(t)
		if a, b := ring.List()[0], again.List()[0]; a.ID != b.ID || !a.Created.Equal(b.Created) || !b.Signs || b.Algorithm != alg {
			t.Errorf("%+v became %+v", a, b)
		}
		v := verifier(t, published(t, ring, at), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
		if _, err := v.Verify(t.Context(), issue(t, again).Raw(), ect.Presentation{Now: at}); err != nil {
			t.Errorf("%v: %v", alg, err)
		}
		left, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(left) != 1 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	}
}

// TestRotation: the new key signs; the old one is published until its tokens have
// expired, verifies records for ever, and has lost its private part.
func TestRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring := must(ect.CreateRing(path, ect.ES256))(t)
	old := issue(t, ring)
	kid := must(ring.Rotate(path, ect.EdDSA, at, 10*time.Minute))(t)
	fresh := issue(t, ring)
	if fresh.Key().ID() != kid || old.Key().ID() == kid {
		t.Errorf("the new key does not sign")
	}
	list := ring.List()
	if len(list) != 2 || list[0].Signs || !list[1].Signs || list[0].Until.Before(at.Add(10*time.Minute)) {
		t.Errorf("%+v", list)
	}
	text := must(os.ReadFile(path))(t)
	if n := bytes.Count(text, []byte(`"d"`)); n != 1 {
		t.Errorf("%d private parts in the file", n)
	}
	for after, want := range map[time.Duration]int{0: 2, 10 * time.Minute: 2, 10*time.Minute + 2*time.Second: 1} {
		if n := published(t, ring, at.Add(after)).Len(); n != want {
			t.Errorf("%d keys are published after %v", n, after)
		}
	}
	owner := must(ect.ParseOwner(clinical))(t)
	restarted := must(ect.LoadRing(path))(t)
	v := verifier(t, restarted.Source(owner), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	for _, token := range []*ect.Token{old, fresh} {
		if _, err := v.VerifyStored(t.Context(), token.Raw()); err != nil {
			t.Error(err)
		}
	}
	if issue(t, restarted).Key().ID() != kid {
		t.Error("the restarted ring signs with another key")
	}
	first := must(ect.ParseRing(text))(t)
	first.Reload(restarted)
	if issue(t, first).Key().ID() != kid {
		t.Error("not reloaded")
	}
}

// TestRotationOfAStolenKey: a rotation with keep 0 ends the publication of every earlier
// key, but their records still verify.
func TestRotationOfAStolenKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring := must(ect.CreateRing(path, ect.ES256))(t)
	first := issue(t, ring)
	if _, err := ring.Rotate(path, ect.ES256, at, time.Hour); err != nil {
		t.Fatal(err)
	}
	second := issue(t, ring)
	for range 2 { // a later rotation prolongs nothing
		if _, err := ring.Rotate(path, ect.ES256, at, 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ring.Rotate(path, ect.ES256, at, time.Hour); err != nil {
		t.Fatal(err)
	}
	soon := at.Add(2 * time.Second)
	if n := published(t, ring, soon).Len(); n != 2 {
		t.Errorf("%d keys are published", n)
	}
	all := published(t, ring, time.Time{})
	if all.Len() != 5 {
		t.Errorf("%d keys verify records", all.Len())
	}
	for _, token := range []*ect.Token{first, second} {
		if _, err := verifier(t, published(t, ring, soon), nil).VerifyStored(t.Context(), token.Raw()); err == nil {
			t.Error("a stolen key is published")
		}
		if _, err := verifier(t, all, nil).VerifyStored(t.Context(), token.Raw()); err != nil {
			t.Error(err)
		}
	}

	// By hand, not even its records are believed any more.
	text := must(os.ReadFile(path))(t)
	text = bytes.Replace(text, []byte(`"kid": "`+first.Key().ID()+`"`), []byte(`"revoked": true, "kid": "`+first.Key().ID()+`"`), 1)
	revoked := must(ect.ParseRing(text))(t)
	for _, key := range revoked.List() {
		if key.Revoked != (key.ID == first.Key().ID()) {
			t.Errorf("%+v", key)
		}
	}
	if n := published(t, revoked, time.Time{}).Len(); n != 4 {
		t.Errorf("%d keys verify records", n)
	}
}

// TestRotationBesideUse: concurrent signers do not wait for a rotation, and sign only with
// keys that the file holds.
func TestRotationBesideUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring := must(ect.CreateRing(path, ect.EdDSA))(t)
	owner := must(ect.ParseOwner(clinical))(t)
	v := verifier(t, ring.Source(owner), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	stop := make(chan struct{})
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for {
				if _, err := v.Verify(t.Context(), issue(t, ring).Raw(), ect.Presentation{Now: at}); err != nil {
					t.Error(err)
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for range 5 {
		if _, err := ring.Rotate(path, ect.EdDSA, at, time.Minute); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	all.Wait()
}

// TestRotationRefused: a file that is gone or broken stays as it is, and the ring signs
// on with its key.
func TestRotationRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring := must(ect.CreateRing(path, ect.ES256))(t)
	before := ring.List()[0].ID
	if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(path, ect.ES256, at, time.Minute); err == nil {
		t.Error("a broken file was rotated")
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "{}" {
		t.Errorf("the file is %q now, %v", text, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(path, ect.ES256, at, time.Minute); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	if issue(t, ring).Key().ID() != before {
		t.Error("another key signs")
	}
}

// TestGivenKeys: one JSON Web Key, a set, and PEM in both forms are read; what cannot
// sign is not.
func TestGivenKeys(t *testing.T) {
	private := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	pkcs8 := must(x509.MarshalPKCS8PrivateKey(private))(t)
	sec1 := must(x509.MarshalECPrivateKey(private))(t)
	ring := must(ect.GenerateRing(ect.ES384))(t)
	set := must(ring.MarshalText())(t)
	var parsed struct{ Keys []json.RawMessage }
	if err := json.Unmarshal(set, &parsed); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"set": set, "key": parsed.Keys[0],
		"PKCS 8": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}),
		"SEC 1":  pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: sec1}),
	} {
		given, err := ect.ParseRing(text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		v := verifier(t, published(t, given, at), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
		if _, err := v.Verify(t.Context(), issue(t, given).Raw(), ect.Presentation{Now: at}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	public := must(ring.PublicSet(at, ""))(t)
	for name, text := range map[string][]byte{
		"public": public, "empty": []byte(`{"keys":[]}`), "none": nil, "symmetric": []byte(`{"kty":"oct","k":"AAAA"}`), "text": []byte("secret"),
		"of two keys": []byte(`{"kty":"EC","crv":"P-256","d":"` + strings.Repeat("0", 43) + `","x":"X-sGb3XpNWAdgKNHGPJDHSNzPvPHv-i5G3SxjgBmme0","y":"LkJWp7tcZCn6mEyLmem4EqLyvnCtogrv86jRCSHju7A"}`),
		"too large":   []byte(`{"kty":"EC","crv":"P-256","d":"` + strings.Repeat("0", 44) + `","x":"X-sGb3XpNWAdgKNHGPJDHSNzPvPHv-i5G3SxjgBmme0","y":"LkJWp7tcZCn6mEyLmem4EqLyvnCtogrv86jRCSHju7A"}`),
		"other seed":  []byte(`{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo","d":"` + strings.Repeat("A", 43) + `"}`),
		"twice":       []byte(`{"keys":[` + string(parsed.Keys[0]) + "," + string(parsed.Keys[0]) + `]}`),
	} {
		if _, err := ect.ParseRing(text); err == nil {
			t.Errorf("%s can sign", name)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error repeats the file: %v", name, err)
		}
	}
}

// A key must be valid at iat and when the token is presented: a thief of an ended key can
// backdate tokens. For records only iat counts.
func TestEndedKeys(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	raw := a.send(t, a.header(), with(map[string]any{"iat": issued - 200}))
	for _, c := range []struct {
		name string
		key  map[string]any
		want ect.Code
	}{
		{"unbounded", nil, ""},
		{"ends later", map[string]any{"exp": issued + 1}, ""},
		{"has ended within the skew", map[string]any{"exp": issued - 30}, ""},
		{"has ended", map[string]any{"exp": issued - 31}, ect.CodeKeyRevoked},
		{"had ended long before now", map[string]any{"exp": issued - 100}, ect.CodeKeyRevoked},
		{"had ended before the token was made", map[string]any{"exp": issued - 201}, ect.CodeKeyRevoked},
		{"began after the token was made", map[string]any{"nbf": issued - 199}, ect.CodeKeyRevoked},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := verifier(t, parseSet(t, clinical, a.jwk(t, c.key)), nil)
			wantCode(t, refusal(t, v, raw), c.want)
		})
	}
	v := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"exp": issued - 100})), nil)
	if _, err := v.VerifyStored(t.Context(), raw); err != nil {
		t.Error(err)
	}
	// Where two sources name one key with two ends, one that holds will do.
	v = verifierOver(t, parseSet(t, clinical, a.jwk(t, map[string]any{"exp": issued - 100})), parseSet(t, clinical, a.jwk(t, nil)))
	wantCode(t, refusal(t, v, raw), "")
}

// Issue 4, "rotation keeps old public keys until their tokens have expired": a token of
// the replaced key passes as long as it would have, with what is published and with the
// ring itself, and as a record for ever.
func TestTokensOutliveTheRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring := must(ect.CreateRing(path, ect.ES256))(t)
	issuer := must(ect.NewIssuer(clinical, ring))(t)
	token := must(issuer.Issue(at, ect.Claims{Audience: []string{gateway}, Action: "act"}))(t)
	if _, err := ring.Rotate(path, ect.ES256, at, ect.DefaultLife); err != nil {
		t.Fatal(err)
	}
	owner := must(ect.ParseOwner(clinical))(t)
	last := token.Expires().Add(ect.Skew)
	for _, now := range []time.Time{at, token.Expires(), last} {
		text := must(ring.PublicSet(at, clinical))(t)
		set := must(ect.ParseSet(text, ect.Owner{}))(t)
		for _, source := range []ect.Source{ring.Source(owner), set} {
			t.Run(fmt.Sprintf("%T after %v", source, now.Sub(at)), func(t *testing.T) {
				_, err := verifier(t, source, nil).Verify(t.Context(), token.Raw(), ect.Presentation{Now: now})
				wantCode(t, err, "")
			})
		}
	}
	if _, err := verifier(t, ring.Source(owner), nil).VerifyStored(t.Context(), token.Raw()); err != nil {
		t.Error(err)
	}
}

// A key's tokens under an earlier name are valid; those under another's name, or of a later
// key under the earlier name, are not.
func TestFormerNames(t *testing.T) {
	const before, now = "spiffe://example.com/gateway", "spiffe://example.com/gateway2"
	ring := must(ect.GenerateRing(ect.ES256))(t)
	issue := func(ring *ect.Ring, name string) string {
		t.Helper()
		issuer := must(ect.NewIssuer(name, ring))(t)
		token := must(issuer.Issue(time.Now(), ect.Claims{Audience: []string{now}, Action: "pay"}))(t)
		return token.Raw()
	}
	old := ring.List()[0].ID
	honest, other := issue(ring, before), issue(ring, "spiffe://example.com/somebody")
	former := ect.Former{Name: before, Keys: []string{old}}
	owner := must(ect.ParseOwner(now))(t)
	file := filepath.Join(t.TempDir(), "key")
	text := must(ring.MarshalText())(t)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(file, ect.ES256, time.Now(), time.Hour); err != nil {
		t.Fatal(err)
	}
	late := issue(ring, before)
	public := must(ring.PublicSet(time.Now(), now, former))(t)
	set, err := ect.ParseSet(public, ect.Owner{})
	if err != nil || set.Len() != 2 || strings.Count(string(public), "former_sub") != 1 {
		t.Fatalf("%v\n%s", err, public)
	}
	for name, source := range map[string]ect.Source{"ring": ring.Source(owner, former), "published": set} {
		v := must(ect.NewVerifier(ect.Policy{Audience: []string{now}, Sources: []ect.Source{source}, Algorithms: ect.Algorithms(), AnyID: true}))(t)
		token, err := v.VerifyStored(t.Context(), honest)
		if err != nil || !ring.Signed(token, []ect.Former{former}) || ring.Signed(token, []ect.Former{{Name: now}}) {
			t.Errorf("%s: what was signed under the name of before: %v", name, err)
		}
		for what, raw := range map[string]string{"of somebody else": other, "of the name of before, under a later key": late} {
			var refused *ect.Error
			if _, err := v.VerifyStored(t.Context(), raw); !errors.As(err, &refused) || refused.Code != ect.CodeIssuer {
				t.Errorf("%s: a token %s: %v", name, what, err)
			}
		}
	}
	// Who publishes a set for one domain cannot speak for names outside it.
	outside := must(ring.PublicSet(time.Now(), now, ect.Former{Name: "spiffe://other.example/gateway"}))(t)
	domain := must(ect.ParseOwner("spiffe://example.com"))(t)
	for text, of := range map[string]ect.Owner{
		string(outside): domain,
		strings.Replace(string(public), `"`+before+`"`, `"spiffe://example.com"`, 1): {},
		strings.Replace(string(public), `"`+before+`"`, `7`, 1):                      {},
	} {
		if set, err := ect.ParseSet([]byte(text), of); err != nil || len(set.Skipped()) == 0 {
			t.Errorf("not refused: %v", err)
		}
	}
}

// ADR 0040: a renamed verifier accepts tokens that it issued to its earlier name, and nobody
// else's.
func TestFormerAudience(t *testing.T) {
	const now, before, agent = "spiffe://example.com/now", "spiffe://example.com/before", "spiffe://example.com/agent"
	var sources []ect.Source
	issuers := map[string]*ect.Issuer{}
	issuer := func(name string, ring *ect.Ring) *ect.Issuer {
		t.Helper()
		i := must(ect.NewIssuer(name, ring))(t)
		return i
	}
	for _, name := range []string{now, agent, before} {
		ring := must(ect.GenerateRing(ect.ES256))(t)
		owner := must(ect.ParseOwner(name))(t)
		var former []ect.Former
		if name == now {
			former = []ect.Former{{Name: before}}
			issuers["renamed"] = issuer(before, ring)
		}
		sources, issuers[name] = append(sources, ring.Source(owner, former...)), issuer(name, ring)
	}
	for _, names := range [][]string{nil, {before}} {
		v := must(ect.NewVerifier(ect.Policy{Audience: []string{now}, Former: names, Sources: sources}))(t)
		for who, own := range map[string]bool{"renamed": true, now: true, agent: false, before: false} {
			token := must(issuers[who].Issue(time.Now(), ect.Claims{Audience: []string{before, agent}, Action: "pay"}))(t)
			var refused *ect.Error
			_, err := v.Verify(t.Context(), token.Raw(), ect.Presentation{Now: time.Now()})
			if accepted := own && names != nil; accepted != (err == nil) || !accepted && (!errors.As(err, &refused) || refused.Code != ect.CodeAudience) {
				t.Errorf("of %s with %v: %v", who, names, err)
			}
		}
		for audience, only := range map[string]bool{
			now: true, agent: true, "spiffe://example.com/other": false, before: names != nil, "": false,
		} {
			claims := ect.Claims{Audience: []string{now, audience}, Action: "pay"}
			if audience == "" {
				claims.Audience = []string{"spiffe://example.com/other"}
			}
			token := must(issuers[agent].Issue(time.Now(), claims))(t)
			if v.OnlyFor(token) != only {
				t.Errorf("with %v, for %q: %v", names, claims.Audience, !only)
			}
		}
	}
}

// ADR 0064, "Signing when a token is shown": the header and the payload of a draft give the
// bytes of its token, each time, after a restart, and after a rotation that keeps the key.
func TestSignatureMadeLater(t *testing.T) {
	for _, alg := range ect.Algorithms() {
		path := filepath.Join(t.TempDir(), "ect.jwks")
		ring := must(ect.CreateRing(path, alg))(t)
		issuer := must(ect.NewIssuer(clinical, ring))(t)
		draft := must(issuer.Draft(at, ect.Claims{
			Audience: []string{gateway}, Action: "pay", Ext: new(ect.ExtBuilder).Text(ect.MemberDescription, "a \u2028 <&>"),
		}))(t)
		header, kid := ring.Header()
		if ect.HeaderKeyID(header) != kid || kid != ring.List()[0].ID {
			t.Errorf("%s names %q", header, kid)
		}
		want := must(issuer.Sign(draft))(t).Raw()
		kept := must(ring.Signature(header, []byte(draft.Payload())))(t)
		verifies := func(when string, r *ect.Ring) {
			t.Helper()
			if holds, known := r.Verifies(header, []byte(draft.Payload()), kept); !holds || !known {
				t.Errorf("%v %s: the kept signature does not hold (known: %v)", alg, when, known)
			}
			for what, forged := range map[string][][]byte{
				"payload": {header, []byte(draft.Payload() + " "), kept}, "header": {append(header[:len(header):len(header)], ' '), []byte(draft.Payload()), kept},
				"signature": {header, []byte(draft.Payload()), kept[1:]},
			} {
				if holds, known := r.Verifies(forged[0], forged[1], forged[2]); holds || !known {
					t.Errorf("%v %s, another %s: %v %v", alg, when, what, holds, known)
				}
			}
		}
		check := func(when string, r *ect.Ring) {
			t.Helper()
			verifies(when, r)
			for range 2 {
				signature, err := r.Signature(header, []byte(draft.Payload()))
				enc := base64.RawURLEncoding.EncodeToString
				if got := enc(header) + "." + enc([]byte(draft.Payload())) + "." + enc(signature); err != nil || got != want {
					t.Errorf("%v %s: %v\n%s\n%s", alg, when, err, got, want)
				}
			}
		}
		gone := func(when string, r *ect.Ring) {
			t.Helper()
			verifies(when, r)
			if got, err := r.Signature(header, []byte(draft.Payload())); !errors.Is(err, ect.ErrUnavailable) || got != nil {
				t.Errorf("%v %s: %x %v", alg, when, got, err)
			}
		}
		check("at once", ring)
		if holds, known := must(ect.GenerateRing(alg))(t).Verifies(header, []byte(draft.Payload()), kept); holds || known {
			t.Errorf("another ring: %v %v", holds, known)
		}
		for range 2 { // the second rotation finds the key among the replaced ones
			must(ring.Rotate(path, alg, at, time.Hour, kid))(t)
		}
		if list := ring.List(); !list[0].Private || list[1].Private || !list[2].Private || list[0].Signs || list[0].Until.IsZero() {
			t.Errorf("%+v", list)
		}
		check("rotated", ring)
		check("restarted", must(ect.LoadRing(path))(t))
		signs := ring.List()[2].ID
		if err := ring.Retire(path, kid, signs); err != nil {
			t.Fatal(err)
		}
		gone("retired", ring)
		gone("restarted without it", must(ect.LoadRing(path))(t))
		if issue(t, must(ect.LoadRing(path))(t)).Key().ID() != signs {
			t.Error("the key that signs was retired")
		}
		stolen := signs
		must(ring.Rotate(path, alg, at, 0, stolen))(t)
		if text := must(os.ReadFile(path))(t); bytes.Count(text, []byte(`"d"`)) != 1 {
			t.Error("a stolen key keeps its private part")
		}
	}
}

// A ring knows the keys of other nodes under its own names: they verify, are published until their end, and
// sign nothing here. What nobody is known to have is asked for, and only then.
func TestPeersOfARing(t *testing.T) {
	own, other, late := must(ect.GenerateRing(ect.ES256))(t), must(ect.GenerateRing(ect.EdDSA))(t), must(ect.GenerateRing(ect.ES256))(t)
	peers := func(rings ...*ect.Ring) (all []ect.Peer) {
		for _, r := range rings {
			all = append(all, ect.Peer{Keys: must(r.Publish())(t)})
		}
		return all
	}
	if text := must(other.Publish())(t); bytes.Contains(text, []byte(`"d"`)) {
		t.Fatalf("published: %s", text)
	}
	asked := 0
	var ask func(context.Context) error
	ask = func(context.Context) error {
		asked++
		return own.SetPeers(peers(other, late), ask)
	}
	if err := own.SetPeers(peers(other), ask); err != nil {
		t.Fatal(err)
	}
	owner := must(ect.ParseOwner(clinical))(t)
	v := must(ect.NewVerifier(ect.Policy{Audience: []string{gateway}, Sources: []ect.Source{own.Source(owner)}, Algorithms: ect.Algorithms()}))(t)
	for _, ring := range []*ect.Ring{own, other} {
		if _, err := v.Verify(t.Context(), issue(t, ring).Raw(), ect.Presentation{Now: at}); err != nil || asked != 0 {
			t.Errorf("%v, asked %d times", err, asked)
		}
	}
	if _, err := v.Verify(t.Context(), issue(t, late).Raw(), ect.Presentation{Now: at}); err != nil || asked != 1 {
		t.Errorf("a key that came later: %v, asked %d times", err, asked)
	}
	stranger := must(ect.GenerateRing(ect.ES256))(t)
	wantCode(t, refusal(t, v, issue(t, stranger).Raw()), ect.CodeKeyID)
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
	if got := published(t, own, at).Len(); got != 3 {
		t.Errorf("%d keys published", got)
	}
	header, _ := other.Header()
	if _, err := own.Signature(header, []byte("{}")); !errors.Is(err, ect.ErrUnavailable) {
		t.Errorf("signed with a key of another node: %v", err)
	}

	// The end of a node that is gone; a key that two nodes share, and one of them has revoked.
	kid := other.List()[0].ID
	gone := []ect.Peer{{Keys: must(other.Publish())(t), Until: at.Add(time.Hour)}}
	if err := own.SetPeers(gone, nil); err != nil {
		t.Fatal(err)
	}
	for after, want := range map[time.Duration]int{0: 2, 2 * time.Hour: 1} {
		if got := published(t, own, at.Add(after)).Len(); got != want {
			t.Errorf("%d keys published after %s", got, after)
		}
	}
	revoked := bytes.Replace(gone[0].Keys, []byte(`"kid"`), []byte(`"revoked": true, "kid"`), 1)
	if err := own.SetPeers([]ect.Peer{gone[0], {Keys: revoked}}, nil); err != nil {
		t.Fatal(err)
	}
	if known, no := own.Known(kid); !known || !no || !own.OfPeer(kid) {
		t.Errorf("%t %t", known, no)
	}
	wantCode(t, refusal(t, v, issue(t, other).Raw()), ect.CodeKeyRevoked)
	if err := own.SetPeers([]ect.Peer{{Keys: []byte("no keys")}}, nil); err == nil || !own.OfPeer(kid) {
		t.Errorf("what cannot be read: %v", err)
	}
}
