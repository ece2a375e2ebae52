package badger

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

var errDisk = errors.New("input/output error")

// faultyDisk is the real disk until a test says otherwise, and remembers what it was
// asked for, in order.
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
