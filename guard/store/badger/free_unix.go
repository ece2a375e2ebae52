//go:build linux || darwin || freebsd || dragonfly

package badger

import "golang.org/x/sys/unix"

func freeSpace(dir string) (uint64, bool) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, false
	}
	return uint64(s.Bavail) * uint64(s.Bsize), true
}
