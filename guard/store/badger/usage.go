package badger

import (
	"io/fs"
	"os"
	"path/filepath"
)

// Usage is what a store takes of its disk.
type Usage struct {
	// Tables and logs of Badger, and files of bulk values, in bytes.
	LSM, Bodies uint64
}

// Usage adds up the sizes of the store's files. It reads directories.
func (s *Store) Usage() Usage {
	return Usage{LSM: sizeOf(s.lsm()), Bodies: sizeOf(s.bodiesDir())}
}

// sizeOf is the size of all files below dir. What vanishes meanwhile has none.
func sizeOf(dir string) (bytes uint64) {
	_ = filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			if os.IsNotExist(err) {
				return nil
			}
			return err
		}
		if info, err := entry.Info(); err == nil && info.Mode().IsRegular() {
			bytes += uint64(info.Size())
		}
		return nil
	})
	return bytes
}

// Disk is the free space in bytes, and what the store takes for it: 0 is everything, 1
// is outcomes of what is under way, 2 is nothing. ok is false where the system does not
// tell.
func (s *Store) Disk() (free uint64, level int, ok bool) {
	free, ok = s.disk.free(s.dir)
	return free, int(s.room.Load()), ok
}
