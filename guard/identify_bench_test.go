package guard

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
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
				c, err := guardedRequest{opened: opened{executions: g}, h: h, r: r, action: new(Action)}.identify(new(client))
				if err != nil {
					b.Fatal(err)
				}
				_ = c.body.Close()
			}
		})
	}
}

// BenchmarkPassMessage is what a message that changes nothing pays for being read: 200 B through the
// handler to one that reads it and answers with 1 KiB.
func BenchmarkPassMessage(b *testing.B) {
	h := newHandler(b, Config{Settings: Settings{Protocol: protocol.MCP}, Open: openTest(b)})
	const head, tail = `{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{"uri":"file:///`, `"}}`
	text := head + strings.Repeat("n", 200-len(head)-len(tail)) + tail
	answer := []byte(`{"jsonrpc":"2.0","id":1,"result":{"contents":"` + strings.Repeat("n", 975) + `"}}`)
	next := nextFunc(func(w http.ResponseWriter, r *http.Request) error {
		if n, err := io.Copy(io.Discard, r.Body); n != int64(len(text)) || err != nil {
			b.Fatal(n, err)
		}
		w.Header()["Content-Type"] = []string{"application/json"}
		_, err := w.Write(answer)
		return err
	})
	b.ReportAllocs()
	w := &nowhere{http.Header{}}
	for b.Loop() {
		r := request(http.MethodPost, "/mcp", "Content-Type", "application/json")
		ctx, cancel := context.WithCancel(r.Context())
		r = r.WithContext(ctx)
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(text)), int64(len(text))
		if err := h.Serve(w, r, next); err != nil {
			b.Fatal(err)
		}
		cancel()
	}
}

// BenchmarkReadMessage is what a POST with JSON pays for being looked at, by what its body is.
func BenchmarkReadMessage(b *testing.B) {
	h := newHandler(b, Config{Settings: Settings{Protocol: protocol.Auto}, Open: openTest(b)})
	for name, body := range map[string]string{
		"plain":   `{"amount":1999,"note":"` + strings.Repeat("n", 175) + `"}`,
		"late":    `{"id":1999,"params":{"note":"` + strings.Repeat("n", 155) + `"},"amount":1}`,
		"message": `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"note":"` + strings.Repeat("n", 110) + `"}}}`,
	} {
		b.Run(name, func(b *testing.B) {
			r := request(http.MethodPost, "/v1/charges", "Content-Type", "application/json", "Authorization", "Bearer 0123456789abcdef", "Accept", "*/*")
			b.ReportAllocs()
			for b.Loop() {
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
				q, _, err := h.read(r, h.Actions[0])
				if err != nil || (q.message != nil) != (name == "message") {
					b.Fatal(err, q.message)
				}
				_ = q.text.Close()
			}
		})
	}
}

func openTest(b *testing.B) func() (*Engine, func(), error) {
	e := testEngine(b)
	return func() (*Engine, func(), error) { return e, func() {}, nil }
}
