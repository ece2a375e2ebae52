package transport_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

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
	if o := forward(untrusting, request("POST", "x")); o.Reason != sent.NothingWritten || o.Again {
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
