package caddymodule

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

func init() {
	caddy.RegisterModule(BadgerStore{})
}

// BadgerStore keeps executions in an embedded Badger database: one directory of
// one process. Every commit is synced to disk before anything depends on it.
type BadgerStore struct {
	// The directory. It is made, with mode 0700, where it does not exist.
	// Placeholders are replaced once, at load; one without a value is an error.
	// Default: `agent_guard` below Caddy's data directory.
	Path string `json:"path,omitempty"`

	observer badger.Observer
}

// CaddyModule returns the Caddy module information.
func (BadgerStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.badger", New: func() caddy.Module { return new(BadgerStore) }}
}

// UnmarshalCaddyfile reads
//
//	badger [<path>]
func (b *BadgerStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the store's name
	if d.NextArg() {
		b.Path = d.Val()
	}
	if d.NextArg() {
		return d.ArgErr()
	}
	if d.NextBlock(0) {
		return d.Errf("store badger has no option %q", d.Val())
	}
	return nil
}

// StorePath is the absolute path of the directory, with symbolic links resolved.
func (b *BadgerStore) StorePath() (string, error) {
	if b.Path == "" {
		return resolve(filepath.Join(caddy.AppDataDir(), "agent_guard"))
	}
	// An unset variable must not lead to another store than was meant: all that
	// was executed would run again (P1).
	path, err := caddy.NewReplacer().ReplaceOrErr(b.Path, true, true)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", fmt.Errorf("badger: path %q: %w", b.Path, err)
	}
	return resolve(path)
}

// resolve follows symbolic links as far as the path exists, so that two names of
// one directory are one store.
func resolve(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err == nil {
		return real, nil
	}
	parent := filepath.Dir(path)
	if !errors.Is(err, fs.ErrNotExist) || parent == path {
		return "", err
	}
	if parent, err = resolve(parent); err != nil {
		return "", err
	}
	return filepath.Join(parent, filepath.Base(path)), nil
}

// OpenStore opens the directory.
func (b *BadgerStore) OpenStore(logger *zap.Logger) (store.Store, error) {
	path, err := b.StorePath()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	st, err := badger.Open(path, badger.Options{
		Logger:   slog.New(zapslog.NewHandler(logger.Named("badger").Core())),
		Observer: b.observer,
	})
	if err != nil {
		return nil, err
	}
	return st, nil
}

var (
	_ StoreOpener           = (*BadgerStore)(nil)
	_ caddyfile.Unmarshaler = (*BadgerStore)(nil)
)
