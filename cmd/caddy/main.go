// Command caddy is Caddy with its standard modules and the agent guard.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/agent-guard/caddy-agent-guard"
)

func main() {
	caddycmd.Main()
}
