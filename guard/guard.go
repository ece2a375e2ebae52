package guard

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Sealer keeps values unreadable at rest and derives the store's keys.
type Sealer interface {
	// Seal appends the sealed plaintext to dst; it opens under the same name only.
	Seal(dst, plaintext, name []byte) []byte
	// Open appends the plain value to dst.
	Open(dst, sealed, name []byte) ([]byte, error)
	// Index derives 32 bytes from parts, stable for the life of the store.
	Index(domain string, parts ...string) [32]byte
	// KeyIDs lists the keys with which it opens, by id, the last of which seals.
	KeyIDs() []uint32
	// KeyOf is the id of the key under which a value is sealed.
	KeyOf(sealed []byte) uint32
}

// Guard is one node's view of all executions in one store. It is safe for
// concurrent use.
type Guard struct {
	store   store.Store
	sealer  Sealer
	node    string
	boot    string
	flights flights
	running gate
	writers *writers
	usages  usages
}

// Errors of Guard.
var (
	// ErrTaken: another call owns the key; look it up again.
	ErrTaken = errors.New("guard: the key was claimed by another call")
	// ErrDraining: the process is about to end and starts nothing new.
	ErrDraining = errors.New("guard: shutting down")
	// ErrStore: the store did not answer or did not take a record. Nothing may be
	// forwarded (P4).
	ErrStore = errors.New("guard: the store is unavailable")
	// ErrUnreadable: a record stands under the key and cannot be read. It comes with
	// ErrStore.
	ErrUnreadable = errors.New("guard: the record cannot be read")
	// ErrUnrecorded: the outcome did not reach the store: the execution is in doubt.
	ErrUnrecorded = errors.New("guard: the outcome could not be recorded")
)

// Open takes charge of the executions in st: it checks that sealer belongs to the
// store, and settles what another life of this node left behind (Recovery). Only
// one Guard may be open on a store of this process.
func Open(ctx context.Context, st store.Store, sealer Sealer) (*Guard, Recovery, error) {
	boot := newClaim()
	g := &Guard{store: st, sealer: sealer, boot: hex.EncodeToString(boot[:]), writers: newWriters()}
	if err := g.identify(ctx); err != nil {
		return nil, Recovery{}, err
	}
	recovery, err := g.recover(ctx)
	if err != nil {
		return nil, Recovery{}, fmt.Errorf("recovering executions: %w", err)
	}
	return g, recovery, nil
}

// Drain lets no new execution begin and waits for the running ones, until ctx
// ends. It returns how many are still running: if the process ends now, they will
// be found in doubt.
func (g *Guard) Drain(ctx context.Context) int { return g.running.drain(ctx) }

func newClaim() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails
	return id
}

// Standing says what a Find found.
type Standing uint8

// The standings.
const (
	// Free: nothing is recorded; the call may be claimed.
	Free Standing = iota
	// Mismatch: the key was used for a call with another fingerprint.
	Mismatch
	// RunningHere: a flight of this process; it can be followed.
	RunningHere
	// RunningElsewhere: it runs on another node.
	RunningElsewhere
	// Replayable: completed, the result is kept.
	Replayable
	// ResultExpired: completed, the result's time is over, the key is still taken.
	ResultExpired
	// ResultUnavailable: completed, the result was never kept.
	ResultUnavailable
	// Doubtful: in doubt.
	Doubtful
	// RolledBack: undone; refused for ever.
	RolledBack
)

// Finding is what is known of a key at one moment.
type Finding struct {
	Standing Standing
	// Record is what the store holds; nil for Free and RunningHere.
	Record *Record
	// Flight is set for RunningHere.
	Flight  *Flight
	version store.Version
}

// Find looks a call up. It answers from the running executions of this process
// first, then from the store. An error is ErrStore: nothing is known.
func (g *Guard) Find(ctx context.Context, key Key, fp Fingerprint) (Finding, error) {
	var orphan store.Version
	for {
		if f := g.flights.find(key); f != nil {
			if f.fingerprint != fp {
				return Finding{Standing: Mismatch}, nil
			}
			return Finding{Standing: RunningHere, Flight: f}, nil
		}
		record, version, err := g.load(ctx, key)
		if err != nil {
			return Finding{}, err
		}
		if record == nil {
			return Finding{Standing: Free}, nil
		}
		found := Finding{Record: record, version: version}
		if record.Fingerprint != fp && !record.blocked() {
			found.Standing = Mismatch
			return found, nil
		}
		if record.State == StateSending && record.Boot == g.boot && orphan != version {
			// Its flight began or ended between the two looks; look once more. The
			// same version twice without a flight: its outcome was never recorded.
			orphan = version
			continue
		}
		found.Standing, err = g.standing(ctx, record)
		return found, err
	}
}

func (g *Guard) load(ctx context.Context, key Key) (*Record, store.Version, error) {
	name := recordKey(key)
	entry, err := g.store.Get(ctx, name)
	if errors.Is(err, store.ErrNotFound) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrStore, err)
	}
	record, err := g.open(entry.Value, name)
	if err != nil {
		return nil, 0, err
	}
	return record, entry.Version, nil
}

func (g *Guard) open(sealed, name []byte) (*Record, error) {
	plain, err := g.sealer.Open(nil, sealed, name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w: %w", ErrStore, ErrUnreadable, err)
	}
	record, err := decodeRecord(plain)
	if err != nil {
		return nil, fmt.Errorf("%w: %w: %w", ErrStore, ErrUnreadable, err)
	}
	return record, nil
}

// blocked reports whether whatever comes under the key is refused: the call that it
// belonged to never ran, and nobody knows what it asked for.
func (r *Record) blocked() bool {
	return r.State == StateRolledBack && r.Fingerprint == Fingerprint{}
}

func (g *Guard) standing(ctx context.Context, r *Record) (Standing, error) {
	switch r.State {
	case StateRolledBack:
		return RolledBack, nil
	case StateInDoubt:
		return Doubtful, nil
	case StateCompleted:
		if !r.Result.Kept {
			return ResultUnavailable, nil
		}
		now, err := g.store.Now(ctx)
		if err != nil {
			return 0, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if !now.Before(r.Result.Expires) {
			return ResultExpired, nil
		}
		return Replayable, nil
	default:
		if r.Node == g.node { // its owner is gone, its outcome was not recorded
			r.Cause = CauseUnrecorded
			return Doubtful, nil
		}
		return RunningElsewhere, nil
	}
}

// Claim makes the caller the owner of c's key, durably, before anything is sent
// (P2). found is what Find returned: Free, or Doubtful where there is evidence
// that the call was not applied, or the route chose to run again. The
// claim's commit carries riders of other packages; where a rider's condition does
// not hold the error is its *store.Conflict, and nothing is claimed.
//
// A *QuotaError says that the caller holds too much already.
//
// The owner must settle the execution, whatever happens.
func (g *Guard) Claim(ctx context.Context, c *Call, found Finding, riders ...store.Write) (*Execution, error) {
	if !g.running.enter() {
		return nil, ErrDraining
	}
	caller := g.Caller(c.Scope.Caller)
	flight := g.flights.start(c, caller)
	if flight == nil {
		g.running.leave()
		return nil, ErrTaken
	}
	e, err := g.claim(ctx, c, flight, found, riders)
	if err != nil {
		g.flights.end(flight, EndedUnsent)
		g.running.leave()
		return nil, err
	}
	return e, nil
}

func (g *Guard) claim(ctx context.Context, c *Call, flight *Flight, found Finding, riders []store.Write) (*Execution, error) {
	defer g.writers.enter().leave()
	now, err := g.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	usage, err := g.admit(ctx, flight.caller, c.Quota, now, found.Record != nil)
	if err != nil {
		return nil, err
	}
	record := g.newRecord(c, flight.caller, now)
	condition := store.Absent()
	if found.Record != nil {
		condition = store.VersionIs(found.version)
	}
	batch := append(g.put(c.Key, found.Record, &record, condition), riders...)
	version, err := g.store.Commit(ctx, batch...)
	if err != nil {
		g.leave(usage)
		var lost *store.Conflict
		switch {
		case !errors.As(err, &lost):
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		case lost.Index == 0:
			return nil, ErrTaken
		}
		return nil, lost
	}
	if found.Record != nil {
		g.resolved(found.Record, nil)
	}
	return &Execution{g: g, flight: flight, record: record, version: version, usage: usage}, nil
}
