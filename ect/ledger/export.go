package ledger

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"

	"golang.org/x/mod/sumdb/tlog"
)

// An export is lines of text, each ended by a newline: a title, the signed head, one
// line for each entry in its order, and the number of them. Before the entries of a
// tile of which some were pruned stands the signed note that says which. Binary values
// are in standard base64, padded.
//
//	agent-guard ledger export 1
//	head BASE64 OF THE SIGNED NOTE
//	entry BASE64 OF THE LEAF
//	gaps BASE64 OF THE SIGNED NOTE
//	pruned BASE64 OF THE LEAF HASH
//	end 2
const (
	exportTitle  = "agent-guard ledger export 1"
	exportHead   = "head "
	exportEntry  = "entry "
	exportGaps   = "gaps "
	exportPruned = "pruned "
	exportEnd    = "end "
)

var exportBase64 = base64.StdEncoding.Strict()

// Export writes the whole log under its newest head, in the clear: whoever has the
// stream reads every event. It proves all of it against the head on the way.
func (l *Log) Export(ctx context.Context, to io.Writer) (Head, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	x := exporter{Log: l, ctx: ctx, state: l.now.Load(), w: bufio.NewWriterSize(to, 64<<10)}
	head := x.state.head
	fmt.Fprintf(x.w, "%s\n", exportTitle)
	line(x.w, exportHead, head.Note)
	r := l.entries(0, 0)
	r.To = l.entryKey(head.Size)
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return Head{}, err
		}
		if err := x.fill(indexIn(found.Key)); err != nil {
			return Head{}, err
		}
		e, err := l.openEntry(found.Key, found.Value)
		if err != nil {
			return Head{}, err
		}
		if err := x.begin(); err != nil {
			return Head{}, err
		}
		x.tree.add(tlog.RecordHash(e.Leaf), nil)
		if line(x.w, exportEntry, e.Leaf) != nil {
			break
		}
	}
	if err := x.fill(head.Size); err != nil {
		return Head{}, err
	}
	if x.tree.root() != head.Root {
		return Head{}, fmt.Errorf("%w: the entries do not fit the signed head of size %d", ErrTampered, head.Size)
	}
	fmt.Fprintf(x.w, "%s%d\n", exportEnd, head.Size)
	return head, x.w.Flush()
}

// exporter is on its way through a log.
type exporter struct {
	*Log
	ctx    context.Context
	state  *state
	w      *bufio.Writer
	tree   frontier
	marks  marks       // of the tile in which the next entry stands
	hashes []tlog.Hash // of that tile, once one was needed
}

// begin writes, before the first entry of a full tile, the note of what was pruned of it.
func (x *exporter) begin() error {
	if x.tree.size&(tileWidth-1) != 0 {
		return nil
	}
	m, msg, version, err := x.prunedNote(x.ctx, x.tree.size>>tileHeight)
	if err != nil {
		return err
	}
	x.marks, x.hashes = m, nil
	if version == 0 {
		return nil
	}
	return line(x.w, exportGaps, msg)
}

// fill writes the hashes of the entries before index that are not there any more.
func (x *exporter) fill(index int64) error {
	for x.tree.size < index {
		at := x.tree.size
		if err := x.begin(); err != nil {
			return err
		}
		if !x.marks.has(at) {
			return fmt.Errorf("%w: entry %d is missing", ErrTampered, at)
		}
		if x.hashes == nil {
			var err error
			if x.hashes, err = x.storedTile(x.ctx, 0, at>>tileHeight); err != nil {
				return err
			}
			if len(x.hashes) != tileWidth {
				return fmt.Errorf("%w: the stored hash of entry %d is missing", ErrTampered, at)
			}
		}
		hash := x.hashes[at&(tileWidth-1)]
		x.tree.add(hash, nil)
		if err := line(x.w, exportPruned, hash[:]); err != nil {
			return err
		}
	}
	return nil
}

func line(w *bufio.Writer, kind string, value []byte) error {
	_, err := w.WriteString(kind + exportBase64.EncodeToString(value) + "\n")
	return err
}
