package ect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Presentation is the way in which a token is presented.
type Presentation struct {
	// Now is the time by which it is judged.
	Now time.Time
	// Peer is who the transport has proven to be at the other end; empty for nobody. The
	// iss of a token of level L1 is held against it; there, nothing else speaks for it.
	// Where there is no peer such a token is not proven to be anybody's.
	Peer string
	// DAG finds the tokens that are recorded. Without, parents are not looked up, and
	// the Lineage says so.
	DAG DAG
}

// Verify takes a token through all checks. A refusal is an *Error; any other error says
// that nothing is known of the token.
func (v *Verifier) Verify(ctx context.Context, raw string, p Presentation) (*Token, error) {
	tokens, err := v.VerifyAll(ctx, []string{raw}, p)
	if err != nil {
		return nil, err
	}
	return tokens[0], nil
}

// VerifyAll verifies the tokens of one request, all or none. They may be each other's
// parents. The same bytes twice count once.
func (v *Verifier) VerifyAll(ctx context.Context, raws []string, p Presentation) ([]*Token, error) {
	if len(raws) == 0 {
		return nil, refuse(CodeMissing)
	}
	tokens := make([]*Token, 0, len(raws))
	for i, raw := range raws {
		if slices.Contains(raws[:i], raw) {
			continue
		}
		t, err := v.open(ctx, raw, &p)
		if err != nil {
			return nil, err
		}
		for _, other := range tokens {
			if sameScope(t.id, t.workflow, other.id, other.workflow) {
				return nil, refuse(CodeReplayed)
			}
		}
		tokens = append(tokens, t)
	}
	if err := v.walk(ctx, tokens, p.DAG); err != nil {
		return nil, err
	}
	if err := v.use(ctx, tokens, p.Now); err != nil {
		return nil, err
	}
	return tokens, nil
}

// use takes the steps that leave a trace, 13 and 15, once nothing can be refused any more:
// a refused token must not use up an id. So 13 comes behind 14.
func (v *Verifier) use(ctx context.Context, tokens []*Token, now time.Time) error {
	for _, t := range tokens {
		if v.p.Replays == nil {
			break
		}
		// Counted from now, so that a step of the clock forgets nothing.
		until := now.Add(seconds(t.expires).Add(v.p.Skew).Sub(now))
		fresh, err := v.p.Replays.Add(ctx, t, now, until)
		if err != nil {
			return unavailable(err)
		}
		if !fresh {
			return refuse(CodeReplayed)
		}
	}
	if v.p.Ledger == nil {
		return nil
	}
	for _, t := range parentsFirst(tokens) {
		if t.level < L2 {
			continue
		}
		if err := v.p.Ledger.Append(ctx, t); err != nil {
			if v.p.MinLevel < L3 {
				continue // it stays L2
			}
			return unavailable(err)
		}
		t.level = L3
	}
	return nil
}

// parentsFirst orders the tokens of one request so that none comes before its parent.
func parentsFirst(tokens []*Token) []*Token {
	ordered := make([]*Token, 0, len(tokens))
	rest := slices.Clone(tokens)
	for len(rest) > 0 {
		// Where they form a circle, which nobody has looked for, any one is next.
		next := max(0, slices.IndexFunc(rest, func(t *Token) bool {
			return !slices.ContainsFunc(rest, func(other *Token) bool { return slices.Contains(t.parents, other.id) })
		}))
		ordered = append(ordered, rest[next])
		rest = slices.Delete(rest, next, next+1)
	}
	return ordered
}

// VerifyStored verifies a token that was recorded: its form, signature, issuer and
// audience, also under keys that were replaced since, but neither its age nor whether
// it was seen before. One of level L1 is nobody's: whose connection it came over is not
// in it.
func (v *Verifier) VerifyStored(ctx context.Context, raw string) (*Token, error) {
	return v.open(ctx, raw, nil)
}

// VerifyAgain is VerifyStored for a token that somebody presents once more; peer is who
// the transport has proven that to be.
func (v *Verifier) VerifyAgain(ctx context.Context, raw, peer string) (*Token, error) {
	t, err := v.open(ctx, raw, nil)
	if err == nil && t.level == L1 {
		err = t.provenBy(peer)
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// provenBy holds an unsigned token against who is at the other end.
func (t *Token) provenBy(peer string) error {
	if t.issuer != "" && peer != "" && t.issuer != peer {
		return refuse(CodeIssuer)
	}
	t.proven = t.issuer != "" && t.issuer == peer
	return nil
}

// open takes the steps that need nothing but the token and the keys. Without a
// presentation the token is a record.
func (v *Verifier) open(ctx context.Context, raw string, p *Presentation) (*Token, error) {
	if len(raw) > MaxToken {
		return nil, refuse(CodeTooLarge)
	}
	parts, signed := split(raw)
	if !signed {
		return v.openUnsigned(raw, p)
	}
	head, ok := parseHeader(parts.header)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	payload, ok := decode64(parts.payload)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	signature, ok := decode64(parts.signature)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	alg, err := head.check(v.allowed)
	if err != nil {
		return nil, err
	}
	o := opening{
		alg: alg, kid: head.kid, spelling: head.spelling, text: []byte(parts.signed), signature: signature,
		payload: string(payload), worst: CodeKeyID, stored: p == nil, skew: v.p.Skew,
	}
	if p != nil {
		o.now = p.Now
	}
	if err := v.findKey(ctx, &o); err != nil {
		return nil, err
	}
	if err := v.checkAudience(&o.claims); err != nil && !v.ownBefore(&o) {
		return nil, err
	}
	if err := v.checkRest(&o.claims, p); err != nil {
		return nil, err
	}
	return &Token{content: o.claims.content, raw: raw, level: L2, key: o.key, proven: true}, nil
}

// openUnsigned reads level L1: JSON in base64url. What has three parts, or any dot, is
// never read so, whatever is wrong with it.
func (v *Verifier) openUnsigned(raw string, p *Presentation) (*Token, error) {
	payload, ok := decode64(raw)
	if !ok {
		return nil, refuse(CodeMalformed)
	}
	var claims claimSet
	err := claims.read(string(payload), Draft00)
	if v.p.MinLevel > L1 && !isCode(err, CodeMalformed) {
		return nil, refuse(CodeLevel)
	}
	if err != nil {
		return nil, err
	}
	t := &Token{content: claims.content, raw: raw, level: L1}
	if claims.issuer != "" && !validIdentity(claims.issuer) {
		return nil, refuse(CodeIssuer)
	}
	if p != nil {
		if err := t.provenBy(p.Peer); err != nil {
			return nil, err
		}
	}
	if claims.faulty(CodeIssuer) {
		return nil, refuse(CodeIssuer)
	}
	if len(claims.audience) > 0 || claims.faulty(CodeAudience) {
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
	for _, name := range c.audience {
		if slices.Contains(v.p.Audience, name) {
			return nil
		}
	}
	return refuse(CodeAudience)
}

// ownBefore reports whether the verifier has issued a token itself, to one of its names of
// before.
func (v *Verifier) ownBefore(o *opening) bool {
	own := func(name string) bool { return slices.Contains(v.p.Former, name) }
	return slices.ContainsFunc(o.claims.audience, own) &&
		(own(o.claims.issuer) || slices.Contains(v.p.Audience, o.claims.issuer)) &&
		slices.ContainsFunc(v.p.Audience, o.key.permits)
}

// checkRest takes steps 9 to 12.
func (v *Verifier) checkRest(c *claimSet, p *Presentation) error {
	if err := v.checkTimes(c, p); err != nil {
		return err
	}
	if err := c.check(v.forms); err != nil {
		return err
	}
	if v.p.Decisions {
		return c.checkPolicy()
	}
	return nil
}

// checkTimes holds steps 9 and 10. Of a record no age is asked, nor whether it ends before
// it begins: earlier versions have accepted such tokens.
func (v *Verifier) checkTimes(c *claimSet, p *Presentation) error {
	issued, expires := seconds(c.issuedAt), seconds(c.expires)
	switch {
	case c.expires == 0:
		return refuse(CodeExpires)
	case p != nil && p.Now.After(expires.Add(v.p.Skew)):
		return refuse(CodeExpired)
	case c.issuedAt == 0:
		return refuse(CodeIssuedAt)
	case v.p.MaxLife > 0 && c.expires-c.issuedAt > int64(v.p.MaxLife/time.Second):
		return refuse(CodeExpires)
	case p == nil:
		return nil
	case c.expires < c.issuedAt:
		return refuse(CodeExpires)
	case p.Now.Sub(issued) > v.p.MaxAge:
		return refuse(CodeTooOld)
	case issued.After(p.Now.Add(v.p.Skew)):
		return refuse(CodeNotYet)
	}
	return nil
}

// unavailable marks an error as one that says nothing about the token.
func unavailable(err error) error {
	if errors.Is(err, ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}
