package badger

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// memLogBytes is the most that is written to a memory table's log: it is full at
// memTableSize, and the last transaction may be as large as Badger allows.
const memLogBytes = memTableSize + memTableSize/4

// reserve allocates the log of the current memory table. Badger maps it as one large hole,
// and a write to a hole on a full disk is SIGBUS, which kills the process (P4). Badger
// writes to that log with every transaction; for its other files Options.MinFree is kept.
func (r *reservation) reserve(lsm string) {
	info, err := os.Stat(lsm)
	if err != nil || info.ModTime().Equal(r.done) {
		return
	}
	logs, err := filepath.Glob(filepath.Join(lsm, "*.mem"))
	if err != nil {
		return
	}
	for _, name := range logs {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			continue // flushed in the meantime
		}
		// If it fails, because the disk is full or the file system cannot, the check of the
		// free space remains.
		_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, memLogBytes)
		f.Close()
	}
	// Done once two checks agree: two changes may carry the same time.
	if r.done = (time.Time{}); info.ModTime().Equal(r.seen) {
		r.done = info.ModTime()
	}
	r.seen = info.ModTime()
}

func identityOf(f *os.File) (fileIdentity, bool) {
	var s unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &s); err != nil {
		return fileIdentity{}, false
	}
	return fileIdentity{
		Size: s.Size, Modified: s.Mtim.Nano(), Changed: s.Ctim.Nano(), Inode: s.Ino, Device: uint64(s.Dev),
	}, true
}

// syncData leaves out metadata that reading does not need.
func syncData(f *os.File) error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}

// pause sleeps in the kernel: in an idle process the runtime's timers are rounded up to a
// millisecond, several times GroupWait.
func pause(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal may end it early, which does no harm
}
