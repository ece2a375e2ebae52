// Package circuits holds the breakers of the process: one for each upstream address,
// whatever transports and configurations lead there.
//
// Transports open it with their settings, and a breaker goes by those of the call that
// came last. The state lives as long as any transport or member does, so that a reload
// changes neither state nor counts. An upstream that no configuration has any more is
// forgotten.
package circuits

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// The classes of operations that by_operation tells apart.
const (
	Read  = "read"
	Write = "write"
)

// Circuits are the breakers as one transport uses them.
type Circuits struct {
	pool      *pool
	set       Settings
	checked   *settings
	upstreams []string // their addresses
	open      bool     // there are others that are not known
	forced    bool     // the settings force a mode
}

// Open holds the process's breakers for a transport with these settings, which must be
// let go with Close. upstreams are those that it is known to lead to, as Caddy dials
// them; more says that there may be others. It fails on settings that Validate refuses,
// and with VerifyProbe on an upstream that is known and has no identity.
func Open(s Settings, upstreams []string, more bool) (*Circuits, error) {
	checked, err := s.checkAll()
	if err != nil {
		return nil, err
	}
	c := &Circuits{set: s, checked: checked, open: more}
	c.forced = s.Mode == breaker.ForcedOpen || s.Mode == breaker.ForcedClosed
	for _, dial := range upstreams {
		address, err := Address(dial)
		if err != nil || strings.Contains(dial, "{") {
			c.open = true
			continue
		}
		if s.VerifyProbe && checked.downstream[address] == "" {
			return nil, fmt.Errorf("verify_probe: %s has no identity to hold answers to; name it with downstream", address)
		}
		c.upstreams = append(c.upstreams, address)
	}
	c.pool = hold()
	c.pool.join(c)
	return c, nil
}

// Close lets the breakers go. Calls that are under way may still settle theirs.
func (c *Circuits) Close() error {
	c.pool.leave(c)
	return release()
}

// Address is what an upstream's breaker is known by, of its dial address.
func Address(dial string) (string, error) {
	addr, err := caddy.ParseNetworkAddress(dial)
	if err != nil {
		return "", err
	}
	return AddressOf(addr.Network, addr.JoinHostPort(0)), nil
}

// AddressOf is what an upstream's breaker is known by, of its network and the address there.
func AddressOf(network, address string) string {
	if network == "" || network == "tcp" {
		return address
	}
	return network + "/" + address
}

// Breaker is that of an upstream, by its address, for a call of this method. Ask for
// each call.
func (c *Circuits) Breaker(upstream, method string) *breaker.Breaker {
	key := breaker.Key{Upstream: upstream}
	if c.set.ByOperation {
		key.Class = Write
		if Safe(method) {
			key.Class = Read
		}
	}
	b := c.pool.registry.Get(key, c.checked.rules)
	if c.pool.forces.Load() > 0 && b.Key() == key { // not where many share one
		c.pool.enforce(b)
	}
	return b
}

// Verified is who must have answered a probe of an upstream, by its address; empty where
// any answer will do.
func (c *Circuits) Verified(upstream string) string {
	if !c.set.VerifyProbe {
		return ""
	}
	return c.checked.downstream[upstream]
}

// Refusal is that of the upstream which is back first, if every upstream is known and
// refuses a call of this method and view at the moment; else nil.
func (c *Circuits) Refusal(method string, view *breaker.View) *breaker.OpenError {
	if c.open {
		return nil
	}
	var first *breaker.OpenError
	for _, upstream := range c.upstreams {
		refusal := c.Breaker(upstream, method).RefusalOf(breaker.Op{Safe: Safe(method), View: view})
		if refusal == nil {
			return nil
		}
		// Without an end nobody knows, and whoever has one is sooner.
		if first == nil || !refusal.Until.IsZero() && (first.Until.IsZero() || refusal.Until.Before(first.Until)) {
			first = refusal
		}
	}
	return first
}

// Identity is that of an upstream, by its address, where one is configured.
func (c *Circuits) Identity(upstream string) string { return c.pool.identity(upstream) }

// Safe reports whether a method changes nothing, so that a call is suited as a probe.
func Safe(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

// leadsTo reports whether calls of this transport may go to the upstream.
func (c *Circuits) leadsTo(upstream string) bool {
	return c.open || c.Known(upstream)
}

// Known reports whether an upstream is one of those that are known from the
// configuration.
func (c *Circuits) Known(upstream string) bool { return slices.Contains(c.upstreams, upstream) }
