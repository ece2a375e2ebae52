package badger

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/fb"
	"github.com/dgraph-io/badger/v4/table"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// All tables are read whole, around Open and from time to time. For a block that fails its
// checksum, Badger's Get silently answers "not found", and compaction silently drops the
// rest of the table: the guard would take the key for free (P1).

// damagedFile marks a store in which a damaged table was found while it was open. Compaction may
// have replaced that table since by one with right checksums and missing entries.
const damagedFile = "DAMAGED"

// verifyAtOpen checks the tables before Badger opens them. After an orderly close the check
// of unchanged tables of the last level is deferred.
func (s *directory) verifyAtOpen(listed map[uint64]badgerdb.TableManifest) error {
	if err := s.markedDamaged(); err != nil {
		return err
	}
	now := slices.Collect(maps.Keys(listed))
	if s.manifest.current.State == stateClosed {
		s.verified.load()
		s.verified.retain(now)
		now = s.deferVerification(listed)
	}
	err := s.verified.verifyAll(s.lsm(), now, nil, nil, nil)
	if err != nil {
		s.deferred.cancel(err)
	}
	return err
}

// markedDamaged returns an error if the store was found damaged before.
func (s *directory) markedDamaged() error {
	why, err := os.ReadFile(filepath.Join(s.dir, damagedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("was found damaged before: %s", why)
}

// deferVerification defers the check of tables that may wait, and returns the others.
func (s *directory) deferVerification(listed map[uint64]badgerdb.TableManifest) (now []uint64) {
	last := badgerdb.DefaultOptions("").MaxLevels - 1
	for id, t := range listed {
		if int(t.Level) != last {
			now = append(now, id)
			continue
		}
		f, err := os.Open(table.NewFilename(id, s.lsm()))
		if err == nil && s.verified.unchanged(id, f) {
			s.deferred.add(id, f)
			continue
		}
		if err == nil {
			f.Close()
		}
		now = append(now, id)
	}
	return now
}

// verifyAll checks the tables ids in dir, several at a time. In a running store, gone
// reports whether Badger dropped a table during the check: it truncates and removes the
// file while we read it. Before Badger is open, gone is nil. see, if any, gets the newest entry
// of each key of a table, on several goroutines.
func (k *verifiedTables) verifyAll(dir string, ids []uint64, gone func(id uint64) bool, see func(key, value []byte), stop <-chan struct{}) error {
	next := make(chan uint64)
	failed := make(chan struct{})
	var once sync.Once
	var failure error
	var workers sync.WaitGroup
	for range min(len(ids), runtime.GOMAXPROCS(0), 4) {
		workers.Go(func() {
			for id := range next {
				err := k.verifyIn(dir, id, see)
				if err == nil || gone != nil && gone(id) {
					continue
				}
				once.Do(func() {
					failure = fmt.Errorf("table %s: %w", filepath.Base(table.IDToFilename(id)), err)
					close(failed)
				})
			}
		})
	}
feed:
	for _, id := range ids {
		select {
		case next <- id:
		case <-failed:
			break feed
		case <-stop:
			break feed
		}
	}
	close(next)
	workers.Wait()
	return failure
}

// verifyStored reads all segments and all tables, and compares the pointers in the tables with
// what the segments hold. A value that is damaged closes nothing: its entry is in Badger, so its
// key stays taken, and every read of it fails (P1).
func (s *Store) verifyStored() error {
	check := segmentCheck{s: s, segments: s.bodies.check(s.closing), now: s.options.Now()}
	if err := s.verify(func(uint64) bool { return true }, check.see); err != nil || s.isClosing() {
		return err
	}
	check.readSuspects()
	if s.isClosing() {
		return nil
	}
	if s.counters.damaged.Store(uint64(check.damaged)); check.damaged > 0 {
		s.options.Logger.Error("stored values are damaged: calls with their keys are refused until they expire",
			"dir", s.bodiesDir(), "values", check.damaged)
	}
	if check.unread > 0 && s.unhealthy() == nil {
		s.options.Logger.Warn("the check of stored values is incomplete: some cannot be read",
			"dir", s.bodiesDir(), "values", check.unread, "error", check.why)
	}
	return nil
}

// readAt reads the value at p, if the current entry of a key points there: it may be replaced or
// expired.
func (s *Store) readAt(key []byte, p pointer) error {
	found, err := s.get(key)
	if err != nil || found.raw == nil {
		return err
	}
	found.value = nil // it is read to see whether it is damaged
	r, err := decode(found.raw)
	if err != nil || !r.bulk || readPointer(r.value) != p {
		return err
	}
	if _, err = s.entry(key[1:], found, s.options.Now()); errors.Is(err, store.ErrNotFound) {
		return nil
	}
	return err
}

// segmentCheck compares the pointers in tables with what was found in segments before.
type segmentCheck struct {
	s        *Store
	segments map[int64]segmentFacts
	now      time.Time

	mu              sync.Mutex
	suspects        []suspect // at most maxSuspects
	damaged, unread int
	why             error // of the last that was not read
}

// suspect is a pointer to what the segments do not hold. Only reading it tells: its segment may be
// swept, or the entry replaced.
type suspect struct {
	key []byte
	at  pointer
}

// maxSuspects bounds the suspects in memory; so many are read before more are collected.
const maxSuspects = 10_000

func (c *segmentCheck) see(key, value []byte) {
	if key[0] != userSpace || len(value) != headerSize+pointerSize {
		return
	}
	r, err := decode(value)
	if err != nil || !r.bulk || !r.living(c.now) {
		return
	}
	p := readPointer(r.value)
	facts := c.segments[p.segment]
	if facts.has(p, len(key)-1) {
		return
	}
	if int64(p.offset) >= facts.size {
		// Written since, unless the file is cut: a pointer is stored when its value is in the file.
		info, err := os.Stat(filepath.Join(c.s.bodiesDir(), segmentName(p.segment)))
		if err == nil && p.end(len(key)-1) <= info.Size() {
			return
		}
	}
	c.mu.Lock()
	c.suspects = append(c.suspects, suspect{bytes.Clone(key), p})
	full := len(c.suspects) >= maxSuspects
	c.mu.Unlock()
	if full {
		c.readSuspects()
	}
}

// readSuspects reads what was collected. As walkSegment it rests for longer than it works: they may be most of a segment.
func (c *segmentCheck) readSuspects() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, suspect := range c.suspects {
		if c.s.isClosing() {
			break
		}
		begun := time.Now()
		err := c.s.readAt(suspect.key, suspect.at)
		switch {
		case errors.Is(err, store.ErrDamaged):
			c.damaged++
		case err != nil:
			c.unread++
			c.why = err
		}
		select {
		case <-c.s.closing:
		case <-time.After(3 * time.Since(begun)):
		}
	}
	c.suspects = c.suspects[:0]
}

// verifyNewTables checks, and counts, the tables that compaction has made since.
func (s *Store) verifyNewTables() error {
	return s.verify(func(id uint64) bool {
		_, ok := s.verified.get(id)
		return !ok
	}, nil)
}

func (s *Store) verify(which func(id uint64) bool, see func(key, value []byte)) error {
	ids, err := s.tables()
	if err != nil {
		return err
	}
	s.verified.retain(ids)
	chosen := ids[:0]
	for _, id := range ids {
		if which(id) {
			chosen = append(chosen, id)
		}
	}
	if err := s.verified.verifyAll(s.lsm(), chosen, s.dropped, see, s.closing); err != nil {
		err = corrupt(s.dir, "%w", err)
		s.markDamaged(err)
		return err
	}
	return nil
}

// dropped reports that Badger no longer has the table, which it forgets before it touches
// the file. In a closing store it is true.
func (s *Store) dropped(id uint64) bool {
	ids, err := s.tables()
	return err != nil || !slices.Contains(ids, id)
}

// markDamaged closes the store for good.
func (s *directory) markDamaged(err error) {
	name := filepath.Join(s.dir, damagedFile)
	noted := os.WriteFile(name, []byte(err.Error()), 0o600)
	if noted == nil {
		noted = s.disk.syncDir(s.dir)
	}
	s.fail(errors.Join(err, noted))
}

func (s *Store) tables() ([]uint64, error) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return nil, err
	}
	var ids []uint64
	for _, t := range s.db.Tables() {
		ids = append(ids, t.ID)
	}
	return ids, nil
}

// closePatienceForTables bounds the time in which an orderly close checks new tables, so
// that the next opening has less to read.
const closePatienceForTables = time.Second

// saveVerified writes the file TABLES after Badger was closed.
func (s *directory) saveVerified() error {
	listed, err := s.manifest.listed()
	if err != nil {
		return err
	}
	ids := slices.Collect(maps.Keys(listed))
	s.verified.retain(ids)
	begun := time.Now()
	for _, id := range ids {
		if _, ok := s.verified.get(id); ok || time.Since(begun) > closePatienceForTables {
			continue
		}
		if err := s.verified.verifyIn(s.lsm(), id, nil); err != nil {
			return fmt.Errorf("table %s: %w", filepath.Base(table.IDToFilename(id)), err)
		}
	}
	return s.verified.save()
}

// verifyLoop runs until the store closes.
func (s *Store) verifyLoop() {
	s.verifyAllDeferred()
	s.fillAbsence()
	if s.options.VerifyEvery < 0 {
		return
	}
	_ = s.verifyStored() // what it finds, it has logged
	tick := time.NewTicker(s.options.VerifyEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.closing:
			return
		case <-tick.C:
			_ = s.verifyStored()
		}
	}
}

// fillAbsence reads the tables that the next filter of absent keys lacks.
func (s *Store) fillAbsence() {
	for {
		s.reading.RLock()
		if s.usable() != nil {
			s.reading.RUnlock()
			return
		}
		ts := s.inTables()
		s.reading.RUnlock()
		ids, err := s.tables()
		if err != nil {
			return
		}
		lacking := s.absence.unread(ids, ts)
		if len(lacking) == 0 || s.verify(func(id uint64) bool { return slices.Contains(lacking, id) }, nil) != nil || s.isClosing() {
			return
		}
	}
}

// inTables is the highest timestamp in Badger's tables.
func (s *Store) inTables() (ts uint64) {
	for _, t := range s.db.Tables() {
		ts = max(ts, t.MaxVersion)
	}
	return ts
}

// deferredVerification are tables that were not read at Open, since they were verified
// before and the file system reports no change. They are read right after Open, and before
// anything that depends on them: if the disk has silently altered one, a lookup would say
// "not found", and the guard would take the key for free (P1). Only tables of Badger's last
// level are deferred: an entry lost from a table above it would uncover an older one below.
type deferredVerification struct {
	done   atomic.Bool
	tables []*deferredTable // by range of keys, once placed
}

type deferredTable struct {
	id          uint64
	left, right []byte // its first and last key; nil is unknown
	once        sync.Once
	err         error
	// file stays open, so that the table can be read after a compaction replaced it: its
	// damage is then in the new table.
	file *os.File
}

// add defers the check of a table.
func (v *deferredVerification) add(id uint64, f *os.File) {
	v.tables = append(v.tables, &deferredTable{id: id, file: f})
}

// setRanges sets the key ranges of the tables, once Badger is open. A table that Badger has
// replaced already counts for all keys.
func (v *deferredVerification) setRanges(all []badgerdb.TableInfo) {
	ranges := make(map[uint64]badgerdb.TableInfo, len(all))
	for _, t := range all {
		ranges[t.ID] = t
	}
	for _, t := range v.tables {
		if info, ok := ranges[t.id]; ok {
			t.left, t.right = info.Left[:len(info.Left)-8], info.Right[:len(info.Right)-8]
		}
	}
	v.done.Store(len(v.tables) == 0)
}

// verifyRange checks the deferred tables with keys from first to last, both inclusive. A
// nil last is the end.
func (s *Store) verifyRange(first, last []byte) error {
	if s.deferred.done.Load() {
		return nil
	}
	for _, t := range s.deferred.tables {
		if t.right != nil && (bytes.Compare(t.right, first) < 0 || last != nil && bytes.Compare(t.left, last) > 0) {
			continue
		}
		if err := s.verifyDeferred(t); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) verifyDeferred(t *deferredTable) error {
	t.once.Do(func() {
		err := s.verified.verify(t.id, t.file, nil)
		info, statErr := t.file.Stat()
		if err != nil && statErr == nil && info.Size() == 0 && s.dropped(t.id) {
			err = nil // a compaction was faster, and Badger has truncated the file
		}
		t.file.Close()
		if err != nil {
			t.err = corrupt(s.dir, "table %s: %w", filepath.Base(table.IDToFilename(t.id)), err)
			s.markDamaged(t.err)
		}
	})
	return t.err
}

// verifyAllDeferred checks the deferred tables that are left.
func (s *Store) verifyAllDeferred() {
	for _, t := range s.deferred.tables {
		if s.isClosing() {
			s.deferred.cancel(store.ErrClosed)
			return
		}
		if s.verifyDeferred(t) != nil {
			s.deferred.cancel(store.ErrUnhealthy)
			return
		}
	}
	s.deferred.done.Store(true)
}

// cancel gives up the deferred tables that are left, with err.
func (v *deferredVerification) cancel(err error) {
	for _, t := range v.tables {
		t.once.Do(func() {
			t.err = err
			t.file.Close()
		})
	}
}

// verifiedTables are the tables of Badger whose checksums were right, with the time of the
// check and their statistics. A table is written once, so a file that the system reports as
// unchanged is still right. An orderly close writes them to the file TABLES, whose loss
// costs nothing but time.
type verifiedTables struct {
	file    string
	absence *absence // learns the keys of every table that is read

	mu     sync.Mutex
	tables map[uint64]verifiedTable
}

// verifiedTable is a table whose checksums were right.
type verifiedTable struct {
	ID      uint64       `json:"id"`
	File    fileIdentity `json:"file"`
	Checked time.Time    `json:"checked"`
	Stats   tableStats   `json:"census"`
}

// fileIdentity changes with every change through the file system: Changed cannot be set back.
type fileIdentity struct {
	Size     int64  `json:"size"`
	Modified int64  `json:"modified"`
	Changed  int64  `json:"changed"`
	Inode    uint64 `json:"inode"`
	Device   uint64 `json:"device"`
}

func newVerifiedTables(dir string, absence *absence) *verifiedTables {
	return &verifiedTables{file: filepath.Join(dir, "TABLES"), absence: absence, tables: make(map[uint64]verifiedTable)}
}

// load reads the file TABLES, if it is there and whole.
func (k *verifiedTables) load() {
	var facts []verifiedTable
	b, err := os.ReadFile(k.file)
	if err != nil || json.Unmarshal(b, &facts) != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range facts {
		k.tables[f.ID] = f
	}
}

// save writes the file TABLES. It need not be durable: an older one lists files that have
// changed since. A full disk leaves the older one, without which the next opening reads all tables.
func (k *verifiedTables) save() error {
	k.mu.Lock()
	facts := make([]verifiedTable, 0, len(k.tables))
	for _, f := range k.tables {
		facts = append(facts, f)
	}
	k.mu.Unlock()
	slices.SortFunc(facts, func(a, b verifiedTable) int { return cmp.Compare(a.ID, b.ID) })
	b, err := json.Marshal(facts)
	if err != nil {
		return err
	}
	next := k.file + ".new"
	if err := os.WriteFile(next, append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(next, k.file)
}

func (k *verifiedTables) get(id uint64) (verifiedTable, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f, ok := k.tables[id]
	return f, ok
}

// retain forgets all tables but ids.
func (k *verifiedTables) retain(ids []uint64) {
	living := make(map[uint64]bool, len(ids))
	for _, id := range ids {
		living[id] = true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for id := range k.tables {
		if !living[id] {
			delete(k.tables, id)
		}
	}
}

// unchanged reports whether f is the verified file of table id.
func (k *verifiedTables) unchanged(id uint64, f *os.File) bool {
	known, ok := k.get(id)
	if !ok {
		return false
	}
	mark, ok := identityOf(f)
	return ok && mark == known.File
}

// verify checks a table and records the result.
func (k *verifiedTables) verify(id uint64, f *os.File, see func(key, value []byte)) error {
	mark, _ := identityOf(f) // before it is read
	filter := k.absence.next.Load()
	c, err := verifyTable(f, func(key, value []byte) {
		k.absence.add(key, filter)
		if see != nil {
			see(key, value)
		}
	})
	if err != nil {
		return err
	}
	k.absence.tableRead(id, filter)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tables[id] = verifiedTable{ID: id, File: mark, Checked: time.Now(), Stats: c}
	return nil
}

// verifyIn checks a table in dir.
func (k *verifiedTables) verifyIn(dir string, id uint64, see func(key, value []byte)) error {
	f, err := os.Open(table.NewFilename(id, dir))
	if err != nil {
		return err
	}
	defer f.Close()
	return k.verify(id, f, see)
}

// verifyTable reads a table file of Badger, compares every part with its checksum, calls seen for
// the newest entry of each key (a deletion has no value), and counts what will expire. Badger's own check ends the process, or panics on its own
// goroutine, if a file is cut or garbled in the wrong place.
//
// From the end: 4 bytes length of the checksum, the checksum of the index, 4 bytes length
// of the index, the index; before them the blocks that the index lists.
func verifyTable(f *os.File, seen func(key, value []byte)) (c tableStats, err error) {
	defer func() {
		// The index is read by generated code that trusts its offsets, and its checksum is short.
		if r := recover(); r != nil {
			err = fmt.Errorf("index cannot be read: %v", r)
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return c, err
	}
	index, blocks, err := readIndex(f, info.Size())
	if err != nil {
		return c, err
	}
	r := blockReader{f: f, end: blocks}
	count := statsCounter{buckets: make(map[int64]int64), seen: seen}
	var at int64
	var offset fb.BlockOffset
	for i := range index.OffsetsLength() {
		if !index.Offsets(&offset, i) {
			return c, fmt.Errorf("block %d is not in the index", i)
		}
		length := int64(offset.Len())
		if int64(offset.Offset()) != at || at+length > blocks {
			return c, fmt.Errorf("block %d lies outside", i)
		}
		block, err := r.read(at, int(length))
		if err != nil {
			return c, fmt.Errorf("block %d: %w", i, err)
		}
		entries, err := checkBlock(block)
		if err != nil {
			return c, fmt.Errorf("block %d: %w", i, err)
		}
		if err := count.block(entries); err != nil {
			return c, fmt.Errorf("block %d: %w", i, err)
		}
		at += length
	}
	if index.OffsetsLength() == 0 || at != blocks {
		return c, errors.New("the index does not cover the file")
	}
	return count.stats(info.Size()), nil
}

// blockReader reads consecutive blocks in large pieces.
type blockReader struct {
	f     *os.File
	end   int64 // of the blocks
	piece []byte
	from  int64 // where piece begins
}

func (r *blockReader) read(at int64, length int) ([]byte, error) {
	const large = 512 << 10
	if at < r.from || at+int64(length) > r.from+int64(len(r.piece)) {
		size := int(min(int64(max(large, length)), r.end-at))
		if cap(r.piece) < size {
			r.piece = make([]byte, size)
		}
		r.from, r.piece = at, r.piece[:size]
		if _, err := r.f.ReadAt(r.piece, at); err != nil {
			return nil, err
		}
	}
	return r.piece[at-r.from:][:length], nil
}

// readIndex returns the index of a table and the size of the blocks before it.
func readIndex(f io.ReaderAt, size int64) (*fb.TableIndex, int64, error) {
	end := size
	// back reads the n bytes before those read so far.
	back := func(n int64) ([]byte, error) {
		if n < 0 || n > end {
			return nil, errors.New("the file is cut or its end is garbled")
		}
		end -= n
		b := make([]byte, n)
		_, err := f.ReadAt(b, end)
		return b, err
	}
	counted := func() ([]byte, error) {
		n, err := back(4)
		if err != nil {
			return nil, err
		}
		return back(int64(binary.BigEndian.Uint32(n)))
	}
	sum, err := counted()
	if err != nil {
		return nil, 0, err
	}
	index, err := counted()
	if err != nil {
		return nil, 0, err
	}
	if err := checkSum(index, sum); err != nil {
		return nil, 0, fmt.Errorf("index: %w", err)
	}
	if len(index) < 8 {
		return nil, 0, errors.New("no index")
	}
	return fb.GetRootAsTableIndex(index, 0), end, nil
}

// checkBlock checks one block: entries, then the checksum over them, then its length.
func checkBlock(block []byte) (entries []byte, err error) {
	if len(block) < 4 {
		return nil, errors.New("too short")
	}
	end := len(block) - 4
	length := int(binary.BigEndian.Uint32(block[end:]))
	if length < 0 || length > end {
		return nil, errors.New("length of the checksum is garbled")
	}
	return block[:end-length], checkSum(block[:end-length], block[end-length:end])
}

// checkSum compares data with a checksum as Badger writes it: the message pb.Checksum with
// its sum, field 2, alone, since CRC-32C is the default algorithm.
func checkSum(data, sum []byte) error {
	var want uint64
	if len(sum) > 0 {
		n := 0
		if want, n = binary.Uvarint(sum[1:]); sum[0] != 2<<3 || n != len(sum)-1 {
			return errors.New("checksum is garbled or of an unknown kind")
		}
	}
	if uint64(crc32.Checksum(data, castagnoli)) != want {
		return errors.New("checksum does not match")
	}
	return nil
}

// tableStats are the bytes of a table by the time from which Badger may drop them. A table
// never changes, so they are counted once. An entry that a newer one in another table has
// replaced counts as living.
type tableStats struct {
	// Bytes is the size of the table.
	Bytes int64 `json:"bytes"`
	// Expiring is in the order of time, without what never expires.
	Expiring []expiring `json:"expiring,omitempty"`
}

// expiring are bytes that may be dropped from a time on, Unix seconds. It is zero for
// deletions and for entries that a newer one in the same table replaces.
type expiring struct {
	From  int64 `json:"from"`
	Bytes int64 `json:"bytes"`
}

// dead is the number of bytes that compaction could drop now, by Badger's clock.
func (c tableStats) dead(now time.Time) (sum int64) {
	for _, e := range c.Expiring {
		if e.From > now.Unix() {
			break
		}
		sum += e.Bytes
	}
	return sum
}

const (
	// bucketSeconds is the width of the narrowest bucket of expiries.
	bucketSeconds = 15 * 60
	// maxBuckets bounds the buckets of a table; two more may come on top.
	maxBuckets = 32
)

// statsCounter adds up bytes by bucket, entry by entry in the order of the table.
type statsCounter struct {
	buckets map[int64]int64
	key     []byte // of the last entry, without its version
	seen    func(key, value []byte)
}

const (
	badgerDeleted = 1 << 0 // in an entry's meta byte
	badgerVersion = 8      // bytes at the end of a key
	never         = -1
)

var errEntries = errors.New("entries are garbled although the checksum matches")

// block counts the entries of a block: the entries, the offset of each, little endian
// as on all systems that Badger runs on, and their number. An entry: 2 bytes each for
// how much of its key is as in the first one's and for the length of the rest, that
// rest, meta, user meta, expiry, value.
func (c *statsCounter) block(b []byte) error {
	end := len(b) - 4
	if end < 0 {
		return errEntries
	}
	n := int(binary.BigEndian.Uint32(b[end:]))
	if n < 0 || n > end/4 {
		return errEntries
	}
	offsets := end - 4*n
	var first []byte // the first key
	for i := range n {
		from, to := int(binary.LittleEndian.Uint32(b[offsets+4*i:])), offsets
		if i+1 < n {
			to = int(binary.LittleEndian.Uint32(b[offsets+4*i+4:]))
		}
		if from < 0 || from+4 > to || to > offsets {
			return errEntries
		}
		shared, rest := int(binary.LittleEndian.Uint16(b[from:])), int(binary.LittleEndian.Uint16(b[from+2:]))
		at := from + 4 + rest
		if at+2 > to || shared > len(first) || shared+rest < badgerVersion {
			return errEntries
		}
		if i == 0 {
			first = b[from+4 : at]
		}
		expires, size := binary.Uvarint(b[at+2 : to])
		if size <= 0 {
			return errEntries
		}
		bucket := int64(never)
		older := c.sameKeyAsLast(first[:shared], b[from+4:at])
		if !older {
			c.seen(c.key, b[at+2+size:to])
		}
		switch {
		case older || b[at]&badgerDeleted != 0:
			bucket = 0
		case expires > 0:
			bucket = (int64(expires) + bucketSeconds - 1) / bucketSeconds * bucketSeconds
		}
		c.buckets[bucket] += int64(to-from) + 4
	}
	return nil
}

// sameKeyAsLast reports whether a key, given in two parts, is an older version of the last one.
func (c *statsCounter) sameKeyAsLast(shared, rest []byte) bool {
	n := len(shared) + len(rest) - badgerVersion
	s := min(n, len(shared))
	same := len(c.key) == n && bytes.Equal(c.key[:s], shared[:s]) && bytes.Equal(c.key[s:], rest[:n-s])
	if !same {
		c.key = append(append(c.key[:0], shared[:s]...), rest[:n-s]...)
	}
	return same
}

// stats are the statistics of a table of size bytes, in few buckets of about as many bytes
// each. Buckets end late rather than early: what counts as dead is dead.
func (c *statsCounter) stats(size int64) tableStats {
	out := tableStats{Bytes: size}
	var all []expiring
	var total int64
	for from, n := range c.buckets {
		if from != never {
			all = append(all, expiring{From: from, Bytes: n})
			total += n
		}
	}
	slices.SortFunc(all, func(a, b expiring) int { return cmp.Compare(a.From, b.From) })
	var sum int64
	for i, e := range all {
		sum += e.Bytes
		if sum*maxBuckets > total || e.From == 0 || i == len(all)-1 {
			out.Expiring = append(out.Expiring, expiring{From: e.From, Bytes: sum})
			sum = 0
		}
	}
	return out
}
