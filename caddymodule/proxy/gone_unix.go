//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package proxy

import (
	"errors"
	"net"
	"syscall"
)

// gone reports whether the other side has closed c. It neither reads nor waits, even while
// another goroutine reads.
func gone(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	over := false
	// Control, not Read: Read would wait for the reading goroutine.
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		over = n == 0 && err == nil ||
			err != nil && !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.EINTR)
	})
	return over && err == nil
}
