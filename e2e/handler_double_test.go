package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(do{})
	httpcaddyfile.RegisterHandlerDirective("e2e_do", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		d := new(do)
		h.Next()
		if !h.Args(&d.What) {
			return nil, h.ArgErr()
		}
		return d, nil
	})
}

// do is a handler that ends in a certain way.
type do struct {
	What string `json:"what"`

	before bool
}

func (do) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.e2e_do", New: func() caddy.Module { return new(do) }}
}

func (d *do) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if d.What == "stale" {
		if d.before {
			return next.ServeHTTP(w, r)
		}
		d.before = true
		return stale(r)
	}
	if d.What == "short" {
		w.Header().Set("Content-Length", "9")
		fmt.Fprint(w, "part")
		return nil
	}
	late := strings.HasPrefix(d.What, "late_")
	if late {
		fmt.Fprint(w, "begin")
		_ = http.NewResponseController(w).Flush()
	}
	switch strings.TrimPrefix(d.What, "late_") {
	case "panic":
		panic(http.ErrAbortHandler)
	case "error":
		return caddyhttp.Error(http.StatusServiceUnavailable, errors.New("no upstreams available, or so"))
	}
	return nil
}

// stale ends the way reverse_proxy does with our transport, where a connection that
// it was given is dead.
func stale(r *http.Request) error {
	attempt := proxy.FromContext(r.Context()).Attempt()
	trace := httptrace.ContextClientTrace(r.Context())
	trace.GetConn("upstream:80")
	trace.GotConn(httptrace.GotConnInfo{Conn: deadConn{}, Reused: true})
	err := errors.New("the connection is dead")
	attempt.Done(err)
	r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Set("http.reverse_proxy.retries", 0)
	return caddyhttp.Error(http.StatusBadGateway, err)
}

// deadConn is a counted connection on which nothing is written.
type deadConn struct{ net.Conn }

func (deadConn) Count(*proxy.Attempt) {}
func (deadConn) Multiplexed() bool    { return false }
