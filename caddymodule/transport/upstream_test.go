package transport_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
)

// answer is what an upstream does with the n-th request that arrives (from 1).
// It returns whether the connection is kept.
type answer func(c *serverConn, n int) (keep bool)

// serverConn is one accepted connection; the first byte of a request has arrived
// and nothing else was read.
type serverConn struct {
	net.Conn
	in *bufio.Reader
}

// upstream is a server on a raw socket that counts a request as arrived with its
// first byte.
type upstream struct {
	addr     string
	listener net.Listener
	arrivals atomic.Int64
	open     sync.WaitGroup
}

func newUpstream(t *testing.T, do answer) *upstream {
	t.Helper()
	return listen(t, nil, do)
}

func newTLSUpstream(t *testing.T, do answer) *upstream {
	t.Helper()
	return listen(t, &tls.Config{Certificates: []tls.Certificate{certificate(t)}}, do)
}

func listen(t *testing.T, config *tls.Config, do answer) *upstream {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u := &upstream{addr: l.Addr().String(), listener: l}
	t.Cleanup(u.close)
	u.open.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if config != nil {
				c = tls.Server(c, config)
			}
			u.open.Go(func() { u.serve(c, do) })
		}
	})
	return u
}

func (u *upstream) serve(c net.Conn, do answer) {
	defer c.Close()
	sc := &serverConn{Conn: c, in: bufio.NewReader(c)}
	for {
		if _, err := sc.in.Peek(1); err != nil {
			return
		}
		if !do(sc, int(u.arrivals.Add(1))) {
			return
		}
	}
}

func (u *upstream) close() { _ = u.listener.Close() }

// total ends the upstream and returns what arrived in its life. The proxy must
// have given up its connections, so that nothing can arrive any more.
func (u *upstream) total() int {
	u.close()
	u.open.Wait()
	return int(u.arrivals.Load())
}

// read reads one whole request.
func (c *serverConn) read() *http.Request {
	req, err := http.ReadRequest(c.in)
	if err != nil {
		return nil
	}
	_, _ = io.Copy(io.Discard, req.Body)
	return req
}

// ok reads the request and answers it.
func (c *serverConn) ok() bool {
	if c.read() == nil {
		return false
	}
	_, err := fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	return err == nil
}

// reset ends the connection with RST.
func (c *serverConn) reset() bool {
	conn := c.Conn
	if tc, ok := conn.(*tls.Conn); ok {
		conn = tc.NetConn()
	}
	_ = conn.(*net.TCPConn).SetLinger(0)
	return false
}

// okThen answers the first request and leaves the others to do.
func okThen(do answer) answer {
	return func(c *serverConn, n int) bool {
		if n == 1 {
			return c.ok()
		}
		return do(c, n)
	}
}

// refusing returns an address that refuses connections.
func refusing(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
