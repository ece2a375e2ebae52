// Package ect makes and verifies Execution Context Tokens: signed records of what an
// agent did. Each names the records that it follows from, so that they form a graph.
//
// A [Verifier] takes a token through the checks of the drafts in their order and returns
// a [Token], which only verifying and signing can make. [ParseInsecure] reads a token
// without verifying it. An [Issuer] signs with the keys of a [Ring], at once or, for
// tokens that nobody waits for, later: see [Draft]. A refusal is an [*Error] with a
// stable code; it reveals nothing of the token, the keys or the ledger (P3).
//
// The claims par and ext are read under their later names pred and ect_ext too. Three
// vocabularies name actions and extension members ([Vocabulary]).
//
// The verifier remembers no ids: the caller records [Token.Workflow] and [Token.NodeID]
// in the commit that the token is used for. [Token.Digest] distinguishes a retry, which has
// the same bytes, from another use of the id.
package ect

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Token is a token that was verified, or signed here.
type Token struct {
	content
	raw     string
	level   Level
	key     *Key
	proven  bool
	digest  [sha256.Size]byte
	lineage Lineage
}

// Raw is the token as received or signed.
func (t *Token) Raw() string { return t.raw }

// Level is the assurance of this token itself; Lineage has that of its ancestors.
func (t *Token) Level() Level { return t.level }

// Key is the key that the signature was verified with; nil at level L1.
func (t *Token) Key() *Key { return t.key }

// Proven reports whether the issuer is authenticated: by the signature, or at level L1
// by the transport. An unproven token shows only that it was sent.
func (t *Token) Proven() bool { return t.proven }

// Author is the issuer if that is proven, else empty. Grant rights to the author only (P3).
func (t *Token) Author() string {
	if !t.proven {
		return ""
	}
	return t.issuer
}

// NodeID is the id of the token in the graph: its own, or for an unproven token its
// UnprovenID, so that nobody can take the ids of others.
func (t *Token) NodeID() string {
	if t.proven {
		return t.id
	}
	return UnprovenID(t.id)
}

// Lineage describes the token's ancestors, as far as Verify looked them up.
func (t *Token) Lineage() Lineage { return t.lineage }

// Digest is the SHA-256 of the token's bytes.
func (t *Token) Digest() [sha256.Size]byte { return t.digest }

// CheckInput compares inp_hash, where the token has one, with the hash of the request's
// body. The error is CodeInputHash.
func (t *Token) CheckInput(body Hash) error {
	if !t.input.IsZero() && t.input != body {
		return refuse(CodeInputHash)
	}
	return nil
}

// Unverified has the claims of a token that was not verified. Anybody can have written it.
type Unverified struct {
	content
	level Level
}

// Level is the form of the token: L1 without a signature, L2 with one, valid or not.
func (u *Unverified) Level() Level { return u.level }

// ParseInsecure reads a token of at most maxToken bytes without verifying anything. Use
// it to show a token to a person, never to decide. The error is an *Error.
func ParseInsecure(raw string) (*Unverified, error) {
	if len(raw) > maxToken {
		return nil, refuse(CodeTooLarge)
	}
	parts, ok := split(raw)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	var claims claimSet
	if err := claims.decode(parts.payload); err != nil {
		return nil, err
	}
	level := L2
	if parts.unsigned {
		level = L1
	}
	return &Unverified{content: claims.content, level: level}, nil
}

// content has the claims of a token. Its methods are those of Token, Draft and
// Unverified; only these types say how far the claims can be believed.
type content struct {
	issuer            string
	audience          []string
	issuedAt, expires int64
	id, workflow      string
	action            string
	event             Event
	parents           []string
	input, output     Hash
	ext               string
	payload           string
}

// Issuer is the claim iss.
func (c *content) Issuer() string { return c.issuer }

// Audience is the claim aud, as a list.
func (c *content) Audience() []string { return slices.Clone(c.audience) }

// IssuedAt is the claim iat, in whole seconds: when the recorded action happened.
func (c *content) IssuedAt() time.Time { return seconds(c.issuedAt) }

// Expires is the claim exp, in whole seconds: until when the token is accepted from a
// caller. It stays valid as a record and as a parent.
func (c *content) Expires() time.Time { return seconds(c.expires) }

// ID is the claim jti, a UUID in lower case; it names the token and the task.
func (c *content) ID() string { return c.id }

// Workflow is the claim wid, a UUID in lower case; empty if absent.
func (c *content) Workflow() string { return c.workflow }

// Action is the claim exec_act as written.
func (c *content) Action() string { return c.action }

// Event is the meaning of the action in any vocabulary; empty for an agent's own action.
func (c *content) Event() Event { return c.event }

// Vocabulary is the one that names the action.
func (c *content) Vocabulary() Vocabulary { return vocabularyOf(c.action) }

// Parents are the ids of the tokens that this one follows from, in lower case.
func (c *content) Parents() []string { return slices.Clone(c.parents) }

// InputHash is the claim inp_hash.
func (c *content) InputHash() Hash { return c.input }

// OutputHash is the claim out_hash.
func (c *content) OutputHash() Hash { return c.output }

// Ext has the extension members.
func (c *content) Ext() Ext { return readExt(c.ext, c.event) }

// Lacks names the members that the draft of the token's vocabulary requires for this
// event and that are missing or have another type. An event that is this gateway's own
// word in that vocabulary requires none.
func (c *content) Lacks() []Member { return c.Ext().lacks(c.Vocabulary()) }

// Payload is the JSON of all claims, unknown ones included.
func (c *content) Payload() string { return c.payload }

// seconds converts a NumericDate; an absent claim is the zero time.
func seconds(v int64) time.Time {
	if v == 0 {
		return time.Time{}
	}
	return time.Unix(v, 0).UTC()
}

// Level is the assurance that a token gives. Higher is more.
type Level uint8

// The levels of the draft.
const (
	// L1 is unsigned JSON.
	L1 Level = iota + 1
	// L2 is a signed token.
	L2
	// L3 is a signed token in an audit ledger.
	L3
)

func (l Level) String() string {
	if l < L1 || l > L3 {
		return "none"
	}
	return "L" + strconv.Itoa(int(l))
}

const (
	// TokenType is the header parameter typ of the tokens that are issued. exec+jwt, the name of
	// later drafts, is read too.
	TokenType  = "wimse-exec+jwt"
	laterType  = "exec+jwt"
	typePrefix = "application/"
	// MediaType is the type of a body that consists of one token.
	MediaType = typePrefix + TokenType
)

// isTokenType reads typ in any case, with or without "application/" (RFC 7515, 4.1.9).
func isTokenType(typ string) bool {
	if len(typ) > len(typePrefix) && strings.EqualFold(typ[:len(typePrefix)], typePrefix) {
		typ = typ[len(typePrefix):]
	}
	return strings.EqualFold(typ, TokenType) || strings.EqualFold(typ, laterType)
}

// Hash is a SHA-256 as inp_hash and out_hash carry it. The zero Hash is an absent claim.
type Hash struct {
	sum [sha256.Size]byte
	set bool
}

// Sum hashes octets.
func Sum(octets []byte) Hash { return Hash{sha256.Sum256(octets), true} }

// HashOf wraps a SHA-256 that was computed elsewhere.
func HashOf(sum [sha256.Size]byte) Hash { return Hash{sum, true} }

// parseHash reads a SHA-256: 43 characters of base64url without padding, the form that is
// written. The figures of the drafts prefix the algorithm and leave open what follows, so
// it also reads 64 hexadecimal digits, the prefixes "sha256:" and "sha256-", and behind
// the latter padded base64 as in Subresource Integrity (ADR 0054).
func parseHash(v string) (Hash, bool) {
	bare, named := strings.CutPrefix(v, "sha256:")
	integrity := false
	if !named {
		bare, integrity = strings.CutPrefix(v, "sha256-")
	}
	var sum []byte
	var ok bool
	switch {
	case len(bare) == 43:
		sum, ok = decode64(bare)
	case len(bare) == 64:
		decoded, err := hex.DecodeString(bare)
		sum, ok = decoded, err == nil
	case len(bare) == 44 && integrity:
		decoded, err := base64.StdEncoding.Strict().DecodeString(bare)
		sum, ok = decoded, err == nil
	}
	h := Hash{set: true}
	if !ok || len(sum) != len(h.sum) {
		return Hash{}, false
	}
	copy(h.sum[:], sum)
	return h, true
}

// Bytes are the 32 bytes of the hash; zeros for the zero Hash.
func (h Hash) Bytes() [sha256.Size]byte { return h.sum }

// IsZero reports whether there is no hash.
func (h Hash) IsZero() bool { return !h.set }

// String is the form of the claims; empty for the zero Hash.
func (h Hash) String() string {
	if !h.set {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString(h.sum[:])
}

// Prefixed is String with "sha256:" before it, the form of cascade.state_hash_before and
// _after in the figures.
func (h Hash) Prefixed() string {
	if !h.set {
		return ""
	}
	return "sha256:" + h.String()
}

// UnprovenID is the NodeID of an unproven token with this id: a UUID of version 8 that no
// other id leads to.
func UnprovenID(id string) string {
	sum := sha256.Sum256([]byte("unproven ECT\x00" + id))
	b := uuid.UUID(sum[:16])
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80
	return b.String()
}

// canonicalUUID returns v in lower case, the form in which ids are compared. RFC 9562 assigns the nil and the max
// UUID to nobody.
func canonicalUUID(v string) (string, bool) {
	if len(v) != 36 { // the parser takes other forms too
		return "", false
	}
	id, err := uuid.Parse(v)
	return strings.ToLower(v), err == nil && id != uuid.Nil && id != uuid.Max
}

// strict64 refuses bits that no octet uses: a signature must not have two spellings.
var strict64 = base64.RawURLEncoding.Strict()

// decode64 reads base64url without padding. The standard decoder skips line breaks.
func decode64(v string) ([]byte, bool) {
	if strings.ContainsAny(v, "\r\n") {
		return nil, false
	}
	b, err := strict64.DecodeString(v)
	return b, err == nil
}
