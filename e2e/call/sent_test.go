package call

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1: only a proof releases. An upstream that is not there is one: the answer says so and advises a retry,
// which runs as soon as the upstream is there.
func TestOutcomeNotSent(t *testing.T) {
	for _, directive := range []string{
		"agent_proxy %s",
		"agent_guard\nreverse_proxy %s",
		"agent_proxy %s {\n lb_retries 2\n lb_try_interval 1ms\n}",
	} {
		addr := harness.FreeAddress(t)
		g := harness.Start(t, directive, addr)
		r := harness.Request{Path: "/x", Id: "k"}
		for range 2 {
			got := g.Call(r)
			got.Retryable(t, 502, "upstream-unreachable")
			if got.Header.Get("Execution-Status") != "released" || got.Header.Get("Execution-Id") != "k" {
				t.Errorf("unreachable: %d %v", got.Status, got.Header)
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
		g.Call(r).Want(t, 200, "up", "executed")
		g.Call(r).Want(t, 200, "up", "replayed")
		if len(arrivals) != 1 {
			t.Errorf("%d arrivals", len(arrivals))
		}
	}
}

// The answer to a call that was not sent is a problem in the form of its caller, with the proxy's own status.
// Error routes get the error in its place.
func TestFormsOfOutcomeNotSent(t *testing.T) {
	addr := harness.FreeAddress(t)
	g := harness.Start(t, "agent_proxy %s {\n protocol mcp\n breaker off\n}", addr)
	got := g.Call(harness.Message(harness.ToolCall("7", "pay", ""), "Idempotency-Key", "k"))
	if got.Status != 200 || got.Header.Get("Execution-Status") != "released" || got.Header.Get("Retry-After") == "" ||
		!strings.Contains(got.Body, `"id":7`) || !strings.Contains(got.Body, "problems/upstream-unreachable") {
		t.Errorf("JSON-RPC: %d %v %s", got.Status, got.Header, got.Body)
	}
	got = g.Call(harness.Request{Path: "/p.S/Pay", Id: "g", Header: harness.Headers{"Content-Type": "application/grpc-web+proto"}, Body: "\x00\x00\x00\x00\x00"})
	if got.Status != 200 || got.Header.Get("Grpc-Status") != "14" || got.Header.Get("Execution-Status") != "released" ||
		got.Header.Get("Execution-Problem") != "upstream-unreachable" {
		t.Errorf("gRPC-Web: %d %v %s", got.Status, got.Header, got.Body)
	}
	g.Reload("agent_proxy " + addr + " {\n breaker off\n lb_policy first\n fail_duration 1m\n}")
	g.Call(harness.Request{Path: "/x", Id: "m"})
	if got = g.Call(harness.Request{Path: "/x", Id: "m"}); got.Header.Get("Execution-Status") != "released" {
		t.Errorf("%d %v", got.Status, got.Header)
	}
	got.Retryable(t, 503, "upstream-unreachable") // Caddy knows of no upstream that is up
	g.Reload("agent_proxy " + addr + "\nhandle_errors {\n respond \"sorry\" 502\n}")
	if got := g.Call(harness.Request{Path: "/x", Id: "e"}); got.Status != 502 || got.Body != "sorry" || got.Header.Get("Execution-Status") != "" {
		t.Errorf("error routes: %d %v %s", got.Status, got.Header, got.Body)
	}
}

// Section "Sent or not": while no byte was sent the next upstream is tried; after one
// none is, whatever Caddy is told to retry, and Go does not send again either (trap 20).
func TestSentOnce(t *testing.T) {
	for _, proxy := range []string{"agent_proxy %s {\n%s\n}", "agent_guard\nreverse_proxy %s {\n%s\n}"} {
		u, other := harness.NewUpstream(t), harness.NewUpstream(t)
		const retry = "lb_policy first\n fail_duration 1m\n lb_retries 3\n lb_try_interval 1ms\n lb_retry_match {\n method POST DELETE\n}"

		g := harness.Start(t, proxy, harness.FreeAddress(t)+" "+u.Addr, retry)
		g.Call(harness.Request{Path: "/next", Id: "k"}).Want(t, 201, "arrival 1", "executed")
		g.Call(harness.Request{Path: "/next", Id: "k"}).Want(t, 201, "arrival 1", "replayed")
		u.Arrived("/next", 1)
		harness.Stop(t)

		g = harness.Start(t, proxy, u.Addr+" "+other.Addr, retry)
		r := harness.Request{Path: "/reset", Id: "k"}
		u.On(r.Path, first(harness.Reset))
		got := g.Call(r)
		got.Terminal(t, 409, "in-doubt")
		g.Check(u, r, got, harness.InDoubt)
		other.Arrived(r.Path, 0)

		harness.Stop(t)

		// A call without a body on a connection that has been used: what Go re-sends.
		g = harness.Start(t, proxy, u.Addr, "")
		r = harness.Request{Method: http.MethodDelete, Path: "/bodiless", Id: "k", Reader: http.NoBody}
		u.On(r.Path, first(harness.Reset))
		g.Call(harness.Request{Path: "/warm", Id: "k"}).Want(t, 201, "arrival 1", "executed")
		got = g.Call(r)
		got.Terminal(t, 409, "in-doubt")
		g.Check(u, r, got, harness.InDoubt)
		harness.Stop(t)
	}
}

// What is released goes on to the site's error routes as it came: with its body, and
// as the same call.
func TestOutcomeNotSentInErrorRoutes(t *testing.T) {
	for _, backup := range []string{"reverse_proxy", "agent_proxy"} {
		u := harness.NewUpstream(t)
		options := map[string]string{"agent_proxy": "{\n name both shared\n }"}[backup]
		g := harness.Start(t, "agent_proxy %s {\n name both shared\n}\nhandle_errors {\n %s %s %s\n}", harness.FreeAddress(t), backup, u.Addr, options)
		for _, body := range []string{`{"amount":1}`, strings.Repeat("x", 2<<20)} {
			r := harness.Request{Path: fmt.Sprint("/", len(body)), Id: "k", Body: body}
			execution := map[string]string{"agent_proxy": "executed"}[backup]
			g.Call(r).Want(t, 201, "arrival 1", execution)
			if last := u.Last(r.Path); last.Body != body {
				t.Errorf("%s: %d bytes arrived, want %d", backup, len(last.Body), len(body))
			}
			if backup == "agent_proxy" {
				g.Call(r).Want(t, 201, "arrival 1", "replayed")
			}
		}
		harness.Stop(t)
	}
}

// Section "Sent or not": where a connection turns out to be dead before a byte was
// written, the guard forwards the call once more, as it was.
func TestForwardedAgain(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "route {\n agent_guard\n uri strip_prefix /a\n e2e_do stale\n reverse_proxy %s\n}", u.Addr)
	r := harness.Request{Path: "/a/a/x?q", Id: "k"}
	g.Call(r).Want(t, 201, "arrival 1", "executed")
	g.Call(r).Want(t, 201, "arrival 1", "replayed")
	if last := u.Last("/a/x"); last.Body != `{"amount":1}` || last.RequestURI != "/a/x?q" {
		t.Errorf("%s %q", last.RequestURI, last.Body)
	}
}
