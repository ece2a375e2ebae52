package caddymodule

import (
	"runtime"
	"testing"
	"time"
)

// A rotation that waits for the store, and a configuration that waits for the rotation,
// are in nobody else's way.
func TestKeysThatWaitHoldNobodyUp(t *testing.T) {
	dir := t.TempDir()
	running := started(t, dir, "")
	next, err := newApp(t, dir, "")
	if err != nil {
		t.Fatal(err)
	}
	running.held.keying.Lock() // as a rotation does
	before := references(t, dir)
	loaded := make(chan error, 1)
	go func() { loaded <- next.Start() }()
	for references(t, dir) == before {
		runtime.Gosched()
	}
	asked := make(chan error, 1)
	go func() {
		e, err := running.acquire()
		if err == nil {
			err = e.release()
		}
		asked <- err
	}()
	select {
	case err := <-asked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("a call of the running configuration waits")
	}
	running.held.keying.Unlock()
	if err := <-loaded; err != nil {
		t.Error(err)
	}
	if err := next.Cleanup(); err != nil {
		t.Error(err)
	}
}
