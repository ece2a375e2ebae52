package ect_test

import (
	"encoding/base64"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P7: text that ends anywhere is refused, and panics nowhere. Each prefix of a payload with
// all kinds of values is tried, as it is and with what begins something after it.
func TestTruncatedPayloads(t *testing.T) {
	a := newAgent(t, "k", "EdDSA")
	v := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) { p.Algorithms, p.MinLevel = ect.Algorithms(), ect.L1 })
	whole := `{"iss":"spiffe:\/\/x","par":["a\u00e9","\ud83d\ude00"],"iat":1500,"ext":{"cascade.ttl":1,"b":[-1.5e+3,true,[null,{"c":"\\\"\n"}]],"d":"é"},"jti":"\`
	for end := range len(whole) + 1 {
		for _, more := range []string{"", `\`, `\u`, `\u00`, `\ud83d\`, `\ud83d\u`, `"`, `"\`, `{"`, `[`, `-`, `1e`, "\x00", "\xff"} {
			payload := whole[:end] + more
			for _, raw := range []string{a.sendJSON(t, a.header(), payload), base64.RawURLEncoding.EncodeToString([]byte(payload))} {
				if _, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at}); err == nil {
					t.Fatalf("accepted %q", payload)
				} else {
					wantAnyCode(t, err)
				}
				if _, err := ect.ParseInsecure(raw); err == nil {
					t.Fatalf("parsed %q", payload)
				}
			}
			header := base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".e30.e30"
			if _, err := v.Verify(t.Context(), header, ect.Presentation{Now: at}); err == nil {
				t.Fatalf("accepted the header %q", payload)
			}
		}
	}
}
