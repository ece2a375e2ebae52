package caddymodule

import (
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// ObserveStore implements ObservedOpener.
func (b *BadgerStore) ObserveStore(o StoreObserver) { b.observer = o }

// ReportStore implements StoreReporter.
func (b *BadgerStore) ReportStore(st store.Store) metrics.StoreReport {
	s, ok := st.(*badger.Store)
	if !ok {
		return metrics.StoreReport{}
	}
	stats := s.Stats()
	return metrics.StoreReport{
		Bytes: map[string]uint64{
			"lsm": uint64(stats.Space.LSM), "bodies": uint64(stats.Space.Bodies), "log": uint64(stats.Space.Log),
		},
		Refused: stats.Full,
	}
}

// ReportDisk implements StoreReporter.
func (b *BadgerStore) ReportDisk(st store.Store) *metrics.DiskReport {
	s, ok := st.(*badger.Store)
	if !ok {
		return nil
	}
	stats := s.Stats()
	if !stats.FreeKnown {
		return nil
	}
	watermark := metrics.DiskEnough
	switch stats.Room {
	case badger.RoomLow:
		watermark = metrics.DiskLow
	case badger.RoomNone:
		watermark = metrics.DiskFull
	}
	return &metrics.DiskReport{Free: stats.Free, Watermark: watermark}
}

var (
	_ ObservedOpener = (*BadgerStore)(nil)
	_ StoreReporter  = (*BadgerStore)(nil)
)
