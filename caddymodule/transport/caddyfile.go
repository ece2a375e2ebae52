package transport

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// option parses one option of ours; the dispenser stands on its name.
type option func(t *Transport, d *caddyfile.Dispenser) error

// options returns the options that are ours. All others belong to the embedded
// HTTP transport.
func options() map[string]option {
	return map[string]option{
		"breaker":           parseBreaker,
		"keepalive_guarded": parseKeepaliveGuarded,
	}
}

// UnmarshalCaddyfile sets up the transport from Caddyfile tokens. Syntax:
//
//	transport agent_guard {
//		breaker           off | { ... }
//		keepalive_guarded off|<duration>
//		# and all options of transport http
//	}
func (t *Transport) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume transport name
	if d.CountRemainingArgs() > 0 {
		return d.ArgErr()
	}
	ours := options()
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		segment := d.NextSegment()
		parse, ok := ours[name]
		if !ok {
			continue
		}
		inner := caddyfile.NewDispenser(segment)
		inner.Next()
		if err := parse(t, inner); err != nil {
			return err
		}
		d.DeleteN(len(segment))
	}
	// What is left is the block of transport http, with its lines, which errors name.
	d.Reset()
	return t.HTTPTransport.UnmarshalCaddyfile(d)
}

func parseBreaker(t *Transport, d *caddyfile.Dispenser) error {
	if t.Breaker != nil {
		return d.Errf("%s is given twice", d.Val())
	}
	t.Breaker = new(circuits.Settings)
	return t.Breaker.UnmarshalCaddyfile(d)
}

func parseKeepaliveGuarded(t *Transport, d *caddyfile.Dispenser) error {
	name := d.Val()
	if t.KeepaliveGuarded != 0 {
		return d.Errf("%s is given twice", name)
	}
	if !d.NextArg() {
		return d.ArgErr()
	}
	if d.Val() == "off" {
		t.KeepaliveGuarded = -1
	} else {
		limit, err := caddy.ParseDuration(d.Val())
		if err != nil || limit <= 0 {
			return d.Errf("%s must be off or a positive duration, not '%s'", name, d.Val())
		}
		t.KeepaliveGuarded = caddy.Duration(limit)
	}
	if d.NextArg() {
		return d.ArgErr()
	}
	return nil
}

var _ caddyfile.Unmarshaler = (*Transport)(nil)
