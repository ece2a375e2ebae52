//go:build unix

package ledger

import (
	"bytes"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// processorTime is what the process has used, in user and system mode.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkLedger is the whole cost of an event on Badger. 64 callers record two events of 600 bytes each, one after the
// other, as guarded calls do: with tokens, and with those that are signed when they are shown.
func BenchmarkLedger(b *testing.B) {
	for _, callers := range []int{1, 64} {
		for _, way := range []string{"signed", "shown"} {
			b.Run(fmt.Sprintf("%d %s", callers, way), func(b *testing.B) {
				st, err := badger.Open(b.TempDir(), badger.Options{})
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { _ = st.Close() })
				o := testOptions(st)
				o.Signature = func(_, _ []byte) ([]byte, error) { return nil, nil }
				o.Links = func(e *Event) []string { return e.Parents }
				l := mustOpen(b, o)
				payload := bytes.Repeat([]byte{'p'}, 600)
				b.ReportAllocs()
				b.ResetTimer()
				before, wrote := processorTime(), st.Stats()
				var next atomic.Int64
				var all sync.WaitGroup
				for range callers {
					all.Go(func() {
						for {
							n := next.Add(1) - 1
							if n >= int64(b.N) {
								return
							}
							e := testEvent(int(2*n) + 1)
							e.Workflow, e.Payload = fmt.Sprintf("00000000-0000-4000-8000-%012d", n/8), payload
							if way == "shown" {
								e.Header = payload[:90]
							}
							for _, id := range []string{fmt.Sprintf("00000000-0000-4000-8001-%012d", n), fmt.Sprintf("00000000-0000-4000-8002-%012d", n)} {
								e.ID = id
								if err := l.Append(b.Context(), []Event{e}); err != nil {
									b.Error(err)
									return
								}
								e.Parents = []string{id}
							}
						}
					})
				}
				all.Wait()
				if err := l.Close(b.Context()); err != nil {
					b.Fatal(err)
				}
				per := func(n uint64) float64 { return float64(n) / float64(2*b.N) }
				after := st.Stats()
				b.ReportMetric(per(uint64(processorTime()-before)), "cpu-ns/event")
				b.ReportMetric(per(after.Writes-wrote.Writes), "records/event")
				b.ReportMetric(per(after.Bytes-wrote.Bytes+after.BulkBytes-wrote.BulkBytes), "bytes/event")
				b.ReportMetric(per(after.Commits-wrote.Commits), "commits/event")
			})
		}
	}
}
