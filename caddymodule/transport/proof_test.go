package transport_test

import (
	"context"
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

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// staleConn is a connection whose end the client has not noticed when it writes.
// No real one can be made to break at exactly that moment.
type staleConn struct {
	net.Conn
	broken atomic.Bool
}

func (c *staleConn) Write(p []byte) (int, error) {
	if c.broken.Load() {
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
				err := transport.Redial(p.transport(t), func(ctx context.Context, network, _ string) (net.Conn, error) {
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
				if o := forward(p, request("POST", "warm")); o.status != 200 {
					t.Fatalf("the first request: %v", o)
				}
				last.Load().broken.Store(true)

				o := forward(p, request(tt.method, tt.body))
				if o.Reason != sent.NothingWritten || !o.Again {
					t.Errorf("%v, not proven unsent", o)
				}
				if o := forward(p, request(tt.method, tt.body)); o.status != 200 || o.NotSent() {
					t.Errorf("the second forward: %v", o)
				}
				p.end()
				if got := up.total(); got != 2 {
					t.Errorf("%d requests arrived, not 2", got)
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
				if o.retries != retries || (o.Reason == sent.DialFailed) != want || o.NotSent() != want || o.Again {
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
		if o.Reason != sent.NoUpstream || o.Again || o.retries != 1 {
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
