package badger

import "time"

const (
	lookEvery  = time.Second // at the disk's free space, and for old versions
	sweepEvery = time.Minute
)

// maintain runs until the store closes.
func (s *Store) maintain() {
	look, sweep := time.NewTicker(lookEvery), time.NewTicker(sweepEvery)
	defer look.Stop()
	defer sweep.Stop()
	for {
		select {
		case <-s.closing:
			return
		case <-look.C:
			s.lookAtDisk()
			s.discard()
			s.resealIfChanged()
		case <-sweep.C:
			s.sweep()
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
