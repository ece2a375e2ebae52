// Package checkpoint keeps what must be known to put a call's effect back: on disk before the
// call leaves (P2), sealed (P8), and for as long as its token promises (cascade 4.2).
//
// A checkpoint has up to four values. The Snapshot is recorded in the claim's commit: how the
// call can be undone, and the state before it. The Result is recorded in the outcome's commit:
// the state after the call, or the part of the answer that the undo needs. Credentials are a
// separate value, so that they can be deleted first. The Mark is the state of the undo; it
// outlives the others, so that nothing is undone twice. A Version says which version of a
// resource an undo has put back.
//
// Snapshot and Result begin with 32 random bytes, and their hashes are the SHA-256 of their plain
// bytes: unchanged by re-sealing, and not to be guessed from the content. Every read compares the
// hash.
package checkpoint

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Store keeps the checkpoints of one store. It is safe for concurrent use. Quotas are counted in
// memory, so that a process may open one Store per store.
type Store struct {
	store       store.Store
	sealer      store.Sealer
	snapshots   store.Table[part]
	results     store.Table[part]
	pieces      store.Table[[]byte]
	credentials store.Table[map[string][]string]
	undos       store.Table[Mark]
	versions    store.Table[string]
	held        store.Counter[marks]
	writers     store.Writers
}

// New returns the checkpoints in st, sealed by sealer.
func New(st store.Store, sealer store.Sealer) *Store {
	v := &Store{
		store: st, sealer: sealer,
		snapshots: table[part](st, sealer, kindSnapshot), results: table[part](st, sealer, kindResult),
		pieces: table[[]byte](st, sealer, kindPiece), credentials: table[map[string][]string](st, sealer, kindCredential),
		undos: table[Mark](st, sealer, kindMark), versions: table[string](st, sealer, kindVersion),
	}
	v.undos.Check = (*Mark).check
	v.held.Window, v.held.Caps = time.Second, []byte{spaceCheckpoint, kindCaps}
	v.held.Failed, v.held.Read = ErrStore, v.read
	v.held.Use(st)
	v.held.Follow(context.Background())
	return v
}

func table[T any](st store.Store, sealer store.Sealer, kind byte) store.Table[T] {
	return store.Table[T]{
		Store: st, Sealer: sealer, Prefix: string([]byte{spaceCheckpoint, kind}), Failed: ErrStore, Unreadable: ErrTampered,
	}
}

// Errors of Store.
var (
	// errInvalid: the argument breaks a rule; the message says which.
	errInvalid = errors.New("checkpoint: invalid")
	// errTaken: a checkpoint has this id already.
	errTaken = errors.New("checkpoint: the id is taken")
	// ErrUnknown: no checkpoint has this id.
	ErrUnknown = errors.New("checkpoint: unknown")
	// ErrExpired: its ttl is over (cascade 4.2.3).
	ErrExpired = errors.New("checkpoint: expired")
	// ErrTampered: the record does not open, does not match the token's hash, or cannot be read.
	// Nothing may be undone from it (cascade 4.2.3).
	ErrTampered = errors.New("checkpoint: does not match its hash")
	// ErrReleased: the call never ran, so there is nothing to undo.
	ErrReleased = errors.New("checkpoint: its call never ran")
	// ErrChanged: another rollback has changed the mark; read it again.
	ErrChanged = errors.New("checkpoint: the undo was moved by another rollback")
	// ErrStep: the state of the undo does not allow this step.
	ErrStep = errors.New("checkpoint: the undo cannot take this step")
	// ErrStore: the store did not answer or refused a record. Nothing may be forwarded or undone
	// (P4).
	ErrStore = errors.New("checkpoint: the store is unavailable")
)

// Pending is a snapshot or a result for the commit of the call's claim or outcome.
type Pending struct {
	*store.Batch
	snapshot *Snapshot
	handle   Handle
	sum      [32]byte
}

// Sum is the hash of the snapshot or the result: the out_hash of its token.
func (p *Pending) Sum() [32]byte { return p.sum }

// Snapshot is what Prepare records: irreversible if too large; nil for a result.
func (p *Pending) Snapshot() *Snapshot { return p.snapshot }

// Handle is the checkpoint's handle.
func (p *Pending) Handle() Handle { return p.handle }

// batch returns a batch for a commit that a re-sealing waits for. ended, if any, gets the error
// of the commit. If a write's condition fails, lost replaces that error, if it is set.
func (v *Store) batch(lost error, ended func(error)) *store.Batch {
	leave, b := v.writers.Enter(), store.NewBatch(make([]store.Write, 0, 6)...)
	b.OnDone(func(err error) error {
		leave()
		if ended != nil {
			ended(err)
		}
		if lost != nil && store.Lost(err, b.Writes()) {
			return fmt.Errorf("%w: %w", lost, err)
		}
		return err
	})
	return b
}

// spaceCheckpoint begins the store's keys of checkpoints. Hashes are keyed, and nothing
// of a caller is readable in them:
//
//	k b name                  the snapshot, or where its pieces are; sealed
//	k a name                  the result, the same
//	k c name                  recorded credentials, sealed
//	k u name                  how far the undo has come, sealed
//	k p name part salt piece  bulk: a piece of a large snapshot or result, sealed
//	k v resource tag          the version that an undo has put back with this one, sealed
//	k w workflow name         index: an account of a workflow's standing checkpoint
//	k o caller name           index: the same of a caller's
//	k t place name            index: the checkpoints whose undo goes to one place
//	k n w|o hash              says that the index may hold something under the hash
//	k q w|o hash              which member of a shared store may have how many of them
const spaceCheckpoint = 'k'

// The kinds of keys, behind spaceCheckpoint.
const (
	kindSnapshot   = 'b'
	kindResult     = 'a'
	kindCredential = 'c'
	kindMark       = 'u'
	kindPiece      = 'p'
	kindVersion    = 'v'
	kindWorkflow   = 'w'
	kindCaller     = 'o'
	kindNote       = 'n'
	kindPlace      = 't'
	kindCaps       = 'q'
)

// name is the keyed hash of a checkpoint's id.
type name [32]byte

func (v *Store) name(id string) name { return store.Index(v.sealer, "checkpoint", id) }

// scopePrefix begins the accounts of a workflow or a caller, as quotas count by them.
func scopePrefix(s store.Holder) []byte { return append([]byte{spaceCheckpoint}, s[:]...) }

func accountKey(s store.Holder, n name) []byte { return append(scopePrefix(s), n[:]...) }

func noteKey(s store.Holder) []byte { return append([]byte{spaceCheckpoint, kindNote}, s[:]...) }

// inlineMost is the largest record, in bytes, within one ordinary value.
const inlineMost = 2 << 10

// part is a snapshot or a result as it is stored.
type part struct {
	Sum    [32]byte `cbor:"1,keyasint"`
	Size   int      `cbor:"2,keyasint"`
	Inline []byte   `cbor:"3,keyasint,omitempty"` // the record; empty if it is in pieces
	Salt   []byte   `cbor:"4,keyasint,omitempty"` // begins the record, and tells its pieces from those of another result

	Counted  []byte `cbor:"5,keyasint,omitempty"` // the kinds of the scopes in which it counts
	Released bool   `cbor:"6,keyasint,omitempty"` // stands in a result's place where the call never ran
}

func split(plain []byte) *part {
	p := &part{Sum: sha256.Sum256(plain), Size: len(plain)}
	if len(plain) <= inlineMost {
		p.Inline = plain
	} else {
		p.Salt = bytes.Clone(plain[:8])
	}
	return p
}

// piecesOf is what the keys of a record's pieces begin with.
func (v *Store) piecesOf(n name, kind byte, p *part) []byte {
	return v.pieces.Key(n[:], []byte{kind}, p.Salt)
}

// piecesLonger is how much longer pieces stay than what names them.
const piecesLonger = time.Minute

// putPieces are the writes of a record's pieces; none if it is in its head.
func (v *Store) putPieces(n name, kind byte, p *part, plain []byte, expires time.Time) []store.Write {
	if p.Salt == nil {
		return nil
	}
	return v.pieces.PutPieces(v.piecesOf(n, kind, p), plain, expires.Add(piecesLonger))
}

// head reads a head; nil without one.
func (v *Store) head(ctx context.Context, t *store.Table[part], n name) (*part, time.Time, error) {
	row, err := t.Get(ctx, t.Key(n[:]))
	return row.Record, row.Expires, err
}

// join reads the record of a head and compares its hash.
func (v *Store) join(ctx context.Context, n name, kind byte, p *part, want [32]byte) (plain []byte, err error) {
	if p.Sum != want {
		return nil, fmt.Errorf("%w: it has another one", ErrTampered)
	}
	if plain = p.Inline; p.Salt != nil {
		if plain, err = v.pieces.GetPieces(ctx, v.piecesOf(n, kind, p)); err != nil {
			return nil, err
		}
	}
	if sha256.Sum256(plain) != want {
		return nil, fmt.Errorf("%w: not the bytes that were recorded", ErrTampered)
	}
	return plain, nil
}

// AwaitWriters waits until everything is committed, or given up, that was sealed before.
func (v *Store) AwaitWriters(ctx context.Context) error { return v.writers.Wait(ctx) }

// Reseal seals anew, with the newest key, what was sealed with an older one: snapshots,
// results, their pieces, credentials, marks and versions. Hashes do not change, since they are of
// the plain bytes. Afterwards no checkpoint needs an older key. What does not open stays as it is; Open says
// ErrTampered of it.
//
// It goes beside the traffic, whose commits win, and may be stopped at any moment: the
// next one passes quickly over what was done. It comes before execution.Guard.Reseal, which
// notes the older keys as not needed any more.
func (v *Store) Reseal(ctx context.Context) (r *store.Resealer, err error) {
	r = store.NewResealer(v.store, v.sealer)
	if err := v.AwaitWriters(ctx); err != nil {
		return r, err
	}
	err = r.Tables(ctx, v.snapshots.Prefix, v.results.Prefix, v.credentials.Prefix, v.undos.Prefix, v.versions.Prefix)
	if err == nil {
		err = r.Walk(ctx, []byte(v.pieces.Prefix), piecesPage, r.ResealBulk)
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrStore, err)
	}
	return r, err
}

// piecesPage is how many pieces are read in one snapshot.
const piecesPage = 16
