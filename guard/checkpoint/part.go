package checkpoint

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// inlineMost is the largest record, in bytes, that stands in one ordinary value.
	inlineMost = 2 << 10
	// pieceSize is how much of a larger one is sealed and stored at a time.
	pieceSize = 256 << 10
	// piecesLonger is how much longer pieces stay than what names them, so that they
	// are not missed before that has gone.
	piecesLonger = time.Minute
)

// part is a snapshot or a result as it is stored.
type part struct {
	sum    [32]byte
	size   int
	inline []byte
	salt   []byte // begins the record; in the keys of its pieces
	pieces int
	// counted are the kinds of the scopes in which it counts.
	counted []byte
	// released stands in a result's place where the call never ran.
	released bool
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
	e := encoder{make([]byte, 0, 96+len(p.inline))}
	e.bytes(tagSum, p.sum[:])
	e.int(tagSize, int64(p.size))
	e.bytes(tagInline, p.inline)
	e.bytes(tagSalt, p.salt)
	e.int(tagPieces, int64(p.pieces))
	e.bool(tagReleased, p.released)
	e.bytes(tagCounted, p.counted)
	return e.b
}

func decodePart(b []byte) (*part, error) {
	p := new(part)
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagSum:
			d.fill(p.sum[:])
		case tagSize:
			p.size = int(d.int())
		case tagInline:
			p.inline = d.field
		case tagSalt:
			p.salt = d.field
		case tagPieces:
			p.pieces = int(d.int())
		case tagReleased:
			p.released = d.bool()
		case tagCounted:
			p.counted = d.field
		}
	}
	if d.err == nil && (p.pieces < 0 || p.pieces > maxPieces || p.pieces > 0 && len(p.salt) != saltInKey) {
		d.err = errEncoding
	}
	return p, d.err
}

// split makes the part of a record.
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

// head is the write of the part itself.
func (v *Vault) head(n name, kind byte, p *part, condition store.Condition, expires time.Time) store.Write {
	key := keyOf(kind, n)
	return store.Write{Key: key, If: condition, Value: v.sealer.Seal(nil, p.encode(), key), Expires: expires}
}

// pieces are the writes of a record's pieces; none where it stands in its head.
func (v *Vault) pieces(n name, kind byte, p *part, plain []byte, expires time.Time) []store.Write {
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

// part reads a head. It returns nil where there is none.
func (v *Vault) part(ctx context.Context, n name, kind byte) (*part, time.Time, error) {
	key := keyOf(kind, n)
	entry, err := v.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, time.Time{}, nil
	}
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
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
func (v *Vault) join(ctx context.Context, n name, kind byte, p *part) ([]byte, error) {
	plain := p.inline
	for i := range p.pieces {
		key := pieceKey(n, kind, p.salt, i)
		entry, err := v.store.Get(ctx, key)
		switch {
		case errors.Is(err, store.ErrNotFound), errors.Is(err, store.ErrDamaged):
			return nil, fmt.Errorf("%w: %w", ErrTampered, err)
		case err != nil:
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
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
