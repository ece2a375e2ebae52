package memory_test

import (
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
