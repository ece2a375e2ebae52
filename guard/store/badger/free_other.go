//go:build !linux && !darwin && !freebsd && !dragonfly && !windows

package badger

func freeSpace(string) (uint64, bool) { return 0, false }
