package caddymodule

import _ "github.com/caddyserver/caddy/v2" // the way of a call knows no Caddy
