package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Fault is one thing that is not as it was written.
type Fault struct {
	// Index is the entry that it concerns, or the first of several; -1 is none.
	Index int64
	// What is wrong.
	What string
}

func (f Fault) String() string {
	if f.Index < 0 {
		return f.What
	}
	return fmt.Sprintf("entry %d: %s", f.Index, f.What)
}

// maxFaults is the largest number of faults of one report.
const maxFaults = 1000

// Report is what Verify found.
type Report struct {
	// Head is the signed head that stands in the store.
	Head Head
	// Entries, Pruned and Waiting count the entries that are there, those that were
	// pruned, and the events that wait for the sequencer.
	Entries, Pruned, Waiting int64
	// Faults are the first 1,000 things that are wrong; Count is the number of all.
	Faults []Fault
	Count  int
}

// Err is nil for a log without faults, else ErrTampered with the first of them.
func (r *Report) Err() error {
	if r.Count == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d faults: %s", ErrTampered, r.Count, r.Faults[0])
}

// Verify reads the whole log from the store and names what is not as it was written:
// every entry against its hash and its place, every stored hash against those below
// it, the root against the signed head, the indexes against the entries. known are
// heads that were seen before: the tree must have grown out of each of them.
//
// An error says that the store did not answer; what is wrong is in the report.
func (l *Log) Verify(ctx context.Context, known ...Head) (Report, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	known = append([]Head{l.Head()}, known...)
	return l.verify(ctx, append(known, l.options.Known...))
}

// Verify is Log.Verify for a log that is not open, and may not open any more. It
// writes nothing, and needs no signer.
func Verify(ctx context.Context, o Options, known ...Head) (Report, error) {
	if err := o.complete(); err != nil {
		return Report{}, err
	}
	return newShelf(&o).verify(ctx, append(known, o.Known...))
}

// verifier walks through a log once.
type verifier struct {
	*shelf
	ctx    context.Context
	report Report
	signed bool // the head holds
	tree   frontier
	known  []Head
	roots  []tlog.Hash // of the full tiles of the level below
	listed int64       // entries that must be in the workflows' index
}

func (s *shelf) verify(ctx context.Context, known []Head) (Report, error) {
	v := &verifier{shelf: s, ctx: ctx, known: known}
	steps := []func() error{v.head, v.entriesAndTiles, v.upperTiles, v.end, v.accounts, v.workflows, v.outbox}
	for _, step := range steps {
		if err := step(); err != nil {
			return v.report, err
		}
	}
	return v.report, nil
}

func (v *verifier) fault(index int64, format string, args ...any) {
	v.report.Count++
	if len(v.report.Faults) < maxFaults {
		v.report.Faults = append(v.report.Faults, Fault{index, fmt.Sprintf(format, args...)})
	}
}

// head reads the head. Without one that holds, the log is as long as its last entry
// says, so that the rest can be looked at all the same.
func (v *verifier) head() error {
	head, version, err := v.storedHead(v.ctx)
	switch {
	case errors.Is(err, ErrTampered):
		v.fault(-1, "%s", err)
	case err != nil:
		return err
	case version != 0:
		v.signed = true
		v.report.Head = head
		return nil
	}
	if err := v.guessSize(); err != nil {
		return err
	}
	if v.report.Head.Size > 0 && v.report.Count == 0 {
		v.fault(-1, "the signed head is missing")
	}
	return nil
}

// guessSize takes the log to be as long as its last entry says, unless that is out of
// all proportion to what is there.
func (v *verifier) guessSize() error {
	last, there := int64(0), int64(0)
	for e, err := range v.store.Scan(v.ctx, store.Prefix(logKey(spaceEntry, v.id, 0))) {
		if err != nil {
			return err
		}
		last = max(last, indexIn(e.Key))
		there++
	}
	for _, err := range v.store.Scan(v.ctx, store.Prefix(logKey(spacePruned, v.id, 0))) {
		if err != nil {
			return err
		}
		there += tileWidth
	}
	if there > 0 {
		v.report.Head.Size = min(last, 2*there+tileWidth) + 1
	}
	return nil
}

// entriesAndTiles reads all entries, by tiles of level 0.
func (v *verifier) entriesAndTiles() error {
	size := v.report.Head.Size
	for n := int64(0); n<<tileHeight < size; n++ {
		t := leaves{v: v, first: n << tileHeight, n: n, width: min(tileWidth, size-n<<tileHeight)}
		if err := t.verify(); err != nil {
			return err
		}
	}
	return nil
}

// upperTiles compares the tiles above level 0 with those below them.
func (v *verifier) upperTiles() error {
	for level := 1; len(v.roots) > 0; level++ {
		var above []tlog.Hash
		for n := 0; n<<tileHeight < len(v.roots); n++ {
			want := v.roots[n<<tileHeight:]
			want = want[:min(len(want), tileWidth)]
			stored, err := v.storedTile(v.ctx, level, int64(n))
			if err != nil {
				return err
			}
			// A log that is in use may have more by now.
			if len(stored) < len(want) || len(stored) > tileWidth {
				v.fault(int64(n)<<((level+1)*tileHeight), "the stored hashes of level %d from here on are missing", level)
			}
			for i := range min(len(want), len(stored)) {
				if stored[i] != want[i] {
					at := (int64(n)<<tileHeight + int64(i)) << (level * tileHeight)
					v.fault(at, "a stored hash of level %d does not fit the entries from here on", level)
				}
			}
			if len(want) == tileWidth {
				above = append(above, rootOf(want))
			}
		}
		v.roots = above
	}
	return nil
}

// leaf takes the next leaf hash into the tree.
func (v *verifier) leaf(h tlog.Hash) {
	v.compareKnown()
	v.tree.add(h, nil)
}

func (v *verifier) compareKnown() {
	for i := range v.known {
		if k := &v.known[i]; k.Size == v.tree.size && v.tree.root() != k.Root {
			v.fault(-1, "the first %d entries are not those of the known head of that size", k.Size)
		}
	}
}

// end compares the whole tree with the heads, and looks behind its end.
func (v *verifier) end() error {
	v.compareKnown()
	head := &v.report.Head
	for i := range v.known {
		if k := &v.known[i]; k.Size > v.tree.size {
			v.fault(-1, "the log has %d entries and had %d", v.tree.size, k.Size)
		}
	}
	if v.signed && v.tree.root() != head.Root {
		v.fault(-1, "the entries do not fit the signed head of size %d", head.Size)
	}
	r := v.entries(head.Size, 1)
	r.Reverse = true
	for e, err := range v.store.Scan(v.ctx, r) {
		if err != nil {
			return err
		}
		return v.behind(indexIn(e.Key), "stands ")
	}
	return nil
}

// behind holds that an index which is not below the size of the head is one of a log
// that has grown meanwhile.
func (v *verifier) behind(index int64, what string) error {
	now, _, err := v.storedHead(v.ctx)
	if errors.Is(err, ErrTampered) || err == nil && (index < 0 || now.Size <= index) {
		v.fault(index, "%sbehind the signed head", what)
		return nil
	}
	return err
}

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
		return
	}
	t.fault(index, "missing")
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
