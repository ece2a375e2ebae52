package gateway

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(Noop{})
	httpcaddyfile.RegisterHandlerDirective("bench_noop", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(Noop), nil
	})
}

// Noop is a handler that does nothing: what any handler costs.
type Noop struct{}

// CaddyModule returns the Caddy module information.
func (Noop) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.bench_noop", New: func() caddy.Module { return new(Noop) }}
}

// ServeHTTP hands the request on.
func (Noop) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return next.ServeHTTP(w, r)
}

var _ caddyhttp.MiddlewareHandler = Noop{}
