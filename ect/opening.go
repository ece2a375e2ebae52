package ect

import (
	"context"
	"slices"
)

// opening is a token on the way to the key that it was signed with.
type opening struct {
	alg               Algorithm
	kid               string
	spelling          Spelling
	signed, signature []byte
	payload           string
	claims            claimSet
	decoded           bool
	key               *Key
	worst             Code // how far the best key has brought it
}

// findKey asks the sources one after the other until a key fits in everything: several
// owners may have given their keys the same name.
func (v *Verifier) findKey(ctx context.Context, o *opening, stored bool) error {
	var failed error
	for _, source := range v.p.Sources {
		keys, err := source.Keys(ctx, o.kid)
		if err != nil {
			failed = unavailable(err)
		}
		if stored {
			if archive, ok := source.(Archive); ok {
				keys = append(slices.Clip(keys), archive.Retired(o.kid)...)
			}
		}
		for _, key := range keys[:min(len(keys), maxSameName)] {
			if fits, err := o.try(key); fits || err != nil {
				return err
			}
		}
	}
	if o.worst == CodeKeyID && failed != nil {
		return failed
	}
	return refuse(o.worst)
}

// maxSameName is how many keys of one name a source may make the verifier try.
const maxSameName = 8

// try takes steps 5 to 7 with one key.
func (o *opening) try(key *Key) (bool, error) {
	if key.algorithm != o.alg {
		o.fail(CodeAlgorithm)
		return false, nil
	}
	if !o.alg.verify(key.public, o.signed, o.signature) {
		o.fail(CodeSignature)
		return false, nil
	}
	if !o.decoded {
		if err := o.claims.decode(o.payload, o.spelling); err != nil {
			return false, err
		}
		o.decoded = true
	}
	if key.revoked {
		o.fail(CodeKeyRevoked)
		return false, nil
	}
	if o.claims.issuer == "" || !key.permits(o.claims.issuer) {
		o.fail(CodeIssuer)
		return false, nil
	}
	if o.claims.issuedAt != 0 && !key.covers(seconds(o.claims.issuedAt)) {
		o.fail(CodeKeyRevoked)
		return false, nil
	}
	o.key = key
	return true, nil
}

// fail notes why a key did not fit, if it came further than those before it.
func (o *opening) fail(code Code) {
	order := []Code{CodeKeyID, CodeAlgorithm, CodeSignature, CodeKeyRevoked, CodeIssuer}
	if slices.Index(order, code) > slices.Index(order, o.worst) {
		o.worst = code
	}
}
