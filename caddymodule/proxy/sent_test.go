package proxy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

var errFailed = errors.New("failed")

// countedConn is a counting connection as a transport makes it.
type countedConn struct {
	net.Conn
	attempt *proxy.Attempt
	shared  bool
	closed  bool
}

func (c *countedConn) Count(a *proxy.Attempt) { c.attempt = a }
func (c *countedConn) Multiplexed() bool      { return c.shared }
func (c *countedConn) Close() error           { c.closed = true; return nil }
func (c *countedConn) LocalAddr() net.Addr    { return new(net.TCPAddr) }

// h2Conn is a counted connection below TLS that negotiated HTTP/2.
type h2Conn struct{ *countedConn }

func (c h2Conn) ConnectionState() tls.ConnectionState {
	return tls.ConnectionState{NegotiatedProtocol: "h2"}
}
func (c h2Conn) NetConn() net.Conn { return c.countedConn }

// Section "Sent or not": what our transport's count proves.
func TestProofByCount(t *testing.T) {
	tests := []struct {
		name  string
		do    func(w *proxy.Watch, trace *httptrace.ClientTrace)
		want  proxy.Reason
		again bool
	}{
		{
			name: "no connection was obtained",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				a.Done(errFailed)
			},
			want: proxy.NothingWritten,
		},
		{
			name: "fields were encoded and nothing was accepted",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
				trace.WroteHeaderField("Host", nil)
				a.Begin()
				a.Wrote(0)
				a.Done(errFailed)
			},
			want: proxy.NothingWritten, again: true,
		},
		{
			name: "one byte was accepted",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
				a.Begin()
				a.Wrote(1)
				a.Begin()
				a.Wrote(0)
				a.Done(errFailed)
			},
		},
		{
			name: "a write is not over",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
				a.Begin()
				a.Done(errFailed)
			},
		},
		{
			name: "the connection is not counted",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				c, _ := net.Pipe()
				trace.GotConn(httptrace.GotConnInfo{Conn: c})
				a.Done(errFailed)
			},
		},
		{
			name: "the transport cannot count",
			do:   func(w *proxy.Watch, _ *httptrace.ClientTrace) { a := w.Attempt(); a.Unknown(); a.Done(errFailed) },
		},
		{
			name: "HTTP/2 that was never encoded",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: h2Conn{new(countedConn)}})
				a.Done(errFailed)
			},
			want: proxy.NothingWritten, again: true,
		},
		{
			name: "HTTP/2 that was encoded",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: h2Conn{new(countedConn)}})
				trace.WroteHeaderField(":authority", nil)
				a.Done(errFailed)
			},
		},
		{
			name: "cleartext HTTP/2 that was encoded",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: &countedConn{shared: true}})
				trace.WroteHeaderField(":authority", nil)
				a.Done(errFailed)
			},
		},
		{
			name: "another transport sent after ours did not",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				w.Attempt().Done(errFailed)
				c, _ := net.Pipe()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: c})
			},
		},
		{
			name: "RoundTrip has not returned, and is cut off by the proof",
			do: func(w *proxy.Watch, trace *httptrace.ClientTrace) {
				w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
			},
			want: proxy.NothingWritten, again: true,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ctx, w := proxy.Arm(t.Context())
			tt.do(w, httptrace.ContextClientTrace(ctx))
			v := w.Proof(errFailed, 0)
			if v.Reason != tt.want || v.Again != tt.again || v.NotSent() != (tt.want != proxy.Unknown) {
				t.Errorf("%v, again %v; want %v, %v", v.Reason, v.Again, tt.want, tt.again)
			}
			if ctx.Err() == nil {
				t.Error("something can still be sent")
			}
		})
	}
}

// P1: a proof holds after it was given: what comes later is refused.
func TestProofIsFinal(t *testing.T) {
	t.Run("HTTP/1", func(t *testing.T) {
		ctx, w := proxy.Arm(t.Context())
		c := new(countedConn)
		a := w.Attempt()
		httptrace.ContextClientTrace(ctx).GotConn(httptrace.GotConnInfo{Conn: c})
		if !w.Proof(nil, 0).NotSent() {
			t.Fatal("nothing was written, and it is not proven")
		}
		if c.attempt != a || a.Begin() {
			t.Error("a write was allowed after the proof")
		}
	})
	t.Run("HTTP/2", func(t *testing.T) {
		ctx, w := proxy.Arm(t.Context())
		c := h2Conn{new(countedConn)}
		trace := httptrace.ContextClientTrace(ctx)
		w.Attempt()
		trace.GotConn(httptrace.GotConnInfo{Conn: c})
		if !w.Proof(nil, 0).NotSent() {
			t.Fatal("nothing was encoded, and it is not proven")
		}
		trace.WroteHeaderField(":authority", nil)
		if !c.closed {
			t.Error("the connection is open to a request that was encoded after the proof")
		}
	})
	t.Run("a new attempt", func(t *testing.T) {
		ctx, w := proxy.Arm(t.Context())
		w.Proof(nil, 0)
		if w.Attempt() != nil || ctx.Err() == nil {
			t.Error("an attempt was opened after the proof")
		}
	})
}

// P1: of writers that race with the proof, either the proof sees the byte, or the
// write is refused.
func TestProofAgainstWriters(t *testing.T) {
	for range 500 {
		ctx, w := proxy.Arm(t.Context())
		a := w.Attempt()
		httptrace.ContextClientTrace(ctx).GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
		var wire int
		var v proxy.Verdict
		var both sync.WaitGroup
		both.Go(func() {
			if a.Begin() {
				wire++
				a.Wrote(1)
			}
		})
		both.Go(func() { v = w.Proof(errFailed, 0) })
		both.Wait()
		if wire > 0 && v.NotSent() {
			t.Fatal("a byte was written, and it is proven that none was")
		}
	}
}

// Section "Sent or not": an attempt opens only after one that sent nothing.
func TestAttemptAfterAttempt(t *testing.T) {
	ctx, w := proxy.Arm(t.Context())
	w.Attempt().Done(errFailed)
	second := w.Attempt()
	if second == nil {
		t.Fatal("no second attempt after one without a connection")
	}
	if !second.Begin() {
		t.Fatal("the second attempt may not write")
	}
	second.Wrote(1)
	second.Done(errFailed)
	if w.Attempt() != nil {
		t.Error("P1: a third attempt after one that sent")
	}
	if ctx.Err() == nil {
		t.Error("the third attempt did not cancel the request")
	}
}

// Section "Sent or not": forwarding again is of no use when the forward ended
// because its caller or its deadline did.
func TestNotAgainAfterTheCallerLeft(t *testing.T) {
	parent, leave := context.WithCancel(t.Context())
	ctx, w := proxy.Arm(parent)
	w.Attempt()
	httptrace.ContextClientTrace(ctx).GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
	leave()
	if v := w.Proof(nil, 0); v.Reason != proxy.NothingWritten || v.Again {
		t.Errorf("%+v", v)
	}
}

// Unframed is of the last attempt, and worth nothing if it was not ours.
func TestOursAndUnframed(t *testing.T) {
	ctx, w := proxy.Arm(t.Context())
	defer w.Release()
	if w.Ours() || w.Unframed() {
		t.Error("nothing was forwarded")
	}
	a := w.Attempt()
	httptrace.ContextClientTrace(ctx).GetConn("")
	a.Unframed()
	a.Done(nil)
	if !w.Ours() || !w.Unframed() {
		t.Error("our transport's report is lost")
	}
	httptrace.ContextClientTrace(ctx).GetConn("")
	if w.Ours() {
		t.Error("another transport asked for a connection")
	}
}

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
		ctx, watch := proxy.Arm(httptrace.WithClientTrace(t.Context(), after))
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
	ctx, watch := proxy.Arm(t.Context())
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
	ctx, watch := proxy.Arm(t.Context())
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
	if proxy.FromContext(t.Context()) != nil {
		t.Error("a context that was not armed has a watch")
	}
	ctx, watch := proxy.Arm(t.Context())
	if proxy.FromContext(ctx) != watch {
		t.Error("the armed context does not have its watch")
	}
	again, other := proxy.Arm(t.Context())
	watch.Release()
	watch.Release()
	if ctx.Err() == nil || again.Err() != nil {
		t.Error("Release cancels its own context, and no other")
	}
	other.Release()
}

// Section "Sent or not": what Caddy's errors prove, and when they do not.
func TestProofByError(t *testing.T) {
	dial := caddyhttp.Error(http.StatusBadGateway, reverseproxy.NewDialError(io.EOF))
	none := caddyhttp.Error(http.StatusServiceUnavailable, errors.New("no upstreams available"))
	tests := []struct {
		name    string
		err     error
		retries int
		conns   int
		blown   bool
		want    proxy.Reason
	}{
		{name: "no error", err: nil},
		{name: "any error", err: errFailed},
		{name: "dial error", err: dial, want: proxy.DialFailed},
		{name: "dial error with its trace", err: dial, conns: 1, want: proxy.DialFailed},
		{name: "dial errors that were all seen", err: dial, retries: 2, conns: 3, want: proxy.DialFailed},
		{name: "dial error after attempts that were not seen", err: dial, retries: 2, conns: 2},
		{name: "dial error of a transport without events, after another attempt", err: dial, retries: 1},
		{name: "dial error after a connection was had", err: dial, conns: 1, blown: true},
		{name: "dial error, and who knows what before", err: dial, retries: -1, conns: 9},
		{name: "no upstream", err: none, want: proxy.NoUpstream},
		{name: "no upstream in any retry", err: none, retries: 4, want: proxy.NoUpstream},
		{name: "no upstream after a connection was asked for", err: none, conns: 1},
		{name: "no upstream, and who knows what before", err: none, retries: -1},
		{name: "some other 503", err: caddyhttp.Error(http.StatusServiceUnavailable, errFailed)},
		{name: "the text with another status", err: caddyhttp.Error(http.StatusBadGateway, errors.New("no upstreams available"))},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ctx, w := proxy.Arm(t.Context())
			trace := httptrace.ContextClientTrace(ctx)
			for range tt.conns {
				trace.GetConn("")
			}
			if tt.blown {
				c, _ := net.Pipe()
				trace.GotConn(httptrace.GotConnInfo{Conn: c})
			}
			v := w.Proof(tt.err, tt.retries)
			if v.Reason != tt.want || v.Again {
				t.Errorf("%v, again %v; want %v", v.Reason, v.Again, tt.want)
			}
		})
	}
}

// Section "Sent or not": the count of retries is the last reverse_proxy's. It is
// not believed where another one may have run in the same forward, and what ran
// before the forward does not matter.
func TestRetries(t *testing.T) {
	tests := []struct {
		name          string
		before, after map[string]any
		want          int
	}{
		{name: "none ran", want: -1},
		{name: "one ran", after: map[string]any{"http.reverse_proxy.retries": 2}, want: 2},
		{name: "forward_auth ran before", before: map[string]any{
			"http.reverse_proxy.retries": 1, "http.reverse_proxy.status_code": 200,
		}, want: -1},
		{name: "forward_auth and then one", before: map[string]any{
			"http.reverse_proxy.retries": 1, "http.reverse_proxy.status_code": 200,
		}, after: map[string]any{"http.reverse_proxy.retries": 0}, want: 0},
		{name: "one answered before the last", after: map[string]any{
			"http.reverse_proxy.retries": 0, "http.reverse_proxy.status_code": 404,
		}, want: -1},
		{name: "one failed before the last", after: map[string]any{
			"http.reverse_proxy.retries": 0, "http.error": io.EOF,
		}, want: -1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			repl := caddy.NewReplacer()
			for k, v := range tt.before {
				repl.Set(k, v)
			}
			ctx, w := proxy.Arm(context.WithValue(t.Context(), caddy.ReplacerCtxKey, repl))
			defer w.Release()
			for k, v := range tt.after {
				repl.Set(k, v)
			}
			if got := proxy.Retries(ctx); got != tt.want {
				t.Errorf("Retries = %d, not %d", got, tt.want)
			}
		})
	}
	if got := proxy.Retries(t.Context()); got != -1 {
		t.Errorf("without a replacer: %d", got)
	}
}
