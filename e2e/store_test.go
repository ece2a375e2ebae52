package e2e

import (
	"context"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// testStore is a store in memory that a test can slow down, break, or move in time.
// It outlives its gateway, as a directory does.
type testStore struct {
	path   string
	memory *memory.Store
	users  sync.WaitGroup // gateways that have it open

	mu     sync.Mutex
	ahead  time.Duration
	commit func([]store.Write) error
	get    func(key []byte) error
}

// testStores finds the stores of the tests that run, by path.
var testStores sync.Map

func newTestStore(path string) *testStore {
	s := &testStore{path: path}
	s.memory = memory.New(memory.Options{Now: s.now})
	testStores.Store(path, s)
	return s
}

// closed waits until nobody has the store open, after a stop: Caddy does not wait for the last
// handlers of a configuration that it stops. They hold the store, and what is written beside it.
func (s *testStore) closed() { s.users.Wait() }

func (s *testStore) forget() {
	testStores.Delete(s.path)
	_ = s.memory.Close()
}

func (s *testStore) now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Add(s.ahead)
}

// pass moves the store's clock.
func (s *testStore) pass(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead += d
}

// onCommit calls f before every commit; nil stops that. An error of f is the commit's.
func (s *testStore) onCommit(f func([]store.Write) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.commit = f
}

// onGet calls f before every Get of a key; nil stops that.
func (s *testStore) onGet(f func(key []byte) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.get = f
}

// holdCommits lets every commit from now on wait for the gate.
func (s *testStore) holdCommits(g *gate) {
	s.onCommit(func([]store.Write) error {
		g.pass()
		return nil
	})
}

// failCommits lets every commit from now on fail.
func (s *testStore) failCommits(err error) {
	s.onCommit(func([]store.Write) error { return err })
}

// opened is the view of a testStore that a gateway opens and closes.
type opened struct {
	*memory.Store
	s     *testStore
	close func()
}

func (o opened) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	o.s.mu.Lock()
	f := o.s.commit
	o.s.mu.Unlock()
	if f != nil {
		if err := f(batch); err != nil {
			return 0, err
		}
	}
	return o.Store.Commit(ctx, batch...)
}

func (o opened) Get(ctx context.Context, key []byte) (store.Entry, error) {
	o.s.mu.Lock()
	f := o.s.get
	o.s.mu.Unlock()
	if f != nil {
		if err := f(key); err != nil {
			return store.Entry{}, err
		}
	}
	return o.Store.Get(ctx, key)
}

func (o opened) Close() error {
	o.close()
	return nil
}

func init() {
	caddy.RegisterModule(storeModule{})
}

// storeModule is the store module that opens testStores.
type storeModule struct {
	Path string `json:"path"`
}

func (storeModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.e2e", New: func() caddy.Module { return new(storeModule) }}
}

func (m *storeModule) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.Args(&m.Path) {
		return d.ArgErr()
	}
	return nil
}

func (m *storeModule) StorePath() (string, error) { return m.Path, nil }

func (m *storeModule) OpenStore(*zap.Logger) (store.Store, error) {
	found, ok := testStores.Load(m.Path)
	if !ok {
		return nil, store.ErrClosed
	}
	s := found.(*testStore)
	s.users.Add(1)
	return opened{s.memory, s, sync.OnceFunc(s.users.Done)}, nil
}

var _ caddymodule.StoreOpener = (*storeModule)(nil)
