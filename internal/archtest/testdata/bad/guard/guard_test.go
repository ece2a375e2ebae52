package guard_test

import (
	"testing"
	"testing/synctest"
	clock "time"

	"example.com/house/guard/store/badger"
	_ "github.com/anishathalye/porcupine"
)

func TestGuard(t *testing.T) {
	if testing.Short() {
		t.Skip("too long")
	}
	_ = badger.Open
	clock.Sleep(clock.Second)
}

func TestBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock.Sleep(clock.Second)
		t.SkipNow()
	})
}

func TestTwice(t *testing.T) {}
