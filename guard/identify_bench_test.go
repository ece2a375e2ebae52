package guard

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// BenchmarkClassify is all that a call which changes nothing pays for the guard (7).
func BenchmarkClassify(b *testing.B) {
	h := newHandler(b, Config{})
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		b.Run(method, func(b *testing.B) {
			r := request(method, "/v1/charges", "Content-Type", "application/json")
			b.ReportAllocs()
			for b.Loop() {
				if _, as, err := h.classify(r); err != nil || (as == classGuarded) != (method == http.MethodPost) {
					b.Fatal(as, err)
				}
			}
		})
	}
}

// BenchmarkIdentify is the way from a request with a body of 200 B to its execution
// key: caller, body, fingerprint, id.
func BenchmarkIdentify(b *testing.B) {
	h := newHandler(b, Config{})
	g := testGuard(b)
	body := `{"amount":1999,"note":"` + strings.Repeat("n", 175) + `"}`
	for name, credential := range map[string]string{"anonymous": "", "credential": "Bearer 0123456789abcdef"} {
		b.Run(name, func(b *testing.B) {
			r := request(http.MethodPost, "/v1/charges", "Content-Type", "application/json",
				"Idempotency-Key", "8e03978e-40d5-43dd-bc93-6894a57f9324")
			if credential != "" {
				r.Header.Set("Authorization", credential)
			}
			b.ReportAllocs()
			for b.Loop() {
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
				x := &Call{h: h, r: r, executions: g, action: new(Action)}
				if err := x.prepare(); err != nil {
					b.Fatal(err)
				}
				x.close()
			}
		})
	}
}
