package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// errKeyGiven: there is no file into which a new key could be written.
var errKeyGiven = errors.New("the key is given as a value, which the gateway cannot change: " +
	"add a new sealing key to the ring there, and load the configuration again")

// errKeys: the store can be opened, and the keys are not the ones that it needs.
var errKeys = errors.New("agent_guard: keys")

// readRing reads the key ring from where spec has it.
func readRing(spec engineSpec) (*seal.Ring, error) {
	if spec.key != "" {
		return seal.Parse([]byte(spec.key))
	}
	ring, err := seal.Load(spec.keyFile)
	if info, statErr := os.Stat(spec.keyFile); statErr == nil && info.Mode().Perm()&0o077 != 0 {
		spec.logger.Warn("others than the owner may use the key file; give it the mode 0600",
			zap.String("file", spec.keyFile), zap.Stringer("mode", info.Mode()))
	}
	return ring, err
}

// loadRing reads the key ring. A new one is made only for a store that never held
// anything: a lost key must not look like an empty store.
func loadRing(ctx context.Context, st store.Store, spec engineSpec) (*seal.Ring, error) {
	ring, err := readRing(spec)
	if !errors.Is(err, fs.ErrNotExist) {
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

// adoptKeys takes over the sealing keys that a configuration brings to the open
// engine, or refuses it. What it lacks must not be needed by anything in the store:
// it would be unreadable after the next start.
func (e *engine) adoptKeys(ctx context.Context, spec engineSpec) error {
	e.keying.Lock() // before the file is read: a rotation may be writing it
	defer e.keying.Unlock()
	other, err := readRing(spec)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the key file %s is missing: put it back, since the store %s cannot be opened again without it",
			spec.keyFile, spec.path)
	}
	if err != nil {
		return err
	}
	needed, err := e.neededBeside(ctx, other)
	if err != nil {
		return err
	}
	changed, err := e.ring.Adopt(other, needed, e.noteKey(ctx))
	var missing *seal.MissingError
	switch {
	case errors.As(err, &missing):
		return fmt.Errorf("%w in the store %s: put it back into %s", err, e.path, spec.keySource())
	case errors.Is(err, seal.ErrIndex):
		return fmt.Errorf("%s: %w: the store %s is open, and keeps the index key that it was made with", spec.keySource(), err, e.path)
	case err != nil:
		return fmt.Errorf("%s: %w", spec.keySource(), err)
	}
	if changed {
		e.logger.Info("sealing keys taken over from the configuration", zap.Uint32s("keys", e.ring.KeyIDs()))
		e.reseal()
	}
	return nil
}

// join makes a configuration the latest that holds the engine: its key file is the
// one that rotations write.
func (e *engine) join(spec *engineSpec) {
	e.keying.Lock()
	defer e.keying.Unlock()
	e.configs = append(e.configs, spec)
	if e.archive.unsealed.Swap(false) {
		e.reseal()
	}
}

// joined reports whether a configuration holds the engine.
func (e *engine) joined() bool {
	e.keying.Lock()
	defer e.keying.Unlock()
	return len(e.configs) > 0
}

// leave takes a configuration back. One that failed to load leaves the file of the
// one before it to be the one that counts.
func (e *engine) leave(spec *engineSpec) {
	e.keying.Lock()
	defer e.keying.Unlock()
	e.configs = slices.DeleteFunc(e.configs, func(s *engineSpec) bool { return s == spec })
}

// keyFile is the file that holds the ring; empty where there is none, or no
// configuration that says so. keying is held.
func (e *engine) keyFile() string {
	if len(e.configs) == 0 {
		return ""
	}
	return e.configs[len(e.configs)-1].keyFile
}

// keySource names where the ring is, and shows nothing of it.
func (s *engineSpec) keySource() string {
	if s.keyFile == "" {
		return "the value"
	}
	return "the file " + s.keyFile
}

// neededBeside lists the keys of the engine's ring that other lacks and the store needs.
func (e *engine) neededBeside(ctx context.Context, other *seal.Ring) ([]uint32, error) {
	have := other.KeyIDs()
	lacks := slices.DeleteFunc(e.ring.KeyIDs(), func(id uint32) bool { return slices.Contains(have, id) })
	if len(lacks) == 0 {
		return nil, nil // then a store that does not answer need not be asked
	}
	uses, err := e.guard.KeysInUse(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(lacks, func(id uint32) bool { return !inUse(uses, id) }), nil
}

func inUse(uses []guard.KeyUse, id uint32) bool {
	return slices.ContainsFunc(uses, func(use guard.KeyUse) bool { return use.ID == id })
}

// noteKey notes in the store that a key will seal.
func (e *engine) noteKey(ctx context.Context) func(uint32) error {
	return func(id uint32) error { return e.guard.UseKey(ctx, id) }
}

// rotateKeys adds a sealing key to the key file, seals with it from now on, and
// begins to seal anew what stands under older ones. It returns the key's id. The
// caller holds a reference to the engine. The error is errKeyGiven where the key is
// in no file.
func (e *engine) rotateKeys(ctx context.Context) (uint32, error) {
	e.keying.Lock()
	defer e.keying.Unlock()
	file := e.keyFile()
	if file == "" {
		return 0, errKeyGiven
	}
	id, err := e.ring.Rotate(file, e.noteKey(ctx))
	if err != nil {
		return 0, err
	}
	e.logger.Info("sealing key rotated", zap.Uint32("key", id))
	e.emit(eventKeysRotated, nil)
	e.reseal()
	return id, nil
}

// keyStatus is what operators see of the key ring: never a key.
type keyStatus struct {
	// Source is "file" or "value".
	Source string `json:"source"`
	// File is the key file's path.
	File string `json:"file,omitempty"`
	// Keys are the sealing keys, the newest last.
	Keys []keyRow `json:"keys"`
	// Resealing is the last pass of re-sealing since the store was opened.
	Resealing *resealStatus `json:"resealing,omitempty"`
}

// keyRow is one sealing key.
type keyRow struct {
	ID      uint32    `json:"id"`
	Created time.Time `json:"created,omitzero"`
	Newest  bool      `json:"newest"`
	// InUse says that values may stand under it: the ring must keep it.
	InUse bool `json:"in_use"`
	// Until is when the last of them expires, where that is known.
	Until time.Time `json:"until,omitzero"`
}

// keyStatus lists the keys and tells how far re-sealing has come.
func (e *engine) keyStatus(ctx context.Context) (keyStatus, error) {
	// Read first: of a pass that is told as done the keys must show what it has left.
	resealing := e.resealing.last.Load()
	uses, err := e.guard.KeysInUse(ctx)
	if err != nil {
		return keyStatus{}, err
	}
	e.keying.Lock()
	file := e.keyFile()
	e.keying.Unlock()
	status := keyStatus{Source: "file", File: file, Resealing: resealing}
	if file == "" {
		status.Source = "value"
	}
	for _, key := range e.ring.Keys() {
		row := keyRow{ID: key.ID, Created: key.Created, Newest: key.Newest}
		if i := slices.IndexFunc(uses, func(use guard.KeyUse) bool { return use.ID == key.ID }); i >= 0 {
			row.InUse, row.Until = true, uses[i].Until
		}
		status.Keys = append(status.Keys, row)
	}
	return status, nil
}
