//go:build unix

package gateway

import (
	"syscall"
	"time"
)

// workSoFar is the processor time of this process.
func workSoFar() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
