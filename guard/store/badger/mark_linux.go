package badger

import (
	"os"

	"golang.org/x/sys/unix"
)

func markOf(f *os.File) (fileMark, bool) {
	var s unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &s); err != nil {
		return fileMark{}, false
	}
	return fileMark{
		Size: s.Size, Modified: s.Mtim.Nano(), Changed: s.Ctim.Nano(), Inode: s.Ino, Device: uint64(s.Dev),
	}, true
}
