package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// keepReplaced is for how long a replaced key is published: the longest life of a token
// that it may have signed, whatever `life` says today, and the skew of others' clocks.
const keepReplaced = ect.MaxLife + time.Minute

var (
	errNoIdentity = errors.New("the running configuration has no `identity`, whose key could be rotated")
	// errKeyElsewhere: to rotate that file would lose the key that signs.
	errKeyElsewhere = errors.New("the key file does not hold the key that signs now")
)

// join makes an identity the latest one that holds the ledger: its key file is the one
// that rotations write. mu is held.
func (a *archive) join(i *Identity) {
	a.identities = append(a.identities, i)
	a.retain.Store(int64(i.Retain))
}

// latest is the identity of the latest configuration; nil where there is none. mu is
// held.
func (a *archive) latest() *Identity {
	if len(a.identities) == 0 {
		return nil
	}
	return a.identities[len(a.identities)-1]
}

// leaveArchive takes the identity of a configuration back. One that failed to load
// leaves the key file of the one before it to be the one that counts.
func (e *engine) leaveArchive(i *Identity) {
	a := &e.archive
	a.mu.Lock()
	defer a.mu.Unlock()
	failed := a.latest() == i
	a.identities = slices.DeleteFunc(a.identities, func(other *Identity) bool { return other == i })
	back := a.latest()
	if !failed || back == nil {
		return
	}
	a.retain.Store(int64(back.Retain))
	if back.KeyFile == i.KeyFile {
		return
	}
	ring, err := back.loadRing(false, slog.New(slog.DiscardHandler))
	if err != nil {
		e.logger.Error("the key file of the running configuration cannot be read again; tokens are signed with the key "+
			"of the one that failed to load, until the next reload", zap.Error(err))
		return
	}
	a.open.Load().Ring().Reload(ring)
}

// rotateIdentity puts a fresh signing key of the configured algorithm into the key file
// of the latest configuration, and signs with it from then on. The key before verifies
// what it has signed. Others may use it until its tokens have expired; where it is
// stolen no older key is published any more.
func (e *engine) rotateIdentity(stolen bool) error {
	a := &e.archive
	a.mu.Lock() // a reload between would bring back the ring that it has read before
	defer a.mu.Unlock()
	told, i := a.open.Load(), a.latest()
	if told == nil || i == nil {
		return errNoIdentity
	}
	if err := i.holds(told.Ring()); err != nil {
		return err
	}
	keep := keepReplaced
	if stolen {
		keep = 0
	}
	id, err := told.Ring().Rotate(i.KeyFile, i.algorithm, time.Now(), keep)
	if err != nil {
		return err
	}
	// What it has signed would be the gateway's under this name only.
	if err := told.Named(context.Background(), i.Name, told.Ring()); err != nil {
		e.logger.Error("that the new key signs in this name is noted with the next load of the configuration", zap.Error(err))
	}
	e.logger.Info("signing key rotated", zap.String("identity", i.Name), zap.String("key", id),
		zap.Stringer("algorithm", i.algorithm), zap.Bool("stolen", stolen))
	e.emit(eventIdentityRotated, nil)
	return nil
}

// holds checks that the key file has the key that signs: tokens under it could not be
// verified any more if another ring took its place.
func (i *Identity) holds(open *ect.Ring) error {
	found, err := ect.LoadRing(i.KeyFile)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s is missing: put it back from your backup; without it the gateway does not start again",
			errKeyElsewhere, i.KeyFile)
	}
	if err != nil {
		return err
	}
	keys := open.List()
	signs := keys[len(keys)-1].ID
	if !slices.ContainsFunc(found.List(), func(k ect.RingKey) bool { return k.ID == signs }) {
		return fmt.Errorf("%w: %s is another one than was loaded: put it back, or load the configuration again to sign with what it holds",
			errKeyElsewhere, i.KeyFile)
	}
	return nil
}

// identityStatus is what operators see of the identity and its keys; nil where the
// latest configuration has none.
func (e *engine) identityStatus() *admin.Identity {
	a := &e.archive
	a.mu.Lock()
	defer a.mu.Unlock()
	told, i := a.open.Load(), a.latest()
	if told == nil || i == nil {
		return nil
	}
	status := &admin.Identity{Name: i.Name, File: i.KeyFile, Algorithm: i.algorithm.String()}
	for _, k := range told.Ring().List() {
		status.Keys = append(status.Keys, admin.IdentityKey{
			ID: k.ID, Algorithm: k.Algorithm.String(), Created: k.Created, Until: k.Until, Signs: k.Signs, Revoked: k.Revoked,
		})
	}
	return status
}
