package ledger

import (
	"bytes"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// BenchmarkRecord is what an event costs the request that it describes, besides its
// writes' share of the commit.
func BenchmarkRecord(b *testing.B) {
	l := mustOpen(b, testOptions(memory.New(memory.Options{})))
	e := testEvent(1)
	e.Payload = bytes.Repeat([]byte{'p'}, 600)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		p, err := l.Record(e)
		if err != nil {
			b.Fatal(err)
		}
		_ = p.Done(store.ErrClosed)
	}
}

// BenchmarkReceipt is a proof in a tree of some thousand entries, every hash of which is
// proved again.
func BenchmarkReceipt(b *testing.B) {
	l := mustOpen(b, testOptions(memory.New(memory.Options{})))
	appendEvents(b, l, 0, 5000)

	for b.Loop() {
		if _, err := l.Receipt(b.Context(), 1234); err != nil {
			b.Fatal(err)
		}
	}
}
