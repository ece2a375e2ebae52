package badger

import (
	"os"
	"path/filepath"
	"sync"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// imagingDisk is the real disk that tells before every step what comes.
type imagingDisk struct {
	osDisk
	mu sync.Mutex
	at func(what string)
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
	if err := d.osDisk.sync(f); err != nil {
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
	d.tell("sync")
	return d.osDisk.sync(f)
}

func (d *imagingDisk) syncDir(dir string) error {
	d.tell("syncDir " + filepath.Base(dir))
	return d.osDisk.syncDir(dir)
}
