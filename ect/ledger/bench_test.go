package ledger

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
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

// BenchmarkSequence is what the sequencer takes for one entry of 600 bytes, its share of
// the commit and of the head's signature included, in moves as full as they get and of
// one event each.
func BenchmarkSequence(b *testing.B) {
	for _, c := range []struct {
		name string
		open func(b *testing.B) store.Store
	}{
		{"memory", func(*testing.B) store.Store { return memory.New(memory.Options{}) }},
		{"badger", func(b *testing.B) store.Store {
			st, err := badger.Open(b.TempDir(), badger.Options{})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = st.Close() })
			return st
		}},
	} {
		for _, batch := range []int{1, maxMoved} {
			b.Run(fmt.Sprintf("%s/%d", c.name, batch), func(b *testing.B) {
				l := mustOpen(b, testOptions(c.open(b)))
				m := sequencer{Log: l}
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					b.StopTimer()
					var events []Event
					for range batch {
						e := testEvent(n)
						e.Payload = bytes.Repeat([]byte{'p'}, 600)
						events = append(events, e)
						n++
					}
					for len(events) > 0 {
						step := min(MaxEvents, len(events))
						if err := l.Append(b.Context(), events[:step]); err != nil {
							b.Fatal(err)
						}
						events = events[step:]
					}
					b.StartTimer()
					if _, err := m.move(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/entry")
			})
		}
	}
}

// BenchmarkReceipt is a proof in a tree of some thousand entries, every hash of which is
// proved again.
func BenchmarkReceipt(b *testing.B) {
	l := mustOpen(b, testOptions(memory.New(memory.Options{})))
	appendEvents(b, l, 0, 5000)
	drain(b, l)
	for b.Loop() {
		if _, err := l.Receipt(b.Context(), 1234); err != nil {
			b.Fatal(err)
		}
	}
}
