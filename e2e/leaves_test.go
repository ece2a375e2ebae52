package e2e

import (
	"context"
	"net/http"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(leaves{})
	httpcaddyfile.RegisterHandlerDirective("e2e_leaves", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(leaves), nil
	})
	httpcaddyfile.RegisterDirectiveOrder("e2e_leaves", httpcaddyfile.Before, "tracing")
}

// leaver is the field of calls whose clients will leave. Clients that close their connection at
// once when they are answered leave as well.
const leaver = "X-Will-Leave"

// leaves is a handler that notes when such a client has left. The guard sees it at the same time:
// the contexts of both end as one.
type leaves struct{}

var left atomic.Int64

// leftLog is what a gateway that is a process says then.
const leftLog = "e2e: a client has left"

func (leaves) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.e2e_leaves", New: func() caddy.Module { return new(leaves) }}
}

func (leaves) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if r.Header.Get(leaver) == "" {
		return next.ServeHTTP(w, r)
	}
	r.Header.Del(leaver) // the retry has none
	stop := context.AfterFunc(r.Context(), func() {
		left.Add(1)
		caddy.Log().Info(leftLog)
	})
	defer stop()
	return next.ServeHTTP(w, r)
}
