//go:build !linux

package badger

import "os"

func syncData(f *os.File) error { return f.Sync() }
