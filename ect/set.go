package ect

import (
	"context"
	"encoding/json"
	"fmt"
)

// NewSet makes a set of keys. Of those with one name the first eight are tried.
func NewSet(keys ...*Key) *Set {
	s := &Set{byID: make(map[string][]*Key), size: len(keys)}
	for _, k := range keys {
		s.byID[k.id] = append(s.byID[k.id], k)
	}
	return s
}

// Keys makes a Set a Source.
func (s *Set) Keys(_ context.Context, kid string) ([]*Key, error) { return s.byID[kid], nil }

// All are the keys of the set, in no order.
func (s *Set) All() []*Key {
	all := make([]*Key, 0, s.size)
	for _, keys := range s.byID {
		all = append(all, keys...)
	}
	return all
}

// retirees keeps keys that a set has lost, for records that they have signed. It is
// bounded: after that many names, or keys of one name, older ones are forgotten, and such
// records cannot be verified again from this source.
type retirees struct {
	byID  map[string][]*Key
	order []string
}

const maxRetired = 1024

// replace gives what is retired once next stands in the place of before. What next
// revokes is not among it.
func (r *retirees) replace(before, next *Set) *retirees {
	if before == nil {
		return r
	}
	out := &retirees{byID: make(map[string][]*Key)}
	keep := func(id string, keys []*Key) {
		var gone []*Key
		for _, k := range keys {
			if !k.revoked && !next.holds(k) {
				gone = append(gone, k)
			}
		}
		if gone == nil {
			return
		}
		if _, there := out.byID[id]; !there {
			out.order = append(out.order, id)
		}
		all := append(out.byID[id], gone...)
		out.byID[id] = all[max(0, len(all)-maxSameName):]
	}
	if r != nil {
		for _, id := range r.order {
			keep(id, r.byID[id])
		}
	}
	for id, keys := range before.byID {
		keep(id, keys)
	}
	for len(out.order) > maxRetired {
		delete(out.byID, out.order[0])
		out.order = out.order[1:]
	}
	return out
}

func (r *retirees) retired(kid string) []*Key {
	if r == nil {
		return nil
	}
	return r.byID[kid]
}

// holds reports whether the same public key stands in the set under the same name.
func (s *Set) holds(k *Key) bool {
	for _, other := range s.byID[k.id] {
		if samePublic(other, k) {
			return true
		}
	}
	return false
}

// jsonIndent is how key files look, so that a person can read what is not secret in them.
func jsonIndent(v any) ([]byte, error) {
	text, err := json.MarshalIndent(v, "", "  ")
	return append(text, '\n'), err
}

// usable holds that the set is not one of which nothing can be used: whoever wrote that
// has made a mistake, and keys that were known before are not thrown away for it. An
// empty set is meant: it trusts nobody any more.
func (s *Set) usable() error {
	if s.size > 0 || len(s.skipped) == 0 {
		return nil
	}
	reasons := ""
	for i, skipped := range s.skipped {
		if i == 3 {
			reasons += ", and more"
			break
		}
		reasons += fmt.Sprintf("; %q: %s", skipped.KeyID, skipped.Reason)
	}
	return fmt.Errorf("ect: no key of the set can be used%s", reasons)
}
