package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// signatures holds the tokens of entries against public keys.
type signatures struct {
	keys ect.Source
	// Verified and Unsigned count the tokens whose signatures hold, and the entries
	// without a signed token.
	Verified int64 `json:"verified"`
	Unsigned int64 `json:"unsigned"`
	// Unknown counts tokens under keys that are not among those that are trusted, by
	// who says to have issued them.
	Unknown map[string]int64 `json:"unknown"`
}

func newSignatures(jwks string) (*signatures, error) {
	keys, err := trusted(jwks)
	if err != nil {
		return nil, err
	}
	return &signatures{keys: keys, Unknown: map[string]int64{}}, nil
}

// take verifies the token of an entry, and holds that the entry says of it what it
// says itself.
func (s *signatures) take(ctx context.Context, e *ledger.Entry) error {
	if e.Unsigned {
		s.Unsigned++
		return nil
	}
	raw := string(e.Payload)
	seen, err := ect.ParseInsecure(raw)
	if err != nil {
		return fmt.Errorf("entry %d: its token cannot be read: %s", e.Index, plain(err))
	}
	if seen.Level() < ect.L2 {
		s.Unsigned++
		return nil
	}
	token, err := s.verify(ctx, raw, seen)
	if refusal := (*ect.Error)(nil); errors.As(err, &refusal) {
		if refusal.Code == ect.CodeKeyID {
			s.Unknown[seen.Issuer()]++
			return nil
		}
		return fmt.Errorf("entry %d: its token does not hold: %s (%s)", e.Index, refusal.Detail(), refusal.Code)
	}
	if err != nil {
		return err
	}
	if token.ID() != e.ID || token.Issuer() != e.Issuer {
		return fmt.Errorf("entry %d: its id and issuer are not those of its token", e.Index)
	}
	s.Verified++
	return nil
}

// verify verifies a record for whomever it was meant. What else a gateway asks of a
// token was decided when it was taken.
func (s *signatures) verify(ctx context.Context, raw string, seen *ect.Unverified) (*ect.Token, error) {
	v, err := ect.NewVerifier(ect.Policy{
		Audience: append(seen.Audience(), "nobody"), Sources: []ect.Source{s.keys}, Algorithms: ect.Algorithms(),
		AnyID: true, LenientParents: true,
	})
	if err != nil {
		return nil, err
	}
	return v.VerifyStored(ctx, raw)
}

// describe says what was found.
func (s *signatures) describe() string {
	text := fmt.Sprintf("%d signatures hold, %d entries are not signed", s.Verified, s.Unsigned)
	if len(s.Unknown) == 0 {
		return text
	}
	var sum int64
	var issuers []string
	for _, issuer := range slices.Sorted(maps.Keys(s.Unknown)) {
		sum += s.Unknown[issuer]
		if issuers = append(issuers, printable(issuer)); len(issuers) > 5 {
			issuers[5] = "and others"
			issuers = issuers[:6]
		}
	}
	return fmt.Sprintf("%s, %d NOT LOOKED AT for want of the keys of %s", text, sum, strings.Join(issuers, ", "))
}
