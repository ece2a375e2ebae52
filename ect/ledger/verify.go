package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Fault is one alteration that Verify found.
type Fault struct {
	// Index is the altered entry, or the first of several; nil if the fault is of no entry.
	Index *int64 `json:"index,omitempty"`
	// What describes the fault.
	What string `json:"what"`
}

// maxFaults is the largest number of faults of one report.
const maxFaults = 1000

// Report is the result of Verify.
type Report struct {
	Contents
	// Faults are the first 1,000 alterations; Count is the total number.
	Faults []Fault `json:"faults"`
	Count  int     `json:"count"`
}

// verifier walks through a log once.
type verifier struct {
	*logStore
	ctx    context.Context
	report Report
	signed bool // the head is valid
	tree   merkleState
	known  []Head
	roots  []tlog.Hash // of the full tiles of the level below
	listed int64       // entries that must be in the workflows' index
}

func (s *logStore) verify(ctx context.Context, known []Head) (Report, error) {
	v := &verifier{logStore: s, ctx: ctx, known: known, report: Report{Faults: []Fault{}}}
	steps := []func() error{v.head, v.entriesAndTiles, v.upperTiles, v.end, v.locations, v.workflows, v.signatures}
	for _, step := range steps {
		if err := step(); err != nil {
			return v.report, err
		}
	}
	return v.report, nil
}

// fault adds one of an entry, or with a negative index of none.
func (v *verifier) fault(index int64, format string, args ...any) {
	v.report.Count++
	if len(v.report.Faults) < maxFaults {
		f := Fault{What: fmt.Sprintf(format, args...)}
		if index >= 0 {
			f.Index = &index
		}
		v.report.Faults = append(v.report.Faults, f)
	}
}

// head reads the head. If it is not valid, the size is guessed from the last entry, so that
// the rest can still be checked.
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

// guessSize derives the size from the index of the last entry. It ignores indexes that are
// far greater than the number of entries.
func (v *verifier) guessSize() error {
	last, there := int64(0), int64(0)
	for e, err := range v.scan(v.ctx, store.Prefix(logKey(spaceEntry, v.id, 0))) {
		if err != nil && !errors.Is(err, store.ErrDamaged) {
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
	for n := int64(0); n<<tileHeight < size; {
		report, listed := v.report, v.listed
		report.Vouchers = slices.Clone(report.Vouchers)
		t := leafTile{v: v, first: n << tileHeight, n: n, width: min(tileWidth, size-n<<tileHeight)}
		if err := t.read(); err != nil {
			return err
		}
		now, err := v.storedMarks(v.ctx, n)
		if err := v.storeError(err); err != nil {
			return err
		}
		if now.version != t.marks.version { // another process has pruned entries of this tile
			v.report, v.listed = report, listed
			continue
		}
		t.verify()
		n++
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
			// The log may have grown meanwhile.
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

// leaf adds the next leaf hash to the tree.
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

// end compares the tree with the heads, and looks for entries beyond its end.
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
	for e, err := range v.store.Scan(v.ctx, v.above(head.Size)) {
		if err != nil && !errors.Is(err, store.ErrDamaged) {
			return err
		}
		return v.behind(indexIn(e.Key), "stands ")
	}
	return nil
}

// behind reports a fault for an index beyond the head, unless the log has grown meanwhile.
func (v *verifier) behind(index int64, what string) error {
	err := v.below(v.ctx, index)
	if errors.Is(err, ErrTampered) {
		v.fault(index, "%sbehind the signed head", what)
		return nil
	}
	return err
}

// leafTile is one tile of level 0 with its entries.
type leafTile struct {
	v      *verifier
	first  int64
	n      int64
	width  int64
	marks  marks
	next   int64 // the smallest KeepUntil of the entries with content
	stored []tlog.Hash
	made   []tlog.Hash // from the entries, or stored for absent ones
}

// read reads the tile and checks its entries.
func (t *leafTile) read() error {
	v := t.v
	var err error
	if t.marks, err = v.pruned(v.ctx, t.n); errors.Is(err, ErrTampered) {
		v.fault(t.first, "%s", err)
	} else if err != nil {
		return err
	}
	if t.width == tileWidth {
		if t.stored, err = v.storedTile(v.ctx, 0, t.n); err != nil {
			return err
		}
		if len(t.stored) != tileWidth {
			v.fault(t.first, "the stored hashes of the %d entries from here on are missing", tileWidth)
			t.stored = nil
		}
	}
	t.next = math.MaxInt64
	return t.walk()
}

// verify adds the tile to the tree.
func (t *leafTile) verify() {
	v := t.v
	if t.marks.next != 0 && t.marks.next != t.next {
		v.fault(t.first, "the marks of what was pruned of the entries from here on do not fit")
	}
	for _, h := range t.made {
		v.leaf(h)
	}
	if t.marks.by != "" && v.tree.root() != t.marks.root {
		v.fault(t.first, "the note of what was pruned of the entries from here on is of another tree")
	}
	if t.width == tileWidth {
		v.roots = append(v.roots, rootOf(t.made))
	}
}

// walk checks the entries of the tile in their order.
func (t *leafTile) walk() error {
	index := t.first
	for found, err := range t.v.scan(t.v.ctx, t.v.entries(t.first, t.first+t.width)) {
		if err != nil && !errors.Is(err, store.ErrDamaged) {
			return err
		}
		if len(found.Key) != logKeySize+indexEnd {
			continue
		}
		for ; index < indexIn(found.Key); index++ {
			t.absent(index)
		}
		if err := t.present(index, found, err); err != nil {
			return err
		}
		index++
	}
	for ; index < t.first+t.width; index++ {
		t.absent(index)
	}
	return nil
}

// storedHash returns the stored hash of an entry; zero if there is none.
func (t *leafTile) storedHash(index int64) tlog.Hash {
	if t.stored == nil {
		return tlog.Hash{}
	}
	return t.stored[index-t.first]
}

func (t *leafTile) absent(index int64) {
	t.made = append(t.made, t.storedHash(index))
	if t.marks.has(index) {
		t.v.report.Pruned++
		(*vouchers)(&t.v.report.Vouchers).add(t.marks.by)
		return
	}
	t.v.fault(index, "missing, and nobody vouches that it was pruned")
}

// present checks a stored entry; damaged is the store's error if it could not read its value.
func (t *leafTile) present(index int64, found store.Entry, damaged error) error {
	v := t.v
	v.report.Entries++
	if t.marks.has(index) {
		t.v.fault(index, "there, and marked as pruned")
	}
	var leaf []byte
	err := damaged
	if err == nil {
		leaf, err = v.openLeaf(found.Key, found.Value)
	}
	if err != nil {
		t.v.fault(index, "does not open: %s", err)
		t.made = append(t.made, t.storedHash(index))
		return nil
	}
	hash := tlog.RecordHash(leaf)
	t.made = append(t.made, hash)
	if t.stored != nil && hash != t.stored[index-t.first] {
		t.v.fault(index, "does not fit its stored hash")
	}
	e, err := decode(leaf)
	if err != nil {
		t.v.fault(index, "cannot be read")
		return nil
	}
	if e.Index != index {
		t.v.fault(index, "reordered: entry %d stands here", e.Index)
	}
	if !e.KeepUntil.IsZero() {
		t.next = min(t.next, e.KeepUntil.UnixNano())
	}
	return t.indexes(index, &e, hash)
}

// indexes compares the index keys of an entry with it.
func (t *leafTile) indexes(index int64, e *Entry, hash tlog.Hash) error {
	v := t.v
	at := location{log: v.id, index: index, check: checkOf(hash)}
	if err := t.checkKey(index, v.idKey(e.Workflow, e.ID), at.encode(nil), "not to be found by its id", "does not fit what stands under its id"); err != nil || e.Workflow == "" {
		return err
	}
	v.listed++
	if err := t.checkKey(index, v.workflowKey(e.Workflow, v.id, index), nil, "not in its workflow's list", "its place in its workflow's list was altered"); err != nil {
		return err
	}
	for _, key := range v.linkKeys(&e.Event, index) {
		if err := t.checkKey(index, key, nil, "not to be found by what it follows from", "its place behind what it follows from was altered"); err != nil {
			return err
		}
	}
	return nil
}

func (t *leafTile) checkKey(index int64, key, value []byte, missing, altered string) error {
	found, err := t.v.store.Get(t.v.ctx, key)
	switch {
	case errors.Is(err, store.ErrNotFound):
		t.v.fault(index, "%s", missing)
	case err != nil:
		return err
	case !bytes.Equal(found.Value, value):
		t.v.fault(index, "%s", altered)
	}
	return nil
}

// locations checks the index of ids.
func (v *verifier) locations() error {
	return v.index(spaceID, v.report.Entries, "an id leads here, ", "an id leads here that is not the entry's",
		func(found store.Entry, first bool) (index int64, mine bool) {
			at, ok := decodeLocation(found.Value)
			ok = ok && len(found.Key) == idKeySize
			if !ok && first {
				v.fault(-1, "what stands under an id cannot be read")
			}
			return at.index, ok && at.log == v.id
		},
		func(e *Entry, _ int64) []byte { return v.idKey(e.Workflow, e.ID) })
}

// workflows checks the index of workflows.
func (v *verifier) workflows() error {
	return v.index(spaceWorkflow, v.listed, "stands in a workflow's list, ", "stands in the list of a workflow that is not its own",
		func(found store.Entry, _ bool) (index int64, mine bool) {
			if len(found.Key) != 2+idHash+16 {
				return 0, false
			}
			return indexIn(found.Key), logID(found.Key[2+idHash:][:8]) == v.id
		},
		func(e *Entry, index int64) []byte {
			if e.Workflow == "" {
				return nil
			}
			return v.workflowKey(e.Workflow, v.id, index)
		})
}

// index looks for keys of this log that do not lead to a matching entry. leafTile.indexes
// has already found the key of every entry, so if the number of keys is want, there are no
// others. Only otherwise the second pass reads the entry of each key. at returns the index
// in a key; first is set on the first pass.
func (v *verifier) index(kind byte, want int64, beyond, wrong string,
	at func(found store.Entry, first bool) (index int64, mine bool), key func(e *Entry, index int64) []byte,
) error {
	n := int64(0)
	for found, err := range v.store.Scan(v.ctx, store.Prefix([]byte{space, kind})) {
		if err != nil {
			return err
		}
		index, mine := at(found, true)
		if mine && index >= v.report.Head.Size {
			err = v.behind(index, beyond)
		} else if mine {
			n++
		}
		if err != nil {
			return err
		}
	}
	if n == want {
		return nil
	}
	for found, err := range v.store.Scan(v.ctx, store.Prefix([]byte{space, kind})) {
		if err != nil {
			return err
		}
		index, mine := at(found, false)
		if !mine || index >= v.report.Head.Size {
			continue
		}
		e, err := v.read(v.ctx, v.id, index)
		if err := v.storeError(err); err != nil {
			return err
		}
		if err == nil && bytes.Equal(key(&e, index), found.Key) {
			continue
		}
		if err := v.stale(found, index, wrong); err != nil {
			return err
		}
	}
	return nil
}

// stale reports a fault for a value without its entry, unless both were pruned since the value was read.
func (v *verifier) stale(found store.Entry, index int64, what string) error {
	now, err := v.store.Get(v.ctx, found.Key)
	if now.Version == found.Version {
		v.fault(index, "%s", what)
	}
	return v.storeError(err)
}

// storeError returns only errors of the store; those about its content are faults.
func (v *verifier) storeError(err error) error {
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, ErrTampered) {
		return nil
	}
	return err
}
