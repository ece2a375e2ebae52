package problem_test

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

func TestRetryAfterIsACeilingInSeconds(t *testing.T) {
	for after, want := range map[time.Duration]string{0: "1", time.Millisecond: "1", 1500 * time.Millisecond: "2", 3 * time.Second: "3"} {
		p := problem.New(problem.InProgress, "")
		p.RetryAfter = after
		w := httptest.NewRecorder()
		p.Write(w)
		if got := w.Header().Get("Retry-After"); got != want {
			t.Errorf("%v: Retry-After %q, want %q", after, got, want)
		}
	}
}

// What will never be done refuses for good: no client retries, whatever it reads.
func TestFinalProblem(t *testing.T) {
	p := problem.New(problem.DependencyNotDone, "")
	p.Final, p.Reason = true, "final"
	p.Dependencies = []problem.Dependency{{Node: "hold", State: "failed", Final: true}}
	w := httptest.NewRecorder()
	p.Write(w)
	if h := w.Header(); h.Get("Retry-After") != "" || h.Get("X-Should-Retry") != "false" || h.Get("Stripe-Should-Retry") != "false" ||
		strings.Contains(w.Body.String(), `"status":"409"`) || !strings.Contains(w.Body.String(), `"dependencies":[{"node":"hold","state":"failed","final":true}]`) {
		t.Errorf("%v %s", h, w.Body)
	}
	w = httptest.NewRecorder()
	p.WriteGRPC(w, "application/grpc")
	if h := w.Header(); h.Get("Grpc-Status") != "9" || h.Get("Grpc-Retry-Pushback-Ms") != "-1" {
		t.Errorf("%v", h)
	}
}
