package ect_test

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// TestOrderOfSteps: a token with several faults is refused for the first of them in the
// order of verification (fact sheet, 6), also where a claim has the wrong type.
func TestOrderOfSteps(t *testing.T) {
	a, thief := newAgent(t, "k", "ES256"), newAgent(t, "k", "ES256")
	good := verifier(t, parseSet(t, clinical, a.jwk(t, nil)), func(p *ect.Policy) { p.Replays = ect.NewReplayCache(0) })
	ended := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"exp": issued - 5000})), nil)
	revoked := verifier(t, parseSet(t, clinical, a.jwk(t, map[string]any{"revoked": true})), nil)
	if _, err := good.Verify(t.Context(), a.send(t, a.header(), with(map[string]any{"par": []string{}})), ect.Presentation{Now: at}); err != nil {
		t.Fatal(err)
	}
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
			{ect.CodeParentUnknown, func() { claims["par"] = []string{id(1)} }},
			{ect.CodeReplayed, func() { claims["jti"] = taskID }},
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
			_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at, DAG: graph{}})
			if t.Run("", func(t *testing.T) { wantCode(t, err, step.want) }); t.Failed() {
				t.Fatalf("step %d, wrong types %v", n, wrongTypes)
			}
		}
	}
	// A key that was revoked has nothing of its tokens read.
	_, err := revoked.Verify(t.Context(), a.sendJSON(t, a.header(), `{"iss":`), ect.Presentation{Now: at})
	wantCode(t, err, ect.CodeKeyRevoked)
}
