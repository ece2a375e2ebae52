package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	tileHeight = 8
	tileWidth  = 1 << tileHeight
)

// merkleState has the roots of the complete subtrees along the right edge: enough to add
// leaves and to compute the root.
type merkleState struct {
	size  int64
	nodes []tlog.Hash // by height; valid where that bit of size is set
}

// add adds a leaf. node, if not nil, gets the roots and heights of the subtrees that the
// leaf completes, the smallest first.
func (f *merkleState) add(h tlog.Hash, node func(height int, h tlog.Hash)) {
	height := 0
	for n := f.size; n&1 == 1; n >>= 1 {
		h = tlog.NodeHash(f.nodes[height], h)
		height++
		if node != nil {
			node(height, h)
		}
	}
	if height == len(f.nodes) {
		f.nodes = append(f.nodes, tlog.Hash{})
	}
	f.nodes[height] = h
	f.size++
}

func (f *merkleState) root() tlog.Hash {
	if f.size == 0 {
		root, _ := tlog.TreeHash(0, nil) // the empty tree's; reads nothing
		return root
	}
	height := bits.TrailingZeros64(uint64(f.size))
	h := f.nodes[height]
	for height++; f.size>>height != 0; height++ {
		if f.size>>height&1 == 1 {
			h = tlog.NodeHash(f.nodes[height], h)
		}
	}
	return h
}

// rootOf returns the root of the tree with these leaf hashes.
func rootOf(hashes []tlog.Hash) tlog.Hash {
	var f merkleState
	for i := range hashes {
		f.add(hashes[i], nil)
	}
	return f.root()
}

// tree is a merkleState with the unfinished tiles. Hashes are only appended, so that clones
// share them.
type tree struct {
	merkleState
	edge [][]tlog.Hash // by level: the hashes of the tile that is not full yet
}

func (t *tree) clone() *tree {
	return &tree{
		merkleState: merkleState{size: t.size, nodes: slices.Clone(t.nodes)},
		edge:        slices.Clone(t.edge),
	}
}

type tile struct {
	level  int
	n      int64
	hashes []tlog.Hash
}

// add adds a leaf. It appends to tiles what has to be stored: the tiles that became full,
// and the unfinished one above them.
func (t *tree) add(leaf tlog.Hash, tiles []tile) []tile {
	t.push(0, leaf)
	t.merkleState.add(leaf, func(height int, h tlog.Hash) {
		if height%tileHeight != 0 {
			return
		}
		level := height / tileHeight
		full := level - 1
		if last := len(tiles) - 1; last >= 0 && tiles[last].level == full {
			tiles = tiles[:last] // it was unfinished, and is appended as full below
		}
		n := t.size >> height // without the leaf being added
		tiles = append(tiles, tile{full, n, t.edge[full]})
		t.edge[full] = nil
		t.push(level, h)
		tiles = append(tiles, tile{level, n >> tileHeight, t.edge[level]})
	})
	return tiles
}

func (t *tree) push(level int, h tlog.Hash) {
	if level == len(t.edge) {
		t.edge = append(t.edge, nil)
	}
	if t.edge[level] == nil {
		t.edge[level] = make([]tlog.Hash, 0, tileWidth)
	}
	t.edge[level] = append(t.edge[level], h)
}

// restore makes a tree from its unfinished tiles, by level.
func restore(edge [][]tlog.Hash) *tree {
	t := &tree{edge: edge}
	t.nodes = make([]tlog.Hash, len(edge)*tileHeight)
	for level, hashes := range edge {
		var f merkleState
		for i := range hashes {
			f.add(hashes[i], nil)
		}
		copy(t.nodes[level*tileHeight:], f.nodes)
		t.size += f.size << (level * tileHeight)
	}
	return t
}

// state is an immutable snapshot of a log in the store.
type state struct {
	*tree
	head     Head
	version  store.Version // of the head; 0 where there is none
	recorded time.Time     // of the last entry
}

// loadAttempts bounds how often a read restarts because another process extended the log.
const loadAttempts = 10

// load reads the state of the log and checks it against its signed head.
func (s *logStore) load(ctx context.Context) (*state, error) {
	var err error
	for range loadAttempts {
		var found *state
		var moved bool
		if found, moved, err = s.tryLoad(ctx); err == nil || !moved {
			return found, err
		}
	}
	return nil, err
}

// tryLoad also reports whether another process extended the log during the reads, so that
// the parts do not match.
func (s *logStore) tryLoad(ctx context.Context) (found *state, moved bool, err error) {
	head, version, err := s.storedHead(ctx)
	if err != nil {
		return nil, false, err
	}
	found, err = s.build(ctx, head)
	if err == nil {
		err = s.nothingAbove(ctx, head.Size)
	}
	if err == nil {
		found.version = version
		return found, false, nil
	}
	_, after, headErr := s.storedHead(ctx)
	return nil, headErr == nil && after != version, err
}

// storedHead reads the head from the store; the version is 0 if there is none.
func (s *logStore) storedHead(ctx context.Context) (Head, store.Version, error) {
	found, err := s.store.Get(ctx, s.headKey())
	if errors.Is(err, store.ErrNotFound) {
		return Head{Origin: s.origin}, 0, nil
	}
	if err != nil {
		return Head{}, 0, err
	}
	head, err := ParseHead(found.Value, s.origin, s.keys)
	if err != nil {
		return Head{}, 0, fmt.Errorf("%w: the signed head: %w", ErrTampered, err)
	}
	return head, found.Version, nil
}

// build makes the tree of head from the stored unfinished tiles.
func (s *logStore) build(ctx context.Context, head Head) (*state, error) {
	found := &state{head: head}
	var edge [][]tlog.Hash
	first := head.Size &^ (tileWidth - 1)
	bottom := make([]tlog.Hash, 0, tileWidth)
	for i := first; i < head.Size; i++ {
		e, err := s.read(ctx, s.id, i)
		if errors.Is(err, store.ErrNotFound) {
			return nil, fmt.Errorf("%w: entry %d is missing", ErrTampered, i)
		}
		if err != nil {
			return nil, err
		}
		bottom = append(bottom, tlog.RecordHash(e.Leaf))
		found.recorded = e.Recorded
	}
	for level := 0; head.Size>>(level*tileHeight) != 0; level++ {
		if level == 0 {
			edge = append(edge, bottom)
			continue
		}
		n := head.Size >> (level * tileHeight)
		width := int(n & (tileWidth - 1))
		if width == 0 {
			edge = append(edge, nil)
			continue
		}
		hashes, err := s.storedTile(ctx, level, n>>tileHeight)
		if err != nil {
			return nil, err
		}
		if len(hashes) < width { // a tile has more hashes once the log has grown
			return nil, fmt.Errorf("%w: tile %d of level %d has %d hashes instead of %d", ErrTampered, n>>tileHeight, level, len(hashes), width)
		}
		edge = append(edge, hashes[:width])
	}
	found.tree = restore(edge)
	// A pruned entry is old: zero is early enough.
	for i := head.Size - 1; found.recorded.IsZero() && i >= max(0, first-tileWidth); i-- {
		e, err := s.read(ctx, s.id, i)
		if errors.Is(err, store.ErrNotFound) {
			break
		}
		if err != nil && !errors.Is(err, store.ErrDamaged) {
			return nil, err
		}
		found.recorded = e.Recorded // zero where the value is damaged: then the one before it says enough
	}
	if head.Note != nil && found.root() != head.Root {
		return nil, fmt.Errorf("%w: the entries do not fit the signed head of size %d", ErrTampered, head.Size)
	}
	return found, nil
}

// maxAdvance is by how many entries a state is extended; beyond that the edge of the tree takes fewer
// reads.
const maxAdvance = 2 * tileWidth

// advance returns the state of the newest head, which must extend a known state. The error is ErrTampered,
// or one of the store.
func (s *logStore) advance(ctx context.Context, from *state) (*state, error) {
	head, version, err := s.storedHead(ctx)
	if err != nil || version == from.version && bytes.Equal(head.Note, from.head.Note) {
		return from, err
	}
	if added := head.Size - from.size; version != 0 && added >= 0 && added <= maxAdvance {
		next := &state{tree: from.clone(), head: head, version: version, recorded: from.recorded}
		for level := range next.edge {
			next.edge[level] = slices.Clip(next.edge[level]) // others may append to the same array
		}
		for found, err := range s.store.Scan(ctx, s.entries(from.size, head.Size)) {
			e, err := s.scanned(found, err)
			if err != nil || e.Index != next.size {
				break // load says what is wrong, or the entry was pruned
			}
			next.add(tlog.RecordHash(e.Leaf), nil)
			next.recorded = e.Recorded
		}
		if next.size == head.Size && next.root() == head.Root {
			return next, nil
		}
	}
	found, err := s.load(ctx)
	if err != nil {
		return nil, err
	}
	return found, found.contains(ctx, s, &from.head)
}

// nothingAbove checks that no entry is stored beyond the end of the tree. size is that of a head that was read before.
func (s *logStore) nothingAbove(ctx context.Context, size int64) error {
	for e, err := range s.store.Scan(ctx, s.above(size)) {
		if err != nil && !errors.Is(err, store.ErrDamaged) {
			return err
		}
		return s.below(ctx, indexIn(e.Key))
	}
	return nil
}

// below checks that an entry found in the store lies before the end of the tree. It reads the head again, because an
// entry and its head are committed together and may have come since the last read.
func (s *logStore) below(ctx context.Context, index int64) error {
	now, _, err := s.storedHead(ctx)
	if err == nil && (index < 0 || index >= now.Size) {
		err = fmt.Errorf("%w: entry %d stands behind the signed head of size %d", ErrTampered, index, now.Size)
	}
	return err
}

// entries is the range of the entries from an index up to another.
func (s *logStore) entries(from, to int64) store.Range {
	return store.Range{From: s.entryKey(from), To: s.entryKey(to)}
}

// above is the range of what is stored from an index on. The last is enough.
func (s *logStore) above(size int64) store.Range {
	r := store.Prefix(logKey(spaceEntry, s.id, 0))
	r.From, r.Limit, r.Reverse = s.entryKey(size), 1, true
	return r
}

// contains checks that the tree extends the tree of an earlier head.
func (s *state) contains(ctx context.Context, on *logStore, known *Head) error {
	if known.Origin != on.origin {
		return fmt.Errorf("%w: a head of the log %q", ErrProof, known.Origin)
	}
	if known.Size > s.size {
		return fmt.Errorf("%w: it has %d entries and had %d", ErrTampered, s.size, known.Size)
	}
	root := s.root()
	if known.Size != s.size {
		var err error
		if root, err = tlog.TreeHash(known.Size, s.hashes(ctx, on)); err != nil {
			return err
		}
	}
	if root != known.Root {
		return fmt.Errorf("%w: its first %d entries are not those of the head of that size", ErrTampered, known.Size)
	}
	return nil
}

// hashes reads the tree's hashes and proves each against the root.
func (s *state) hashes(ctx context.Context, on *logStore) tlog.HashReader {
	return tlog.TileHashReader(tlog.Tree{N: s.size, Hash: s.root()}, &tiles{ctx: ctx, on: on, state: s})
}

// proved calls read with a reader of the tree's hashes. The error is ErrTampered, or one of the store.
func (s *state) proved(ctx context.Context, on *logStore, read func(r tlog.HashReader) error) error {
	from := &tiles{ctx: ctx, on: on, state: s}
	err := read(tlog.TileHashReader(tlog.Tree{N: s.size, Hash: s.root()}, from))
	if err != nil && from.failed == nil {
		err = fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return err
}

// tiles implements tlog.TileReader for a state.
type tiles struct {
	ctx    context.Context
	on     *logStore
	state  *state
	failed error // of the store, as opposed to a wrong hash
}

// Height is that of a tile, in levels.
func (t *tiles) Height() int { return tileHeight }

// SaveTiles does nothing: the tiles come from the store.
func (t *tiles) SaveTiles([]tlog.Tile, [][]byte) {}

// ReadTiles reads tiles from the state or the store.
func (t *tiles) ReadTiles(wanted []tlog.Tile) ([][]byte, error) {
	data := make([][]byte, len(wanted))
	for i, w := range wanted {
		hashes, err := t.read(w.L, w.N)
		if err != nil {
			t.failed = err
			return nil, err
		}
		if len(hashes) < w.W {
			return nil, fmt.Errorf("%w: tile %d of level %d has %d hashes, %d are needed", ErrTampered, w.N, w.L, len(hashes), w.W)
		}
		data[i] = joinHashes(hashes[:w.W])
	}
	return data, nil
}

func (t *tiles) read(level int, n int64) ([]tlog.Hash, error) {
	if n == t.state.size>>((level+1)*tileHeight) && level < len(t.state.edge) {
		return t.state.edge[level], nil
	}
	return t.on.storedTile(t.ctx, level, n)
}

// MaxHead is the longest signed head, in bytes.
const MaxHead = 16 << 10

// Head is the signed head of a log: its size and root (RFC 6962, section 3.5, as a note).
type Head struct {
	// Origin names the log.
	Origin string `json:"origin"`
	// Size is the number of entries.
	Size int64 `json:"size"`
	// Root is the hash of the tree of that size.
	Root tlog.Hash `json:"root"`
	// Note is the signed note over the three.
	Note []byte `json:"-"`
}

// headText is a head without its signature: three lines, as in the checkpoints of other
// transparency logs.
func headText(origin string, size int64, root tlog.Hash) string {
	return fmt.Sprintf("%s\n%d\n%s\n", origin, size, root)
}

// ParseHead opens the signed head of the log called origin; one of keys must have signed
// it. It accepts only the exact form that a log writes. The error is ErrProof.
func ParseHead(msg []byte, origin string, keys note.Verifiers) (Head, error) {
	n, err := openNote(msg, keys)
	if err != nil {
		return Head{}, err
	}
	h, err := parseHeadText(n.Text)
	if err != nil {
		return Head{}, err
	}
	if h.Origin != origin {
		return Head{}, fmt.Errorf("%w: a head of the log %q", ErrProof, h.Origin)
	}
	h.Note = bytes.Clone(msg)
	return h, nil
}

// openNote opens a note of at most MaxHead bytes with canonical signatures. The error is
// ErrProof.
func openNote(msg []byte, keys note.Verifiers) (*note.Note, error) {
	if len(msg) > MaxHead {
		return nil, fmt.Errorf("%w: a note of %d bytes, at most %d", ErrProof, len(msg), MaxHead)
	}
	n, err := note.Open(msg, keys)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProof, err)
	}
	if !strictSignatures(string(msg[len(n.Text):])) {
		return nil, fmt.Errorf("%w: malformed signatures", ErrProof)
	}
	return n, nil
}

func parseHeadText(text string) (Head, error) {
	lines := strings.Split(text, "\n")
	if len(lines) != 4 {
		return Head{}, fmt.Errorf("%w: not the text of a head", ErrProof)
	}
	size, err := strconv.ParseInt(lines[1], 10, 64)
	if err != nil || size < 0 {
		return Head{}, fmt.Errorf("%w: not a size", ErrProof)
	}
	root, err := tlog.ParseHash(lines[2])
	if err != nil {
		return Head{}, fmt.Errorf("%w: not a root", ErrProof)
	}
	if headText(lines[0], size, root) != text {
		return Head{}, fmt.Errorf("%w: a head spelt in another way", ErrProof)
	}
	return Head{Origin: lines[0], Size: size, Root: root}, nil
}

// strictSignatures checks that the signatures of a note are canonical: package note accepts
// several encodings of the same signature.
func strictSignatures(s string) bool {
	rest, ok := strings.CutPrefix(s, "\n")
	rest, whole := strings.CutSuffix(rest, "\n")
	if !ok || !whole {
		return false
	}
	for line := range strings.SplitSeq(rest, "\n") {
		at := strings.LastIndexByte(line, ' ')
		if at < 0 {
			return false
		}
		if _, err := base64.StdEncoding.Strict().DecodeString(line[at+1:]); err != nil {
			return false
		}
	}
	return true
}

// noteText returns the text of an unverified note; empty if msg is not a note.
func noteText(msg []byte) string {
	return string(msg[:bytes.LastIndex(msg, []byte("\n\n"))+1])
}
