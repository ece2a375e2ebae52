//go:build linux || darwin || freebsd || dragonfly

package badger

import (
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// allocated is the disk space of a file: Badger's logs are long and mostly holes.
func allocated(info fs.FileInfo) int64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return int64(s.Blocks) * 512
	}
	return info.Size()
}

func freeSpace(dir string) (uint64, bool) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, false
	}
	return uint64(s.Bavail) * uint64(s.Bsize), true
}
