//go:build unix

package e2e

import (
	"context"
	"strings"
	"testing"
)

// recognizing is a site whose guard reads no key: an Idempotency-Key is only a name for the test
// and the upstream. The store stops at named points.
func recognizing(t *testing.T) (*procUpstream, *procSite, *procStages) {
	upstream, stages := procNewUpstream(t), procNewStages(t)
	site := procNewSite(t, upstream.addr)
	site.store = "staged " + site.path("data") + " " + stages.url
	site.guard = "execution_id header Execution-Id\n missing_id recognize"
	site.raw = strings.Replace(site.config(), "agent_proxy", "e2e_leaves\n agent_proxy", 1)
	return upstream, site, stages
}

// retryOf is the call that says that it is a retry.
func retryOf(c procCall) procCall {
	c.header = map[string]string{"X-Stainless-Retry-Count": "1"}
	return c
}

// wantRecognized fails unless a is the replay of first for a call that was recognised.
func wantRecognized(t *testing.T, first, a procAnswer) {
	t.Helper()
	wantProcReplay(t, first, a)
	if id := a.header.Get("Execution-Recognized"); id == "" || id != first.header.Get("Execution-Id") {
		t.Errorf("recognised as %q, not %q", id, first.header.Get("Execution-Id"))
	}
}

// wantItsOwn fails unless a is the answer to a call that ran for itself.
func wantItsOwn(t *testing.T, a procAnswer) {
	t.Helper()
	if id := a.header.Get("Execution-Recognized"); !a.executed() || id != "" {
		t.Errorf("not executed for itself: %v, recognised as %q", a, id)
	}
}

// P1, P6 without a key (ADR 0070): SIGKILL. What ran is in doubt, and never runs again. What ended
// before it was noted that it was answered is replayed, once.
func TestCrashRecognized(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, site, stages := recognizing(t)
	gateway := site.start(t)

	running := procCall{id: "running"}
	hold := upstream.hold(t, running.id)
	lost := gateway.begin(t.Context(), procDial(), running)
	waitWithin(t, procBound, hold.arrived, "arrival")
	gateway.kill()
	if f := waitWithin(t, procBound, lost, "the call ends"); f.err == nil {
		t.Errorf("answered by a gateway that was killed: %v", f.answer)
	}
	hold.open()
	gateway = site.start(t)
	wantProcDoubt(t, gateway.post(t, running))
	wantProcDoubt(t, gateway.post(t, retryOf(running)))
	wantProcDoubt(t, gateway.post(t, running))

	answered := procCall{id: procTwice + "answered"}
	reached := stages.arm("before marks")
	first := gateway.post(t, answered)
	wantItsOwn(t, first)
	waitWithin(t, procBound, reached, "the marks")
	gateway.kill()
	gateway = site.start(t)
	wantRecognized(t, first, gateway.post(t, answered))
	wantRecognized(t, first, gateway.post(t, retryOf(answered)))
	wantProcDoubt(t, gateway.post(t, running))
	if got := upstream.arrivals(answered.id); got != 1 {
		t.Errorf("P1: %d effects", got)
	}
	wantItsOwn(t, gateway.post(t, answered))

	// What was answered before an orderly exit is none, whatever crashes after it.
	noted := procCall{id: procTwice + "noted"}
	first = gateway.post(t, noted)
	wantItsOwn(t, first)
	gateway.end(t)
	gateway = site.start(t)
	gateway.kill()
	gateway = site.start(t)
	wantRecognized(t, first, gateway.post(t, retryOf(noted)))
	wantItsOwn(t, gateway.post(t, noted))
	gateway.end(t)
}

// SIGKILL after the outcome of a call is recorded and before it is answered: it is replayed, and
// one that was being recorded is in doubt.
func TestCrashRecognizedAroundTheOutcome(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, site, stages := recognizing(t)
	gateway := site.start(t)
	for _, point := range []string{"before outcome", "after outcome"} {
		t.Run(point, func(t *testing.T) {
			c := procCall{id: strings.ReplaceAll(point, " ", "-")}
			reached := stages.arm(point)
			lost := gateway.begin(t.Context(), procDial(), c)
			waitWithin(t, procBound, reached, point)
			gateway.kill()
			if f := waitWithin(t, procBound, lost, "the call ends"); f.err == nil {
				t.Errorf("P7: answered before its commit: %v", f.answer)
			}
			gateway = site.start(t)
			a := gateway.post(t, c)
			if point == "before outcome" {
				wantProcDoubt(t, a)
			} else if !a.replayed() || a.header.Get("Execution-Recognized") == "" {
				t.Errorf("not a replay: %v", a)
			}
			if got := upstream.arrivals(c.id); got != 1 {
				t.Errorf("P1: %d effects", got)
			}
		})
	}
}

// An orderly restart: a call that was answered is no evidence, one whose client had left is.
func TestProcessRestartRecognized(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, site, _ := recognizing(t)
	gateway := site.start(t)
	answered, left := procCall{id: procTwice + "answered"}, procCall{id: procTwice + "left"}
	first := gateway.post(t, answered)
	wantItsOwn(t, first)

	hold := upstream.hold(t, left.id)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	leaving := left
	leaving.header = map[string]string{leaver: "yes"}
	lost := gateway.begin(ctx, procDial(), leaving)
	waitWithin(t, procBound, hold.arrived, "arrival")
	leave()
	waitWithin(t, procBound, lost, "the client leaves")
	waitWithin(t, procBound, gateway.log.when(leftLog), "the gateway knows")
	hold.open()
	gateway.end(t)

	gateway = site.start(t)
	wantRecognized(t, first, gateway.post(t, retryOf(answered)))
	wantItsOwn(t, gateway.post(t, answered))
	a := gateway.post(t, left)
	if !a.replayed() || a.header.Get("Execution-Recognized") == "" || upstream.arrivals(left.id) != 1 {
		t.Errorf("not a replay of the one effect: %v, %d effects", a, upstream.arrivals(left.id))
	}
	gateway.end(t)

	gateway = site.start(t) // its retry was answered
	wantItsOwn(t, gateway.post(t, left))
	gateway.end(t)
}
