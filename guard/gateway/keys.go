// Package gateway has what a gateway does with its open store that is no part of a call.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// KeySource is where a configuration has the key ring of its store.
type KeySource struct {
	// File is the path of the key file. Rotations write it. Empty with a Value.
	File string
	// Value is the content of a key file, or a secret from which the keys are derived; see seal.Parse.
	Value string
}

// String describes the source without any of its content.
func (s KeySource) String() string {
	if s.File == "" {
		return "the value"
	}
	return "the file " + s.File
}

func (s KeySource) read(log *slog.Logger) (*seal.Ring, error) {
	if s.Value != "" {
		return seal.Parse([]byte(s.Value))
	}
	ring, err := seal.Load(s.File)
	if info, statErr := os.Stat(s.File); statErr == nil && info.Mode().Perm()&0o077 != 0 {
		log.Warn("others than the owner may use the key file; give it the mode 0600",
			"file", s.File, slog.String("mode", info.Mode().String()))
	}
	return ring, err
}

// Open opens the engine of a store, which errors call name, with the keys of a configuration: see guard.OpenEngine.
func Open(
	ctx context.Context, st store.Store, from KeySource, name string, log *slog.Logger,
) (_ *Keys, recovered execution.Recovery, _ error) {
	ring, err := from.load(ctx, st, name, log)
	if err != nil {
		return nil, recovered, fmt.Errorf("%w: %w", guard.ErrKeys, err)
	}
	engine, recovered, err := guard.OpenEngine(ctx, st, ring, log)
	if err != nil {
		return nil, recovered, fmt.Errorf("agent_guard: store %s: %w", name, err)
	}
	log.Info("store open", "path", name)
	return &Keys{Engine: engine, Ring: ring, Name: name}, recovered, nil
}

// load reads the key ring of a store, which errors call name. It creates one only for a store that was never used: a
// lost key must not look like an empty store.
func (s KeySource) load(ctx context.Context, st store.Store, name string, log *slog.Logger) (*seal.Ring, error) {
	ring, err := s.read(log)
	if !errors.Is(err, fs.ErrNotExist) {
		return ring, err
	}
	fresh, err := execution.Fresh(ctx, st)
	if err != nil {
		return nil, err
	}
	if fresh {
		if ring, err = seal.Create(s.File); !errors.Is(err, fs.ErrExist) {
			return ring, err
		}
	}
	// Another gateway of a new fleet may have made the file since it was read, and have used the store.
	if ring, err = s.read(log); fresh || !errors.Is(err, fs.ErrNotExist) {
		return ring, err
	}
	return nil, fmt.Errorf("the key file %s is missing, and the store %s holds executions that were sealed with it: "+
		"put the file back from your backup, or correct its path; if it is lost for good, move the store away to begin anew, "+
		"knowing that retries of earlier calls will then run again", s.File, name)
}

// Keys are the sealing keys of an open store: Keys adopts those of each configuration, makes new ones, and seals anew
// with the newest key. Open makes them; set the other exported fields before Start.
type Keys struct {
	Engine *guard.Engine
	Ring   *seal.Ring
	// Name is that of the store, for errors.
	Name string
	// Source is that of the latest configuration; zero without one.
	Source func() KeySource
	// Parts are sealed anew before the executions, in this order: that records which keys are needed.
	Parts []Sealed
	// Changed is called when the ring, or the key that seals, has changed.
	Changed func()

	mu      sync.Mutex // held while the ring changes
	wake    chan struct{}
	last    atomic.Pointer[Resealing]
	endWork func()
}

// Sealed are records with sealed values.
type Sealed struct {
	// Name is what logs call them.
	Name string
	// Reseal seals them anew with the newest key. With ErrLater the pass ends, until another one is requested.
	Reseal func(context.Context) error
	// Await waits for writes under an older key; nil if there are none.
	Await func(context.Context) error
	// Damaged is the error of Reseal for values that are lost already, and stay as they are; nil for none.
	Damaged error
	// Spare says that the gateway can do without them, so that their errors do not end the pass.
	Spare bool
}

var (
	// ErrLater: records cannot be sealed anew now. Who makes that possible calls Keys.Reseal.
	ErrLater = errors.New("agent_guard: sealed anew later")
	// ErrKeyGiven: the key is a value in the configuration, so a new one cannot be written.
	ErrKeyGiven = errors.New("the key is given as a value, which the gateway cannot change: " +
		"put the ring with another sealing key there, and load the configuration again")
)

// KeyStatus describes the key ring without its keys. Its members are an API.
type KeyStatus struct {
	// Source is "file", or "value" if the key is in the configuration.
	Source string `json:"source"`
	// File is the path of the key file.
	File string `json:"file,omitempty"`
	// Keys are the sealing keys by their numbers.
	Keys []Key `json:"keys"`
	// Resealing is the last re-sealing by this gateway since it opened the store. Of several gateways on a store one
	// re-seals.
	Resealing *Resealing `json:"resealing,omitempty"`
	// Made is the id of the key that keys/rotate has made; absent if it made none.
	Made uint32 `json:"made,omitempty"`
	// Ring is, in an answer of keys/rotate, the whole ring with another sealing key and all its secrets, if the ring
	// is given as a value: nothing was changed. It has to be put where the value is kept, of all gateways on the store.
	Ring string `json:"ring,omitempty"`
}

// Key is one sealing key.
type Key struct {
	// ID is the number of the key.
	ID uint32 `json:"id"`
	// Created is when it was created.
	Created time.Time `json:"created,omitzero"`
	// Newest says that the key seals new values.
	Newest bool `json:"newest"`
	// InUse says that values may be sealed with it, so that the ring must keep it.
	InUse bool `json:"in_use"`
	// Until is when the last of these values expires, if known.
	Until time.Time `json:"until,omitzero"`
	// Lacking are the other gateways on the store that do not have the key yet: it seals once all have it.
	Lacking []string `json:"lacking,omitempty"`
}

// Resealing is the progress of a pass.
type Resealing struct {
	execution.ResealProgress
	// Done says that all values were read.
	Done bool `json:"done"`
	// Error is why the pass stopped; it will be retried.
	Error string `json:"error,omitempty"`
}

// resealRetry is the time until the next pass after a failed one, for example because of a full disk.
const resealRetry = time.Minute

// Start starts to seal anew in the background. At the start, and when another gateway has left the store, it makes a
// pass if records have an older key: a gateway may have ended in the middle of its pass.
func (k *Keys) Start(ctx context.Context) {
	k.wake = make(chan struct{}, 1)
	older := func(ctx context.Context) bool { // also where that is not known
		uses, err := k.Engine.Executions.Keys().InUse(ctx)
		return err != nil || slices.ContainsFunc(uses, func(use execution.KeyUse) bool {
			return use.ID < k.newest() && use.Until.IsZero()
		})
	}
	if older(ctx) { // before the first rotation, which requests a pass of its own
		k.Reseal()
	}
	first := true
	k.endWork = fleet.Job{Fleet: fleet.Of(k.Engine.Store), Wake: k.wake, Do: func(ctx context.Context, left bool) (time.Duration, error) {
		begins := first
		if first = false; left && (begins || !older(ctx)) {
			return 0, nil
		}
		if !k.pass(ctx) {
			return resealRetry, nil
		}
		return 0, nil
	}}.Start()
	k.Engine.Executions.Keys().OnSeal(k.seals)
}

// Stop ends what Start has started, and waits for it.
func (k *Keys) Stop() { k.endWork() }

// Reseal requests a pass; it follows the running one.
func (k *Keys) Reseal() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// newest is the id of the key that seals.
func (k *Keys) newest() uint32 {
	ids := k.Ring.KeyIDs()
	return ids[len(ids)-1]
}

// seals waits for what is sealed with older keys, once the gateways on a store have agreed that another key seals.
func (k *Keys) seals(ctx context.Context, id uint32) error {
	k.Engine.Logger.Info("all gateways on the store have the sealing key, and seal with it", "key", id)
	for _, p := range k.Parts {
		if p.Await == nil {
			continue
		}
		if err := p.Await(ctx); err != nil {
			return err
		}
	}
	k.Changed()
	k.Reseal()
	return nil
}

// pass seals everything anew. It returns false if a retry may succeed. Of several gateways on a store one makes it,
// once all of them seal with the key.
func (k *Keys) pass(ctx context.Context) bool {
	key := k.newest()
	mine := false
	err := k.Engine.Executions.Keys().Await(ctx, key) // else it is not known what seals at the others
	if err == nil {
		mine, err = k.Engine.Executions.Keys().Reseals(ctx)
	}
	if err == nil && !mine {
		return true
	}
	progress := execution.ResealProgress{Key: key, Left: []execution.KeyLeft{}, Started: time.Now()}
	if err == nil {
		k.Engine.Logger.Info("re-sealing started", "key", key)
		err = k.resealParts(ctx)
	}
	if errors.Is(err, ErrLater) {
		return true
	}
	if err == nil {
		progress, err = k.Engine.Executions.Reseal(ctx, key, func(p execution.ResealProgress) {
			k.last.Store(&Resealing{ResealProgress: p})
		})
	}
	status := &Resealing{ResealProgress: progress, Done: err == nil}
	if err != nil {
		status.Error = err.Error()
	}
	k.last.Store(status)
	log := k.Engine.Logger.With("key", key, "seen", progress.Seen, "resealed", progress.Resealed, "damaged", progress.Damaged)
	if len(progress.Left) > 0 {
		log = log.With("left", progress.Left)
	}
	if err == nil {
		log.Info("re-sealing finished", "took", progress.Finished.Sub(progress.Started))
		return true
	}
	if ctx.Err() != nil {
		return true
	}
	log.Warn("re-sealing failed", "error", err)
	return errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrUnhealthy)
}

func (k *Keys) resealParts(ctx context.Context) error {
	for _, p := range k.Parts {
		err := p.Reseal(ctx)
		switch {
		case err == nil:
		case p.Damaged != nil && errors.Is(err, p.Damaged):
			k.Engine.Logger.Error("damaged values are not sealed anew", "of", p.Name, "error", err)
		case p.Spare && ctx.Err() == nil:
			k.Engine.Logger.Warn("values stay under an older key", "of", p.Name, "error", err)
		default:
			return fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	return nil
}

// Adopt adopts the sealing keys of a configuration. It refuses a ring that lacks a key of the store's values: they
// could not be read after the next start.
func (k *Keys) Adopt(ctx context.Context, from KeySource) error {
	k.mu.Lock() // before the file is read: a rotation may be writing it
	defer k.mu.Unlock()
	other, err := from.read(k.Engine.Logger)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the key file %s is missing: put it back, since the store %s cannot be opened again without it",
			from.File, k.Name)
	}
	if err != nil {
		return err
	}
	needed, err := k.neededBeside(ctx, other)
	if err != nil {
		return err
	}
	changed, err := k.Ring.Adopt(other, needed, func(uint32) error { return k.hold(ctx, other.KeyIDs()...) })
	var missing *seal.MissingError
	switch {
	case errors.As(err, &missing):
		return fmt.Errorf("%w in the store %s: put it back into %s", err, k.Name, from)
	case errors.Is(err, seal.ErrIndex):
		return fmt.Errorf("%s: %w: the store %s is open, and keeps the index key that it was made with", from, err, k.Name)
	case err != nil:
		return fmt.Errorf("%s: %w", from, err)
	}
	if changed {
		k.Engine.Logger.Info("sealing keys taken over from the configuration", "keys", k.Ring.KeyIDs())
		k.Changed()
		k.settle(ctx)
	}
	return nil
}

// settle seals with the newest key that all gateways on the store have, and requests a pass: in a shared store seals
// does.
func (k *Keys) settle(ctx context.Context) {
	if _, shared := k.Engine.Store.(store.Shared); !shared {
		k.Reseal()
		return
	}
	_, err := k.Engine.Executions.Keys().Settle(ctx)
	if err == nil {
		var waiting []execution.KeyWait
		waiting, err = k.Engine.Executions.Keys().Waiting(ctx)
		for _, w := range waiting {
			k.Engine.Logger.Warn("a sealing key does not seal yet: other gateways lack it", "key", w.ID, "nodes", w.Lacking)
		}
	}
	if err != nil { // it is tried again
		k.Engine.Logger.Warn("whether all gateways on the store have the newest sealing key is not known yet", "error", err)
	}
}

// neededBeside returns the keys of the ring that other lacks although the store needs them.
func (k *Keys) neededBeside(ctx context.Context, other *seal.Ring) ([]uint32, error) {
	have := other.KeyIDs()
	lacks := slices.DeleteFunc(k.Ring.KeyIDs(), func(id uint32) bool { return slices.Contains(have, id) })
	if len(lacks) == 0 {
		return nil, nil // avoids reading a store that may not respond
	}
	uses, err := k.Engine.Executions.Keys().InUse(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(lacks, func(id uint32) bool {
		return !slices.ContainsFunc(uses, func(use execution.KeyUse) bool { return use.ID == id })
	}), nil
}

// hold records in the store which keys the ring has, before it does.
func (k *Keys) hold(ctx context.Context, ids ...uint32) error {
	err := k.Engine.Executions.Keys().Hold(ctx, ids...)
	if errors.Is(err, execution.ErrMissingKey) || errors.Is(err, execution.ErrOtherKey) {
		err = fmt.Errorf("%w: %w", seal.ErrRefused, err)
	}
	return err
}

// Rotate adds a sealing key to the key file, uses it once all gateways on the store have it, and requests a pass.
// While an earlier key waits for that it makes none, and returns 0. The error is ErrKeyGiven if there is no key file.
func (k *Keys) Rotate(ctx context.Context) (uint32, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	keys := k.Engine.Executions.Keys()
	if waiting, err := keys.Waiting(ctx); err != nil || len(waiting) > 0 {
		return 0, err
	}
	file := k.Source().File
	if file == "" {
		return 0, ErrKeyGiven
	}
	if err := keys.BeginRotation(ctx); err != nil {
		return 0, err
	}
	before := k.Ring.KeyIDs()
	id, err := k.Ring.Rotate(file, func(id uint32) error { return k.hold(ctx, append(before, id)...) })
	if err != nil {
		if _, shared := k.Engine.Store.(store.Shared); shared {
			_ = k.hold(context.WithoutCancel(ctx), before...) // else others make no key until this gateway does, or is gone
		}
		return 0, err
	}
	k.Engine.Logger.Info("sealing key rotated", "key", id)
	k.Changed()
	k.settle(ctx)
	return id, nil
}

// Status returns the keys and the progress of re-sealing.
func (k *Keys) Status(ctx context.Context) (*KeyStatus, error) {
	// Read before the keys: if the pass is reported as done, the keys must show its result.
	resealing := k.last.Load()
	uses, err := k.Engine.Executions.Keys().InUse(ctx)
	if err != nil {
		return nil, err
	}
	waiting, err := k.Engine.Executions.Keys().Waiting(ctx)
	if err != nil {
		return nil, err
	}
	status := &KeyStatus{Source: "file", File: k.Source().File, Keys: []Key{}, Resealing: resealing}
	if status.File == "" {
		status.Source = "value"
	}
	for _, key := range k.Ring.Keys() {
		row := Key{ID: key.ID, Created: key.Created, Newest: key.Seals}
		if i := slices.IndexFunc(waiting, func(w execution.KeyWait) bool { return w.ID == key.ID }); i >= 0 {
			row.Lacking = waiting[i].Lacking
		}
		if i := slices.IndexFunc(uses, func(use execution.KeyUse) bool { return use.ID == key.ID }); i >= 0 {
			row.InUse, row.Until = true, uses[i].Until
		}
		status.Keys = append(status.Keys, row)
	}
	return status, nil
}
