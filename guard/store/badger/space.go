package badger

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Room says what the free disk space and MaxSize still allow.
type Room int32

// The values of Room.
const (
	RoomEnough Room = iota // for everything
	RoomLow                // for what is under way
	RoomNone               // for nothing
)

// String is the form for operators.
func (r Room) String() string {
	switch r {
	case RoomNone:
		return "none"
	case RoomLow:
		return "low"
	default:
		return "enough"
	}
}

// limits are the options that may change while the store is open.
type limits struct{ minFree, maxSize int64 }

// floor is the free space in bytes under which nothing is written.
func (l limits) floor() int64 { return max(l.minFree/4, 0) }

func (o Options) limits() *limits { return &limits{minFree: o.MinFree, maxSize: o.MaxSize} }

// SetLimits changes Options.MinFree and Options.MaxSize, with effect at once.
func (s *Store) SetLimits(minFree, maxSize int64) {
	s.limits.Store(Options{MinFree: minFree, MaxSize: maxSize}.withDefaults().limits())
	s.checkSpace()
}

// reservation keeps the times of change of Badger's directory: when it was last seen, and
// when reserve was last done with it.
type reservation struct{ seen, done time.Time }

// checkSpace stops writes while the disk is nearly full: Badger writes to mapped files,
// where a full disk kills the process (P4).
func (s *Store) checkSpace() {
	s.checking.Lock()
	defer s.checking.Unlock()
	s.reserved.reserve(s.lsm())
	free, ok := s.disk.free(s.dir)
	s.checkFree(free, ok)
	s.checkSize()
}

func (s *directory) checkFree(free uint64, ok bool) {
	s.free.Store(free)
	s.freeKnown.Store(ok)
	l := s.limits.Load()
	now := RoomEnough
	switch {
	case !ok || l.minFree < 0:
	case free < uint64(l.floor()):
		now = RoomNone
	case free < uint64(l.minFree):
		now = RoomLow
	}
	if Room(s.room.Swap(int32(now))) == now {
		return
	}
	switch now {
	case RoomNone:
		s.options.Logger.Error("disk is full, nothing more is recorded until space is freed",
			"dir", s.dir, "free", free, "needed", l.minFree)
	case RoomLow:
		s.options.Logger.Error("disk is nearly full, nothing new begins until space is freed",
			"dir", s.dir, "free", free, "needed", l.minFree)
	default:
		s.options.Logger.Info("disk has space again", "dir", s.dir, "free", free)
	}
}

// checkSize refuses new executions while the store is larger than MaxSize. Between measurements
// the size is estimated from what was written, ordinary values twice: to the log and to a table.
func (s *Store) checkSize() {
	if s.space.Load() == nil {
		s.measure()
	}
	most := s.limits.Load().maxSize
	if most <= 0 {
		s.oversized.Store(false)
		return
	}
	const step = 1 << 20
	grown := int64(2*s.counters.bytes.Load() + s.counters.bulkBytes.Load())
	size := s.size.Load() + grown - s.sizeWritten.Load()
	if size > most && grown-s.sizeWritten.Load() >= step {
		size = s.measure().Total
	}
	was := s.oversized.Load()
	// Hysteresis, so that the state does not change with every measurement.
	now := size > most || was && size > most-most/32
	if now == was {
		return
	}
	s.oversized.Store(now)
	if now {
		s.options.Logger.Error("store has reached its largest size, nothing new begins until something expires",
			"dir", s.dir, "size", size, "max_size", most)
	} else {
		s.options.Logger.Info("store is below its largest size again", "dir", s.dir, "size", size, "max_size", most)
	}
}

// admit returns an error for a batch that must not be queued: for want of space, or because
// a table that its conditions depend on is damaged.
func (s *Store) admit(writes []store.Write) error {
	if err := s.hasRoom(writes); err != nil {
		s.counters.full.Add(1)
		return err
	}
	if s.deferred.done.Load() {
		return nil
	}
	for i := range writes {
		if writes[i].If.None() {
			continue
		}
		name := userKey(writes[i].Key)
		if err := s.verifyRange(name, name); err != nil {
			return notWritten(err)
		}
	}
	return nil
}

// hasRoom returns errFull if the disk has no room for the batch, and errQuota if the store
// has none. The space between minFree and the floor is kept for outcomes: to refuse them
// would put every running execution in doubt (P6).
func (s *directory) hasRoom(writes []store.Write) error {
	l := s.limits.Load()
	least := l.minFree
	switch Room(s.room.Load()) {
	case RoomEnough:
		if s.oversized.Load() && !updatesInPlace(writes) {
			return fmt.Errorf("%w of %d bytes: %s", errQuota, l.maxSize, s.dir)
		}
		return nil
	case RoomLow:
		if updatesInPlace(writes) {
			return nil
		}
	case RoomNone:
		least = l.floor()
	}
	return fmt.Errorf("%w: less than %d bytes free for %s", errFull, least, s.dir)
}

// updatesInPlace reports whether writes replace an existing entry and take little space.
func updatesInPlace(writes []store.Write) bool {
	for i := range writes {
		if writes[i].Large() && !writes[i].Delete {
			return false
		}
	}
	first := slices.IndexFunc(writes, func(w store.Write) bool { return !w.Check })
	return !writes[first].If.Holds(nil) // only VersionIs refuses a key without an entry
}

// Space is the disk space of a store by part, in bytes: allocated blocks, not lengths of
// files. It is measured once a minute.
type Space struct {
	// LSM are Badger's tables, Bodies the values that are stored apart, Log everything else:
	// logs and manifest.
	LSM, Bodies, Log int64
	// Total is the sum.
	Total int64
	// Dead are the bytes of LSM that a compaction could drop.
	Dead int64
	// Measured is the time of the measurement.
	Measured time.Time
}

// measure adds up all files of the store.
func (s *Store) measure() Space {
	grown := int64(2*s.counters.bytes.Load() + s.counters.bulkBytes.Load())
	now := Space{Measured: s.options.Now()}
	// Files come and go during the walk; one that cannot be read counts as nothing.
	_ = filepath.WalkDir(s.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return nil
		}
		part, _, _ := strings.Cut(strings.TrimPrefix(path, s.dir+string(filepath.Separator)), string(filepath.Separator))
		switch bytes := allocated(info); part {
		case "lsm":
			now.LSM += bytes
		case "bodies":
			now.Bodies += bytes
		default:
			now.Log += bytes
		}
		return nil
	})
	now.Total = now.LSM + now.Bodies + now.Log
	if lsm, err := s.lsmStats(); err == nil {
		now.Dead = lsm.dead
	}
	s.space.Store(&now)
	s.size.Store(now.Total)
	s.sizeWritten.Store(grown)
	return now
}

// Badger drops expired entries when it compacts, and it compacts when newer data arrives
// from above. A store that was busy once would never get its space back: Badger leaves
// tables of the last level alone, and Flatten does nothing if all data is in one level. So
// when enough is dead, we write two filler entries, one at either end of a range of the
// last level, which force a merge of the range. They have the lowest version and are
// expired already, so that no read sees them and the merge drops them.

const (
	// minDead is the least number of dead bytes that are worth a compaction.
	minDead = 8 << 20
	// deadShare is the least share of dead bytes, as one in so many.
	deadShare = 4
	// deadShareLow is the same while space is short, deadShareBusy while more than
	// busyBatches a minute need the processor.
	deadShareLow  = 20
	deadShareBusy = 2
	busyBatches   = 6000
	// roundBytes is how many bytes of the last level are merged in one round.
	roundBytes = 256 << 20
	// fillerVersion is lower than all others.
	fillerVersion = 1
	// fillerSize is the size of a filler entry. Fillers have to fill the memory table too,
	// since nothing else makes Badger flush it.
	fillerSize = 128 << 10
	// flushPatience bounds the wait for the flush.
	flushPatience = 30 * time.Second
)

// lsmStats are the statistics of all of Badger's tables.
type lsmStats struct {
	total, dead int64        // bytes
	upper       int64        // bytes above the last level that holds any
	last        []tableRange // the tables of that level, by their keys
}

// tableRange is a table, or several neighbours.
type tableRange struct {
	left, right []byte
	total, dead int64
}

// lsmStats adds up the statistics of the tables, without reading any.
func (s *Store) lsmStats() (lsmStats, error) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return lsmStats{}, err
	}
	var now lsmStats
	tables := s.db.Tables()
	level := 0
	for _, t := range tables {
		level = max(level, t.Level)
	}
	at := time.Now() // Badger drops by its own clock
	for _, t := range tables {
		f, ok := s.verified.get(t.ID)
		if !ok {
			f.Stats.Bytes = int64(t.OnDiskSize)
		}
		l := tableRange{left: t.Left[:len(t.Left)-8], right: t.Right[:len(t.Right)-8], total: f.Stats.Bytes, dead: f.Stats.dead(at)}
		now.total += l.total
		now.dead += l.dead
		if t.Level == level {
			now.last = append(now.last, l)
		} else {
			now.upper += l.total
		}
	}
	slices.SortFunc(now.last, func(a, b tableRange) int { return bytes.Compare(a.left, b.left) })
	return now, nil
}

// worthCompacting reports whether compaction is worth rewriting the live entries.
func (k lsmStats) worthCompacting(short, busy bool) bool {
	share := int64(deadShare)
	switch {
	case short:
		share = deadShareLow
	case busy:
		share = deadShareBusy
	}
	return k.dead >= minDead && k.dead*share >= k.total
}

// mostDead returns the neighbours in the last level with the most dead bytes, up to most
// bytes together, at least one table.
func (k lsmStats) mostDead(most int64) (found tableRange) {
	var now tableRange
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

// reclaim compacts as long as it is worthwhile.
func (s *Store) reclaim(busy bool) {
	for s.verifyNewTables() == nil {
		before, err := s.lsmStats()
		short := Room(s.room.Load()) != RoomEnough || s.oversized.Load()
		if err != nil || !before.worthCompacting(short, busy) || s.isClosing() {
			return
		}
		err = s.reclaimRound(before)
		if errors.Is(err, errNoSpace) || errors.Is(err, errClosing) {
			return
		}
		if err == nil {
			err = s.verifyNewTables()
		}
		after, statsErr := s.lsmStats()
		if err = errors.Join(err, statsErr); err != nil {
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
		if freed < minDead/2 {
			return // nothing could be reclaimed; tried again in a minute
		}
	}
}

var (
	errNoSpace = errors.New("too little space to compact")
	errClosing = errors.New("closing")
)

func (s *directory) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// reclaimRound merges one range of the last level and everything above.
func (s *Store) reclaimRound(k lsmStats) error {
	l := k.mostDead(roundBytes)
	needed := l.total - l.dead
	if k.upper > 0 {
		needed = k.total - k.dead // keys are hashes, so above they are spread over all ranges
	}
	needed += 2*memTableSize + s.limits.Load().floor()
	if free, ok := s.disk.free(s.dir); ok && free < uint64(needed) {
		return errNoSpace
	}
	s.discardOldVersions()
	return s.merge(l.left, l.right)
}

// merge compacts all entries between two keys, and all above the last level, into the last level.
func (s *Store) merge(left, right []byte) error {
	for {
		newest := uint64(0)
		for _, t := range s.db.Tables() {
			newest = max(newest, t.ID)
		}
		if err := s.writeFiller(left, right); err != nil {
			return err
		}
		if err := s.awaitFlush(newest); err != nil {
			return err
		}
		if err := s.db.Flatten(1); err != nil {
			return err
		}
		// If everything is still in level 0, Badger needs a few tables more before it
		// compacts them.
		tables := s.db.Tables() // by level
		if len(tables) == 0 || tables[len(tables)-1].Level > 0 {
			return nil
		}
	}
}

// writeFiller writes filler entries to both ends of a range until the memory table with the
// first of them is full.
func (s *Store) writeFiller(left, right []byte) error {
	value := make([]byte, fillerSize)
	for written := 0; written < memTableSize+4*fillerSize; {
		if s.isClosing() {
			return errClosing
		}
		txn := s.db.NewTransactionAt(math.MaxUint64, true)
		for _, key := range [][]byte{left, right} {
			e := badgerdb.NewEntry(bytes.Clone(key), value)
			e.ExpiresAt = 1
			if err := txn.SetEntry(e); err != nil {
				txn.Discard()
				return fmt.Errorf("writing filler entries: %w", err)
			}
			written += fillerSize
			if bytes.Equal(left, right) {
				break
			}
		}
		if err := txn.CommitAt(fillerVersion, nil); err != nil {
			err = fmt.Errorf("writing filler entries: %w", err)
			s.fail(err) // Badger accepts no more writes
			return err
		}
	}
	return nil
}

// awaitFlush waits until Badger has a table newer than newest.
func (s *Store) awaitFlush(newest uint64) error {
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

const (
	spaceEvery   = 100 * time.Millisecond // checks the free disk space
	discardEvery = time.Second            // discards old versions
	tidyEvery    = time.Minute            // removes what has expired
	verifySoon   = 10 * time.Second       // checks tables that compaction has made
	// reclaimShare bounds the share of time spent on reclaim, as one part in so many.
	reclaimShare = 10
)

// maintain runs until the store closes.
func (s *Store) maintain() {
	s.background.Go(s.tidyLoop)
	free, look := time.NewTicker(spaceEvery), time.NewTicker(discardEvery)
	defer free.Stop()
	defer look.Stop()
	for {
		select {
		case <-s.closing:
			return
		case <-free.C:
			s.checkSpace()
		case <-look.C:
			s.discardOldVersions()
			if err := s.manifest.refresh(); err != nil {
				s.options.Logger.Warn("writing the state of the store", "dir", s.dir, "error", err)
			}
		}
	}
}

// tidyLoop runs until the store closes, on its own goroutine, since a compaction may take a
// while.
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
			_ = s.verifyNewTables()     // it has logged the error and closed the store
			if s.deferred.done.Load() { // else verifyLoop is at it
				s.fillAbsence()
			}
		case <-tidy.C:
			s.sweep()
			s.sweepKept()
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

// discardOldVersions lets Badger drop the versions that no scan reads any more.
func (s *Store) discardOldVersions() {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.usable() != nil {
		return
	}
	s.db.SetDiscardTs(s.oldestScan())
}

// oldestScan is the oldest timestamp of Badger that is read.
func (s *Store) oldestScan() uint64 {
	oldest := s.durable.Load()
	s.scansMu.Lock()
	defer s.scansMu.Unlock()
	for ts := range s.scans {
		oldest = min(oldest, ts)
	}
	return oldest
}

// sweep removes the segments whose values have all expired.
func (s *Store) sweep() {
	end := s.options.Now().Add(-sweepGrace).Unix()
	s.drop(func(segment int64) bool { return !isKept(segment) && segment <= end })
}

func (s *Store) drop(which func(segment int64) bool) {
	n, err := s.bodies.drop(which)
	s.counters.dropped.Add(uint64(n))
	if err != nil {
		s.options.Logger.Warn("dropping segments", "dir", s.dir, "error", err)
	}
}

// keptSegment is what is known of a full kept segment. Nothing ever points to it anew, so what
// is dead in it stays dead.
type keptSegment struct {
	at   int64  // all before it is dead
	key  []byte // of the value there
	dead bool   // all of it was dead
	ts   uint64 // at this timestamp of Badger
	died time.Time
}

// walkFor bounds the time in which one call of sweepKept looks for living values. Others of
// tidyLoop's tasks wait for it.
const walkFor = 10 * time.Second

// sweepKept removes the kept segments that nothing points to any more. One that was found so is
// removed sweepGrace later, when no scan reads an older state, since reads may have its pointers.
// tidyLoop calls it.
func (s *Store) sweepKept() {
	if !s.deferred.done.Load() {
		return // a damaged table would hide pointers
	}
	// Their last layer is applied, since a segment is full only when a later layer begins another.
	full := s.bodies.fullKept()
	ts := s.durable.Load()
	now := s.options.Now() // not before ts
	gone := make(map[int64]bool)
	known := make(map[int64]*keptSegment, len(full)) // what could not be removed stays known as dead
	for _, segment := range full {
		k := cmp.Or(s.kept[segment], new(keptSegment))
		known[segment] = k
		switch {
		case s.isClosing():
			return
		case k.dead:
			gone[segment] = now.Sub(k.died) >= sweepGrace && s.oldestScan() >= k.ts
		case s.options.Now().Sub(now) < walkFor:
			if err := s.findLiving(segment, k, ts, now); err != nil && !errors.Is(err, errClosing) && s.unhealthy() == nil {
				s.options.Logger.Warn("looking for what is pruned", "dir", s.dir, "error", err)
			}
		}
	}
	s.kept = known
	s.drop(func(segment int64) bool { return gone[segment] })
}

// findLiving moves k to the first value in its segment that Badger points to at ts, or to where
// it was when the time was over that began at now.
func (s *Store) findLiving(segment int64, k *keptSegment, ts uint64, now time.Time) error {
	living := func(key []byte, at int64) (bool, error) {
		s.reading.RLock()
		defer s.reading.RUnlock()
		if err := s.usable(); err != nil {
			return false, err
		}
		txn := s.db.NewTransactionAt(ts, false)
		defer txn.Discard()
		raw, err := lookUp(txn, key)
		if raw == nil || err != nil {
			return false, err
		}
		r, err := decode(raw)
		if err != nil || !r.bulk {
			return false, err
		}
		p := readPointer(r.value)
		return p.segment == segment && p.offset == uint64(at), nil
	}
	if k.key != nil {
		if found, err := living(k.key, k.at); found || err != nil {
			return err
		}
	}
	found := false
	err := s.bodies.walk(segment, k.at, s.closing, func(at int64, key []byte) error {
		name := userKey(key)
		is, err := living(name, at)
		if is || err == nil && s.options.Now().Sub(now) >= walkFor {
			k.at, k.key, found = at, name, true
			return errFound
		}
		return err
	})
	if err == nil && !found {
		k.dead, k.ts, k.died = true, ts, now
	}
	if errors.Is(err, errFound) {
		return nil
	}
	return err
}

var errFound = errors.New("found")

// Stats are the counts of a store since it was opened.
type Stats struct {
	// Batches that were committed, and the writes in them.
	Batches, Writes uint64
	// Conflicts are batches whose condition did not hold.
	Conflicts uint64
	// Commits are frames of the log, each with one sync; Batches divided by Commits is the
	// gain of group commit.
	Commits uint64
	// Applied are the writes to Badger; the others were overwritten or deleted before.
	Applied uint64
	// BulkSyncs are syncs of files of bulk values.
	BulkSyncs uint64
	// Bytes of keys and ordinary values, and bytes of bulk values, that were committed.
	Bytes, BulkBytes uint64
	// Dropped counts the segments removed after their values have expired or were deleted.
	Dropped uint64
	// Damaged is the number of values in segments that the last check found missing or altered.
	Damaged uint64
	// Full counts the batches refused for want of disk space.
	Full uint64
	// Reclaimed counts the compactions run to reclaim space, and ReclaimedBytes what they
	// gave back; LastReclaim is when the last of them ended.
	Reclaimed, ReclaimedBytes uint64
	LastReclaim               time.Time
	// Space is the disk space that the store takes.
	Space Space
	// Free is the free disk space in bytes; FreeKnown is false if the system does not
	// report it. Room follows from it, and is RoomLow too if the store has reached MaxSize.
	// MinFree and MaxSize are the options.
	Free             uint64
	FreeKnown        bool
	Room             Room
	MinFree, MaxSize int64
	// Healthy is false once the store has closed itself.
	Healthy bool
	// Verifying is true while tables from before this opening are yet to be checked.
	Verifying bool
}

type counters struct {
	batches, writes, conflicts, commits, applied, bulkSyncs, bytes, bulkBytes, dropped, damaged, full atomic.Uint64
	reclaimed, reclaimedBytes                                                                         atomic.Uint64
	lastReclaim                                                                                       atomic.Int64 // Unix nanoseconds
}

// Stats returns the present counts and the last measurements. It touches no file.
func (s *directory) Stats() Stats {
	c, l := &s.counters, s.limits.Load()
	now := Stats{
		Batches:   c.batches.Load(),
		Writes:    c.writes.Load(),
		Conflicts: c.conflicts.Load(),
		Commits:   c.commits.Load(),
		Applied:   c.applied.Load(),
		BulkSyncs: c.bulkSyncs.Load(),
		Bytes:     c.bytes.Load(),
		BulkBytes: c.bulkBytes.Load(),
		Dropped:   c.dropped.Load(),
		Damaged:   c.damaged.Load(),
		Full:      c.full.Load(),

		Reclaimed:      c.reclaimed.Load(),
		ReclaimedBytes: c.reclaimedBytes.Load(),

		Free:      s.free.Load(),
		FreeKnown: s.freeKnown.Load(),
		Room:      Room(s.room.Load()),
		MinFree:   l.minFree,
		MaxSize:   l.maxSize,
		Healthy:   s.unhealthy() == nil,
		Verifying: !s.deferred.done.Load(),
	}
	if at := c.lastReclaim.Load(); at != 0 {
		now.LastReclaim = time.Unix(0, at)
	}
	if s.oversized.Load() && now.Room == RoomEnough {
		now.Room = RoomLow
	}
	if space := s.space.Load(); space != nil {
		now.Space = *space
	}
	return now
}
