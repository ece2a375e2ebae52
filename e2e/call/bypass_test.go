package call

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P1: some clients offer HTTP/2 with every cleartext call. Such an offer is no
// upgrade that would lead past the guard, and it is not made to the upstream.
func TestOfferOfHTTP2IsGuarded(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for range 2 {
		conn := g.Dial()
		harness.Write(t, conn, "POST /pay HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"+
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
	u.Arrived("/pay", 1)
	for _, name := range []string{"Upgrade", "Connection", "Http2-Settings"} {
		if v := u.Last("/pay").Header.Get(name); v != "" {
			t.Errorf("the upstream got %s: %s", name, v)
		}
	}
}

// A call that passes two guards of one configuration is guarded by the first: the
// second would wait for itself.
func TestGuardInsideAGuard(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "route {\nagent_guard {\nname a shared\n}\nagent_proxy %s {\nname a shared\n}\n}", u.Addr)
	r := harness.Request{Path: "/pay", Id: "k"}
	g.Call(r).Want(t, 201, "arrival 1", "executed")
	g.Call(r).Want(t, 201, "arrival 1", "replayed")
	u.Arrived("/pay", 1)
}

// A guard of another name inside is one of its own: it knows the call by another id.
func TestGuardInsideAGuardOfAnotherName(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "route {\nagent_guard\nagent_proxy %s {\nname tools\nexecution_id json /id\nmissing_id require\n}\n}", u.Addr)
	r := harness.Request{Path: "/pay", Body: `{"id":"a"}`, Header: map[string]string{"Content-Type": "application/json"}}
	g.Call(r).Want(t, 201, "arrival 1", "executed")
	if again := g.Call(r); again.Status != 201 || again.Body != "arrival 1" {
		t.Errorf("again: %d %q", again.Status, again.Body)
	}
	u.Arrived("/pay", 1)
}

// P6: a call that comes back to its own guard is refused at once, and what its
// neighbour refused is not recorded as done.
func TestCallThatComesBack(t *testing.T) {
	g := harness.Start(t, "agent_proxy 127.0.0.1:{http.request.local.port}")
	r := harness.Request{Path: "/pay", Id: "k"}
	if got := g.Call(r); got.Status != 409 {
		t.Errorf("got %d %q", got.Status, got.Body)
	}
	g.Call(r).Terminal(t, 409, "in-doubt")
}

// A probe that lacks its credential might be told that there is nothing: it is not sent.
func TestProbeWithoutItsCredential(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `agent_proxy %s {
		on_unknown probe GET /status/{http.agent_guard.execution_id} {
			header Authorization "Bearer {http.request.header.X-Status-Token}"
			not_applied 404
		}
	}`, u.Addr)
	u.On("/pay", first(harness.Raw("")))
	r := harness.Request{Path: "/pay", Id: "k"}
	g.Call(r).Terminal(t, 409, "in-doubt")
	g.Call(r).Terminal(t, 409, "in-doubt")
	u.Arrived("/status/k", 0)
	u.Arrived("/pay", 1)
}

// P6: where no handler took the call, nothing was executed that could be called done.
func TestOutcomeOfNobody(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "route {\nagent_guard\n@other path /other\nreverse_proxy @other %s\n}", u.Addr)
	r := harness.Request{Path: "/pay", Id: "k"}
	g.Call(r).Terminal(t, 409, "in-doubt")
	g.Call(r).Terminal(t, 409, "in-doubt")
}

// P6: a status that was put in the place of the upstream's does not say what became of
// the call, unless a rule of the configuration says so.
func TestOutcomeOfMaskedStatus(t *testing.T) {
	for rule, want := range map[string]harness.Outcome{"": harness.InDoubt, "outcome completed 200": harness.Completed} {
		u := harness.NewUpstream(t)
		g := harness.Start(t, "agent_proxy %s {\n%s\n@bad status 504\nreplace_status @bad 200\n}", u.Addr, rule)
		u.On("/pay", first(func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(504) }))
		r := harness.Request{Path: "/pay", Id: "k"}
		got := g.Call(r)
		got.Want(t, 200, "", want.Status())
		g.Check(u, r, got, want)
		u.On("/fine", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(202) })
		r.Path = "/fine"
		g.Call(r).Want(t, 202, "", "executed")
		g.Call(r).Want(t, 202, "", "replayed")
	}
}

// P1: a refusal that only a handler tells of frees no key: the upstream has answered, and
// a retry gets the same answer.
func TestShownRefusalsReleaseNothing(t *testing.T) {
	for name, options := range map[string]string{
		"replace_status":  "@ok status 201\nreplace_status @ok 429",
		"handle_response": "@ok status 201\nhandle_response @ok {\nrespond \"\" 403\n}",
	} {
		u := harness.NewUpstream(t)
		g := harness.Start(t, "agent_proxy %s {\n%s\n}", u.Addr, options)
		r := harness.Request{Path: "/pay", Id: "k"}
		first := g.Call(r)
		if first.Status != 429 && first.Status != 403 {
			t.Fatalf("%s: %d %s", name, first.Status, first.Body)
		}
		g.Call(r).Want(t, first.Status, first.Body, "replayed")
		u.Arrived("/pay", 1)
		// What leaves open whether it was executed still does.
		u.On("/lost", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(504) })
		r.Path = "/lost"
		g.Call(r)
		g.Call(r).Terminal(t, 409, "in-doubt")
		// And what the upstream has refused is free.
		u.On("/refused", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(429) })
		r.Path = "/refused"
		g.Call(r)
		g.Call(r).Want(t, 429, "", "executed")
		u.Arrived("/refused", 2)
	}
}

// P1: fields that anybody can send lead no call past the guard: not past `missing_id
// require`, not past its record, and no upgrade is offered to the upstream.
func TestFieldsThatDoNotLeadPastTheGuard(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n missing_id require\n consequential {\n  path /declared\n }\n}", u.Addr)
	for name, r := range map[string]struct{ line, fields string }{
		"upgrade":             {"POST /upgrade", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"},
		"another upgrade":     {"PUT /other", "Connection: keep-alive, Upgrade\r\nUpgrade: h2c, anything\r\n"},
		"upgrade with a body": {"GET /declared", "Connection: Upgrade\r\nUpgrade: websocket\r\n"},
		"gRPC":                {"POST /grpc", "Content-Type: application/grpc\r\nTE: trailers\r\n"},
		"gRPC-Web":            {"POST /web", "Content-Type: application/grpc-web+proto\r\n"},
	} {
		call := func(id string) string {
			// Connection: close would be one line more, and the end of the connection is waited for.
			return g.Raw(r.line + " HTTP/1.1\r\nHost: h\r\nConnection: close\r\n" + r.fields + id + "Content-Length: 2\r\n\r\nhi")
		}
		if got := call(""); !strings.Contains(got, "Execution-Status: refused") || !strings.Contains(got, "execution-id-missing") {
			t.Errorf("%s without an id: %q", name, got)
		}
		for _, execution := range []string{"executed", "replayed"} {
			if got := call("Idempotency-Key: k\r\n"); !strings.HasPrefix(got, "HTTP/1.1 201 ") || !strings.Contains(got, "Execution-Status: "+execution) {
				t.Errorf("%s: %q, want it %s", name, got, execution)
			}
		}
		_, path, _ := strings.Cut(r.line, " ")
		u.Arrived(path, 1)
		for _, field := range []string{"Upgrade", "Connection"} {
			if v := u.Last(path).Header.Get(field); v != "" {
				t.Errorf("%s: the upstream got %s: %s", name, field, v)
			}
		}
	}
}

// `unguarded_streams refuse` lets nothing past the guard but what `exempt` names.
func TestUnguardedStreamsRefuse(t *testing.T) {
	u := harness.NewH2CUpstream(t)
	u.On("/ws/open", tunnelling)
	g := harness.Start(t, `handle /metrics {
		metrics
	}
	handle {
		agent_proxy h2c://%s {
			unguarded_streams refuse
			exempt path /ws/open /pkg.Open/*
			action unary {
				match path /pkg.Unary/*
				grpc unary
			}
			transport agent_guard {
				versions h2c 1.1
			}
		}
	}`, u.Addr)
	grpc := func(path string) harness.Reply {
		return g.Call(harness.Request{Path: path, Id: "k", Client: g.H2cClient(), Header: harness.Headers{"Content-Type": "application/grpc", "Te": "trailers"}})
	}
	refused := func(name string, got harness.Reply) {
		t.Helper()
		if got.Header.Get("Execution-Status") != "refused" || !strings.Contains(got.Body+got.Header.Get("Execution-Problem"), "stream-refused") {
			t.Errorf("%s: %+v", name, got)
		}
	}
	for _, method := range []string{"GET", "OPTIONS"} {
		got, conn := g.Upgrade(method, "/ws", "websocket")
		refused(method, got)
		_ = got.Terminal(t, 403, "stream-refused")
		_ = conn.Close()
	}
	refused("gRPC", grpc("/pkg.Stream/Call"))
	if u.Total() != 0 {
		t.Errorf("%d requests reached the upstream", u.Total())
	}
	if got := g.Call(harness.Request{Method: "GET", Path: "/x"}); got.Status != 201 || got.Header.Get("Execution-Status") != "" {
		t.Errorf("a plain GET: %+v", got)
	}
	if got := grpc("/pkg.Open/Call"); got.Status != 201 || got.Header.Get("Execution-Status") != "" {
		t.Errorf("an exempt call: %+v", got)
	}
	if got := grpc("/pkg.Unary/Call"); got.Header.Get("Execution-Status") != "executed" {
		t.Errorf("a unary call: %+v", got)
	}
	samples := g.Samples("/metrics")
	for name, want := range map[string]string{
		`agent_guard_unguarded_total{guard="default",reason="upgrade"}`:                         "0",
		`agent_guard_unguarded_total{guard="default",reason="grpc"}`:                            "0",
		`agent_guard_unguarded_total{guard="default",reason="exempt"}`:                          "1",
		`agent_guard_problems_total{action="default",guard="default",problem="stream-refused"}`: "3",
	} {
		if samples[name] != want {
			t.Errorf("%s is %s, want %s", name, samples[name], want)
		}
	}
}

// P1: what the gateway adds, and the id of the call, reach the upstream whatever the
// client's Connection field names; what it names besides stays with this connection.
func TestConnectionTakesNothingOfOurs(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: fmt.Sprintf(`agent_proxy %s {
		identity spiffe://example.com/upstream
		execution_id header Idempotency-Key X-Order
		execution_id placeholder {http.request.header.X-Placed}
		exempt path /exempt
	}`, u.Addr)})
	names := []string{"Execution-Parent", "workflow-id", "EXECUTION-CONTEXT", "Idempotency-Key", "Execution-Id", "X-Order", "X-Placed"}
	for i, connection := range []string{
		"Connection: close, " + strings.Join(names, ", ") + ", X-Hop\r\n",
		"Connection: X-Hop\r\nConnection: " + strings.Join(names, ",,") + "\r\nConnection: close\r\n",
	} {
		for path, method := range map[string]string{"/guarded": "POST", "/exempt": "POST", "/safe": "GET"} {
			token := a.Issue(ect.Claims{Audience: []string{harness.GatewayIdentity, "spiffe://example.com/upstream"}}).Raw() // else it stays here
			got := g.Raw(fmt.Sprintf("%s %s HTTP/1.1\r\nHost: h\r\n%sIdempotency-Key: k%d\r\nX-Order: o\r\nX-Placed: p\r\n"+
				"X-Hop: h\r\nWorkflow-Id: w\r\nExecution-Parent: theirs\r\nExecution-Context: %s\r\nContent-Length: 0\r\n\r\n", method, path, connection, i, token))
			if !strings.HasPrefix(got, "HTTP/1.1 201 ") {
				t.Fatalf("%s: %q", path, got)
			}
			h := u.Last(path).Header
			tokens := h["Execution-Context"]
			if len(tokens) == 0 || tokens[0] != token {
				t.Errorf("%s: the upstream got the tokens %q", path, tokens)
			}
			for name, want := range map[string]string{
				"Idempotency-Key": fmt.Sprint("k", i), "Workflow-Id": "w", "X-Order": "o", "X-Placed": "p", "X-Hop": "", "Connection": "",
			} {
				if h.Get(name) != want {
					t.Errorf("%s: the upstream got %s: %q, want %q", path, name, h.Get(name), want)
				}
			}
			parent := "theirs"
			if path == "/guarded" {
				parent = fmt.Sprint("k", i)
				if len(tokens) != 2 { // the checkpoint too
					t.Errorf("the upstream got the tokens %q", tokens)
				}
			}
			if got := h.Get("Execution-Parent"); got != parent {
				t.Errorf("%s: Execution-Parent %q, want %q", path, got, parent)
			}
		}
	}
}
