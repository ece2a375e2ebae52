package sent

import (
	"crypto/tls"
	"net"
	"runtime"
	"strings"
)

// Conn is a connection that reports what it writes, below any TLS.
type Conn interface {
	net.Conn
	// Count makes a the attempt that writes from here on belong to.
	Count(a *Attempt)
	// Multiplexed reports whether the connection carries many requests at once
	// unless TLS above it negotiates otherwise.
	Multiplexed() bool
}

// tlsConn is a *tls.Conn, or a connection that wraps one and says so.
type tlsConn interface {
	ConnectionState() tls.ConnectionState
	NetConn() net.Conn
}

// counted finds the counting connection below conn, or nil.
func counted(conn net.Conn) Conn {
	for {
		if c, ok := conn.(Conn); ok {
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
	case Conn:
		return c.Multiplexed()
	default:
		return false
	}
}

// writesUnasked reports whether the transport that handed out conn will write to
// it although the context was cancelled. HTTP/1 does; it must be stopped by
// closing. HTTP/2 and HTTP/3 look at the context once more before they write, and
// theirs must not be closed: others use it, and quic-go's panics. On cleartext
// only the caller of the hook tells HTTP/2 from HTTP/1.
func writesUnasked(conn net.Conn) bool {
	if _, udp := conn.LocalAddr().(*net.UDPAddr); udp {
		return false
	}
	var pcs [32]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])])
	for more := true; more; {
		var frame runtime.Frame
		frame, more = frames.Next()
		if !passesHookOn(frame.Function) {
			// Anyone unknown may be HTTP/1.
			return !strings.Contains(frame.Function, "http2")
		}
	}
	return true
}

// passesHookOn reports whether function stands between a transport and the hook
// that it calls.
func passesHookOn(function string) bool {
	const here = "github.com/agent-guard/caddy-agent-guard/caddymodule/sent."
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
			_ = conn.Close() // it is closed so that it cannot be written to; it has nothing to tell
			return
		}
		conn = t.NetConn()
	}
}
