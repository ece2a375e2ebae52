package rollbacks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// claims are what a recorded token says.
type claims interface {
	ID() string
	Workflow() string
	Issuer() string
	IssuedAt() time.Time
	Parents() []string
	OutputHash() ect.Hash
	Ext() ect.Ext
}

// verify verifies a recorded token as one (cascade 4.2.3): its signature, also under a key
// that was replaced since, and that it stands in the tree under a signed head.
//
// The keys of agents are their own: one may be gone, or the token be for a name that the
// gateway had before. Such a token was verified when it was recorded, and the tree proves
// that it is the one. A key that was revoked since speaks no more for its checkpoints, but
// what has followed from its tokens can be undone: often it has to be.
//
// checkpoint.ErrTampered says that a token does not hold.
func (v *Voice) verify(ctx context.Context, e *ledger.Entry, as role) (claims, error) {
	proven, err := v.proven(ctx, e)
	if err != nil {
		return nil, err
	}
	if e.Unsigned {
		return nil, fmt.Errorf("%w: entry %d has no token", checkpoint.ErrTampered, e.Index)
	}
	if graph.NobodysWord(e) && as == asParent {
		return ect.ParseInsecure(string(e.Payload)) // nothing of it is believed
	}
	c, err := v.signed(ctx, e)
	if err != nil && proven && !v.own(e) && ctx.Err() == nil && as.excuses(err) {
		c, err = ect.ParseInsecure(string(e.Payload))
	}
	if refused := (*ect.Error)(nil); errors.As(err, &refused) {
		err = fmt.Errorf("%w: the token of entry %d: %w", checkpoint.ErrTampered, e.Index, err)
	}
	if err != nil {
		return nil, err
	}
	if c.ID() != e.ID || c.Workflow() != e.Workflow || c.Issuer() != e.Issuer || !slices.Equal(c.Parents(), e.Parents) {
		return nil, fmt.Errorf("%w: entry %d is of another token", checkpoint.ErrTampered, e.Index)
	}
	return c, nil
}

// role is what a token is verified as.
type role uint8

const (
	asCheckpoint role = iota
	asParent          // of a checkpoint, or of what has led to one
)

// excuses says of what is wrong with the signature of an agent's token whether its place in
// the tree stands for it. Of a parent nothing is asked but that it was believed then: its
// issuer may well be what has failed.
func (r role) excuses(err error) bool {
	var refused *ect.Error
	if !errors.As(err, &refused) {
		return r == asParent && errors.Is(err, ect.ErrUnavailable)
	}
	switch refused.Code {
	case ect.CodeKeyID, ect.CodeAudience:
		return true
	case ect.CodeKeyRevoked, ect.CodeLevel: // what is asked for may have become more
		return r == asParent
	}
	return false
}

// signed verifies a token by its signature.
func (v *Voice) signed(ctx context.Context, e *ledger.Entry) (claims, error) {
	verifier := v.Verifier
	if v.own(e) {
		var err error
		if verifier, err = v.ownVerifier(); err != nil {
			return nil, err
		}
	}
	if verifier == nil { // nobody is trusted any more
		return nil, &ect.Error{Code: ect.CodeKeyID}
	}
	return verifier.VerifyStored(ctx, string(e.Payload))
}

// ownVerifier verifies what the gateway has issued: under its own keys alone, since those
// of a trust domain may be allowed to speak for all names in it.
func (v *Voice) ownVerifier() (*ect.Verifier, error) {
	source, err := v.Witness.Source()
	if err != nil {
		return nil, err
	}
	p := ect.Policy{Audience: v.Witness.Names(), Sources: []ect.Source{source}}
	for _, k := range v.Evidence.Ring().List() {
		if !slices.Contains(p.Algorithms, k.Algorithm) {
			p.Algorithms = append(p.Algorithms, k.Algorithm)
		}
	}
	return ect.NewVerifier(p)
}

// proven holds that an entry stands in this node's tree. Those of other nodes' logs can be
// proven there only: false.
func (v *Voice) proven(ctx context.Context, e *ledger.Entry) (bool, error) {
	log := v.Evidence.Log()
	if e.Log != log.Origin() {
		return false, nil
	}
	head, err := note.NewVerifier(v.Evidence.HeadKey())
	if err != nil {
		return false, err
	}
	receipt, err := log.Receipt(ctx, e.Index)
	if err == nil {
		_, err = receipt.Check(e.Leaf, e.Log, note.VerifierList(head))
	}
	if errors.Is(err, ledger.ErrProof) || errors.Is(err, ledger.ErrTampered) {
		err = fmt.Errorf("%w: %w", checkpoint.ErrTampered, err)
	}
	return err == nil, err
}
