// Command caddy is fine: cmd is the outermost layer.
package main

import (
	_ "example.com/house"
	_ "example.com/house/caddymodule"
	_ "github.com/caddyserver/caddy/v2/cmd"
)

func main() {}
