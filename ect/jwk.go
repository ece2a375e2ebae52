package ect

import (
	"context"
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

	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Only this file uses the library for JSON Web Keys, and keeps its types (ADR 0020).

const (
	// maxKeys is how many keys one set may have.
	maxKeys = 10_000
	// maxSameName is how many keys of one name of a source are tried for a token: each
	// costs a signature.
	maxSameName = 8
	// maxKeySet is the size of a document with keys, in bytes.
	maxKeySet = 4 << 20
	// memberFormer lists the identities besides "sub" that a public key has signed under.
	// Readers that do not know it refuse such tokens.
	memberFormer = "former_sub"
	// maxFormer is how many of them one key may have.
	maxFormer = 64
)

// Skipped is an unused key of a set.
type Skipped struct {
	// KeyID is its name, which may be missing.
	KeyID string
	// Reason says what is wrong with it.
	Reason string
}

// Set is an immutable set of public keys. It is a Source.
type Set struct {
	byID    map[string][]*Key
	skipped []Skipped
	size    int
}

// ParseSet reads a JSON Web Key Set of at most 4 MiB and 10,000 keys. A key belongs to the
// identity or trust domain in its member "sub", else to the URI in its certificate, else to
// owner; without any it is skipped. It has also signed for the identities in "former_sub". Keys
// of other kinds or uses are skipped, and those of one name beyond the eighth.
func ParseSet(text []byte, owner Owner) (*Set, error) {
	if len(text) > maxKeySet {
		return nil, errors.New("ect: the set of keys is too large")
	}
	entries, ok := countKeys(text)
	if !ok {
		return nil, errors.New("ect: this is not a JSON Web Key Set")
	}
	if entries > maxKeys {
		return nil, fmt.Errorf("ect: more than %d keys in one set", maxKeys)
	}
	parsed, err := jwk.Parse(text, jwk.WithIgnoreParseError(true))
	if err != nil {
		return nil, errors.New("ect: this is not a JSON Web Key Set")
	}
	s := &Set{byID: make(map[string][]*Key)}
	for i := range parsed.Len() {
		entry, _ := parsed.Key(i)
		key, reason := publicKey(entry, owner)
		if reason == "" && len(s.byID[key.id]) >= maxSameName {
			reason = fmt.Sprintf("%d keys of its name stand before it; give keys names of their own", maxSameName)
		}
		if reason != "" {
			s.skipped = append(s.skipped, Skipped{entry.KeyID(), reason})
			continue
		}
		s.byID[key.id] = append(s.byID[key.id], key)
		s.size++
	}
	if n := entries - parsed.Len(); n > 0 {
		s.skipped = append(s.skipped, Skipped{Reason: fmt.Sprintf("%d entries of the set are no keys that can be read", n)})
	}
	return s, nil
}

// countKeys counts the entries of "keys". The library would take a single key for a set,
// and other JSON for an empty one, and needs seconds for millions of entries.
func countKeys(text []byte) (entries int, ok bool) {
	s := jsonx.Scanner{JSON: string(text)}
	found := false
	ok = s.Document(func(name string) bool {
		if name != "keys" {
			_, ok := s.Value()
			return ok
		}
		found = true
		return s.Elements(func() bool {
			entries++
			_, ok := s.Value()
			return ok
		})
	})
	return entries, ok && found
}

// Len is the number of keys that are used.
func (s *Set) Len() int { return s.size }

// Skipped are the keys that are not used.
func (s *Set) Skipped() []Skipped { return slices.Clone(s.skipped) }

// Keys implements Source.
func (s *Set) Keys(_ context.Context, kid string) ([]*Key, error) { return s.byID[kid], nil }

// holds reports whether the set has the same public key under the same name.
func (s *Set) holds(k *Key) bool {
	return slices.ContainsFunc(s.byID[k.id], func(other *Key) bool { return samePublic(other, k) })
}

// usable refuses a set of which no key can be used: that is a mistake, and known keys are
// not dropped for it. An empty set is meant: it trusts nobody.
func (s *Set) usable() error {
	if s.size > 0 || len(s.skipped) == 0 {
		return nil
	}
	reasons := ""
	for i, skipped := range s.skipped {
		if i == 3 {
			reasons += ", and more"
			break
		}
		reasons += fmt.Sprintf("; %q: %s", skipped.KeyID, skipped.Reason)
	}
	return fmt.Errorf("ect: no key of the set can be used%s", reasons)
}

// publicKey reads one entry of a set, or returns why it is not used.
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
	if n, exact := v.(json.Number); exact { // a global setting of the library
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
		return owner.restrict(o)
	}
	if chain := entry.X509CertChain(); chain != nil && chain.Len() > 0 {
		if name := certifiedName(entry, chain); name != "" {
			o, err := ParseOwner(name)
			if err != nil {
				return Owner{}, "the URI in its certificate is not an identity"
			}
			return owner.restrict(o)
		}
	}
	if owner.isZero() {
		return Owner{}, `it has no owner: add a member "sub", or say whose the set is`
	}
	return owner, ""
}

// certifiedName is the only URI in the key's certificate, if that is one of this key.
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

// formerOf reads the identities besides the owner, which the set's owner must cover too.
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
		o, reason := owner.restrict(o)
		if reason != "" {
			return nil, reason
		}
		former = append(former, o)
	}
	return former, ""
}

// privateKeys reads the text of a key file: a JSON Web Key, a set of them, or PEM.
func privateKeys(text []byte) ([]ringKey, error) {
	if len(text) > maxKeySet {
		return nil, errors.New("ect: the key file is too large")
	}
	parsed, err := jwk.Parse(text)
	if err != nil {
		if parsed, err = jwk.Parse(text, jwk.WithPEM(true)); err != nil {
			return nil, errors.New("ect: the key file holds neither a JSON Web Key, a set of them, nor PEM")
		}
	}
	var keys []ringKey
	for i := range parsed.Len() {
		entry, _ := parsed.Key(i)
		k, reason := keyOf(entry)
		if reason != "" {
			return nil, fmt.Errorf("ect: key %d of the key file is not used: %s", i+1, reason)
		}
		created, ok := dateMember(entry, "iat")
		if !ok {
			return nil, fmt.Errorf("ect: key %d of the key file has an iat that is not a date", i+1)
		}
		var raw any
		_ = entry.Raw(&raw) // checked by keyOf
		private, _ := raw.(crypto.Signer)
		if private != nil && !isPair(private) {
			return nil, fmt.Errorf("ect: key %d of the key file has a private part that does not belong to its public one", i+1)
		}
		keys = append(keys, ringKey{Key: *k, private: private, created: created})
	}
	return keys, nil
}

// isPair reports whether the private part belongs to the public one: else nobody could
// verify its signatures.
func isPair(private crypto.Signer) bool {
	switch key := private.(type) {
	case *ecdsa.PrivateKey:
		secret, err := key.ECDH()
		if err != nil {
			return false
		}
		point, err := key.PublicKey.ECDH()
		return err == nil && secret.PublicKey().Equal(point)
	case ed25519.PrivateKey:
		return len(key) == ed25519.PrivateKeySize && ed25519.NewKeyFromSeed(key.Seed()).Equal(key)
	}
	return false
}

// marshalKeys writes keys as a set: with the private parts, or for others to see.
func marshalKeys(keys []ringKey, owner string, private bool) ([]byte, error) {
	set := jwk.NewSet()
	for i := range keys {
		entry, err := marshalKey(&keys[i], owner, private)
		if err != nil {
			return nil, err
		}
		if err := set.AddKey(entry); err != nil {
			return nil, err
		}
	}
	text, err := json.MarshalIndent(set, "", "  ")
	return append(text, '\n'), err
}

func marshalKey(k *ringKey, owner string, private bool) (jwk.Key, error) {
	var raw any = k.public
	if private && k.private != nil {
		raw = k.private
	}
	entry, err := jwk.FromRaw(raw)
	if err != nil {
		return nil, err
	}
	members := map[string]any{
		jwk.KeyIDKey: k.id, jwk.AlgorithmKey: k.algorithm.String(), jwk.KeyUsageKey: "sig",
	}
	if !k.created.IsZero() {
		members["iat"] = k.created.Unix()
	}
	if !k.notAfter.IsZero() {
		members["exp"] = k.notAfter.Unix()
	}
	if k.revoked {
		members["revoked"] = true
	}
	if owner != "" {
		members["sub"] = owner
	}
	if len(k.former) > 0 && !private {
		names := make([]any, len(k.former))
		for i, o := range k.former {
			names[i] = o.String()
		}
		members[memberFormer] = names
	}
	for name, value := range members {
		if err := entry.Set(name, value); err != nil {
			return nil, err
		}
	}
	return entry, nil
}

// thumbprint names a key by itself (RFC 7638).
func thumbprint(public crypto.PublicKey) (string, error) {
	k := ringKey{Key: Key{public: public}}
	entry, err := marshalKey(&k, "", false)
	if err != nil {
		return "", err
	}
	sum, err := entry.Thumbprint(crypto.SHA256)
	return base64.RawURLEncoding.EncodeToString(sum), err
}
