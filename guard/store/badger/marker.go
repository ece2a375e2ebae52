package badger

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// The marker is one entry of our own. It says which frames of the log Badger has, and
// it keeps versions from being given twice: Badger knows only the highest version that
// it still stores, and compaction drops deleted ones, but it keeps the newest marker,
// which is written above all that it vouches for.
const (
	// versionGap lies between the highest version found at opening and the first
	// one given, for those that a damaged end of the log may have held.
	versionGap = 1 << 20
	format     = 2
	// oldFormat had no log of its own: Badger's logs were synced.
	oldFormat = 1
)

var (
	markerKey = []byte{markerSpace}
	// padKey takes what only makes Badger's memory fuller; see applier.
	padKey = []byte{markerSpace, 'p'}
)

type marker struct {
	seq uint64 // of the last frame that Badger has
}

const markerText = "agent-guard store "

func (m marker) value() []byte {
	b := binary.BigEndian.AppendUint32([]byte(markerText), format)
	return binary.BigEndian.AppendUint64(b, m.seq)
}

// readMarker returns the marker; found is false where there is none. A store of the
// old form has no frames.
func readMarker(db *badgerdb.DB) (m marker, found bool, err error) {
	txn := db.NewTransactionAt(math.MaxUint64, false)
	defer txn.Discard()
	raw, err := lookUp(txn, markerKey)
	if err != nil || raw == nil {
		return marker{}, false, err
	}
	rest, ok := bytes.CutPrefix(raw, []byte(markerText))
	switch {
	case ok && len(rest) == 12 && binary.BigEndian.Uint32(rest) == format:
		return marker{seq: binary.BigEndian.Uint64(rest[4:])}, true, nil
	case ok && len(rest) == 4 && binary.BigEndian.Uint32(rest) == oldFormat:
		return marker{}, true, nil
	}
	return marker{}, false, fmt.Errorf("the marker is %q, written by another version of this program", raw)
}
