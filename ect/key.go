package ect

import (
	"context"
	"crypto"
	"time"
)

// Key is a public key that tokens are verified with.
type Key struct {
	id        string
	algorithm Algorithm
	owner     Owner
	former    []Owner          // for what it has signed under earlier names
	public    crypto.PublicKey // *ecdsa.PublicKey or ed25519.PublicKey
	// notBefore and notAfter bound when the key may have signed; zero is unbounded.
	notBefore, notAfter time.Time
	revoked             bool
}

// ID is the key's name, the header parameter kid of its tokens.
func (k *Key) ID() string { return k.id }

// Algorithm is the only one that the key is used with.
func (k *Key) Algorithm() Algorithm { return k.algorithm }

// Owner is whose tokens the key may sign.
func (k *Key) Owner() Owner { return k.owner }

// Revoked reports that nothing that the key has signed is believed any more.
func (k *Key) Revoked() bool { return k.revoked }

// covers reports whether a token that was made at this second may be the key's.
func (k *Key) covers(at time.Time) bool {
	return !k.revoked && (k.notBefore.IsZero() || !at.Before(k.notBefore)) && (k.notAfter.IsZero() || !at.After(k.notAfter))
}

// samePublic reports whether two keys are one.
func samePublic(a, b *Key) bool {
	public, ok := a.public.(interface{ Equal(crypto.PublicKey) bool })
	return ok && public.Equal(b.public)
}

// Source finds public keys by name.
type Source interface {
	// Keys gives the keys of that name, none where there are none. Different owners
	// may use one name. An error means that nothing is known.
	Keys(ctx context.Context, kid string) ([]*Key, error)
}

// Archive is what a Source offers besides where it still knows keys that are no longer
// used: records outlive the keys that they were signed with.
type Archive interface {
	// Retired gives the keys of that name that were replaced. Revoked ones are not
	// among them.
	Retired(kid string) []*Key
}
