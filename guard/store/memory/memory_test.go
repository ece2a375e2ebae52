package memory_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
)

func TestContract(t *testing.T) {
	storetest.Exercise(t, func(_ *testing.T, now func() time.Time) store.Store {
		return memory.New(memory.Options{Now: now})
	})
}

func TestMembers(t *testing.T) {
	storetest.Members(t, func(_ *testing.T, now func() time.Time) storetest.Fleet {
		st := memory.New(memory.Options{Now: now})
		return storetest.Fleet{
			Join:   func(node string) store.Shared { return st.Join(node) },
			Remove: func(m store.Shared) { m.(*memory.Member).Remove() },
		}
	})
}

func TestInsideABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New(memory.Options{})
		key := []byte("a")
		changed, cancel := s.Watch(key)
		defer cancel()
		go func() {
			time.Sleep(time.Minute)
			w := store.Write{Key: key, Value: []byte("1"), Expires: time.Now().Add(time.Minute)}
			if _, err := s.Commit(t.Context(), w); err != nil {
				t.Error(err)
			}
		}()
		<-changed // would deadlock the bubble if the watch slept on
		if _, err := s.Get(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if _, err := s.Get(t.Context(), key); err == nil {
			t.Error("found after its expiry by the bubble's clock")
		}
	})
}

// numbered seals by a number in front: that of its newest key.
type numbered struct{ keys []uint32 }

func (n numbered) KeyIDs() []uint32 { return n.keys }

func (numbered) KeyOf(sealed []byte) uint32 { return uint32(sealed[0]) }

func (n numbered) Seal(dst, plaintext, _ []byte) []byte {
	return append(append(dst, byte(n.keys[len(n.keys)-1])), plaintext...)
}

func (numbered) Open(dst, sealed, _ []byte) ([]byte, error) { return append(dst, sealed[1:]...), nil }

func (numbered) Check(uint32) string { return "" }

func (numbered) Use(uint32) bool { return false }

func (numbered) Index(string, ...string) [32]byte { return [32]byte{} }

// Re-sealing keeps the limits of a commit, however large the values are.
func TestResealKeepsTheLimitsOfACommit(t *testing.T) {
	s := memory.New(memory.Options{})
	const n = 100
	for i := range n {
		value := numbered{[]uint32{1}}.Seal(nil, make([]byte, store.MaxValue-1), nil)
		if _, err := s.Commit(t.Context(), store.Write{Key: fmt.Appendf(nil, "a%03d", i), Value: value}); err != nil {
			t.Fatal(err)
		}
	}
	r := store.NewResealer(s, numbered{[]uint32{1, 2}})
	if err := r.Walk(t.Context(), []byte("a"), n, r.Reseal); err != nil || r.Seen != n || r.Resealed != n || r.Damaged != 0 {
		t.Errorf("%d seen, %d sealed anew, %d damaged, %v", r.Seen, r.Resealed, r.Damaged, err)
	}
	for entry, err := range s.Scan(t.Context(), store.Prefix([]byte("a"))) {
		if err != nil || entry.Value[0] != 2 || len(entry.Value) != store.MaxValue {
			t.Fatalf("%q is under key %d, %v", entry.Key, entry.Value[0], err)
		}
	}
}
