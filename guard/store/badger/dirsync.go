package badger

import (
	"os"
	"time"
)

// dirSync makes the names of Badger's files durable. Badger creates the log of a new
// memtable without a sync of its directory; on a file system that does not do so by
// itself, a crash could take the whole log away after its entries were acknowledged.
type dirSync struct {
	dir   string
	disk  disk
	known time.Time // modification time when last synced
}

// coarse is more than the tick of file systems' clocks: within it two changes may
// carry the same time.
const coarse = 50 * time.Millisecond

// settle syncs the directory if it may have changed since the last call.
func (d *dirSync) settle() error {
	info, err := os.Stat(d.dir)
	if err != nil {
		return err
	}
	changed := info.ModTime()
	if changed.Equal(d.known) {
		return nil
	}
	if err := d.disk.syncDir(d.dir); err != nil {
		return err
	}
	if time.Since(changed) > coarse {
		d.known = changed
	}
	return nil
}
