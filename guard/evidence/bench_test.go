package evidence_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// BenchmarkCall is the evidence of a call without tokens, recorded on Badger by 64 callers:
// its two events drafted, and committed by two commits that have nothing else. Nobody asks for
// their tokens.
func BenchmarkCall(b *testing.B) {
	st, err := badger.Open(b.TempDir(), badger.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = st.Close() })
	opened, err := evidence.Open(b.Context(), evidence.Options{Store: st, Sealer: seal.Generate(), Node: "n1", Ring: newRing(b)})
	if err != nil {
		b.Fatal(err)
	}
	if err := opened.SignWhenShown(b.Context(), opened.Ring()); err != nil {
		b.Fatal(err)
	}
	builder, err := opened.EventBuilder(identity)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	var next atomic.Int64
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			for next.Add(1) <= int64(b.N) {
				now := time.Now()
				c := call("")
				checkpoint, err := builder.Checkpoint(now, c)
				if err == nil {
					err = opened.Append(b.Context(), now.Add(time.Hour), nil, checkpoint)
				}
				if err != nil {
					b.Error(err)
					return
				}
				drafts, err := builder.Outcome(now, c, &evidence.Outcome{Checkpoint: checkpoint.ID(), Verdict: execution.Completed, Status: 200})
				if err == nil {
					err = opened.Append(b.Context(), now.Add(time.Hour), nil, drafts...)
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if err := opened.Close(b.Context()); err != nil {
		b.Fatal(err)
	}
}
