package caddymodule

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
)

// undoHeader are the header fields of the configuration of the day that go with a request
// of an undo to a URL: the credentials of its server, and of no other.
func (a *Action) undoHeader(url string) (http.Header, error) {
	if a.undo == nil {
		return http.Header{}, nil
	}
	return a.undo.Fields(url)
}

// upstreamName names where requests of the guard's own go; empty without `upstream`.
func (h *Handler) upstreamName() string { return h.upstreamHash }

// nameOf names the handlers that lead to an upstream: the same for the same
// configuration, however it is written.
func nameOf(raw []json.RawMessage) string {
	sum := sha256.New()
	for _, handler := range raw {
		var v any
		if json.Unmarshal(handler, &v) == nil { // else no module is made of it
			handler, _ = json.Marshal(v) // with its members sorted
		}
		sum.Write(append(handler, 0))
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}
