package answer_test

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
)

// discard is a client and a sink that keep nothing.
type discard struct{ header http.Header }

func (d discard) Header() http.Header                  { return d.header }
func (discard) WriteHeader(int)                        {}
func (discard) Write(p []byte) (int, error)            { return len(p), nil }
func (discard) Start(int, map[string][]string)         {}
func (discard) SetTrailer(trailer map[string][]string) {}

// sinkOf hides that a client returns something from Write.
type sinkOf struct{ discard }

func (sinkOf) Write([]byte, bool) bool         { return true }
func (sinkOf) ReadBack(int64) io.ReadCloser    { return io.NopCloser(strings.NewReader("")) }
func (sinkOf) Judge(int) http.Header           { return nil }
func (sinkOf) Cut() bool                       { return false }
func (sinkOf) Wait(ready <-chan struct{}) bool { <-ready; return true }

// BenchmarkCapture is the recorder's own cost for an answer on its way: its header
// difference, its bytes, and the end that is held back.
func BenchmarkCapture(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			body, r := make([]byte, size), post()
			marks := []answer.Field{{Name: "Execution-Status", Value: "executed"}, {Name: "Execution-Id", Value: "1"}}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				to := discard{http.Header{"Server": {"Caddy"}}}
				w := newWriter(to, r)
				rec := newRecorder(w, sinkOf{}, marks...)
				rec.Header()["Content-Type"] = []string{"application/json"}
				rec.Header()["Content-Length"] = []string{strconv.Itoa(size)}
				rec.WriteHeader(http.StatusOK)
				if n, err := rec.Write(body); n != size || err != nil {
					b.Fatal(n, err)
				}
				if _, whole := rec.Finish(); !whole {
					b.Fatal("the answer is not whole")
				}
				rec.Release(b.Context(), 0)
			}
		})
	}
}
