package badger

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger/wal"
)

var errDisk = errors.New("input/output error")

// faultyDisk is the real disk with hooks for failures, and records the calls in order.
type faultyDisk struct {
	osDisk

	mu       sync.Mutex
	calls    []string
	onCommit func() error // before a frame is recorded; an error replaces that
	landed   func() error // after it; an error hides that it landed
	onApply  func() error // before Badger has a layer; an error replaces that
	onWrite  func(name string) error
	onSync   func(name string) error
	left     uint64 // free space
}

func (d *faultyDisk) called(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, what)
}

func (d *faultyDisk) reset() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = nil
}

func (d *faultyDisk) all() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.calls)
}

func (d *faultyDisk) count(what string) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.calls {
		if c == what {
			n++
		}
	}
	return n
}

func (d *faultyDisk) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func (d *faultyDisk) get(f func()) { d.set(f) }

func (d *faultyDisk) apply(txn *badgerdb.Txn, ts uint64) error {
	d.called("apply")
	var hook func() error
	d.get(func() { hook = d.onApply })
	if hook != nil {
		if err := hook(); err != nil {
			return err
		}
	}
	return d.osDisk.apply(txn, ts)
}

func (d *faultyDisk) record(f *os.File, frame []byte, off int64) error {
	d.called("commit")
	var before, after func() error
	d.get(func() { before, after = d.onCommit, d.landed })
	if before != nil {
		if err := before(); err != nil {
			return err
		}
	}
	if err := d.osDisk.record(f, frame, off); err != nil || after == nil {
		return err
	}
	return after()
}

func (d *faultyDisk) write(f *os.File, b []byte, off int64) error {
	d.called("write")
	var hook func(string) error
	d.get(func() { hook = d.onWrite })
	if hook != nil {
		if err := hook(filepath.Base(f.Name())); err != nil {
			// As a full disk does: some of it came through.
			_ = d.osDisk.write(f, b[:len(b)/2], off)
			return err
		}
	}
	return d.osDisk.write(f, b, off)
}

func (d *faultyDisk) sync(f *os.File) error {
	d.called("sync")
	var hook func(string) error
	d.get(func() { hook = d.onSync })
	if hook != nil {
		if err := hook(filepath.Base(f.Name())); err != nil {
			return err
		}
	}
	return d.osDisk.sync(f)
}

func (d *faultyDisk) syncDir(dir string) error {
	d.called("syncDir " + filepath.Base(dir))
	return d.osDisk.syncDir(dir)
}

func (d *faultyDisk) free(string) (uint64, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.left, true
}

func newFaulty(t *testing.T, o Options) (*Store, *faultyDisk) {
	t.Helper()
	d := &faultyDisk{left: 1 << 40}
	s := reopenWith(t, t.TempDir(), o, d)
	d.reset()
	return s, d
}

func reopenWith(t *testing.T, dir string, o Options, d disk) *Store {
	t.Helper()
	if o.Absent == nil {
		o.Absent = []string{""} // all keys
	}
	s, err := openWith(dir, o, d)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func mustCommit(t *testing.T, s *Store, writes ...store.Write) store.Version {
	t.Helper()
	v, err := s.Commit(t.Context(), writes...)
	if err != nil {
		t.Fatalf("commit: %v", err)
	}
	return v
}

func wantValue(t *testing.T, s store.Store, key, value string) {
	t.Helper()
	e, err := s.Get(t.Context(), []byte(key))
	if err != nil || string(e.Value) != value {
		t.Fatalf("get %q = %.40q, %v; want %.40q", key, e.Value, err, value)
	}
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v; want %v", what, err, want)
	}
}

func put(key, value string) store.Write {
	return store.Write{Key: []byte(key), Value: []byte(value)}
}

func insert(key, value string) store.Write {
	return store.Write{Key: []byte(key), Value: []byte(value), If: store.Absent()}
}

// wait bounds only tests that fail.
func wait(t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(30 * time.Second):
		t.Fatal("nothing came")
	}
}

// imagingDisk is the real disk with a hook before and after every step; it records what a
// loss of power would leave of our files.
type imagingDisk struct {
	osDisk
	mu     sync.Mutex
	at     func(what string)
	synced map[string][]byte // by name
}

func newImaging(at func(what string)) *imagingDisk {
	return &imagingDisk{at: at, synced: make(map[string][]byte)}
}

func (d *imagingDisk) step(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at(what)
}

func (d *imagingDisk) record(f *os.File, frame []byte, off int64) error {
	d.step("record")
	if err := d.osDisk.write(f, frame, off); err != nil {
		return err
	}
	d.step("sync of the record")
	if err := d.sync(f); err != nil {
		return err
	}
	d.step("recorded")
	return nil
}

func (d *imagingDisk) apply(txn *badgerdb.Txn, ts uint64) error {
	d.step("apply")
	if err := d.osDisk.apply(txn, ts); err != nil {
		return err
	}
	d.step("applied")
	return nil
}

func (d *imagingDisk) write(f *os.File, b []byte, off int64) error {
	d.step("write")
	return d.osDisk.write(f, b, off)
}

func (d *imagingDisk) sync(f *os.File) error {
	content, err := os.ReadFile(f.Name())
	if err != nil {
		return err
	}
	if err := d.osDisk.sync(f); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.synced[f.Name()] = content
	return nil
}

func (d *imagingDisk) syncDir(dir string) error {
	d.step("syncDir " + filepath.Base(dir))
	err := d.osDisk.syncDir(dir)
	d.step("syncedDir " + filepath.Base(dir))
	return err
}

// forgetfulDisk is the real disk, with segments as Linux writes them: a sync that fails leaves what
// it did not write in the page cache, and later syncs pass over it.
type forgetfulDisk struct {
	osDisk
	mu      sync.Mutex
	failing bool
	cached  map[string][]written // since the last sync, by name
	durable map[string][]byte
	most    int // segments at once with unsynced writes
}

type written struct {
	at int64
	b  []byte
}

func newForgetful() *forgetfulDisk {
	return &forgetfulDisk{cached: make(map[string][]written), durable: make(map[string][]byte)}
}

func (d *forgetfulDisk) write(f *os.File, b []byte, off int64) error {
	if strings.HasSuffix(f.Name(), segmentSuffix) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.cached[f.Name()] = append(d.cached[f.Name()], written{off, slices.Clone(b)})
		d.most = max(d.most, len(d.cached))
	}
	return d.osDisk.write(f, b, off)
}

func (d *forgetfulDisk) sync(f *os.File) error {
	if !strings.HasSuffix(f.Name(), segmentSuffix) {
		return d.osDisk.sync(f)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	cached := d.cached[f.Name()]
	delete(d.cached, f.Name())
	if d.failing {
		return errDisk
	}
	content := d.durable[f.Name()]
	for _, w := range cached {
		if missing := int(w.at) + len(w.b) - len(content); missing > 0 {
			content = append(content, make([]byte, missing)...)
		}
		copy(content[w.at:], w.b)
	}
	d.durable[f.Name()] = content
	return nil
}

// losePower leaves of the segments in a store's directory what is durable. The store is closed.
func (d *forgetfulDisk) losePower(t *testing.T, dir string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "bodies", "*"+segmentSuffix))
	must(t, err)
	for _, name := range names {
		must(t, os.WriteFile(name, d.durable[name], 0o600))
	}
}

// crashed copies the files of a store as a crash at this moment would leave them. The
// logs of Badger's memory are left out: see TestBadgersLogsDoNotMatter.
func crashed(t *testing.T, from string) (to string) {
	t.Helper()
	return copied(t, from, func(name string) ([]byte, error) { return os.ReadFile(name) })
}

// powerless copies the files of a store as a loss of power at this moment would leave them:
// without what was not synced. It is called from the hook.
func (d *imagingDisk) powerless(t *testing.T, from string) (to string) {
	t.Helper()
	return copied(t, from, func(name string) ([]byte, error) {
		if dir := filepath.Base(filepath.Dir(name)); dir != "bodies" && dir != "wal" {
			return os.ReadFile(name) // Badger syncs its tables, and the manifest is synced
		}
		return d.synced[name], nil
	})
}

func copied(t *testing.T, from string, content func(name string) ([]byte, error)) (to string) {
	t.Helper()
	to = t.TempDir()
	err := filepath.WalkDir(from, func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // Badger has removed it meanwhile
		}
		inside, relErr := filepath.Rel(from, name)
		if err = errors.Join(err, relErr); err != nil {
			return err
		}
		target := filepath.Join(to, inside)
		switch {
		case e.IsDir():
			return os.MkdirAll(target, 0o700)
		case strings.HasSuffix(name, ".mem") || strings.HasSuffix(name, ".vlog"):
			return nil
		}
		b, err := content(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return errors.Join(err, os.WriteFile(target, b, 0o600))
	})
	if err != nil {
		t.Errorf("copying a store: %v", err)
	}
	return to
}

// A fill writes executions as the guard does: a claim with a record and three index
// entries, and a completion that replaces them, with the answer as a bulk value.
type fill struct {
	records int
	from    int           // the first record's number
	key     time.Duration // how long the keys live; zero is for ever
	result  time.Duration // how long the answers live
	settled bool          // writes only what a settlement leaves
}

const (
	fillValue = 450  // bytes of a sealed record
	fillBulk  = 1024 // bytes of a sealed answer
	fillBatch = 21   // records
)

// fillName is the execution key of record n, spread as evenly as the guard's.
func fillName(n int) []byte {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(n)))
	return sum[:]
}

func fillKey(space byte, middle int, n int) []byte {
	b := append(make([]byte, 0, 1+middle+32), space)
	h := fillName(-n - 1)
	return append(append(b, h[:middle]...), fillName(n)...)
}

func (f fill) into(t testing.TB, s *Store) {
	t.Helper()
	const workers = 48 // so that they share syncs
	next := make(chan int)
	failed := make(chan error, workers)
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for n := range next {
				if err := f.write(t, s, n, min(n+fillBatch, f.from+f.records)); err != nil {
					failed <- err
					for range next { // so that nobody waits
					}
					return
				}
			}
		})
	}
	for n := f.from; n < f.from+f.records; n += fillBatch {
		next <- n
	}
	close(next)
	all.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
}

func (f fill) write(t testing.TB, s *Store, from, to int) error {
	var claims, outcomes []store.Write
	value, answer := make([]byte, fillValue), make([]byte, fillBulk)
	for n := from; n < to; n++ {
		claims = append(claims,
			store.Write{Key: fillKey('x', 0, n), If: store.Absent(), Value: value},
			store.Write{Key: fillKey('s', 9, n)},
			store.Write{Key: fillKey('c', 32, n)},
			store.Write{Key: fillKey('w', 24, n)})
	}
	condition := store.Absent()
	if !f.settled {
		version, err := s.Commit(t.Context(), claims...)
		if err != nil {
			return err
		}
		condition = store.VersionIs(version)
	}
	now := s.options.Now()
	var keyEnd time.Time
	if f.key > 0 {
		keyEnd = now.Add(f.key)
	}
	for n := from; n < to; n++ {
		outcomes = append(outcomes,
			store.Write{Key: fillKey('x', 0, n), If: condition, Value: value, Expires: keyEnd},
			store.Write{Key: fillKey('s', 10, n), Expires: keyEnd},
			store.Write{Key: fillKey('c', 32, n), Expires: keyEnd},
			store.Write{Key: fillKey('w', 24, n), Expires: keyEnd},
			store.Write{Key: fillKey('r', 20, n), Value: answer, Bulk: true, Expires: now.Add(f.result)})
		if !f.settled {
			outcomes = append(outcomes, store.Write{Key: fillKey('s', 9, n), Delete: true})
		}
	}
	_, err := s.Commit(t.Context(), outcomes...)
	return err
}

// blocks is the disk space of a directory, as du counts it.
func blocks(t testing.TB, dir string) (bytes int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err == nil {
			bytes += allocated(info)
		}
		return err
	})
	must(t, err)
	return bytes
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// flip changes one byte; a negative offset counts from the end.
func flip(t *testing.T, file string, offset int) {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, err)
	if offset < 0 {
		offset += len(b)
	}
	b[offset] ^= 0x20
	must(t, os.WriteFile(file, b, 0o600))
}

// manual is a clock that the test sets.
type manual struct {
	mu  sync.Mutex
	now time.Time
}

func (m *manual) Now() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now
}

func (m *manual) advance(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = m.now.Add(d)
}

func (m *manual) bulk(key string, size int, ttl time.Duration) store.Write {
	return store.Write{Key: []byte(key), Value: bytes.Repeat([]byte(key), size)[:size], Bulk: true, Expires: m.Now().Add(ttl)}
}

// expiring is an ordinary write.
func (m *manual) expiring(key string, size int, ttl time.Duration) store.Write {
	w := m.bulk(key, size, ttl)
	w.Bulk = false
	return w
}

// kept is a bulk write without an expiry.
func kept(key string, size int) store.Write {
	return store.Write{Key: []byte(key), Value: bytes.Repeat([]byte(key), size)[:size], Bulk: true}
}

func newManual() *manual { return &manual{now: time.Unix(1_700_000_000, 0)} }

// log is the recorded range of log files.
func (s *manifestFile) log() wal.Range {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current.Log
}
