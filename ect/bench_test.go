package ect_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"testing"
	"time"

	"github.com/lestrrat-go/jwx/v2/jwa"
	"github.com/lestrrat-go/jwx/v2/jws"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// The benchmarks hold verifying and issuing against the standard library's bare call
// for the same algorithm, and against the library for JWS, in the same run.

func benchClaims() ect.Claims {
	return ect.Claims{
		Audience: []string{gateway, "urn:ledger"}, Workflow: workflow, Action: "checkpoint", Parents: []string{id(1), id(2)},
		Output: ect.Sum([]byte("foo")), Ext: ext().
			Bool(ect.MemberReversible, true).Text(ect.MemberRollbackURI, "https://agent-b.example.com/.well-known/cascade/rollback").
			Text(ect.MemberTarget, "router-07.example.com").Int(ect.MemberTTL, 86400),
	}
}

func benchToken(b *testing.B, alg ect.Algorithm) (*ect.Ring, *ect.Token) {
	b.Helper()
	ring, err := ect.GenerateRing(alg)
	if err != nil {
		b.Fatal(err)
	}
	token, err := issuerOf(b, ring).Issue(at, benchClaims())
	if err != nil {
		b.Fatal(err)
	}
	return ring, token
}

// BenchmarkVerify takes a token through all steps, with two parents in the graph.
func BenchmarkVerify(b *testing.B) {
	for _, alg := range []ect.Algorithm{ect.ES256, ect.EdDSA} {
		ring, token := benchToken(b, alg)
		owner, err := ect.ParseOwner(clinical)
		if err != nil {
			b.Fatal(err)
		}
		v := verifier(b, ring.Source(owner), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
		g := graph{}
		g.add(ect.Node{ID: id(1), Workflow: workflow})
		g.add(ect.Node{ID: id(2), Workflow: workflow})
		b.Run(alg.String()+"/ect", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := v.Verify(b.Context(), token.Raw(), ect.Presentation{Now: at, DAG: g}); err != nil {
					b.Fatal(err)
				}
			}
		})
		private := newAgent(b, "k", alg.String()).private
		text := []byte(token.Raw())
		b.Run(alg.String()+"/bare", func(b *testing.B) { bareVerify(b, private, text) })
		b.Run(alg.String()+"/jws", func(b *testing.B) {
			raw, err := jws.Sign(text, jws.WithKey(jwa.SignatureAlgorithm(alg.String()), private))
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := jws.Verify(raw, jws.WithKey(jwa.SignatureAlgorithm(alg.String()), private.Public())); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func bareVerify(b *testing.B, private crypto.Signer, text []byte) {
	b.Helper()
	if key, ok := private.(ed25519.PrivateKey); ok {
		signature, public := ed25519.Sign(key, text), key.Public().(ed25519.PublicKey)
		for b.Loop() {
			if !ed25519.Verify(public, text, signature) {
				b.Fatal("does not hold")
			}
		}
		return
	}
	key := private.(*ecdsa.PrivateKey)
	sum := sha256.Sum256(text)
	signature, err := ecdsa.SignASN1(rand.Reader, key, sum[:])
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		sum := sha256.Sum256(text)
		if !ecdsa.VerifyASN1(&key.PublicKey, sum[:], signature) {
			b.Fatal("does not hold")
		}
	}
}

// BenchmarkIssue makes the claims and signs them.
func BenchmarkIssue(b *testing.B) {
	for _, alg := range []ect.Algorithm{ect.ES256, ect.EdDSA} {
		ring, token := benchToken(b, alg)
		issuer := issuerOf(b, ring)
		claims := benchClaims()
		b.Run(alg.String()+"/ect", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := issuer.Issue(at.Add(time.Second), claims); err != nil {
					b.Fatal(err)
				}
			}
		})
		private := newAgent(b, "k", alg.String()).private
		text := []byte(token.Raw())
		b.Run(alg.String()+"/bare", func(b *testing.B) { bareSign(b, private, text) })
		b.Run(alg.String()+"/jws", func(b *testing.B) {
			b.ReportAllocs()
			payload := []byte(token.Payload())
			for b.Loop() {
				if _, err := jws.Sign(payload, jws.WithKey(jwa.SignatureAlgorithm(alg.String()), private)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func bareSign(b *testing.B, private crypto.Signer, text []byte) {
	b.Helper()
	key, ed := private.(ed25519.PrivateKey)
	for b.Loop() {
		if ed {
			ed25519.Sign(key, text)
			continue
		}
		sum := sha256.Sum256(text)
		if _, err := ecdsa.SignASN1(rand.Reader, private.(*ecdsa.PrivateKey), sum[:]); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDraft makes the claims without signing: what a request waits for where the
// signature is left to somebody else.
func BenchmarkDraft(b *testing.B) {
	ring, _ := benchToken(b, ect.EdDSA)
	issuer := issuerOf(b, ring)
	claims := benchClaims()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := issuer.Draft(at, claims); err != nil {
			b.Fatal(err)
		}
	}
}
