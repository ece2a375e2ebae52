package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// An entry with a Header determines its token up to the signature, which is made when
// somebody asks for the token (ADR 0064). It is made only of what the signed head covers:
// whoever alters the store gets nothing signed.

// joinToken is the token of a protected header, a payload and a signature (RFC 7515, 7.1).
func joinToken(header, payload, signature []byte) []byte {
	size := tokenBase64.EncodedLen(len(header)) + tokenBase64.EncodedLen(len(payload)) + tokenBase64.EncodedLen(len(signature)) + 2
	b := tokenBase64.AppendEncode(make([]byte, 0, size), header)
	b = tokenBase64.AppendEncode(append(b, '.'), payload)
	return tokenBase64.AppendEncode(append(b, '.'), signature)
}

// Token returns the token of an entry: its payload, or with a Header the token made of it,
// the same bytes each time. An entry of another log of the store has one only if its
// signature is stored. The error is ErrNoToken, also for an Unsigned entry, ErrTampered if
// the entry is not what the log holds, or one of the store.
func (l *Log) Token(ctx context.Context, e *Entry) ([]byte, error) {
	if e.Unsigned {
		return nil, fmt.Errorf("%w: entry %d was refused one", ErrNoToken, e.Index)
	}
	if e.Header == nil {
		return e.Payload, nil
	}
	if e.Log != l.origin {
		signature, err := l.storedSignature(ctx, logOf(l.sealer, e.Log), e)
		if err != nil {
			return nil, err
		}
		return joinToken(e.Header, e.Payload, signature), nil
	}
	s, err := l.current(ctx, e.Index+1)
	if err != nil {
		return nil, err
	}
	if e.Index < 0 || e.Index >= s.size {
		return nil, fmt.Errorf("%w: entry %d of %d", ErrNotFound, e.Index, s.size)
	}
	hashes, err := l.leaves(ctx, s, e.Index, e.Index+1)
	if err != nil {
		return nil, err
	}
	signature, err := l.signProven(ctx, l.id, e, hashes[0])
	if err != nil {
		return nil, err
	}
	return joinToken(e.Header, e.Payload, signature), nil
}

// signProven makes the signature of an entry whose leaf must have that proven hash, or reads
// it. The error is ErrNoToken or ErrTampered.
func (l *Log) signProven(ctx context.Context, log logID, e *Entry, hash tlog.Hash) ([]byte, error) {
	// Of the entry only its leaf is proven.
	proven, err := decode(e.Leaf)
	if err != nil || proven.Header == nil || proven.Index != e.Index || tlog.RecordHash(e.Leaf) != hash ||
		string(proven.Header) != string(e.Header) || string(proven.Payload) != string(e.Payload) {
		return nil, fmt.Errorf("%w: entry %d does not fit its hash in the tree", ErrTampered, e.Index)
	}
	if l.options.Signature != nil {
		signature, err := l.options.Signature(e.Header, e.Payload)
		if err == nil {
			return signature, nil
		}
	}
	return l.storedSignature(ctx, log, e)
}

// storedSignature reads the signature that StoreSignatures kept. If its key is known it must
// hold: whoever can seal can replace it. The error is ErrNoToken or ErrTampered.
func (l *Log) storedSignature(ctx context.Context, log logID, e *Entry) ([]byte, error) {
	key := signedKey(log, e.Index)
	found, err := l.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, fmt.Errorf("%w: the key that entry %d names is gone", ErrNoToken, e.Index)
	}
	if err != nil {
		return nil, damagedAt(key, err)
	}
	signature, err := l.sealer.Open(nil, found.Value, key)
	if err != nil {
		return nil, fmt.Errorf("%w: the signature of entry %d: %w", ErrTampered, e.Index, err)
	}
	if l.forged(e, signature) {
		return nil, fmt.Errorf("%w: the stored signature of entry %d does not hold", ErrTampered, e.Index)
	}
	return signature, nil
}

// forged reports whether a stored signature does not hold under the key of its entry.
func (s *logStore) forged(e *Entry, signature []byte) bool {
	if s.holds == nil {
		return false
	}
	holds, known := s.holds(e.Header, e.Payload, signature)
	return known && !holds
}

// leaves returns the leaf hashes of a range of entries, as far as the state has them, proved
// against the signed head. The error is ErrTampered, or one of the store.
func (l *Log) leaves(ctx context.Context, s *state, from, to int64) ([]tlog.Hash, error) {
	indexes := make([]int64, 0, tileWidth)
	for i := from; i < min(to, s.size); i++ {
		indexes = append(indexes, tlog.StoredHashIndex(0, i))
	}
	read := &tiles{ctx: ctx, on: l.logStore, state: s}
	hashes, err := tlog.TileHashReader(tlog.Tree{N: s.size, Hash: s.root()}, read).ReadHashes(indexes)
	if err != nil && read.failed == nil {
		err = fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return hashes, err
}

// signatures returns the entries of a tile whose signatures are stored.
func (l *Log) signatures(ctx context.Context, n int64) (map[int64]bool, error) {
	have := make(map[int64]bool)
	r := store.Range{From: signedKey(l.id, n<<tileHeight), To: signedKey(l.id, (n+1)<<tileHeight)}
	for found, err := range l.scan(ctx, r) {
		if err != nil && !errors.Is(err, store.ErrDamaged) {
			return nil, err
		}
		have[indexIn(found.Key)] = true
	}
	return have, nil
}

// signStep is the largest number of signatures of one commit.
const signStep = 64

// StoreSignatures makes and stores the signatures of the entries whose Header of selects, so
// that their tokens outlive the key. It returns how many it has stored; those that are
// stored already it leaves. It first waits until everything is in the tree that has a batch
// now, also if that is not committed yet. It can be stopped at any time, and begins anew. Entries that were altered stay without a signature; then the error
// is ErrTampered, and all others are done. Else it is ErrNoToken if the key is gone, or that
// of Flush.
func (l *Log) StoreSignatures(ctx context.Context, of func(header []byte) bool) (stored int, err error) {
	if err := l.flush(ctx, true); err != nil {
		return 0, err
	}
	size := l.now.Load().size
	var altered error
	for n := int64(0); n<<tileHeight < size; n++ {
		made, err := l.storeTile(ctx, n, of)
		stored += made
		if errors.Is(err, ErrTampered) {
			altered, err = cmp.Or(altered, err), nil
		}
		if err != nil {
			return stored, err
		}
	}
	return stored, altered
}

func (l *Log) storeTile(ctx context.Context, n int64, of func(header []byte) bool) (stored int, err error) {
	l.pruning.Lock() // a pruned entry has no signature either
	defer l.pruning.Unlock()
	s := l.now.Load()
	r := l.entries(n<<tileHeight, 0)
	r.To = l.entryKey(min((n+1)<<tileHeight, s.size))
	var found []Entry
	var altered error // the first one
	for stands, err := range l.scan(ctx, r) {
		e, err := l.scanned(stands, err)
		if err != nil && !errors.Is(err, ErrTampered) {
			return 0, err
		}
		switch {
		case err != nil:
			altered = cmp.Or(altered, err)
		case e.Header != nil && of(e.Header):
			found = append(found, e)
		}
	}
	if len(found) == 0 {
		return 0, altered
	}
	have, err := l.signatures(ctx, n)
	if err != nil {
		return 0, err
	}
	hashes, err := l.leaves(ctx, s, n<<tileHeight, (n+1)<<tileHeight)
	if err != nil {
		return 0, err
	}
	var writes []store.Write
	for i := range found {
		e := &found[i]
		if have[e.Index] {
			continue
		}
		signature, err := l.signProven(ctx, l.id, e, hashes[e.Index&(tileWidth-1)])
		if errors.Is(err, ErrTampered) {
			altered = cmp.Or(altered, err)
			continue
		}
		if err != nil {
			return 0, err
		}
		key := signedKey(l.id, e.Index)
		writes = append(writes, store.Write{Key: key, Value: l.sealer.Seal(nil, signature, key)})
	}
	for step := range slices.Chunk(writes, signStep) {
		if _, err := l.store.Commit(ctx, step...); err != nil {
			return stored, err
		}
		stored += len(step)
	}
	return stored, altered
}

// signatures checks that the stored signatures open, are of entries of the tree, and hold.
// That one is missing is no fault: after a theft there are none.
func (v *verifier) signatures() error {
	for found, err := range v.store.Scan(v.ctx, store.Prefix(logKey(spaceSigned, v.id, 0))) {
		if err != nil {
			return err
		}
		if len(found.Key) != logKeySize+indexEnd {
			v.fault(-1, "what stands among the signatures cannot be read")
			continue
		}
		index := indexIn(found.Key)
		signature, unopened := v.sealer.Open(nil, found.Value, found.Key)
		if unopened != nil {
			v.fault(index, "its signature does not open: %s", unopened)
		}
		if index < 0 || index >= v.report.Head.Size {
			if err := v.behind(index, "a signature stands "); err != nil {
				return err
			}
			continue
		}
		e, err := v.read(v.ctx, v.id, index)
		switch {
		case errors.Is(err, store.ErrNotFound):
			v.fault(index, "a signature stands without its entry")
		case errors.Is(err, ErrTampered): // reported with the entries
		case err != nil:
			return err
		case e.Header == nil:
			v.fault(index, "a signature stands beside a token that has its own")
		case unopened == nil && v.forged(&e, signature):
			v.fault(index, "its stored signature does not hold")
		}
	}
	return nil
}
