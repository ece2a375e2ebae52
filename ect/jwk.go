package ect

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/lestrrat-go/jwx/v2/cert"
	"github.com/lestrrat-go/jwx/v2/jwk"
)

// This file and jwkfile.go are the only ones that know the library for JSON Web Keys.
// Its types stay in them (ADR 0020).

const (
	// maxKeys is how many keys one set may have.
	maxKeys = 10_000
	// maxKeySet is the size of a document with keys.
	maxKeySet = 4 << 20
)

// Skipped tells of a key in a set that is not used, and why.
type Skipped struct {
	// KeyID is its name, which may be missing.
	KeyID string
	// Reason says what is wrong with it.
	Reason string
}

// Set is a set of public keys. It never changes.
type Set struct {
	byID    map[string][]*Key
	skipped []Skipped
	size    int
}

// ParseSet reads a JSON Web Key Set. A key belongs to the identity or trust domain in
// its member "sub", else to the URI in its certificate, else to owner; without any it
// is not used. The identities in "former_sub" are those that it has signed for before
// that. Keys of other kinds or for other uses are skipped, and told of.
func ParseSet(text []byte, owner Owner) (*Set, error) {
	if len(text) > maxKeySet {
		return nil, errors.New("ect: the set of keys is too large")
	}
	if !isKeySet(text) {
		return nil, errors.New("ect: this is not a JSON Web Key Set")
	}
	parsed, err := jwk.Parse(text, jwk.WithIgnoreParseError(true))
	if err != nil {
		return nil, errors.New("ect: this is not a JSON Web Key Set")
	}
	if parsed.Len() > maxKeys {
		return nil, fmt.Errorf("ect: more than %d keys in one set", maxKeys)
	}
	s := &Set{byID: make(map[string][]*Key)}
	for i := range parsed.Len() {
		entry, _ := parsed.Key(i)
		key, reason := publicKey(entry, owner)
		if reason != "" {
			s.skipped = append(s.skipped, Skipped{entry.KeyID(), reason})
			continue
		}
		s.byID[key.id] = append(s.byID[key.id], key)
		s.size++
	}
	return s, nil
}

// isKeySet holds that the text is an object with a member "keys": the library takes a
// single key for a set of one, and other JSON for an empty one. Members that stand twice
// are refused with it.
func isKeySet(text []byte) bool {
	s := scanner{s: string(text)}
	found := false
	ok := s.document(func(name string) bool {
		found = found || name == "keys" && s.peek() == '['
		_, ok := s.value()
		return ok
	})
	return ok && found
}

// Len is the number of keys that are used.
func (s *Set) Len() int { return s.size }

// Skipped are the keys that are not used.
func (s *Set) Skipped() []Skipped { return slices.Clone(s.skipped) }

// publicKey takes over one entry, or says why not.
func publicKey(entry jwk.Key, owner Owner) (*Key, string) {
	if _, private := entry.(jwk.SymmetricKey); private {
		return nil, "it is symmetric"
	}
	if _, private := entry.Get("d"); private {
		return nil, "it is a private key, which does not belong among those that are trusted"
	}
	k, reason := keyOf(entry)
	if reason != "" {
		return nil, reason
	}
	switch use := entry.KeyUsage(); use {
	case "", "sig", "jwt-svid":
	default:
		return nil, "its use is " + use
	}
	if ops := entry.KeyOps(); len(ops) > 0 && !slices.Contains(ops, jwk.KeyOpVerify) {
		return nil, "its operations do not include verify"
	}
	if k.owner, reason = ownerOf(entry, owner); reason != "" {
		return nil, reason
	}
	if k.former, reason = formerOf(entry, owner); reason != "" {
		return nil, reason
	}
	return k, ""
}

// keyOf reads what public and private keys share.
func keyOf(entry jwk.Key) (*Key, string) {
	var raw any
	if err := entry.Raw(&raw); err != nil {
		return nil, "it is not a valid key"
	}
	k := &Key{id: entry.KeyID()}
	switch raw := raw.(type) {
	case *ecdsa.PublicKey:
		k.public = raw
	case *ecdsa.PrivateKey:
		k.public = &raw.PublicKey
	case ed25519.PublicKey:
		k.public = raw
	case ed25519.PrivateKey:
		k.public = raw.Public()
	default:
		return nil, "its type is not EC or OKP"
	}
	if ec, ok := k.public.(*ecdsa.PublicKey); ok {
		if _, err := ec.ECDH(); err != nil {
			return nil, "its point is not on the curve"
		}
	}
	var ok bool
	if k.algorithm, ok = algorithmOf(k.public); !ok {
		return nil, "its curve is none of P-256, P-384 and Ed25519"
	}
	if alg := entry.Algorithm().String(); alg != "" && alg != k.algorithm.String() {
		return nil, "its algorithm is not that of its curve, or none that is known"
	}
	if k.id == "" {
		sum, err := entry.Thumbprint(crypto.SHA256)
		if err != nil {
			return nil, "it has no name"
		}
		k.id = base64.RawURLEncoding.EncodeToString(sum)
	}
	if len(k.id) > maxURI || !printable(k.id) {
		return nil, "its name is too long or has blanks"
	}
	if k.notBefore, ok = dateMember(entry, "nbf"); !ok {
		return nil, "its nbf is not a date"
	}
	if k.notAfter, ok = dateMember(entry, "exp"); !ok {
		return nil, "its exp is not a date"
	}
	if revoked, ok := entry.Get("revoked"); ok {
		k.revoked = revoked != nil && revoked != false
	}
	return k, ""
}

func dateMember(entry jwk.Key, name string) (time.Time, bool) {
	v, ok := entry.Get(name)
	if !ok {
		return time.Time{}, true
	}
	f, ok := v.(float64)
	if n, exact := v.(json.Number); exact { // other plugins may have set the library so
		var err error
		f, err = n.Float64()
		ok = err == nil
	}
	if !ok || f < 0 || f > maxDate || f != math.Trunc(f) {
		return time.Time{}, false
	}
	return time.Unix(int64(f), 0).UTC(), true
}

// ownerOf finds out whom the key belongs to.
func ownerOf(entry jwk.Key, owner Owner) (Owner, string) {
	if v, ok := entry.Get("sub"); ok {
		name, _ := v.(string)
		o, err := ParseOwner(name)
		if err != nil {
			return Owner{}, `its member "sub" is not an identity`
		}
		return owner.bound(o)
	}
	if chain := entry.X509CertChain(); chain != nil && chain.Len() > 0 {
		if name := certifiedName(entry, chain); name != "" {
			o, err := ParseOwner(name)
			if err != nil {
				return Owner{}, "the URI in its certificate is not an identity"
			}
			return owner.bound(o)
		}
	}
	if owner.IsZero() {
		return Owner{}, `it has no owner: add a member "sub", or say whose the set is`
	}
	return owner, ""
}

// certifiedName is the only URI in the certificate of the key, if it is one of this key.
func certifiedName(entry jwk.Key, chain *cert.Chain) string {
	der, _ := chain.Get(0)
	leaf, err := cert.Parse(der)
	if err != nil || len(leaf.URIs) != 1 {
		return ""
	}
	var raw any
	if entry.Raw(&raw) != nil {
		return ""
	}
	if public, ok := raw.(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(leaf.PublicKey) {
		return ""
	}
	return leaf.URIs[0].String()
}

// formerOf reads the identities besides the owner. Like the owner's own they must be
// covered by the owner of the set, and none is a whole trust domain.
func formerOf(entry jwk.Key, owner Owner) ([]Owner, string) {
	v, ok := entry.Get(memberFormer)
	if !ok {
		return nil, ""
	}
	list, ok := v.([]any)
	if !ok || len(list) > maxFormer {
		return nil, fmt.Sprintf("its member %q is not a list of at most %d identities", memberFormer, maxFormer)
	}
	var former []Owner
	for _, v := range list {
		name, _ := v.(string)
		o, err := ParseOwner(name)
		if err != nil || o.kind != oneIdentity {
			return nil, fmt.Sprintf("its member %q holds something else than an identity", memberFormer)
		}
		o, reason := owner.bound(o)
		if reason != "" {
			return nil, reason
		}
		former = append(former, o)
	}
	return former, ""
}
