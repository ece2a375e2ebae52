package checkpoint

import (
	"encoding/binary"
	"testing"
)

// What is remembered of workflows is bounded; those for whom something waits stay.
func TestIdleUsagesAreForgotten(t *testing.T) {
	var u usages
	of := func(i int) scope {
		s := scope{kind: kindWorkflow}
		binary.BigEndian.PutUint32(s.hash[:], uint32(i))
		return s
	}
	busy := u.of(of(0))
	for i := range maxUsages - 1 {
		u.giveBack(u.of(of(1 + i)))
	}
	if u.known(of(1)) == nil {
		t.Error("forgotten without need")
	}
	u.giveBack(u.of(of(maxUsages)))
	if u.known(of(1)) != nil || len(u.m) != 2 {
		t.Errorf("%d are remembered", len(u.m))
	}
	if u.known(of(0)) != busy {
		t.Error("one for whom something waits is forgotten")
	}
}
