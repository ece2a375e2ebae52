package guard_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// The mark stands in the answer however it is written, in place of what an upstream
// says, and is not on informational answers.
func TestMark(t *testing.T) {
	for name, write := range map[string]func(http.ResponseWriter){
		"header and body": func(w http.ResponseWriter) {
			w.Header().Add("Execution-Status", "executed")
			w.WriteHeader(http.StatusOK)
			_, _ = io.WriteString(w, "body")
		},
		"body alone": func(w http.ResponseWriter) {
			w.Header().Add("Execution-Status", "executed")
			_, _ = io.WriteString(w, "body")
		},
		"copied": func(w http.ResponseWriter) {
			w.Header().Add("Execution-Status", "executed")
			_, _ = io.Copy(w, struct{ io.Reader }{strings.NewReader("body")})
		},
		"flushed first": func(w http.ResponseWriter) {
			w.Header().Add("Execution-Status", "executed")
			_ = http.NewResponseController(w).Flush()
			_, _ = io.WriteString(w, "body")
		},
		"hints first": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Add("Execution-Status", "executed")
			w.WriteHeader(http.StatusOK)
			_, _ = io.WriteString(w, "body")
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				write(guard.Mark(w, "Execution-Status", "unguarded"))
			}))
			defer server.Close()
			res, err := server.Client().Get(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			if got := res.Header["Execution-Status"]; err != nil || len(got) != 1 || got[0] != "unguarded" || string(body) != "body" {
				t.Errorf("%q (%v) with the status %q", body, err, got)
			}
		})
	}
}

// The upstream is asked for nothing that a replay could not decode (answer.NarrowEncoding).
func TestForwardedEncodingIsNarrowed(t *testing.T) {
	b := newBed(t, func(_ int64, w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("Accept-Encoding"))
	})
	r := b.post("")
	r.Header.Set("Accept-Encoding", "br")
	b.do(r, "200 executed identity")
}
