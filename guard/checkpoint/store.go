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
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Store keeps the checkpoints of one store. It is safe for concurrent use. Quotas are counted in
// memory, so that a process may open one Store per store.
type Store struct {
	store   store.Store
	sealer  store.Sealer
	usages  store.Usages[scope, marks]
	caps    *store.Caps // nil where one gateway has the store
	writers writers
}

// New returns the checkpoints in st, sealed by sealer.
func New(st store.Store, sealer store.Sealer) *Store {
	v := &Store{store: st, sealer: sealer, usages: store.Usages[scope, marks]{Window: time.Second}, caps: store.NewCaps(st)}
	if shared, is := st.(store.Shared); is {
		shared.Follow([]byte{spaceCheckpoint, kindCaps}, v.capsChanged)
	}
	return v
}

// Errors of Store.
var (
	// ErrInvalid: the argument breaks a rule; the message says which.
	ErrInvalid = errors.New("checkpoint: invalid")
	// ErrTaken: a checkpoint has this id already.
	ErrTaken = errors.New("checkpoint: the id is taken")
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
	gate, b := v.writers.enter(), store.NewBatch(make([]store.Write, 0, 6)...)
	b.OnDone(func(err error) error {
		gate.leave()
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

func keyOf(kind byte, n name) []byte {
	return append(append(make([]byte, 0, 2+len(n)), spaceCheckpoint, kind), n[:]...)
}

// saltInKey is how many of a record's random bytes are in the keys of its pieces, which keeps
// those of two results of one checkpoint apart.
const saltInKey = 8

func pieceKey(n name, part byte, salt []byte, piece int) []byte {
	b := append(make([]byte, 0, 2+len(n)+1+saltInKey+4), spaceCheckpoint, kindPiece)
	b = append(append(b, n[:]...), part)
	b = append(b, salt[:saltInKey]...)
	return binary.BigEndian.AppendUint32(b, uint32(piece))
}

// scope is a workflow or a caller, as quotas count by them.
type scope struct {
	kind byte
	hash [16]byte
}

func (s scope) prefix() []byte {
	return append(append(make([]byte, 0, 2+len(s.hash)+len(name{})), spaceCheckpoint, s.kind), s.hash[:]...)
}

func (s scope) account(n name) []byte { return append(s.prefix(), n[:]...) }

func (s scope) note() []byte { return s.key(kindNote) }

func (s scope) key(kind byte) []byte {
	return append(append(make([]byte, 0, 3+len(s.hash)), spaceCheckpoint, kind, s.kind), s.hash[:]...)
}

// errEncoding: a sealed record opened but cannot be decoded: a newer build or a bug wrote it.
var errEncoding = errors.New("checkpoint: a record in the store cannot be read by this build")

// saltSize is how many random bytes precede the fields, so that a hash confirms no guess.
const saltSize = 32

func salted(size int) store.Encoder {
	b := make([]byte, saltSize, saltSize+size)
	_, _ = rand.Read(b) // never fails
	return store.Encoder{B: b}
}

func unsalted(b []byte) (store.Decoder, error) {
	if len(b) < saltSize {
		return store.Decoder{}, errEncoding
	}
	return store.Decoder{B: b[saltSize:], Broken: errEncoding}, nil
}

const (
	// inlineMost is the largest record, in bytes, within one ordinary value.
	inlineMost = 2 << 10
	// pieceSize is how much of a larger one is sealed and stored at a time.
	pieceSize = 256 << 10
	// piecesLonger is how much longer pieces stay than what names them.
	piecesLonger = time.Minute
)

// part is a snapshot or a result as it is stored.
type part struct {
	sum    [32]byte
	size   int
	inline []byte
	salt   []byte // begins the record; in the keys of its pieces
	pieces int

	counted  []byte // the kinds of the scopes in which it counts
	released bool   // stands in a result's place where the call never ran
}

const (
	tagSum = 1 + iota
	tagSize
	tagInline
	tagSalt
	tagPieces
	tagReleased
	tagCounted
)

func (p *part) encode() []byte {
	e := store.Encoder{B: make([]byte, 0, 96+len(p.inline))}
	e.Bytes(tagSum, p.sum[:])
	e.Int(tagSize, int64(p.size))
	e.Bytes(tagInline, p.inline)
	e.Bytes(tagSalt, p.salt)
	e.Int(tagPieces, int64(p.pieces))
	e.Bool(tagReleased, p.released)
	e.Bytes(tagCounted, p.counted)
	return e.B
}

func decodePart(b []byte) (*part, error) {
	p := new(part)
	d := store.Decoder{B: b, Broken: errEncoding}
	for d.Next() {
		switch d.Tag {
		case tagSum:
			d.Fill(p.sum[:])
		case tagSize:
			p.size = int(d.Int())
		case tagInline:
			p.inline = d.Field
		case tagSalt:
			p.salt = d.Field
		case tagPieces:
			p.pieces = int(d.Int())
		case tagReleased:
			p.released = d.Int() != 0
		case tagCounted:
			p.counted = d.Field
		}
	}
	if d.Err == nil && (p.pieces < 0 || p.pieces > maxPieces || p.pieces > 0 && len(p.salt) != saltInKey) {
		d.Err = errEncoding
	}
	return p, d.Err
}

func split(plain []byte) *part {
	p := &part{sum: sha256.Sum256(plain), size: len(plain)}
	if len(plain) <= inlineMost {
		p.inline = plain
		return p
	}
	p.salt = bytes.Clone(plain[:saltInKey])
	p.pieces = (len(plain) + pieceSize - 1) / pieceSize
	return p
}

func (v *Store) head(n name, kind byte, p *part, condition store.Condition, expires time.Time) store.Write {
	key := keyOf(kind, n)
	return store.Write{Key: key, If: condition, Value: v.sealer.Seal(nil, p.encode(), key), Expires: expires}
}

// pieces are the writes of a record's pieces; none if it is in its head.
func (v *Store) pieces(n name, kind byte, p *part, plain []byte, expires time.Time) []store.Write {
	if p.pieces == 0 {
		return nil
	}
	writes := make([]store.Write, 0, p.pieces)
	for piece := range slices.Chunk(plain, pieceSize) {
		key := pieceKey(n, kind, p.salt, len(writes))
		writes = append(writes, store.Write{
			Key: key, Bulk: true, Expires: expires.Add(piecesLonger),
			Value: v.sealer.Seal(make([]byte, 0, len(piece)+64), piece, key),
		})
	}
	return writes
}

// unread is the error of a value that the store did not give. A damaged one stays so: to retry it as
// ErrStore would hold up a rollback forever.
func unread(err error) error {
	if errors.Is(err, store.ErrDamaged) {
		return fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return fmt.Errorf("%w: %w", ErrStore, err)
}

// part reads a head; nil without one.
func (v *Store) part(ctx context.Context, n name, kind byte) (*part, time.Time, error) {
	key := keyOf(kind, n)
	entry, err := v.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, time.Time{}, nil
	}
	if err != nil {
		return nil, time.Time{}, unread(err)
	}
	plain, err := v.sealer.Open(nil, entry.Value, key)
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	p, err := decodePart(plain)
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return p, entry.Expires, nil
}

// join reads the record of a part and compares its hash.
func (v *Store) join(ctx context.Context, n name, kind byte, p *part) ([]byte, error) {
	plain := p.inline
	for i := range p.pieces {
		key := pieceKey(n, kind, p.salt, i)
		entry, err := v.store.Get(ctx, key)
		switch {
		case errors.Is(err, store.ErrNotFound):
			return nil, fmt.Errorf("%w: %w", ErrTampered, err)
		case err != nil:
			return nil, unread(err)
		}
		if plain, err = v.sealer.Open(plain, entry.Value, key); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrTampered, err)
		}
	}
	if sum := sha256.Sum256(plain); !bytes.Equal(sum[:], p.sum[:]) {
		return nil, fmt.Errorf("%w: not the bytes that were recorded", ErrTampered)
	}
	return plain, nil
}

// writers counts what is sealed and not committed yet, so that re-sealing can wait for
// what was sealed with an older key. The zero value is ready.
type writers struct {
	mu      sync.Mutex
	current *gate
	older   []*gate // not known to be empty
}

// gate is those who have entered between two passes of re-sealing.
type gate struct {
	w    *writers
	n    int
	idle chan struct{} // closed when n is 0; nil while nobody waits
}

// enter is called before anything is sealed; the gate is left after the commit.
func (w *writers) enter() *gate {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		w.current = &gate{w: w}
	}
	w.current.n++
	return w.current
}

func (t *gate) leave() {
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	t.n--
	if t.n == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// wait waits for all who have entered before it. Others enter meanwhile.
func (w *writers) wait(ctx context.Context) error {
	w.mu.Lock()
	if w.current != nil {
		w.older = append(w.older, w.current)
		w.current = nil
	}
	older := w.older
	w.older = nil
	w.mu.Unlock()
	for i, t := range older {
		if err := t.await(ctx); err != nil {
			w.mu.Lock()
			w.older = append(w.older, older[i:]...)
			w.mu.Unlock()
			return err
		}
	}
	return nil
}

func (t *gate) await(ctx context.Context) error {
	t.w.mu.Lock()
	if t.n == 0 {
		t.w.mu.Unlock()
		return nil
	}
	if t.idle == nil {
		t.idle = make(chan struct{})
	}
	idle := t.idle
	t.w.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

const (
	resealPage = 256 // ordinary values that are read in one snapshot
	piecesPage = 16  // pieces that are read in one snapshot
)

// Resealed counts what a Reseal has done.
type Resealed struct {
	// Seen counts the values that were read, Resealed those that were sealed anew.
	Seen, Resealed int
	// Damaged are those that do not open with the key that they name. They stay as they
	// are; Open says ErrTampered of them.
	Damaged int
}

// AwaitWriters waits until everything is committed, or given up, that was sealed before.
func (v *Store) AwaitWriters(ctx context.Context) error { return v.writers.wait(ctx) }

// Reseal seals anew, with the newest key, what was sealed with an older one: snapshots,
// results, their pieces, credentials, marks and versions. Hashes do not change, since they are of
// the plain bytes. Afterwards no checkpoint needs an older key.
//
// It goes beside the traffic, whose commits win, and may be stopped at any moment: the
// next one passes quickly over what was done. It comes before execution.Guard.Reseal, which
// notes the older keys as not needed any more.
func (v *Store) Reseal(ctx context.Context) (Resealed, error) {
	r := store.NewResealer(v.store, v.sealer)
	done := func(err error) (Resealed, error) {
		return Resealed{Seen: r.Seen, Resealed: r.Resealed, Damaged: r.Damaged}, err
	}
	if err := v.AwaitWriters(ctx); err != nil {
		return done(err)
	}
	for _, kind := range []byte{kindSnapshot, kindResult, kindCredential, kindMark, kindVersion} {
		if err := r.Walk(ctx, []byte{spaceCheckpoint, kind}, resealPage, r.Reseal); err != nil {
			return done(fmt.Errorf("%w: %w", ErrStore, err))
		}
	}
	if err := r.Walk(ctx, []byte{spaceCheckpoint, kindPiece}, piecesPage, r.ResealBulk); err != nil {
		return done(fmt.Errorf("%w: %w", ErrStore, err))
	}
	return done(nil)
}
