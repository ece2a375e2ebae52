package guard

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

func TestTargets(t *testing.T) {
	var all WriteTracker
	a, b := checkpoint.TargetOf("u", "/Docs/%41/"), checkpoint.TargetOf("u", "//docs/a")
	if other := checkpoint.TargetOf("u", "/docs/b"); a != b || a == other || a == checkpoint.TargetOf("v", "/docs/a") {
		t.Errorf("%q, %q, %q", a, b, other)
	}
	// Alone, one after the other, and beside another target.
	first := all.Open(a)
	elsewhere := all.Open(checkpoint.TargetOf("u", "/docs/b"))
	all.Write(a, first)()
	if first.close() || elsewhere.close() || first.close() {
		t.Error("nobody else has written there")
	}
	// A call that only looks disturbs nobody; whoever writes disturbs all others.
	first, second := all.Open(a), all.Open(b)
	over := all.Write(a, first)
	third := all.Open(a)
	over()
	if first.close() || !second.close() || !third.close() {
		t.Error("a write was not told to those beside it, or to its own call")
	}
	// Two that write at the same time disturb each other, also one without a window.
	first = all.Open(a)
	over = all.Write(a, first)
	all.Write(a, nil)()
	over()
	second = all.Open(a)
	over = all.Write(a, nil)
	over2 := all.Write(a, second)
	over()
	over2()
	if !first.close() || !second.close() || (*WriteWindow)(nil).close() {
		t.Error("writes at the same time went unnoticed")
	}
	if len(all.all) != 0 {
		t.Errorf("%d targets are left", len(all.all))
	}
}
