package ect_test

import (
	"errors"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

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
		source, err := ect.NewURLSource(ect.URLOptions{URL: "https://agents.example.com/jwks", Client: &http.Client{Transport: p}})
		if err != nil {
			t.Fatal(err)
		}
		v := verifierOver(t, source, parseSet(t, clinical, a.jwk(t, nil)))
		check := func(from *agent, iss string, want ect.Code) {
			t.Helper()
			_, err := v.Verify(t.Context(), from.send(t, from.header(), with(map[string]any{"iss": iss})), ect.Presentation{Now: at})
			wantCode(t, err, want)
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
