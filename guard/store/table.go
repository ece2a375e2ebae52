package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/fxamacker/cbor/v2"
)

// Table keeps records of one kind in a store, each under a key that begins with the table's prefix.
type Table[T any] struct {
	Store Store
	// Sealer seals the records (P8); nil for those that have nothing of a caller.
	Sealer Sealer
	// Prefix begins the keys of all records.
	Prefix string
	// Failed is the owner's error for a store that does not answer, Unreadable that for a record that the store cannot
	// read, that does not open, or that cannot be decoded. Both are wrapped around the cause; nil is the cause alone.
	Failed, Unreadable error
	// Check says what is wrong with a record that was decoded; nil takes all. It keeps what another build has written
	// in another form from passing for a record without its members.
	Check func(*T) error
	// Missing is the owner's error of Get where there is no record; nil is a zero row.
	Missing error
}

// Row is a record with its entry.
type Row[T any] struct {
	Record *T // nil where there is none, or it cannot be read
	Entry
}

// Key is the prefix with parts behind it.
func (t *Table[T]) Key(parts ...[]byte) []byte {
	size := len(t.Prefix)
	for _, part := range parts {
		size += len(part)
	}
	key := append(make([]byte, 0, size), t.Prefix...)
	for _, part := range parts {
		key = append(key, part...)
	}
	return key
}

// Get reads a record. Where there is none the row is zero, and the error is Missing.
func (t *Table[T]) Get(ctx context.Context, key []byte) (Row[T], error) {
	entry, err := t.Store.Get(ctx, key)
	if errors.Is(err, ErrNotFound) {
		return Row[T]{}, t.Missing
	}
	if entry.Key = key; err != nil {
		return Row[T]{Entry: entry}, t.unread(key, err)
	}
	return t.open(entry)
}

// unread is the error of what the store did not give. A damaged value stays so: who takes it for a store that does not
// answer would try again forever.
func (t *Table[T]) unread(key []byte, err error) error {
	if errors.Is(err, ErrDamaged) {
		return t.unreadable(key, err)
	}
	return wrap(t.Failed, err)
}

// unreadable is the error of a record that cannot be read.
func (t *Table[T]) unreadable(key []byte, err error) error {
	return wrap(t.Unreadable, fmt.Errorf("record %x: %w", key, err))
}

func wrap(by, err error) error {
	if by == nil {
		return err
	}
	return fmt.Errorf("%w: %w", by, err)
}

func (t *Table[T]) open(entry Entry) (Row[T], error) {
	plain, err := entry.Value, error(nil)
	if t.Sealer != nil {
		plain, err = t.Sealer.Open(nil, entry.Value, entry.Key)
	}
	record := new(T)
	if err == nil {
		err = Decode(plain, record)
	}
	if err == nil && t.Check != nil {
		err = t.Check(record)
	}
	if err != nil {
		return Row[T]{Entry: entry}, t.unreadable(entry.Key, err)
	}
	return Row[T]{record, entry}, nil
}

// All yields the records whose keys begin with the prefix and more parts, in the order of their keys. A record that
// cannot be read comes without a Record and with an error, and the next ones follow; a store that does not answer ends
// them, with an error and no key.
func (t *Table[T]) All(ctx context.Context, parts ...[]byte) iter.Seq2[Row[T], error] {
	return func(yield func(Row[T], error) bool) {
		at := Prefix(t.Key(parts...))
		for ended := true; ended; {
			ended = false
			for entry, err := range t.Store.Scan(ctx, at) {
				if err != nil && !errors.Is(err, ErrDamaged) {
					yield(Row[T]{}, wrap(t.Failed, err))
					return
				}
				at.From = append(bytes.Clone(entry.Key), 0)
				row := Row[T]{Entry: entry}
				if ended = err != nil; ended { // a damaged entry ends the scan
					err = t.unreadable(entry.Key, err)
				} else {
					row, err = t.open(entry)
				}
				if !yield(row, err) {
					return
				}
			}
		}
	}
}

// Put is the write of a record.
func (t *Table[T]) Put(key []byte, record *T, is Condition, expires time.Time) Write {
	value := Encode(nil, record)
	if t.Sealer != nil {
		value = t.Sealer.Seal(make([]byte, 0, len(value)+sealedLonger), value, key)
	}
	return Write{Key: key, If: is, Value: value, Expires: expires}
}

// sealedLonger is at least by how many bytes a sealed value is longer.
const sealedLonger = 64

// Records are CBOR (RFC 8949): strings are as they are, of whatever bytes, and times have nanoseconds, in UTC.
var (
	encoding, _ = cbor.EncOptions{Time: cbor.TimeRFC3339NanoUTC}.UserBufferEncMode()
	decoding, _ = cbor.DecOptions{UTF8: cbor.UTF8DecodeInvalid}.DecMode()
)

// Encode appends a record to dst. Its members are the tags of the fields (cbor, or else json). Readers skip members
// that they do not know, and no number is ever used for another field, so that builds can read each other's records.
func Encode(dst []byte, record any) []byte {
	b := bytes.NewBuffer(dst)
	if err := encoding.MarshalToBuffer(record, b); err != nil {
		panic(fmt.Sprintf("store: a record of type %T: %v", record, err)) // only of a type that is none
	}
	return b.Bytes()
}

// Decode reads what Encode has written.
func Decode(b []byte, record any) error { return decoding.Unmarshal(b, record) }

// pieceSize is how much of a large value is sealed and stored at a time, in bytes.
const pieceSize = 256 << 10

// PutPieces are the writes of a large value that expires, sealed in pieces whose keys begin with prefix.
func (t *Table[T]) PutPieces(prefix, plain []byte, expires time.Time) []Write {
	writes := make([]Write, 0, len(plain)/pieceSize+1)
	for piece := range slices.Chunk(plain, pieceSize) {
		key := pieceKey(prefix, len(writes))
		value := t.Sealer.Seal(make([]byte, 0, len(piece)+sealedLonger), piece, key)
		writes = append(writes, Write{Key: key, Value: value, Expires: expires, Bulk: true})
	}
	return writes
}

func pieceKey(prefix []byte, i int) []byte {
	return binary.BigEndian.AppendUint32(bytes.Clone(prefix), uint32(i))
}

// DeletePieces are the writes that delete the pieces of a value of so many bytes.
func (t *Table[T]) DeletePieces(prefix []byte, size int) (writes []Write) {
	for i := 0; i*pieceSize < size; i++ {
		writes = append(writes, Write{Key: pieceKey(prefix, i), Delete: true})
	}
	return writes
}

// GetPieces reads the pieces under a prefix. Whoever asks knows whether they are the whole value.
func (t *Table[T]) GetPieces(ctx context.Context, prefix []byte) (plain []byte, err error) {
	for entry, err := range t.Store.Scan(ctx, Prefix(prefix)) {
		if err != nil {
			return nil, t.unread(entry.Key, err)
		}
		if plain, err = t.Sealer.Open(plain, entry.Value, entry.Key); err != nil {
			return nil, t.unreadable(entry.Key, err)
		}
	}
	return plain, nil
}

// PiecesExpire is when the pieces under a prefix expire; zero without any.
func (t *Table[T]) PiecesExpire(ctx context.Context, prefix []byte) (time.Time, error) {
	key := pieceKey(prefix, 0)
	first, err := t.Store.Get(ctx, key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return time.Time{}, t.unread(key, err)
	}
	return first.Expires, nil
}
