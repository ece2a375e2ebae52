package badger

import (
	"errors"
	"io"
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

// recordAtOnce knows the file systems whose buffered writes obey RWF_DSYNC as they obey O_DSYNC.
// Elsewhere a call may return before anything is synced, and the probe would find it cheap (P2).
func recordAtOnce(dir string) recordFunc {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return nil
	}
	switch uint32(s.Type) {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC:
		return writeDurably
	}
	return nil
}

// writeDurably writes with RWF_DSYNC: the call returns when the bytes, and a size that grew with
// them, are durable. What an interrupted call has written is written, and synced, once more.
func writeDurably(f *os.File, b []byte, off int64) error {
	for len(b) > 0 {
		n, err := unix.Pwritev2(int(f.Fd()), [][]byte{b}, off, unix.RWF_DSYNC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return os.NewSyscallError("pwritev2", err)
		case n == 0:
			return io.ErrShortWrite
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// pause sleeps in the kernel: in an idle process the runtime's timers are rounded up to a
// millisecond, several times GroupWait.
func pause(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal may end it early, which does no harm
}
