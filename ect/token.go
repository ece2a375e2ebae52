package ect

import "crypto/sha256"

// Token is a token that was verified, or signed here. There is no other way to get one.
type Token struct {
	content
	raw     string
	level   Level
	key     *Key
	proven  bool
	lineage Lineage
}

// Raw is the token as it was received or signed.
func (t *Token) Raw() string { return t.raw }

// Level is the assurance that this token itself gives; Lineage tells that of its chain.
func (t *Token) Level() Level { return t.level }

// Key is the key that the signature holds under; nil for a token of level L1.
func (t *Token) Key() *Key { return t.key }

// Proven reports that the token is its issuer's: its signature holds, or, without one, the
// transport has proven to be the issuer's. Any other says of itself what it likes: it is
// evidence of what was sent, and nobody's word.
func (t *Token) Proven() bool { return t.proven }

// Author is whose token it is, as far as that is proven; empty for nobody. Whatever is
// granted for a token is granted to its author.
func (t *Token) Author() string {
	if !t.proven {
		return ""
	}
	return t.issuer
}

// NodeID is the id under which the graph knows the token: its own. One that nobody is
// proven to have issued stands apart, or anybody could use up the ids of others' tokens.
func (t *Token) NodeID() string {
	if t.proven {
		return t.id
	}
	return UnprovenID(t.id)
}

// Lineage is what was found out about the ancestors.
func (t *Token) Lineage() Lineage { return t.lineage }

// Digest is the SHA-256 of the token's bytes: it tells a retry, which has the same
// bytes, from another use of the same id.
func (t *Token) Digest() [sha256.Size]byte { return sha256.Sum256([]byte(t.raw)) }

// CheckInput holds that inp_hash, where the token has one, is the hash of the request's
// body as it was received.
func (t *Token) CheckInput(body Hash) error {
	if !t.input.IsZero() && t.input != body {
		return refuse(CodeInputHash)
	}
	return nil
}

// Unverified is what a token says of itself. Anybody can have written it.
type Unverified struct {
	content
	level     Level
	keyID     string
	algorithm string
}

// Level is the form that the token has: L1 without a signature, L2 with one, be it
// valid or not.
func (u *Unverified) Level() Level { return u.level }

// KeyID is the header parameter kid.
func (u *Unverified) KeyID() string { return u.keyID }

// Algorithm is the header parameter alg, whatever it says.
func (u *Unverified) Algorithm() string { return u.algorithm }

// ParseInsecure reads a token without verifying anything: no signature, no issuer, no
// time. It is for showing a token to a person. Never decide anything by it.
func ParseInsecure(raw string) (*Unverified, error) {
	if len(raw) > MaxToken {
		return nil, refuse(CodeTooLarge)
	}
	var claims claimSet
	parts, signed := split(raw)
	if !signed {
		payload, ok := decode64(raw)
		if !ok {
			return nil, refuse(CodeMalformed)
		}
		if err := claims.decode(string(payload), Draft00); err != nil {
			return nil, err
		}
		return &Unverified{content: claims.content, level: L1}, nil
	}
	head, ok := parseHeader(parts.header)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	payload, ok := decode64(parts.payload)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	head.spelling, _ = spellingOf(head.typ)
	if err := claims.decode(string(payload), head.spelling); err != nil {
		return nil, err
	}
	return &Unverified{content: claims.content, level: L2, keyID: head.kid, algorithm: head.alg}, nil
}
