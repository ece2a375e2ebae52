package ect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// What holds where a Policy says nothing else.
const (
	// MaxToken is the size of a token.
	MaxToken = 64 << 10
	// MaxParents is how many parents a token may have.
	MaxParents = 100
	// MaxAncestors is how many ancestors are walked over.
	MaxAncestors = 10_000
	// Skew is by how much clocks may differ.
	Skew = 30 * time.Second
	// MaxAge is how far back iat may lie.
	MaxAge = 900 * time.Second
)

// Policy is what a Verifier accepts. Audience and Sources are required; the rest has
// the values that the drafts and their implementations give.
type Policy struct {
	// Audience are the verifier's own names: aud must have one of them.
	Audience []string
	// Former are names that the verifier had before. They count in the aud of tokens that it
	// has issued itself, under any of its names and with a key that speaks for one of Audience.
	Former []string
	// Sources are where keys are looked up, in this order; those that are Remote and
	// lack the key come last, and together.
	Sources []Source
	// Algorithms that are allowed; ES256 alone if empty.
	Algorithms []Algorithm
	// MinLevel is the lowest level that passes; L2 if zero.
	MinLevel Level
	// Skew, MaxAge, MaxParents and MaxAncestors replace the constants of these names.
	Skew, MaxAge             time.Duration
	MaxParents, MaxAncestors int
	// MaxLife is the longest time between iat and exp; any if zero.
	MaxLife time.Duration
	// AnyID accepts ids that are not UUIDs.
	AnyID bool
	// LenientParents reads a missing par as an empty one.
	LenientParents bool
	// AllowPartial accepts parents that cannot be had; the Lineage says so.
	AllowPartial bool
	// CrossWorkflow accepts parents of another workflow.
	CrossWorkflow bool
	// Decisions holds the rules of the policy companion (pol, pol_decision).
	Decisions bool
	// Replays remembers the ids that were seen. Without, the caller does, in the
	// commit that the token is used for.
	Replays Replays
	// Ledger makes tokens L3. Where MinLevel is L3, it is required, or CallerAppends.
	Ledger Ledger
	// CallerAppends says that the caller takes the tokens into the ledger itself, in the
	// commit that they are used for and before anybody relies on them. They are told to
	// be L2: only the caller knows when they are more. It excludes Ledger.
	CallerAppends bool
}

// Ledger is the audit ledger that a token of level L3 stands in.
type Ledger interface {
	// Append records the token before anybody relies on it.
	Append(ctx context.Context, t *Token) error
}

// Verifier verifies tokens. It is safe for concurrent use.
type Verifier struct {
	p       Policy
	allowed algorithms
	forms   forms
}

// NewVerifier checks the policy and fills in what it leaves out.
func NewVerifier(p Policy) (*Verifier, error) {
	if p.MinLevel == 0 {
		p.MinLevel = L2
	}
	if len(p.Audience) == 0 || slices.Contains(p.Audience, "") {
		return nil, errors.New("ect: a verifier needs a name, which tokens must have in their aud")
	}
	if len(p.Sources) == 0 && p.MinLevel > L1 {
		return nil, errors.New("ect: a verifier needs a source of keys")
	}
	if p.MinLevel > L3 {
		return nil, fmt.Errorf("ect: there is no level %d", p.MinLevel)
	}
	if p.MinLevel == L3 && p.Ledger == nil && !p.CallerAppends {
		return nil, errors.New("ect: level L3 needs a ledger")
	}
	if p.CallerAppends && p.Ledger != nil {
		return nil, errors.New("ect: tokens are appended to the ledger by the verifier or by its caller, not by both")
	}
	if len(p.Algorithms) == 0 {
		p.Algorithms = []Algorithm{ES256}
	}
	allowed, err := algorithmSet(p.Algorithms)
	if err != nil {
		return nil, err
	}
	for value, standard := range map[*time.Duration]time.Duration{&p.Skew: Skew, &p.MaxAge: MaxAge} {
		if *value == 0 {
			*value = standard
		}
	}
	for value, standard := range map[*int]int{&p.MaxParents: MaxParents, &p.MaxAncestors: MaxAncestors} {
		if *value == 0 {
			*value = standard
		}
	}
	if p.Skew < 0 || p.MaxAge < 0 || p.MaxLife < 0 || p.MaxParents < 0 || p.MaxAncestors < 0 {
		return nil, errors.New("ect: a limit of the verifier is negative")
	}
	return &Verifier{p, allowed, forms{p.AnyID, p.LenientParents, p.MaxParents}}, nil
}
