package store_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// A batch has each key at most once, however many writes it has.
func TestCheckFindsAKeyThatComesTwice(t *testing.T) {
	for _, n := range []int{2, 32, 33, store.MaxBatch} {
		batch := make([]store.Write, n)
		for i := range batch {
			batch[i].Key = binary.BigEndian.AppendUint32(nil, uint32(i))
		}
		if err := store.Check(batch); err != nil {
			t.Errorf("%d different keys: %v", n, err)
		}
		for _, twice := range [][2]int{{0, n - 1}, {n - 2, n - 1}, {0, 1}} {
			key := batch[twice[1]].Key
			batch[twice[1]].Key = batch[twice[0]].Key
			if err := store.Check(batch); !errors.Is(err, store.ErrInvalid) {
				t.Errorf("of %d writes %d and %d have the same key: %v", n, twice[0], twice[1], err)
			}
			batch[twice[1]].Key = key
		}
	}
}
