// Package peer runs another product's idempotency middleware in front of the same
// upstream: fiber v2 with its own proxy, which are what a Go team would take without us.
// It is here for its price. It keeps answers in memory and stores them only when they are
// whole: no intent before the call, no fingerprint, no caller, nothing after a crash.
package peer

import (
	"flag"
	"net"

	"github.com/gofiber/fiber/v2"
	"github.com/gofiber/fiber/v2/middleware/idempotency"
	"github.com/gofiber/fiber/v2/middleware/proxy"

	"github.com/agent-guard/caddy-agent-guard/bench/proc"
)

// Role is the name of the part.
const Role = "peer"

// Run serves on a free port of the loopback until the process is ended. With -idempotent
// the middleware is in front of the proxy.
func Run(args []string) error {
	flags := flag.NewFlagSet(Role, flag.ContinueOnError)
	upstream := flags.String("upstream", "", "host:port of the upstream")
	idempotent := flags.Bool("idempotent", false, "keep answers by Idempotency-Key")
	if err := flags.Parse(args); err != nil {
		return err
	}
	app := fiber.New(fiber.Config{DisableStartupMessage: true})
	if *idempotent {
		app.Use(idempotency.New(idempotency.Config{KeyHeader: "Idempotency-Key"}))
	}
	app.Use(proxy.Balancer(proxy.Config{Servers: []string{"http://" + *upstream}}))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	proc.Ready(l.Addr().String())
	return app.Listener(l)
}
