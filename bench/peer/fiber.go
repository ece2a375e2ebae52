// Package peer runs what the guard is compared with: fiber v3 as a proxy, with and
// without its idempotency middleware in memory.
package peer

import (
	"flag"
	"net"

	"github.com/gofiber/fiber/v3"
	"github.com/gofiber/fiber/v3/middleware/idempotency"
	"github.com/gofiber/fiber/v3/middleware/proxy"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// Role is the name of the part.
const Role = "fiber"

// Run serves a proxy before the upstream on a free port of the loopback until the
// process is ended. With -idempotent the middleware stands before it.
func Run(args []string) error {
	flags := flag.NewFlagSet(Role, flag.ContinueOnError)
	upstream := flags.String("upstream", "", "host:port of the upstream")
	idempotent := flags.Bool("idempotent", false, "with the idempotency middleware")
	if err := flags.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	app := fiber.New()
	if *idempotent {
		app.Use(idempotency.New(idempotency.Config{KeyHeader: "Idempotency-Key"}))
	}
	app.Use(proxy.Balancer(proxy.Config{Servers: []string{*upstream}}))
	proc.Ready(l.Addr().String())
	return app.Listener(l, fiber.ListenConfig{DisableStartupMessage: true})
}
