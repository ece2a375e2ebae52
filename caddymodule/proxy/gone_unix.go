//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package proxy

import (
	"errors"
	"net"
	"syscall"
)

// peek sees whether the other side of a connection has closed it. It is for one goroutine at a
// time, and allocates once for all requests of the connection.
type peek struct {
	raw  syscall.RawConn // nil where there is none
	look func(fd uintptr)
	over bool
}

func (p *peek) begin(c net.Conn) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return
	}
	if raw, err := sc.SyscallConn(); err == nil {
		p.raw, p.look = raw, p.recv
	}
}

// gone reports whether the other side has closed the connection. It neither reads nor waits, even
// while another goroutine reads.
func (p *peek) gone() bool {
	if p.raw == nil {
		return false
	}
	p.over = false
	// Control, not Read: Read would wait for the reading goroutine.
	err := p.raw.Control(p.look)
	return p.over && err == nil
}

func (p *peek) recv(fd uintptr) {
	var b [1]byte
	n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	p.over = n == 0 && err == nil ||
		err != nil && !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.EINTR)
}
