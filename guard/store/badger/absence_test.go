package badger

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// P1: whatever is written, deleted, merged and opened again, no key that is there is taken for
// absent; nor where filters fill up and are replaced.
func TestNoKeyIsTakenForAbsent(t *testing.T) {
	t.Run("over openings", func(t *testing.T) {
		if _, proven := absences(t, 0, 12); proven == 0 {
			t.Error("nothing was proven absent after an opening")
		}
	})
	t.Run("over replacements", func(t *testing.T) {
		if replaced, _ := absences(t, 1200, 100); replaced == 0 {
			t.Error("no filter was replaced")
		}
	})
}

// absences writes and deletes at random, and opens the store again after so many of 36 rounds. It
// counts the filters, of most keys, that were replaced, and how often absence was proven after the
// last round.
func absences(t *testing.T, most int64, openAgain int) (replaced, proven int) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	dir, o := t.TempDir(), Options{Absent: []string{"a", "bb"}, mostAbsent: most, GroupWait: -1}
	s := reopenWith(t, dir, o, osDisk{})
	there, used := map[string]string{}, 0
	var filled *filter
	for round := range 36 {
		for n := range 60 {
			var writes []store.Write
			for key := range there {
				if len(there) < 100 {
					break
				}
				writes = append(writes, store.Write{Key: []byte(key), Delete: true})
				delete(there, key)
			}
			for range 5 {
				key := fmt.Sprintf("%s%d", []string{"a", "b", "bb", "c"}[random.IntN(4)], used)
				used++
				writes = append(writes, put(key, key))
				there[key] = key
			}
			mustCommit(t, s, writes...)
			if n%10 == 9 { // a scan moves the overlay to Badger
				for _, err := range s.Scan(t.Context(), store.Range{Limit: 1}) {
					must(t, err)
				}
			}
		}
		switch {
		case round%openAgain == openAgain-2:
			must(t, s.Close())
			s = reopenWith(t, dir, o, osDisk{})
			filled = nil
		case round%4 == 1:
			must(t, s.merge([]byte{userSpace}, []byte{afterUser}))
		}
		s.fillAbsence()
		if now := s.absence.current.Load(); now != filled {
			if filled != nil {
				replaced++
			}
			filled = now
		}
		proven = 0
		for n := range used {
			for _, space := range []string{"a", "b", "bb", "c"} {
				key := fmt.Sprintf("%s%d", space, n)
				if value, ok := there[key]; ok {
					wantValue(t, s, key, value)
				} else if s.absence.proves(userKey([]byte(key))) {
					proven++
				}
			}
		}
	}
	return replaced, proven
}

// P1: a filter is complete once all tables were read that have what came before it. A table that
// was merged before it was read is in others.
func TestAFilterWaitsForItsTables(t *testing.T) {
	a := newAbsence([]string{""}, 100)
	key := []byte{userSpace, 'a'}
	unread := func(ts uint64, listed []uint64, want ...uint64) {
		t.Helper()
		got := a.unread(listed, ts)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("of the tables %v it lacks %v, want %v", listed, got, want)
		}
	}
	a.tableRead(1, a.next.Load())
	unread(0, []uint64{1, 2, 3}, 2, 3)
	a.tableRead(2, a.next.Load())
	unread(0, []uint64{1, 4}, 4) // 3 is in 4 now
	if a.proves(key) {
		t.Error("a filter without all tables proves something")
	}
	a.tableRead(4, a.next.Load())
	unread(0, []uint64{1, 4, 5}) // 5 was written since
	if !a.proves(key) {
		t.Error("a complete filter proves nothing")
	}
	a.most = -1 // full
	a.begin(10)
	a.most = 100
	unread(9, []uint64{1, 4, 5}) // something may be in memory only
	a.add(key, a.next.Load(), a.current.Load())
	unread(10, []uint64{6}, 6)
	if a.proves(key) {
		t.Error("a key that was added is proven absent")
	}
	a.tableRead(6, a.next.Load())
	unread(10, []uint64{6})
	if a.proves(key) || a.next.Load() != nil {
		t.Error("a key that was added is not in the next filter")
	}
}

// P1: a table whose reading began before a filter was begun has keys that this filter lacks.
func TestATableThatIsBeingReadIsReadAgain(t *testing.T) {
	a := newAbsence([]string{""}, 100)
	if len(a.unread(nil, 0)) > 0 || a.current.Load() == nil {
		t.Fatal("no filter is complete")
	}
	early := []byte{userSpace, 'a'}
	reading := a.next.Load()
	a.add(early, reading)
	a.most = -1 // full
	a.begin(10)
	a.add([]byte{userSpace, 'b'}, reading)
	a.tableRead(1, reading)
	if got := a.unread([]uint64{1}, 10); !slices.Equal(got, []uint64{1}) {
		t.Errorf("still to be read: %v", got)
	}
}

// A filter knows all keys that it was given, while it grows and others ask, and few others.
func TestTheFilterKnowsItsKeys(t *testing.T) {
	const each = firstPart
	f := newAbsence([]string{""}, 0).next.Load()
	hash := func(n uint64) uint64 { return rand.NewPCG(n, 1).Uint64() }
	var all sync.WaitGroup
	for worker := range uint64(4) {
		all.Go(func() {
			for n := range uint64(each) {
				f.add(hash(worker<<32 + n))
				if !f.mayHave(hash(worker<<32 + n/2)) {
					t.Errorf("key %d of worker %d is not there", n/2, worker)
					return
				}
			}
		})
	}
	all.Wait()
	wrong := 0
	for n := range uint64(100_000) {
		if f.mayHave(hash(9<<32 + n)) {
			wrong++
		}
	}
	if wrong > 4000 {
		t.Errorf("%d of 100000 absent keys may be there", wrong)
	}
	if size, parts := f.size(), len(*f.parts.Load()); size < 4*each*95/100 || size > 4*each || parts != 2 {
		t.Errorf("%d keys in %d parts", size, parts)
	}
}
