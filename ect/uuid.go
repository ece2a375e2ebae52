package ect

import "strings"

// Nil and max are no ids: RFC 9562 gives them to nobody.
const (
	nilUUID = "00000000-0000-0000-0000-000000000000"
	maxUUID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
)

// canonicalUUID gives a UUID in lower case, in which ids are compared.
func canonicalUUID(v string) (string, bool) {
	if len(v) != len(nilUUID) {
		return "", false
	}
	for i := range len(v) {
		c := v[i]
		if i == 8 || i == 13 || i == 18 || i == 23 {
			if c != '-' {
				return "", false
			}
			continue
		}
		if ('0' > c || c > '9') && ('a' > c || c > 'f') && ('A' > c || c > 'F') {
			return "", false
		}
	}
	v = strings.ToLower(v)
	return v, v != nilUUID && v != maxUUID
}
