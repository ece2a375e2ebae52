package checkpoint_test

import (
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// BenchmarkCheckpoint is what a call with a checkpoint costs besides its commits: the snapshot, the result, and their sealing.
func BenchmarkCheckpoint(b *testing.B) {
	for _, size := range []int{200, 20 << 10} {
		b.Run(fmt.Sprint("image=", size), func(b *testing.B) {
			v := checkpoint.New(memory.New(memory.Options{}), seal.Generate())
			s, terms := full("id", size), checkpoint.Terms{TTL: ttl}
			b.ReportAllocs()
			for b.Loop() {
				p, err := v.Prepare(ctx, s, nil, terms)
				if err != nil {
					b.Fatal(err)
				}
				_ = p.Done(nil)
				end, err := v.Record(ctx, p.Handle(), result(100))
				if err != nil {
					b.Fatal(err)
				}
				_ = end.Done(nil)
			}
		})
	}
}
