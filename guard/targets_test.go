package guard

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

func TestTargets(t *testing.T) {
	var all WriteTracker
	a, b := checkpoint.TargetOf("u", "/Docs/%41/"), checkpoint.TargetOf("u", "//docs/a")
	if other := checkpoint.TargetOf("u", "/docs/b"); a != b || a == other || a == checkpoint.TargetOf("v", "/docs/a") {
		t.Errorf("%q, %q, %q", a, b, other)
	}
	// Alone, one after the other, and beside another target.
	first := all.Open(a, execution.Key{})
	elsewhere := all.Open(checkpoint.TargetOf("u", "/docs/b"), execution.Key{})
	all.write(a, first)()
	if first.end() || elsewhere.end() || first.end() {
		t.Error("nobody else has written there")
	}
	// A call that only looks disturbs nobody; whoever writes disturbs all others.
	first, second := all.Open(a, execution.Key{}), all.Open(b, execution.Key{})
	over := all.write(a, first)
	third := all.Open(a, execution.Key{})
	over()
	if first.end() || !second.end() || !third.end() {
		t.Error("a write was not told to those beside it, or to its own call")
	}
	// Two that write at the same time disturb each other, also one without a window.
	first = all.Open(a, execution.Key{})
	over = all.write(a, first)
	all.write(a, nil)()
	over()
	second = all.Open(a, execution.Key{})
	over = all.write(a, nil)
	over2 := all.write(a, second)
	over()
	over2()
	if !first.end() || !second.end() || (*writeWindow)(nil).end() {
		t.Error("writes at the same time went unnoticed")
	}
	if len(all.all) != 0 {
		t.Errorf("%d targets are left", len(all.all))
	}
}
