package e2e

import (
	"bufio"
	"net/http"
	"testing"
)

// P1: some clients offer HTTP/2 with every cleartext call. Such an offer is no
// upgrade that would lead past the guard, and it is not made to the upstream.
func TestOfferOfHTTP2IsGuarded(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for range 2 {
		conn := g.dial()
		write(t, conn, "POST /pay HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"+
			"HTTP2-Settings: AAMAAABkAAQAAP__\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != 201 || res.Header.Get("Execution-Id") != "k" {
			t.Errorf("%d %v", res.StatusCode, res.Header)
		}
		_ = conn.Close()
	}
	u.arrived("/pay", 1)
	for _, name := range []string{"Upgrade", "Connection", "Http2-Settings"} {
		if v := u.last("/pay").Header.Get(name); v != "" {
			t.Errorf("the upstream got %s: %s", name, v)
		}
	}
}

// A call that passes two guards of one configuration is guarded by the first: the
// second would wait for itself.
func TestGuardInsideAGuard(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "route {\nagent_guard\nagent_proxy %s\n}", u.addr)
	r := request{path: "/pay", id: "k"}
	g.call(r).want(t, 201, "arrival 1", "executed")
	g.call(r).want(t, 201, "arrival 1", "replayed")
	u.arrived("/pay", 1)
}

// A guard of another name inside is one of its own: it knows the call by another id.
func TestGuardInsideAGuardOfAnotherName(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "route {\nagent_guard\nagent_proxy %s {\nname tools\nexecution_id json /id\nmissing_id require\n}\n}", u.addr)
	r := request{path: "/pay", body: `{"id":"a"}`, header: map[string]string{"Content-Type": "application/json"}}
	g.call(r).want(t, 201, "arrival 1", "executed")
	if again := g.call(r); again.status != 201 || again.body != "arrival 1" {
		t.Errorf("again: %d %q", again.status, again.body)
	}
	u.arrived("/pay", 1)
}

// P6: a call that comes back to its own guard is refused at once, and what its
// neighbour refused is not recorded as done.
func TestCallThatComesBack(t *testing.T) {
	g := start(t, "agent_proxy 127.0.0.1:{http.request.local.port}")
	r := request{path: "/pay", id: "k"}
	if got := g.call(r); got.status != 409 {
		t.Errorf("got %d %q", got.status, got.body)
	}
	g.call(r).terminal(t, 409, "in-doubt")
}

// P1: those that wait for a call that ends in doubt do not run it one after the other:
// on_unknown is for who asks afterwards.
func TestFollowersOfDoubtDoNotRun(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\non_unknown retry\n}", u.addr)
	release := make(chan struct{})
	u.on("/pay", first(func(w http.ResponseWriter, a *arrival) {
		<-release
		raw("")(w, a)
	}))
	r := request{path: "/pay", id: "k"}
	answers := make(chan reply, 6)
	for range cap(answers) {
		go func() { answers <- g.call(r) }()
	}
	followers(t, cap(answers)-1)
	close(release)
	for range cap(answers) {
		(<-answers).terminal(t, 409, "in-doubt")
	}
	u.arrived("/pay", 1)
	g.call(r).want(t, 201, "arrival 2", "executed")
}

// A probe that lacks its credential might be told that there is nothing: it is not sent.
func TestProbeWithoutItsCredential(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `agent_proxy %s {
		on_unknown probe GET /status/{http.agent_guard.execution_id} {
			header Authorization "Bearer {http.request.header.X-Status-Token}"
			not_applied 404
		}
	}`, u.addr)
	u.on("/pay", first(raw("")))
	r := request{path: "/pay", id: "k"}
	g.call(r).terminal(t, 409, "in-doubt")
	g.call(r).terminal(t, 409, "in-doubt")
	u.arrived("/status/k", 0)
	u.arrived("/pay", 1)
}

// P6: where no handler took the call, nothing was executed that could be called done.
func TestOutcomeOfNobody(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "route {\nagent_guard\n@other path /other\nreverse_proxy @other %s\n}", u.addr)
	r := request{path: "/pay", id: "k"}
	g.call(r).terminal(t, 409, "in-doubt")
	g.call(r).terminal(t, 409, "in-doubt")
}

// P6: a status that was put in the place of the upstream's does not say what became of
// the call, unless a rule of the configuration says so.
func TestOutcomeOfMaskedStatus(t *testing.T) {
	for rule, want := range map[string]outcome{"": inDoubt, "outcome completed 200": completed} {
		u := newUpstream(t)
		g := start(t, "agent_proxy %s {\n%s\n@bad status 504\nreplace_status @bad 200\n}", u.addr, rule)
		u.on("/pay", first(func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(504) }))
		r := request{path: "/pay", id: "k"}
		got := g.call(r)
		got.want(t, 200, "", "executed")
		g.check(u, r, got, want)
		u.on("/fine", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(202) })
		r.path = "/fine"
		g.call(r).want(t, 202, "", "executed")
		g.call(r).want(t, 202, "", "replayed")
	}
}

// P1: a refusal that only a handler tells of frees no key: the upstream has answered, and
// a retry gets the same answer.
func TestShownRefusalsReleaseNothing(t *testing.T) {
	for name, options := range map[string]string{
		"replace_status":  "@ok status 201\nreplace_status @ok 429",
		"handle_response": "@ok status 201\nhandle_response @ok {\nrespond \"\" 403\n}",
	} {
		u := newUpstream(t)
		g := start(t, "agent_proxy %s {\n%s\n}", u.addr, options)
		r := request{path: "/pay", id: "k"}
		first := g.call(r)
		if first.status != 429 && first.status != 403 {
			t.Fatalf("%s: %d %s", name, first.status, first.body)
		}
		g.call(r).want(t, first.status, first.body, "replayed")
		u.arrived("/pay", 1)
		// What leaves open whether it was executed still does.
		u.on("/lost", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(504) })
		r.path = "/lost"
		g.call(r)
		g.call(r).terminal(t, 409, "in-doubt")
		// And what the upstream has refused is free.
		u.on("/refused", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(429) })
		r.path = "/refused"
		g.call(r)
		g.call(r).want(t, 429, "", "executed")
		u.arrived("/refused", 2)
	}
}
