package ledger

import (
	"bytes"
	"errors"
	"math"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// leaves are one tile of level 0, with its entries.
type leaves struct {
	v      *verifier
	first  int64
	n      int64
	width  int64
	marks  marks
	next   int64 // the first KeepUntil of those that are there
	stored []tlog.Hash
	made   []tlog.Hash // from the entries, or stored where there is none
	faulty bool
}

func (t *leaves) fault(index int64, format string, args ...any) {
	t.faulty = true
	t.v.fault(index, format, args...)
}

func (t *leaves) verify() error {
	v := t.v
	var err error
	if t.marks, _, err = v.pruned(v.ctx, t.n); errors.Is(err, ErrTampered) {
		t.fault(t.first, "%s", err)
	} else if err != nil {
		return err
	}
	if t.width == tileWidth {
		if t.stored, err = v.storedTile(v.ctx, 0, t.n); err != nil {
			return err
		}
		if len(t.stored) != tileWidth {
			t.fault(t.first, "the stored hashes of the %d entries from here on are missing", tileWidth)
			t.stored = nil
		}
	}
	t.next = math.MaxInt64
	if err := t.walk(); err != nil {
		return err
	}
	if t.marks.next != 0 && t.marks.next != t.next {
		t.fault(t.first, "the marks of what was pruned of the entries from here on do not fit")
	}
	for _, h := range t.made {
		v.leaf(h)
	}
	if t.marks.by != "" && v.tree.root() != t.marks.root {
		t.fault(t.first, "the note of what was pruned of the entries from here on is of another tree")
	}
	if t.width == tileWidth {
		v.roots = append(v.roots, rootOf(t.made))
	}
	return nil
}

// walk reads the entries in their order.
func (t *leaves) walk() error {
	index := t.first
	r := t.v.entries(t.first, 0)
	r.To = t.v.entryKey(t.first + t.width)
	for found, err := range t.v.store.Scan(t.v.ctx, r) {
		if err != nil {
			return err
		}
		if len(found.Key) != logKeySize+indexEnd {
			continue
		}
		for ; index < indexIn(found.Key); index++ {
			t.absent(index)
		}
		if err := t.present(index, found.Key, found.Value); err != nil {
			return err
		}
		index++
	}
	for ; index < t.first+t.width; index++ {
		t.absent(index)
	}
	return nil
}

// storedHash is what the tile says of an entry, or zero.
func (t *leaves) storedHash(index int64) tlog.Hash {
	if t.stored == nil {
		return tlog.Hash{}
	}
	return t.stored[index-t.first]
}

func (t *leaves) absent(index int64) {
	t.made = append(t.made, t.storedHash(index))
	if t.marks.has(index) {
		t.v.report.Pruned++
		(*vouchers)(&t.v.report.Vouchers).add(t.marks.by)
		return
	}
	t.fault(index, "missing, and nobody vouches that it was pruned")
}

func (t *leaves) present(index int64, key, sealed []byte) error {
	v := t.v
	v.report.Entries++
	if t.marks.has(index) {
		t.fault(index, "there, and marked as pruned")
	}
	leaf, err := v.sealer.Open(nil, sealed, key)
	if err != nil {
		t.fault(index, "does not open: %s", err)
		t.made = append(t.made, t.storedHash(index))
		return nil
	}
	hash := tlog.RecordHash(leaf)
	t.made = append(t.made, hash)
	if t.stored != nil && hash != t.stored[index-t.first] {
		t.fault(index, "does not fit its stored hash")
	}
	e, err := decode(leaf)
	if err != nil {
		t.fault(index, "cannot be read")
		return nil
	}
	if e.Index != index {
		t.fault(index, "reordered: entry %d stands here", e.Index)
	}
	if !e.KeepUntil.IsZero() {
		t.next = min(t.next, e.KeepUntil.UnixNano())
	}
	return t.indexes(index, &e, hash)
}

// indexes compares the index entries of an entry with it.
func (t *leaves) indexes(index int64, e *Entry, hash tlog.Hash) error {
	v := t.v
	want := account{log: v.id, index: index, check: checkOf(hash)}
	found, err := v.store.Get(v.ctx, v.idKey(e.Workflow, e.ID))
	switch {
	case errors.Is(err, store.ErrNotFound):
		t.fault(index, "not to be found by its id")
	case err != nil:
		return err
	case !bytes.Equal(found.Value, want.encode()):
		t.fault(index, "does not fit what stands under its id")
	}
	if e.Workflow == "" {
		return nil
	}
	v.listed++
	found, err = v.store.Get(v.ctx, v.workflowKey(e.Workflow, v.id, index))
	switch {
	case errors.Is(err, store.ErrNotFound):
		t.fault(index, "not in its workflow's list")
	case err != nil:
		return err
	case len(found.Value) != 0:
		t.fault(index, "its place in its workflow's list was altered")
	}
	return nil
}
