package sent_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// slyConn is a TCP connection whose client side a test can hold up.
type slyConn struct {
	net.Conn
	onWrite func(c *slyConn, p []byte) (int, error)
	held    atomic.Bool // until it was written to, it does not close
	closed  atomic.Bool
	written chan struct{} // closed with the first write while held
	closing chan struct{} // closed with the first Close
}

func newSlyConn(c net.Conn) *slyConn {
	return &slyConn{Conn: c, written: make(chan struct{}), closing: make(chan struct{})}
}

func (c *slyConn) Write(p []byte) (int, error) {
	if c.onWrite != nil {
		return c.onWrite(c, p)
	}
	n, err := c.Conn.Write(p)
	if c.held.Swap(false) {
		close(c.written)
	}
	return n, err
}

func (c *slyConn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	close(c.closing)
	if c.held.Load() {
		<-c.written
	}
	return c.Conn.Close()
}

// dropper answers the first whole requests and hangs up at the first byte of the
// later ones, which it counts.
type dropper struct {
	net.Listener
	kept int64
	seen atomic.Int64
	open sync.WaitGroup
}

func newDropper(t *testing.T, kept int64) *dropper {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &dropper{Listener: l, kept: kept}
	t.Cleanup(func() { _ = l.Close() })
	d.open.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d.open.Go(func() { d.serve(c) })
		}
	})
	return d
}

func (d *dropper) serve(c net.Conn) {
	defer c.Close()
	in := bufio.NewReader(c)
	for {
		if _, err := in.Peek(1); err != nil {
			return
		}
		if d.seen.Add(1) > d.kept {
			return
		}
		if _, err := http.ReadRequest(in); err != nil {
			return
		}
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"); err != nil {
			return
		}
	}
}

func (d *dropper) total() int {
	_ = d.Close()
	d.open.Wait()
	return int(d.seen.Load())
}

// post sends an empty POST that Go holds to be replayable.
func post(rt http.RoundTripper, ctx context.Context, addr, path string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Idempotency-Key", "one")
	res, err := rt.RoundTrip(req)
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, res.Body)
	return res.Body.Close()
}

// Section "Sent or not": Go may hand out an idle connection after the request was
// cancelled, and write to it before it looks at the cancellation. The connection
// is held up at exactly that point.
func TestCancelledRequestIsNotWrittenToIdleConnection(t *testing.T) {
	for range 40 { // Go's choice is random
		up := newDropper(t, 2)
		rt := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return newSlyConn(c), nil
		}}

		// Two idle connections.
		first := make(chan error, 2)
		gate := make(chan struct{})
		ready := make(chan struct{}, 2)
		for range 2 {
			go func() {
				trace := &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { ready <- struct{}{}; <-gate }}
				first <- post(rt, httptrace.WithClientTrace(t.Context(), trace), up.Addr().String(), "/")
			}()
		}
		<-ready
		<-ready
		close(gate)
		for range 2 {
			if err := <-first; err != nil {
				t.Fatal(err)
			}
		}

		// The hook of the outer trace runs after the fuse's: from there on the
		// second connection closes only once it was written to.
		conns := 0
		after := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
			conns++
			info.Conn.(*slyConn).held.Store(conns == 2)
		}}
		ctx, watch := sent.Arm(httptrace.WithClientTrace(t.Context(), after))
		err := post(rt, ctx, up.Addr().String(), "/")
		watch.Release()
		rt.CloseIdleConnections()
		if err == nil {
			t.Fatal("the lost request was answered")
		}
		if got := up.total(); got != 3 {
			t.Fatalf("P1: %d requests arrived, not 3", got)
		}
	}
}

// Section "Sent or not": the request line is on the wire before Go reports a
// header field, if it is longer than the write buffer. It is cut short so that Go
// takes the loss for one of reading, after which it re-sends.
func TestFuseBlowsBeforeTheRequestLine(t *testing.T) {
	up := newDropper(t, 1)
	var cut atomic.Bool
	rt := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		sly := newSlyConn(c)
		sly.onWrite = func(c *slyConn, p []byte) (int, error) {
			if !cut.Swap(false) {
				return c.Conn.Write(p)
			}
			n, _ := c.Conn.Write(p[:100])
			<-c.closing
			return n, io.ErrShortWrite
		}
		return sly, nil
	}}
	defer rt.CloseIdleConnections()
	addr := up.Addr().String()
	if err := post(rt, t.Context(), addr, "/"); err != nil {
		t.Fatal(err)
	}
	cut.Store(true)
	ctx, watch := sent.Arm(t.Context())
	defer watch.Release()
	err := post(rt, ctx, addr, "/?"+strings.Repeat("x", 8<<10))
	if err == nil {
		t.Error("the lost request was answered")
	}
	rt.CloseIdleConnections()
	if got := up.total(); got != 2 {
		t.Errorf("P1: %d requests arrived, not 2", got)
	}
}

// Section "Sent or not": the HTTP/2 pool leaves GetConn out for a connection that
// another request dialed, so GotConn must cancel too.
func TestConnectionGotUnaskedCancels(t *testing.T) {
	ctx, watch := sent.Arm(t.Context())
	defer watch.Release()
	trace := httptrace.ContextClientTrace(ctx)
	first, second := newSlyConn(nil), newSlyConn(nil)
	for _, c := range []*slyConn{first, second} {
		a, b := net.Pipe()
		c.Conn = a
		defer b.Close()
	}
	trace.GetConn("upstream:80")
	trace.GotConn(httptrace.GotConnInfo{Conn: first})
	if ctx.Err() != nil {
		t.Fatal("the first sending was cancelled")
	}
	trace.GotConn(httptrace.GotConnInfo{Conn: second, Reused: true})
	if ctx.Err() == nil {
		t.Error("the second sending was not cancelled")
	}
	select {
	case <-second.closing:
	default:
		t.Error("P1: the second connection can still be written to")
	}
	select {
	case <-first.closing:
		t.Error("the first connection was closed: its answer is lost")
	default:
	}
}

// Each armed context has its own fuse, and a context without one has none.
func TestFromContext(t *testing.T) {
	if sent.FromContext(t.Context()) != nil {
		t.Error("a context that was not armed has a watch")
	}
	ctx, watch := sent.Arm(t.Context())
	if sent.FromContext(ctx) != watch {
		t.Error("the armed context does not have its watch")
	}
	again, other := sent.Arm(t.Context())
	watch.Release()
	watch.Release()
	if ctx.Err() == nil || again.Err() != nil {
		t.Error("Release cancels its own context, and no other")
	}
	other.Release()
}
