package ect_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// The figures' example, whose iat is the time of most tests.
const (
	gateway  = "spiffe://example.com/agent/safety"
	clinical = "spiffe://example.com/agent/clinical"
	taskID   = "550e8400-e29b-41d4-a716-446655440000"
	workflow = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
	other    = "b0b1c2d3-e4f5-6789-abcd-ef0123456789"
	issued   = 1772064150
	expires  = 1772064750
)

var at = time.Unix(issued, 0)

var b64 = base64.RawURLEncoding

// agent has a key and writes its tokens byte by byte, without the code under test.
type agent struct {
	kid, alg string
	private  crypto.Signer
}

func newAgent(t testing.TB, kid, alg string) *agent {
	t.Helper()
	a := &agent{kid: kid, alg: alg}
	var err error
	switch alg {
	case "ES256":
		a.private, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case "ES384":
		a.private, err = ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	case "EdDSA":
		_, a.private, err = ed25519.GenerateKey(rand.Reader)
	default:
		t.Fatalf("no algorithm %s", alg)
	}
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// jwk is the public key as a JSON Web Key, with further members.
func (a *agent) jwk(t testing.TB, more map[string]any) map[string]any {
	t.Helper()
	m := map[string]any{"kid": a.kid, "use": "sig"}
	switch public := a.private.Public().(type) {
	case *ecdsa.PublicKey:
		point := must(public.Bytes())(t)
		half := len(point) / 2
		m["kty"], m["crv"] = "EC", public.Params().Name
		m["x"], m["y"] = b64.EncodeToString(point[1:1+half]), b64.EncodeToString(point[1+half:])
	case ed25519.PublicKey:
		m["kty"], m["crv"], m["x"] = "OKP", "Ed25519", b64.EncodeToString(public)
	}
	maps.Copy(m, more)
	return m
}

func keySet(t testing.TB, keys ...map[string]any) []byte {
	t.Helper()
	text := must(json.Marshal(map[string]any{"keys": keys}))(t)
	return text
}

// signature is the raw signature of text under the agent's own algorithm.
func (a *agent) signature(t testing.TB, text string) []byte {
	t.Helper()
	switch key := a.private.(type) {
	case ed25519.PrivateKey:
		return ed25519.Sign(key, []byte(text))
	case *ecdsa.PrivateKey:
		digest, size := sha256.Sum256([]byte(text)), 32
		sum := digest[:]
		if a.alg == "ES384" {
			long := sha512.Sum384([]byte(text))
			sum, size = long[:], 48
		}
		r, s, err := ecdsa.Sign(rand.Reader, key, sum)
		if err != nil {
			t.Fatal(err)
		}
		out := make([]byte, 2*size)
		r.FillBytes(out[:size])
		s.FillBytes(out[size:])
		return out
	}
	t.Fatal("no such key")
	return nil
}

// send is a token with this header and these claims.
func (a *agent) send(t testing.TB, header, claims map[string]any) string {
	t.Helper()
	payload := must(json.Marshal(claims))(t)
	return a.sendJSON(t, header, string(payload))
}

func (a *agent) sendJSON(t testing.TB, header map[string]any, payload string) string {
	t.Helper()
	head := must(json.Marshal(header))(t)
	signed := b64.EncodeToString(head) + "." + b64.EncodeToString([]byte(payload))
	return signed + "." + b64.EncodeToString(a.signature(t, signed))
}

func (a *agent) header() map[string]any {
	return map[string]any{"alg": a.alg, "typ": "wimse-exec+jwt", "kid": a.kid}
}

// figure are the claims of the draft's example.
func figure() map[string]any {
	return map[string]any{
		"iss": clinical, "aud": gateway, "iat": issued, "exp": expires, "jti": taskID, "wid": workflow,
		"exec_act": "recommend_treatment", "par": []string{},
		"inp_hash": "n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg",
		"out_hash": "LCa0a2j_xo_5m0U8HTBBNBNCLXBkg7-g-YpeiGJm564",
	}
}

// with is the example with other claims; nil takes one away.
func with(changes map[string]any) map[string]any {
	m := figure()
	for name, value := range changes {
		if value == nil {
			delete(m, name)
			continue
		}
		m[name] = value
	}
	return m
}

// id is the n-th of many ids.
func id(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012x", n) }

func verifier(t testing.TB, source ect.Source, change func(*ect.Policy)) *ect.Verifier {
	t.Helper()
	p := ect.Policy{Audience: []string{gateway}, Sources: []ect.Source{source}}
	if change != nil {
		change(&p)
	}
	v := must(ect.NewVerifier(p))(t)
	return v
}

func parseSet(t testing.TB, owner string, keys ...map[string]any) *ect.Set {
	t.Helper()
	var o ect.Owner
	if owner != "" {
		var err error
		if o, err = ect.ParseOwner(owner); err != nil {
			t.Fatal(err)
		}
	}
	set := must(ect.ParseSet(keySet(t, keys...), o))(t)
	return set
}

// refusal is why a token is refused at the time of the figures.
func refusal(t testing.TB, v *ect.Verifier, raw string) error {
	t.Helper()
	_, err := v.Verify(t.Context(), raw, ect.Presentation{Now: at})
	return err
}

// wantCode checks that a token was refused for this reason, or accepted where it is "".
func wantCode(t testing.TB, err error, want ect.Code) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	var refused *ect.Error
	if !errors.As(err, &refused) {
		t.Errorf("got %v, want the refusal %q", err, want)
		return
	}
	if refused.Code != want {
		t.Errorf("refused with %q, want %q", refused.Code, want)
	}
	if refused.Detail() == "" {
		t.Errorf("the code %q has no sentence", refused.Code)
	}
}

// graph is a DAG in memory.
type graph map[string][]ect.Node

func (g graph) Nodes(_ context.Context, id string) ([]ect.Node, error) { return g[id], nil }

func (g graph) add(n ect.Node) {
	if n.Level == 0 {
		n.Level = ect.L2
	}
	if n.IssuedAt.IsZero() {
		n.IssuedAt = at.Add(-time.Minute)
	}
	g[n.ID] = append(g[n.ID], n)
}

// exampleDomain owns keys of no particular agent.
var exampleDomain, _ = ect.ParseOwner("spiffe://example.com")

// must makes a failed call fatal: must(f())(t).
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// always is one graph for all tokens.
func always(g ect.DAG) func(*ect.Token) ect.DAG { return func(*ect.Token) ect.DAG { return g } }
