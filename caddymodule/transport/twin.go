package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/net/http2"
)

// twin builds the transport of the guarded requests: configured as the embedded
// one is, but with counted connections that are not idle for long.
//
// It is made from the provisioned transport and not from the configuration,
// whose guest modules Caddy loads only once.
func (t *Transport) twin() (*http.Transport, error) {
	rt := t.Transport.Clone()
	// Where one kept connection was closed, those of its age are about to be.
	stale := func() { t.guarded.CloseIdleConnections() }
	dial := counting(t.Transport.DialContext, stale, slices.Contains(t.Versions, "h2c"))
	rt.DialContext = dial
	if t.Transport.DialTLSContext != nil {
		// Caddy's function makes the TCP connection itself, below TLS, where it
		// cannot be wrapped.
		rt.DialTLSContext = t.dialTLS(dial)
	}

	keepalive := time.Duration(t.KeepaliveGuarded)
	switch {
	case keepalive < 0:
		rt.DisableKeepAlives = true
	case rt.IdleConnTimeout <= 0 || keepalive < rt.IdleConnTimeout:
		rt.IdleConnTimeout = keepalive
	}

	// Clone copies the hooks of the original's HTTP/2, which would put guarded
	// requests on connections of the original's pool. This replaces them.
	if slices.Contains(t.Versions, "2") || slices.Contains(t.Versions, "h2c") {
		//lint:ignore SA1019 the twin must speak HTTP/2 exactly as Caddy's transport does
		if err := http2.ConfigureTransport(rt); err != nil {
			return nil, fmt.Errorf("configuring HTTP/2 for guarded requests: %w", err)
		}
	}
	return rt, nil
}

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// counting wraps the connections that dial makes. cleartext HTTP/2 is all or
// nothing in a transport, so it is known here.
func counting(dial dialFunc, stale func(), h2c bool) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &conn{Conn: c, h2c: h2c, stale: stale}, nil
	}
}

// dialTLS does what Caddy's DialTLSContext does (server names with placeholders,
// and the PROXY protocol, whose addresses Go cannot split), over dial.
func (t *Transport) dialTLS(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		config := t.guarded.TLSClientConfig.Clone()
		if strings.Contains(config.ServerName, "{") {
			repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
			if !ok {
				_ = c.Close() // the error below is the one to know
				return nil, errNoReplacer
			}
			config.ServerName = repl.ReplaceAll(config.ServerName, "")
		}
		if limit := t.guarded.TLSHandshakeTimeout; limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeoutCause(ctx, limit, fmt.Errorf("TLS handshake timeout after %s", limit))
			defer cancel()
		}
		tc := tls.Client(c, config)
		if err := tc.HandshakeContext(ctx); err != nil {
			_ = tc.Close() // the handshake's error is the one to know
			return nil, err
		}
		return tc, nil
	}
}

var errNoReplacer = errors.New("a server name with placeholders needs a request of Caddy's")
