package badger

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// Badger drops what has expired when a compaction comes by. A compaction comes when
// newer data pushes down from above, so in a store that is written to steadily the
// space comes back by itself, and in one that was busy once it never does: tables in
// the last level are left alone, whatever has expired in them, and Flatten too does
// nothing where all data stands in one level. So where enough is dead, a stretch of
// the last level is given something from above to merge with: two entries, one at
// either end of it, that are as old as can be and expired already, so that no read
// ever sees them and the merge drops them.

const (
	// leastDead bytes are worth a compaction.
	leastDead = 8 << 20
	// deadShare of all tables is worth one: more than one byte in so many.
	deadShare = 4
	// deadShareLow is the same while space is short, deadShareBusy while there are
	// more than busyBatches a minute, which a compaction takes the processor from.
	deadShareLow  = 20
	deadShareBusy = 2
	busyBatches   = 6000
	// stretch is how many bytes of the last level are merged in one round.
	stretch = 256 << 20
	// nudgeVersion is older than everything else.
	nudgeVersion = 1
	// nudgeValue is the size of one of the entries. They also have to fill the
	// memory table, for nothing else makes Badger write it to a table.
	nudgeValue = 128 << 10
	// flushPatience bounds the wait for that.
	flushPatience = 30 * time.Second
)

// stock is what Badger's tables hold.
type stock struct {
	total, dead int64 // bytes
	upper       int64 // bytes above the last level that holds any
	last        []lot // the tables of that level, by their keys
}

// lot is a table in stock.
type lot struct {
	left, right []byte
	total, dead int64
}

// stock counts by what is known of the tables and reads none.
func (s *Store) stock() (stock, error) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return stock{}, err
	}
	var now stock
	tables := s.db.Tables()
	level := 0
	for _, t := range tables {
		level = max(level, t.Level)
	}
	at := time.Now() // Badger's clock, and not ours, is what it drops by
	for _, t := range tables {
		f, ok := s.known.get(t.ID)
		if !ok {
			f.Census.Bytes = int64(t.OnDiskSize)
		}
		l := lot{left: t.Left[:len(t.Left)-8], right: t.Right[:len(t.Right)-8], total: f.Census.Bytes, dead: f.Census.dead(at)}
		now.total += l.total
		now.dead += l.dead
		if t.Level == level {
			now.last = append(now.last, l)
		} else {
			now.upper += l.total
		}
	}
	slices.SortFunc(now.last, func(a, b lot) int { return bytes.Compare(a.left, b.left) })
	return now, nil
}

// pays reports whether compaction is worth what it costs: what lives is written anew.
func (k stock) pays(short, busy bool) bool {
	share := int64(deadShare)
	switch {
	case short:
		share = deadShareLow
	case busy:
		share = deadShareBusy
	}
	return k.dead >= leastDead && k.dead*share >= k.total
}

// stretch is the neighbours in the last level with the most that is dead, up to most
// bytes together, at least one.
func (k stock) stretch(most int64) (found lot) {
	var now lot
	from := 0
	for _, l := range k.last {
		now.total += l.total
		now.dead += l.dead
		for now.total > most && now.total > l.total {
			now.total -= k.last[from].total
			now.dead -= k.last[from].dead
			from++
		}
		now.left, now.right = k.last[from].left, l.right
		if found.left == nil || now.dead > found.dead {
			found = now
		}
	}
	return found
}

// reclaim compacts for as long as it pays.
func (s *Store) reclaim(busy bool) {
	for s.verifyNew() == nil {
		before, err := s.stock()
		if err != nil || !before.pays(s.short(), busy) || s.isClosing() {
			return
		}
		err = s.reclaimRound(before)
		if errors.Is(err, errNoSpace) || errors.Is(err, errClosing) {
			return
		}
		if err == nil {
			err = s.verifyNew()
		}
		after, stockErr := s.stock()
		if err = errors.Join(err, stockErr); err != nil {
			if s.unhealthy() == nil {
				s.options.Logger.Warn("reclaiming the space of what has expired", "dir", s.dir, "error", err)
			}
			return
		}
		freed := before.total - after.total
		s.counters.reclaimed.Add(1)
		s.counters.reclaimedBytes.Add(uint64(max(freed, 0)))
		s.counters.lastReclaim.Store(s.options.Now().UnixNano())
		s.options.Logger.Debug("reclaimed the space of what has expired", "dir", s.dir, "bytes", freed)
		if freed < leastDead/2 {
			return // something holds it back; the next minute is soon enough
		}
	}
}

var (
	errNoSpace = errors.New("too little space to compact")
	errClosing = errors.New("closing")
)

func (s *Store) short() bool { return Room(s.room.Load()) != RoomEnough || s.over.Load() }

func (s *Store) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// reclaimRound merges one stretch of the last level, and all that lies above.
func (s *Store) reclaimRound(k stock) error {
	l := k.stretch(stretch)
	needed := l.total - l.dead
	if k.upper > 0 {
		needed = k.total - k.dead // keys are hashes, so above they lie everywhere
	}
	needed += 2*memTableSize + s.limits.Load().floor()
	if free, ok := s.disk.free(s.dir); ok && free < uint64(needed) {
		return errNoSpace
	}
	s.discard()
	return s.merge(l.left, l.right)
}

// merge brings all entries between two keys, and all that lie above the last level,
// to the last level.
func (s *Store) merge(left, right []byte) error {
	for {
		newest := uint64(0)
		for _, t := range s.db.Tables() {
			newest = max(newest, t.ID)
		}
		if err := s.nudge(left, right); err != nil {
			return err
		}
		if err := s.flushed(newest); err != nil {
			return err
		}
		if err := s.db.Flatten(1); err != nil {
			return err
		}
		// Where all is in level 0 still, it needs a few tables more before Badger
		// finds them worth a compaction.
		tables := s.db.Tables() // by level
		if len(tables) == 0 || tables[len(tables)-1].Level > 0 {
			return nil
		}
	}
}

// nudge writes entries to both ends of a stretch until the memory table that has the
// first of them is full.
func (s *Store) nudge(left, right []byte) error {
	value := make([]byte, nudgeValue)
	for written := 0; written < memTableSize+4*nudgeValue; {
		if s.isClosing() {
			return errClosing
		}
		txn := s.db.NewTransactionAt(math.MaxUint64, true)
		for _, key := range [][]byte{left, right} {
			e := badgerdb.NewEntry(bytes.Clone(key), value)
			e.ExpiresAt = 1
			if err := txn.SetEntry(e); err != nil {
				txn.Discard()
				return fmt.Errorf("writing beside what has expired: %w", err)
			}
			written += nudgeValue
			if bytes.Equal(left, right) {
				break
			}
		}
		if err := txn.CommitAt(nudgeVersion, nil); err != nil {
			err = fmt.Errorf("writing beside what has expired: %w", err)
			s.fail(err) // Badger takes nothing more, from nobody
			return err
		}
	}
	return nil
}

// flushed waits until Badger has a table newer than the one that was the newest.
func (s *Store) flushed(newest uint64) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	enough := time.After(flushPatience)
	for {
		for _, t := range s.db.Tables() {
			if t.ID > newest {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-s.closing:
			return errClosing
		case <-enough:
			return errors.New("the memory table was not written to a table")
		}
	}
}
