package ect

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Ring holds the keys that tokens are signed with here. The newest signs; older ones
// have lost their private part and stay to verify with. It is safe for concurrent use,
// also while it is rotated.
type Ring struct {
	keys     atomic.Pointer[ringKeys]
	changing sync.Mutex // held while another set of keys is made
}

// ringKeys is what a rotation replaces. It never changes.
type ringKeys struct {
	all    []ringKey // the signing one is last
	byID   map[string][]*Key
	signer *signer
}

// ringKey is a key with what only its owner knows.
type ringKey struct {
	Key
	private crypto.Signer // nil once it is replaced
	created time.Time
}

// signer is the key in use with all of a token that does not depend on its claims.
type signer struct {
	key     *Key
	private crypto.Signer
	heads   [len(spellings)]string // the protected headers, encoded, with the dot
}

// GenerateRing makes a ring with one fresh key.
func GenerateRing(alg Algorithm) (*Ring, error) {
	key, err := generateKey(alg)
	if err != nil {
		return nil, err
	}
	return newRing([]ringKey{key})
}

func generateKey(alg Algorithm) (ringKey, error) {
	k := ringKey{Key: Key{algorithm: alg}, created: time.Now().UTC().Truncate(time.Second)}
	switch alg {
	case ES256, ES384:
		curve := elliptic.P256()
		if alg == ES384 {
			curve = elliptic.P384()
		}
		private, err := ecdsa.GenerateKey(curve, rand.Reader)
		if err != nil {
			return k, err
		}
		k.private, k.public = private, &private.PublicKey
	case EdDSA:
		public, private, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return k, err
		}
		k.private, k.public = private, public
	default:
		return k, fmt.Errorf("ect: there is no signature algorithm %d", alg)
	}
	var err error
	k.id, err = thumbprint(k.public)
	return k, err
}

// ParseRing reads the text of a key file: a JSON Web Key, a set of them, or PEM. The
// last key with a private part signs.
func ParseRing(text []byte) (*Ring, error) {
	keys, err := privateKeys(text)
	if err != nil {
		return nil, err
	}
	return newRing(keys)
}

func newRing(keys []ringKey) (*Ring, error) {
	next, err := arrange(keys)
	if err != nil {
		return nil, err
	}
	r := &Ring{}
	r.keys.Store(next)
	return r, nil
}

// arrange puts the key that signs last.
func arrange(keys []ringKey) (*ringKeys, error) {
	last := -1
	for i := range keys {
		if keys[i].private != nil && !keys[i].revoked && keys[i].notAfter.IsZero() {
			last = i
		}
	}
	if last < 0 {
		return nil, errors.New("ect: the key file holds no private key that may sign")
	}
	all := make([]ringKey, 0, len(keys))
	all = append(append(all, keys[:last]...), keys[last+1:]...)
	all = append(all, keys[last])
	next := &ringKeys{all: all, byID: make(map[string][]*Key, len(all))}
	for i := range all {
		if next.byID[all[i].id] != nil {
			return nil, errors.New("ect: the key file holds two keys of one name")
		}
		next.byID[all[i].id] = []*Key{&all[i].Key}
	}
	current := &all[len(all)-1]
	next.signer = &signer{key: &current.Key, private: current.private}
	for s, names := range spellings {
		head := append([]byte(`{"alg":"`), current.algorithm.String()...)
		head = append(append(append(head, `","typ":"`...), names.typ...), `","kid":`...)
		head = append(appendText(head, current.id), '}')
		next.signer.heads[s] = base64.RawURLEncoding.EncodeToString(head) + "."
	}
	return next, nil
}

// RingKey describes a key of a ring and shows nothing of it.
type RingKey struct {
	// ID is its name, the header parameter kid.
	ID string
	// Algorithm is what it signs with.
	Algorithm Algorithm
	// Created is when it was made; zero where that is not known.
	Created time.Time
	// Until is when it leaves the published set; zero for the one that signs.
	Until time.Time
	// Signs marks the one in use.
	Signs bool
	// Revoked says that nothing that it has signed is believed any more.
	Revoked bool
}

// List gives the keys of the ring, the one that signs last.
func (r *Ring) List() []RingKey {
	keys := r.keys.Load()
	list := make([]RingKey, len(keys.all))
	for i := range keys.all {
		k := &keys.all[i]
		list[i] = RingKey{k.id, k.algorithm, k.created, k.notAfter, &k.Key == keys.signer.key, k.revoked}
	}
	return list
}

// PublicSet is the JSON Web Key Set for others to verify with: the key that signs, and
// replaced ones until the last token that they have signed has expired. owner goes with
// each key as "sub". At the zero time they are all there that were not revoked: what
// records are verified with. Former names go with the keys that have signed under them.
func (r *Ring) PublicSet(now time.Time, owner string, former ...Former) ([]byte, error) {
	var published []ringKey
	for _, k := range r.keys.Load().all {
		if k.revoked || !k.notAfter.IsZero() && now.After(k.notAfter) {
			continue
		}
		named, err := k.withFormer(former)
		if err != nil {
			return nil, err
		}
		k.Key = named
		published = append(published, k)
	}
	return marshalKeys(published, owner, false)
}

// MarshalText is the text of the key file, private parts included.
func (r *Ring) MarshalText() ([]byte, error) { return marshalKeys(r.keys.Load().all, "", true) }

// Source gives the ring's own keys, for those who verify what was signed here. Replaced
// ones are found for as long as the file holds them. Under former names those speak that
// have signed under them.
func (r *Ring) Source(owner Owner, former ...Former) Source { return ringSource{r, owner, former} }

type ringSource struct {
	ring   *Ring
	owner  Owner
	former []Former
}

// Keys implements Source.
func (s ringSource) Keys(_ context.Context, kid string) ([]*Key, error) {
	found := s.ring.keys.Load().byID[kid]
	if found == nil {
		return nil, nil
	}
	k, err := found[0].withFormer(s.former)
	if err != nil {
		return nil, err
	}
	k.owner = s.owner
	return []*Key{&k}, nil
}

// rotated is the ring with a fresh key that signs. Those before it verify until keep has
// passed at the latest, and after that only what is recorded.
func (k *ringKeys) rotated(alg Algorithm, now time.Time, keep time.Duration) (*ringKeys, error) {
	fresh, err := generateKey(alg)
	if err != nil {
		return nil, err
	}
	until := now.Add(keep).UTC().Truncate(time.Second).Add(time.Second)
	next := make([]ringKey, 0, len(k.all)+1)
	for _, old := range k.all {
		old.private = nil
		if old.notAfter.IsZero() || old.notAfter.After(until) {
			old.notAfter = until
		}
		next = append(next, old)
	}
	return arrange(append(next, fresh))
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
