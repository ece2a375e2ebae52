package ledger

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// An export is text: a title, the signed head, one line for each entry in order, and the
// number of entries. A signed note before the entries of a tile lists the pruned ones. An
// entry whose leaf has the header and the payload of its token follows its signature. Binary
// values are in standard base64 with padding.
//
//	agent-guard ledger export 2
//	head BASE64 OF THE SIGNED NOTE
//	entry BASE64 OF THE LEAF
//	signature BASE64 OF THE SIGNATURE OF THE NEXT ENTRY'S TOKEN
//	entry BASE64 OF THE LEAF
//	gaps BASE64 OF THE SIGNED NOTE
//	pruned BASE64 OF THE LEAF HASH
//	end 2
const (
	exportTitle     = "agent-guard ledger export 2"
	exportHead      = "head "
	exportEntry     = "entry "
	exportSignature = "signature "
	exportGaps      = "gaps "
	exportPruned    = "pruned "
	exportEnd       = "end "
)

var exportBase64 = base64.StdEncoding.Strict()

type exporter struct {
	*Log
	state  *state
	ctx    context.Context
	w      *bufio.Writer
	tree   merkleState
	marks  marks       // of the tile of the next entry
	hashes []tlog.Hash // of that tile, once needed
	proven []tlog.Hash // the same, of the entries below the head, proved
}

func (x *exporter) export() (Head, error) {
	head := x.state.head
	fmt.Fprintf(x.w, "%s\n", exportTitle)
	line(x.w, exportHead, head.Note)
	for found, err := range x.store.Scan(x.ctx, x.entries(0, head.Size)) {
		if err != nil {
			return Head{}, damagedAt(found.Key, err)
		}
		if err := x.fill(indexIn(found.Key)); err != nil {
			return Head{}, err
		}
		e, err := x.openEntry(found.Key, found.Value)
		if err != nil {
			return Head{}, err
		}
		if err := x.begin(); err != nil {
			return Head{}, err
		}
		if x.marks.has(x.tree.size) {
			_, err := x.store.Get(x.ctx, found.Key)
			if errors.Is(err, store.ErrNotFound) { // another process has pruned it since the scan began
				if err := x.gap(); err != nil {
					return Head{}, err
				}
				continue
			}
		}
		if err := x.signature(&e); err != nil {
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

// signature writes the line of the signature of an entry that has none in its leaf.
func (x *exporter) signature(e *Entry) (err error) {
	if e.Header == nil {
		return nil
	}
	if e.Index != x.tree.size {
		return fmt.Errorf("%w: entry %d stands at %d", ErrTampered, e.Index, x.tree.size)
	}
	if x.proven == nil {
		if x.proven, err = x.leaves(x.ctx, x.state, e.Index&^(tileWidth-1), (e.Index|(tileWidth-1))+1); err != nil && !errors.Is(err, ErrTampered) {
			return err
		}
		if err != nil { // the root of the export proves the entries, but only at its end
			x.options.Logger.Error("entries are exported without signatures that would have to be made", slog.Int64("from", e.Index),
				slog.Int64("below", (e.Index|(tileWidth-1))+1), slog.Any("error", err))
			x.proven = []tlog.Hash{}
		}
	}
	var signature []byte
	if len(x.proven) == 0 {
		signature, err = x.storedSignature(x.ctx, e)
	} else {
		signature, err = x.signProven(x.ctx, e, x.proven[e.Index&(tileWidth-1)])
	}
	if errors.Is(err, ErrNoToken) {
		return nil
	}
	if err != nil {
		return err
	}
	return line(x.w, exportSignature, signature)
}

// begin writes the note of the pruned entries before the first entry of a full tile.
func (x *exporter) begin() (err error) {
	if x.tree.size&(tileWidth-1) != 0 {
		return nil
	}
	x.hashes, x.proven = nil, nil
	if x.marks, err = x.pruned(x.ctx, x.tree.size>>tileHeight); err != nil || x.marks.version == 0 {
		return err
	}
	return line(x.w, exportGaps, x.marks.note)
}

// fill writes the hashes of the pruned entries before index.
func (x *exporter) fill(index int64) error {
	for x.tree.size < index {
		at := x.tree.size
		if err := x.begin(); err != nil {
			return err
		}
		if !x.marks.has(at) {
			return fmt.Errorf("%w: entry %d is missing", ErrTampered, at)
		}
		if err := x.gap(); err != nil {
			return err
		}
	}
	return nil
}

// gap writes the hash of the next entry, which was pruned.
func (x *exporter) gap() (err error) {
	at := x.tree.size
	if x.hashes == nil {
		if x.hashes, err = x.storedTile(x.ctx, 0, at>>tileHeight); err != nil {
			return err
		}
		if len(x.hashes) != tileWidth {
			return fmt.Errorf("%w: the stored hash of entry %d is missing", ErrTampered, at)
		}
	}
	hash := x.hashes[at&(tileWidth-1)]
	x.tree.add(hash, nil)
	return line(x.w, exportPruned, hash[:])
}

func line(w *bufio.Writer, kind string, value []byte) error {
	_, err := w.WriteString(kind + exportBase64.EncodeToString(value) + "\n")
	return err
}

// Contents are what a log, or an export of it, was found to have. Their JSON is an API.
type Contents struct {
	// Head is the signed head.
	Head
	// Entries and Pruned count the entries with and without their content.
	Entries int64 `json:"entries"`
	Pruned  int64 `json:"pruned"` // see Entries
	// Vouchers are the keys that signed the notes of pruned entries.
	Vouchers []Voucher `json:"vouchers,omitempty"`
}

// maxLine is the longest line of an export: a leaf in base64, or a head.
const maxLine = (maxLeaf+2)/3*4 + 16

// VerifyExport reads an export of the log called origin and verifies it against its head,
// which one of keys must have signed, and against known heads. The signatures of tokens are not
// verified here. Signed notes must list the
// entries without content. visit, if not nil, gets the others in order, with their tokens as
// payload; an entry that keeps its Header has no signature. They are proved only when VerifyExport has returned without an error. The error is ErrProof, or that of from or
// visit.
func VerifyExport(from io.Reader, origin string, keys note.Verifiers, visit func(Entry) error, known ...Head) (Contents, error) {
	r := exportReader{r: bufio.NewReaderSize(from, maxLine)}
	title, err := r.line()
	if err != nil {
		return Contents{}, err
	}
	if string(title) != exportTitle {
		return Contents{}, fmt.Errorf("%w: not an export, or one of another version", ErrProof)
	}
	kind, value, err := r.next()
	if err != nil {
		return Contents{}, err
	}
	if kind != exportHead {
		return Contents{}, fmt.Errorf("%w: no head", ErrProof)
	}
	var x Contents
	if x.Head, err = ParseHead(value, origin, keys); err != nil {
		return Contents{}, err
	}
	t := exportVerifier{x: &x, visit: visit, origin: origin, keys: keys}
	tree := &t.tree
	for {
		for i := range known {
			if known[i].Size == tree.size && known[i].Root != tree.root() {
				return Contents{}, fmt.Errorf("%w: the first %d entries are not those of the known head of that size", ErrProof, tree.size)
			}
		}
		kind, value, err := r.next()
		if err != nil {
			return Contents{}, err
		}
		if kind == exportEnd {
			if t.signature != nil {
				return Contents{}, fmt.Errorf("%w: a signature without an entry", ErrProof)
			}
			return x, r.end(tree, x.Head, value, known)
		}
		if err := t.take(kind, value); err != nil {
			return Contents{}, err
		}
	}
}

// exportVerifier adds the lines of an export to the tree.
type exportVerifier struct {
	x      *Contents
	tree   merkleState
	visit  func(Entry) error
	origin string
	keys   note.Verifiers
	marks  marks // of the tile of the next entry
	noted  bool  // the previous line was the note of the tile

	signature []byte // the previous line, for the entry of the next one
}

// take handles the line of an entry, or the note of the pruned ones among those that follow.
func (t *exportVerifier) take(kind string, value []byte) error {
	index := t.tree.size
	if index >= t.x.Head.Size {
		return fmt.Errorf("%w: entry %d stands behind the head", ErrProof, index)
	}
	if t.signature != nil && kind != exportEntry {
		return fmt.Errorf("%w: entry %d: a signature belongs to an entry", ErrProof, index)
	}
	if kind == exportSignature {
		if len(value) == 0 || len(value) > maxSignature {
			return fmt.Errorf("%w: entry %d: a signature of %d bytes", ErrProof, index, len(value))
		}
		t.signature = value
		return nil
	}
	begins := index&(tileWidth-1) == 0
	if kind == exportGaps {
		if !begins || t.noted {
			return fmt.Errorf("%w: entry %d: a note of what was pruned does not belong here", ErrProof, index)
		}
		n, m, err := openMarks(value, t.origin, t.keys)
		if err == nil && (n != index>>tileHeight || (n+1)<<tileHeight > t.x.Head.Size) {
			err = fmt.Errorf("%w: it is of tile %d", ErrProof, n)
		}
		if err != nil {
			return fmt.Errorf("entry %d: the note of what was pruned: %w", index, err)
		}
		t.marks, t.noted = m, true
		return nil
	}
	if begins && !t.noted {
		t.marks = marks{}
	}
	t.noted = false
	if err := t.entry(index, kind, value); err != nil {
		return err
	}
	if t.tree.size&(tileWidth-1) == 0 && t.marks.by != "" && t.tree.root() != t.marks.root {
		return fmt.Errorf("%w: entry %d: the note of what was pruned of the entries from here on is of another tree",
			ErrProof, t.tree.size-tileWidth)
	}
	return nil
}

func (t *exportVerifier) entry(index int64, kind string, value []byte) error {
	pruned := t.marks.has(index)
	switch {
	case kind == exportPruned && len(value) == tlog.HashSize:
		if !pruned {
			return fmt.Errorf("%w: entry %d: its content is missing, and nobody vouches that it was pruned", ErrProof, index)
		}
		t.x.Pruned++
		(*vouchers)(&t.x.Vouchers).add(t.marks.by)
		t.tree.add(tlog.Hash(value), nil)
		return nil
	case kind != exportEntry:
		return fmt.Errorf("%w: entry %d: not the line of an entry", ErrProof, index)
	case pruned:
		return fmt.Errorf("%w: entry %d: there, and vouched for as pruned", ErrProof, index)
	}
	e, err := decode(value)
	if err != nil {
		return fmt.Errorf("%w: entry %d: %w", ErrProof, index, err)
	}
	if e.Index != index {
		return fmt.Errorf("%w: entry %d: reordered: entry %d stands here", ErrProof, index, e.Index)
	}
	signature, event := t.signature, e.Event
	if t.signature = nil; signature != nil {
		if e.Header == nil {
			return fmt.Errorf("%w: entry %d: a signature, and its token is signed", ErrProof, index)
		}
		event.Payload, event.Header = joinToken(e.Header, e.Payload, signature), nil
	}
	t.x.Entries++
	t.tree.add(tlog.RecordHash(value), nil)
	if t.visit == nil {
		return nil
	}
	return t.visit(Entry{event, t.x.Head.Origin, e.Index, e.Recorded, e.Leaf})
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

// next returns the kind of the next line and its value, decoded except for the last line.
func (r *exportReader) next() (kind string, value []byte, err error) {
	line, err := r.line()
	if err != nil {
		return "", nil, err
	}
	for _, kind := range []string{exportEntry, exportSignature, exportPruned, exportGaps, exportHead, exportEnd} {
		if len(line) <= len(kind) || string(line[:len(kind)]) != kind {
			continue
		}
		text := line[len(kind):]
		if kind == exportEnd {
			return kind, text, nil
		}
		value := make([]byte, exportBase64.DecodedLen(len(text)))
		n, err := exportBase64.Decode(value, text)
		// The decoder ignores carriage returns.
		if err != nil || exportBase64.EncodedLen(n) != len(text) {
			return "", nil, fmt.Errorf("%w: line %d is not base64", ErrProof, r.n)
		}
		return kind, value[:n], nil
	}
	return "", nil, fmt.Errorf("%w: line %d is of no known kind", ErrProof, r.n)
}

// end checks that the tree is complete, and that nothing follows.
func (r *exportReader) end(tree *merkleState, head Head, count []byte, known []Head) error {
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
