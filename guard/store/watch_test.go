package store_test

import (
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"testing"
)

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestWakeClosesOnlyThatKey(t *testing.T) {
	k := store.NewWatchers()
	a1, _ := k.Watch([]byte("a"))
	a2, _ := k.Watch([]byte("a"))
	b, cancel := k.Watch([]byte("b"))
	k.Wake([]byte("a"))
	if !closed(a1) || !closed(a2) {
		t.Error("a watch slept through the change of its key")
	}
	if closed(b) {
		t.Error("another key's watch was woken")
	}
	cancel()
	cancel()
	if n := k.Len(); n != 0 {
		t.Errorf("%d watches left after wake and cancel, want 0", n)
	}
}

func TestCancelAfterWakeKeepsLaterWatches(t *testing.T) {
	k := store.NewWatchers()
	_, cancel := k.Watch([]byte("a"))
	k.Wake([]byte("a"))
	later, _ := k.Watch([]byte("a"))
	cancel()
	k.Wake([]byte("a"))
	if !closed(later) {
		t.Error("cancelling an old watch removed a later one")
	}
}

func TestWakeAll(t *testing.T) {
	k := store.NewWatchers()
	a, _ := k.Watch([]byte("a"))
	b, _ := k.Watch([]byte("b"))
	k.WakeAll()
	if !closed(a) || !closed(b) || k.Len() != 0 {
		t.Error("WakeAll left a watch asleep")
	}
}
