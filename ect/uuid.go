package ect

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// UnprovenID is the NodeID of a token with this id that nobody is proven to have issued:
// a UUID of version 8. For no id can one be found that leads to it.
func UnprovenID(id string) string {
	sum := sha256.Sum256([]byte("unproven ECT\x00" + id))
	b := sum[:16]
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80
	v := hex.EncodeToString(b)
	return v[:8] + "-" + v[8:12] + "-" + v[12:16] + "-" + v[16:20] + "-" + v[20:]
}

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
