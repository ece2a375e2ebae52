package ledger

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strconv"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// An export is lines of text, each ended by a newline: a title, the signed head, one
// line for each entry in its order, and the number of them. Binary values are in
// standard base64, padded.
//
//	agent-guard ledger export 1
//	head BASE64 OF THE SIGNED NOTE
//	entry BASE64 OF THE LEAF
//	pruned BASE64 OF THE LEAF HASH
//	end 2
const (
	exportTitle  = "agent-guard ledger export 1"
	exportHead   = "head "
	exportEntry  = "entry "
	exportPruned = "pruned "
	exportEnd    = "end "
)

var exportBase64 = base64.StdEncoding.Strict()

// Export writes the whole log under its newest head, in the clear: whoever has the
// stream reads every event. It proves all of it against the head on the way.
func (l *Log) Export(ctx context.Context, to io.Writer) (Head, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	s := l.now.Load()
	w := bufio.NewWriterSize(to, 64<<10)
	fmt.Fprintf(w, "%s\n", exportTitle)
	line(w, exportHead, s.head.Note)
	var tree frontier
	next := int64(0)
	fill := func(to int64) error {
		for ; next < to; next++ {
			hash, err := l.prunedHash(ctx, s, next)
			if err != nil {
				return err
			}
			tree.add(hash, nil)
			line(w, exportPruned, hash[:])
		}
		return nil
	}
	r := l.entries(0, 0)
	r.To = l.entryKey(s.size)
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return Head{}, err
		}
		if err := fill(indexIn(found.Key)); err != nil {
			return Head{}, err
		}
		e, err := l.openEntry(found.Key, found.Value)
		if err != nil {
			return Head{}, err
		}
		tree.add(tlog.RecordHash(e.Leaf), nil)
		if line(w, exportEntry, e.Leaf) != nil {
			break
		}
		next++
	}
	if err := fill(s.size); err != nil {
		return Head{}, err
	}
	if tree.root() != s.head.Root {
		return Head{}, fmt.Errorf("%w: the entries do not fit the signed head of size %d", ErrTampered, s.size)
	}
	fmt.Fprintf(w, "%s%d\n", exportEnd, s.size)
	return s.head, w.Flush()
}

func line(w *bufio.Writer, kind string, value []byte) error {
	_, err := w.WriteString(kind + exportBase64.EncodeToString(value) + "\n")
	return err
}

// prunedHash is the leaf hash of an entry that is not there any more.
func (l *Log) prunedHash(ctx context.Context, s *state, index int64) (tlog.Hash, error) {
	if err := l.absent(ctx, l.id, index); !errors.Is(err, ErrPruned) {
		return tlog.Hash{}, err
	}
	hashes, err := l.storedTile(ctx, 0, index>>tileHeight)
	if err != nil {
		return tlog.Hash{}, err
	}
	if len(hashes) != tileWidth {
		return tlog.Hash{}, fmt.Errorf("%w: the stored hash of entry %d is missing", ErrTampered, index)
	}
	return hashes[index&(tileWidth-1)], nil
}

// Exported is what VerifyExport found to be proved.
type Exported struct {
	// Head is the signed head that everything was proved against.
	Head Head
	// Entries and Pruned count the entries with and without their content.
	Entries, Pruned int64
}

// maxLine is the longest line of an export: a leaf in base64, or a head.
const maxLine = (maxLeaf+2)/3*4 + 16

// VerifyExport reads an export of the log called origin and proves it against its
// head, which one of keys must have signed, and against heads that are known from
// elsewhere. visit, if any, gets the entries that have their content, in their order;
// what it gets is proved only when VerifyExport returns without an error. Whether an
// entry without its content was pruned by the log, or emptied by whoever handed the
// export on, cannot be told. The error is ErrProof unless reading or visit failed.
func VerifyExport(from io.Reader, origin string, keys note.Verifiers, visit func(Entry) error, known ...Head) (Exported, error) {
	r := exportReader{r: bufio.NewReaderSize(from, maxLine)}
	title, err := r.line()
	if err != nil {
		return Exported{}, err
	}
	if string(title) != exportTitle {
		return Exported{}, fmt.Errorf("%w: not an export, or one of another version", ErrProof)
	}
	kind, value, err := r.next()
	if err != nil {
		return Exported{}, err
	}
	if kind != exportHead {
		return Exported{}, fmt.Errorf("%w: no head", ErrProof)
	}
	var x Exported
	if x.Head, err = ParseHead(value, origin, keys); err != nil {
		return Exported{}, err
	}
	var tree frontier
	for {
		if err := compare(&tree, known); err != nil {
			return Exported{}, err
		}
		kind, value, err := r.next()
		if err != nil {
			return Exported{}, err
		}
		if kind == exportEnd {
			return x, r.end(&tree, x.Head, value, known)
		}
		if err := x.take(&tree, kind, value, visit); err != nil {
			return Exported{}, err
		}
	}
}

// take takes the line of one entry into the tree.
func (x *Exported) take(tree *frontier, kind string, value []byte, visit func(Entry) error) error {
	index := tree.size
	switch {
	case index >= x.Head.Size:
		return fmt.Errorf("%w: entry %d stands behind the head", ErrProof, index)
	case kind == exportPruned && len(value) == tlog.HashSize:
		x.Pruned++
		tree.add(tlog.Hash(value), nil)
		return nil
	case kind != exportEntry:
		return fmt.Errorf("%w: entry %d: not the line of an entry", ErrProof, index)
	}
	e, err := decode(value)
	if err != nil {
		return fmt.Errorf("%w: entry %d: %w", ErrProof, index, err)
	}
	if e.Index != index {
		return fmt.Errorf("%w: entry %d: reordered: entry %d stands here", ErrProof, index, e.Index)
	}
	x.Entries++
	tree.add(tlog.RecordHash(value), nil)
	if visit == nil {
		return nil
	}
	e.Log = x.Head.Origin
	return visit(e)
}

func compare(tree *frontier, known []Head) error {
	for i := range known {
		if known[i].Size == tree.size && known[i].Root != tree.root() {
			return fmt.Errorf("%w: the first %d entries are not those of the known head of that size", ErrProof, tree.size)
		}
	}
	return nil
}

type exportReader struct {
	r *bufio.Reader
	n int
}

func (r *exportReader) line() ([]byte, error) {
	r.n++
	line, err := r.r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, fmt.Errorf("%w: line %d is too long", ErrProof, r.n)
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("%w: it ends in line %d", ErrProof, r.n)
	case err != nil:
		return nil, err
	}
	return line[:len(line)-1], nil
}

// next is the kind of the next line, and its value: decoded, but for the end.
func (r *exportReader) next() (kind string, value []byte, err error) {
	line, err := r.line()
	if err != nil {
		return "", nil, err
	}
	for _, kind := range []string{exportEntry, exportPruned, exportHead, exportEnd} {
		if len(line) <= len(kind) || string(line[:len(kind)]) != kind {
			continue
		}
		text := line[len(kind):]
		if kind == exportEnd {
			return kind, text, nil
		}
		value := make([]byte, exportBase64.DecodedLen(len(text)))
		n, err := exportBase64.Decode(value, text)
		// Carriage returns are passed over in decoding.
		if err != nil || exportBase64.EncodedLen(n) != len(text) {
			return "", nil, fmt.Errorf("%w: line %d is not base64", ErrProof, r.n)
		}
		return kind, value[:n], nil
	}
	return "", nil, fmt.Errorf("%w: line %d is of no known kind", ErrProof, r.n)
}

// end holds that the tree is whole, and that nothing follows.
func (r *exportReader) end(tree *frontier, head Head, count []byte, known []Head) error {
	switch {
	case string(count) != strconv.FormatInt(head.Size, 10) || tree.size != head.Size:
		return fmt.Errorf("%w: %d entries instead of %d", ErrProof, tree.size, head.Size)
	case tree.root() != head.Root:
		return fmt.Errorf("%w: the entries do not fit the signed head of size %d", ErrProof, head.Size)
	}
	for i := range known {
		if known[i].Size > head.Size {
			return fmt.Errorf("%w: %d entries, and there were %d", ErrProof, head.Size, known[i].Size)
		}
	}
	if _, err := r.r.ReadByte(); err == nil {
		return fmt.Errorf("%w: something follows the end", ErrProof)
	} else if !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
