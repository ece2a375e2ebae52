package transport_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// statusOf is the breaker of an upstream as it stands.
func statusOf(t *testing.T, upstream string) breaker.Status {
	t.Helper()
	m := circuits.Join()
	defer m.Leave()
	for _, s := range m.Status() {
		if s.Key.Upstream == upstream {
			return s
		}
	}
	return breaker.Status{}
}

// says reads a request and answers with a text, then hangs up.
func says(text string) answer {
	return func(c *serverConn, _ int) bool {
		if c.read() != nil {
			fmt.Fprint(c, text)
		}
		return false
	}
}

// Section 7.1: what counts, and as what.
func TestOutcomes(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
	const inBand = `"in_band": [{"json": "/error"}, {"header": "X-Failed", "value": "yes*"}, {"sse_error": true}]`
	ok := says(head + "Content-Length: 2\r\n\r\n{}")
	tests := []struct {
		name     string
		settings string
		do       answer
		method   string
		want     string // calls failures rate-limited
		cause    string
	}{
		{name: "a good answer", do: ok, want: "1 0 0"},
		{name: "a fault of the call", do: says("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), want: "1 0 0"},
		{name: "no body", do: says(head + "Content-Length: 2\r\n\r\n"), method: "HEAD", want: "1 0 0"},
		{name: "status 500", do: says("HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"), want: "1 1 0", cause: "status 500"},
		{name: "a status that is named", settings: `"failure_status": [404]`,
			do: says("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), want: "1 1 0", cause: "status 404"},
		{name: "a status that is not", settings: `"failure_status": [503]`,
			do: says("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"), want: "1 0 0"},
		{name: "429", do: says("HTTP/1.1 429 Slow Down\r\nContent-Length: 0\r\n\r\n"), want: "0 0 1"},
		{name: "499", do: says("HTTP/1.1 499 Client Closed Request\r\nContent-Length: 0\r\n\r\n"), want: "0 0 0"},
		{name: "the refusal of a gateway behind", do: says("HTTP/1.1 503 No\r\nExecution-Status: refused\r\nContent-Length: 0\r\n\r\n"), want: "0 0 0"},
		{name: "the limit of a gateway behind", do: says("HTTP/1.1 429 No\r\nExecution-Status: refused\r\nContent-Length: 0\r\n\r\n"), want: "0 0 0"},
		{name: "reset", do: func(c *serverConn, _ int) bool { c.read(); return c.reset() }, want: "1 1 0", cause: "connection reset"},
		{name: "hung up", do: says(""), want: "1 1 0", cause: "connection closed without an answer"},
		{name: "no header in time", settings: `"response_header_timeout": "10ms"`, do: func(c *serverConn, _ int) bool {
			c.read()
			_, _ = c.in.ReadByte() // until the other side gives up
			return false
		}, want: "1 1 0", cause: "timeout"},
		{name: "cut in a body of known length", do: says(head + "Content-Length: 9\r\n\r\n{}"), want: "1 1 0", cause: "answer cut off"},
		{name: "cut in a chunked body", do: says(head + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"), want: "1 1 0", cause: "answer cut off"},
		{name: "an error in the body, not looked for", do: says(head + "Content-Length: 11\r\n\r\n{\"error\":1}"), want: "1 0 0"},
		{name: "an error in the body", settings: inBand, do: says(head + "Content-Length: 11\r\n\r\n{\"error\":1}"), want: "1 1 0", cause: "json /error"},
		{name: "no error in the body", settings: inBand, do: ok, want: "1 0 0"},
		{name: "a body that is too long to look into", settings: inBand,
			do: says(head + "Transfer-Encoding: chunked\r\n\r\n11170\r\n{\"error\":1" + strings.Repeat(" ", 69980) + "}" + strings.Repeat(" ", 9) + "\r\n0\r\n\r\n"), want: "1 0 0"},
		{name: "a packed body", settings: inBand, do: says(head + "Content-Encoding: br\r\nContent-Length: 11\r\n\r\n{\"error\":1}"), want: "1 0 0"},
		{name: "an error in the header", settings: inBand, do: says(head + "X-Failed: yes, indeed\r\nContent-Length: 2\r\n\r\n{}"), want: "1 1 0", cause: "header X-Failed"},
		{name: "an error in the trailer", settings: inBand,
			do: says(head + "Trailer: X-Failed\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Failed: yes\r\n\r\n"), want: "1 1 0", cause: "header X-Failed"},
		{name: "an error event", settings: inBand,
			do: says("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\nevent: error\ndata: x\n\n"), want: "1 1 0", cause: "error event"},
		{name: "a stream of events", settings: inBand,
			do: says("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\ndata: 2\n\n"), want: "1 0 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			up := newUpstream(t, tt.do)
			breakerOrOther := tt.settings
			if !strings.Contains(tt.settings, "timeout") {
				breakerOrOther = `"breaker": {` + tt.settings + `}`
			}
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", "compression": false, %s}, "upstreams": [{"dial": "%s"}]}`, breakerOrOther, up.addr)
			method := tt.method
			if method == "" {
				method = "POST"
			}
			forward(p, request(method, ""))
			s := statusOf(t, up.addr)
			if got := fmt.Sprint(s.Calls, s.Failures, s.RateLimited); got != tt.want || s.Overdue != 0 || s.Cause != tt.cause {
				t.Errorf("calls, failures, rate-limited: %s, want %s; overdue %d; cause %q, want %q", got, tt.want, s.Overdue, s.Cause, tt.cause)
			}
		})
	}
}

// Dial refused counts, and a call that the breaker refuses ends as such a dial does:
// proven not to have been sent, after retries too.
func TestRefusedLikeADial(t *testing.T) {
	addr := refusing(1)[0]
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}],
		"load_balancing": {"retries": 2}}`, addr)
	for range 3 {
		forward(p, request("POST", "x"))
	}
	s := statusOf(t, addr.(string))
	if s.Calls != 9 || s.Failures != 9 || s.Cause != "connection refused" {
		t.Fatalf("%+v", s)
	}
	forward(p, request("POST", "x")) // its first attempt opens the breaker
	if r := p.transport(t).Refusal("POST", nil); r == nil || r.Cause != "connection refused" {
		t.Fatalf("the breaker does not refuse: %+v", statusOf(t, addr.(string)))
	}
	for _, method := range []string{"GET", "POST"} {
		o := forward(p, request(method, "x"))
		var open *breaker.OpenError
		if !errors.As(o.err, &open) || open.Key.Upstream != addr || !errors.As(o.err, new(reverseproxy.DialError)) {
			t.Errorf("%s: %v", method, o.err)
		}
		if o.Reason != sent.DialFailed || o.Again || o.retries != 2 {
			t.Errorf("%s: %v", method, o)
		}
		var status caddyhttp.HandlerError
		if err := unguarded(p, request(method, "x")); !errors.As(err, &status) || status.StatusCode != 502 || !errors.As(err, &open) {
			t.Errorf("unguarded %s: %v", method, err)
		}
	}
	if s := statusOf(t, addr.(string)); s.Calls != 10 || s.Rejected == 0 {
		t.Errorf("refusals count: %+v", s)
	}
}

// Section 7.1: clients that leave say nothing about the upstream, before the answer and
// in its middle; nor do bodies that break on their side.
func TestClientsLeave(t *testing.T) {
	arrived := make(chan struct{}, 1)
	up := newUpstream(t, func(c *serverConn, n int) bool {
		if n%2 == 0 {
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbegun")
		}
		if _, err := http.ReadRequest(c.in); err == nil {
			arrived <- struct{}{}
		}
		_, _ = io.Copy(io.Discard, c.in) // until the other side leaves
		return false
	})
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	for range 20 {
		ctx, leave := context.WithCancel(t.Context())
		go func() { <-arrived; leave() }()
		rec := httptest.NewRecorder()
		r := caddyhttp.PrepareRequest(request("GET", "").WithContext(ctx), caddy.NewReplacer(), rec, new(caddyhttp.Server))
		func() {
			defer func() {
				if v := recover(); v != nil && v != http.ErrAbortHandler {
					panic(v)
				}
			}()
			_ = p.ServeHTTP(rec, r, noNext) // that it ends is all that matters
		}()
		leave()
	}
	if s := statusOf(t, up.addr); s.Calls != 0 || s.State != breaker.Closed {
		t.Errorf("after calls whose clients have left: %+v", s)
	}

	broken := newUpstream(t, func(c *serverConn, _ int) bool { c.read(); return c.ok() })
	p = newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, broken.addr)
	r := request("POST", "")
	r.Body, r.ContentLength = io.NopCloser(io.MultiReader(strings.NewReader("some"), brokenBody{})), 99
	if err := unguarded(p, r); err == nil {
		t.Error("a request without its body was sent")
	}
	if s := statusOf(t, broken.addr); s.Calls != 0 {
		t.Errorf("after a body that the client did not end: %+v", s)
	}
}

type brokenBody struct{}

func (brokenBody) Read([]byte) (int, error) { return 0, errors.New("the client is gone") }

// The call's own deadline is the upstream's fault.
func TestDeadlinePasses(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { c.read(); _, _ = c.in.ReadByte(); return false })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	forward(p, request("POST", "").WithContext(ctx))
	if s := statusOf(t, up.addr); s.Failures != 1 || s.Cause != "deadline passed" {
		t.Errorf("%+v", s)
	}
}

// A caller that waits for less than the call may take says nothing of the upstream, and a
// call that was over before it could be sent even less.
func TestCallersDeadlinePasses(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { c.read(); _, _ = c.in.ReadByte(); return false })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	impatient := circuits.Impatient(t.Context(), time.Hour)
	for _, left := range []time.Duration{time.Second, -1} {
		ctx, cancel := context.WithTimeout(impatient, left)
		forward(p, request("POST", "").WithContext(ctx))
		cancel()
	}
	over, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	forward(p, request("POST", "").WithContext(over))
	if s := statusOf(t, up.addr); s.Failures != 0 || s.Calls != 0 || s.Overdue != 0 {
		t.Errorf("%+v", s)
	}
}

// A failure is known by what its caller says of it.
func TestEvidence(t *testing.T) {
	up := newUpstream(t, says("HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n"))
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	forward(p, request("POST", "").WithContext(circuits.WithEvidence(t.Context(), circuits.Evidence{Checkpoint: "token", Workflow: "flow"})))
	if s := statusOf(t, up.addr); circuits.ParseEvidence(s.Evidence) != (circuits.Evidence{Checkpoint: "token", Workflow: "flow"}) {
		t.Errorf("%+v", s)
	}
}

// A connection that breaks under a request that Go would send again is a failure, though
// it is the fuse that ends the request.
func TestFuseIsNoClient(t *testing.T) {
	up := newUpstream(t, okThen(func(c *serverConn, _ int) bool { c.read(); return false }))
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	forward(p, request("POST", ""))
	forward(p, request("POST", ""))
	if s := statusOf(t, up.addr); s.Calls != 2 || s.Failures != 1 || s.Cause != "connection lost" {
		t.Errorf("%+v", s)
	}
}

// An answer that a handler does not read was an answer.
func TestUnreadAnswers(t *testing.T) {
	up := newUpstream(t, (*serverConn).okAgain)
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}], "handle_response": [
		{"routes": [{"handle": [{"handler": "static_response", "status_code": 204}]}]}]}`, up.addr)
	for range 3 {
		forward(p, request("GET", ""))
	}
	if s := statusOf(t, up.addr); s.Calls != 3 || s.Failures != 0 {
		t.Errorf("%+v", s)
	}
}

func (c *serverConn) okAgain(int) bool { return c.ok() }

// The Retry-After of a failure, in both forms, lengthens the cooldown up to its bound.
func TestRetryAfter(t *testing.T) {
	for _, tt := range []struct {
		value     string
		low, high time.Duration
	}{
		{"120", 100 * time.Second, 120 * time.Second},
		{time.Now().Add(2 * time.Minute).UTC().Format(http.TimeFormat), 100 * time.Second, 120 * time.Second},
		{"100000", 280 * time.Second, 300 * time.Second},
		{"soon", 10 * time.Second, 30 * time.Second},
	} {
		up := newUpstream(t, says("HTTP/1.1 503 Busy\r\nRetry-After: "+tt.value+"\r\nContent-Length: 0\r\n\r\n"))
		p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"consecutive": 1}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
		forward(p, request("POST", ""))
		if r := p.transport(t).Refusal("GET", nil); r == nil || r.RetryAfter() < tt.low || r.RetryAfter() > tt.high {
			t.Errorf("Retry-After %s: refused with %+v, after %v", tt.value, r, r.RetryAfter())
		}
	}
}

// Health checks of reverse_proxy neither count nor are refused.
func TestHealthChecksPassBy(t *testing.T) {
	up := newUpstream(t, (*serverConn).okAgain)
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"mode": "forced_open"}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	res, err := p.transport(t).RoundTrip(httptest.NewRequest("GET", "http://"+up.addr+"/health", nil))
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if o := forward(p, request("GET", "")); !errors.As(o.err, new(*breaker.OpenError)) {
		t.Errorf("the breaker is forced open, and lets a call through: %v", o)
	}
}

// `breaker off` asks nobody.
func TestBreakerOff(t *testing.T) {
	addr := refusing(1)[0]
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"off": true}}, "upstreams": [{"dial": "%s"}]}`, addr)
	for range 20 {
		forward(p, request("GET", ""))
	}
	if s := statusOf(t, addr.(string)); s.Calls != 0 || p.transport(t).Refusal("GET", nil) != nil {
		t.Errorf("%+v", s)
	}
}

// Upstreams whose addresses are only known with the call are not refused before it.
func TestDynamicUpstreamsAreNotKnown(t *testing.T) {
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"mode": "forced_open"}}, "upstreams": [{"dial": "%s"}],
		"dynamic_upstreams": {"source": "a", "name": "localhost", "port": "1"}}`, refusing(1)...)
	if r := p.transport(t).Refusal("POST", nil); r != nil {
		t.Errorf("refused with %v", r)
	}
}
