package caddymodule

import (
	"fmt"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// compile chains the handlers of an option, the first outermost.
func compile(mods []any, option string) caddyhttp.Handler {
	next := caddyhttp.Handler(caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		return caddyhttp.Error(http.StatusBadGateway, fmt.Errorf("agent_guard: no handler in `%s` answered", option))
	}))
	for i := len(mods) - 1; i >= 0; i-- {
		middleware, inner := mods[i].(caddyhttp.MiddlewareHandler), next
		next = caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			return middleware.ServeHTTP(w, r, inner)
		})
	}
	return next
}
