package circuits

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// Member keeps the state of the process's breakers between processes, and hears what
// becomes of them. Of several that hear, the one that began last does, so that each
// transition is told once.
type Member struct {
	pool *pool
	hook Hook
}

// Hook hears what becomes of the process's breakers.
type Hook interface {
	breaker.Hook
	// Dropped hears of the breakers that are forgotten because no transport leads to
	// their upstreams any more, as they stood. A transport that comes may bring one
	// back at any moment: what is there is to be asked for, not concluded.
	Dropped([]breaker.Status)
}

// Join makes a member until Leave.
func Join() *Member { return &Member{pool: hold()} }

// Hear tells the hook of every transition from now on. It may call the member.
func (m *Member) Hear(hook Hook) {
	m.pool.mu.Lock()
	defer m.pool.mu.Unlock()
	m.hook = hook
	m.pool.hearing = append(m.pool.hearing, m)
}

// Leave ends the membership. A call of the hook that has begun may still run.
func (m *Member) Leave() {
	m.pool.mu.Lock()
	m.pool.hearing = slices.DeleteFunc(m.pool.hearing, func(other *Member) bool { return other == m })
	m.pool.mu.Unlock()
	_ = release() // the pool's end reports nothing
}

// Status is that of every breaker, sorted by key.
func (m *Member) Status() []breaker.Status { return m.pool.registry.Status() }

// Downstream is the identity of an upstream, by its address, where one is configured;
// else the address.
func (m *Member) Downstream(upstream string) string {
	return cmp.Or(m.pool.identity(upstream), upstream)
}

// Keep remembers a reference to the opening that an event tells of, such as the id of
// its token (breaker.Breaker.Keep).
func (m *Member) Keep(e breaker.Event, reference string) {
	if b := m.pool.registry.Find(e.Key); b != nil {
		b.Keep(e.Generation, reference)
	}
}

// SetMode sets what an operator wants of a breaker. It reports false where there is none.
func (m *Member) SetMode(key breaker.Key, mode breaker.Mode) bool {
	b := m.pool.registry.Find(key)
	if b != nil {
		b.SetMode(mode)
	}
	return b != nil
}

// Snapshot is what of a breaker has to outlive the process. There is nothing where a
// new breaker would do as well, and where the configuration forces the mode.
func (m *Member) Snapshot(key breaker.Key) (breaker.Snapshot, bool) {
	m.pool.mu.Lock()
	_, forced := m.pool.forced[key]
	m.pool.mu.Unlock()
	b := m.pool.registry.Find(key)
	if b == nil || forced {
		return breaker.Snapshot{}, false
	}
	s := b.Snapshot()
	return s, !s.Blank()
}

// Restore lets a breaker go on where another process has left it. It reports false where
// no transport leads to its upstream. What a breaker of this process knows by itself
// goes before.
func (m *Member) Restore(s breaker.Snapshot) (bool, error) {
	p := m.pool
	p.mu.Lock()
	users := p.users
	p.mu.Unlock()
	i := slices.IndexFunc(users, func(u *Circuits) bool { return u.leadsTo(s.Upstream) })
	if i < 0 {
		return false, nil
	}
	if err := p.registry.Restore(s, users[i].checked.rules); err != nil {
		return false, fmt.Errorf("circuits: %w", err)
	}
	return true, nil
}
