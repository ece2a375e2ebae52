package ect

import (
	"context"
	"slices"
	"time"
)

// opening is a token on the way to the key that it was signed with.
type opening struct {
	alg             Algorithm
	kid             string
	spelling        Spelling
	text, signature []byte
	payload         string
	claims          claimSet
	decoded         bool
	key             *Key
	worst           Code // how far the best key has brought it
	// stored: the token is a record; else it is presented now, give or take the skew.
	stored bool
	now    time.Time
	skew   time.Duration
}

// findKey finds the key that fits in everything: several owners may have given their
// keys the same name. What the sources have comes first, and where the signature holds
// under any of it nobody is waited for.
func (v *Verifier) findKey(ctx context.Context, o *opening) error {
	var lacking []Source
	var failed error
	for _, source := range v.p.Sources {
		var keys []*Key
		if remote, ok := source.(Remote); ok {
			if keys = remote.Cached(o.kid); len(keys) == 0 {
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
		if archive, ok := source.(Archive); ok && o.stored {
			if fits, err := o.tryAll(archive.Retired(o.kid)); fits || err != nil {
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
	if o.worst == CodeKeyID && failed != nil {
		return failed
	}
	return refuse(o.worst)
}

// await asks sources that may take long, all at the same time. The first whose key fits
// will do. failed is why one of them could not say.
func (o *opening) await(ctx context.Context, sources []Source, failed *error) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // what the others fetch goes on without us
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

// tryAll tries keys of one source until one fits.
func (o *opening) tryAll(keys []*Key) (bool, error) {
	for _, key := range keys[:min(len(keys), maxSameName)] {
		if fits, err := o.try(key); fits || err != nil {
			return fits, err
		}
	}
	return false, nil
}

// try takes steps 5 to 7 with one key. Only that alg is the key's comes before the
// signature and not behind it: another algorithm can do nothing with the key. The payload
// is first read between steps 5 and 6, where what is no JSON is refused.
func (o *opening) try(key *Key) (bool, error) {
	if key.algorithm != o.alg {
		o.fail(CodeAlgorithm)
		return false, nil
	}
	if !o.alg.verify(key.public, o.text, o.signature) {
		o.fail(CodeSignature)
		return false, nil
	}
	if key.revoked {
		o.fail(CodeKeyRevoked)
		return false, nil
	}
	if !o.decoded {
		if err := o.claims.read(o.payload, o.spelling); err != nil {
			return false, err
		}
		o.decoded = true
	}
	if !o.inTime(key) {
		o.fail(CodeKeyRevoked)
		return false, nil
	}
	if o.claims.issuer == "" || !key.permits(o.claims.issuer) {
		o.fail(CodeIssuer)
		return false, nil
	}
	o.key = key
	return true, nil
}

// inTime reports whether the key was good when the token says that it was made, and, for
// one that is presented, still is: iat is the word of whoever has the key, and one that
// has ended may have got into other hands. Records are older than keys may be.
func (o *opening) inTime(key *Key) bool {
	if o.claims.issuedAt != 0 && !key.covers(seconds(o.claims.issuedAt), 0) {
		return false
	}
	return o.stored || key.covers(o.now, o.skew)
}

// signed reports that a key was found under which the signature holds.
func (o *opening) signed() bool { return o.worst == CodeKeyRevoked || o.worst == CodeIssuer }

// fail notes why a key did not fit, if it came further than those before it.
func (o *opening) fail(code Code) {
	order := []Code{CodeKeyID, CodeAlgorithm, CodeSignature, CodeKeyRevoked, CodeIssuer}
	if slices.Index(order, code) > slices.Index(order, o.worst) {
		o.worst = code
	}
}
