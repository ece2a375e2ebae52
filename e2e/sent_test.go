package e2e

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
)

// P1: only a proof releases. An upstream that is not there is one: the answer says so and advises a retry,
// which runs as soon as the upstream is there.
func TestOutcomeNotSent(t *testing.T) {
	for _, directive := range []string{
		"agent_proxy %s",
		"agent_guard\nreverse_proxy %s",
		"agent_proxy %s {\n lb_retries 2\n lb_try_interval 1ms\n}",
	} {
		addr := freeAddress(t)
		g := start(t, directive, addr)
		r := request{path: "/x", id: "k"}
		for range 2 {
			got := g.call(r)
			got.retryable(t, 502, "upstream-unreachable")
			if got.header.Get("Execution-Status") != "released" || got.header.Get("Execution-Id") != "k" {
				t.Errorf("unreachable: %d %v", got.status, got.header)
			}
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		arrivals := make(chan struct{}, 10)
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			arrivals <- struct{}{}
			fmt.Fprint(w, "up")
		})}
		go server.Serve(l)
		t.Cleanup(func() { server.Close() })
		g.call(r).want(t, 200, "up", "executed")
		g.call(r).want(t, 200, "up", "replayed")
		if len(arrivals) != 1 {
			t.Errorf("%d arrivals", len(arrivals))
		}
	}
}

// The answer to a call that was not sent is a problem in the form of its caller, with the proxy's own status.
// Error routes get the error in its place.
func TestFormsOfOutcomeNotSent(t *testing.T) {
	addr := freeAddress(t)
	g := start(t, "agent_proxy %s {\n protocol mcp\n breaker off\n}", addr)
	got := g.call(message(toolCall("7", "pay", ""), "Idempotency-Key", "k"))
	if got.status != 200 || got.header.Get("Execution-Status") != "released" || got.header.Get("Retry-After") == "" ||
		!strings.Contains(got.body, `"id":7`) || !strings.Contains(got.body, "problems/upstream-unreachable") {
		t.Errorf("JSON-RPC: %d %v %s", got.status, got.header, got.body)
	}
	got = g.call(request{path: "/p.S/Pay", id: "g", header: headers{"Content-Type": "application/grpc-web+proto"}, body: "\x00\x00\x00\x00\x00"})
	if got.status != 200 || got.header.Get("Grpc-Status") != "14" || got.header.Get("Execution-Status") != "released" ||
		got.header.Get("Execution-Problem") != "upstream-unreachable" {
		t.Errorf("gRPC-Web: %d %v %s", got.status, got.header, got.body)
	}
	g.reload("agent_proxy " + addr + " {\n breaker off\n lb_policy first\n fail_duration 1m\n}")
	g.call(request{path: "/x", id: "m"})
	if got = g.call(request{path: "/x", id: "m"}); got.header.Get("Execution-Status") != "released" {
		t.Errorf("%d %v", got.status, got.header)
	}
	got.retryable(t, 503, "upstream-unreachable") // Caddy knows of no upstream that is up
	g.reload("agent_proxy " + addr + "\nhandle_errors {\n respond \"sorry\" 502\n}")
	if got := g.call(request{path: "/x", id: "e"}); got.status != 502 || got.body != "sorry" || got.header.Get("Execution-Status") != "" {
		t.Errorf("error routes: %d %v %s", got.status, got.header, got.body)
	}
}

// Section "Sent or not": while no byte was sent the next upstream is tried; after one
// none is, whatever Caddy is told to retry, and Go does not send again either (trap 20).
func TestSentOnce(t *testing.T) {
	for _, proxy := range []string{"agent_proxy %s {\n%s\n}", "agent_guard\nreverse_proxy %s {\n%s\n}"} {
		u, other := newUpstream(t), newUpstream(t)
		const retry = "lb_policy first\n fail_duration 1m\n lb_retries 3\n lb_try_interval 1ms\n lb_retry_match {\n method POST DELETE\n}"

		g := start(t, proxy, freeAddress(t)+" "+u.addr, retry)
		g.call(request{path: "/next", id: "k"}).want(t, 201, "arrival 1", "executed")
		g.call(request{path: "/next", id: "k"}).want(t, 201, "arrival 1", "replayed")
		u.arrived("/next", 1)
		stop(t)

		g = start(t, proxy, u.addr+" "+other.addr, retry)
		r := request{path: "/reset", id: "k"}
		u.on(r.path, first(reset))
		got := g.call(r)
		got.terminal(t, 409, "in-doubt")
		g.check(u, r, got, inDoubt)
		other.arrived(r.path, 0)

		stop(t)

		// A call without a body on a connection that has been used: what Go re-sends.
		g = start(t, proxy, u.addr, "")
		r = request{method: http.MethodDelete, path: "/bodiless", id: "k", reader: http.NoBody}
		u.on(r.path, first(reset))
		g.call(request{path: "/warm", id: "k"}).want(t, 201, "arrival 1", "executed")
		got = g.call(r)
		got.terminal(t, 409, "in-doubt")
		g.check(u, r, got, inDoubt)
		stop(t)
	}
}

// What is released goes on to the site's error routes as it came: with its body, and
// as the same call.
func TestOutcomeNotSentInErrorRoutes(t *testing.T) {
	for _, backup := range []string{"reverse_proxy", "agent_proxy"} {
		u := newUpstream(t)
		options := map[string]string{"agent_proxy": "{\n name both shared\n }"}[backup]
		g := start(t, "agent_proxy %s {\n name both shared\n}\nhandle_errors {\n %s %s %s\n}", freeAddress(t), backup, u.addr, options)
		for _, body := range []string{`{"amount":1}`, strings.Repeat("x", 2<<20)} {
			r := request{path: fmt.Sprint("/", len(body)), id: "k", body: body}
			execution := map[string]string{"agent_proxy": "executed"}[backup]
			g.call(r).want(t, 201, "arrival 1", execution)
			if last := u.last(r.path); last.body != body {
				t.Errorf("%s: %d bytes arrived, want %d", backup, len(last.body), len(body))
			}
			if backup == "agent_proxy" {
				g.call(r).want(t, 201, "arrival 1", "replayed")
			}
		}
		stop(t)
	}
}

// Section "Sent or not": where a connection turns out to be dead before a byte was
// written, the guard forwards the call once more, as it was.
func TestForwardedAgain(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "route {\n agent_guard\n uri strip_prefix /a\n e2e_do stale\n reverse_proxy %s\n}", u.addr)
	r := request{path: "/a/a/x?q", id: "k"}
	g.call(r).want(t, 201, "arrival 1", "executed")
	g.call(r).want(t, 201, "arrival 1", "replayed")
	if last := u.last("/a/x"); last.body != `{"amount":1}` || last.RequestURI != "/a/x?q" {
		t.Errorf("%s %q", last.RequestURI, last.body)
	}
}
