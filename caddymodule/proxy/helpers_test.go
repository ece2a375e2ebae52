package proxy_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy/fastcgi"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// TestMain runs an empty Caddy, because modules are provisioned in the context of
// a configuration.
func TestMain(m *testing.M) {
	persist := false
	err := caddy.Run(&caddy.Config{
		Admin:   &caddy.AdminConfig{Disabled: true, Config: &caddy.ConfigSettings{Persist: &persist}},
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {BaseLog: caddy.BaseLog{Level: "FATAL"}}}},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// testProxy is a provisioned reverse_proxy.
type testProxy struct {
	*reverseproxy.Handler
	end context.CancelFunc
}

// provisioning is held while a reverse_proxy is provisioned: Caddy 2.11.9 sets its metrics
// then, which are global, without a lock.
var provisioning sync.Mutex

// newProxy provisions a reverse_proxy from JSON, in which %s stands for dial
// addresses in turn.
func newProxy(t *testing.T, config string, addrs ...any) *testProxy {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.ActiveContext())
	t.Cleanup(cancel)
	provisioning.Lock()
	defer provisioning.Unlock()
	mod, err := ctx.LoadModuleByID("http.handlers.reverse_proxy", json.RawMessage(fmt.Sprintf(config, addrs...)))
	if err != nil {
		t.Fatal(err)
	}
	return &testProxy{Handler: mod.(*reverseproxy.Handler), end: cancel}
}

func (p *testProxy) transport(t *testing.T) *proxy.Transport {
	t.Helper()
	tr, ok := p.Transport.(*proxy.Transport)
	if !ok {
		t.Fatalf("the transport is a %T", p.Transport)
	}
	return tr
}

// outcome is what the guard sees of a forward.
type outcome struct {
	proxy.Verdict
	err      error
	status   int
	body     string
	aborted  bool // http.ErrAbortHandler
	ours     bool
	unframed bool
	retries  int
}

func (o outcome) String() string {
	return fmt.Sprintf("%d again=%v status=%d retries=%d err=%v", o.Reason, o.Again, o.status, o.retries, o.err)
}

// forward does what the guard does: it arms the request, forwards it, and asks
// what is proven.
func forward(p caddyhttp.MiddlewareHandler, r *http.Request) outcome {
	rec := httptest.NewRecorder()
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rec, new(caddyhttp.Server))
	ctx, watch := proxy.Arm(r.Context())
	defer watch.Release()
	var o outcome
	func() {
		defer func() {
			if v := recover(); v != nil {
				if v != http.ErrAbortHandler {
					panic(v)
				}
				o.aborted = true
			}
		}()
		o.err = p.ServeHTTP(rec, r.WithContext(ctx), noNext)
	}()
	o.ours, o.unframed = watch.Ours(), watch.Unframed()
	o.retries = proxy.Retries(ctx)
	o.Verdict = watch.Proof(o.err, o.retries)
	o.status, o.body = rec.Code, rec.Body.String()
	if o.err != nil {
		o.status = 0
	}
	return o
}

// unguarded forwards without the fuse, to show that a test's upstream provokes
// what the fuse prevents.
func unguarded(p caddyhttp.MiddlewareHandler, r *http.Request) error {
	rec := httptest.NewRecorder()
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rec, new(caddyhttp.Server))
	return p.ServeHTTP(rec, r, noNext)
}

var noNext = caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })

// request is one with an execution id. Its body cannot be rewound, as the guard's
// cannot.
func request(method, body string) *http.Request {
	var b io.Reader
	if body != "" {
		b = struct{ io.Reader }{strings.NewReader(body)}
	}
	r := httptest.NewRequest(method, "http://guard.example/v1/charges", b)
	if body != "" {
		r.ContentLength = int64(len(body))
	}
	r.Header.Set("Idempotency-Key", "one")
	return r
}

// certificate makes a self-signed certificate for 127.0.0.1, example.com and these URIs.
func certificate(t *testing.T, uris ...string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:     []string{"example.com"},
	}
	for _, text := range uris {
		uri, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = append(template.URIs, uri)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

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
