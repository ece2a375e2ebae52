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

	// The free disk space in bytes below which nothing new begins: guarded calls
	// get 503 `store-unavailable`, executions under way are settled without the
	// results that stand apart, and everything else flows. Below a quarter of it
	// nothing is recorded at all. It recovers by itself. Badger writes to mapped
	// files, where a full disk ends the process, so less than the default is for
	// disks on which nothing else grows. Default: what the store can come to need
	// before it is told to stop, 290 MiB.
	MinFree int64 `json:"min_free,omitempty"`

	// The largest size of the directory in bytes, as the file system counts them.
	// Over it nothing new begins, as below `min_free`, until enough has expired.
	// Default: no limit but the disk.
	MaxSize int64 `json:"max_size,omitempty"`

	observer badger.Observer
}

// CaddyModule returns the Caddy module information.
func (BadgerStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.badger", New: func() caddy.Module { return new(BadgerStore) }}
}

// UnmarshalCaddyfile reads
//
//	badger [<path>] {
//		path     <path>
//		min_free <size>
//		max_size <size>
//	}
func (b *BadgerStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the store's name
	at := originOf(d)
	if d.NextArg() {
		b.Path = d.Val()
		at["path"] = caddyfile.Segment{d.Token()}
	}
	if d.NextArg() {
		return d.ArgErr()
	}
	return badgerOptions().readBlock(d, "store badger", b, at)
}

func badgerOptions() options[*BadgerStore] {
	return options[*BadgerStore]{
		"path": {usage: "path <path>", parse: func(d *caddyfile.Dispenser, b *BadgerStore) error {
			return parseWord(d, &b.Path)
		}},
		"min_free": {usage: "min_free <size>", parse: func(d *caddyfile.Dispenser, b *BadgerStore) error {
			return parseSize(d, &b.MinFree)
		}},
		"max_size": {usage: "max_size <size>", parse: func(d *caddyfile.Dispenser, b *BadgerStore) error {
			return parseSize(d, &b.MaxSize)
		}},
	}
}

// Validate refuses sizes that are none.
func (b *BadgerStore) Validate() error {
	for name, size := range map[string]int64{"min_free": b.MinFree, "max_size": b.MaxSize} {
		if size < 0 {
			return fmt.Errorf("badger: %s is %d bytes; it must be positive", name, size)
		}
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
		MinFree:  b.MinFree,
		MaxSize:  b.MaxSize,
		Observer: b.observer,
	})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// AdjustStore gives a store that is open already the limits of this configuration.
func (b *BadgerStore) AdjustStore(st store.Store) {
	if open, ok := st.(interface{ SetLimits(minFree, maxSize int64) }); ok {
		open.SetLimits(b.MinFree, b.MaxSize)
	}
}

var (
	_ StoreOpener           = (*BadgerStore)(nil)
	_ StoreAdjuster         = (*BadgerStore)(nil)
	_ caddy.Validator       = (*BadgerStore)(nil)
	_ caddyfile.Unmarshaler = (*BadgerStore)(nil)
)
