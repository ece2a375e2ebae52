package gateway

import (
	"encoding/json"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

func init() {
	caddy.RegisterModule(Store{})
}

// opened is the store of this process, whose counters nothing else hands out. A
// gateway of a benchmark has one.
var opened atomic.Pointer[openStore]

type openStore struct {
	store *badger.Store
	took  time.Duration
}

// Store is the embedded store as it is shipped, except that it is remembered.
type Store struct {
	caddymodule.BadgerStore

	// Window is the width of a time partition of bulk values, so that the space
	// of results comes back within a short run. Default: the store's.
	Window caddy.Duration `json:"window,omitempty"`
}

// plainStore is the embedded store without its methods.
type plainStore caddymodule.BadgerStore

// UnmarshalJSON reads Window too, which the store that is embedded does not know.
func (s *Store) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(text, &struct {
		*plainStore
		Window *caddy.Duration `json:"window"`
	}{(*plainStore)(&s.BadgerStore), &s.Window})
}

// CaddyModule returns the Caddy module information.
func (Store) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.bench", New: func() caddy.Module { return new(Store) }}
}

// UnmarshalCaddyfile reads
//
//	bench <path> <window>
func (s *Store) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the store's name
	var window string
	if !d.AllArgs(&s.Path, &window) {
		return d.ArgErr()
	}
	w, err := caddy.ParseDuration(window)
	if err != nil {
		return d.WrapErr(err)
	}
	s.Window = caddy.Duration(w)
	return nil
}

// OpenStore opens the directory, and remembers it.
func (s *Store) OpenStore(logger *zap.Logger) (store.Store, error) {
	begin := time.Now()
	st, err := s.open(logger)
	if err != nil {
		return nil, err
	}
	if b, ok := st.(*badger.Store); ok {
		opened.Store(&openStore{store: b, took: time.Since(begin)})
	}
	return st, nil
}

func (s *Store) open(logger *zap.Logger) (store.Store, error) {
	if s.Window == 0 {
		return s.BadgerStore.OpenStore(logger)
	}
	path, err := s.StorePath()
	if err != nil {
		return nil, err
	}
	b, err := badger.Open(path, badger.Options{
		Logger:     slog.New(zapslog.NewHandler(logger.Core())),
		BulkWindow: time.Duration(s.Window),
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

var (
	_ caddymodule.StoreOpener = (*Store)(nil)
	_ caddyfile.Unmarshaler   = (*Store)(nil)
)
