package badger

import (
	"io"
	"os"
	"runtime"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// disk is the part of the file system that makes things durable; tests replace it by one
// that fails.
type disk interface {
	// record writes a frame of the log at off and returns when it is durable.
	record(f *os.File, frame []byte, off int64) error
	// apply commits txn to Badger at ts. It is not durable there.
	apply(txn *badgerdb.Txn, ts uint64) error
	// write writes b at off.
	write(f *os.File, b []byte, off int64) error
	// sync returns when the contents of f are durable.
	sync(f *os.File) error
	// syncDir returns when the entries of dir are durable.
	syncDir(dir string) error
	// free is the free space for dir in bytes; ok is false if the system does not report it.
	free(dir string) (bytes uint64, ok bool)
}

type osDisk struct{}

func (d osDisk) record(f *os.File, frame []byte, off int64) error {
	if err := d.write(f, frame, off); err != nil {
		return err
	}
	return d.sync(f)
}

func (osDisk) apply(txn *badgerdb.Txn, ts uint64) error { return txn.CommitAt(ts, nil) }

func (osDisk) write(f *os.File, b []byte, off int64) error {
	n, err := f.WriteAt(b, off)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return err
}

func (osDisk) sync(f *os.File) error { return syncData(f) }

func (osDisk) syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // directories cannot be synced there
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closeErr := d.Close(); err == nil {
		err = closeErr
	}
	return err
}

func (osDisk) free(dir string) (uint64, bool) { return freeSpace(dir) }
