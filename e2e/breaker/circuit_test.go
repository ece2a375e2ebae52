package breaker

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// An open breaker refuses a call before it is claimed, what is
// recorded is replayed all the same, and the key of the refused call is free.
func TestCircuitRefusesBeforeTheClaim(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n%s\n}", u.Addr, harness.Tripping)
	g.Call(harness.Request{Path: "/a", Id: "one"}).Want(t, 201, "arrival 1", "executed")
	u.On("/down", harness.Status(503, ""))
	for range 2 {
		g.Call(harness.Request{Method: "GET", Path: "/down"})
	}
	refused := g.Call(harness.Request{Path: "/b", Id: "two"})
	refused.Refused(t)
	if after := refused.Header.Get("Retry-After"); len(after) != len("36000") { // what is left of the cooldown
		t.Errorf("Retry-After %s with a cooldown of 10h", after)
	}
	g.Call(harness.Request{Method: "GET", Path: "/b"}).Refused(t)
	g.Call(harness.Request{Path: "/a", Id: "one"}).Want(t, 201, "arrival 1", "replayed")
	u.Arrived("/b", 0)

	harness.Force(t, u.Addr, breaker.ForcedClosed)
	g.Call(harness.Request{Path: "/b", Id: "two"}).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.Request{Path: "/b", Id: "two"}).Want(t, 201, "arrival 1", "replayed")
}

// cascade 3.2.1: statuses that any caller can provoke open no breaker, guarded or not: an unknown method (501), another
// version of HTTP (505), and each fault of the request (4xx).
func TestCircuitOfProvokedAnswers(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	for _, code := range []int{400, 404, 408, 418, 501, 505} {
		path := fmt.Sprintf("/%d", code)
		u.On(path, harness.Status(code, ""))
		for i := range 11 { // one more than the breaker's volume
			if got := g.Call(harness.Request{Path: path, Id: fmt.Sprintf("%d-%d", code, i)}); got.Status != code {
				t.Fatalf("%d, want %d: %s", got.Status, code, got.Body)
			}
		}
	}
	g.Call(harness.Request{Path: "/a", Id: "one"}).Want(t, 201, "arrival 1", "executed")
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
			u := harness.NewUpstream(t)
			up := fmt.Sprintf("%s {\ntransport agent_guard {\n%s\n}\n}", u.Addr, harness.Tripping)
			g := harness.Start(t, "%s", strings.NewReplacer("PROXY", "reverse_proxy "+up, "UP", up).Replace(test.site))
			g.Call(harness.Request{Method: "GET", Path: "/b"})
			harness.Force(t, u.Addr, breaker.ForcedOpen)
			var writes atomic.Int64
			g.Store.OnCommit(func([]store.Write) error { writes.Add(1); return nil })
			g.Call(harness.Request{Path: "/b", Id: "k"}).Refused(t)
			g.Store.OnCommit(nil)
			if claimed := writes.Load() > 0; claimed != test.claimed {
				t.Errorf("%d commits for a call that was refused", writes.Load())
			}
			harness.Force(t, u.Addr, breaker.ForcedClosed)
			g.Call(harness.Request{Path: "/b", Id: "k"}).Want(t, 201, "arrival 2", "executed")
		})
	}
}

// Upstreams that are known only with the call: the transport's refusal releases the key.
func TestCircuitOfADynamicUpstream(t *testing.T) {
	u := harness.NewUpstream(t)
	_, port, _ := net.SplitHostPort(u.Addr)
	g := harness.Start(t, `agent_proxy {
		dynamic a {
			name localhost
			port %s
			versions ipv4
		}
		%s
	}`, port, harness.Tripping)
	u.On("/down", harness.Status(500, ""))
	for range 2 {
		g.Call(harness.Request{Method: "GET", Path: "/down"})
	}
	for range 2 {
		g.Call(harness.Request{Path: "/a", Id: "k"}).Refused(t)
	}
	u.Arrived("/a", 0)
	harness.Force(t, u.Addr, breaker.ForcedClosed)
	g.Call(harness.Request{Path: "/a", Id: "k"}).Want(t, 201, "arrival 1", "executed")
}

// Graceful degradation: a fallback answers, with the call's body, and takes no key.
func TestCircuitFallback(t *testing.T) {
	u, other := harness.NewUpstream(t), harness.NewUpstream(t)
	g := harness.Start(t, `agent_proxy %s {
		%s
		fallback {
			header X-Why {http.agent_guard.problem}
			reverse_proxy %s
		}
	}`, u.Addr, harness.Tripping, other.Addr)
	u.On("/down", harness.Status(500, ""))
	for range 2 {
		g.Call(harness.Request{Method: "GET", Path: "/down"})
	}
	for n := range 2 {
		got := g.Call(harness.Request{Path: "/a", Id: "k", Body: `{"n":1}`})
		got.Want(t, 201, fmt.Sprint("arrival ", n+1), "refused")
		if got.Header.Get("X-Why") != "circuit-open" || got.Header.Get("Execution-Id") != "k" || other.Last("/a").Body != `{"n":1}` {
			t.Errorf("%v, with the body %q", got.Header, other.Last("/a").Body)
		}
	}
	if got := g.Call(harness.Request{Method: "GET", Path: "/read"}); got.Body != "arrival 1" || got.Header.Get("Execution-Status") != "refused" {
		t.Errorf("a call that changes nothing: %q %v", got.Body, got.Header)
	}
	u.Arrived("/a", 0)
	harness.Force(t, u.Addr, breaker.ForcedClosed)
	g.Call(harness.Request{Path: "/a", Id: "k", Body: `{"n":1}`}).Want(t, 201, "arrival 1", "executed")
}

// Exactly one of 200 calls is the probe, and its answer closes the breaker.
func TestCircuitProbesOnce(t *testing.T) {
	for name, site := range map[string]string{
		"known upstream":   "agent_proxy %s {\n%s\n}",
		"unknown upstream": "agent_guard\nroute {\n reverse_proxy %s {\n transport agent_guard {\n%s\n}\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			u, hold := harness.NewUpstream(t), harness.NewGate(t)
			u.On("/probe", func(w http.ResponseWriter, a *harness.Arrival) {
				hold.Pass()
				harness.Status(201, "back")(w, a)
			})
			g := harness.Start(t, site, u.Addr, harness.Tripping)
			g.Call(harness.Request{Path: "/first"})
			harness.HalfOpen(t, u.Addr)
			var refused, passed atomic.Int64
			results := make(chan error, 200)
			for n := range 200 {
				req := g.Build(harness.Request{Path: "/probe", Id: fmt.Sprint(n)})
				go func() {
					res, err := g.Client.Do(req)
					if err == nil {
						switch harness.Read(res).Status {
						case 503:
							if refused.Add(1) == 199 {
								hold.Open()
							}
						case 201:
							passed.Add(1)
						}
					}
					results <- err
				}()
			}
			for range 200 {
				if err := harness.Wait(t, results, "an answer"); err != nil {
					t.Error(err)
				}
			}
			if got := u.Arrivals("/probe"); got != 1 || passed.Load() != 1 || refused.Load() != 199 {
				t.Errorf("%d arrivals, %d passed, %d refused", got, passed.Load(), refused.Load())
			}
			if s := harness.Circuit(t, u.Addr); s.State != breaker.Closed {
				t.Errorf("after the probe: %+v", s)
			}
		})
	}
}

// Two upstreams, one failing: load balancing moves on, a POST too, and the other's
// breaker is untouched. The dead one is dialled until its breaker opens, and no more.
func TestCircuitsAreApart(t *testing.T) {
	u := harness.NewUpstream(t)
	dead := harness.FreeAddress(t)
	g := harness.Start(t, `agent_proxy %s %s {
		lb_policy round_robin
		lb_retries 1
		breaker {
			consecutive 2
			cooldown 10h
		}
	}`, dead, u.Addr)
	for n := range 20 {
		g.Call(harness.Request{Path: "/a", Id: fmt.Sprint(n)}).Want(t, 201, fmt.Sprint("arrival ", n+1), "executed")
	}
	if s := harness.Circuit(t, dead); s.State != breaker.Open || s.Calls != 2 || s.Cause != "connection refused" || s.Rejected == 0 {
		t.Errorf("the dead upstream: %+v", s)
	}
	if s := harness.Circuit(t, u.Addr); s.State != breaker.Closed || s.Calls != 20 || s.Failures != 0 {
		t.Errorf("the living one: %+v", s)
	}
}

// HTTP/2 upstreams are guarded by breakers too: by status, by reset streams, and back by
// a probe.
func TestCircuitHTTP2(t *testing.T) {
	u := harness.NewH2CUpstream(t)
	g := harness.Start(t, "agent_proxy h2c://%s {\n%s\n}", u.Addr, harness.Tripping)
	u.On("/bad", func(w http.ResponseWriter, a *harness.Arrival) {
		if a.ProtoMajor != 2 {
			t.Errorf("%s", a.Proto)
		}
		if a.N > 1 {
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(502)
	})
	for n := range 2 {
		if res, err := g.Send(harness.Request{Path: "/bad", Id: fmt.Sprint(n)}); err == nil {
			harness.Read(res)
		}
	}
	g.Call(harness.Request{Path: "/a", Id: "k"}).Refused(t)
	harness.HalfOpen(t, u.Addr)
	g.Call(harness.Request{Path: "/a", Id: "k"}).Want(t, 201, "arrival 1", "executed")
	if s := harness.Circuit(t, u.Addr); s.State != breaker.Closed {
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
			u := harness.NewUpstream(t)
			g := harness.Start(t, "agent_proxy %s", u.Addr)
			u.On("/ws", func(w http.ResponseWriter, _ *harness.Arrival) {
				conn, buf := harness.Hijack(w)
				defer conn.Close()
				_, _ = buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + test.frames)
				_ = buf.Flush()
			})
			conn, err := net.Dial("tcp", g.Addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
				"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", g.Addr)
			got := make(chan string, 1)
			go func() {
				text, _ := io.ReadAll(conn)
				got <- string(text)
			}()
			if text := harness.Wait(t, got, "the end of the connection"); !strings.HasSuffix(text, test.frames) {
				t.Errorf("the client got %q", text)
			}
			harness.Eventually(t, "the call is counted", func() bool { return harness.Circuit(t, u.Addr).Calls == 1 })
			if s := harness.Circuit(t, u.Addr); s.Cause != test.cause || (s.Failures == 1) != (test.cause != "") {
				t.Errorf("%+v", s)
			}
		})
	}
}

// The published policy says that breakers stand there, and when they open; of the
// upstreams it says nothing (cascade 6.2).
func TestPolicyOfBreakers(t *testing.T) {
	u := harness.NewUpstream(t)
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
			g := harness.Start(t, "%s", strings.ReplaceAll(test.site, "UP", u.Addr))
			got := g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/policy"})
			var doc struct {
				Breaker json.RawMessage `json:"breaker"`
			}
			if err := json.Unmarshal([]byte(got.Body), &doc); err != nil {
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
			if strings.Contains(got.Body, u.Addr) || strings.Contains(got.Body, "spiffe") {
				t.Errorf("it names the upstream: %s", got.Body)
			}
		})
	}
}
