package badger_test

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
)

func open(t *testing.T, dir string, o badger.Options) *badger.Store {
	t.Helper()
	s, err := badger.Open(dir, o)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return s
}

func TestContract(t *testing.T) {
	storetest.Exercise(t, func(t *testing.T, now func() time.Time) store.Store {
		return open(t, t.TempDir(), badger.Options{Now: now})
	})
}

func TestContractOverReopening(t *testing.T) {
	storetest.Reopen(t, func(t *testing.T, now func() time.Time) func() store.Store {
		dir := t.TempDir()
		return func() store.Store { return open(t, dir, badger.Options{Now: now}) }
	})
}
