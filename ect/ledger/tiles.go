package ledger

import (
	"context"
	"fmt"

	"golang.org/x/mod/sumdb/tlog"
)

// hashes reads the tree's hashes. Each is proved to be in the tree before it is
// returned, so that a proof made of them holds or is an error.
func (s *state) hashes(ctx context.Context, on *shelf) tlog.HashReader {
	tree := tlog.Tree{N: s.size, Hash: s.root()}
	return tlog.TileHashReader(tree, &tiles{ctx: ctx, on: on, state: s})
}

// tiles are the tiles of a state: the unfinished ones are at hand.
type tiles struct {
	ctx    context.Context
	on     *shelf
	state  *state
	failed error // of the store
}

// Height implements tlog.TileReader.
func (t *tiles) Height() int { return tileHeight }

// SaveTiles implements tlog.TileReader: the tiles come from where they would go to.
func (t *tiles) SaveTiles([]tlog.Tile, [][]byte) {}

// ReadTiles implements tlog.TileReader.
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
