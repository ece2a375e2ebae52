package ect_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"slices"
	"testing"
	"time"

	"github.com/lestrrat-go/jwx/v2/jwa"
	"github.com/lestrrat-go/jwx/v2/jws"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// The benchmarks hold verifying and issuing against the standard library's bare call
// for the same algorithm, and against the library for JWS. The three take turns, so
// that whatever else the machine does meets them alike; what is reported are the
// medians and their ratios to the bare call.

// turns measures the functions against the first of them.
func turns(b *testing.B, names []string, run []func()) {
	b.Helper()
	spent := make([][]time.Duration, len(run))
	for b.Loop() {
		for i, f := range run {
			began := time.Now()
			f()
			spent[i] = append(spent[i], time.Since(began))
		}
	}
	var bare time.Duration
	for i, all := range spent {
		slices.Sort(all)
		median := all[len(all)/2]
		if i == 0 {
			bare = median
		}
		b.ReportMetric(float64(median)/1e3, names[i]+"-µs")
		if i > 0 {
			b.ReportMetric(float64(median)/float64(bare), names[i]+"/"+names[0])
		}
	}
	b.ReportMetric(0, "ns/op") // the sum of all of them says nothing
}

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

// benchVerifier accepts what benchToken makes.
func benchVerifier(b *testing.B, ring *ect.Ring) (*ect.Verifier, ect.Presentation) {
	b.Helper()
	owner, err := ect.ParseOwner(clinical)
	if err != nil {
		b.Fatal(err)
	}
	g := graph{}
	g.add(ect.Node{ID: id(1), Workflow: workflow})
	g.add(ect.Node{ID: id(2), Workflow: workflow})
	v := verifier(b, ring.Source(owner), func(p *ect.Policy) { p.Algorithms = ect.Algorithms() })
	return v, ect.Presentation{Now: at, DAG: always(g)}
}

var benchAlgorithms = []ect.Algorithm{ect.ES256, ect.EdDSA}

// BenchmarkVerify takes a token through all steps, with two parents in the graph.
func BenchmarkVerify(b *testing.B) {
	for _, alg := range benchAlgorithms {
		ring, token := benchToken(b, alg)
		v, p := benchVerifier(b, ring)
		private := newAgent(b, "k", alg.String()).private
		compact, err := jws.Sign([]byte(token.Payload()), jws.WithKey(jwa.SignatureAlgorithm(alg.String()), private))
		if err != nil {
			b.Fatal(err)
		}
		b.Run(alg.String(), func(b *testing.B) {
			turns(b, []string{"bare", "ect", "jws"}, []func(){
				bareVerify(b, private, []byte(token.Raw())),
				func() {
					if _, err := v.Verify(b.Context(), token.Raw(), p); err != nil {
						b.Fatal(err)
					}
				},
				func() {
					if _, err := jws.Verify(compact, jws.WithKey(jwa.SignatureAlgorithm(alg.String()), private.Public())); err != nil {
						b.Fatal(err)
					}
				},
			})
		})
	}
}

func bareVerify(b *testing.B, private crypto.Signer, text []byte) func() {
	b.Helper()
	if key, ok := private.(ed25519.PrivateKey); ok {
		signature, public := ed25519.Sign(key, text), key.Public().(ed25519.PublicKey)
		return func() {
			if !ed25519.Verify(public, text, signature) {
				b.Fatal("does not hold")
			}
		}
	}
	key := private.(*ecdsa.PrivateKey)
	sum := sha256.Sum256(text)
	signature, err := ecdsa.SignASN1(rand.Reader, key, sum[:])
	if err != nil {
		b.Fatal(err)
	}
	return func() {
		sum := sha256.Sum256(text)
		if !ecdsa.VerifyASN1(&key.PublicKey, sum[:], signature) {
			b.Fatal("does not hold")
		}
	}
}

// BenchmarkIssue makes the claims and signs them.
func BenchmarkIssue(b *testing.B) {
	for _, alg := range benchAlgorithms {
		ring, token := benchToken(b, alg)
		issuer := issuerOf(b, ring)
		claims := benchClaims()
		private := newAgent(b, "k", alg.String()).private
		b.Run(alg.String(), func(b *testing.B) {
			turns(b, []string{"bare", "ect", "jws"}, []func(){
				bareSign(b, private, []byte(token.Raw())),
				func() {
					if _, err := issuer.Issue(at, claims); err != nil {
						b.Fatal(err)
					}
				},
				func() {
					if _, err := jws.Sign([]byte(token.Payload()), jws.WithKey(jwa.SignatureAlgorithm(alg.String()), private)); err != nil {
						b.Fatal(err)
					}
				},
			})
		})
	}
}

func bareSign(b *testing.B, private crypto.Signer, text []byte) func() {
	if key, ed := private.(ed25519.PrivateKey); ed {
		return func() { ed25519.Sign(key, text) }
	}
	return func() {
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
