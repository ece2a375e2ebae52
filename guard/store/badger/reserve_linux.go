package badger

import (
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// memLogBytes of a memory table's log are written at most: it is full at
// memTableSize, and the last transaction may be as large as Badger allows.
const memLogBytes = memTableSize + memTableSize/4

// reserve takes the disk space of the log of the memory table in use. Badger maps it
// as one large hole, and a write to a hole on a full disk is SIGBUS, which kills the
// process (P4). A log is the one file that Badger writes to with every commit; what
// else it writes, it writes now and then, and Options.MinFree is kept for that.
func (s *Store) reserve() {
	info, err := os.Stat(s.lsm())
	if err != nil || info.ModTime().Equal(s.reserved[1]) {
		return
	}
	logs, err := filepath.Glob(filepath.Join(s.lsm(), "*.mem"))
	if err != nil {
		return
	}
	for _, name := range logs {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			continue // flushed in the meantime
		}
		// Where it fails, because the disk is full or the file system cannot, the
		// look at the free space is what is left.
		_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, memLogBytes)
		f.Close()
	}
	// Done once it was the same at two looks: two changes may carry the same time.
	if s.reserved[1] = (time.Time{}); info.ModTime().Equal(s.reserved[0]) {
		s.reserved[1] = info.ModTime()
	}
	s.reserved[0] = info.ModTime()
}
