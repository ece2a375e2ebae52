package proxy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// pipes is an upstream over pipes, whose time is that of a bubble. It closes a
// connection that was idle for idle.
type pipes struct {
	idle     time.Duration
	dialed   int
	arrivals int
}

func (u *pipes) dial(context.Context, string, string) (net.Conn, error) {
	u.dialed++
	client, server := net.Pipe()
	go func() {
		defer server.Close()
		in := bufio.NewReader(server)
		for {
			_ = server.SetReadDeadline(time.Now().Add(u.idle))
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			u.arrivals++
			_, _ = io.Copy(io.Discard, req.Body)
			if req.Header.Get("X-Lose") != "" {
				return
			}
			if _, err := io.WriteString(server, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"); err != nil {
				return
			}
		}
	}()
	return client, nil
}

// send makes a request directly with tr, guarded or not.
func send(tr *proxy.Transport, guarded bool, header string) (proxy.Verdict, error) {
	ctx := context.Background()
	var watch *proxy.Watch
	if guarded {
		ctx, watch = proxy.Arm(ctx)
		defer watch.Release()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://upstream/", nil)
	if err != nil {
		return proxy.Verdict{}, err
	}
	req.Header.Set("Idempotency-Key", "one")
	if header != "" {
		req.Header.Set(header, "1")
	}
	res, err := tr.RoundTrip(req)
	if err == nil {
		_, err = io.Copy(io.Discard, res.Body)
		err = errors.Join(err, res.Body.Close())
	}
	var v proxy.Verdict
	if guarded {
		v = watch.Proof(err, 0)
	}
	return v, err
}

// inBubble provisions a transport and runs f in a bubble, which also shows that
// nothing is left running.
func inBubble(t *testing.T, guarded time.Duration, f func(tr *proxy.Transport, u *pipes)) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.ActiveContext())
	t.Cleanup(cancel)
	tr := new(proxy.Transport).CaddyModule().New().(*proxy.Transport)
	tr.KeepaliveGuarded = caddy.Duration(guarded)
	if err := tr.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		u := &pipes{idle: time.Second}
		if err := proxy.Redial(tr, u.dial); err != nil {
			t.Fatal(err)
		}
		f(tr, u)
		if err := tr.Cleanup(); err != nil {
			t.Error(err)
		}
	})
}

// wait lets the bubble's time pass.
func wait(d time.Duration) { <-time.After(d) }

// Section "Sent or not": a connection that was idle longer than keepalive_guarded
// is not used for a guarded call, so that idle closes do not become doubts.
func TestKeepaliveGuarded(t *testing.T) {
	inBubble(t, 300*time.Millisecond, func(tr *proxy.Transport, u *pipes) {
		for _, pause := range []time.Duration{0, 250 * time.Millisecond, 299 * time.Millisecond} {
			wait(pause)
			if v, err := send(tr, true, ""); err != nil || v.NotSent() {
				t.Fatal(v, err)
			}
		}
		if u.dialed != 1 {
			t.Errorf("%d connections where one was young enough", u.dialed)
		}
		for n := range 300 {
			// Up to and beyond the time at which the upstream closes.
			wait(301*time.Millisecond + time.Duration(n)*3*time.Millisecond)
			if v, err := send(tr, true, ""); err != nil || v.NotSent() {
				t.Fatalf("a doubt for an idle connection: %v, %v", v, err)
			}
		}
		if u.dialed != 301 || u.arrivals != 303 {
			t.Errorf("%d connections and %d requests, not 301 and 303", u.dialed, u.arrivals)
		}
	})
}

// keepalive_guarded does not touch requests that are not guarded, and shares no
// connection with them.
func TestUnguardedKeepalive(t *testing.T) {
	inBubble(t, 300*time.Millisecond, func(tr *proxy.Transport, u *pipes) {
		for range 3 {
			if _, err := send(tr, false, ""); err != nil {
				t.Fatal(err)
			}
			wait(900 * time.Millisecond)
		}
		if u.dialed != 1 {
			t.Errorf("%d connections for requests that are not guarded, not 1", u.dialed)
		}
		if _, err := send(tr, true, ""); err != nil {
			t.Fatal(err)
		}
		if u.dialed != 2 {
			t.Error("a guarded request used a connection of the others")
		}
	})
}

func TestKeepaliveOff(t *testing.T) {
	inBubble(t, -1, func(tr *proxy.Transport, u *pipes) {
		for range 3 {
			if _, err := send(tr, true, ""); err != nil {
				t.Fatal(err)
			}
		}
		if u.dialed != 3 {
			t.Errorf("%d connections for 3 requests", u.dialed)
		}
	})
}

// Requests that are lost, cancelled or proven unsent leave nothing running and no
// connection open.
func TestNothingIsLeftRunning(t *testing.T) {
	inBubble(t, 0, func(tr *proxy.Transport, u *pipes) {
		for range 20 {
			if _, err := send(tr, true, ""); err != nil {
				t.Fatal(err)
			}
			if v, err := send(tr, true, "X-Lose"); err == nil || v.NotSent() {
				t.Fatal(v, err)
			}
		}
		if u.arrivals != 40 {
			t.Errorf("%d requests arrived, not 40", u.arrivals)
		}
	})
}

// Section "Sent or not": TLS is counted below its records. A handshake that fails
// sent nothing of the request.
func TestTLSUpstream(t *testing.T) {
	up := newTLSUpstream(t, okThen(func(c *serverConn, _ int) bool { c.read(); return c.reset() }))
	p := newProxy(t, insecure, "agent_guard", up.addr)
	if o := forward(p, request("POST", "x")); o.status != 200 || o.NotSent() || !o.ours {
		t.Errorf("answered: %v", o)
	}
	if o := forward(p, request("POST", "x")); o.NotSent() {
		t.Errorf("P1: reset after it was read: %v", o)
	}
	untrusting := newProxy(t, `{"transport": {"protocol": "agent_guard", "tls": {}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	if o := forward(untrusting, request("POST", "x")); o.Reason != proxy.NothingWritten || o.Again {
		t.Errorf("the handshake fails: %v", o)
	}
	p.end()
	untrusting.end()
	if got := up.total(); got != 2 {
		t.Errorf("%d requests arrived, not 2", got)
	}
}

// With the PROXY protocol, or placeholders in the server name, Caddy makes the TLS
// connection itself; the counting connection must be below that one too.
func TestTLSWithCaddysOwnDial(t *testing.T) {
	cert := certificate(t)
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	pool := base64.StdEncoding.EncodeToString(leaf.Raw)
	names := make(chan string, 1)
	config := &tls.Config{
		Certificates: []tls.Certificate{cert},
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			names <- hello.ServerName
			return nil, nil
		},
	}
	up := listen(t, config, okThen(func(c *serverConn, _ int) bool { c.read(); return c.reset() }))
	p := newProxy(t, `{
		"transport": {"protocol": "agent_guard", "versions": ["1.1"], "tls": {
			"server_name": "{http.request.header.X-Name}",
			"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}, "handshake_timeout": "10s"
		}},
		"upstreams": [{"dial": "%s"}]
	}`, pool, up.addr)
	named := func() *http.Request {
		r := request("POST", "x")
		r.Header.Set("X-Name", "example.com")
		return r
	}
	if o := forward(p, named()); o.status != 200 || !o.ours {
		t.Fatalf("answered: %v", o)
	}
	if name := <-names; name != "example.com" {
		t.Errorf("the server name is %q", name)
	}
	if o := forward(p, named()); o.NotSent() {
		t.Errorf("P1: reset after it was read: %v", o)
	}
	p.end()
	if got := up.total(); got != 2 {
		t.Errorf("%d requests arrived, not 2", got)
	}
}

// The bytes of the PROXY protocol are not the request's.
func TestProxyProtocol(t *testing.T) {
	lines := make(chan string, 2)
	up := newUpstream(t, func(c *serverConn, n int) bool {
		if n == 1 {
			line, _ := c.in.ReadString('\n')
			lines <- line
		}
		return c.ok()
	})
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "proxy_protocol": "v1"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	for range 2 {
		r := request("POST", "x")
		r.RemoteAddr = "192.0.2.7:4711"
		if o := forward(p, r); o.status != 200 {
			t.Fatal(o)
		}
	}
	if line := <-lines; !strings.HasPrefix(line, "PROXY TCP4 192.0.2.7 ") {
		t.Errorf("the connection began with %q", line)
	}
}

// Section "Sent or not": a write that times out after its first bytes.
func TestWriteTimeout(t *testing.T) {
	leave := make(chan struct{})
	up := newUpstream(t, func(*serverConn, int) bool { <-leave; return false })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "write_timeout": "100ms"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	o := forward(p, request("POST", strings.Repeat("x", 32<<20)))
	close(leave)
	if o.err == nil || o.NotSent() {
		t.Errorf("%v, but bytes were sent", o)
	}
}

// Section "Sent or not": the caller's deadline ends a write in the middle.
func TestCancelledWhileWriting(t *testing.T) {
	for _, protocol := range transports {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		leave := make(chan struct{})
		up := newUpstream(t, func(*serverConn, int) bool { cancel(); <-leave; return false })
		p := newProxy(t, single, protocol, up.addr)
		o := forward(p, request("POST", strings.Repeat("x", 32<<20)).WithContext(ctx))
		close(leave)
		p.end()
		if got := up.total(); got != 1 || o.status != 499 || o.NotSent() {
			t.Errorf("%s: %d arrived; %v", protocol, got, o)
		}
	}
}

// Section "Sent or not": a body that only the end of the connection ends.
func TestUnframed(t *testing.T) {
	tests := []struct {
		name, method, answer string
		want                 bool
	}{
		{"HTTP/1.1 until close", "POST", "HTTP/1.1 200 OK\r\n\r\nhalf", true},
		{"HTTP/1.0 until close", "POST", "HTTP/1.0 200 OK\r\n\r\nhalf", true},
		{"length", "POST", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbody", false},
		{"chunks", "POST", "HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", false},
		{"no content", "POST", "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n", false},
		{"not modified", "POST", "HTTP/1.1 304 Not Modified\r\nConnection: close\r\n\r\n", false},
		{"HEAD", "HEAD", "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", false},
		{"empty", "POST", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			up := newUpstream(t, func(c *serverConn, _ int) bool {
				c.read()
				_, _ = io.WriteString(c, tt.answer)
				return false
			})
			p := newProxy(t, single, "agent_guard", up.addr)
			o := forward(p, request(tt.method, ""))
			if o.err != nil || o.unframed != tt.want || !o.ours {
				t.Errorf("unframed = %v (%v)", o.unframed, o)
			}
		})
	}
}

// writes counts how often a connection is written to.
type writes struct {
	net.Conn
	n *atomic.Int64
}

func (w writes) Write(p []byte) (int, error) {
	w.n.Add(1)
	return w.Conn.Write(p)
}

// A small body leaves with its header; others, and bodies of another length than
// announced, leave as Go sends them.
func TestSmallBodyLeavesInOneWrite(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { return c.ok() })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	var n atomic.Int64
	err := proxy.Redial(p.transport(t), func(ctx context.Context, network, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, up.addr)
		return writes{c, &n}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	for size, want := range map[int]int64{1: 1, 200: 1, 2000: 1, 100_000: 2} {
		n.Store(0)
		if o := forward(p, request("POST", strings.Repeat("x", size))); o.status != 200 || o.NotSent() {
			t.Errorf("%d bytes: %v", size, o)
		}
		if got := n.Load(); got != want && (want == 1 || got < want) {
			t.Errorf("%d bytes left in %d writes, want %d", size, got, want)
		}
	}
	for _, announced := range []int64{3, 5} {
		r := request("POST", "four")
		r.ContentLength = announced
		if o := forward(p, r); o.status == 200 {
			t.Errorf("%d bytes announced, 4 given: %v", announced, o)
		}
	}
	p.end()
}

// BenchmarkRoundTrip compares a guarded request with one that is not, and with
// Caddy's transport, over loopback.
func BenchmarkRoundTrip(b *testing.B) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	defer up.Close()
	ctx, cancel := caddy.NewContext(caddy.ActiveContext())
	defer cancel()
	tr := new(proxy.Transport).CaddyModule().New().(*proxy.Transport)
	if err := tr.Provision(ctx); err != nil {
		b.Fatal(err)
	}
	defer tr.Cleanup()
	served := context.WithValue(context.Background(), caddyhttp.ServerCtxKey, new(caddyhttp.Server)) // else breakers are passed by
	run := func(b *testing.B, rt http.RoundTripper, guarded bool) {
		b.ReportAllocs()
		for b.Loop() {
			ctx, release := served, func() {}
			if guarded {
				var watch *proxy.Watch
				ctx, watch = proxy.Arm(ctx)
				release = watch.Release
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, up.URL, nil)
			if err != nil {
				b.Fatal(err)
			}
			req.Header.Set("Idempotency-Key", "one")
			res, err := rt.RoundTrip(req)
			if err != nil {
				b.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
			release()
		}
	}
	b.Run("caddy", func(b *testing.B) { run(b, tr.HTTPTransport, false) })
	b.Run("unguarded", func(b *testing.B) { run(b, tr, false) })
	b.Run("guarded", func(b *testing.B) { run(b, tr, true) })
}
