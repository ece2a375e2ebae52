package rollbackapi

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// writeJSON answers with a document. Nobody but who asks may keep what it is given (P3).
func (q *question) writeJSON(status int, doc any) error {
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	body = append(body, '\n')
	h := q.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	q.w.WriteHeader(status)
	if q.r.Method != http.MethodHead {
		_, _ = q.w.Write(body) // the client may be gone; there is nobody to tell
	}
	return nil
}
