package e2e

import (
	"net/http"
	"testing"
)

// Section "Endpoints": a question that waits is answered when the execution is
// settled, however it ends.
func TestExecutionWaitEndsWithTheExecution(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(http.ResponseWriter, *arrival)
		want func(t *testing.T, r reply)
	}{
		"completed": {status(201, "done"), func(t *testing.T, r reply) {
			if e := r.execution(t, "k"); e.State != "completed" || e.Status != 201 || !e.Replayable {
				t.Errorf("%+v", e)
			}
		}},
		"in doubt": {reset, func(t *testing.T, r reply) {
			if e := r.execution(t, "k"); e.State != "in_doubt" || e.Cause != "connection_lost" {
				t.Errorf("%+v", e)
			}
		}},
		"released": {status(429, "slow down"), func(t *testing.T, r reply) {
			r.terminal(t, 404, "execution-unknown")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			u, hold := newUpstream(t), newGate(t)
			g := start(t, "agent_proxy %s", u.addr)
			u.on("/x", func(w http.ResponseWriter, a *arrival) {
				hold.pass()
				c.end(w, a)
			})
			// What does not exist is not waited for.
			g.call(asking("k?wait=60s", ann)).terminal(t, 404, "execution-unknown")
			call := g.begin(request{path: "/x", id: "k", header: ann})
			wait(t, hold.arrived, "the call")
			waits := []*pending{g.begin(asking("k?wait=60s", ann)), g.begin(asking("k?wait=60", ann)), g.begin(asking("k?wait=1m&path=/x", ann))}
			awaited(t, len(waits))
			if e := g.call(asking("k", ann)).execution(t, "k"); e.State != "running" {
				t.Errorf("without waiting: %+v", e)
			}
			for _, p := range waits {
				p.unanswered("while it runs")
			}
			hold.open()
			for _, p := range waits {
				c.want(t, p.answer())
			}
			call.answer()
			awaited(t, 0)
			u.arrived("/x", 1)
		})
	}
}

// A wait for several executions ends with the last of them; one that is over does not
// begin.
func TestExecutionWaitIsForAll(t *testing.T) {
	u, first, second := newUpstream(t), newGate(t), newGate(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/1", func(http.ResponseWriter, *arrival) { first.pass() })
	u.on("/2", func(http.ResponseWriter, *arrival) { second.pass() })
	one := g.begin(request{path: "/1", id: "k", header: ann})
	two := g.begin(request{path: "/2", id: "k", header: ann})
	wait(t, first.arrived, "the first call")
	wait(t, second.arrived, "the second call")
	both, narrow := g.begin(asking("k?wait=60s", ann)), g.begin(asking("k?wait=60s&path=/1", ann))
	awaited(t, 2)
	first.open()
	one.answer()
	if e := narrow.answer().execution(t, "k"); e.State != "completed" {
		t.Errorf("%+v", e)
	}
	awaited(t, 1)
	both.unanswered("while one of them runs")
	second.open()
	two.answer()
	for _, e := range both.answer().executions(t, 200, "k") {
		if e.State != "completed" {
			t.Errorf("%+v", e)
		}
	}
	g.call(asking("k?wait=60s", ann)).executions(t, 200, "k")
}

// When the time is over the answer is the state of then. When the client leaves,
// nothing of its question stays behind, and the execution goes on.
func TestExecutionWaitIsOver(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "done")(w, a)
	})
	call := g.begin(request{path: "/x", id: "k", header: ann})
	wait(t, hold.arrived, "the call")
	if e := g.call(asking("k?wait=30ms", ann)).execution(t, "k"); e.State != "running" || e.Result != nil || e.Deadline.IsZero() {
		t.Errorf("%+v", e)
	}
	g.call(asking("k/output?wait=30ms", ann)).retryable(t, 409, "in-progress")

	for _, what := range []string{"k?wait=60s", "k/output?wait=60s"} {
		for version, client := range map[string]*http.Client{"h1": g.newClient(nil), "h2c": g.h2cClient()} {
			r := asking(what, ann)
			r.client = client
			leave := g.leaving(r)
			if what == "k?wait=60s" {
				awaited(t, 1)
			} else {
				followers(t, 1)
			}
			leave()
			eventually(t, what+" over "+version+" is given up", func() bool {
				return waiting("api.(*executionsRequest).serve") == 0
			})
		}
	}
	hold.open()
	call.answer().want(t, 201, "done", "executed")
	u.arrived("/x", 1)
}
