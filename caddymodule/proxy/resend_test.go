package proxy_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/fcgi"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/quic-go/quic-go/http3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// transports are the two that the fuse must hold in.
var transports = []string{"agent_guard", "http"}

const single = `{"transport": {"protocol": "%s"}, "upstreams": [{"dial": "%s"}]}`

// Section "Sent or not": Go re-sends a request without a body on a broken
// kept-alive connection if it carries Idempotency-Key, whatever its method.
func TestGoDoesNotSendAgain(t *testing.T) {
	dropped := func(c *serverConn, _ int) bool { c.read(); return false }
	reset := func(c *serverConn, _ int) bool { c.read(); return c.reset() }
	long := strings.Repeat("x", 16<<10)

	tests := []struct {
		name   string
		lost   answer
		method string
		header string // value of a header field
		query  string
		body   string
	}{
		{name: "empty POST dropped", lost: dropped, method: "POST"},
		{name: "empty DELETE dropped", lost: dropped, method: "DELETE"},
		{name: "POST with a body dropped", lost: dropped, method: "POST", body: `{"amount":1}`},
		{name: "empty POST reset", lost: reset, method: "POST"},
		{name: "header over 4 KiB", lost: reset, method: "POST", header: long},
		{name: "request line over 4 KiB", lost: reset, method: "POST", query: long},
		{name: "request line over 4 KiB, reset at the first byte", lost: (*serverConn).resetAtOnce, method: "POST", query: long},
	}
	for _, protocol := range transports {
		for _, tt := range tests {
			t.Run(protocol+"/"+tt.name, func(t *testing.T) {
				up := newUpstream(t, okThen(tt.lost))
				p := newProxy(t, single, protocol, up.addr)
				if o := forward(p, request("POST", "warm")); o.status != 200 {
					t.Fatalf("the first request: %v", o)
				}
				r := request(tt.method, tt.body)
				r.URL.RawQuery = tt.query
				if tt.header != "" {
					r.Header.Set("X-Long", tt.header)
				}
				o := forward(p, r)
				p.end()
				if got := up.total(); got != 2 {
					t.Errorf("%d requests arrived, not 2", got)
				}
				if o.NotSent() {
					t.Errorf("P1: %v, but it was sent", o)
				}
			})
		}
	}
}

func (c *serverConn) resetAtOnce(int) bool { return c.reset() }

// The upstream of TestGoDoesNotSendAgain does provoke a second sending.
func TestGoSendsAgainWithoutTheFuse(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, n int) bool {
		if n == 2 {
			c.read()
			return false
		}
		return c.ok()
	})
	p := newProxy(t, single, "http", up.addr)
	for _, body := range []string{"warm", ""} {
		if err := unguarded(p, request("POST", body)); err != nil {
			t.Fatal(err)
		}
	}
	p.end()
	if got := up.total(); got != 3 {
		t.Errorf("%d requests arrived; the trap is gone", got)
	}
}

const retrying = `{
	"transport": {"protocol": "%s"},
	"load_balancing": {"selection_policy": {"policy": "round_robin"}, "retries": 2, "retry_match": [{"method": ["POST"]}]},
	"upstreams": [{"dial": "%s"}, {"dial": "%s"}]
}`

// Section "Sent or not": lb_retry_match sends a failed POST to the next upstream.
func TestCaddyDoesNotSendAgain(t *testing.T) {
	lost := func(c *serverConn, _ int) bool { c.read(); return c.reset() }
	for _, protocol := range transports {
		for _, body := range []string{"", `{"amount":1}`} {
			t.Run(protocol+"/"+body, func(t *testing.T) {
				a, b := newUpstream(t, lost), newUpstream(t, lost)
				p := newProxy(t, retrying, protocol, a.addr, b.addr)
				o := forward(p, request("POST", body))
				p.end()
				if got := a.total() + b.total(); got != 1 {
					t.Errorf("%d requests arrived, not 1", got)
				}
				if o.NotSent() {
					t.Errorf("P1: %v, but it was sent", o)
				}
			})
		}
	}
}

func TestCaddySendsAgainWithoutTheFuse(t *testing.T) {
	lost := func(c *serverConn, _ int) bool { c.read(); return c.reset() }
	a, b := newUpstream(t, lost), newUpstream(t, lost)
	p := newProxy(t, retrying, "http", a.addr, b.addr)
	if err := unguarded(p, request("POST", "")); err == nil {
		t.Error("no error from two dead upstreams")
	}
	p.end()
	if got := a.total() + b.total(); got != 3 {
		t.Errorf("%d requests arrived, not 3; the trap is gone", got)
	}
}

// Section "Sent or not": with idle connections at hand Go chooses at random
// between them and the cancellation, so one run in two would send again.
func TestIdleConnectionAtHandIsNotUsed(t *testing.T) {
	for _, protocol := range transports {
		t.Run(protocol, func(t *testing.T) {
			for range 60 {
				idle := make(chan struct{}, 2)
				both := make(chan struct{})
				up := newUpstream(t, func(c *serverConn, n int) bool {
					if n > 2 {
						c.read()
						return false
					}
					// Two at once, so that two connections are made.
					idle <- struct{}{}
					<-both
					return c.ok()
				})
				p := newProxy(t, single, protocol, up.addr)
				done := make(chan outcome, 2)
				for range 2 {
					go func() { done <- forward(p, request("POST", "warm")) }()
				}
				<-idle
				<-idle
				close(both)
				for range 2 {
					if o := <-done; o.status != 200 {
						t.Fatalf("a first request: %v", o)
					}
				}
				o := forward(p, request("POST", ""))
				p.end()
				if got := up.total(); got != 3 {
					t.Fatalf("%d requests arrived, not 3", got)
				}
				if o.NotSent() || o.err == nil && o.status != 499 {
					t.Fatalf("%v, neither an error nor Caddy's 499", o)
				}
			}
		})
	}
}

// P1: what was answered is not proven unsent, whatever the status.
func TestAnsweredIsNotUnsent(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { return c.ok() })
	for _, protocol := range transports {
		o := forward(newProxy(t, single, protocol, up.addr), request(http.MethodPost, "x"))
		if o.status != 200 || o.NotSent() {
			t.Errorf("%s: %v", protocol, o)
		}
		if o.ours != (protocol == "agent_guard") {
			t.Errorf("%s: ours = %v", protocol, o.ours)
		}
	}
}

// staleConn is a connection whose end the client has not noticed when it writes.
// No real one can be made to break at exactly that moment.
type staleConn struct {
	net.Conn
	broken, used atomic.Bool // used says that a request was written to it since
}

func (c *staleConn) Write(p []byte) (int, error) {
	if c.broken.Load() {
		if len(p) > 64 { // not the alert by which TLS ends one that nobody uses
			c.used.Store(true)
		}
		return 0, syscall.EPIPE
	}
	return c.Conn.Write(p)
}

// Section "Sent or not": zero bytes on a stale connection are proven, and the
// guard may forward again once. Nothing arrives twice.
func TestStaleConnection(t *testing.T) {
	tests := []struct{ name, method, body string }{
		{"POST with a body", "POST", `{"amount":1}`},
		{"empty POST, which Go would re-send", "POST", ""},
		{"empty DELETE, which Go would re-send", "DELETE", ""},
	}
	schemes := []struct{ name, config string }{
		{"cleartext", single},
		{"TLS", insecure},
		{"TLS by Caddy's own dial", strings.Replace(insecure, `"tls": {`, `"tls": {"server_name": "{http.request.host}", `, 1)},
	}
	for _, scheme := range schemes {
		for _, tt := range tests {
			t.Run(scheme.name+"/"+tt.name, func(t *testing.T) {
				listen := newUpstream
				if scheme.name != "cleartext" {
					listen = newTLSUpstream
				}
				up := listen(t, func(c *serverConn, _ int) bool { return c.ok() })
				p := newProxy(t, scheme.config, "agent_guard", up.addr)
				var last atomic.Pointer[staleConn]
				err := proxy.Redial(p.transport(t), func(ctx context.Context, network, _ string) (net.Conn, error) {
					c, err := new(net.Dialer).DialContext(ctx, network, up.addr)
					if err != nil {
						return nil, err
					}
					stale := &staleConn{Conn: c}
					last.Store(stale)
					return stale, nil
				})
				if err != nil {
					t.Fatal(err)
				}
				var o outcome
				want := 1
				for used := false; !used; { // Go keeps no connection on which it was slow to see the end of the request
					if want > 100 {
						t.Fatal("no connection is kept")
					}
					if o := forward(p, request("POST", "warm")); o.status != 200 {
						t.Fatalf("the first request: %v", o)
					}
					want++
					stale := last.Load()
					stale.broken.Store(true)
					if o = forward(p, request(tt.method, tt.body)); !stale.used.Load() {
						want++
						continue
					}
					used = true
				}
				if o.Reason != proxy.NothingWritten || !o.Again {
					t.Errorf("%v, not proven unsent", o)
				}
				if o := forward(p, request(tt.method, tt.body)); o.status != 200 || o.NotSent() {
					t.Errorf("the second forward: %v", o)
				}
				p.end()
				if got := up.total(); got != want {
					t.Errorf("%d requests arrived, not %d", got, want)
				}
			})
		}
	}
}

const insecure = `{
	"transport": {"protocol": "%s", "tls": {"insecure_skip_verify": true}, "versions": ["1.1"]},
	"upstreams": [{"dial": "%s"}]
}`

// Section "Sent or not": the upstream has closed its idle connections. Whether the
// proxy has noticed yet is open; a request is answered, or proven unsent, or in
// doubt because it was written, but never arrives twice.
func TestUpstreamClosedIdleConnection(t *testing.T) {
	for _, protocol := range transports {
		t.Run(protocol, func(t *testing.T) {
			closed := make(chan struct{}, 1)
			up := newUpstream(t, func(c *serverConn, _ int) bool {
				keep := c.ok() && false
				_ = c.Close()
				closed <- struct{}{}
				return keep
			})
			p := newProxy(t, single, protocol, up.addr)
			answered := 0
			for range 300 {
				if o := forward(p, request("POST", "")); o.status == 200 {
					answered++
					<-closed
				}
			}
			p.end()
			if got := up.total(); got != answered {
				t.Errorf("%d requests arrived, %d were answered", got, answered)
			}
			if answered == 0 {
				t.Error("none was answered")
			}
		})
	}
}

const twoUpstreams = `{
	"transport": {"protocol": "%s"},
	"load_balancing": {"selection_policy": {"policy": "first"}, "retries": %d},
	"health_checks": {"passive": {"fail_duration": "1h"}},
	"upstreams": [{"dial": "%s"}, {"dial": "%s"}]
}`

// Section "Sent or not": a refused dial moves on to the next upstream, bodies too.
func TestRefusedDialMovesOn(t *testing.T) {
	for _, protocol := range transports {
		for _, body := range []string{"", "amount=1"} {
			var got atomic.Value
			up := newUpstream(t, func(c *serverConn, _ int) bool {
				req, err := http.ReadRequest(c.in)
				if err != nil {
					return false
				}
				b, _ := io.ReadAll(req.Body)
				got.Store(string(b))
				_, err = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				return err == nil
			})
			p := newProxy(t, twoUpstreams, protocol, 1, refusing(1)[0], up.addr)
			o := forward(p, request("POST", body))
			p.end()
			if arrived := up.total(); arrived != 1 || o.status != 200 || o.NotSent() || o.retries != -1 {
				t.Errorf("%s: %d arrived, %v", protocol, arrived, o)
			}
			if got.Load() != body {
				t.Errorf("%s: the upstream read %q, not %q", protocol, got.Load(), body)
			}
		}
	}
}

// Section "Sent or not": dial errors prove that nothing was sent, if every attempt
// is accounted for.
func TestAllUpstreamsRefuse(t *testing.T) {
	for _, protocol := range []string{"agent_guard", "http", "fastcgi"} {
		for retries := range 3 {
			t.Run(fmt.Sprint(protocol, retries), func(t *testing.T) {
				config := twoUpstreams
				if retries == 2 {
					// Both are down by then: the third iteration has no upstream,
					// and the error is still that of the second.
					config = strings.Replace(config, `"retries": %d`, `"retries": %d, "try_interval": "1ms"`, 1)
				}
				p := newProxy(t, config, append([]any{protocol, retries}, refusing(2)...)...)
				o := forward(p, request("POST", "x"))
				// Only our transport can tell an iteration without an upstream
				// from one that nobody saw.
				want := retries == 0 || protocol == "agent_guard" || protocol == "http" && retries == 1
				if o.retries != retries || (o.Reason == proxy.DialFailed) != want || o.NotSent() != want || o.Again {
					t.Errorf("%v; proven should be %v", o, want)
				}
			})
		}
	}
}

// Section "Sent or not": no upstream available. This holds our copy of Caddy's
// error text against Caddy's.
func TestNoUpstreamAvailable(t *testing.T) {
	for _, protocol := range []string{"agent_guard", "http", "fastcgi"} {
		p := newProxy(t, twoUpstreams, append([]any{protocol, 1}, refusing(2)...)...)
		forward(p, request("POST", "")) // takes both down
		o := forward(p, request("POST", ""))
		if o.Reason != proxy.NoUpstream || o.Again || o.retries != 1 {
			t.Errorf("%s: %v", protocol, o)
		}
	}
}

// Section "Sent or not": fastcgi reports no events. Its dial error says nothing of
// an earlier attempt that did send.
func TestFastCGIAfterBytes(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { return c.reset() })
	p := newProxy(t, `{
		"transport": {"protocol": "fastcgi"},
		"load_balancing": {"selection_policy": {"policy": "first"}, "retries": 1, "retry_match": [{"method": ["POST"]}]},
		"health_checks": {"passive": {"fail_duration": "1h"}},
		"upstreams": [{"dial": "%s"}, {"dial": "%s"}]
	}`, up.addr, refusing(1)[0])
	r := request("POST", "x")
	r.Header.Set("Content-Length", "1")
	o := forward(p, r)
	if arrived := up.total(); arrived != 1 || o.retries != 1 {
		t.Fatalf("%d arrived; %v", arrived, o)
	}
	if o.NotSent() || o.ours {
		t.Errorf("P1: %v, but it was sent", o)
	}
}

// Section "Sent or not": a response handler that goes on to another upstream. The
// second one's dial error must not hide that the first one, which reports no
// events, has executed the request.
func TestDialErrorAfterAnAnswer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var executed atomic.Int64
	go fcgi.Serve(l, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { executed.Add(1) }))
	for _, protocol := range transports {
		p := newProxy(t, `{
			"transport": {"protocol": "fastcgi"},
			"handle_response": [{"routes": [{"handle": [
				{"handler": "reverse_proxy", "transport": {"protocol": "%s"}, "upstreams": [{"dial": "%s"}]}
			]}]}],
			"upstreams": [{"dial": "%s"}]
		}`, protocol, refusing(1)[0], l.Addr())
		r := request("POST", "x")
		r.Header.Set("Content-Length", "1")
		o := forward(p, r)
		if !errors.As(o.err, new(reverseproxy.DialError)) || o.NotSent() {
			t.Errorf("%s: %v", protocol, o)
		}
	}
	if executed.Load() != 2 {
		t.Errorf("the first upstream executed %d requests, not 2", executed.Load())
	}
}

// frameReader is the end of an HTTP/2 connection that does only what a test tells it.
type frameReader struct {
	*http2.Framer
	conn *serverConn
}

// stream is called with each request's HEADERS; n counts them from 1 over all
// connections. It returns whether the connection goes on.
type stream func(f *frameReader, id uint32, n int) bool

// speakHTTP2 makes an answer of do. An arrival is a HEADERS frame.
func speakHTTP2(arrived func() int, do stream) answer {
	return func(c *serverConn, _ int) bool {
		preface := make([]byte, len(http2.ClientPreface))
		if _, err := io.ReadFull(c.in, preface); err != nil || !bytes.Equal(preface, []byte(http2.ClientPreface)) {
			return false
		}
		f := &frameReader{Framer: http2.NewFramer(c, c.in), conn: c}
		if f.WriteSettings() != nil {
			return false
		}
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return false
			}
			switch frame := frame.(type) {
			case *http2.SettingsFrame:
				if !frame.IsAck() && f.WriteSettingsAck() != nil {
					return false
				}
			case *http2.HeadersFrame:
				if !do(f, frame.StreamID, arrived()) {
					return false
				}
			}
		}
	}
}

func (f *frameReader) ok(id uint32) bool {
	var b bytes.Buffer
	_ = hpack.NewEncoder(&b).WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
	return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: b.Bytes(), EndHeaders: true, EndStream: true}) == nil
}

// Section "Sent or not": HTTP/2 re-sends what the server refused or went away
// from, and reverse_proxy what was lost. Over TLS and over cleartext.
func TestHTTP2IsNotSentAgain(t *testing.T) {
	lost := map[string]stream{
		"refused": func(f *frameReader, id uint32, _ int) bool {
			return f.WriteRSTStream(id, http2.ErrCodeRefusedStream) == nil
		},
		"reset":        func(f *frameReader, id uint32, _ int) bool { return f.WriteRSTStream(id, http2.ErrCodeInternal) == nil },
		"went away":    func(f *frameReader, _ uint32, _ int) bool { _ = f.WriteGoAway(0, http2.ErrCodeNo, nil); return false },
		"disconnected": func(f *frameReader, _ uint32, _ int) bool { return f.conn.reset() },
	}
	for _, protocol := range transports {
		for _, h2c := range []bool{false, true} {
			for name, lose := range lost {
				for _, body := range []string{"", "amount=1"} {
					t.Run(fmt.Sprintf("%s/h2c=%v/%s/%s", protocol, h2c, name, body), func(t *testing.T) {
						up, config := newHTTP2Upstream(t, h2c, func(f *frameReader, id uint32, n int) bool {
							if n == 1 {
								return f.ok(id)
							}
							return lose(f, id, n)
						})
						p := newProxy(t, config, protocol, up.addr)
						if o := forward(p, request("POST", "")); o.status != 200 || o.NotSent() {
							t.Fatalf("the first request: %v", o)
						}
						o := forward(p, request("POST", body))
						p.end()
						if got := up.total(); got != 2 {
							t.Errorf("%d requests arrived, not 2", got)
						}
						if o.NotSent() {
							t.Errorf("P1: %v, but it was sent", o)
						}
					})
				}
			}
		}
	}
}

func TestHTTP2IsSentAgainWithoutTheFuse(t *testing.T) {
	t.Parallel() // it waits for a time to pass
	for _, h2c := range []bool{false, true} {
		up, config := newHTTP2Upstream(t, h2c, func(f *frameReader, id uint32, n int) bool {
			if n < 3 {
				return f.WriteRSTStream(id, http2.ErrCodeRefusedStream) == nil
			}
			return f.ok(id)
		})
		p := newProxy(t, config, "http", up.addr)
		if err := unguarded(p, request("POST", "")); err != nil {
			t.Error(err)
		}
		p.end()
		if got := up.total(); got != 3 {
			t.Errorf("h2c=%v: %d requests arrived, not 3; the trap is gone", h2c, got)
		}
	}
}

// newHTTP2Upstream returns an HTTP/2 upstream and a proxy configuration for it,
// with retries on a POST.
func newHTTP2Upstream(t *testing.T, h2c bool, do stream) (*http2Upstream, string) {
	t.Helper()
	// The body is buffered because the wrapper that reverse_proxy otherwise puts
	// around it does not bear HTTP/2's closing it while it is read.
	const config = `{
		"transport": {"protocol": "%%s", %s}, "request_buffers": 1024,
		"load_balancing": {"retries": 1, "retry_match": [{"method": ["POST"]}]},
		"upstreams": [{"dial": "%%s"}]
	}`
	tlsConfig := &tls.Config{Certificates: []tls.Certificate{certificate(t)}, NextProtos: []string{"h2"}}
	client := `"tls": {"insecure_skip_verify": true}`
	if h2c {
		tlsConfig, client = nil, `"versions": ["h2c"]`
	}
	// upstream would count the preface of each connection; what counts is HEADERS.
	var arrived atomic.Int64
	serve := speakHTTP2(func() int { return int(arrived.Add(1)) }, do)
	up := listen(t, tlsConfig, serve)
	return &http2Upstream{upstream: up, arrived: &arrived}, fmt.Sprintf(config, client)
}

type http2Upstream struct {
	*upstream
	arrived *atomic.Int64
}

func (u *http2Upstream) total() int {
	u.upstream.total()
	return int(u.arrived.Load())
}

// A request that is kept from being sent again does not take the connection along
// on which others wait for their answers.
func TestHTTP2ConnectionOutlivesTheFuse(t *testing.T) {
	for _, protocol := range transports {
		for _, h2c := range []bool{false, true} {
			held, lost := make(chan uint32, 1), make(chan struct{})
			up, config := newHTTP2Upstream(t, h2c, func(f *frameReader, id uint32, n int) bool {
				switch n {
				case 1: // stays open while the second is lost
					held <- id
					return true
				case 2:
					if f.WriteRSTStream(id, http2.ErrCodeRefusedStream) != nil {
						return false
					}
					<-lost
					return f.ok(<-held)
				default:
					return f.ok(id)
				}
			})
			p := newProxy(t, config, protocol, up.addr)
			first := make(chan outcome)
			go func() { first <- forward(p, request("POST", "")) }()
			held <- <-held
			if o := forward(p, request("POST", "")); o.NotSent() {
				t.Errorf("%s, h2c=%v: P1: %v, but it was sent", protocol, h2c, o)
			}
			close(lost)
			if o := <-first; o.status != 200 {
				t.Errorf("%s, h2c=%v: the other request on the connection: %v", protocol, h2c, o)
			}
			p.end()
			if got := up.total(); got != 2 {
				t.Errorf("%s, h2c=%v: %d requests arrived, not 2", protocol, h2c, got)
			}
		}
	}
}

// Guarded requests share connections with each other, and with no others.
func TestHTTP2ConnectionsAreApart(t *testing.T) {
	for _, h2c := range []bool{false, true} {
		conns := make(map[*serverConn]bool) // the requests come one after another
		up, config := newHTTP2Upstream(t, h2c, func(f *frameReader, id uint32, _ int) bool {
			conns[f.conn] = true
			return f.ok(id)
		})
		p := newProxy(t, config, "agent_guard", up.addr)
		for range 2 {
			if err := unguarded(p, request("POST", "")); err != nil {
				t.Fatal(err)
			}
			if o := forward(p, request("POST", "")); o.status != 200 {
				t.Fatal(o)
			}
		}
		p.end()
		up.total()
		if len(conns) != 2 {
			t.Errorf("h2c=%v: %d connections, not 2", h2c, len(conns))
		}
	}
}

// Section "Sent or not": HTTP/3 works and proves nothing.
func TestHTTP3(t *testing.T) {
	cert := certificate(t)
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	executed := make(chan string, 8)
	server := &http3.Server{
		TLSConfig: http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{cert}}),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			executed <- r.URL.Path
			if r.Header.Get("X-Lose") != "" {
				panic(http.ErrAbortHandler)
			}
		}),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(udp) }()
	t.Cleanup(func() {
		_ = server.Close()
		<-served
		_ = udp.Close()
	})
	for _, protocol := range transports {
		p := newProxy(t, `{
			"transport": {"protocol": "%s", "versions": ["3"], "tls": {"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}}},
			"load_balancing": {"retries": 2, "retry_match": [{"method": ["POST"]}]},
			"upstreams": [{"dial": "%s"}]
		}`, protocol, base64.StdEncoding.EncodeToString(leaf.Raw), udp.LocalAddr())
		if o := forward(p, request("POST", "x")); o.status != 200 || o.Reason != proxy.Unknown {
			t.Errorf("%s: answered: %v", protocol, o)
		}
		lose := request("POST", "")
		lose.Header.Set("X-Lose", "1")
		if o := forward(p, lose); o.NotSent() {
			t.Errorf("%s: P1: %v, but it was sent", protocol, o)
		}
		p.end()
		if got := len(executed); got != 2 {
			t.Errorf("%s: %d requests arrived, not 2", protocol, got)
		}
		for range len(executed) {
			<-executed
		}
	}
}
