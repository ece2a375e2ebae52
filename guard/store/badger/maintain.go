package badger

import "time"

const (
	roomEvery  = 100 * time.Millisecond // looks at the disk's free space
	lookEvery  = time.Second            // for old versions
	tidyEvery  = time.Minute            // what has expired
	verifySoon = 10 * time.Second       // tables that compaction has made
	// reclaimShare bounds what compaction for space may take of the time: one part
	// in so many.
	reclaimShare = 10
)

// maintain runs until the store closes.
func (s *Store) maintain() {
	s.background.Go(s.tidyLoop)
	free, look := time.NewTicker(roomEvery), time.NewTicker(lookEvery)
	defer free.Stop()
	defer look.Stop()
	for {
		select {
		case <-s.closing:
			return
		case <-free.C:
			s.lookAtDisk()
		case <-look.C:
			s.discard()
			s.resealIfChanged()
		}
	}
}

// tidyLoop runs until the store closes. It has a goroutine of its own, for a
// compaction may take a while.
func (s *Store) tidyLoop() {
	tidy, verify := time.NewTicker(tidyEvery), time.NewTicker(verifySoon)
	defer tidy.Stop()
	defer verify.Stop()
	var rested time.Time
	var seen uint64 // batches
	for {
		select {
		case <-s.closing:
			return
		case <-verify.C:
			_ = s.verifyNew() // it has told the logger and closed the store
		case <-tidy.C:
			s.sweep()
			batches := s.counters.batches.Load()
			busy := batches-seen > busyBatches
			seen = batches
			if begun := time.Now(); begun.After(rested) {
				s.reclaim(busy)
				rested = begun.Add(reclaimShare * time.Since(begun))
			}
			s.measure()
		}
	}
}

// discard tells Badger which versions nobody reads any more.
func (s *Store) discard() {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.usable() != nil {
		return
	}
	oldest := s.durable.Load()
	s.scansMu.Lock()
	for ts := range s.scans {
		oldest = min(oldest, ts)
	}
	s.scansMu.Unlock()
	s.db.SetDiscardTs(oldest)
}

func (s *Store) resealIfChanged() {
	if err := s.seal.grown(); err != nil {
		s.options.Logger.Warn("writing the state of the store", "dir", s.dir, "error", err)
	}
}

// sweep drops the files of bulk values that have expired.
func (s *Store) sweep() {
	n, err := s.bodies.sweep(s.options.Now())
	s.counters.dropped.Add(uint64(n))
	if err != nil {
		s.options.Logger.Warn("dropping expired bulk values", "dir", s.dir, "error", err)
	}
}
