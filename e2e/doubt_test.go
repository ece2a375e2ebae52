package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// probing is a site that asks /status about calls in doubt.
const probing = `agent_proxy %s {
	on_unknown probe GET /status/{http.agent_guard.execution_id}?ref={http.agent_guard.execution_id}&fixed=1 {
		header X-Probe {http.agent_guard.action}
		applied 200
		not_applied 404
		%s
	}
}`

// doubtful makes the call to path one in doubt.
func doubtful(g *gateway, u *upstream, r request) {
	g.t.Helper()
	u.on(r.path, first(reset))
	if got := g.call(r); got.status != 409 && got.status != 201 {
		g.t.Fatalf("%d %q", got.status, got.body)
	}
	u.arrived(r.path, 1)
}

// `on_unknown block`: what is in doubt stays so. `on_unknown retry`: it runs again, and
// then counts.
func TestOnUnknown(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n action again {\n match path /again\n on_unknown retry\n}\n}", u.addr)
	block, again := request{path: "/block", id: "k"}, request{path: "/again", id: "k"}
	doubtful(g, u, block)
	for range 3 {
		g.call(block).terminal(t, 409, "in-doubt")
	}
	u.arrived("/block", 1)

	doubtful(g, u, again)
	g.call(again).want(t, 201, "arrival 2", "executed")
	g.call(again).want(t, 201, "arrival 2", "replayed")
	u.arrived("/again", 2)
}

// `on_unknown retry`: many retries at once are one further execution.
func TestOnUnknownRetryRunsOnce(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "agent_proxy %s {\n on_unknown retry\n}", u.addr)
	r := request{path: "/x", id: "k"}
	doubtful(g, u, r)
	u.on("/x", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "second")(w, a)
	})
	var calls []*pending
	for range 50 {
		calls = append(calls, g.begin(r))
	}
	wait(t, hold.arrived, "the second execution")
	followers(t, 49)
	hold.open()
	for _, p := range calls {
		if got := p.answer(); got.status != 201 || got.body != "second" {
			t.Errorf("%d %q", got.status, got.body)
		}
	}
	u.arrived("/x", 2)
}

// `on_unknown probe`: the status URL settles a doubt, either way, or not at all.
func TestProbe(t *testing.T) {
	for _, row := range []struct {
		name, options string
		answer        func(http.ResponseWriter, *arrival)
		check         func(t *testing.T, g *gateway, u *upstream, r request)
	}{
		{"applied", "", status(200, "it is done"), func(t *testing.T, g *gateway, u *upstream, r request) {
			for range 2 { // the second is answered from the record
				doc := g.call(r).terminal(t, 409, "result-unavailable")
				if doc.State != "completed" || *doc.SafeNewKey {
					t.Errorf("%+v", doc)
				}
			}
			u.arrived(r.path, 1)
			u.arrived("/status/k", 1)
		}},
		{"applied, its answer is the result", "use_answer", status(200, "it is done", "X-Found", "yes", "Set-Cookie", "a=b"), func(t *testing.T, g *gateway, u *upstream, r request) {
			for range 2 {
				got := g.call(r)
				got.want(t, 200, "it is done", "replayed")
				if got.header.Get("X-Found") != "yes" || got.header.Get("Set-Cookie") != "" {
					t.Errorf("header %v", got.header)
				}
			}
			u.arrived(r.path, 1)
			u.arrived("/status/k", 1)
		}},
		{"not applied", "", status(404, "no such payment"), func(t *testing.T, g *gateway, u *upstream, r request) {
			g.call(r).want(t, 201, "arrival 2", "executed")
			g.call(r).want(t, 201, "arrival 2", "replayed")
			u.arrived(r.path, 2)
			u.arrived("/status/k", 1)
		}},
		{"neither", "", status(202, "who knows"), stillInDoubt},
		{"lost", "", reset, stillInDoubt},
		{"cut", "", raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"), stillInDoubt},
		{"too large", "", status(200, strings.Repeat("x", 300<<10)), stillInDoubt},
		{"silent", "timeout 3s", func(_ http.ResponseWriter, a *arrival) { <-a.Context().Done() }, stillInDoubt},
	} {
		t.Run(row.name, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, probing, u.addr, row.options)
			u.on("/status/k", row.answer)
			r := request{path: "/x", id: "k", header: headers{"Authorization": "Bearer secret", "Cookie": "c=d"}}
			doubtful(g, u, r)
			u.arrived("/status/k", 0) // the first call's own answer does not wait for a probe
			row.check(t, g, u, r)
			asked := u.last("/status/k")
			if asked.RequestURI != "/status/k?ref=k&fixed=1" || asked.Method != "GET" || asked.Header.Get("X-Probe") != "default" {
				t.Errorf("asked %s %s %v", asked.Method, asked.RequestURI, asked.Header)
			}
			for _, name := range []string{"Authorization", "Cookie", "Idempotency-Key", "Execution-Parent"} {
				if v := asked.Header.Get(name); v != "" {
					t.Errorf("the probe has the caller's %s: %q", name, v)
				}
			}
		})
	}
}

func stillInDoubt(t *testing.T, g *gateway, u *upstream, r request) {
	t.Helper()
	for range 2 {
		g.call(r).terminal(t, 409, "in-doubt")
	}
	u.arrived(r.path, 1)
	u.arrived("/status/k", 2) // each retry asks anew
}

// Evidence is in the status, the header and the body.
func TestProbeEvidence(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `agent_proxy %s {
		breaker off
		on_unknown probe GET /find?id={http.agent_guard.execution_id} {
			applied {
				status 2xx
				header X-State final
				json /state done
				json /count 1
			}
			not_applied {
				status 200
				json /count 0
			}
		}
	}`, u.addr)
	for i, row := range []struct {
		body, state string
		want        string
	}{
		{`{"state":"done","count":1}`, "final", "result-unavailable"},
		{`{"state":"done","count":"1"}`, "final", "result-unavailable"},
		{`{"state":"done","count":1}`, "draft", "in-doubt"},
		{`{"state":"open","count":1}`, "final", "in-doubt"},
		{`{"state":"done"}`, "final", "in-doubt"},
		{`not JSON`, "final", "in-doubt"},
		{`{"count":0}`, "", ""},
	} {
		u.on("/find", status(200, row.body, "X-State", row.state))
		r := request{path: fmt.Sprint("/", i), id: "k"}
		doubtful(g, u, r)
		if got := g.call(r); row.want == "" {
			got.want(t, 201, "arrival 2", "executed")
		} else {
			got.terminal(t, 409, row.want)
		}
	}
}

// Values in the probe's URI are escaped by place: whoever chooses an id does not
// choose what is asked.
func TestProbeEscapes(t *testing.T) {
	u := newUpstream(t)
	g := start(t, probing, u.addr, "")
	for i, row := range []struct{ id, path, query string }{
		{"a/b", "/status/a%2Fb", "a%2Fb"},
		{"../admin", "/status/..%2Fadmin", "..%2Fadmin"},
		{"%2e%2e", "/status/%252e%252e", "%252e%252e"},
		{"a?b=c&fixed=2#d", "/status/a%3Fb=c&fixed=2%23d", "a%3Fb%3Dc%26fixed%3D2%23d"},
		{"{http.request.host}", "/status/%7Bhttp.request.host%7D", "%7Bhttp.request.host%7D"},
		{"a+b;c", "/status/a+b%3Bc", "a%2Bb%3Bc"},
	} {
		u.on(row.path, status(404, ""))
		r := request{path: fmt.Sprint("/", i), id: row.id}
		doubtful(g, u, r)
		g.call(r).want(t, 201, "arrival 2", "executed")
		if got, want := u.last(row.path).RequestURI, row.path+"?ref="+row.query+"&fixed=1"; got != want {
			t.Errorf("asked %s, want %s", got, want)
		}
	}
	// These have no escaped form that keeps its place.
	for i, id := range []string{".", ".."} {
		r := request{path: fmt.Sprint("/dots", i), id: id}
		doubtful(g, u, r)
		before := u.total()
		g.call(r).terminal(t, 409, "in-doubt")
		if u.total() != before {
			t.Errorf("%q was asked for", id)
		}
	}
}

// Requests of the guard's own do not pass the site's authentication, and are not
// guarded themselves.
func TestProbeGoesPastSiteAuth(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `
	@stranger not header X-Api-Key good
	respond @stranger "stranger" 401
	agent_guard {
		consequential path /status*
		on_unknown probe GET /status?id={http.agent_guard.execution_id} {
			not_applied 404
		}
		upstream {
			reverse_proxy %[1]s
		}
	}
	reverse_proxy %[1]s`, u.addr)
	u.on("/status", status(404, ""))
	r := request{path: "/x", id: "k", header: headers{"X-Api-Key": "good"}}
	doubtful(g, u, r)
	g.call(r).want(t, 201, "arrival 2", "executed")
	asked := u.last("/status")
	if asked.Header.Get("X-Api-Key") != "" || asked.Header.Get("Execution-Parent") != "" {
		t.Errorf("asked with %v", asked.Header)
	}
	u.arrived("/status", 1)
}

// Trap 15: many retries of one call in doubt make one probe, and at most one further
// execution.
func TestProbeOnceForMany(t *testing.T) {
	for name, row := range map[string]struct {
		answer int
		more   int // executions
	}{
		"applied": {200, 0}, "not applied": {404, 1}, "neither": {202, 0},
	} {
		t.Run(name, func(t *testing.T) {
			u, probed, again := newUpstream(t), newGate(t), newGate(t)
			g := start(t, probing, u.addr, "")
			r := request{path: "/x", id: "k"}
			doubtful(g, u, r)
			u.on("/status/k", func(w http.ResponseWriter, a *arrival) {
				probed.pass()
				status(row.answer, "")(w, a)
			})
			u.on("/x", func(w http.ResponseWriter, a *arrival) {
				again.pass()
				_, _ = io.WriteString(w, "second")
			})
			var calls []*pending
			for range 50 {
				calls = append(calls, g.begin(r))
			}
			wait(t, probed.arrived, "the probe")
			eventually(t, "49 calls wait for the probe", func() bool { return waiting("guard.(*Call).probe") == 50 })
			probed.open()
			if row.more > 0 {
				wait(t, again.arrived, "the second execution")
				followers(t, 49)
			}
			again.open()
			for _, p := range calls {
				got := p.answer()
				switch name {
				case "applied":
					got.terminal(t, 409, "result-unavailable")
				case "neither":
					got.terminal(t, 409, "in-doubt")
				default:
					if got.status != 200 || got.body != "second" {
						t.Errorf("%d %q", got.status, got.body)
					}
				}
			}
			u.arrived("/x", 1+row.more)
			u.arrived("/status/k", 1)
		})
	}
}

// P7: a caller that leaves does not waste the probe that others wait for.
func TestProberLeaves(t *testing.T) {
	u, probed := newUpstream(t), newGate(t)
	g := start(t, probing, u.addr, "")
	r := request{path: "/x", id: "k", client: g.newClient(nil)}
	doubtful(g, u, r)
	u.on("/status/k", func(w http.ResponseWriter, a *arrival) {
		probed.pass()
		status(200, "")(w, a)
	})
	leave := g.leaving(r)
	wait(t, probed.arrived, "the probe")
	waits := g.begin(r)
	eventually(t, "another waits for the probe", func() bool { return waiting("guard.(*Call).probe") == 2 })
	leave()
	probed.open()
	waits.answer().terminal(t, 409, "result-unavailable")
	u.arrived("/status/k", 1)
	u.arrived("/x", 1)
}

// noRetry checks that an answer tells of the doubt and keeps every SDK from retrying.
func (r reply) noRetry(t *testing.T) {
	t.Helper()
	for name, want := range map[string]string{"Execution-Status": "in_doubt", "X-Should-Retry": "false", "Stripe-Should-Retry": "false"} {
		if got := r.header.Values(name); len(got) != 1 || got[0] != want {
			t.Errorf("%d has %s %q, want %q", r.status, name, got, want)
		}
	}
}

// P6, C3: who made a call that went into doubt, who is attached to it and who comes later
// are told in one way, whatever the upstream's status is and says of retries.
func TestDoubtIsToldInOneWay(t *testing.T) {
	for _, row := range []struct {
		name, option string
		answer       func(http.ResponseWriter, *arrival)
		status       int
	}{
		{"502", "", status(502, "bad"), 502},
		{"503 that says retry", "", status(503, "bad", "X-Should-Retry", "true", "Stripe-Should-Retry", "true"), 503},
		{"504 without a body", "", status(504, ""), 504},
		{"500 under strict", "preset strict", status(500, "bad"), 500},
		{"408", "", status(408, "bad"), 408},
		{"by a rule", "outcome in_doubt 202", status(202, "later"), 202},
		{"unframed", "", raw("HTTP/1.0 200 OK\r\n\r\nall of it"), 200},
		{"another guard in doubt", "", status(500, "bad", "Execution-Status", "in_doubt"), 500},
		{"another guard's refusal", "", status(409, "bad", "Execution-Status", "refused"), 409},
		{"no answer", "", reset, 409},
	} {
		t.Run(row.name, func(t *testing.T) {
			u, hold := newUpstream(t), newGate(t)
			g := start(t, "agent_proxy %s {\n breaker off\n%s\n}", u.addr, row.option)
			u.on("/x", func(w http.ResponseWriter, a *arrival) {
				hold.pass()
				row.answer(w, a)
			})
			r := request{path: "/x", id: "k"}
			calls := []*pending{g.begin(r)}
			wait(t, hold.arrived, "the call")
			calls = append(calls, g.begin(r), g.begin(r))
			followers(t, 2)
			hold.open()
			for i, p := range calls {
				got := p.answer()
				if got.status != row.status {
					t.Errorf("%d got %d %q", i, got.status, got.body)
				}
				got.noRetry(t)
			}
			later := g.call(r)
			later.terminal(t, 409, "in-doubt")
			later.noRetry(t)
			u.arrived("/x", 1)
		})
	}
}

// `on_unknown retry`: a retry of the call helps, so no answer keeps an SDK from it; the
// doubt is told all the same, also of an attempt that was refused.
func TestDoubtThatARetryCures(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n breaker off\n on_unknown retry\n}", u.addr)
	open := func(got reply, status int) {
		t.Helper()
		if got.status != status || got.header.Get("Execution-Status") != "in_doubt" || got.header.Get("X-Should-Retry") != "" {
			t.Errorf("%d %v", got.status, got.header)
		}
	}
	u.on("/x", sequence(reset, status(502, "bad"), status(429, "slow down")))
	r := request{path: "/x", id: "k"}
	got := g.call(r)
	got.retryable(t, 409, "in-doubt")
	open(got, 409)
	open(g.call(r), 502)
	open(g.call(r), 429)
	g.call(r).want(t, 201, "arrival 4", "executed")
	g.call(r).want(t, 201, "arrival 4", "replayed")
}
