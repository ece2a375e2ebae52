package e2e

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// circuit is the breaker of an upstream as it stands; closed if there is none.
func circuit(t *testing.T, upstream string) breaker.Status {
	t.Helper()
	m := proxy.Join()
	defer m.Leave()
	for _, s := range m.Status() {
		if s.Key.Upstream == upstream {
			return s
		}
	}
	return breaker.Status{}
}

// force does what an operator can do to a breaker.
func force(t *testing.T, upstream string, mode breaker.Mode) {
	t.Helper()
	m := proxy.Join()
	defer m.Leave()
	if !m.SetMode(breaker.Key{Upstream: upstream}, mode) {
		t.Fatalf("%s has no breaker", upstream)
	}
}

// halfOpen lets the next suitable call be the probe.
func halfOpen(t *testing.T, upstream string) {
	t.Helper()
	force(t, upstream, breaker.ForcedOpen)
	force(t, upstream, breaker.Auto)
}

// tripping opens a breaker with its second failure in a row, for longer than any test.
const tripping = `breaker {
	consecutive 2
	cooldown 10h
}`

// refused reads an answer as the refusal of a breaker. cascade 6.2: to who is not known
// here it names neither an upstream's address nor a cause.
func (r reply) refused(t *testing.T) {
	t.Helper()
	r.refusedSaying(t, "The circuit breaker of the upstream is open.", "The circuit breaker of the upstream is half-open, and lets one call through at a time.")
}

// refusedSaying is refused with one of these details.
func (r reply) refusedSaying(t *testing.T, details ...string) {
	t.Helper()
	doc := r.retryable(t, 503, "circuit-open")
	if !slices.Contains(details, doc.Detail) || doc.ErrorType != "circuit_open" || r.header.Get("Execution-Status") != "refused" {
		t.Errorf("refused with %q, %q, %q", doc.Detail, doc.ErrorType, r.header.Get("Execution-Status"))
	}
}

// An open breaker refuses a call before it is claimed, what is
// recorded is replayed all the same, and the key of the refused call is free.
func TestCircuitRefusesBeforeTheClaim(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n%s\n}", u.addr, tripping)
	g.call(request{path: "/a", id: "one"}).want(t, 201, "arrival 1", "executed")
	u.on("/down", status(503, ""))
	for range 2 {
		g.call(request{method: "GET", path: "/down"})
	}
	refused := g.call(request{path: "/b", id: "two"})
	refused.refused(t)
	if after := refused.header.Get("Retry-After"); len(after) != len("36000") { // what is left of the cooldown
		t.Errorf("Retry-After %s with a cooldown of 10h", after)
	}
	g.call(request{method: "GET", path: "/b"}).refused(t)
	g.call(request{path: "/a", id: "one"}).want(t, 201, "arrival 1", "replayed")
	u.arrived("/b", 0)

	force(t, u.addr, breaker.ForcedClosed)
	g.call(request{path: "/b", id: "two"}).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/b", id: "two"}).want(t, 201, "arrival 1", "replayed")
}

// cascade 3.2.1: statuses that any caller can provoke open no breaker, guarded or not: an unknown method (501), another
// version of HTTP (505), and each fault of the request (4xx).
func TestCircuitOfProvokedAnswers(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for _, code := range []int{400, 404, 408, 418, 501, 505} {
		path := fmt.Sprintf("/%d", code)
		u.on(path, status(code, ""))
		for i := range 11 { // one more than the breaker's volume
			if got := g.call(request{path: path, id: fmt.Sprintf("%d-%d", code, i)}); got.status != code {
				t.Fatalf("%d, want %d: %s", got.status, code, got.body)
			}
		}
	}
	g.call(request{path: "/a", id: "one"}).want(t, 201, "arrival 1", "executed")
}

// Which upstreams a guard has behind it is seen in its route, past handlers that only
// pass on. Where something else may answer, a refused call is claimed and released.
func TestCircuitBehindOtherHandlers(t *testing.T) {
	for name, test := range map[string]struct {
		site    string
		claimed bool
	}{
		"next to it":                    {"agent_guard\nPROXY", false},
		"in a route":                    {"route {\nagent_guard\nheader X-A b\nrewrite * /b\nPROXY\n}", false},
		"behind a handler that answers": {"route {\nagent_guard\nrespond /c c\nPROXY\n}", true},
		"in a route inside":             {"route {\nagent_guard\nhandle {\nPROXY\n}\n}", true},
		"behind a matcher":              {"route {\nagent_guard\n@b path /b\nreverse_proxy @b UP\n}", true},
	} {
		t.Run(name, func(t *testing.T) {
			u := newUpstream(t)
			up := fmt.Sprintf("%s {\ntransport agent_guard {\n%s\n}\n}", u.addr, tripping)
			g := start(t, "%s", strings.NewReplacer("PROXY", "reverse_proxy "+up, "UP", up).Replace(test.site))
			g.call(request{method: "GET", path: "/b"})
			force(t, u.addr, breaker.ForcedOpen)
			var writes atomic.Int64
			g.store.onCommit(func([]store.Write) error { writes.Add(1); return nil })
			g.call(request{path: "/b", id: "k"}).refused(t)
			g.store.onCommit(nil)
			if claimed := writes.Load() > 0; claimed != test.claimed {
				t.Errorf("%d commits for a call that was refused", writes.Load())
			}
			force(t, u.addr, breaker.ForcedClosed)
			g.call(request{path: "/b", id: "k"}).want(t, 201, "arrival 2", "executed")
		})
	}
}

// Upstreams that are known only with the call: the transport's refusal releases the key.
func TestCircuitOfADynamicUpstream(t *testing.T) {
	u := newUpstream(t)
	_, port, _ := net.SplitHostPort(u.addr)
	g := start(t, `agent_proxy {
		dynamic a {
			name localhost
			port %s
			versions ipv4
		}
		%s
	}`, port, tripping)
	u.on("/down", status(500, ""))
	for range 2 {
		g.call(request{method: "GET", path: "/down"})
	}
	for range 2 {
		g.call(request{path: "/a", id: "k"}).refused(t)
	}
	u.arrived("/a", 0)
	force(t, u.addr, breaker.ForcedClosed)
	g.call(request{path: "/a", id: "k"}).want(t, 201, "arrival 1", "executed")
}

// Graceful degradation: a fallback answers, with the call's body, and takes no key.
func TestCircuitFallback(t *testing.T) {
	u, other := newUpstream(t), newUpstream(t)
	g := start(t, `agent_proxy %s {
		%s
		fallback {
			header X-Why {http.agent_guard.problem}
			reverse_proxy %s
		}
	}`, u.addr, tripping, other.addr)
	u.on("/down", status(500, ""))
	for range 2 {
		g.call(request{method: "GET", path: "/down"})
	}
	for n := range 2 {
		got := g.call(request{path: "/a", id: "k", body: `{"n":1}`})
		got.want(t, 201, fmt.Sprint("arrival ", n+1), "refused")
		if got.header.Get("X-Why") != "circuit-open" || got.header.Get("Execution-Id") != "k" || other.last("/a").body != `{"n":1}` {
			t.Errorf("%v, with the body %q", got.header, other.last("/a").body)
		}
	}
	if got := g.call(request{method: "GET", path: "/read"}); got.body != "arrival 1" || got.header.Get("Execution-Status") != "refused" {
		t.Errorf("a call that changes nothing: %q %v", got.body, got.header)
	}
	u.arrived("/a", 0)
	force(t, u.addr, breaker.ForcedClosed)
	g.call(request{path: "/a", id: "k", body: `{"n":1}`}).want(t, 201, "arrival 1", "executed")
}

// Exactly one of 200 calls is the probe, and its answer closes the breaker.
func TestCircuitProbesOnce(t *testing.T) {
	for name, site := range map[string]string{
		"known upstream":   "agent_proxy %s {\n%s\n}",
		"unknown upstream": "agent_guard\nroute {\n reverse_proxy %s {\n transport agent_guard {\n%s\n}\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			u, hold := newUpstream(t), newGate(t)
			u.on("/probe", func(w http.ResponseWriter, a *arrival) {
				hold.pass()
				status(201, "back")(w, a)
			})
			g := start(t, site, u.addr, tripping)
			g.call(request{path: "/first"})
			halfOpen(t, u.addr)
			var refused, passed atomic.Int64
			results := make(chan error, 200)
			for n := range 200 {
				req := g.build(request{path: "/probe", id: fmt.Sprint(n)})
				go func() {
					res, err := g.client.Do(req)
					if err == nil {
						switch read(res).status {
						case 503:
							if refused.Add(1) == 199 {
								hold.open()
							}
						case 201:
							passed.Add(1)
						}
					}
					results <- err
				}()
			}
			for range 200 {
				if err := wait(t, results, "an answer"); err != nil {
					t.Error(err)
				}
			}
			if got := u.arrivals("/probe"); got != 1 || passed.Load() != 1 || refused.Load() != 199 {
				t.Errorf("%d arrivals, %d passed, %d refused", got, passed.Load(), refused.Load())
			}
			if s := circuit(t, u.addr); s.State != breaker.Closed {
				t.Errorf("after the probe: %+v", s)
			}
		})
	}
}

// Two upstreams, one failing: load balancing moves on, a POST too, and the other's
// breaker is untouched. The dead one is dialled until its breaker opens, and no more.
func TestCircuitsAreApart(t *testing.T) {
	u := newUpstream(t)
	dead := freeAddress(t)
	g := start(t, `agent_proxy %s %s {
		lb_policy round_robin
		lb_retries 1
		breaker {
			consecutive 2
			cooldown 10h
		}
	}`, dead, u.addr)
	for n := range 20 {
		g.call(request{path: "/a", id: fmt.Sprint(n)}).want(t, 201, fmt.Sprint("arrival ", n+1), "executed")
	}
	if s := circuit(t, dead); s.State != breaker.Open || s.Calls != 2 || s.Cause != "connection refused" || s.Rejected == 0 {
		t.Errorf("the dead upstream: %+v", s)
	}
	if s := circuit(t, u.addr); s.State != breaker.Closed || s.Calls != 20 || s.Failures != 0 {
		t.Errorf("the living one: %+v", s)
	}
}

// HTTP/2 upstreams are guarded by breakers too: by status, by reset streams, and back by
// a probe.
func TestCircuitHTTP2(t *testing.T) {
	u := newH2CUpstream(t)
	g := start(t, "agent_proxy h2c://%s {\n%s\n}", u.addr, tripping)
	u.on("/bad", func(w http.ResponseWriter, a *arrival) {
		if a.ProtoMajor != 2 {
			t.Errorf("%s", a.Proto)
		}
		if a.n > 1 {
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(502)
	})
	for n := range 2 {
		if res, err := g.send(request{path: "/bad", id: fmt.Sprint(n)}); err == nil {
			read(res)
		}
	}
	g.call(request{path: "/a", id: "k"}).refused(t)
	halfOpen(t, u.addr)
	g.call(request{path: "/a", id: "k"}).want(t, 201, "arrival 1", "executed")
	if s := circuit(t, u.addr); s.State != breaker.Closed {
		t.Errorf("%+v", s)
	}
}

// Section 7.1: WebSockets are judged by how the upstream closes them.
func TestCircuitWebSocket(t *testing.T) {
	closing := func(code uint16) string {
		return "\x81\x02hi\x88\x02" + string(binary.BigEndian.AppendUint16(nil, code))
	}
	for name, test := range map[string]struct {
		frames string
		cause  string
	}{
		"normal":         {closing(1000), ""},
		"client's fault": {closing(1008), ""},
		"internal error": {closing(1011), "websocket closed with 1011"},
		"cut":            {"\x81\x02hi", "websocket cut off"},
	} {
		t.Run(name, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, "agent_proxy %s", u.addr)
			u.on("/ws", func(w http.ResponseWriter, _ *arrival) {
				conn, buf := hijack(w)
				defer conn.Close()
				_, _ = buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + test.frames)
				_ = buf.Flush()
			})
			conn, err := net.Dial("tcp", g.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
				"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", g.addr)
			got := make(chan string, 1)
			go func() {
				text, _ := io.ReadAll(conn)
				got <- string(text)
			}()
			if text := wait(t, got, "the end of the connection"); !strings.HasSuffix(text, test.frames) {
				t.Errorf("the client got %q", text)
			}
			eventually(t, "the call is counted", func() bool { return circuit(t, u.addr).Calls == 1 })
			if s := circuit(t, u.addr); s.Cause != test.cause || (s.Failures == 1) != (test.cause != "") {
				t.Errorf("%+v", s)
			}
		})
	}
}

// The published policy says that breakers stand there, and when they open; of the
// upstreams it says nothing (cascade 6.2).
func TestPolicyOfBreakers(t *testing.T) {
	u := newUpstream(t)
	for name, test := range map[string]struct{ site, want string }{
		"by default": {"agent_proxy UP", `{"window_s":60,"threshold":0.5,"min_volume":10,"cooldown_s":30,"max_cooldown_s":300,` +
			`"problem":"/.well-known/cascade/problems/circuit-open"}`},
		"every member": {"agent_proxy UP {\nbreaker {\nwindow 30s\nthreshold 20%\nmin_volume 5\nconsecutive 3\ncooldown 10s 1m\n" +
			"downstream UP spiffe://example.com/b\n}\nfallback {\nrespond hello\n}\n}",
			`{"window_s":30,"threshold":0.2,"min_volume":5,"consecutive":3,"cooldown_s":10,"max_cooldown_s":60,` +
				`"problem":"/.well-known/cascade/problems/circuit-open","fallback":true}`},
		"off":                 {"agent_proxy UP {\nbreaker off\n}", ""},
		"nobody sees a proxy": {"agent_guard\nrespond 204", ""},
	} {
		t.Run(name, func(t *testing.T) {
			g := start(t, "%s", strings.ReplaceAll(test.site, "UP", u.addr))
			got := g.call(request{method: "GET", path: "/.well-known/cascade/policy"})
			var doc struct {
				Breaker json.RawMessage `json:"breaker"`
			}
			if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
				t.Fatal(err)
			}
			var member bytes.Buffer
			if len(doc.Breaker) > 0 {
				if err := json.Compact(&member, doc.Breaker); err != nil {
					t.Fatal(err)
				}
			}
			if member.String() != test.want {
				t.Errorf("the policy says %s, want %s", &member, test.want)
			}
			if strings.Contains(got.body, u.addr) || strings.Contains(got.body, "spiffe") {
				t.Errorf("it names the upstream: %s", got.body)
			}
		})
	}
}
