package caddymodule

import (
	"strconv"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// cascade 3.3.2, ADR 0025: a workflow is told once for each outage of a breaker, whatever
// probes fail in it, and each turn of it tells so many at most.
func TestRejectionsOfAnOutage(t *testing.T) {
	var r rejections
	refusal := func(outage, generation uint64) *breaker.OpenError {
		return &breaker.OpenError{Key: breaker.Key{Upstream: "a:1"}, Outage: outage, Generation: generation}
	}
	for n, step := range []struct {
		outage, generation uint64
		workflow           string
		want               bool
	}{
		{2, 2, "a", true},
		{2, 2, "a", false},
		{2, 4, "a", false}, // a probe has failed
		{2, 4, "b", true},
		{7, 7, "a", true}, // another outage
	} {
		if got := r.first(refusal(step.outage, step.generation), step.workflow); got != step.want {
			t.Errorf("step %d: %v", n+1, got)
		}
	}
	r.over(breaker.Key{Upstream: "a:1"})
	if !r.first(refusal(7, 7), "a") { // of the breaker that has come in its place
		t.Error("what is over is remembered")
	}
	for n := range maxRejected + 5 {
		if got := r.first(refusal(7, 7), strconv.Itoa(n)); got != (n < maxRejected-1) {
			t.Fatalf("workflow %d: %v", n+2, got)
		}
	}
	if !r.first(refusal(7, 9), "late") || r.first(refusal(7, 9), "late") {
		t.Error("once too many were told of, nobody is told any more")
	}
}
