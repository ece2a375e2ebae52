package load

import (
	"strings"
	"testing"
)

// Keys of connections differ from one another, and from those of all other requests.
func TestOwnKeys(t *testing.T) {
	request := Payment(200)
	request.Own, request.Key = true, NewKey()
	seen := map[string]bool{NewKey(): true}
	for number := range 300 {
		sent := string(request.wire("host", number).next())
		_, after, _ := strings.Cut(sent, "Idempotency-Key: ")
		key, _, found := strings.Cut(after, "\r\n")
		if !found || len(key) != KeyLength || seen[key] {
			t.Fatalf("connection %d has the key %q", number, key)
		}
		seen[key] = true
	}
}
