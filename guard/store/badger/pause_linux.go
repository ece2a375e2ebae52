package badger

import (
	"time"

	"golang.org/x/sys/unix"
)

// pause sleeps in the kernel: the runtime's timers are rounded up to a millisecond
// while the process is idle, several times what is asked for here.
func pause(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal may end it early, which does no harm
}
