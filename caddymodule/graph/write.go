package graph

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// writeJSON answers with a document.
func (q *question) writeJSON(status int, doc any) error {
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	q.write(status, "application/json", append(body, '\n'))
	return nil
}

// write answers. Nobody but the reader may keep or frame what it is given (P3).
func (q *question) write(status int, contentType string, body []byte) {
	h := q.w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	q.w.WriteHeader(status)
	if q.r.Method != http.MethodHead {
		_, _ = q.w.Write(body) // the client may be gone; there is nobody to tell
	}
}
