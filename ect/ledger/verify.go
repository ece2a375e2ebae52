package ledger

import (
	"context"
	"errors"
	"fmt"

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
	// Vouchers are the keys that vouched for what was pruned, of which each entry is
	// counted once.
	Vouchers []Voucher
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
