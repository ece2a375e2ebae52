package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

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
// the same bytes each time. The error is ErrNoToken, ErrTampered if the entry is not what the log
// holds, or one of the store.
func (l *Log) Token(ctx context.Context, e *Entry) ([]byte, error) {
	if e.Header == nil {
		return e.Payload, nil
	}
	if e.Log != l.origin {
		other, err := l.In(ctx, e.Log)
		if err != nil {
			return nil, err
		}
		return other.Token(ctx, e)
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
	signature, err := l.signProven(ctx, e, hashes[0])
	if err != nil {
		return nil, err
	}
	return joinToken(e.Header, e.Payload, signature), nil
}

// signProven makes the signature of an entry whose leaf must have that proven hash, or reads
// it. The error is ErrNoToken or ErrTampered.
func (l *Log) signProven(ctx context.Context, e *Entry, hash tlog.Hash) ([]byte, error) {
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
	return l.storedSignature(ctx, e)
}

// storedSignature reads the signature that StoreSignatures kept. If its key is known it must
// hold: whoever can seal can replace it. The error is ErrNoToken or ErrTampered.
func (l *Log) storedSignature(ctx context.Context, e *Entry) ([]byte, error) {
	key := signedKey(l.id, e.Index)
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
	var hashes []tlog.Hash
	err := s.proved(ctx, l.logStore, func(r tlog.HashReader) (err error) {
		hashes, err = r.ReadHashes(indexes)
		return err
	})
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
		if err == nil { // a damaged one is made again
			have[indexIn(found.Key)] = true
		}
	}
	return have, nil
}

// signStep is the largest number of signatures of one commit.
const signStep = 64

// StoreSignatures makes and stores the signatures of the entries whose Header of selects, so
// that their tokens outlive the key. It returns how many it has stored; those that are
// stored already it leaves. It first waits until the batches that are made have
// ended, but not longer than a minute. It can be stopped at
// any time, and begins anew. Entries that were altered stay without a signature; then the
// error is ErrTampered and names them, and all others are done. Else it is ErrNoToken if the
// key is gone, or context.DeadlineExceeded.
func (l *Log) StoreSignatures(ctx context.Context, of func(header []byte) bool) (stored int, err error) {
	waiting, cancel := context.WithTimeout(ctx, commitTime)
	defer cancel()
	if err := l.commits.await(waiting); err != nil {
		return 0, fmt.Errorf("waiting for what is being recorded: %w", err)
	}
	var altered alteredEntries
	size := l.now.Load().size
	for n := int64(0); n<<tileHeight < size; n++ {
		made, err := l.storeTile(ctx, n, of, &altered)
		stored += made
		if err != nil {
			return stored, err
		}
	}
	return stored, altered.err()
}

// commitTime bounds how long StoreSignatures waits: a commit may never end.
const commitTime = time.Minute

// alteredEntries collects the entries that cannot be signed.
type alteredEntries struct {
	first   error
	indexes []int64
}

func (a *alteredEntries) add(err error, indexes ...int64) {
	a.first = cmp.Or(a.first, err)
	a.indexes = append(a.indexes, indexes...)
}

// err names the first of them.
func (a *alteredEntries) err() error {
	const most = 20
	n := len(a.indexes)
	switch {
	case n == 0:
		return nil
	case n > most:
		return fmt.Errorf("entries %v and %d more: %w", a.indexes[:most], n-most, a.first)
	}
	return fmt.Errorf("entries %v: %w", a.indexes, a.first)
}

func (l *Log) storeTile(ctx context.Context, n int64, of func(header []byte) bool, altered *alteredEntries) (stored int, err error) {
	l.pruning.Lock() // a pruned entry has no signature either
	defer l.pruning.Unlock()
	s := l.now.Load()
	from, to := n<<tileHeight, min((n+1)<<tileHeight, s.size)
	var found []Entry
	stands := make(map[int64]bool, tileWidth)
	for at, err := range l.scan(ctx, l.entries(from, to)) {
		e, err := l.scanned(at, err)
		if err != nil && !errors.Is(err, ErrTampered) {
			return 0, err
		}
		index := indexIn(at.Key)
		stands[index] = true
		switch {
		case err != nil:
			altered.add(err, index)
		case e.Header != nil && of(e.Header):
			found = append(found, e)
		}
	}
	if err := l.missing(ctx, n, from, to, stands, altered); err != nil || len(found) == 0 {
		return 0, err
	}
	have, err := l.signatures(ctx, n)
	if err != nil {
		return 0, err
	}
	found = slices.DeleteFunc(found, func(e Entry) bool { return have[e.Index] })
	hashes, err := l.leaves(ctx, s, from, to)
	if errors.Is(err, ErrTampered) {
		for i := range found {
			altered.add(err, found[i].Index)
		}
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var writes []store.Write
	for i := range found {
		e := &found[i]
		signature, err := l.signProven(ctx, e, hashes[e.Index-from])
		if errors.Is(err, ErrTampered) {
			altered.add(err, e.Index)
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
	return stored, nil
}

// missing adds the entries of a tile that do not stand in the store and were not pruned: a
// backup may have them.
func (l *Log) missing(ctx context.Context, n, from, to int64, stands map[int64]bool, altered *alteredEntries) error {
	if int64(len(stands)) == to-from {
		return nil
	}
	marks, err := l.pruned(ctx, n)
	if err != nil && !errors.Is(err, ErrTampered) {
		return err
	}
	for i := from; i < to; i++ {
		if !stands[i] && (err != nil || !marks.has(i)) {
			altered.add(cmp.Or(err, fmt.Errorf("%w: entry %d is missing", ErrTampered, i)), i)
		}
	}
	return nil
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
			if err := v.stale(found, index, "a signature stands without its entry"); err != nil {
				return err
			}
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
