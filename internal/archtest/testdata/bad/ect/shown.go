package ect

import "github.com/lestrrat-go/jwx/v2/jwk"

// Set shows what must stay inside.
type Set struct {
	// Inner is seen by everybody.
	Inner jwk.Set
	inner jwk.Set
}

// Parse shows it in what it gives.
func Parse() (jwk.Key, error) { return parse() }

// Size shows nothing.
func Size(s *Set) int { return jwk.Set(s.inner).Len() }

func parse() (jwk.Key, error) { return nil, nil }

type hidden struct{ jwk.Set }

// Of is a method of a type that nobody sees.
func (hidden) Of(jwk.Key) {}
