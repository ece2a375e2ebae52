package e2e

import (
	"testing"
	"time"
)

// The preset stripe: a call in doubt is sent again under the upstream's own key, and with
// the same bytes. The upstream answers it from its record.
func TestResendUnderTheUpstreamsKey(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n breaker off\n preset stripe\n}", u.addr)
	u.on("/x", sequence(reset, status(502, "bad"), status(409, "locked"), status(201, "charged")))
	r := request{path: "/x", id: "k-1", body: `{"amount":1200}`}
	got := g.call(r)
	got.retryable(t, 409, "in-doubt")
	for _, want := range []struct {
		status int
		body   string
	}{{502, "bad"}, {409, "locked"}} { // neither says what became of the first attempt
		got = g.call(r)
		got.want(t, want.status, want.body, "in_doubt")
		if got.header.Get("X-Should-Retry") != "" || got.header.Get("Stripe-Should-Retry") == "false" {
			t.Errorf("a retry helps: %v", got.header)
		}
	}
	g.call(r).want(t, 201, "charged", "executed")
	g.call(r).want(t, 201, "charged", "replayed")
	u.arrived("/x", 4)
	for _, a := range u.all("/x") {
		if key := a.Header.Values("Idempotency-Key"); len(key) != 1 || key[0] != "k-1" || a.body != r.body {
			t.Errorf("sent with the key %q and %q", key, a.body)
		}
	}
}

// Time is no evidence: past the time for which the upstream keeps keys, counted from the
// first attempt, the call is in doubt for good (P1).
func TestResendEndsWithTheUpstreamsKey(t *testing.T) {
	for option, limit := range map[string]time.Duration{"": 23 * time.Hour, "on_unknown resend 1h": time.Hour} {
		u := newUpstream(t)
		g := start(t, "agent_proxy %s {\n breaker off\n preset stripe\n %s\n}", u.addr, option)
		u.on("/x", sequence(reset, reset, reset))
		r := request{path: "/x", id: "k"}
		g.call(r).retryable(t, 409, "in-doubt")
		g.store.pass(limit - time.Minute)
		g.call(r).retryable(t, 409, "in-doubt")
		u.arrived("/x", 2)
		g.store.pass(time.Minute)
		for range 2 {
			got := g.call(r)
			got.terminal(t, 409, "in-doubt")
			got.noRetry(t)
		}
		u.arrived("/x", 2)
	}
}

// What the upstream would not know again by its key is not sent again.
func TestResendNeedsTheSameKeyAndBytes(t *testing.T) {
	own := func(r request) request { return r }
	for name, row := range map[string]struct {
		first request
		then  func(request) request
		keyed bool // the first attempt could be sent again as it was
	}{
		"another id":       {request{header: headers{"Execution-Id": "k"}}, own, false},
		"quoted":           {request{id: "k"}, func(r request) request { r.id = `"k"`; return r }, true},
		"other bytes":      {request{id: "k", body: `{"a":1,"b":2}`}, func(r request) request { r.body = `{"b":2, "a":1}`; return r }, true},
		"beside the field": {request{id: "k"}, func(r request) request { r.id = ""; r.header = headers{"Execution-Id": "k"}; return r }, true},
	} {
		t.Run(name, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, "agent_proxy %s {\n breaker off\n preset stripe\n}", u.addr)
			u.on("/x", first(reset))
			row.first.path = "/x"
			got := g.call(row.first)
			if row.keyed {
				got.retryable(t, 409, "in-doubt")
			} else {
				got.terminal(t, 409, "in-doubt")
			}
			got = g.call(row.then(row.first))
			got.terminal(t, 409, "in-doubt")
			u.arrived("/x", 1)
			if row.keyed {
				g.call(row.first).want(t, 201, "arrival 2", "executed")
			}
		})
	}
}

// Stripe-Should-Retry of an upstream that keeps keys goes before its status, and passes.
func TestUpstreamsAdviceOnRetries(t *testing.T) {
	for _, row := range []struct {
		code   int
		advice string
		want   outcome
	}{
		{400, "", released}, {409, "", released}, {402, "", completed}, {500, "", completed},
		{402, "true", released}, {409, "true", released}, {500, "true", resent}, {503, "true", resent},
		{400, "false", completed}, {409, "false", completed}, {500, "false", completed}, {502, "false", completed},
		{429, "false", released},
	} {
		u := newUpstream(t)
		g := start(t, "agent_proxy %s {\n breaker off\n preset stripe\n}", u.addr)
		var header []string
		if row.advice != "" {
			header = []string{"Stripe-Should-Retry", row.advice}
		}
		u.on("/x", first(status(row.code, "the answer", header...)))
		r := request{path: "/x", id: "k"}
		got := g.call(r)
		got.want(t, row.code, "the answer", row.want.status())
		if said := got.header.Get("Stripe-Should-Retry"); said != row.advice {
			t.Errorf("%d: Stripe-Should-Retry %q became %q", row.code, row.advice, said)
		}
		g.check(u, r, got, row.want)
	}
}

// Another guard behind this one does not keep keys as Stripe does: its 409 is no release.
func TestResendAndAnotherGuard(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n breaker off\n preset stripe\n}", u.addr)
	u.on("/x", first(status(409, "running", "Execution-Status", "refused")))
	r := request{path: "/x", id: "k"}
	got := g.call(r)
	got.want(t, 409, "running", "in_doubt")
	g.check(u, r, got, resent)
}
