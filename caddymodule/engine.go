package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// StoreOpener is what a module in the namespace agent_guard.stores implements.
type StoreOpener interface {
	// StorePath is the one name of what is opened: the same for the same store
	// whatever the other options say. For files it is the absolute path with
	// symbolic links resolved.
	StorePath() (string, error)
	// OpenStore opens the store. It may log to logger for as long as it is open.
	OpenStore(logger *zap.Logger) (store.Store, error)
}

// StoreAdjuster is a StoreOpener with options that may change while the store is open.
type StoreAdjuster interface {
	// AdjustStore gives such options to a store that an earlier configuration has
	// opened.
	AdjustStore(st store.Store)
}

// engine is an open store with the guard over it. It is shared by all
// configurations and requests that name the same store, and closed when the last
// of them is gone.
type engine struct {
	path  string
	store store.Store
	guard *guard.Guard
	ring  *seal.Ring
	// keys tells whether another configuration brings another key.
	keys string

	logger  *zap.Logger
	drain   atomic.Int64 // nanoseconds, as the latest configuration says
	exiting sync.Once
	uncut   context.Context // of all executions; ended by cut
	cut     context.CancelFunc
}

// engineSpec says how to open an engine.
type engineSpec struct {
	opener       StoreOpener
	path         string
	key, keyFile string
	drain        time.Duration // how long an exit waits for executions
	logger       *zap.Logger
}

// keys names the source of the key, to tell two of them apart.
func (s *engineSpec) keys() string {
	if s.key != "" {
		return "value:" + s.key
	}
	return "file:" + s.keyFile
}

// enginePool is the process's pool of open engines, by path.
type enginePool struct {
	// mu is held over opening and closing too: UsagePool.Delete unlocks before it
	// destructs, so that a reload could open a directory that is still closing.
	mu   sync.Mutex
	pool *caddy.UsagePool
}

var engines = enginePool{pool: caddy.NewUsagePool()}

func (p *enginePool) acquire(spec engineSpec) (*engine, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	value, loaded, err := p.pool.LoadOrNew(spec.path, func() (caddy.Destructor, error) {
		return openEngine(spec)
	})
	if err != nil {
		return nil, err
	}
	if !loaded {
		p.warnOfOthers(spec)
	}
	e := value.(*engine)
	if loaded && e.keys != spec.keys() {
		_, _ = p.pool.Delete(spec.path) // not the last reference: it was loaded
		return nil, fmt.Errorf("agent_guard: the store %s is open with another key source; "+
			"the source of the key changes with a restart only", spec.path)
	}
	if a, ok := spec.opener.(StoreAdjuster); ok && loaded {
		a.AdjustStore(e.store)
	}
	return e, nil
}

// warnOfOthers tells of a configuration that takes another store than the one before:
// what that has recorded is unknown to it.
func (p *enginePool) warnOfOthers(spec engineSpec) {
	p.pool.Range(func(path, _ any) bool {
		if path != spec.path {
			spec.logger.Warn("another store is open as well; retries of calls that it has recorded run again where this one is used",
				zap.String("store", spec.path), zap.Any("other", path))
		}
		return true
	})
}

// release gives one reference back.
func (e *engine) release() error {
	engines.mu.Lock()
	defer engines.mu.Unlock()
	_, err := engines.pool.Delete(e.path)
	return err
}

// Destruct closes the store. It is called by the pool, once nobody uses it.
func (e *engine) Destruct() error {
	e.cut()
	return e.store.Close()
}

func openEngine(spec engineSpec) (_ *engine, err error) {
	st, err := spec.opener.OpenStore(spec.logger)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: opening the store %s: %w", spec.path, err)
	}
	defer func() {
		if err != nil {
			_ = st.Close() // the first error is the one to tell
		}
	}()
	ctx := context.Background()
	ring, err := loadRing(ctx, st, spec)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: keys: %w", err)
	}
	g, recovered, err := guard.Open(ctx, st, ring)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: store %s: %w", spec.path, err)
	}
	if recovered.InDoubt > 0 || recovered.Released > 0 {
		spec.logger.Warn("executions were open when the last process ended",
			zap.Int("in_doubt", recovered.InDoubt), zap.Int("released", recovered.Released))
	}
	spec.logger.Info("store open", zap.String("path", spec.path))
	e := &engine{path: spec.path, store: st, guard: g, ring: ring, keys: spec.keys(), logger: spec.logger}
	e.drain.Store(int64(spec.drain))
	e.uncut, e.cut = context.WithCancel(context.Background())
	return e, nil
}

// loadRing reads the key ring. A new one is made only for a store that never held
// anything: a lost key must not look like an empty store.
func loadRing(ctx context.Context, st store.Store, spec engineSpec) (*seal.Ring, error) {
	if spec.key != "" {
		return seal.Parse([]byte(spec.key))
	}
	ring, err := seal.Load(spec.keyFile)
	if !errors.Is(err, fs.ErrNotExist) {
		if info, statErr := os.Stat(spec.keyFile); statErr == nil && info.Mode().Perm()&0o077 != 0 {
			spec.logger.Warn("others than the owner may use the key file; give it the mode 0600",
				zap.String("file", spec.keyFile), zap.Stringer("mode", info.Mode()))
		}
		return ring, err
	}
	fresh, err := guard.Fresh(ctx, st)
	if err != nil {
		return nil, err
	}
	if !fresh {
		return nil, fmt.Errorf("the key file %s is missing, and the store %s holds executions that were sealed with it: "+
			"put the file back from your backup, or correct its path; if it is lost for good, move the store away to begin anew, "+
			"knowing that retries of earlier calls will then run again", spec.keyFile, spec.path)
	}
	return seal.Create(spec.keyFile)
}
