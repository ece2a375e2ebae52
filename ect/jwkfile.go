package ect

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"errors"
	"fmt"

	"github.com/lestrrat-go/jwx/v2/jwk"
)

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
		_ = entry.Raw(&raw) // keyOf has done it
		private, _ := raw.(crypto.Signer)
		if private != nil && !isPair(private) {
			return nil, fmt.Errorf("ect: key %d of the key file has a private part that does not belong to its public one", i+1)
		}
		keys = append(keys, ringKey{Key: *k, private: private, created: created})
	}
	return keys, nil
}

// isPair reports whether the private part makes the public one: else nobody could verify
// what is signed with it.
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

// marshalKeys writes keys as a set: the private parts too, or what others may see.
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
	return jsonIndent(set)
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
