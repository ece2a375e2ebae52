//go:build !linux

package badger

import (
	"os"
	"time"
)

// reserve does nothing: Options.MinFree has to do.
func (*reservation) reserve(string) {}

// identityOf reports false, so every table is read at every opening.
func identityOf(*os.File) (fileIdentity, bool) { return fileIdentity{}, false }

func syncData(f *os.File) error { return f.Sync() }

func pause(d time.Duration) { time.Sleep(d) }
