package guard

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// flushed is a client that takes everything at once.
type flushed struct {
	nowhere
	status int
}

func (f *flushed) WriteHeader(status int) { f.status = status }

func (f *flushed) Flush() {}

// BenchmarkRetry is what the guard does for a retry that is answered from the record, 200 B through the
// handler: of a call with a key, and of those without, by the evidence. What recognition costs is the
// difference.
func BenchmarkRetry(b *testing.B) {
	body := `{"amount":1999,"note":"` + strings.Repeat("n", 175) + `"}`
	answer := []byte(`{"id":"ch_1","note":"` + strings.Repeat("n", 1000) + `"}`)
	const tries = 60 // of one call; retry counts above 63 are not told apart
	for _, bench := range []struct {
		name   string
		status int
		field  [2]string
	}{
		{"key", 200, [2]string{"Idempotency-Key", "8e03978e-40d5-43dd-bc93-6894a57f9324"}},
		{"stated", 200, [2]string{"X-Stainless-Retry-Count", "1"}},
		{"key/500", 500, [2]string{"Idempotency-Key", "8e03978e-40d5-43dd-bc93-6894a57f9324"}},
		{"answer/500", 500, [2]string{"X-No-Key", "00000000-0000-0000-0000-000000000000"}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			h := newHandler(b, Config{Settings: Settings{Protocol: protocol.Auto}, Open: openTest(b), Host: StatusHost{}})
			runs := 0
			next := nextFunc(func(w http.ResponseWriter, r *http.Request) error {
				runs++
				w.Header()["Content-Type"] = []string{"application/json"}
				w.WriteHeader(bench.status)
				_, err := w.Write(answer)
				return err
			})
			attempts := 0
			serve := func() *flushed {
				if bench.name == "stated" { // an answered retry of the same count is new, and so is every first attempt
					bench.field[1] = strconv.Itoa(attempts % tries)
				}
				attempts++
				r := request(http.MethodPost, "/v1/charges", "Content-Type", "application/json", "Authorization", "Bearer 0123456789abcdef", "Accept", "*/*", bench.field[0], bench.field[1])
				ctx, cancel := context.WithCancel(r.Context())
				defer cancel()
				r = r.WithContext(ctx)
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
				w := &flushed{nowhere: nowhere{http.Header{}}}
				if err := h.Serve(w, r, next); err != nil {
					b.Fatal(err)
				}
				return w
			}
			serve()
			if w := serve(); w.header.Get(HeaderExecutionStatus) != "replayed" || w.status != bench.status ||
				(w.header.Get(headerExecutionRecognized) == "") != strings.HasPrefix(bench.name, "key") {
				b.Fatal(w.status, w.header)
			}
			b.ReportAllocs()
			for b.Loop() {
				serve()
			}
			want := 1
			if bench.name == "stated" {
				want = (attempts + tries - 1) / tries
			}
			if runs != want {
				b.Fatal("executed", runs, "times, not", want)
			}
		})
	}
}
