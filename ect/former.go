package ect

import "slices"

// Former is a name under which keys of a ring have signed before the present one. What
// they signed under it stays the word of the same issuer.
type Former struct {
	// Name is the issuer of those tokens.
	Name string `json:"name"`
	// Keys are the names of the keys that have signed under it; none are all of the ring.
	Keys []string `json:"keys"`
}

// names reports whether the key with this name has signed under it.
func (f *Former) names(kid string) bool { return len(f.Keys) == 0 || slices.Contains(f.Keys, kid) }

// memberFormer lists, in a public set, the identities besides "sub" under which a key
// has signed. Those who do not know it refuse such tokens.
const memberFormer = "former_sub"

// maxFormer is how many such identities one key may have.
const maxFormer = 64

// permits reports whether the key may sign for issuer, or might once.
func (k *Key) permits(issuer string) bool {
	return k.owner.permits(issuer) || slices.ContainsFunc(k.former, func(o Owner) bool { return o.permits(issuer) })
}

// withFormer are the key's former owners among those of the ring.
func (k *Key) withFormer(former []Former) (Key, error) {
	own := *k
	for i := range former {
		if !former[i].names(k.id) {
			continue
		}
		o, err := ParseOwner(former[i].Name)
		if err != nil {
			return own, err
		}
		own.former = append(own.former, o)
	}
	return own, nil
}

// Signed reports whether a token was issued under one of the former names by a key of
// the ring that has signed under it.
func (r *Ring) Signed(t *Token, former []Former) bool {
	key := t.Key()
	if key == nil {
		return false
	}
	return slices.ContainsFunc(former, func(f Former) bool {
		return f.Name == t.Issuer() && f.names(key.id) &&
			slices.ContainsFunc(r.keys.Load().byID[key.id], func(own *Key) bool { return samePublic(own, key) })
	})
}
