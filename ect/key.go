package ect

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/asn1"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"
)

// Key is a public key that tokens are verified with.
type Key struct {
	id        string
	algorithm Algorithm
	owner     Owner
	former    []Owner          // for signatures under earlier names
	public    crypto.PublicKey // *ecdsa.PublicKey or ed25519.PublicKey
	// notBefore and notAfter bound when the key is valid; zero is unbounded.
	notBefore, notAfter time.Time
	revoked             bool
}

// ID is the key's name, the header parameter kid of its tokens.
func (k *Key) ID() string { return k.id }

// Owner is the identity, or identities, for which the key may sign.
func (k *Key) Owner() Owner { return k.owner }

// covers reports whether the key is valid at a time, give or take the skew.
func (k *Key) covers(at time.Time, skew time.Duration) bool {
	return !k.revoked && (k.notBefore.IsZero() || !at.Add(skew).Before(k.notBefore)) && (k.notAfter.IsZero() || !at.Add(-skew).After(k.notAfter))
}

// permits reports whether the key may sign for issuer, or was once allowed to.
func (k *Key) permits(issuer string) bool {
	return k.owner.permits(issuer) || slices.ContainsFunc(k.former, func(o Owner) bool { return o.permits(issuer) })
}

// withFormer adds the former names of its ring that the key has signed under.
func (k *Key) withFormer(former []Former) (Key, error) {
	own := *k
	for i := range former {
		if !former[i].names(k.id) {
			continue
		}
		o, err := ParseOwner(former[i].Name)
		if err != nil {
			return own, err
		}
		own.former = append(own.former, o)
	}
	return own, nil
}

// samePublic reports whether two keys are equal.
func samePublic(a, b *Key) bool {
	public, ok := a.public.(interface{ Equal(crypto.PublicKey) bool })
	return ok && public.Equal(b.public)
}

// Source finds public keys by name.
type Source interface {
	// Keys returns the keys of that name, also of several owners; none is no error. An
	// error says that nothing is known.
	Keys(ctx context.Context, kid string) ([]*Key, error)
}

// slowSource is a Source that may have to wait for a key.
type slowSource interface {
	// keysAtHand returns the keys of that name that need no waiting; all is false if Keys may have more.
	// All sources are asked for these first: a server that does not answer must not delay other
	// issuers (P4).
	keysAtHand(kid string) (keys []*Key, all bool)
}

// keyHistory is a Source that remembers replaced keys: records outlive their keys.
type keyHistory interface {
	// replaced returns the replaced keys of that name, but no revoked ones.
	replaced(kid string) []*Key
}

// maxURI is the greatest length of an identity, in bytes (SPIFFE ID, 2.3).
const maxURI = 2048

// Owner says for which identities a key may sign. The zero Owner is for none.
type Owner struct {
	kind ownerKind
	name string
}

type ownerKind uint8

const (
	nobody ownerKind = iota
	oneIdentity
	trustDomain
)

// ParseOwner reads an owner: a SPIFFE trust domain ("spiffe://example.com") is all
// identities in it, any other URI is that identity.
func ParseOwner(v string) (Owner, error) {
	if domain, ok := strings.CutPrefix(v, spiffeScheme); ok && !strings.Contains(domain, "/") {
		if !validTrustDomain(domain) {
			return Owner{}, fmt.Errorf("ect: %q is not a SPIFFE trust domain", v)
		}
		return Owner{trustDomain, domain}, nil
	}
	if !validIdentity(v) {
		return Owner{}, fmt.Errorf("ect: %q is not an identity; use a URI like spiffe://example.com/agent/a", v)
	}
	return Owner{oneIdentity, v}, nil
}

func (o Owner) isZero() bool { return o.kind == nobody }

func (o Owner) String() string {
	switch o.kind {
	case oneIdentity:
		return o.name
	case trustDomain:
		return spiffeScheme + o.name
	}
	return "nobody"
}

// restrict checks the owner that a key of a set names against the owner of the set, who must
// not sign for others. In a set without an owner keys may name any owner.
func (o Owner) restrict(named Owner) (Owner, string) {
	if !o.isZero() && o != named && (named.kind != oneIdentity || !o.permits(named.name)) {
		return Owner{}, fmt.Sprintf("it is said to belong to %s, and the set to %s", named, o)
	}
	return named, ""
}

// permits reports whether the owner may call itself issuer.
func (o Owner) permits(issuer string) bool {
	switch o.kind {
	case oneIdentity:
		return issuer == o.name
	case trustDomain:
		domain, ok := spiffeDomain(issuer)
		return ok && domain == o.name
	}
	return false
}

const spiffeScheme = "spiffe://"

// validIdentity checks that v is printable, and a well-formed SPIFFE ID if it claims to be one.
func validIdentity(v string) bool {
	if v == "" || len(v) > maxURI || !printable(v) {
		return false
	}
	if len(v) >= 7 && strings.EqualFold(v[:7], "spiffe:") {
		_, ok := spiffeDomain(v)
		return ok
	}
	return true
}

// printable checks that v has visible characters only.
func printable(v string) bool {
	for _, r := range v {
		if r <= ' ' || r == 0x7f || 0x80 <= r && r <= 0xa0 || r == '\u2028' || r == '\u2029' || r == '\ufffd' {
			return false
		}
	}
	return true
}

// spiffeDomain is the trust domain of a workload's SPIFFE ID. Only the exact form counts:
// elsewhere, two spellings would be two identities.
func spiffeDomain(id string) (string, bool) {
	rest, ok := strings.CutPrefix(id, spiffeScheme)
	if !ok || len(id) > maxURI {
		return "", false
	}
	domain, path, ok := strings.Cut(rest, "/")
	if !ok || !validTrustDomain(domain) {
		return "", false
	}
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return "", false
		}
		if !onlyIDChars(segment, true) {
			return "", false
		}
	}
	return domain, true
}

func validTrustDomain(v string) bool { return v != "" && len(v) <= 255 && onlyIDChars(v, false) }

func onlyIDChars(v string, upper bool) bool {
	for i := range len(v) {
		c := v[i]
		if ('a' > c || c > 'z') && ('0' > c || c > '9') && c != '-' && c != '.' && c != '_' && (!upper || 'A' > c || c > 'Z') {
			return false
		}
	}
	return true
}

// Algorithm is a signature algorithm. All need a key pair, so that "none" and HMAC cannot
// be configured.
type Algorithm uint8

// The algorithms. Only ES256 is accepted by default.
const (
	ES256 Algorithm = iota + 1
	ES384
	EdDSA
)

// Algorithms lists all that can be allowed.
func Algorithms() []Algorithm { return []Algorithm{ES256, ES384, EdDSA} }

// ParseAlgorithm reads the name that the header parameter alg has.
func ParseAlgorithm(name string) (Algorithm, error) {
	for _, a := range Algorithms() {
		if a.String() == name {
			return a, nil
		}
	}
	return 0, fmt.Errorf("ect: no signature algorithm is called %q; there are ES256, ES384 and EdDSA", name)
}

func (a Algorithm) String() string {
	switch a {
	case ES256:
		return "ES256"
	case ES384:
		return "ES384"
	case EdDSA:
		return "EdDSA"
	}
	return "none"
}

// signatureSize is the length of a raw signature in bytes.
func (a Algorithm) signatureSize() int {
	if a == ES384 {
		return 96
	}
	return 64
}

// algorithmOf is the one that a public key is used with.
func algorithmOf(public crypto.PublicKey) (Algorithm, bool) {
	switch key := public.(type) {
	case *ecdsa.PublicKey:
		switch key.Curve {
		case elliptic.P256():
			return ES256, true
		case elliptic.P384():
			return ES384, true
		}
	case ed25519.PublicKey:
		return EdDSA, len(key) == ed25519.PublicKeySize
	}
	return 0, false
}

// digest is the hash that ECDSA signs.
func (a Algorithm) digest(text []byte) []byte {
	if a == ES384 {
		sum := sha512.Sum384(text)
		return sum[:]
	}
	sum := sha256.Sum256(text)
	return sum[:]
}

// verify checks a raw signature. It calls the standard library directly: a JWS library
// doubles the cost (ADR 0020).
func (a Algorithm) verify(public crypto.PublicKey, text, signature []byte) bool {
	if len(signature) != a.signatureSize() {
		return false
	}
	switch key := public.(type) {
	case ed25519.PublicKey:
		return ed25519.Verify(key, text, signature)
	case *ecdsa.PublicKey:
		half := len(signature) / 2
		r, s := new(big.Int).SetBytes(signature[:half]), new(big.Int).SetBytes(signature[half:])
		return ecdsa.Verify(key, a.digest(text), r, s)
	}
	return false
}

// sign is the raw signature of text. The same text gets the same signature: ECDSA is
// that of RFC 6979, which needs no random numbers and takes a quarter less time (ADR 0064).
func (a Algorithm) sign(private crypto.Signer, text []byte) ([]byte, error) {
	switch key := private.(type) {
	case ed25519.PrivateKey:
		return ed25519.Sign(key, text), nil
	case *ecdsa.PrivateKey:
		hash := crypto.SHA256
		if a == ES384 {
			hash = crypto.SHA384
		}
		der, err := key.Sign(nil, a.digest(text), hash)
		if err != nil {
			return nil, err
		}
		var made struct{ R, S *big.Int }
		if _, err := asn1.Unmarshal(der, &made); err != nil {
			return nil, err
		}
		raw := make([]byte, a.signatureSize())
		made.R.FillBytes(raw[:len(raw)/2])
		made.S.FillBytes(raw[len(raw)/2:])
		return raw, nil
	}
	return nil, errors.New("ect: this kind of key cannot sign")
}
