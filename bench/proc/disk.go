package proc

import (
	"errors"
	"io/fs"
	"path/filepath"
)

// DiskUse is what the files below dir occupy, in bytes. Files that go away meanwhile
// do not count.
func DiskUse(dir string) (int64, error) {
	var sum int64
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			sum += allocated(info)
		}
		return err
	})
	return sum, err
}
