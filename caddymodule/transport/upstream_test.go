package transport_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
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
	arrivals atomic.Int64

	listener  net.Listener
	accepting sync.WaitGroup
	open      sync.WaitGroup

	accepted *sync.Cond // guards conns, and wakes when one is added
	conns    []*net.TCPConn
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
	u := &upstream{addr: l.Addr().String(), listener: l, accepted: sync.NewCond(new(sync.Mutex))}
	t.Cleanup(u.close)
	u.accepting.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			u.accepted.L.Lock()
			u.conns = append(u.conns, c.(*net.TCPConn))
			u.accepted.L.Unlock()
			u.accepted.Broadcast()
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

// total ends the upstream and returns what arrived in its life. It accepts every
// connection that was made by now, and reads each to its end.
func (u *upstream) total() int {
	// Connections are accepted in the order in which they were made, so this one
	// is the last.
	if last, err := net.Dial("tcp", u.addr); err == nil {
		_ = last.Close()
		u.waitFor(last.LocalAddr().String())
	}
	u.close()
	u.accepting.Wait()
	for _, c := range u.conns {
		_ = c.CloseWrite()
	}
	u.open.Wait()
	return int(u.arrivals.Load())
}

// waitFor waits until the connection from addr is accepted.
func (u *upstream) waitFor(addr string) {
	u.accepted.L.Lock()
	defer u.accepted.L.Unlock()
	for !slices.ContainsFunc(u.conns, func(c *net.TCPConn) bool { return c.RemoteAddr().String() == addr }) {
		u.accepted.Wait()
	}
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

// refusing returns n addresses that refuse connections. A port that was free a
// moment ago may be another test's by now; these are given to nobody by chance.
func refusing(n int) []any {
	addrs := make([]any, n)
	for i := range addrs {
		addrs[i] = fmt.Sprintf("127.0.0.1:%d", i+2)
	}
	return addrs
}
