package badger

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// syncData leaves out the metadata that reading the file back does not need.
func syncData(f *os.File) error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}
