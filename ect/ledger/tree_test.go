package ledger

import (
	"fmt"
	"testing"

	"golang.org/x/mod/sumdb/tlog"
)

// TestTreeVectors: known roots of small trees.
func TestTreeVectors(t *testing.T) {
	var f merkleState
	roots := []string{
		"47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=",
		"2+vRDmG8jChZEnP+r7vvldVE+HRpMwHY9/jlTG4wBY4=",
		"rTRut34FI3vLhkru7t8UhFnuq3kw9NLecUwh91iNzJE=",
		"mJKOPzj+JUExhtomKQkovALCq6yqcyjDzflTRvrwITM=",
	}
	for i, leaf := range []string{"test", "foo", "", "-"} {
		if got := f.root().String(); got != roots[i] {
			t.Errorf("root of size %d is %s", i, got)
		}
		f.add(tlog.RecordHash([]byte(leaf)), nil)
	}
}

// TestTreeAgainstNaive: roots, tiles and restored trees are those of package tlog, at
// every size over two full levels' edge.
func TestTreeAgainstNaive(t *testing.T) {
	const sizes = 3*tileWidth + 5
	leaves := make([]tlog.Hash, sizes)
	for i := range leaves {
		leaves[i] = numbered(i)
	}
	model := naiveTree(t, leaves)
	tr := &tree{}
	stored := map[string][]tlog.Hash{}
	for i, leaf := range leaves {
		if got, want := tr.root(), model.root(t, i); got != want {
			t.Fatalf("root of size %d is %s instead of %s", i, got, want)
		}
		if again := restore(tr.clone().edge); again.size != tr.size || again.root() != tr.root() {
			t.Fatalf("restored at size %d: size %d, root %s", i, again.size, again.root())
		}
		for _, tile := range tr.add(leaf, nil) {
			stored[fmt.Sprint(tile.level, tile.n)] = tile.hashes
		}
	}
	for level := 0; level < 2; level++ {
		for n := int64(0); n <= sizes>>((level+1)*tileHeight); n++ {
			width := min(tileWidth, sizes>>(level*tileHeight)-int(n)<<tileHeight)
			if level == 0 && width < tileWidth {
				continue // the entries themselves have these
			}
			want := must(tlog.ReadTileData(tlog.Tile{H: tileHeight, L: level, N: n, W: width}, model))(t)
			if got := joinHashes(stored[fmt.Sprint(level, n)]); string(got) != string(want) {
				t.Errorf("tile %d of level %d has %d hashes and differs", n, level, len(got)/tlog.HashSize)
			}
		}
	}
}

// TestTreeThirdLevel: a tile of level 1 becomes full, and level 2 begins.
func TestTreeThirdLevel(t *testing.T) {
	const size = tileWidth*tileWidth + 3
	tr := &tree{}
	var last []tile
	for i := range size {
		if tiles := tr.add(numbered(i), nil); len(tiles) > 0 {
			last = tiles
		}
	}
	if len(last) != 3 {
		t.Fatalf("the last full tile led to %d tiles", len(last))
	}
	for i, want := range []struct {
		level, width int
		n            int64
	}{{0, tileWidth, tileWidth - 1}, {1, tileWidth, 0}, {2, 1, 0}} {
		if got := last[i]; got.level != want.level || got.n != want.n || len(got.hashes) != want.width {
			t.Errorf("tile %d of level %d with %d hashes", got.n, got.level, len(got.hashes))
		}
	}
	if last[2].hashes[0] != rootOf(last[1].hashes) {
		t.Error("level 2 does not hold the root of the tile of level 1")
	}
	if again := restore(tr.clone().edge); again.root() != tr.root() || again.size != size {
		t.Error("not restored")
	}
}
