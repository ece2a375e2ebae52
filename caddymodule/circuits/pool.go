package circuits

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// pool is the process's breakers, while anybody holds them.
type pool struct {
	registry *breaker.Registry
	forces   atomic.Int64 // how many breakers are forced by a configuration

	// mu is never held while a breaker or the registry is called: what these tell the
	// hook comes back here.
	mu      sync.Mutex
	users   []*Circuits // replaced as a whole
	hearing []*Member   // the latest last
	forced  map[breaker.Key]breaker.Mode
}

// pools has one entry: a UsagePool counts who holds it, over reloads.
var pools = caddy.NewUsagePool()

const poolKey = "agent_guard.circuits"

func hold() *pool {
	value, _, err := pools.LoadOrNew(poolKey, func() (caddy.Destructor, error) {
		p := &pool{forced: map[breaker.Key]breaker.Mode{}}
		p.registry = breaker.NewRegistry(0, p)
		return p, nil
	})
	if err != nil {
		panic(err) // the constructor has none
	}
	return value.(*pool)
}

func release() error {
	_, err := pools.Delete(poolKey)
	return err
}

// Destruct stops the breakers' timers.
func (p *pool) Destruct() error {
	p.registry.Drop(func(breaker.Key) bool { return true })
	return nil
}

// join adds a user. Equal settings share their rules: a breaker that several transports
// use would else be told of others with every call.
func (p *pool) join(c *Circuits) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, other := range p.users {
		if other.checked.rules.Settings() == c.checked.rules.Settings() {
			c.checked.rules = other.checked.rules
			break
		}
	}
	p.users = append(slices.Clip(p.users), c)
}

// leave takes a user out, and forgets the upstreams that none of the others leads to.
func (p *pool) leave(c *Circuits) {
	p.mu.Lock()
	p.users = slices.DeleteFunc(slices.Clone(p.users), func(u *Circuits) bool { return u == c })
	rest := p.users
	p.mu.Unlock()
	var gone []breaker.Key
	p.registry.Drop(func(key breaker.Key) bool {
		if slices.ContainsFunc(rest, func(u *Circuits) bool { return u.leadsTo(key.Upstream) }) {
			return false
		}
		gone = append(gone, key)
		return true
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range gone {
		p.force(key, breaker.Auto)
	}
}

// enforce brings a breaker into the mode that a configuration forces, or out of the one
// that an earlier configuration did. A mode that nothing here has forced is left alone.
func (p *pool) enforce(b *breaker.Breaker, mode breaker.Mode) {
	if mode == breaker.Observe { // which the rules do
		mode = breaker.Auto
	}
	p.mu.Lock()
	changed := p.force(b.Key(), mode)
	p.mu.Unlock()
	if changed {
		b.SetMode(mode)
	}
}

// force notes what is forced. p.mu is held.
func (p *pool) force(key breaker.Key, mode breaker.Mode) (changed bool) {
	if p.forced[key] == mode {
		return false
	}
	if mode == breaker.Auto {
		delete(p.forced, key)
	} else {
		p.forced[key] = mode
	}
	p.forces.Store(int64(len(p.forced)))
	return true
}

// Transition implements breaker.Hook.
func (p *pool) Transition(e breaker.Event) {
	if m := p.latest(); m != nil {
		m.hook.Transition(e)
	}
}

// PermanentlyOpen implements breaker.Hook.
func (p *pool) PermanentlyOpen(e breaker.Event) {
	if m := p.latest(); m != nil {
		m.hook.PermanentlyOpen(e)
	}
}

func (p *pool) latest() *Member {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.hearing) == 0 {
		return nil
	}
	return p.hearing[len(p.hearing)-1]
}

var (
	_ breaker.Hook     = (*pool)(nil)
	_ caddy.Destructor = (*pool)(nil)
)
