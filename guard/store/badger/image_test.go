package badger

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// imagingDisk is the real disk that tells before and after every step, and remembers
// what a loss of power would leave of the files that are ours.
type imagingDisk struct {
	osDisk
	mu     sync.Mutex
	at     func(what string)
	synced map[string][]byte // by name
}

func newImaging(at func(what string)) *imagingDisk {
	return &imagingDisk{at: at, synced: make(map[string][]byte)}
}

func (d *imagingDisk) tell(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at(what)
}

func (d *imagingDisk) record(f *os.File, frame []byte, off int64) error {
	d.tell("record")
	if err := d.osDisk.write(f, frame, off); err != nil {
		return err
	}
	d.tell("sync of the record")
	if err := d.sync(f); err != nil {
		return err
	}
	d.tell("recorded")
	return nil
}

func (d *imagingDisk) apply(txn *badgerdb.Txn, ts uint64) error {
	d.tell("apply")
	if err := d.osDisk.apply(txn, ts); err != nil {
		return err
	}
	d.tell("applied")
	return nil
}

func (d *imagingDisk) write(f *os.File, b []byte, off int64) error {
	d.tell("write")
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
	d.tell("syncDir " + filepath.Base(dir))
	err := d.osDisk.syncDir(dir)
	d.tell("syncedDir " + filepath.Base(dir))
	return err
}

// crashed copies the files of a store as a crash at this moment would leave them. The
// logs of Badger's memory are left out: see TestBadgersLogsDoNotMatter.
func crashed(t *testing.T, from string) (to string) {
	t.Helper()
	return copied(t, from, func(name string) ([]byte, error) { return os.ReadFile(name) })
}

// powerless copies the files of a store as a loss of power at this moment would leave
// them: without what was not synced. It is called from within tell.
func (d *imagingDisk) powerless(t *testing.T, from string) (to string) {
	t.Helper()
	return copied(t, from, func(name string) ([]byte, error) {
		if dir := filepath.Base(filepath.Dir(name)); dir != "bodies" && dir != "wal" {
			return os.ReadFile(name) // Badger syncs its tables, and the seal is synced
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
