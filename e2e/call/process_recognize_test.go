//go:build unix

package call

import (
	"context"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// recognizing is a site whose guard reads no key: an Idempotency-Key is only a name for the test
// and the upstream. The store stops at named points.
func recognizing(t *testing.T) (*harness.ProcUpstream, *harness.ProcSite, *harness.ProcStages) {
	upstream, stages := harness.ProcNewUpstream(t), harness.ProcNewStages(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Store = "staged " + site.Path("data") + " " + stages.Url
	site.Guard = "execution_id header Execution-Id\n missing_id recognize"
	site.Raw = strings.Replace(site.Config(), "agent_proxy", "e2e_leaves\n agent_proxy", 1)
	return upstream, site, stages
}

// retryOf is the call that says that it is a retry.
func retryOf(c harness.ProcCall) harness.ProcCall {
	c.Header = map[string]string{"X-Stainless-Retry-Count": "1"}
	return c
}

// wantRecognized fails unless a is the replay of first for a call that was recognised.
func wantRecognized(t *testing.T, first, a harness.ProcAnswer) {
	t.Helper()
	harness.WantProcReplay(t, first, a)
	if id := a.Header.Get("Execution-Recognized"); id == "" || id != first.Header.Get("Execution-Id") {
		t.Errorf("recognised as %q, not %q", id, first.Header.Get("Execution-Id"))
	}
}

// wantItsOwn fails unless a is the answer to a call that ran for itself.
func wantItsOwn(t *testing.T, a harness.ProcAnswer) {
	t.Helper()
	if id := a.Header.Get("Execution-Recognized"); !a.Executed() || id != "" {
		t.Errorf("not executed for itself: %v, recognised as %q", a, id)
	}
}

// P1, P6 without a key (ADR 0070): SIGKILL. What ran is in doubt, and never runs again. What ended
// before it was noted that it was answered is replayed, once.
func TestCrashRecognized(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, site, stages := recognizing(t)
	gateway := site.Start(t)

	running := harness.ProcCall{Id: "running"}
	hold := upstream.Hold(t, running.Id)
	lost := gateway.Begin(t.Context(), harness.ProcDial(), running)
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	gateway.Kill()
	if f := harness.WaitWithin(t, harness.ProcBound, lost, "the call ends"); f.Err == nil {
		t.Errorf("answered by a gateway that was killed: %v", f.Answer)
	}
	hold.Open()
	gateway = site.Start(t)
	harness.WantProcDoubt(t, gateway.Post(t, running))
	harness.WantProcDoubt(t, gateway.Post(t, retryOf(running)))
	harness.WantProcDoubt(t, gateway.Post(t, running))

	answered := harness.ProcCall{Id: harness.ProcTwice + "answered"}
	reached := stages.Arm("before marks")
	first := gateway.Post(t, answered)
	wantItsOwn(t, first)
	harness.WaitWithin(t, harness.ProcBound, reached, "the marks")
	gateway.Kill()
	gateway = site.Start(t)
	wantRecognized(t, first, gateway.Post(t, answered))
	wantRecognized(t, first, gateway.Post(t, retryOf(answered)))
	harness.WantProcDoubt(t, gateway.Post(t, running))
	if got := upstream.Arrivals(answered.Id); got != 1 {
		t.Errorf("P1: %d effects", got)
	}
	wantItsOwn(t, gateway.Post(t, answered))

	// What was answered before an orderly exit is none, whatever crashes after it.
	noted := harness.ProcCall{Id: harness.ProcTwice + "noted"}
	first = gateway.Post(t, noted)
	wantItsOwn(t, first)
	gateway.End(t)
	gateway = site.Start(t)
	gateway.Kill()
	gateway = site.Start(t)
	wantRecognized(t, first, gateway.Post(t, retryOf(noted)))
	wantItsOwn(t, gateway.Post(t, noted))
	gateway.End(t)
}

// SIGKILL after the outcome of a call is recorded and before it is answered: it is replayed, and
// one that was being recorded is in doubt.
func TestCrashRecognizedAroundTheOutcome(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, site, stages := recognizing(t)
	gateway := site.Start(t)
	for _, point := range []string{"before outcome", "after outcome"} {
		t.Run(point, func(t *testing.T) {
			c := harness.ProcCall{Id: strings.ReplaceAll(point, " ", "-")}
			reached := stages.Arm(point)
			lost := gateway.Begin(t.Context(), harness.ProcDial(), c)
			harness.WaitWithin(t, harness.ProcBound, reached, point)
			gateway.Kill()
			if f := harness.WaitWithin(t, harness.ProcBound, lost, "the call ends"); f.Err == nil {
				t.Errorf("P7: answered before its commit: %v", f.Answer)
			}
			gateway = site.Start(t)
			a := gateway.Post(t, c)
			if point == "before outcome" {
				harness.WantProcDoubt(t, a)
			} else if !a.Replayed() || a.Header.Get("Execution-Recognized") == "" {
				t.Errorf("not a replay: %v", a)
			}
			if got := upstream.Arrivals(c.Id); got != 1 {
				t.Errorf("P1: %d effects", got)
			}
		})
	}
}

// An orderly restart: a call that was answered is no evidence, one whose client had left is.
func TestProcessRestartRecognized(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, site, _ := recognizing(t)
	gateway := site.Start(t)
	answered, left := harness.ProcCall{Id: harness.ProcTwice + "answered"}, harness.ProcCall{Id: harness.ProcTwice + "left"}
	first := gateway.Post(t, answered)
	wantItsOwn(t, first)

	hold := upstream.Hold(t, left.Id)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	leaving := left
	leaving.Header = map[string]string{harness.Leaver: "yes"}
	lost := gateway.Begin(ctx, harness.ProcDial(), leaving)
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	leave()
	harness.WaitWithin(t, harness.ProcBound, lost, "the client leaves")
	harness.WaitWithin(t, harness.ProcBound, gateway.Log.When(harness.LeftLog), "the gateway knows")
	hold.Open()
	gateway.End(t)

	gateway = site.Start(t)
	wantRecognized(t, first, gateway.Post(t, retryOf(answered)))
	wantItsOwn(t, gateway.Post(t, answered))
	a := gateway.Post(t, left)
	if !a.Replayed() || a.Header.Get("Execution-Recognized") == "" || upstream.Arrivals(left.Id) != 1 {
		t.Errorf("not a replay of the one effect: %v, %d effects", a, upstream.Arrivals(left.Id))
	}
	gateway.End(t)

	gateway = site.Start(t) // its retry was answered
	wantItsOwn(t, gateway.Post(t, left))
	gateway.End(t)
}
