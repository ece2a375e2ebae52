package ledger

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// MaxProof is the longest proof, in hashes: more than a tree of any size needs.
const MaxProof = 128

// Receipt proves that a log holds an entry.
type Receipt struct {
	// Log is the log's origin.
	Log string `json:"log"`
	// Index is the entry's place.
	Index int64 `json:"index"`
	// Proof is the inclusion proof.
	Proof tlog.RecordProof `json:"proof"`
	// Head is the signed head that the proof leads to.
	Head string `json:"head"`
}

// Receipt proves the entry at index against the newest head.
func (l *Log) Receipt(ctx context.Context, index int64) (Receipt, error) {
	s, err := l.current(ctx, index+1)
	if err != nil {
		return Receipt{}, err
	}
	proof, err := l.prove(ctx, s, index, s.size)
	if err != nil {
		return Receipt{}, err
	}
	return Receipt{Log: l.origin, Index: index, Proof: proof, Head: string(s.head.Note)}, nil
}

// Prove makes the inclusion proof of the entry at index in the tree of a size, for
// whoever has a head of that size.
func (l *Log) Prove(ctx context.Context, index, size int64) (tlog.RecordProof, error) {
	s, err := l.current(ctx, size)
	if err != nil {
		return nil, err
	}
	return l.prove(ctx, s, index, size)
}

func (l *Log) prove(ctx context.Context, s *state, index, size int64) (tlog.RecordProof, error) {
	if index < 0 || index >= size || size > s.size {
		return nil, fmt.Errorf("%w: entry %d of %d", ErrNotFound, index, min(size, s.size))
	}
	return tlog.ProveRecord(size, index, s.hashes(ctx, l.shelf))
}

// ProveConsistency makes the proof that the tree of size new begins with all entries of
// the tree of size old. The tree of size 0 needs none.
func (l *Log) ProveConsistency(ctx context.Context, old, new int64) (tlog.TreeProof, error) {
	s, err := l.current(ctx, new)
	if err != nil {
		return nil, err
	}
	if old < 0 || old > new || new > s.size {
		return nil, fmt.Errorf("%w: from size %d to %d of %d", ErrNotFound, old, new, s.size)
	}
	if old == 0 {
		return tlog.TreeProof{}, nil
	}
	return tlog.ProveTree(new, old, s.hashes(ctx, l.shelf))
}

// Check holds that the receipt is one for leaf, in the log called origin, under a head
// that one of keys has signed. It returns that head. The error is ErrProof.
func (r *Receipt) Check(leaf []byte, origin string, keys note.Verifiers) (Head, error) {
	if r.Log != origin {
		return Head{}, fmt.Errorf("%w: a receipt of the log %q", ErrProof, r.Log)
	}
	head, err := ParseHead([]byte(r.Head), origin, keys)
	if err != nil {
		return Head{}, err
	}
	if e, err := decode(leaf); err != nil || e.Index != r.Index {
		return Head{}, fmt.Errorf("%w: the leaf is not that of entry %d", ErrProof, r.Index)
	}
	return head, CheckInclusion(r.Proof, head, r.Index, tlog.RecordHash(leaf))
}

// CheckInclusion holds that the tree of head has a leaf of that hash at index. The
// error is ErrProof.
func CheckInclusion(proof tlog.RecordProof, head Head, index int64, leaf tlog.Hash) error {
	if len(proof) > MaxProof {
		return fmt.Errorf("%w: %d hashes", ErrProof, len(proof))
	}
	if index < 0 || index >= head.Size {
		return fmt.Errorf("%w: entry %d of %d", ErrProof, index, head.Size)
	}
	return refuted(tlog.CheckRecord(proof, head.Size, head.Root, index, leaf))
}

// CheckConsistency holds that the tree of new begins with all entries of the tree of
// old. The error is ErrProof.
func CheckConsistency(proof tlog.TreeProof, old, new Head) error {
	switch {
	case len(proof) > MaxProof:
		return fmt.Errorf("%w: %d hashes", ErrProof, len(proof))
	case old.Origin != new.Origin:
		return fmt.Errorf("%w: heads of two logs", ErrProof)
	case old.Size < 0 || old.Size > new.Size:
		return fmt.Errorf("%w: from size %d to %d", ErrProof, old.Size, new.Size)
	case old.Size == 0:
		var empty frontier
		if len(proof) > 0 || old.Root != empty.root() {
			return fmt.Errorf("%w: of the empty tree", ErrProof)
		}
		return nil
	}
	return refuted(tlog.CheckTree(proof, new.Size, new.Root, old.Size, old.Root))
}

func refuted(err error) error {
	if err != nil {
		return errors.Join(ErrProof, err)
	}
	return nil
}
