package badger

import (
	"path/filepath"
	"testing"
)

// P4: the log of Badger's memory table is allocated before it is written.
func TestSpaceOfTheLogIsTaken(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	for round := range 2 {
		s.checkSpace()
		logs, err := filepath.Glob(filepath.Join(s.lsm(), "*.mem"))
		must(t, err)
		if len(logs) == 0 {
			t.Fatal("no log")
		}
		for _, name := range logs {
			if got := blocks(t, name); got < memLogBytes {
				t.Errorf("round %d: %s has %d bytes of the disk, want %d", round, filepath.Base(name), got, memLogBytes)
			}
		}
		must(t, s.merge([]byte{userSpace}, []byte{afterUser})) // the next one
	}
}
