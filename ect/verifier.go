package ect

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"
)

// The limits of a Verifier.
const (
	// maxToken is the size of a token, in bytes.
	maxToken = 64 << 10
	// MaxParents is how many parents a token may have.
	MaxParents = 100
	// MaxAncestors is how many ancestors are walked over.
	MaxAncestors = 10_000
	// Skew is by how much clocks may differ.
	Skew = 30 * time.Second
	// MaxAge is how far back iat may lie.
	MaxAge = 900 * time.Second
)

// Policy is what a Verifier accepts. Audience and Sources are required; the zero value of
// the rest stands for the defaults of the drafts.
type Policy struct {
	// Audience are the verifier's own names, one of which aud must have.
	Audience []string
	// Former are earlier names of the verifier. They count in the aud of tokens that it
	// issued itself, under any of its names and with a key of one in Audience.
	Former []string
	// Sources are searched for keys in this order. Those that may have to wait for a
	// server are asked last, and all at once.
	Sources []Source
	// Algorithms are allowed; only ES256 if empty.
	Algorithms []Algorithm
	// MinLevel is the lowest level that passes; L2 if zero. L3 needs CallerAppends.
	MinLevel Level
	// AnyID accepts ids that are not UUIDs.
	AnyID bool
	// AllowPartial accepts tokens whose parents cannot be found; see Lineage.Missing.
	AllowPartial bool
	// CrossWorkflow accepts parents of another workflow.
	CrossWorkflow bool
	// CallerAppends says that the caller records the tokens in the ledger, in the commit
	// that they are used for and before anybody relies on them. They stay L2 here.
	CallerAppends bool
}

// Verifier verifies tokens. It is safe for concurrent use.
type Verifier struct {
	p Policy
}

// NewVerifier checks the policy and fills in its defaults.
func NewVerifier(p Policy) (*Verifier, error) {
	p.MinLevel = cmp.Or(p.MinLevel, L2)
	if len(p.Audience) == 0 || slices.Contains(p.Audience, "") {
		return nil, errors.New("ect: a verifier needs a name, which tokens must have in their aud")
	}
	if len(p.Sources) == 0 && p.MinLevel > L1 {
		return nil, errors.New("ect: a verifier needs a source of keys")
	}
	if p.MinLevel > L3 {
		return nil, fmt.Errorf("ect: there is no level %d", p.MinLevel)
	}
	if p.MinLevel == L3 && !p.CallerAppends {
		return nil, errors.New("ect: level L3 needs a caller that records the tokens in a ledger")
	}
	if len(p.Algorithms) == 0 {
		p.Algorithms = []Algorithm{ES256}
	}
	for _, a := range p.Algorithms {
		if !slices.Contains(Algorithms(), a) {
			return nil, fmt.Errorf("ect: there is no signature algorithm %d", a)
		}
	}
	return &Verifier{p}, nil
}

// Presentation is how a token is presented.
type Presentation struct {
	// Now is the verifier's time.
	Now time.Time
	// Peer is the authenticated identity at the other end of the connection; empty if
	// there is none. It alone proves the iss of a token of level L1.
	Peer string
	// DAG returns the graph of recorded tokens, for the first token of the request, whose
	// own claims were checked. If nil, parents are not looked up, and Lineage says so.
	DAG func(first *Token) DAG
	// Records says that another agent has recorded the tokens, and shows them: they may be of any age,
	// and under replaced keys.
	Records bool
}

// Verify takes a token through the steps of the drafts in their order: 1 form, 2 typ, 3
// alg and crit, 4 kid, 5 signature, 6 life of the key, 7 iss, 8 aud, 9 exp, 10 iat, 11
// required claims, 12 their forms, 13 unused id, 14 parents. The first that fails is the
// *Error; ErrUnavailable says nothing about the token.
func (v *Verifier) Verify(ctx context.Context, raw string, p Presentation) (*Token, error) {
	tokens, err := v.VerifyAll(ctx, []string{raw}, p)
	if err != nil {
		return nil, err
	}
	return tokens[0], nil
}

// VerifyAll verifies the tokens of one request, all or none. They may be each other's
// parents. Equal tokens count once. The errors are those of Verify.
func (v *Verifier) VerifyAll(ctx context.Context, raws []string, p Presentation) ([]*Token, error) {
	presented := &p
	if p.Records {
		presented = nil
	}
	if len(raws) == 0 {
		return nil, refuse(CodeMissing)
	}
	tokens := make([]*Token, 0, len(raws))
	for i, raw := range raws {
		if slices.Contains(raws[:i], raw) {
			continue
		}
		t, err := v.open(ctx, raw, presented)
		if err != nil {
			return nil, err
		}
		for _, other := range tokens {
			if idsConflict(t.id, t.workflow, other.id, other.workflow) {
				return nil, refuse(CodeReplayed)
			}
		}
		tokens = append(tokens, t)
	}
	if p.DAG != nil {
		if err := v.walk(ctx, tokens, p.DAG(tokens[0])); err != nil {
			return nil, err
		}
	}
	return tokens, nil
}

// VerifyStored verifies a recorded token: form, signature, issuer and audience, also
// under replaced keys, but neither its age nor its parents. One of level L1 is unproven.
// The errors are those of Verify.
func (v *Verifier) VerifyStored(ctx context.Context, raw string) (*Token, error) {
	return v.open(ctx, raw, nil)
}

// VerifyAgain is VerifyStored for a recorded token that the authenticated peer presents
// once more.
func (v *Verifier) VerifyAgain(ctx context.Context, raw, peer string) (*Token, error) {
	t, err := v.open(ctx, raw, nil)
	if err == nil && t.level == L1 {
		err = t.checkPeer(peer)
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// checkPeer compares the issuer of an unsigned token with the authenticated peer.
func (t *Token) checkPeer(peer string) error {
	if t.issuer != "" && peer != "" && t.issuer != peer {
		return refuse(CodeIssuer)
	}
	t.proven = t.issuer != "" && t.issuer == peer
	return nil
}

// open takes the steps that need only the token and the keys. p is nil for a record.
func (v *Verifier) open(ctx context.Context, raw string, p *Presentation) (*Token, error) {
	if len(raw) > maxToken {
		return nil, refuse(CodeTooLarge)
	}
	parts, ok := split(raw)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	if parts.unsigned {
		return v.openUnsigned(raw, parts.payload, p)
	}
	head := parts.head
	signature, ok := decode64(parts.signature)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	alg, err := head.check(v.p.Algorithms)
	if err != nil {
		return nil, err
	}
	text := []byte(raw) // of which the first part is signed
	o := keySearch{
		alg: alg, kid: head.kid, text: text[:len(parts.signed):len(parts.signed)], signature: signature,
		payload: parts.payload, code: CodeKeyID, stored: p == nil,
	}
	if p != nil {
		o.now = p.Now
	}
	if err := v.findKey(ctx, &o); err != nil {
		return nil, err
	}
	if err := v.checkAudience(&o.claims); err != nil && !v.issuedToFormerName(&o) {
		return nil, err
	}
	if err := v.checkRest(&o.claims, p); err != nil {
		return nil, err
	}
	return &Token{content: o.claims.content, raw: raw, level: L2, key: o.key, proven: true, digest: sha256.Sum256(text)}, nil
}

// openUnsigned reads level L1: JSON in base64url. A token with dots is never read
// so, whatever is wrong with it.
func (v *Verifier) openUnsigned(raw, payload string, p *Presentation) (*Token, error) {
	var claims claimSet
	err := claims.read(payload)
	var refused *Error
	if v.p.MinLevel > L1 && !(errors.As(err, &refused) && refused.Code == CodeMalformed) {
		return nil, refuse(CodeLevel)
	}
	if err != nil {
		return nil, err
	}
	t := &Token{content: claims.content, raw: raw, level: L1, digest: sha256.Sum256([]byte(raw))}
	if claims.issuer != "" && !validIdentity(claims.issuer) {
		return nil, refuse(CodeIssuer)
	}
	if p != nil {
		if err := t.checkPeer(p.Peer); err != nil {
			return nil, err
		}
	}
	if claims.isInvalid(CodeIssuer) {
		return nil, refuse(CodeIssuer)
	}
	if len(claims.audience) > 0 || claims.isInvalid(CodeAudience) {
		if err := v.checkAudience(&claims); err != nil {
			return nil, err
		}
	}
	if err := v.checkRest(&claims, p); err != nil {
		return nil, err
	}
	return t, nil
}

func (v *Verifier) checkAudience(c *claimSet) error {
	if slices.ContainsFunc(c.audience, func(name string) bool { return slices.Contains(v.p.Audience, name) }) {
		return nil
	}
	return refuse(CodeAudience)
}

// OnlyFor reports whether a token is for nobody but the verifier: its aud has no other names but
// those of the verifier, and of who has issued it.
func (v *Verifier) OnlyFor(t *Token) bool {
	return len(t.audience) > 0 && !slices.ContainsFunc(t.audience, func(name string) bool {
		return name != t.issuer && !slices.Contains(v.p.Audience, name) && !slices.Contains(v.p.Former, name)
	})
}

// issuedToFormerName reports whether the verifier issued the token itself, to one of its
// earlier names.
func (v *Verifier) issuedToFormerName(o *keySearch) bool {
	own := func(name string) bool { return slices.Contains(v.p.Former, name) }
	return slices.ContainsFunc(o.claims.audience, own) &&
		(own(o.claims.issuer) || slices.Contains(v.p.Audience, o.claims.issuer)) &&
		slices.ContainsFunc(v.p.Audience, o.key.permits)
}

// checkRest takes steps 9 to 12.
func (v *Verifier) checkRest(c *claimSet, p *Presentation) error {
	if err := checkTimes(c, p); err != nil {
		return err
	}
	return c.check(v.p.AnyID)
}

// checkTimes takes steps 9 and 10. Records may be of any age, and of an earlier version
// that accepted an exp before iat.
func checkTimes(c *claimSet, p *Presentation) error {
	issued, expires := seconds(c.issuedAt), seconds(c.expires)
	switch {
	case c.expires == 0:
		return refuse(CodeExpires)
	case p != nil && p.Now.After(expires.Add(Skew)):
		return refuse(CodeExpired)
	case c.issuedAt == 0:
		return refuse(CodeIssuedAt)
	case p == nil:
		return nil
	case c.expires < c.issuedAt:
		return refuse(CodeExpires)
	case p.Now.Sub(issued) > MaxAge:
		return refuse(CodeTooOld)
	case issued.After(p.Now.Add(Skew)):
		return refuse(CodeNotYet)
	}
	return nil
}

// keySearch is a token on its way to the key that it was signed with.
type keySearch struct {
	alg             Algorithm
	kid             string
	text, signature []byte
	payload         string
	claims          claimSet
	decoded         bool
	key             *Key
	code            Code // the refusal of the key that came furthest
	stored          bool // the token is a record; else it is presented now
	now             time.Time
}

// findKey finds the key that fits: several owners may use one name. Keys at hand come
// first; no server is waited for where the signature holds under one of them.
func (v *Verifier) findKey(ctx context.Context, o *keySearch) error {
	var lacking []Source
	var failed error
	for _, source := range v.p.Sources {
		var keys []*Key
		if remote, ok := source.(slowSource); ok {
			var all bool
			if keys, all = remote.keysAtHand(o.kid); !all {
				lacking = append(lacking, source)
			}
		} else {
			var err error
			if keys, err = source.Keys(ctx, o.kid); err != nil {
				failed = unavailable(err)
			}
		}
		if fits, err := o.tryAll(keys); fits || err != nil {
			return err
		}
		if history, ok := source.(keyHistory); ok && o.stored {
			if fits, err := o.tryAll(history.replaced(o.kid)); fits || err != nil {
				return err
			}
		}
	}
	if !o.signed() && len(lacking) > 0 {
		fits, err := o.await(ctx, lacking, &failed)
		if fits || err != nil {
			return err
		}
	}
	if o.code == CodeKeyID && failed != nil {
		return failed
	}
	return refuse(o.code)
}

// await asks slow sources at the same time and takes the first key that fits. failed is
// why one of them did not answer.
func (o *keySearch) await(ctx context.Context, sources []Source, failed *error) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // the fetches of the others continue
	type answer struct {
		keys []*Key
		err  error
	}
	answers, kid := make(chan answer, len(sources)), o.kid
	for _, source := range sources {
		go func() {
			keys, err := source.Keys(ctx, kid)
			answers <- answer{keys, err}
		}()
	}
	for range sources {
		a := <-answers
		if a.err != nil {
			*failed = unavailable(a.err)
		}
		if fits, err := o.tryAll(a.keys); fits || err != nil {
			return fits, err
		}
	}
	return false, nil
}

func (o *keySearch) tryAll(keys []*Key) (bool, error) {
	for _, key := range keys[:min(len(keys), maxSameName)] {
		if fits, err := o.try(key); fits || err != nil {
			return fits, err
		}
	}
	return false, nil
}

// try takes steps 5 to 7 with one key. The key's algorithm is compared before the
// signature: another algorithm cannot use the key. The payload is decoded between steps 5
// and 6. A presented token needs a key that is valid at iat and now: whoever has a key can
// write any iat, and an ended key may be stolen.
func (o *keySearch) try(key *Key) (bool, error) {
	switch {
	case key.algorithm != o.alg:
		return o.fail(CodeAlgorithm)
	case !o.alg.verify(key.public, o.text, o.signature):
		return o.fail(CodeSignature)
	case key.revoked:
		return o.fail(CodeKeyRevoked)
	}
	if !o.decoded {
		if err := o.claims.read(o.payload); err != nil {
			return false, err
		}
		o.decoded = true
	}
	switch c := &o.claims; {
	case c.issuedAt != 0 && !key.covers(seconds(c.issuedAt), 0), !o.stored && !key.covers(o.now, Skew):
		return o.fail(CodeKeyRevoked)
	case c.issuer == "" || !key.permits(c.issuer):
		return o.fail(CodeIssuer)
	}
	o.key = key
	return true, nil
}

// signed reports whether the signature holds under a key that was found.
func (o *keySearch) signed() bool { return o.code == CodeKeyRevoked || o.code == CodeIssuer }

// fail notes why a key did not fit if it came further than those before it.
func (o *keySearch) fail(code Code) (bool, error) {
	order := []Code{CodeKeyID, CodeAlgorithm, CodeSignature, CodeKeyRevoked, CodeIssuer}
	if slices.Index(order, code) > slices.Index(order, o.code) {
		o.code = code
	}
	return false, nil
}
