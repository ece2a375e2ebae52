package guard

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// An opening waits until its call has told what came of it, not for a call that has,
// that tells nothing, or that runs on.
func TestOpeningsWaitForTheirCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var e Engine
		waited := func(checkpoint string) time.Duration {
			began := time.Now()
			e.AwaitCall(t.Context(), checkpoint)
			return time.Since(began)
		}
		for _, checkpoint := range []string{"", "ends", "runs"} {
			e.running.begin(checkpoint)
		}
		time.AfterFunc(time.Second, func() { e.running.end("ends") })
		for _, step := range []struct {
			checkpoint string
			want       time.Duration
		}{{"", 0}, {"unknown", 0}, {"ends", time.Second}, {"ends", 0}, {"runs", callErrorTime}} {
			if got := waited(step.checkpoint); got != step.want {
				t.Errorf("%q: waited %v, want %v", step.checkpoint, got, step.want)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		e.AwaitCall(ctx, "runs") // the engine ends
		e.running.end("runs")
		e.running.end("runs")
		e.running.ends.Range(func(id, _ any) bool {
			t.Errorf("%v is remembered", id)
			return true
		})
	})
}
