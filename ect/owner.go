package ect

import (
	"fmt"
	"strings"
)

// maxURI is the greatest length of an identity, as SPIFFE has it.
const maxURI = 2048

// Owner is whose tokens a key may sign. The zero Owner is nobody.
type Owner struct {
	kind ownerKind
	name string
}

type ownerKind uint8

const (
	nobody ownerKind = iota
	oneIdentity
	trustDomain
	anyone
)

// Anyone lets a key sign for every issuer. It is for a set of keys whose owners are all
// trusted to name each other.
func Anyone() Owner { return Owner{kind: anyone} }

// ParseOwner reads an owner: a SPIFFE trust domain ("spiffe://example.com") stands for
// all identities in it, any other URI for itself alone.
func ParseOwner(v string) (Owner, error) {
	if domain, ok := strings.CutPrefix(v, spiffeScheme); ok && !strings.Contains(domain, "/") {
		if !validTrustDomain(domain) {
			return Owner{}, fmt.Errorf("ect: %q is not a SPIFFE trust domain", v)
		}
		return Owner{trustDomain, domain}, nil
	}
	if !validIdentity(v) {
		return Owner{}, fmt.Errorf("ect: %q is not an identity; use a URI like spiffe://example.com/agent/a", v)
	}
	return Owner{oneIdentity, v}, nil
}

// IsZero reports that the owner is nobody.
func (o Owner) IsZero() bool { return o.kind == nobody }

func (o Owner) String() string {
	switch o.kind {
	case oneIdentity:
		return o.name
	case trustDomain:
		return spiffeScheme + o.name
	case anyone:
		return "anyone"
	}
	return "nobody"
}

// bound is the owner that a key of a set names, which the owner of the set must cover:
// who publishes a set cannot speak for others. A set that is nobody's may name anybody.
func (o Owner) bound(named Owner) (Owner, string) {
	if !o.IsZero() && o != named && (named.kind != oneIdentity || !o.permits(named.name)) {
		return Owner{}, fmt.Sprintf("it is said to belong to %s, and the set to %s", named, o)
	}
	return named, ""
}

// permits reports whether the owner may say that it is issuer.
func (o Owner) permits(issuer string) bool {
	switch o.kind {
	case oneIdentity:
		return issuer == o.name
	case trustDomain:
		domain, ok := spiffeDomain(issuer)
		return ok && domain == o.name
	case anyone:
		return validIdentity(issuer)
	}
	return false
}

const spiffeScheme = "spiffe://"

// validIdentity holds that v is a name for somebody: printable and without blanks, and
// a well-formed SPIFFE ID where it claims to be one.
func validIdentity(v string) bool {
	if v == "" || len(v) > maxURI || !printable(v) {
		return false
	}
	if len(v) >= 7 && strings.EqualFold(v[:7], "spiffe:") {
		_, ok := spiffeDomain(v)
		return ok
	}
	return true
}

// printable holds that v has visible characters only.
func printable(v string) bool {
	for _, r := range v {
		if r <= ' ' || r == 0x7f || 0x80 <= r && r <= 0xa0 || r == '\u2028' || r == '\u2029' || r == '\ufffd' {
			return false
		}
	}
	return true
}

// spiffeDomain is the trust domain of the SPIFFE ID of a workload. Only the exact form
// counts: two spellings of one identity would be two identities elsewhere.
func spiffeDomain(id string) (string, bool) {
	rest, ok := strings.CutPrefix(id, spiffeScheme)
	if !ok || len(id) > maxURI {
		return "", false
	}
	domain, path, ok := strings.Cut(rest, "/")
	if !ok || !validTrustDomain(domain) {
		return "", false
	}
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return "", false
		}
		for i := range len(segment) {
			if c := segment[i]; !lowerOrDigit(c) && ('A' > c || c > 'Z') && c != '-' && c != '.' && c != '_' {
				return "", false
			}
		}
	}
	return domain, true
}

func validTrustDomain(v string) bool {
	if v == "" || len(v) > 255 {
		return false
	}
	for i := range len(v) {
		if c := v[i]; !lowerOrDigit(c) && c != '-' && c != '.' && c != '_' {
			return false
		}
	}
	return true
}

func lowerOrDigit(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }
