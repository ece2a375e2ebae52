package memory

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"slices"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Member is a Store as one of several gateways uses it. It has no lease that ends by itself: Remove ends it.
type Member struct {
	*Store
	self store.Member // guarded by the fleet's mu
}

var _ store.Shared = (*Member)(nil)

// fleet is what members of one store share.
type fleet struct {
	mu      sync.Mutex
	members []*Member
	left    chan struct{}
	follows []*follow
}

type follow struct {
	member  *Member
	prefix  []byte
	changed func(key []byte)
}

// Join returns the store as a gateway with this name uses it. The store's own Close closes it for all members,
// that of a Member only its own.
func (s *Store) Join(node string) *Member {
	m := &Member{Store: s, self: store.Member{Node: node, Boot: rand.Text(), Joined: s.now(), Seen: s.now()}}
	f := &s.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	f.members = append(f.members, m)
	slices.SortFunc(f.members, func(a, b *Member) int {
		return cmp.Or(cmp.Compare(a.self.Node, b.self.Node), cmp.Compare(a.self.Boot, b.self.Boot))
	})
	return m
}

// Remove ends the member, as another one does that finds its lease over.
func (m *Member) Remove() {
	f := &m.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	f.members = slices.DeleteFunc(f.members, func(o *Member) bool { return o == m })
	f.follows = slices.DeleteFunc(f.follows, func(o *follow) bool { return o.member == m })
	if f.left != nil {
		close(f.left)
		f.left = nil
	}
}

// Commit implements store.Store.
func (m *Member) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	f := &m.fleet
	f.mu.Lock() // until the others know, so that all see one order
	defer f.mu.Unlock()
	if !slices.Contains(f.members, m) {
		return 0, store.ErrUnhealthy
	}
	version, written, err := m.commit(ctx, batch)
	if err != nil {
		return 0, err
	}
	for _, key := range written {
		for _, follow := range f.follows {
			if follow.member != m && bytes.HasPrefix(key, follow.prefix) {
				follow.changed(key)
			}
		}
	}
	return version, nil
}

// Close ends the member. The store stays open for others.
func (m *Member) Close() error {
	m.Remove()
	return nil
}

// Self implements store.Shared.
func (m *Member) Self() store.Member {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	return m.self
}

// Members implements store.Shared.
func (m *Member) Members(context.Context) ([]store.Member, error) {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	var all []store.Member
	for _, o := range m.fleet.members {
		all = append(all, o.self)
	}
	return all, nil
}

// Gone implements store.Shared.
func (m *Member) Gone(_ context.Context, boot string) (bool, error) {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	return !slices.ContainsFunc(m.fleet.members, func(o *Member) bool { return o.self.Boot == boot }), nil
}

// Left implements store.Shared.
func (m *Member) Left() <-chan struct{} {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	if !slices.Contains(m.fleet.members, m) {
		over := make(chan struct{})
		close(over)
		return over
	}
	if m.fleet.left == nil {
		m.fleet.left = make(chan struct{})
	}
	return m.fleet.left
}

// Describe implements store.Shared.
func (m *Member) Describe(about store.About) {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	m.self.About, m.self.Seen = about, m.now()
}

// Follow implements store.Shared.
func (m *Member) Follow(prefix []byte, changed func(key []byte)) (cancel func()) {
	f := &m.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	mine := &follow{member: m, prefix: bytes.Clone(prefix), changed: changed}
	f.follows = append(f.follows, mine)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.follows = slices.DeleteFunc(f.follows, func(o *follow) bool { return o == mine })
	}
}

// CatchUp implements store.Shared: a commit returns after the others know.
func (m *Member) CatchUp(ctx context.Context) error {
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	if !slices.Contains(m.fleet.members, m) {
		return store.ErrUnhealthy
	}
	return ctx.Err()
}
