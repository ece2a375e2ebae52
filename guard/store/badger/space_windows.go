package badger

import (
	"io/fs"

	"golang.org/x/sys/windows"
)

func freeSpace(dir string) (uint64, bool) {
	name, err := windows.UTF16PtrFromString(dir)
	if err != nil {
		return 0, false
	}
	var free uint64
	if err := windows.GetDiskFreeSpaceEx(name, &free, nil, nil); err != nil {
		return 0, false
	}
	return free, true
}

func allocated(info fs.FileInfo) int64 { return info.Size() }
