package ect_test

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A key must hold when the token was made and when it is presented: whoever has got hold
// of one that has ended may date tokens back. Records ask for the first alone.
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
			_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
			wantCode(t, err, c.want)
		})
	}
	v := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"exp": issued - 100})), nil)
	if _, err := v.VerifyStored(t.Context(), raw); err != nil {
		t.Error(err)
	}
	// Where two sources name one key with two ends, one that holds will do.
	v = verifierOver(t, parseSet(t, clinical, a.jwk(t, map[string]any{"exp": issued - 100})), parseSet(t, clinical, a.jwk(t, nil)))
	_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
	wantCode(t, err, "")
}

// Issue 4, "rotation keeps old public keys until their tokens have expired": a token of
// the replaced key passes as long as it would have, with what is published and with the
// ring itself, and as a record for ever.
func TestTokensOutliveTheRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring, err := ect.CreateRing(path, ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: clinical, Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Issue(at, ect.Claims{Audience: []string{gateway}, Action: "act"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(path, ect.ES256, at, ect.DefaultLife); err != nil {
		t.Fatal(err)
	}
	owner, err := ect.ParseOwner(clinical)
	if err != nil {
		t.Fatal(err)
	}
	last := token.Expires().Add(ect.Skew)
	for _, now := range []time.Time{at, token.Expires(), last} {
		text, err := ring.PublicSet(at, clinical)
		if err != nil {
			t.Fatal(err)
		}
		set, err := ect.ParseSet(text, ect.Owner{})
		if err != nil {
			t.Fatal(err)
		}
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
