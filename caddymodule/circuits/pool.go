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
	forces   atomic.Int64 // how many breakers and users force a mode, or are forced

	// mu is never held while a breaker or the registry is called: what these tell the
	// hook comes back here, and so does what the registry asks when it drops.
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
	p.count()
}

// leave takes a user out, and forgets the upstreams that none of the others leads to.
func (p *pool) leave(c *Circuits) {
	p.mu.Lock()
	p.users = slices.DeleteFunc(slices.Clone(p.users), func(u *Circuits) bool { return u == c })
	p.count()
	p.mu.Unlock()
	stood := p.registry.Status()
	var gone []breaker.Key
	p.registry.Drop(func(key breaker.Key) bool {
		if p.leadsTo(key.Upstream) {
			return false
		}
		gone = append(gone, key)
		return true
	})
	p.mu.Lock()
	for _, key := range gone {
		p.force(key, breaker.Auto)
	}
	p.mu.Unlock()
	stood = slices.DeleteFunc(stood, func(s breaker.Status) bool { return !slices.Contains(gone, s.Key) })
	if m := p.latest(); m != nil && len(stood) > 0 {
		m.hook.Dropped(stood)
	}
}

// leadsTo reports whether any user leads to the upstream: one that has come meanwhile too.
func (p *pool) leadsTo(upstream string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.users, func(u *Circuits) bool { return u.leadsTo(upstream) })
}

// identity is that of an upstream, as the latest user says that gives it one.
func (p *pool) identity(upstream string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, user := range slices.Backward(p.users) {
		if identity := user.checked.downstream[upstream]; identity != "" {
			return identity
		}
	}
	return ""
}

// enforce brings a breaker into the mode that a configuration forces, or out of the one
// that an earlier configuration did. A mode that nothing here has forced is left alone.
func (p *pool) enforce(b *breaker.Breaker) {
	p.mu.Lock()
	mode := p.wanted(b.Key().Upstream)
	changed := p.force(b.Key(), mode)
	p.mu.Unlock()
	if changed {
		b.SetMode(mode)
	}
}

// wanted is the mode of an upstream's breaker: that of the latest transport that is
// known to lead there, whoever calls. p.mu is held.
func (p *pool) wanted(upstream string) breaker.Mode {
	var who *Circuits
	for _, user := range slices.Backward(p.users) {
		if user.Known(upstream) {
			who = user
			break
		}
		if who == nil && user.open {
			who = user
		}
	}
	if who == nil || !who.forced { // to observe is for the rules
		return breaker.Auto
	}
	return who.set.Mode
}

// count counts what asks for enforce. p.mu is held.
func (p *pool) count() {
	n := len(p.forced)
	for _, user := range p.users {
		if user.forced {
			n++
		}
	}
	p.forces.Store(int64(n))
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
	p.count()
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
