package proxy

import (
	"crypto/tls"
	"errors"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
)

// conn counts what is written for each request. It is below TLS, so that the beginning of a
// TLS record counts.
type conn struct {
	net.Conn
	h2c     bool
	stale   func() // called if the connection turns out to be closed before a request
	peek    peek   // of Conn
	attempt atomic.Pointer[Attempt]
	unused  atomic.Bool // by the current attempt
	open    *atomic.Int64
	closed  atomic.Bool
}

// Close counts the connection as closed.
func (c *conn) Close() error {
	if !c.closed.Swap(true) {
		c.open.Add(-1)
	}
	return c.Conn.Close()
}

var (
	errAttemptOver = errors.New("the request was given up before this write")
	errGone        = errors.New("the upstream has closed the kept connection")
)

// Count implements byteCounter. HTTP/1 calls it for each request on the connection, before
// the first byte.
func (c *conn) Count(a *Attempt) {
	c.attempt.Store(a)
	c.unused.Store(true)
}

func (c *conn) Multiplexed() bool { return c.h2c }

// Write counts p for the current attempt, if there is one; not for handshakes, CONNECT
// requests to a proxy, and HTTP/2.
func (c *conn) Write(p []byte) (int, error) {
	a := c.attempt.Load()
	if a == nil {
		return c.Conn.Write(p)
	}
	// If the other side has closed the connection and nobody has read that yet, the request
	// would be lost and in doubt.
	if c.unused.Swap(false) && c.peek.gone() {
		c.stale()
		return 0, errGone
	}
	if !a.beginWrite() {
		return 0, errAttemptOver
	}
	n, err := c.Conn.Write(p)
	a.endWrite(n)
	return n, err
}

var _ byteCounter = (*conn)(nil)

// byteCounter is a connection that reports what it writes, below any TLS. Tests have
// another implementation.
type byteCounter interface {
	net.Conn
	// Count attributes the following writes to a.
	Count(a *Attempt)
	// Multiplexed reports whether the connection carries several requests at a time, unless
	// TLS above it negotiates something else.
	Multiplexed() bool
}

// tlsConn is a *tls.Conn, or a connection that exposes the one it wraps.
type tlsConn interface {
	ConnectionState() tls.ConnectionState
	NetConn() net.Conn
}

// counted returns the counting connection below conn, or nil.
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

// writesUnasked reports whether the transport that handed out conn will write to it
// although the context was cancelled. HTTP/1 does, and is stopped by closing conn. HTTP/2
// and HTTP/3 check the context again before they write; their connections must not be
// closed, since other requests use them (and quic-go panics). On cleartext, only the caller
// of the hook shows whether it is HTTP/2 or HTTP/1.
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
			// An unknown caller may be HTTP/1.
			return !strings.Contains(frame.Function, "http2")
		}
	}
	return true
}

// passesHookOn reports whether function may be between a transport and the hook that it
// calls.
func passesHookOn(function, here string) bool {
	for _, prefix := range []string{here, "runtime.", "reflect.", "net/http/httptrace."} {
		if strings.HasPrefix(function, prefix) {
			return true
		}
	}
	return false
}

// closeBelow closes conn without the TLS close alert, which would be written and waited
// for.
func closeBelow(conn net.Conn) {
	for {
		t, ok := conn.(tlsConn)
		if !ok {
			_ = conn.Close() // closed to prevent writes; its error does not matter
			return
		}
		conn = t.NetConn()
	}
}
