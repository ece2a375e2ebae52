// Package caddymodule is the only place that knows Caddy: the app, the handler,
// the endpoints and their Caddyfile syntax. What it decides with is in guard.
package caddymodule
