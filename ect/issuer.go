package ect

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

const (
	// DefaultLife is how long a token is accepted unless its claims say otherwise.
	DefaultLife = 10 * time.Minute
	// MaxLife is the longest life that is issued.
	MaxLife = 24 * time.Hour
)

// Claims are the content of a token to be issued. Audience and Action are required.
type Claims struct {
	// Audience is everybody who will verify the token, 1 to 100 names.
	Audience []string
	// ID is the jti; empty for a fresh one.
	ID string
	// Workflow is the wid.
	Workflow string
	// Action is the exec_act. An event is given by its name in the cascade vocabulary, or
	// by the second name that Vocabulary has for it (aerr:rollback_escalated).
	Action string
	// Parents are the ids of the tokens that this one follows from, at most MaxParents.
	Parents []string
	// Input and Output are the claims inp_hash and out_hash.
	Input, Output Hash
	// Ext has the extension members.
	Ext *ExtBuilder
	// Life is the time between iat and exp, one second to MaxLife; DefaultLife if zero.
	Life time.Duration
	// Vocabulary names event and members.
	Vocabulary Vocabulary
}

// Issuer makes tokens. It is safe for concurrent use.
type Issuer struct {
	identity string // the iss of all tokens
	ring     *Ring
}

// NewIssuer returns an issuer of tokens whose iss is identity, signed with the keys of ring.
func NewIssuer(identity string, ring *Ring) (*Issuer, error) {
	if !validIdentity(identity) {
		return nil, fmt.Errorf("ect: %q is not an identity; use a URI like spiffe://example.com/gateway", identity)
	}
	if ring == nil {
		return nil, errors.New("ect: an issuer needs a ring of keys")
	}
	return &Issuer{identity, ring}, nil
}

// Identity is the iss of all tokens.
func (i *Issuer) Identity() string { return i.identity }

// Draft is a token without its signature. Its id is settled, so that others can name it
// as a parent, and its payload can be stored until somebody signs it.
type Draft struct{ content }

// Draft makes the claims of a token with now as its iat. The error is an *Error, or says
// what is wrong with the life or the extensions.
func (i *Issuer) Draft(now time.Time, claims Claims) (*Draft, error) {
	life := cmp.Or(claims.Life, DefaultLife)
	if life < time.Second || life > MaxLife {
		return nil, fmt.Errorf("ect: the life of tokens is between a second and %s", MaxLife)
	}
	c := content{
		issuer: i.identity, audience: claims.Audience,
		issuedAt: now.Unix(), expires: now.Unix() + int64(life/time.Second),
		id: claims.ID, workflow: claims.Workflow, action: claims.Action,
		parents: append([]string{}, claims.Parents...), input: claims.Input, output: claims.Output,
	}
	if c.id == "" {
		c.id = uuid.NewString()
	}
	if len(c.audience) == 0 || len(c.audience) > maxAudience || slices.Contains(c.audience, "") {
		return nil, refuse(CodeAudience)
	}
	if event, ok := ParseEvent(claims.Action); ok {
		c.event, c.action = event, claims.Vocabulary.action(claims.Action, event)
	}
	for n, id := range c.parents {
		if canonical, ok := canonicalUUID(id); ok {
			c.parents[n] = canonical
		}
	}
	set := claimSet{content: c, hasAction: true, hasWorkflow: c.workflow != ""}
	if err := set.check(false); err != nil {
		return nil, err
	}
	d := &Draft{content: set.content}
	if err := d.encode(claims.Ext, claims.Vocabulary); err != nil {
		return nil, err
	}
	return d, nil
}

// encode writes the payload: the claims in the order of the draft's figure.
func (d *Draft) encode(ext *ExtBuilder, v Vocabulary) error {
	b := make([]byte, 0, 1024)
	b = jsonx.AppendText(append(b, `{"iss":`...), d.issuer)
	b = append(b, `,"aud":`...)
	if len(d.audience) == 1 {
		b = jsonx.AppendText(b, d.audience[0])
	} else {
		b = jsonx.AppendTexts(b, d.audience)
	}
	b = strconv.AppendInt(append(b, `,"iat":`...), d.issuedAt, 10)
	b = strconv.AppendInt(append(b, `,"exp":`...), d.expires, 10)
	b = jsonx.AppendText(append(b, `,"jti":`...), d.id)
	if d.workflow != "" {
		b = jsonx.AppendText(append(b, `,"wid":`...), d.workflow)
	}
	b = jsonx.AppendText(append(b, `,"exec_act":`...), d.action)
	b = jsonx.AppendTexts(append(b, `,"par":`...), d.parents)
	if !d.input.IsZero() {
		b = jsonx.AppendText(append(b, `,"inp_hash":`...), d.input.String())
	}
	if !d.output.IsZero() {
		b = jsonx.AppendText(append(b, `,"out_hash":`...), d.output.String())
	}
	from := len(b)
	if ext != nil && len(ext.members) > 0 {
		b = append(b, `,"ext":`...)
		from = len(b)
		var err error
		if b, err = ext.encode(b, v); err != nil {
			return err
		}
	}
	d.payload = string(append(b, '}'))
	d.ext = d.payload[from:len(b)]
	return nil
}

// ParseDraft reads the stored payload of a Draft. The error is an *Error.
func ParseDraft(payload string) (*Draft, error) {
	var set claimSet
	if err := set.decode(payload); err != nil {
		return nil, err
	}
	if err := set.check(false); err != nil {
		return nil, err
	}
	return &Draft{content: set.content}, nil
}

// Sign signs a draft with the current key. The error is ErrUnavailable.
func (i *Issuer) Sign(d *Draft) (*Token, error) {
	signer := i.ring.keys.Load().signer
	enc := base64.RawURLEncoding
	b := enc.AppendEncode([]byte(signer.head), []byte(d.payload))
	signature, err := signer.sign(b)
	if err != nil {
		return nil, err
	}
	b = enc.AppendEncode(append(b, '.'), signature)
	return &Token{content: d.content, raw: string(b), level: L2, key: signer.key, proven: true, digest: sha256.Sum256(b)}, nil
}

// Header is the protected header of the tokens that the current key signs, in JSON, and kid
// the name of that key. Whoever keeps it with the payload of a Draft can make the token
// later: see Signature. Do not change the bytes.
func (r *Ring) Header() (header []byte, kid string) {
	current := r.keys.Load().signer
	return current.header, current.key.id
}

// Signature signs a payload that was kept with a header, under the key that the header
// names: the same bytes each time, and those that Sign would have made. The error is
// ErrUnavailable if the ring does not hold the private part of that key.
func (r *Ring) Signature(header, payload []byte) ([]byte, error) {
	for _, s := range r.keys.Load().signers {
		if bytes.Equal(s.header, header) {
			return s.sign(base64.RawURLEncoding.AppendEncode([]byte(s.head), payload))
		}
	}
	return nil, fmt.Errorf("%w: the private part of the key %.80q is gone", ErrUnavailable, HeaderKeyID(header))
}

// Verifies reports whether a signature holds that was kept with a header and a payload, under
// the key of the ring that the header names, replaced and revoked ones included; known is
// false if the ring has no such key.
func (r *Ring) Verifies(header, payload, signature []byte) (holds, known bool) {
	enc := base64.RawURLEncoding
	signed := append(enc.AppendEncode(nil, header), '.')
	signed = enc.AppendEncode(signed, payload)
	for _, k := range r.find(HeaderKeyID(header)) {
		known = true
		if k.algorithm.verify(k.public, signed, signature) {
			return true, true
		}
	}
	return false, known
}

// HeaderKeyID is the kid of a protected header in JSON; empty if it has none.
func HeaderKeyID(header []byte) string {
	h, _ := parseHeader(header) // what is no header names no key
	return h.kid
}

// Issue drafts and signs. The errors are those of Draft and Sign.
func (i *Issuer) Issue(now time.Time, claims Claims) (*Token, error) {
	d, err := i.Draft(now, claims)
	if err != nil {
		return nil, err
	}
	return i.Sign(d)
}

// Ring holds the signing keys. The newest signs; replaced ones only verify, and lose their
// private part once all is signed that was recorded under them. It is safe for concurrent use, also while it is rotated.
type Ring struct {
	keys     atomic.Pointer[ringKeys]
	changing sync.Mutex // held while keys are replaced
	peers    atomic.Pointer[peerKeys]
}

// ringKeys is the immutable state of a Ring.
type ringKeys struct {
	all    []ringKey // the signing one is last
	byID   map[string][]*Key
	signer *signer

	signers []*signer // the keys that have their private part, also replaced ones
}

// ringKey is a key with what only its owner knows.
type ringKey struct {
	Key
	private crypto.Signer // nil once replaced
	created time.Time
}

// signer is the current key with the parts of a token that do not depend on its claims.
type signer struct {
	key     *Key
	private crypto.Signer
	head    string // the protected header, encoded, with the dot
	header  []byte // the same in JSON
}

// sign is the signature of a header and payload, encoded. The error is ErrUnavailable.
func (s *signer) sign(encoded []byte) ([]byte, error) {
	signature, err := s.key.algorithm.sign(s.private, encoded)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return signature, nil
}

// GenerateRing makes a ring with one fresh key. The error says that the algorithm is unknown.
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

// parseRing reads the text of a key file: a JSON Web Key, a set of them, or PEM. The last
// key with a private part signs.
func parseRing(text []byte) (*Ring, error) {
	keys, err := privateKeys(text)
	if err != nil {
		return nil, err
	}
	return newRing(keys)
}

func newRing(keys []ringKey) (*Ring, error) {
	next, err := newRingKeys(keys)
	if err != nil {
		return nil, err
	}
	r := &Ring{}
	r.keys.Store(next)
	return r, nil
}

// newRingKeys puts the signing key last.
func newRingKeys(keys []ringKey) (*ringKeys, error) {
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
	for i := range all {
		k := &all[i]
		if k.private == nil || k.revoked {
			continue
		}
		s := &signer{key: &k.Key, private: k.private}
		header := append([]byte(`{"alg":"`), k.algorithm.String()...)
		header = append(header, `","typ":"`+TokenType+`","kid":`...)
		s.header = append(jsonx.AppendText(header, k.id), '}')
		s.head = base64.RawURLEncoding.EncodeToString(s.header) + "."
		next.signers = append(next.signers, s)
	}
	next.signer = next.signers[len(next.signers)-1]
	return next, nil
}

// RingKey describes a key of a ring without revealing it.
type RingKey struct {
	// ID is its name, the header parameter kid.
	ID string
	// Algorithm is what it signs with.
	Algorithm Algorithm
	// Created is when it was made; zero if unknown.
	Created time.Time
	// Until is when it leaves the published set; zero for the signing key.
	Until time.Time
	// Signs marks the signing key.
	Signs bool
	// Revoked says that none of its signatures count any more.
	Revoked bool
	// Private says that its private part is there: see Signature.
	Private bool
}

// List describes the keys of the ring, the signing one last.
func (r *Ring) List() []RingKey {
	keys := r.keys.Load()
	list := make([]RingKey, len(keys.all))
	for i := range keys.all {
		k := &keys.all[i]
		list[i] = RingKey{k.id, k.algorithm, k.created, k.notAfter, &k.Key == keys.signer.key, k.revoked, k.private != nil}
	}
	return list
}

// PublicSet is the JSON Web Key Set for verifiers: the signing key, and replaced ones
// until their last token has expired, each with owner as "sub" and the former names that
// it has signed under, and so those of SetPeers. At the zero time it has all keys but the revoked,
// for records.
func (r *Ring) PublicSet(now time.Time, owner string, former ...Former) ([]byte, error) {
	var published []ringKey
	own := r.keys.Load()
	for _, k := range slices.Concat(own.all, r.peers.Load().without(own)) {
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

// Source finds the ring's own keys, replaced ones included while the file holds them.
// They also speak for the former names that they have signed under.
func (r *Ring) Source(owner Owner, former ...Former) Source { return ringSource{r, owner, former} }

type ringSource struct {
	ring   *Ring
	owner  Owner
	former []Former
}

// Keys implements Source. The error says that a peer's keys could not be asked for.
func (s ringSource) Keys(ctx context.Context, kid string) ([]*Key, error) {
	if keys, all := s.keysAtHand(kid); all {
		return keys, nil
	}
	if err := s.ring.peers.Load().ask(ctx); err != nil {
		return nil, fmt.Errorf("%w: the keys of other nodes: %w", ErrUnavailable, err)
	}
	keys, _ := s.keysAtHand(kid)
	return keys, nil
}

// keysAtHand implements slowSource.
func (s ringSource) keysAtHand(kid string) (keys []*Key, all bool) {
	for _, found := range s.ring.find(kid) {
		k, err := found.withFormer(s.former)
		if err != nil {
			continue // NewIssuer and RecordName take no such name
		}
		k.owner = s.owner
		keys = append(keys, &k)
	}
	p := s.ring.peers.Load()
	return keys, len(keys) > 0 || p == nil || p.ask == nil
}

// Peer has the public keys of another node of a fleet, which signs under the same names.
type Peer struct {
	// Keys are those that Publish gave there.
	Keys []byte
	// Until is when none of them is accepted for new tokens any more; zero while the node is there.
	Until time.Time
}

// peerKeys is what a Ring knows of the other nodes. Nil is nothing.
type peerKeys struct {
	all  []ringKey
	byID map[string][]*Key
	ask  func(context.Context) error // calls SetPeers with what is known now; may be nil
}

// without are the keys that a ring does not have itself.
func (p *peerKeys) without(own *ringKeys) []ringKey {
	if p == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(p.all), func(k ringKey) bool { return own.byID[k.id] != nil })
}

// Publish is the text of all public keys of the ring, replaced and revoked ones too, for the rings of
// other nodes: see SetPeers.
func (r *Ring) Publish() ([]byte, error) { return marshalKeys(r.keys.Load().all, "", false) }

// SetPeers sets the keys of the other nodes of a fleet, which verify what those have signed. They sign
// nothing here. ask, if not nil, is called for a key that nobody is known to have, before its token is
// refused; it calls SetPeers with what is known by then. The error says which set cannot be read, and then
// nothing has changed.
func (r *Ring) SetPeers(peers []Peer, ask func(context.Context) error) error {
	next := &peerKeys{byID: make(map[string][]*Key), ask: ask}
	for i := range peers {
		keys, err := privateKeys(peers[i].Keys)
		if err != nil {
			return fmt.Errorf("ect: the keys of another node: %w", err)
		}
		for _, k := range keys {
			if until := peers[i].Until; !until.IsZero() && (k.notAfter.IsZero() || k.notAfter.After(until)) {
				k.notAfter = until
			}
			k.private = nil
			same := slices.IndexFunc(next.all, func(other ringKey) bool { return other.id == k.id && samePublic(&other.Key, &k.Key) })
			if same < 0 {
				next.all = append(next.all, k)
			} else if k.revoked { // two nodes share it, and one knows more
				next.all[same].revoked = true
			}
		}
	}
	for i := range next.all {
		k := &next.all[i].Key
		if len(next.byID[k.id]) < maxSameName {
			next.byID[k.id] = append(next.byID[k.id], k)
		}
	}
	r.peers.Store(next)
	return nil
}

// find finds a key of the ring, or those of other nodes with that name.
func (r *Ring) find(kid string) []*Key {
	if own := r.keys.Load().byID[kid]; own != nil {
		return own
	}
	if p := r.peers.Load(); p != nil {
		return p.byID[kid]
	}
	return nil
}

// Known reports whether a key of that name is one of the ring or of another node, and whether its
// signatures count no more.
func (r *Ring) Known(kid string) (known, revoked bool) {
	found := r.find(kid)
	return len(found) > 0, slices.ContainsFunc(found, func(k *Key) bool { return k.revoked })
}

// OfPeer reports whether another node has a key of that name.
func (r *Ring) OfPeer(kid string) bool {
	p := r.peers.Load()
	return p != nil && len(p.byID[kid]) > 0
}

// rotated returns the keys with a fresh one that signs. Those before it verify new tokens
// until keep has passed at the latest, and records without end. Those named in unsigned keep
// their private part, unless keep is 0.
func (k *ringKeys) rotated(alg Algorithm, now time.Time, keep time.Duration, unsigned []string) (*ringKeys, error) {
	fresh, err := generateKey(alg)
	if err != nil {
		return nil, err
	}
	until := now.Add(keep).UTC().Truncate(time.Second).Add(time.Second)
	next := make([]ringKey, 0, len(k.all)+1)
	for _, old := range k.all {
		if keep == 0 || !slices.Contains(unsigned, old.id) {
			old.private = nil
		}
		if old.notAfter.IsZero() || old.notAfter.After(until) {
			old.notAfter = until
		}
		next = append(next, old)
	}
	return newRingKeys(append(next, fresh))
}

// Former is an earlier name of a ring's issuer. Tokens under it stay those of the issuer.
type Former struct {
	// Name is the issuer of those tokens.
	Name string `json:"name"`
	// Keys are the names of the keys that have signed under it; empty for all of the ring.
	Keys []string `json:"keys"`
}

func (f *Former) names(kid string) bool { return len(f.Keys) == 0 || slices.Contains(f.Keys, kid) }

// Signed reports whether a token was issued under one of the former names by a key of the
// ring that has signed under it.
func (r *Ring) Signed(t *Token, former []Former) bool {
	key := t.Key()
	if key == nil {
		return false
	}
	return slices.ContainsFunc(former, func(f Former) bool {
		return f.Name == t.Issuer() && f.names(key.id) &&
			slices.ContainsFunc(r.find(key.id), func(own *Key) bool { return samePublic(own, key) })
	})
}

// ErrBusy says that another process is rotating the same key file.
var ErrBusy = errors.New("ect: another rotation of the key file is under way; try again")

// LoadRing reads a ring from a file. A missing file is an fs.ErrNotExist.
func LoadRing(path string) (*Ring, error) { return durable.Load(path, parseRing) }

// CreateRing makes a ring with a fresh key and writes it to path with mode 0600,
// atomically. An existing file is an fs.ErrExist.
func CreateRing(path string, alg Algorithm) (*Ring, error) {
	r, err := GenerateRing(alg)
	if err != nil {
		return nil, err
	}
	text, err := r.MarshalText()
	if err != nil {
		return nil, err
	}
	if err := durable.Create(path, text); err != nil {
		return nil, fmt.Errorf("key file %s: %w", path, err)
	}
	return r, nil
}

// Rotate adds a fresh key to the file at path, which holds this ring, and then signs with
// it. The key before loses its private part and stays published for keep, the longest
// life of its tokens; so do keys that were replaced earlier, at most. Keys named in unsigned
// keep their private part until Retire, for what was recorded under them without a
// signature; with keep 0, after a theft, they do not. The file is replaced atomically and
// durable before the new key signs. kid names the new key. The error is ErrBusy, or that of
// reading or writing the file.
func (r *Ring) Rotate(path string, alg Algorithm, now time.Time, keep time.Duration, unsigned ...string) (kid string, err error) {
	err = r.edit(path, func(found *ringKeys) (*ringKeys, error) { return found.rotated(alg, now, keep, unsigned) })
	if err != nil {
		return "", err
	}
	return r.keys.Load().signer.key.id, nil
}

// Retire removes the private parts of the named keys from the file at path, which holds this
// ring. The key that signs keeps its own. The errors are those of Rotate.
func (r *Ring) Retire(path string, kids ...string) error {
	return r.edit(path, func(found *ringKeys) (*ringKeys, error) {
		keys := slices.Clone(found.all)
		for i := range keys[:len(keys)-1] { // the last one signs
			if slices.Contains(kids, keys[i].id) {
				keys[i].private = nil
			}
		}
		return newRingKeys(keys)
	})
}

// edit changes the keys in the file at path and takes them over.
func (r *Ring) edit(path string, change func(found *ringKeys) (*ringKeys, error)) error {
	r.changing.Lock()
	defer r.changing.Unlock()
	var next *ringKeys
	err := durable.Edit(path, func(was []byte) ([]byte, error) {
		found, err := parseRing(was)
		if err != nil {
			return nil, err
		}
		if next, err = change(found.keys.Load()); err != nil {
			return nil, err
		}
		return marshalKeys(next.all, "", true)
	})
	if errors.Is(err, durable.ErrBusy) {
		err = ErrBusy
	}
	if err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	r.keys.Store(next)
	return nil
}

// Reload takes over the keys of another ring, read anew from the same file.
func (r *Ring) Reload(other *Ring) {
	r.changing.Lock()
	defer r.changing.Unlock()
	r.keys.Store(other.keys.Load())
}
