package proxy

import (
	"crypto/tls"
	"errors"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
)

// conn counts what is written for each request. It lies below TLS, so that a record that was begun
// counts.
type conn struct {
	net.Conn
	h2c     bool
	stale   func() // called when the connection was found closed before a request
	attempt atomic.Pointer[Attempt]
	unused  atomic.Bool // by the present attempt
}

var (
	errAttemptOver = errors.New("the request was given up before this write")
	errGone        = errors.New("the upstream has closed the kept connection")
)

// Count implements byteCounter. HTTP/1 calls it for each request that the connection is used for, before
// the first byte.
func (c *conn) Count(a *Attempt) {
	c.attempt.Store(a)
	c.unused.Store(true)
}

func (c *conn) Multiplexed() bool { return c.h2c }

// Write counts p to the present attempt, or to none: handshakes, requests to a proxy to connect,
// and HTTP/2.
func (c *conn) Write(p []byte) (int, error) {
	a := c.attempt.Load()
	if a == nil {
		return c.Conn.Write(p)
	}
	// An end that has arrived but that nobody has read yet would swallow the request and leave it
	// in doubt.
	if c.unused.Swap(false) && gone(c.Conn) {
		c.stale()
		return 0, errGone
	}
	if !a.Begin() {
		return 0, errAttemptOver
	}
	n, err := c.Conn.Write(p)
	a.Wrote(n)
	return n, err
}

var _ byteCounter = (*conn)(nil)

// byteCounter is a connection that reports what it writes, below any TLS. Tests have their own.
type byteCounter interface {
	net.Conn
	// Count makes a the attempt that writes from here on belong to.
	Count(a *Attempt)
	// Multiplexed reports whether the connection carries many requests at once unless TLS above it
	// negotiates otherwise.
	Multiplexed() bool
}

// tlsConn is a *tls.Conn, or a connection that wraps one and says so.
type tlsConn interface {
	ConnectionState() tls.ConnectionState
	NetConn() net.Conn
}

// counted finds the counting connection below conn, or nil.
func counted(conn net.Conn) byteCounter {
	for {
		if c, ok := conn.(byteCounter); ok {
			return c
		}
		t, ok := conn.(tlsConn)
		if !ok {
			return nil
		}
		conn = t.NetConn()
	}
}

// multiplexed reports whether conn is known to speak HTTP/2.
func multiplexed(conn net.Conn) bool {
	switch c := conn.(type) {
	case tlsConn:
		return c.ConnectionState().NegotiatedProtocol == "h2"
	case byteCounter:
		return c.Multiplexed()
	default:
		return false
	}
}

// writesUnasked reports whether the transport that handed out conn will write to it although the
// context was cancelled. HTTP/1 does; it must be stopped by closing. HTTP/2 and HTTP/3 look at the
// context once more before they write, and theirs must not be closed: others use it, and quic-go's
// panics. On cleartext only the caller of the hook tells HTTP/2 from HTTP/1.
func writesUnasked(conn net.Conn) bool {
	if _, udp := conn.LocalAddr().(*net.UDPAddr); udp {
		return false
	}
	var pcs [32]uintptr
	here := "" // this package's path and a dot
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])])
	for more := true; more; {
		var frame runtime.Frame
		frame, more = frames.Next()
		if here == "" { // the first frame is this function
			here = frame.Function[:strings.LastIndex(frame.Function, ".")+1]
		}
		if !passesHookOn(frame.Function, here) {
			// Anyone unknown may be HTTP/1.
			return !strings.Contains(frame.Function, "http2")
		}
	}
	return true
}

// passesHookOn reports whether function is between a transport and the hook that it calls.
func passesHookOn(function, here string) bool {
	for _, prefix := range []string{here, "runtime.", "reflect.", "net/http/httptrace."} {
		if strings.HasPrefix(function, prefix) {
			return true
		}
	}
	return false
}

// closeBelow closes conn without the farewell that TLS would write and wait for.
func closeBelow(conn net.Conn) {
	for {
		t, ok := conn.(tlsConn)
		if !ok {
			_ = conn.Close() // it is closed so that it cannot be written to; its error says nothing new
			return
		}
		conn = t.NetConn()
	}
}
