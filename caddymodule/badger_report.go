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
	usage := s.Usage()
	return metrics.StoreReport{
		Bytes:   map[string]uint64{"lsm": usage.LSM, "bodies": usage.Bodies},
		Refused: s.Stats().Full,
	}
}

// ReportDisk implements StoreReporter.
func (b *BadgerStore) ReportDisk(st store.Store) *metrics.DiskReport {
	s, ok := st.(*badger.Store)
	if !ok {
		return nil
	}
	free, level, ok := s.Disk()
	if !ok {
		return nil
	}
	return &metrics.DiskReport{Free: free, Watermark: metrics.Watermark(level)}
}

var (
	_ ObservedOpener = (*BadgerStore)(nil)
	_ StoreReporter  = (*BadgerStore)(nil)
)
