package checkpoint

import (
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Sealer keeps values unreadable at rest and derives the store's keys. The guard's own
// is one.
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

// Vault keeps the checkpoints of one store. It is safe for concurrent use. Quotas are
// counted in memory, so that one Vault is to be open on a store of this process.
type Vault struct {
	store   store.Store
	sealer  Sealer
	usages  usages
	writers writers
}

// New returns the vault of what st keeps, sealed by sealer.
func New(st store.Store, sealer Sealer) *Vault {
	return &Vault{store: st, sealer: sealer}
}

// Errors of Vault.
var (
	// ErrInvalid: what was given breaks a rule; the message says which.
	ErrInvalid = errors.New("checkpoint: invalid")
	// ErrTaken: a checkpoint with this id stands already.
	ErrTaken = errors.New("checkpoint: the id is taken")
	// ErrUnknown: nothing stands under the id.
	ErrUnknown = errors.New("checkpoint: unknown")
	// ErrExpired: its ttl is over (cascade 4.2.3).
	ErrExpired = errors.New("checkpoint: expired")
	// ErrTampered: something stands there, but it does not open, is not what the token's
	// hash says, or cannot be read. Nothing may be undone from it (cascade 4.2.3).
	ErrTampered = errors.New("checkpoint: does not match its hash")
	// ErrReleased: the call never ran, so there is nothing to undo.
	ErrReleased = errors.New("checkpoint: its call never ran")
	// ErrChanged: somebody else has moved the undo meanwhile; look at its mark again.
	ErrChanged = errors.New("checkpoint: the undo was moved by another rollback")
	// ErrStep: the undo cannot go from where it is to where it was to be moved.
	ErrStep = errors.New("checkpoint: the undo cannot take this step")
	// ErrStore: the store did not answer or did not take a record. Nothing may be
	// forwarded or undone (P4).
	ErrStore = errors.New("checkpoint: the store is unavailable")
)

// Pending is what waits for a commit, usually that of the guard's claim or outcome,
// in which its writes ride.
type Pending struct {
	snapshot *Snapshot
	handle   Handle
	sum      [32]byte
	writes   []store.Write
	turn     *turn
	lost     error       // what a conflict about one of the writes means
	ended    func(error) // counts what came of the commit; may be nil
	done     bool
}

// Writes are the riders of the commit. A Pending that is nil has none.
func (p *Pending) Writes() []store.Write {
	if p == nil {
		return nil
	}
	return p.writes
}

// Sum is the hash of the snapshot or the result: the out_hash of its token. It is zero
// for a Pending that records neither.
func (p *Pending) Sum() [32]byte { return p.sum }

// Snapshot is what Prepare records; nil for every other Pending. It is irreversible
// where it was too large to be kept, whatever was given to Prepare.
func (p *Pending) Snapshot() *Snapshot { return p.snapshot }

// Handle is that of the checkpoint.
func (p *Pending) Handle() Handle { return p.handle }

// Done tells what came of the commit, and returns err, as ErrTaken or ErrChanged where
// one of the writes has lost. It must be called once, whatever became of the commit;
// calls after the first change nothing. A Pending that is nil has nothing to say.
func (p *Pending) Done(err error) error {
	if p == nil {
		return err
	}
	if !p.done {
		p.done = true
		p.turn.leave()
		if p.ended != nil {
			p.ended(err)
		}
	}
	if lost := (*store.Conflict)(nil); p.lost != nil && errors.As(err, &lost) {
		for i := range p.writes {
			if string(p.writes[i].Key) == string(lost.Key) {
				return fmt.Errorf("%w: %w", p.lost, err)
			}
		}
	}
	return err
}
