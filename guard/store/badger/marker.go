package badger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The marker is one entry of our own, always there: it shows that Badger still has
// what it was given, and it keeps versions from being given twice. Badger knows only
// the highest version that it still stores, and compaction drops deleted ones; but it
// drops none before the store says so, which is after the marker was written above
// all that were found.
const (
	// versionGap lies between the highest version found and the marker, for those
	// that the damaged end of a log may have held.
	versionGap = 1 << 20
	format     = 1
)

var markerKey = []byte{markerSpace}

func markerValue() []byte {
	return binary.BigEndian.AppendUint32([]byte("agent-guard store "), format)
}

// mark checks the marker of an existing store and writes that of this opening. It
// returns the version that the marker carries.
func mark(db *badgerdb.DB, d disk, fresh bool) (store.Version, error) {
	txn := db.NewTransactionAt(math.MaxUint64, false)
	raw, err := lookUp(txn, markerKey)
	txn.Discard()
	switch {
	case err != nil:
		return 0, err
	case raw == nil && !fresh:
		return 0, errors.New("entries are lost, the marker among them")
	case raw != nil && !bytes.Equal(raw, markerValue()):
		return 0, fmt.Errorf("the marker is %q, written by another version of this program", raw)
	}
	version := db.MaxVersion() + versionGap
	txn = db.NewTransactionAt(version, true)
	defer txn.Discard()
	if err := txn.Set(bytes.Clone(markerKey), markerValue()); err != nil {
		return 0, err
	}
	return store.Version(version), d.commit(txn, version)
}
