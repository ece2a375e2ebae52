//go:build !linux && !darwin && !freebsd && !dragonfly

package badger

import "io/fs"

func allocated(info fs.FileInfo) int64 { return info.Size() }
