//go:build linux || darwin || freebsd || dragonfly

package badger

import (
	"io/fs"
	"syscall"
)

// allocated is what a file takes on disk: Badger's logs are long and mostly holes.
func allocated(info fs.FileInfo) int64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return int64(s.Blocks) * 512
	}
	return info.Size()
}
