package ect_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
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
	i, err := ect.NewIssuer(ect.IssuerOptions{Identity: clinical, Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func issue(t testing.TB, ring *ect.Ring) *ect.Token {
	t.Helper()
	token, err := issuerOf(t, ring).Issue(at, ect.Claims{Audience: []string{gateway}, Action: "a"})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// published is what others get to verify with.
func published(t testing.TB, ring *ect.Ring, now time.Time) *ect.Set {
	t.Helper()
	text, err := ring.PublicSet(now, clinical)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{`"d"`, `"k"`} {
		if bytes.Contains(text, []byte(secret)) {
			t.Fatalf("published: %s", text)
		}
	}
	set, err := ect.ParseSet(text, ect.Owner{})
	if err != nil {
		t.Fatal(err)
	}
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
		ring, err := ect.CreateRing(path, alg)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
			t.Errorf("mode %v", info.Mode())
		}
		if _, err := ect.CreateRing(path, alg); !errors.Is(err, fs.ErrExist) {
			t.Errorf("written over: %v", err)
		}
		again, err := ect.LoadRing(path)
		if err != nil {
			t.Fatal(err)
		}
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
	ring, err := ect.CreateRing(path, ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	old := issue(t, ring)
	kid, err := ring.Rotate(path, ect.EdDSA, at, 10*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	fresh := issue(t, ring)
	if fresh.Key().ID() != kid || old.Key().ID() == kid {
		t.Errorf("the new key does not sign")
	}
	list := ring.List()
	if len(list) != 2 || list[0].Signs || !list[1].Signs || list[0].Until.Before(at.Add(10*time.Minute)) {
		t.Errorf("%+v", list)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(text, []byte(`"d"`)); n != 1 {
		t.Errorf("%d private parts in the file", n)
	}
	for after, want := range map[time.Duration]int{0: 2, 10 * time.Minute: 2, 10*time.Minute + 2*time.Second: 1} {
		if n := published(t, ring, at.Add(after)).Len(); n != want {
			t.Errorf("%d keys are published after %v", n, after)
		}
	}
	owner, err := ect.ParseOwner(clinical)
	if err != nil {
		t.Fatal(err)
	}
	restarted, err := ect.LoadRing(path)
	if err != nil {
		t.Fatal(err)
	}
	v := verifier(t, restarted.Source(owner), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	for _, token := range []*ect.Token{old, fresh} {
		if _, err := v.VerifyStored(t.Context(), token.Raw()); err != nil {
			t.Error(err)
		}
	}
	if issue(t, restarted).Key().ID() != kid {
		t.Error("the restarted ring signs with another key")
	}
	first, err := ect.ParseRing(text)
	if err != nil {
		t.Fatal(err)
	}
	first.Reload(restarted)
	if issue(t, first).Key().ID() != kid {
		t.Error("not reloaded")
	}
}

// TestRotationOfAStolenKey: a rotation that keeps nothing ends the publication of every
// key before it, and of none of their records.
func TestRotationOfAStolenKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring, err := ect.CreateRing(path, ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
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
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte(`"kid": "`+first.Key().ID()+`"`), []byte(`"revoked": true, "kid": "`+first.Key().ID()+`"`), 1)
	revoked, err := ect.ParseRing(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range revoked.List() {
		if key.Revoked != (key.ID == first.Key().ID()) {
			t.Errorf("%+v", key)
		}
	}
	if n := published(t, revoked, time.Time{}).Len(); n != 4 {
		t.Errorf("%d keys verify records", n)
	}
}

// TestRotationBesideUse: nothing is signed with a key that the file does not hold, and
// nobody waits.
func TestRotationBesideUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring, err := ect.CreateRing(path, ect.EdDSA)
	if err != nil {
		t.Fatal(err)
	}
	owner, err := ect.ParseOwner(clinical)
	if err != nil {
		t.Fatal(err)
	}
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
	ring, err := ect.CreateRing(path, ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
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
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	sec1, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	ring, err := ect.GenerateRing(ect.ES384)
	if err != nil {
		t.Fatal(err)
	}
	set, err := ring.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
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
	public, err := ring.PublicSet(at, "")
	if err != nil {
		t.Fatal(err)
	}
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
