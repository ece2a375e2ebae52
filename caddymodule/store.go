package caddymodule

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

func init() {
	caddy.RegisterModule(BadgerStore{})
}

// StoreOpener is the interface of modules in the namespace agent_guard.stores, which other
// projects may provide too. StoreAdjuster, StoreReporter and ObservedOpener are optional.
type StoreOpener interface {
	// StorePath identifies the store, independently of its other options. For files it is
	// the absolute path with symbolic links resolved.
	StorePath() (string, error)
	// OpenStore opens the store. It may log to logger for as long as it is open.
	OpenStore(logger *zap.Logger) (store.Store, error)
}

// StoreAdjuster is an optional interface of a StoreOpener, for options that may change while the
// store is open.
type StoreAdjuster interface {
	// AdjustStore applies such options to the open store, once for each configuration.
	AdjustStore(st store.Store)
}

// StoreObserver receives the commits of a store.
type StoreObserver interface {
	// Committed reports batches that became durable in one commit, and its duration.
	Committed(batches int, took time.Duration)
}

// ObservedOpener is an optional interface of a StoreOpener.
type ObservedOpener interface {
	// ObserveStore is called before OpenStore, with the observer of its store.
	ObserveStore(o StoreObserver)
}

// StoreReporter is an optional interface of a StoreOpener.
type StoreReporter interface {
	// ReportStore describes a store that OpenStore has returned; nil if it is another one. It is called every second and
	// must not block. Commits and batches of a database are counted by the gateway.
	ReportStore(st store.Store) *admin.Report
}

// BadgerStore keeps executions in an embedded Badger database: one directory, used by one process
// at a time. Every commit is synced to disk before anything depends on it.
type BadgerStore struct {
	// The directory. It is created, with mode 0700, if it does not exist. Placeholders are replaced
	// once, at load; one without a value is an error. Default: `agent_guard` below Caddy's data
	// directory.
	Path string `json:"path,omitempty"`

	// The free disk space in bytes below which nothing new starts: guarded calls get 503
	// `store-unavailable`, running executions are settled, but without results that are stored
	// separately, and everything else passes that brings no token. Below a quarter of it nothing is recorded at all. It
	// recovers by itself. Badger writes to mapped files, where a full disk ends the process, so
	// choose less than the default only on disks on which nothing else grows. Default: 290 MiB, the
	// most that the store can need before it is told to stop.
	MinFree int64 `json:"min_free,omitempty"`

	// The largest size of the directory in bytes, as the file system counts them. Above it nothing
	// new starts, as below `min_free`, until enough records have expired. Default: no limit but the
	// disk.
	MaxSize int64 `json:"max_size,omitempty"`

	observer badger.Observer
	pathAt   *caddyfile.Token // the path in a Caddyfile
}

// CaddyModule returns the Caddy module information.
func (BadgerStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.badger", New: func() caddy.Module { return new(BadgerStore) }}
}

// UnmarshalJSON implements json.Unmarshaler. Errors have the path of the member.
func (b *BadgerStore) UnmarshalJSON(text []byte) error {
	type plain BadgerStore
	return option.DecodeJSON(text, (*plain)(b))
}

// UnmarshalCaddyfile reads
//
//	badger [<path>] {
//		min_free <size>
//		max_size <size>
//	}
func (b *BadgerStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the store's name
	at := originOf(d)
	if d.CountRemainingArgs() > 0 {
		if err := parseWord(d, &b.Path); err != nil {
			return err
		}
		path := d.Token()
		b.pathAt = &path
	}
	if d.NextArg() {
		return d.ArgErr()
	}
	return badgerOptions().Read(d, "store badger", b, at)
}

func badgerOptions() option.Set[*BadgerStore] {
	return option.Set[*BadgerStore]{
		"min_free": size(func(b *BadgerStore) *int64 { return &b.MinFree }),
		"max_size": size(func(b *BadgerStore) *int64 { return &b.MaxSize }),
	}
}

// Validate refuses sizes that are none, and a directory in which nothing could be written.
func (b *BadgerStore) Validate() error {
	if err := checkOptions(badgerOptions(), b); err != nil {
		return fmt.Errorf("badger: %w", err)
	}
	return b.checkPath()
}

// checkPath finds the errors that opening would have, so that `caddy validate` reports
// them. It opens and creates nothing: another process may have the store open.
func (b *BadgerStore) checkPath() error {
	path, err := b.absolute()
	if err != nil {
		return nil // StorePath returns the error
	}
	if real, err := resolve(path); err == nil {
		if _, open := engines.pool.References(real); open {
			return nil // the state of the disk must not prevent a reload while the store is open
		}
	}
	if err := checkDirectory(path); err != nil {
		return fmt.Errorf("badger: path: %w", err)
	}
	return nil
}

// checkDirectory returns why a store cannot be created or opened in the directory path.
func checkDirectory(path string) error {
	for dir := path; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if _, link := os.Readlink(dir); link == nil && errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is a link to a directory that does not exist; make that directory, or name another one", dir)
		}
		if (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)) && dir != filepath.Dir(dir) {
			continue
		}
		switch {
		case err == nil && !info.IsDir():
			err = fmt.Errorf("%s is not a directory; name a path that is one, or at which one can be made", dir)
		case err == nil:
			if err = mayWriteIn(dir); err == nil && dir == path {
				return badger.CheckDir(path)
			}
			if err == nil {
				return nil
			}
			err = fmt.Errorf("this process may not write in %s (%w); give the user that runs Caddy the right to, or name another directory", dir, err)
		default:
			err = fmt.Errorf("%w; give the user that runs Caddy the right to it, or name another directory", err)
		}
		if dir != path {
			return fmt.Errorf("the directory %s cannot be made: %w", path, err)
		}
		return err
	}
}

// StorePath is the absolute path of the directory, with symbolic links resolved.
func (b *BadgerStore) StorePath() (string, error) {
	path, err := b.absolute()
	if err != nil {
		return "", err
	}
	return resolve(path)
}

func (b *BadgerStore) absolute() (string, error) {
	if b.Path == "" {
		return filepath.Abs(filepath.Join(caddy.AppDataDir(), "agent_guard"))
	}
	// An unset variable must not lead to another store: everything that was executed would
	// run again (P1).
	path, err := caddy.NewReplacer().ReplaceOrErr(b.Path, true, true)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", fmt.Errorf("badger: path %q: %w", b.Path, err)
	}
	return path, nil
}

// resolve follows symbolic links in the existing part of the path, so that two names of one
// directory are one store.
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
		Logger:   slogOf(logger.Named("badger")),
		MinFree:  b.MinFree,
		MaxSize:  b.MaxSize,
		Observer: b.observer,
		Absent:   oftenAbsent,
	})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// oftenAbsent are the keys that a call asks for before it writes them, or deletes soon after
// (docs/storage.md): records, their answers, and their index by state; the ledger's ids;
// tokens that were used; checkpoints of executions; snapshots.
var oftenAbsent = []string{"x", "r", "s", "lj", "lg", "j", "p", "kb"}

// AdjustStore applies the limits of this configuration to a store that is already open.
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

// ObserveStore implements ObservedOpener.
func (b *BadgerStore) ObserveStore(o StoreObserver) { b.observer = o }

var takes = map[badger.Room]string{
	badger.RoomEnough: admin.TakesEverything, badger.RoomLow: admin.TakesOutcomes, badger.RoomNone: admin.TakesNothing,
}

// ReportStore implements StoreReporter.
func (b *BadgerStore) ReportStore(st store.Store) *admin.Report {
	open, ok := st.(*badger.Store)
	if !ok {
		return nil
	}
	s := open.Stats()
	r := &admin.Report{
		Commits: s.Commits, Batches: s.Batches, Writes: s.Writes, Conflicts: s.Conflicts,
		Bytes: s.Bytes, BodyBytes: s.BulkBytes, BodySyncs: s.BulkSyncs, Dropped: s.Dropped, Refused: s.Full,
		Size: map[string]uint64{"lsm": uint64(s.Space.LSM), "bodies": uint64(s.Space.Bodies), "log": uint64(s.Space.Log)},
		Dead: s.Space.Dead, Reclaimed: s.ReclaimedBytes, MaxSize: s.MaxSize, Verifying: s.Verifying,
	}
	if s.FreeKnown {
		r.Disk = &admin.Disk{Free: s.Free, MinFree: s.MinFree, Takes: takes[s.Room]}
	}
	return r
}

var (
	_ ObservedOpener = (*BadgerStore)(nil)
	_ StoreReporter  = (*BadgerStore)(nil)
)
