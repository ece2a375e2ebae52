package ect

import (
	"crypto/sha256"
	"encoding/base64"
)

// Hash is the SHA-256 of some octets as inp_hash and out_hash carry it. The zero Hash
// stands for a claim that is not there.
type Hash struct {
	sum [sha256.Size]byte
	set bool
}

// Sum is the hash of octets.
func Sum(octets []byte) Hash { return Hash{sha256.Sum256(octets), true} }

// HashOf takes a SHA-256 that was computed elsewhere.
func HashOf(sum [sha256.Size]byte) Hash { return Hash{sum, true} }

// ParseHash reads the form of the claims: 43 characters of base64url without padding,
// and no name of an algorithm before it.
func ParseHash(v string) (Hash, bool) {
	h := Hash{set: true}
	if len(v) != 43 {
		return Hash{}, false
	}
	sum, ok := decode64(v)
	if !ok || len(sum) != len(h.sum) {
		return Hash{}, false
	}
	copy(h.sum[:], sum)
	return h, true
}

// Bytes are the 32 bytes of the hash; zeros for the zero Hash.
func (h Hash) Bytes() [sha256.Size]byte { return h.sum }

// IsZero reports that there is no hash.
func (h Hash) IsZero() bool { return !h.set }

// String is the form of the claims; empty for the zero Hash.
func (h Hash) String() string {
	if !h.set {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString(h.sum[:])
}

// Prefixed is the form of cascade.state_hash_before and _after, which are plain
// extension strings: the figures write them with the algorithm's name.
func (h Hash) Prefixed() string {
	if !h.set {
		return ""
	}
	return "sha256:" + h.String()
}
