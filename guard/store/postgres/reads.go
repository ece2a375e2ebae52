package postgres

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Bounds of the reads of single keys. While readsAtOnce statements are under way, others wait to go together. One that
// takes long does not count: its connection may hang, or its value be large, and that holds up nobody else.
const (
	readsAtOnce = 1
	slowRead    = 20 * time.Millisecond
	maxReads    = 256      // keys in a statement
	maxTogether = 16 << 10 // bytes of a value; whoever asked for a larger one reads it alone
)

// Get implements store.Store. A caller without others has a statement of its own, at once. Those that come meanwhile
// wait for its end, and share the next one.
func (s *Store) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if err := s.usable(); err != nil {
		return store.Entry{}, err
	}
	if err := ctx.Err(); err != nil {
		return store.Entry{}, err
	}
	end := time.Now().Add(s.limit())
	g, err := s.reads.enter(key)
	if err != nil {
		return store.Entry{}, err
	}
	if g == nil {
		slow := time.AfterFunc(s.reads.slow, s.handOn)
		defer func() {
			if slow.Stop() {
				s.handOn()
			}
		}()
		return s.getAlone(ctx, key, end)
	}
	late := time.NewTimer(s.limit())
	defer late.Stop()
	select {
	case <-g.done:
	case <-ctx.Done():
		g.left.Store(true)
		return store.Entry{}, ctx.Err()
	case <-late.C:
		g.left.Store(true)
		return store.Entry{}, unavailable("no answer in time")
	}
	if g.large {
		return s.getAlone(ctx, key, end)
	}
	g.entry.Key = key
	return g.entry, g.err
}

// getAlone reads one key, until end at the latest.
func (s *Store) getAlone(ctx context.Context, key []byte, end time.Time) (store.Entry, error) {
	e := store.Entry{Key: key}
	var version, expires int64
	err := s.readUntil(ctx, end, func(ctx context.Context) error {
		return s.pool.QueryRow(ctx, s.sql.get, key, s.now()).Scan(&e.Value, &version, &expires)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return store.Entry{}, store.ErrNotFound
	}
	if err != nil {
		return store.Entry{}, err
	}
	e.Version, e.Expires = store.Version(version), timeOf(expires)
	return e, nil
}

// reads has the Gets that wait.
type reads struct {
	atOnce int
	slow   time.Duration
	groups sync.WaitGroup // goroutines; none begins once closed

	mu      sync.Mutex
	running int    // statements that count; with fewer than atOnce nobody waits
	waiting []*get // the longest first
	closed  bool
}

// get is a Get that waits.
type get struct {
	key  []byte      // a copy: the caller may leave before the statement is sent
	left atomic.Bool // the caller has left

	done  chan struct{} // closed when the rest is set
	entry store.Entry   // without its key
	large bool          // the value is larger than maxTogether
	err   error
}

func (g *get) answer(err error) {
	g.err = err
	close(g.done)
}

// enter returns nil if the caller is to read alone, and then to hand on.
func (r *reads) enter(key []byte) (*get, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, store.ErrClosed
	}
	if r.running < r.atOnce {
		r.running++
		return nil, nil
	}
	g := &get{key: bytes.Clone(key), done: make(chan struct{})}
	r.waiting = append(r.waiting, g)
	return g, nil
}

// close refuses those that wait, and all that come.
func (r *reads) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for _, g := range r.waiting {
		g.answer(store.ErrClosed)
	}
	r.waiting = nil
}

// handOn lets those go that wait, in the place of a statement that has ended or takes long.
func (s *Store) handOn() {
	r := &s.reads
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 {
		r.running--
		return
	}
	r.groups.Go(s.readGroups)
}

// readGroups reads until nobody waits. Its statements are no caller's, so that none that leaves takes others with it.
func (s *Store) readGroups() {
	for {
		group := s.reads.take()
		if len(group) == 0 {
			return
		}
		slow := time.AfterFunc(s.reads.slow, s.handOn)
		s.readGroup(group)
		if !slow.Stop() {
			return
		}
	}
}

// take returns those that go together. If nobody waits, it gives the place up.
func (r *reads) take() (group []*get) {
	r.mu.Lock()
	defer r.mu.Unlock()
	group = make([]*get, 0, min(len(r.waiting), maxReads))
	taken := 0
	for ; taken < len(r.waiting) && len(group) < maxReads; taken++ {
		if g := r.waiting[taken]; !g.left.Load() {
			group = append(group, g)
		}
	}
	r.waiting = slices.Delete(r.waiting, 0, taken)
	if len(group) == 0 {
		r.running--
	}
	return group
}

// readGroup answers all of a group, each as soon as its row is read.
func (s *Store) readGroup(group []*get) {
	slices.SortFunc(group, func(a, b *get) int { return bytes.Compare(a.key, b.key) })
	keys := make([][]byte, 0, len(group))
	err := s.read(s.life, func(ctx context.Context) error {
		keys = keys[:0]
		for _, g := range group {
			if len(keys) == 0 || !bytes.Equal(keys[len(keys)-1], g.key) {
				keys = append(keys, g.key)
			}
		}
		rows, err := s.pool.Query(ctx, s.sql.gets, keys, s.now())
		if err != nil {
			return err
		}
		var key pgtype.DriverBytes
		var value []byte
		var version, expires int64
		_, err = pgx.ForEachRow(rows, []any{&key, &value, &version, &expires}, func() error {
			at, _ := slices.BinarySearchFunc(group, key, func(g *get, key pgtype.DriverBytes) int { return bytes.Compare(g.key, key) })
			end := at
			for ; end < len(group) && bytes.Equal(group[end].key, key); end++ {
				g := group[end]
				g.entry = store.Entry{Value: value, Version: store.Version(version), Expires: timeOf(expires)}
				g.large = value == nil
				if end+1 < len(group) && bytes.Equal(group[end+1].key, key) {
					g.entry.Value = bytes.Clone(value) // each caller owns its own: only the last gets what was read
				}
				g.answer(nil)
			}
			group = slices.Delete(group, at, end) // a further attempt is for the others
			return nil
		})
		return err
	})
	if err == nil {
		err = store.ErrNotFound
	}
	for _, g := range group {
		g.answer(err)
	}
}
