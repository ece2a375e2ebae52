package badger

import (
	"fmt"
	"testing"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// A census counts what Badger itself would call expired or deleted, late rather than
// early, and no table's is long.
func TestCensus(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	now := time.Now()
	txn := s.db.NewTransactionAt(1, true)
	const each = 100
	for i := range each {
		for kind, expires := range []int64{0, now.Add(-time.Hour).Unix(), now.Add(time.Duration(i) * 24 * time.Hour).Unix()} {
			e := badgerdb.NewEntry(fmt.Appendf(nil, "k%d-%05d", kind, i), make([]byte, 1000))
			e.ExpiresAt = uint64(expires)
			must(t, txn.SetEntry(e))
		}
		must(t, txn.SetEntry(badgerdb.NewEntry(fmt.Appendf(nil, "k4-%05d", i), make([]byte, 500))))
		must(t, txn.Delete(fmt.Appendf(nil, "k3-%05d", i)))
	}
	must(t, txn.CommitAt(2, nil))
	txn = s.db.NewTransactionAt(2, true)
	for i := range each {
		must(t, txn.Set(fmt.Appendf(nil, "k4-%05d", i), []byte("newer")))
	}
	must(t, txn.CommitAt(3, nil))
	s = flushed(t, s, Options{})
	must(t, s.verifyNew())
	k, err := s.stock()
	must(t, err)
	if k.dead < each*1500 || k.dead > each*1650+1100 {
		t.Errorf("%d bytes are dead, want %d expired ones, %d replaced ones, and some for deletions", k.dead, each*1000, each*500)
	}
	var bytes int64
	for _, f := range s.known.facts {
		if len(f.Census.Expiring) > mostBuckets+2 {
			t.Errorf("%d buckets", len(f.Census.Expiring))
		}
		for _, e := range f.Census.Expiring {
			bytes += e.Bytes
		}
		if early := f.Census.dead(now.Add(50 * 24 * time.Hour)); early > k.dead+51*1100 || early < k.dead+45*1000 {
			t.Errorf("%d bytes are called dead in 50 days", early)
		}
	}
	if bytes < 2*each*1250 || bytes > 2*each*1350 {
		t.Errorf("%d bytes expire or are replaced, want %d", bytes, 2*each*1250)
	}
}

// Garbled entries with a right checksum are an error and not a panic.
func FuzzCensusBlock(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 0, 1, 0, 'k', 0, 0, 0, 'v', 0, 0, 0, 0, 0, 0, 0, 1})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := counting{buckets: make(map[int64]int64)}
		if err := c.block(b); err == nil {
			c.census(int64(len(b)))
		}
	})
}
