package guard

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// pieceSize is how much of a body is sealed and stored at a time.
	pieceSize = 256 << 10
	// maxInline is the largest encoded answer that stands in the record itself: it
	// saves small answers a write of their own.
	maxInline = 512
	// lengthSize is the size of the encoded head's length, which stands before it.
	lengthSize = 4
)

// ErrResultUnavailable: the result is missing or altered in the store. The call was
// executed and is not run again for it.
var ErrResultUnavailable = errors.New("guard: the recorded result is not available")

// errNotKept: the answer was too large, or a piece of it could not be stored.
var errNotKept = errors.New("guard: the answer is not kept")

// pieces is what was stored of a body so far.
type pieces struct {
	stored int
	sum    hash.Hash
	failed bool
}

// keeper stores the full pieces of a growing body, one after the other.
type keeper struct {
	e      *Execution
	wake   chan struct{}
	stop   chan struct{}
	done   chan struct{}
	pieces pieces
}

func newKeeper(e *Execution) *keeper {
	k := &keeper{
		e: e, wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
		pieces: pieces{sum: sha256.New()},
	}
	go k.run()
	return k
}

// grown says that the body has grown. It never waits.
func (k *keeper) grown() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// finish stores what full pieces are left and returns the account.
func (k *keeper) finish() pieces {
	close(k.stop)
	<-k.done
	return k.pieces
}

func (k *keeper) run() {
	defer close(k.done)
	for {
		for !k.pieces.failed && k.e.flight.recording.Size() >= int64(k.pieces.stored+1)*pieceSize {
			if err := k.store(); err != nil {
				k.pieces.failed = true
			}
		}
		select {
		case <-k.wake:
		case <-k.stop:
			select {
			case <-k.wake:
			default:
				return
			}
		}
	}
}

func (k *keeper) store() error {
	if k.e.flight.recording.lost() {
		return errNotKept
	}
	buf := make([]byte, pieceSize)
	if n, err := k.e.flight.recording.readAt(buf, int64(k.pieces.stored)*pieceSize); n < len(buf) {
		return fmt.Errorf("piece %d has %d bytes: %w", k.pieces.stored, n, err)
	}
	k.pieces.sum.Write(buf)
	r := &k.e.record
	name := pieceKey(k.e.flight.key, r.Claim, headPiece+1+k.pieces.stored)
	defer k.e.g.writers.enter().leave()
	write := store.Write{
		Key: name, Value: k.e.g.sealer.Seal(nil, buf, name), Bulk: true,
		// The result's own time begins when it is settled, at the deadline at the latest.
		Expires: r.Deadline.Add(r.KeepResult + time.Minute),
	}
	if _, err := k.e.g.store.Commit(context.Background(), write); err != nil {
		return err
	}
	k.pieces.stored++
	return nil
}

// rest appends the head and what is left of the body to tail, and notes in r where
// the answer is. What it returns is to be stored as the head piece; nil where the
// answer stands in r itself. errNotKept leaves r without a result.
func (p *pieces) rest(tail []byte, rec *Recording, r *Record) ([]byte, error) {
	head, whole := rec.complete()
	if !whole || p.failed {
		return nil, errNotKept
	}
	size := int(head.Size - int64(p.stored)*pieceSize)
	tail = head.encode(append(tail[:0], make([]byte, lengthSize)...))
	encoded := len(tail)
	if encoded-lengthSize+size > store.MaxBulk-1024 {
		return nil, errNotKept
	}
	tail = slices.Grow(tail, size)[:encoded+size]
	left := tail[encoded:]
	if n, err := rec.readAt(left, int64(p.stored)*pieceSize); n < len(left) {
		return nil, fmt.Errorf("%w: %w", errNotKept, err)
	}
	if p.sum == nil {
		p.sum = sha256.New()
	}
	p.sum.Write(left)
	p.sum.Write(tail[lengthSize:encoded])
	binary.BigEndian.PutUint32(tail, uint32(encoded-lengthSize))
	r.Result = StoredResult{Kept: true, Pieces: p.stored}
	p.sum.Sum(r.Result.Sum[:0])
	if p.stored == 0 && len(tail) <= maxInline {
		r.Result.Inline = bytes.Clone(tail)
		return nil, nil
	}
	r.Result.Size = int64(p.stored)*pieceSize + int64(len(tail))
	return tail, nil
}

// tail is the write that stores what rest returned.
func (g *Guard) tail(key Key, record *Record, tail []byte) store.Write {
	name := pieceKey(key, record.Claim, headPiece)
	return store.Write{Key: name, Bulk: true, Value: g.sealer.Seal(make([]byte, 0, len(tail)+64), tail, name),
		Expires: record.Result.Expires}
}

// Result is a recorded answer.
type Result struct {
	Head Head
	// Created is when the recorded execution was claimed.
	Created time.Time

	g      *Guard
	key    Key
	claim  [16]byte
	pieces int
	rest   []byte
}

// Result reads the answer of a Replayable finding and checks all of it, so that a
// replay does not break off in its middle. ErrResultUnavailable says that it is
// missing or altered.
func (g *Guard) Result(ctx context.Context, key Key, found Finding) (*Result, error) {
	r := found.Record
	tail := r.Result.Inline
	if tail == nil {
		var err error
		if tail, err = g.piece(ctx, key, r.Claim, headPiece); err != nil {
			return nil, err
		}
	}
	if len(tail) < lengthSize || int64(binary.BigEndian.Uint32(tail)) > int64(len(tail)-lengthSize) {
		return nil, ErrResultUnavailable
	}
	size := lengthSize + int(binary.BigEndian.Uint32(tail))
	encoded, rest := tail[lengthSize:size], tail[size:]
	head, err := decodeHead(encoded)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrResultUnavailable, err)
	}
	sum := sha256.New()
	for i := range r.Result.Pieces {
		piece, err := g.piece(ctx, key, r.Claim, headPiece+1+i)
		if err != nil {
			return nil, err
		}
		sum.Write(piece)
	}
	sum.Write(rest)
	sum.Write(encoded)
	if [32]byte(sum.Sum(nil)) != r.Result.Sum {
		return nil, ErrResultUnavailable
	}
	return &Result{Head: *head, Created: r.Created, g: g, key: key, claim: r.Claim, pieces: r.Result.Pieces, rest: rest}, nil
}

// Body reads the body, a piece at a time.
func (r *Result) Body(ctx context.Context) io.Reader {
	readers := make([]io.Reader, 0, r.pieces+1)
	for i := range r.pieces {
		readers = append(readers, &pieceReader{ctx: ctx, result: r, piece: headPiece + 1 + i})
	}
	return io.MultiReader(append(readers, bytes.NewReader(r.rest))...)
}

// pieceReader fetches its piece when it is first read.
type pieceReader struct {
	ctx    context.Context
	result *Result
	piece  int
	body   *bytes.Reader
}

func (p *pieceReader) Read(b []byte) (int, error) {
	if p.body == nil {
		piece, err := p.result.g.piece(p.ctx, p.result.key, p.result.claim, p.piece)
		if err != nil {
			return 0, err
		}
		p.body = bytes.NewReader(piece)
	}
	return p.body.Read(b)
}

func (g *Guard) piece(ctx context.Context, key Key, claim [16]byte, n int) ([]byte, error) {
	name := pieceKey(key, claim, n)
	entry, err := g.store.Get(ctx, name)
	switch {
	case errors.Is(err, store.ErrNotFound), errors.Is(err, store.ErrDamaged):
		return nil, fmt.Errorf("%w: %w", ErrResultUnavailable, err)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	plain, err := g.sealer.Open(nil, entry.Value, name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrResultUnavailable, err)
	}
	return plain, nil
}
