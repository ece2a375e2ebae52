//go:build unix

package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// metered counts what is committed.
type metered struct {
	store.Store
	commits, writes, bytes atomic.Int64
}

func (s *metered) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	s.commits.Add(1)
	s.writes.Add(int64(len(batch)))
	for i := range batch {
		s.bytes.Add(int64(len(batch[i].Key) + len(batch[i].Value)))
	}
	return s.Store.Commit(ctx, batch...)
}

// processorTime is what the process has used, in user and system mode.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkLedger is the whole cost of an event on Badger: its share of the commit, and the
// sequencer's. 64 callers record two events of 600 bytes each, one after the other, as
// guarded calls do.
func BenchmarkLedger(b *testing.B) {
	for _, callers := range []int{1, 64} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			st, err := badger.Open(b.TempDir(), badger.Options{})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = st.Close() })
			counted := &metered{Store: st}
			o := testOptions(counted)
			o.BatchDelay = 0
			o.Sign = func(_ context.Context, e Event) ([]byte, error) {
				part := base64.RawURLEncoding.AppendEncode
				token := append(part(nil, e.Payload[:90]), '.')
				token = append(part(token, e.Payload), '.')
				return part(token, e.Payload[:64]), nil
			}
			o.Links = func(e *Event) []string { return e.Parents }
			l := mustOpen(b, o)
			l.Start()
			payload := bytes.Repeat([]byte{'p'}, 600)
			b.ReportAllocs()
			b.ResetTimer()
			before := processorTime()
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
						e.Workflow, e.Unsigned, e.Payload = fmt.Sprintf("00000000-0000-4000-8000-%012d", n/8), true, payload
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
			per := func(n int64) float64 { return float64(n) / float64(2*b.N) }
			b.ReportMetric(per(int64(processorTime()-before)), "cpu-ns/event")
			b.ReportMetric(per(counted.writes.Load()), "records/event")
			b.ReportMetric(per(counted.bytes.Load()), "bytes/event")
			b.ReportMetric(per(counted.commits.Load()), "commits/event")
		})
	}
}
