package caddymodule

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// acknowledged reports that the peer, which has ended its own direction of a TCP connection, has acknowledged all that
// was written to it. It waits for up to a second, which is longer than most round trips.
func acknowledged(conn syscall.Conn) bool {
	const pause, most = 5 * time.Millisecond, 200
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	for range most {
		var info *unix.TCPInfo
		if err := raw.Control(func(fd uintptr) {
			info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		}); err != nil || info == nil || info.State != unix.BPF_TCP_CLOSE_WAIT {
			return false // after a reset it is closed
		}
		if info.Unacked == 0 && info.Notsent_bytes == 0 {
			return true
		}
		time.Sleep(pause)
	}
	return false
}
