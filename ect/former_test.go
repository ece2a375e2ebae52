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

// ADR 0040: what a verifier has issued to itself before it was renamed comes back to it.
// Nobody else's token is meant for it by its name of before.
func TestFormerAudience(t *testing.T) {
	const now, before, agent = "spiffe://example.com/now", "spiffe://example.com/before", "spiffe://example.com/agent"
	var sources []ect.Source
	issuers := map[string]*ect.Issuer{}
	issuer := func(name string, ring *ect.Ring) *ect.Issuer {
		t.Helper()
		i, err := ect.NewIssuer(ect.IssuerOptions{Identity: name, Ring: ring})
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	for _, name := range []string{now, agent, before} {
		ring, err := ect.GenerateRing(ect.ES256)
		if err != nil {
			t.Fatal(err)
		}
		owner, err := ect.ParseOwner(name)
		if err != nil {
			t.Fatal(err)
		}
		var former []ect.Former
		if name == now {
			former = []ect.Former{{Name: before}}
			issuers["renamed"] = issuer(before, ring)
		}
		sources, issuers[name] = append(sources, ring.Source(owner, former...)), issuer(name, ring)
	}
	for _, names := range [][]string{nil, {before}} {
		v, err := ect.NewVerifier(ect.Policy{Audience: []string{now}, Former: names, Sources: sources})
		if err != nil {
			t.Fatal(err)
		}
		for who, own := range map[string]bool{"renamed": true, now: true, agent: false, before: false} {
			token, err := issuers[who].Issue(time.Now(), ect.Claims{Audience: []string{before, agent}, Action: "pay"})
			if err != nil {
				t.Fatal(err)
			}
			var refused *ect.Error
			_, err = v.Verify(t.Context(), token.Raw(), ect.Presentation{Now: time.Now()})
			if accepted := own && names != nil; accepted != (err == nil) || !accepted && (!errors.As(err, &refused) || refused.Code != ect.CodeAudience) {
				t.Errorf("of %s with %v: %v", who, names, err)
			}
		}
	}
}
