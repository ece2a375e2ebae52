package ledger

import (
	"math/bits"
	"slices"

	"golang.org/x/mod/sumdb/tlog"
)

const (
	tileHeight = 8
	tileWidth  = 1 << tileHeight
)

// frontier is what of a tree is needed to add leaves and to know its root: the roots
// of the complete subtrees along its right edge.
type frontier struct {
	size  int64
	nodes []tlog.Hash // by height; counts where that bit of size is set
}

// add adds a leaf. node, if any, gets the roots of the subtrees that it completes,
// with their heights, from the smallest.
func (f *frontier) add(h tlog.Hash, node func(height int, h tlog.Hash)) {
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

// root is the tree's hash.
func (f *frontier) root() tlog.Hash {
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

// rootOf is the hash of a tree of these leaves.
func rootOf(hashes []tlog.Hash) tlog.Hash {
	var f frontier
	for i := range hashes {
		f.add(hashes[i], nil)
	}
	return f.root()
}

// tree is a tree of which the unfinished tiles are at hand. What a tree holds is never
// changed, only added to, so that its copies share it.
type tree struct {
	frontier
	edge [][]tlog.Hash // by level: the hashes of the tile that is not full yet
}

func (t *tree) clone() *tree {
	return &tree{
		frontier: frontier{size: t.size, nodes: slices.Clone(t.nodes)},
		edge:     slices.Clone(t.edge),
	}
}

// tile is one that must be stored.
type tile struct {
	level  int
	n      int64
	hashes []tlog.Hash
}

// add adds a leaf and appends the tiles that came to be stored by it to tiles: those
// that became full, and above them the one that is not full yet.
func (t *tree) add(leaf tlog.Hash, tiles []tile) []tile {
	t.push(0, leaf)
	t.frontier.add(leaf, func(height int, h tlog.Hash) {
		if height%tileHeight != 0 {
			return
		}
		level := height / tileHeight
		full := level - 1
		if last := len(tiles) - 1; last >= 0 && tiles[last].level == full {
			tiles = tiles[:last] // it was taken for unfinished a moment ago
		}
		n := t.size >> height // its last leaf is being added
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

// restore makes the tree whose unfinished tiles are edge, by level.
func restore(edge [][]tlog.Hash) *tree {
	t := &tree{edge: edge}
	t.nodes = make([]tlog.Hash, len(edge)*tileHeight)
	for level, hashes := range edge {
		var f frontier
		for i := range hashes {
			f.add(hashes[i], nil)
		}
		copy(t.nodes[level*tileHeight:], f.nodes)
		t.size += f.size << (level * tileHeight)
	}
	return t
}
