package badger_test

import (
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// observed adds up what an observer is told.
type observed struct {
	mu      sync.Mutex
	groups  int
	batches int
	wrong   time.Duration
}

func (o *observed) Committed(batches int, took time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.groups++
	o.batches += batches
	if took <= 0 {
		o.wrong = took
	}
}

// An observer is told of every group that became durable: of all batches that landed,
// and of none that lost.
func TestObserver(t *testing.T) {
	o := new(observed)
	s := open(t, t.TempDir(), badger.Options{Observer: o})
	defer s.Close()
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			for j := range 5 {
				write := store.Write{Key: []byte{byte(i), byte(j)}, Value: []byte("v"), If: store.Absent()}
				if _, err := s.Commit(t.Context(), write); err != nil {
					t.Error(err)
				}
				if _, err := s.Commit(t.Context(), write); err == nil {
					t.Error("the second insertion landed")
				}
			}
		})
	}
	all.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	stats := s.Stats()
	if o.batches != 100 || o.groups == 0 || uint64(o.groups) != stats.Commits || o.wrong != 0 {
		t.Errorf("told of %d batches in %d groups (%v), want 100 in %d", o.batches, o.groups, o.wrong, stats.Commits)
	}
}
