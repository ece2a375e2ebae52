package ect_test

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// TestSetSkips: unusable keys are skipped with a reason, and the rest of the set is used.
func TestSetSkips(t *testing.T) {
	a := newAgent(t, "a", "ES256")
	good := a.jwk(t, map[string]any{"sub": clinical})
	offCurve := newAgent(t, "off-curve", "ES256").jwk(t, map[string]any{"sub": clinical})
	offCurve["y"] = offCurve["x"]
	for name, c := range map[string]struct {
		key    map[string]any
		reason string
	}{
		"symmetric":    {map[string]any{"kty": "oct", "k": "AAAA", "kid": "x", "sub": clinical}, "symmetric"},
		"private":      {a.jwk(t, map[string]any{"kid": "x", "sub": clinical, "d": b64.EncodeToString(make([]byte, 32))}), "private"},
		"encryption":   {a.jwk(t, map[string]any{"kid": "x", "sub": clinical, "use": "enc"}), "use is enc"},
		"signing only": {a.jwk(t, map[string]any{"kid": "x", "sub": clinical, "key_ops": []string{"sign"}}), "operations"},
		"other alg":    {a.jwk(t, map[string]any{"kid": "x", "sub": clinical, "alg": "ES384"}), "algorithm"},
		"RSA": {map[string]any{"kty": "RSA", "kid": "x", "e": "AQAB", "sub": clinical,
			"n": b64.EncodeToString([]byte(strings.Repeat("\xff", 256)))}, "EC or OKP"},
		"no owner":    {a.jwk(t, map[string]any{"kid": "x"}), "owner"},
		"bad owner":   {a.jwk(t, map[string]any{"kid": "x", "sub": "spiffe://Example.com/a"}), "identity"},
		"owner kind":  {a.jwk(t, map[string]any{"kid": "x", "sub": 7}), "identity"},
		"off curve":   {offCurve, "curve"},
		"date":        {a.jwk(t, map[string]any{"kid": "x", "sub": clinical, "exp": "soon"}), "exp"},
		"blank name":  {a.jwk(t, map[string]any{"kid": "x y", "sub": clinical}), "name"},
		"long name":   {a.jwk(t, map[string]any{"kid": strings.Repeat("x", 4096), "sub": clinical}), "name"},
		"P-521 curve": {map[string]any{"kty": "EC", "crv": "P-521", "kid": "x", "x": "AA", "y": "AA", "sub": clinical}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			set := must(ect.ParseSet(keySet(t, good, c.key), ect.Owner{}))(t)
			skipped := set.Skipped()
			if set.Len() != 1 || len(skipped) > 1 || c.reason != "" && (len(skipped) != 1 || !strings.Contains(skipped[0].Reason, c.reason)) {
				t.Errorf("%d used, skipped %v", set.Len(), skipped)
			}
		})
	}
	for _, text := range []string{"", "{}", "null", "[]", `{"keys":{}}`, `{"keys":[],"keys":[]}`, `{"keys":[]} x`, `{"kty":"EC"}`} {
		if _, err := ect.ParseSet([]byte(text), exampleDomain); err == nil {
			t.Errorf("%s is a set", text)
		}
	}
}

// What the library for keys cannot read is reported like everything that is not used: a set
// of nothing else is a mistake, and takes no keys away that were known.
func TestUnreadableKeys(t *testing.T) {
	a := newAgent(t, "a", "ES256")
	for _, entry := range []string{`{}`, `null`, `7`, `{"kty":"XX","kid":"x"}`, `{"kty":"EC","crv":"P-256","kid":"x","x":"A"}`} {
		for _, good := range []int{0, 1} {
			text := `{"keys":[` + entry + `]}`
			if good == 1 {
				text = strings.Replace(string(keySet(t, a.jwk(t, nil))), "[", "["+entry+",", 1)
			}
			set, err := ect.ParseSet([]byte(text), exampleDomain)
			if err != nil || set.Len() != good || len(set.Skipped()) != 1 {
				t.Errorf("%s: %v, %v", text, set, err)
			}
		}
		path := filepath.Join(t.TempDir(), "agents.jwks")
		if err := os.WriteFile(path, []byte(`{"keys":[`+entry+`]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ect.NewFileSource(ect.FileOptions{Path: path, Owner: exampleDomain}); err == nil {
			t.Errorf("a file with nothing but %s is a source", entry)
		}
	}
}

// TestUnnamedKey: a key without a name has its thumbprint (RFC 7638) for one.
func TestUnnamedKey(t *testing.T) {
	text := `{"keys":[{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}`
	set := must(ect.ParseSet([]byte(text), exampleDomain))(t)
	// The example of RFC 8037, appendix A.3.
	if keys, _ := set.Keys(t.Context(), "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"); len(keys) != 1 || keys[0].Algorithm() != ect.EdDSA {
		t.Errorf("keys %v, skipped %v", set.All(), set.Skipped())
	}
}

// TestCertifiedOwner: without "sub" the URI in the certificate of the key counts, and
// only there.
func TestCertifiedOwner(t *testing.T) {
	a, b := newAgent(t, "k", "ES256"), newAgent(t, "k", "ES256")
	uri := must(url.Parse(clinical))(t)
	template := &x509.Certificate{URIs: []*url.URL{uri}, NotAfter: time.Now().Add(time.Hour)}
	der := must(x509.CreateCertificate(rand.Reader, template, template, a.private.Public(), a.private))(t)
	chain := map[string]any{"x5c": []string{base64.StdEncoding.EncodeToString(der)}}
	for name, c := range map[string]struct {
		key   map[string]any
		owner string
	}{
		"its own":       {a.jwk(t, chain), clinical},
		"another key's": {b.jwk(t, chain), "spiffe://example.com"},
	} {
		t.Run(name, func(t *testing.T) {
			set := parseSet(t, "spiffe://example.com", c.key)
			if set.Len() != 1 || set.All()[0].Owner().String() != c.owner {
				t.Errorf("keys %v, skipped %v", set.All(), set.Skipped())
			}
		})
	}
}

// TestOwnersBound: the owner of a set limits the owners of its keys.
func TestOwnersBound(t *testing.T) {
	a := newAgent(t, "k", "ES256")
	for _, c := range []struct {
		set, sub string
		used     bool
	}{
		{"spiffe://example.com", clinical, true},
		{"spiffe://example.com", "spiffe://example.com", true},
		{clinical, clinical, true},
		{"spiffe://partner.org", clinical, false},
		{"spiffe://partner.org", "spiffe://example.com", false},
		{clinical, "spiffe://example.com", false},
		{clinical, "spiffe://example.com/agent/other", false},
	} {
		set := parseSet(t, c.set, a.jwk(t, map[string]any{"sub": c.sub}))
		if (set.Len() == 1) != c.used || len(set.Skipped()) == 1 == c.used {
			t.Errorf("%s in a set of %s: keys %v, skipped %v", c.sub, c.set, set.All(), set.Skipped())
		}
	}
}

// TestOwners: what is an owner, and what is not.
func TestOwners(t *testing.T) {
	for _, good := range []string{clinical, "spiffe://example.com", "https://a.example.com/x", "urn:uuid:" + taskID, "agent-a"} {
		if o, err := ect.ParseOwner(good); err != nil || o == (ect.Owner{}) || o.String() != good {
			t.Errorf("%s: %v, %v", good, o, err)
		}
	}
	for _, bad := range []string{"", "a b", "spiffe://", "spiffe:///a", "spiffe://Example.com", "spiffe://a/b/", "spiffe://a/b//c", "spiffe:a", strings.Repeat("a", 2049)} {
		if o, err := ect.ParseOwner(bad); err == nil {
			t.Errorf("%q is %v", bad, o)
		}
	}
	if (ect.Owner{}).String() != "nobody" {
		t.Error("the zero owner has another name")
	}
}

// TestLargeSets: the entries of a set are counted before any is looked at: four megabytes
// have room for two million.
func TestLargeSets(t *testing.T) {
	for n, ok := range map[int]bool{10_000: true, 10_001: false} {
		text := `{"keys":[` + strings.Repeat("0,", n-1) + `0]}`
		set, err := ect.ParseSet([]byte(text), exampleDomain)
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "more than 10000") {
			t.Errorf("%d: %v, %v", n, set, err)
		}
	}
}

// names are those of the given keys that a source has.
func sourceHas(t testing.TB, s ect.Source, kid string) bool {
	t.Helper()
	keys := must(s.Keys(t.Context(), kid))(t)
	return len(keys) == 1
}

// TestFileSource: a changed file is read again; a broken or missing one changes
// nothing and is reported; an empty one trusts nobody; what was replaced still verifies
// records.
func TestFileSource(t *testing.T) {
	a, b := newAgent(t, "a", "ES256"), newAgent(t, "b", "ES256")
	path := filepath.Join(t.TempDir(), "agents.jwks")
	when := time.Now().Add(-time.Hour)
	write := func(text []byte) {
		t.Helper()
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		when = when.Add(time.Minute)
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	owner := must(ect.ParseOwner("spiffe://example.com"))(t)
	calls := 0
	var problem error
	open := func() (*ect.FileSource, error) {
		return ect.NewFileSource(ect.FileOptions{Path: path, Owner: owner, CheckInterval: 1, OnReload: func(_ *ect.Set, err error) { calls, problem = calls+1, err }})
	}
	if _, err := open(); err == nil {
		t.Error("a missing file is a source")
	}
	write(keySet(t, a.jwk(t, map[string]any{"use": "enc"})))
	if _, err := open(); err == nil || !strings.Contains(err.Error(), "use is enc") {
		t.Errorf("a file of which nothing can be used: %v", err)
	}
	write(keySet(t, a.jwk(t, nil)))
	s := must(open())(t)
	has := func(kid string) bool { return sourceHas(t, s, kid) }
	if !has("a") || has("b") || calls != 0 {
		t.Error("the first reading")
	}
	write(keySet(t, b.jwk(t, nil)))
	if has("a") || !has("b") || calls != 1 || problem != nil {
		t.Errorf("the change was not seen, %d calls, %v", calls, problem)
	}
	if len(s.Retired("a")) != 1 || len(s.Retired("b")) != 0 {
		t.Error("the replaced key is not known to records")
	}
	write([]byte("{"))
	if !has("b") || problem == nil {
		t.Errorf("a broken file: %v", problem)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	problem = nil
	if !has("b") || problem == nil {
		t.Errorf("a missing file: %v", problem)
	}
	write(keySet(t, a.jwk(t, map[string]any{"revoked": true}), b.jwk(t, nil)))
	if !has("a") || problem != nil || len(s.Retired("a")) != 0 {
		t.Error("a revoked key is still known to records")
	}
	write([]byte(`{"keys":[]}`))
	if has("a") || has("b") || s.Set().Len() != 0 {
		t.Error("an empty set still trusts somebody")
	}
	// A record signed with a key that was replaced is verified; a request is not.
	v := verifier(t, s, nil)
	raw := b.send(t, b.header(), figure())
	_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
	wantCode(t, err, ect.CodeKeyID)
	if _, err := v.VerifyStored(t.Context(), raw); err != nil {
		t.Error(err)
	}
}

// TestFileSourceFresh: a file that was just written is read again until its time can
// be trusted, since a second write may leave it as it is.
func TestFileSourceFresh(t *testing.T) {
	a, b := newAgent(t, "a", "ES256"), newAgent(t, "b", "ES256")
	path := filepath.Join(t.TempDir(), "agents.jwks")
	now := time.Now()
	write := func(key *agent) {
		t.Helper()
		if err := os.WriteFile(path, keySet(t, key.jwk(t, nil)), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, now, now); err != nil {
			t.Fatal(err)
		}
	}
	write(a)
	s := must(ect.NewFileSource(ect.FileOptions{Path: path, Owner: exampleDomain, CheckInterval: 1}))(t)
	write(b)
	if !sourceHas(t, s, "b") {
		t.Error("a write within the same tick was not seen")
	}
}

// publisher is somebody who publishes keys, without a network.
type publisher struct {
	mu    sync.Mutex
	text  []byte
	err   error
	asked int
	hold  chan struct{} // nil, or what answers wait for
}

func (p *publisher) RoundTrip(r *http.Request) (*http.Response, error) {
	p.mu.Lock()
	p.asked++
	text, err, hold := p.text, p.err, p.hold
	p.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(string(text))), Request: r}, nil
}

func (p *publisher) publish(text []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text, p.err = text, err
}

func (p *publisher) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

func urlSource(t testing.TB, p *publisher) *ect.URLSource {
	t.Helper()
	s := must(ect.NewURLSource(ect.URLOptions{URL: "https://agents.example.com/jwks", Owner: exampleDomain, Client: &http.Client{Transport: p}}))(t)
	return s
}

// TestURLSource: keys are cached, fetched for an unknown name at once but not too
// often, refreshed in the background, used while the URL is down, and not for ever.
func TestURLSource(t *testing.T) {
	a, b := newAgent(t, "a", "ES256"), newAgent(t, "b", "ES256")
	synctest.Test(t, func(t *testing.T) {
		p := &publisher{text: keySet(t, a.jwk(t, nil))}
		s := urlSource(t, p)
		if p.count() != 0 {
			t.Error("fetched before anybody asked")
		}
		has := func(kid string) bool { return sourceHas(t, s, kid) }
		for range 2 {
			if !has("a") || p.count() != 1 {
				t.Errorf("asked %d times", p.count())
			}
		}
		// Names that are invented cost one fetch per pause.
		for range 100 {
			if has("b") {
				t.Fatal("b is not there")
			}
		}
		if p.count() != 1 {
			t.Errorf("asked %d times", p.count())
		}
		time.Sleep(31 * time.Second)
		p.publish(keySet(t, a.jwk(t, nil), b.jwk(t, nil)), nil)
		if !has("b") || p.count() != 2 {
			t.Errorf("a new name was not fetched, asked %d times", p.count())
		}
		// The refresh takes away what is gone, and nobody waits for it.
		time.Sleep(15 * time.Minute)
		p.publish(keySet(t, b.jwk(t, nil)), nil)
		if !has("a") {
			t.Error("a waited")
		}
		synctest.Wait()
		if has("a") || !has("b") || len(s.Retired("a")) != 1 || p.count() != 3 {
			t.Errorf("the refresh, asked %d times", p.count())
		}
		// Down: what is known is used for a day and not longer.
		p.publish(nil, errors.New("refused"))
		time.Sleep(23 * time.Hour)
		if !has("b") {
			t.Error("stale keys were given up too early")
		}
		synctest.Wait()
		time.Sleep(time.Hour)
		if _, err := s.Keys(t.Context(), "b"); !errors.Is(err, ect.ErrUnavailable) {
			t.Errorf("keys of more than a day: %v", err)
		}
		// Broken: the same as down.
		p.publish([]byte("<html>"), nil)
		time.Sleep(time.Minute)
		if _, err := s.Keys(t.Context(), "b"); !errors.Is(err, ect.ErrUnavailable) {
			t.Errorf("a broken answer: %v", err)
		}
		p.publish(keySet(t, b.jwk(t, nil)), nil)
		time.Sleep(time.Minute)
		if !has("b") {
			t.Error("it is up again")
		}
	})
}

// TestURLSourceTogether: many who wait cause one fetch; who leaves does not end it.
func TestURLSourceTogether(t *testing.T) {
	a := newAgent(t, "a", "ES256")
	synctest.Test(t, func(t *testing.T) {
		p := &publisher{text: keySet(t, a.jwk(t, nil)), hold: make(chan struct{})}
		s := urlSource(t, p)
		impatient, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() {
			_, err := s.Keys(impatient, "a")
			left <- err
		}()
		synctest.Wait()
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				if !sourceHas(t, s, "a") {
					t.Error("no key")
				}
			})
		}
		synctest.Wait()
		leave()
		if err := <-left; !errors.Is(err, ect.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
		close(p.hold)
		all.Wait()
		if p.count() != 1 {
			t.Errorf("asked %d times", p.count())
		}
	})
}

// TestURLSourceHangs: a URL that does not answer holds nobody up for longer than the
// time limit.
func TestURLSourceHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &publisher{hold: make(chan struct{})}
		s := urlSource(t, p)
		began := time.Now()
		if _, err := s.Keys(t.Context(), "a"); !errors.Is(err, ect.ErrUnavailable) || time.Since(began) > 6*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// TestURLs: keys are not taken from where anybody on the way can change them.
func TestURLs(t *testing.T) {
	for address, ok := range map[string]bool{
		"https://a.example.com/jwks": true, "http://localhost:1/jwks": true, "http://127.0.0.1/jwks": true, "http://[::1]:1/x": true,
		"http://a.example.com/jwks": false, "http://localhost.example.com/": false, "ftp://localhost/": false, "file:///etc/x": false, "": false, "https://": false, "::": false,
	} {
		if _, err := ect.NewURLSource(ect.URLOptions{URL: address}); (err == nil) != ok {
			t.Errorf("%q: %v", address, err)
		}
	}
}

// redirector sends everybody elsewhere.
type redirector struct{ to string }

func (r redirector) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.String() == r.to {
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(`{"keys":[]}`)), Request: req}, nil
	}
	return &http.Response{StatusCode: http.StatusFound, Header: http.Header{"Location": {r.to}}, Body: http.NoBody, Request: req}, nil
}

// TestURLRedirect: a redirection to where keys are not taken from is not followed.
func TestURLRedirect(t *testing.T) {
	for to, ok := range map[string]bool{"https://b.example.com/": true, "http://b.example.com/": false} {
		s := must(ect.NewURLSource(ect.URLOptions{URL: "https://a.example.com/", Client: &http.Client{Transport: redirector{to}}}))(t)
		if _, err := s.Keys(t.Context(), "x"); (err == nil) != ok {
			t.Errorf("to %s: %v", to, err)
		}
	}
}

// A set makes the verifier try eight keys of one name at most. Those beyond are reported, as
// everything in a set that is not used.
func TestManyKeysOfOneName(t *testing.T) {
	var agents []*agent
	var keys []map[string]any
	for range 10 {
		a := newAgent(t, "key-1", "ES256")
		agents, keys = append(agents, a), append(keys, a.jwk(t, nil))
	}
	other := newAgent(t, "key-2", "ES256")
	agents, keys = append(agents, other), append(keys, other.jwk(t, nil))
	set := parseSet(t, clinical, keys...)
	v := verifier(t, set, nil)
	for i, a := range agents {
		_, err := v.Verify(t.Context(), a.send(t, a.header(), figure()), ect.Presentation{Now: at})
		if i == 8 || i == 9 {
			wantCode(t, err, ect.CodeSignature)
		} else {
			wantCode(t, err, "")
		}
	}
	skipped := set.Skipped()
	if set.Len() != 9 || len(skipped) != 2 {
		t.Fatalf("%d used, skipped %v", set.Len(), skipped)
	}
	for _, s := range skipped {
		if s.KeyID != "key-1" || !strings.Contains(s.Reason, "8 keys of its name") {
			t.Errorf("%+v", s)
		}
	}
}

// Whoever replaces keys and keeps their name has the last eight that were replaced known to
// records, whatever stands in the set, and takes no more memory than that.
func TestRetiredKeysOfOneName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agents.jwks")
	when := time.Now().Add(-time.Hour)
	write := func(keys ...map[string]any) {
		t.Helper()
		if err := os.WriteFile(path, keySet(t, keys...), 0o600); err != nil {
			t.Fatal(err)
		}
		when = when.Add(time.Minute)
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	owner := must(ect.ParseOwner(clinical))(t)
	last := newAgent(t, "key-1", "ES256")
	var eight []map[string]any
	for range 8 {
		eight = append(eight, newAgent(t, "key-1", "ES256").jwk(t, nil))
	}
	write(eight...)
	s := must(ect.NewFileSource(ect.FileOptions{Path: path, Owner: owner, CheckInterval: 1}))(t)
	write(last.jwk(t, nil))
	sourceHas(t, s, "key-1")
	for range 8 {
		eight = append(eight[1:], newAgent(t, "key-1", "ES256").jwk(t, nil))
	}
	write(eight...)
	sourceHas(t, s, "key-1")
	if n := len(s.Retired("key-1")); n != 8 {
		t.Errorf("%d keys are kept", n)
	}
	raw := last.send(t, last.header(), figure())
	v := verifier(t, s, nil)
	if _, err := v.VerifyStored(t.Context(), raw); err != nil {
		t.Errorf("a record: %v", err)
	}
	wantCode(t, refusal(t, v, raw), ect.CodeSignature)
}

// verifierOver makes a verifier with these sources, in this order.
func verifierOver(t testing.TB, sources ...ect.Source) *ect.Verifier {
	t.Helper()
	return verifier(t, nil, func(p *ect.Policy) { p.Sources = sources })
}

// P4: a URL that hangs is asked for nothing that another source has, and holds nobody up
// whose key is there.
func TestHangingURLDelaysNobodyElse(t *testing.T) {
	a, b := newAgent(t, "a", "ES256"), newAgent(t, "b", "ES256")
	synctest.Test(t, func(t *testing.T) {
		hangs, answers := &publisher{hold: make(chan struct{})}, &publisher{text: keySet(t, b.jwk(t, nil))}
		cached := urlSource(t, answers)
		v := verifierOver(t, urlSource(t, hangs), cached, parseSet(t, clinical, a.jwk(t, nil)))
		if !sourceHas(t, cached, "b") {
			t.Fatal("not fetched")
		}
		began := time.Now()
		var all sync.WaitGroup
		for range 6 {
			for _, from := range []*agent{a, b} {
				all.Go(func() {
					raw := from.send(t, from.header(), figure())
					if _, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at}); err != nil {
						t.Error(err)
					}
					if _, err := v.VerifyStored(t.Context(), raw); err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		if waited := time.Since(began); waited > 0 || hangs.count() != 0 || answers.count() != 1 {
			t.Errorf("waited %v, asked %d and %d times", waited, hangs.count(), answers.count())
		}
	})
}

// Several URLs are asked at the same time, and the first that has the key will do. A name
// that none has costs one time limit, and is unknown only where all have answered.
func TestURLsAreAskedTogether(t *testing.T) {
	a, b := newAgent(t, "a", "ES256"), newAgent(t, "b", "ES256")
	synctest.Test(t, func(t *testing.T) {
		first, second := &publisher{hold: make(chan struct{})}, &publisher{hold: make(chan struct{})}
		answers := &publisher{text: keySet(t, a.jwk(t, nil))}
		v := verifierOver(t, urlSource(t, first), urlSource(t, second), urlSource(t, answers))
		began := time.Now()
		if _, err := v.Verify(t.Context(), a.send(t, a.header(), figure()), ect.Presentation{Now: at}); err != nil || time.Since(began) > 0 {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		_, err := v.Verify(t.Context(), b.send(t, b.header(), figure()), ect.Presentation{Now: at})
		if !errors.Is(err, ect.ErrUnavailable) || time.Since(began) > 6*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		for _, p := range []*publisher{first, second, answers} {
			if p.count() != 1 {
				t.Errorf("asked %d times", p.count())
			}
		}
	})
}

// Where the keys that are there have the name but not the signature, another owner's may
// be behind a URL. A signature that holds has found its key: nobody asks further.
func TestURLIsAskedForAnotherOwnersKey(t *testing.T) {
	a, b := newAgent(t, "key-1", "ES256"), newAgent(t, "key-1", "ES256")
	bID := "spiffe://other.org/b"
	synctest.Test(t, func(t *testing.T) {
		p := &publisher{text: keySet(t, b.jwk(t, map[string]any{"sub": bID}))}
		source := must(ect.NewURLSource(ect.URLOptions{URL: "https://agents.example.com/jwks", Client: &http.Client{Transport: p}}))(t)
		v := verifierOver(t, source, parseSet(t, clinical, a.jwk(t, nil)))
		check := func(from *agent, iss string, want ect.Code) {
			t.Helper()
			wantCode(t, refusal(t, v, from.send(t, from.header(), with(map[string]any{"iss": iss}))), want)
		}
		check(a, bID, ect.CodeIssuer)
		if p.count() != 0 {
			t.Error("asked for a key that is there")
		}
		check(b, bID, "")
		check(newAgent(t, "key-1", "ES256"), clinical, ect.CodeSignature)
		if p.count() != 1 {
			t.Errorf("asked %d times", p.count())
		}
	})
}

// A key that a URL has replaced still verifies records, and that it is used so is reason
// enough to look in the background whether it was revoked.
func TestRetiredKeysAreRefreshed(t *testing.T) {
	a, b := newAgent(t, "a", "ES256"), newAgent(t, "b", "ES256")
	synctest.Test(t, func(t *testing.T) {
		p := &publisher{text: keySet(t, a.jwk(t, nil))}
		s := urlSource(t, p)
		v := verifierOver(t, s)
		raw := a.send(t, a.header(), figure())
		sourceHas(t, s, "a")
		p.publish(keySet(t, b.jwk(t, nil)), nil)
		time.Sleep(time.Minute)
		if sourceHas(t, s, "b"); len(s.Retired("a")) != 1 {
			t.Fatal("not retired")
		}
		p.publish(keySet(t, a.jwk(t, map[string]any{"revoked": true}), b.jwk(t, nil)), nil)
		if _, err := v.VerifyStored(t.Context(), raw); err != nil || p.count() != 2 {
			t.Errorf("%v, asked %d times", err, p.count())
		}
		time.Sleep(15 * time.Minute)
		if _, err := v.VerifyStored(t.Context(), raw); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		_, err := v.VerifyStored(t.Context(), raw)
		wantCode(t, err, ect.CodeKeyRevoked)
	})
}
