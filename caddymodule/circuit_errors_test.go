package caddymodule

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// An opening waits until its call has told what came of it, not for a call that has,
// that tells nothing, or that runs on.
func TestOpeningsWaitForTheirCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var e engine
		waited := func(checkpoint string) time.Duration {
			began := time.Now()
			e.running.await(t.Context(), breaker.Event{Evidence: proxy.Evidence{Checkpoint: checkpoint, Workflow: "flow"}.String()})
			return time.Since(began)
		}
		for _, checkpoint := range []string{"", "ends", "runs"} {
			e.running.begin(checkpoint)
		}
		time.AfterFunc(time.Second, func() { e.running.end("ends") })
		for _, step := range []struct {
			checkpoint string
			want       time.Duration
		}{{"", 0}, {"unknown", 0}, {"ends", time.Second}, {"ends", 0}, {"runs", circuitErrorTime}} {
			if got := waited(step.checkpoint); got != step.want {
				t.Errorf("%q: waited %v, want %v", step.checkpoint, got, step.want)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		e.running.wait(ctx, "runs") // the engine ends
		e.running.end("runs")
		e.running.end("runs")
		if len(e.running.ends) != 0 {
			t.Errorf("%d calls are remembered", len(e.running.ends))
		}
	})
}
