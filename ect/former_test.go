package ect_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// What a key has signed under an earlier name holds, and under no other: neither that of
// somebody else, nor, with a key that came later, the earlier one.
func TestFormerNames(t *testing.T) {
	const before, now = "spiffe://example.com/gateway", "spiffe://example.com/gateway2"
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(ring *ect.Ring, name string) string {
		t.Helper()
		issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: name, Ring: ring})
		if err != nil {
			t.Fatal(err)
		}
		token, err := issuer.Issue(time.Now(), ect.Claims{Audience: []string{now}, Action: "pay"})
		if err != nil {
			t.Fatal(err)
		}
		return token.Raw()
	}
	old := ring.List()[0].ID
	honest, other := issue(ring, before), issue(ring, "spiffe://example.com/somebody")
	former := ect.Former{Name: before, Keys: []string{old}}
	owner, err := ect.ParseOwner(now)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key")
	text, err := ring.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(file, ect.ES256, time.Now(), time.Hour); err != nil {
		t.Fatal(err)
	}
	late := issue(ring, before)
	public, err := ring.PublicSet(time.Now(), now, former)
	if err != nil {
		t.Fatal(err)
	}
	set, err := ect.ParseSet(public, ect.Owner{})
	if err != nil || set.Len() != 2 || strings.Count(string(public), "former_sub") != 1 {
		t.Fatalf("%v\n%s", err, public)
	}
	for name, source := range map[string]ect.Source{"ring": ring.Source(owner, former), "published": set} {
		v, err := ect.NewVerifier(ect.Policy{Audience: []string{now}, Sources: []ect.Source{source}, Algorithms: ect.Algorithms(), AnyID: true})
		if err != nil {
			t.Fatal(err)
		}
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
	outside, err := ring.PublicSet(time.Now(), now, ect.Former{Name: "spiffe://other.example/gateway"})
	if err != nil {
		t.Fatal(err)
	}
	domain, err := ect.ParseOwner("spiffe://example.com")
	if err != nil {
		t.Fatal(err)
	}
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
