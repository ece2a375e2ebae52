package transport_test

import (
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
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy/fastcgi"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
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

// proxy is a provisioned reverse_proxy.
type proxy struct {
	*reverseproxy.Handler
	end context.CancelFunc
}

// newProxy provisions a reverse_proxy from JSON, in which %s stands for dial
// addresses in turn.
func newProxy(t *testing.T, config string, addrs ...any) *proxy {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.ActiveContext())
	t.Cleanup(cancel)
	mod, err := ctx.LoadModuleByID("http.handlers.reverse_proxy", json.RawMessage(fmt.Sprintf(config, addrs...)))
	if err != nil {
		t.Fatal(err)
	}
	return &proxy{Handler: mod.(*reverseproxy.Handler), end: cancel}
}

func (p *proxy) transport(t *testing.T) *transport.Transport {
	t.Helper()
	tr, ok := p.Transport.(*transport.Transport)
	if !ok {
		t.Fatalf("the transport is a %T", p.Transport)
	}
	return tr
}

// outcome is what the guard sees of a forward.
type outcome struct {
	sent.Verdict
	err      error
	status   int
	body     string
	aborted  bool // http.ErrAbortHandler
	ours     bool
	unframed bool
	retries  int
}

func (o outcome) String() string {
	return fmt.Sprintf("%s again=%v status=%d retries=%d err=%v", o.Reason, o.Again, o.status, o.retries, o.err)
}

// forward does what the guard does: it arms the request, forwards it, and asks
// what is proven.
func forward(p caddyhttp.MiddlewareHandler, r *http.Request) outcome {
	rec := httptest.NewRecorder()
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rec, new(caddyhttp.Server))
	ctx, watch := sent.Arm(r.Context())
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
	o.retries = sent.Retries(ctx)
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
