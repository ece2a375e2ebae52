package proxy_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
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
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// statusOf is the breaker of an upstream as it stands.
func statusOf(t *testing.T, upstream string) breaker.Status {
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
		{name: "a status that is named", settings: `"failure_status": [202]`,
			do: says("HTTP/1.1 202 Later\r\nContent-Length: 0\r\n\r\n"), want: "1 1 0", cause: "status 202"},
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
		{name: "a body that is no JSON and says so", settings: inBand,
			do: says(head + "Content-Length: 11\r\n\r\n<html>works"), want: "1 1 0", cause: "no JSON"},
		{name: "JSON that ends too early", settings: inBand, do: says(head + "Content-Length: 8\r\n\r\n{\"ok\":tr"), want: "1 1 0", cause: "no JSON"},
		{name: "a refusal that is no JSON", settings: inBand,
			do: says("HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\noops"), want: "1 0 0"},
		{name: "a part of some JSON", settings: inBand,
			do: says("HTTP/1.1 206 Partial Content\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n\"a\":"), want: "1 0 0"},
		{name: "several JSON values", settings: inBand, do: says(head + "Content-Length: 16\r\n\r\n{\"n\":1}\n {\"n\":2}"), want: "1 0 0"},
		{name: "an error in the first of several JSON values", settings: inBand,
			do: says(head + "Content-Length: 20\r\n\r\n{\"error\":{}}\n{\"n\":2}"), want: "1 1 0", cause: "json /error"},
		{name: "an empty body", settings: inBand, do: says(head + "Content-Length: 0\r\n\r\n"), want: "1 0 0"},
		{name: "a body that is no JSON, where nobody looks", do: says(head + "Content-Length: 11\r\n\r\n<html>works"), want: "1 0 0"},
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
		if o.Reason != proxy.DialFailed || o.Again || o.retries != 2 {
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
	t.Parallel() // it waits for a time to pass
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
	t.Parallel() // it waits for a time to pass
	up := newUpstream(t, func(c *serverConn, _ int) bool { c.read(); _, _ = c.in.ReadByte(); return false })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	impatient := guard.WithPatience(t.Context(), time.Hour)
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
	forward(p, request("POST", "").WithContext(guard.WithEvidence(t.Context(), guard.Evidence{Checkpoint: "token", Workflow: "flow"})))
	if s := statusOf(t, up.addr); guard.ParseEvidence(s.Evidence) != (guard.Evidence{Checkpoint: "token", Workflow: "flow"}) {
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
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	setMode(t, p, up.addr, breaker.ForcedOpen)
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
	addr := refusing(1)[0]
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {}}, "upstreams": [{"dial": "%s"}],
		"dynamic_upstreams": {"source": "a", "name": "localhost", "port": "1"}}`, addr)
	static := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {}}, "upstreams": [{"dial": "%s"}]}`, addr)
	setMode(t, static, addr.(string), breaker.ForcedOpen)
	if static.transport(t).Refusal("POST", nil) == nil {
		t.Error("the known upstream is not refused")
	}
	if r := p.transport(t).Refusal("POST", nil); r != nil {
		t.Errorf("refused with %v", r)
	}
}

// shortLease makes a proxy whose probes have a lease that ends in the test's time.
func shortLease(t *testing.T, options, addr string) *testProxy {
	t.Helper()
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", %s "breaker": {"cooldown": "10h"}}, "upstreams": [{"dial": "%s"}]}`, options, addr)
	if err := proxy.ShortenProbes(p.transport(t), 3*time.Second); err != nil {
		t.Fatal(err)
	}
	return p
}

// unheld waits until an upstream's breaker has no probe any more.
func unheld(t *testing.T, upstream string) breaker.Status {
	t.Helper()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	bound := time.After(20 * time.Second)
	for {
		s := statusOf(t, upstream)
		if !s.Probing {
			return s
		}
		select {
		case <-look.C:
		case <-bound:
			t.Fatalf("the probe is still held: %+v", s)
		}
	}
}

// A client that sends its body slowly must not keep the breaker open: the end of its
// lease says nothing of the upstream, and the next call may be the probe.
func TestSlowUploadDoesNotFailTheProbe(t *testing.T) {
	t.Parallel() // it waits for a time to pass
	arrived := make(chan struct{}, 1)
	up := newUpstream(t, func(c *serverConn, _ int) bool {
		req, err := http.ReadRequest(c.in)
		if err != nil {
			return false
		}
		if req.ContentLength == 0 {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			return false
		}
		arrived <- struct{}{}
		_, _ = io.Copy(io.Discard, req.Body)
		return false // which fails the slow call, whom nobody hears any more
	})
	p := shortLease(t, "", up.addr)
	halfOpen(t, p, up.addr)
	body, client := io.Pipe()
	r := request("GET", "")
	r.Body, r.ContentLength = body, 2
	done := make(chan error, 1)
	go func() { done <- unguarded(p, r) }()
	if _, err := client.Write([]byte("1")); err != nil {
		t.Fatal(err)
	}
	<-arrived
	if s := unheld(t, up.addr); s.State != breaker.HalfOpen || s.FailedProbes != 0 {
		t.Errorf("after a lease that ended in the client's time: %+v", s)
	}
	_ = client.CloseWithError(errors.New("the client is gone"))
	if err := <-done; err == nil {
		t.Error("half a body was sent")
	}
	if err := unguarded(p, request("GET", "")); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, up.addr); s.State != breaker.Closed {
		t.Errorf("after a good probe: %+v", s)
	}
}

// A call whose body is still to come is waited for like one that changes something.
func TestUploadIsNotPreferred(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { return c.ok() })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	if err := unguarded(p, request("GET", "")); err != nil { // so that another one is expected
		t.Fatal(err)
	}
	halfOpen(t, p, up.addr)
	if err := unguarded(p, request("GET", "body")); err == nil {
		t.Error("a call with a body was the probe")
	}
	if err := unguarded(p, request("GET", "")); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, up.addr); s.State != breaker.Closed {
		t.Errorf("after a GET without a body: %+v", s)
	}
}

// Whoever sends slowly until the upstream hangs up must not open the breaker for others.
func TestHangingUpOnASlowUploadIsNoFailure(t *testing.T) {
	hungUp := make(chan struct{})
	up := newUpstream(t, func(c *serverConn, _ int) bool {
		req, err := http.ReadRequest(c.in)
		if err == nil {
			_, err = io.ReadFull(req.Body, make([]byte, 1))
		}
		if err != nil {
			t.Error(err)
		}
		defer close(hungUp)
		return c.reset()
	})
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	body, client := io.Pipe()
	defer client.Close()
	r := request("POST", "")
	r.Body, r.ContentLength = body, 1<<40
	done := make(chan error, 1)
	go func() { done <- unguarded(p, r) }()
	if _, err := client.Write([]byte("1")); err != nil {
		t.Fatal(err)
	}
	<-hungUp
	go func() { // until nobody reads any more: what is sent first may still go out
		for err := error(nil); err == nil; {
			_, err = client.Write([]byte("2"))
		}
	}()
	if err := <-done; err == nil {
		t.Error("half a body was sent")
	}
	if s := statusOf(t, up.addr); s.Calls != 0 || s.Failures != 0 || s.Overdue != 0 {
		t.Errorf("the client's slowness counts: %+v", s)
	}
}

// The time that a client takes to send is not the upstream's latency.
func TestSlowUploadIsNoSlowCall(t *testing.T) {
	t.Parallel() // it waits for a time to pass
	up := newUpstream(t, func(c *serverConn, _ int) bool { return c.ok() })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"slow_call": "3s"}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	body, client := io.Pipe()
	r := request("POST", "")
	r.Body, r.ContentLength = body, 1
	done := make(chan error, 1)
	go func() { done <- unguarded(p, r) }()
	<-time.After(3100 * time.Millisecond)
	if _, err := client.Write([]byte("1")); err != nil {
		t.Fatal(err)
	}
	client.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, up.addr); s.Calls != 1 || s.Slow != 0 {
		t.Errorf("the client's slowness is the upstream's: %+v", s)
	}
}

// An upstream that has the whole body and is silent has failed the probe.
func TestSilenceAfterAnUploadFailsTheProbe(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool {
		c.read()
		_, _ = c.in.ReadByte() // until the other side leaves
		return false
	})
	p := shortLease(t, "", up.addr)
	halfOpen(t, p, up.addr)
	heard := hear(t)
	done := make(chan error, 1)
	ctx, leave := context.WithCancel(t.Context())
	go func() { done <- unguarded(p, request("POST", "body").WithContext(ctx)) }()
	heard.want(t, up.addr, breaker.Open)
	if s := statusOf(t, up.addr); s.FailedProbes != 1 {
		t.Errorf("%+v", s)
	}
	leave()
	<-done
}

// ADR 0027: a stream of gRPC that began in time and is silent says nothing by that.
func TestSilentGRPCStreamDoesNotFailTheProbe(t *testing.T) {
	began, end := make(chan struct{}), make(chan struct{})
	addr, client := overHTTP2(t, true, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		_ = http.NewResponseController(w).Flush()
		close(began)
		select {
		case <-end:
		case <-r.Context().Done(): // the test has failed
		}
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	})
	p := shortLease(t, client+",", addr)
	halfOpen(t, p, addr)
	done := make(chan error, 1)
	go func() { done <- unguarded(p, request("POST", "")) }()
	<-began
	if s := unheld(t, addr); s.State != breaker.HalfOpen || s.FailedProbes != 0 {
		t.Errorf("after a stream that was silent: %+v", s)
	}
	close(end)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// undoing is a request of an undo.
func undoing(t *testing.T, method, body string) *http.Request {
	return request(method, body).WithContext(guard.WithUndo(t.Context()))
}

// unmoved is what of a breaker no undo may change.
func unmoved(s breaker.Status) string {
	return fmt.Sprint(s.State, s.Generation, s.Calls, s.Failures, s.Rejected, s.Overdue, s.FailedProbes, s.Probing, s.NextProbe)
}

// "Undo traffic passes open breakers by its own lane": an undo reaches the upstream while
// other calls are refused, and whether it succeeds or fails, the breaker stays as it is.
func TestUndoPassesAnOpenBreaker(t *testing.T) {
	for _, tt := range []struct{ name, settings string }{
		{"tripped", `"consecutive": 1, "cooldown": "100s"`},
		{"forced by the operator", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			down := true
			up := newUpstream(t, func(c *serverConn, _ int) bool {
				if r := c.read(); r == nil {
					return false
				}
				if down {
					fmt.Fprint(c, "HTTP/1.1 500 Down\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
				} else {
					fmt.Fprint(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\ngone")
				}
				return false
			})
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {%s}}, "upstreams": [{"dial": "%s"}]}`, tt.settings, up.addr)
			if tt.settings == "" {
				setMode(t, p, up.addr, breaker.ForcedOpen)
			} else {
				forward(p, request("POST", "x"))
			}
			before := statusOf(t, up.addr)
			if before.State != breaker.Open {
				t.Fatalf("the breaker is not open: %+v", before)
			}
			arrived := up.arrivals.Load()
			if o := forward(p, undoing(t, "DELETE", "")); o.err != nil || o.status != 500 || !o.ours {
				t.Errorf("an undo that fails: %v", o)
			}
			down = false
			if o := forward(p, undoing(t, "POST", "refund")); o.err != nil || o.status != 200 || o.body != "gone" || !o.ours {
				t.Errorf("an undo that succeeds: %v", o)
			}
			if n := up.arrivals.Load() - arrived; n != 2 {
				t.Errorf("%d of 2 undos arrived", n)
			}
			if after := statusOf(t, up.addr); unmoved(after) != unmoved(before) {
				t.Errorf("undos have moved the breaker:\n%s\n%s", unmoved(before), unmoved(after))
			}
			if o := forward(p, request("POST", "x")); !errors.As(o.err, new(*breaker.OpenError)) {
				t.Errorf("an ordinary call passes: %v", o)
			}
		})
	}
}

// In HALF_OPEN an undo is not the probe, whatever comes of it: the next ordinary call is.
func TestUndoTakesNoProbe(t *testing.T) {
	status := "500 Down"
	up := newUpstream(t, func(c *serverConn, _ int) bool {
		if r := c.read(); r == nil {
			return false
		}
		fmt.Fprintf(c, "HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", status)
		return false
	})
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"consecutive": 1}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	halfOpen(t, p, up.addr)
	before := statusOf(t, up.addr)
	if before.State != breaker.HalfOpen {
		t.Fatalf("%+v", before)
	}
	for _, status = range []string{"500 Down", "200 OK"} {
		if o := forward(p, undoing(t, "GET", "")); o.err != nil {
			t.Errorf("%s: %v", status, o)
		}
		if after := statusOf(t, up.addr); unmoved(after) != unmoved(before) {
			t.Errorf("an undo with %s has moved the breaker:\n%s\n%s", status, unmoved(before), unmoved(after))
		}
	}
	b := statusOf(t, up.addr)
	if b.State != breaker.HalfOpen || b.Probing {
		t.Errorf("the probe is taken: %+v", b)
	}
}

// What a workflow asks of breakers does not hold up its undos.
func TestUndoIsUnderNoView(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, n int) bool {
		if r := c.read(); r == nil {
			return false
		}
		status := "200 OK"
		if n%4 == 0 {
			status = "500 Down"
		}
		fmt.Fprintf(c, "HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", status)
		return false
	})
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"min_volume": 4}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	for range 40 {
		forward(p, request("GET", ""))
	}
	view, err := breaker.NewView(0.1, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	viewed := func(next *testProxy) caddyhttp.MiddlewareHandler { return viewing{next, view} }
	if o := forward(viewed(p), request("POST", "")); !errors.As(o.err, new(*breaker.OpenError)) {
		t.Fatalf("the view refuses nothing: %v", o)
	}
	if o := forward(viewed(p), undoing(t, "POST", "")); o.err != nil {
		t.Errorf("the view refuses an undo: %v", o)
	}
}

// viewing sets a view on the way.
type viewing struct {
	*testProxy
	view *breaker.View
}

func (v viewing) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	caddyhttp.SetVar(r.Context(), guard.ViewVar, v.view)
	return v.testProxy.ServeHTTP(w, r, next)
}

// In its lane it is known as well whether anything of an undo was sent.
func TestUndoIsProvenUnsent(t *testing.T) {
	addr := refusing(1)[0]
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, addr)
	if o := forward(p, undoing(t, "POST", "x")); o.Reason != proxy.DialFailed {
		t.Errorf("nobody listens, and it is %v", o)
	}
	stale := newUpstream(t, okThen(func(c *serverConn, _ int) bool { return c.reset() }))
	p = newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, stale.addr)
	forward(p, undoing(t, "POST", "x"))
	if o := forward(p, undoing(t, "POST", "x")); o.NotSent() {
		t.Errorf("cut off in its middle, and it is %v", o)
	}
	if n := stale.total(); n > 2 {
		t.Errorf("%d arrivals of 2 requests", n)
	}
}

const identity = "spiffe://example.com/agent/b"

// cascade 6.2: a probe closes the breaker only if its upstream has answered it, whose
// certificate has its identity. The answer goes to the caller all the same.
func TestProbeIsVerifiedByCertificate(t *testing.T) {
	const other = "spiffe://example.com/agent/c"
	for name, test := range map[string]struct {
		uris    []string
		verify  bool
		closes  bool
		guarded bool
	}{
		"the upstream":                   {uris: []string{identity}, verify: true, closes: true},
		"the upstream, and others":       {uris: []string{other, identity}, verify: true, closes: true},
		"the upstream of a guarded call": {uris: []string{identity}, verify: true, closes: true, guarded: true},
		"another":                        {uris: []string{other}, verify: true},
		"another, of a guarded call":     {uris: []string{other}, verify: true, guarded: true},
		"one whose name is longer":       {uris: []string{identity + "2"}, verify: true},
		"nobody by name":                 {verify: true},
		"another, which nobody asks":     {uris: []string{other}, closes: true},
	} {
		t.Run(name, func(t *testing.T) {
			cert := certificate(t, test.uris...)
			up := listen(t, &tls.Config{Certificates: []tls.Certificate{cert}}, (*serverConn).okAgain)
			p := newProxy(t, `{"transport": {"protocol": "agent_guard", "tls": {"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}},
				"breaker": {"cooldown": "10h", "verify_probe": %v, "downstream": {"%s": "%s"}}}, "upstreams": [{"dial": "%s"}]}`,
				base64.StdEncoding.EncodeToString(cert.Certificate[0]), test.verify, up.addr, identity, up.addr)
			// What is no probe is not verified.
			if err := unguarded(p, request("GET", "")); err != nil {
				t.Fatal(err)
			}
			if s := statusOf(t, up.addr); s.Calls != 1 || s.Failures != 0 {
				t.Fatalf("%+v", s)
			}
			halfOpen(t, p, up.addr)
			if test.guarded {
				if o := forward(p, request("GET", "")); o.status != 200 {
					t.Fatal(o)
				}
			} else if err := unguarded(p, request("GET", "")); err != nil {
				t.Fatal(err)
			}
			s := statusOf(t, up.addr)
			if test.closes {
				if s.State != breaker.Closed {
					t.Errorf("%+v", s)
				}
				return
			}
			if want := "probe answered by somebody else: its certificate is not that of " + identity; s.State != breaker.Open || s.Cause != want || s.FailedProbes != 1 {
				t.Errorf("%+v, want %q", s, want)
			}
		})
	}
}

// Where nobody can say whose a token is, the probe fails, too; unless its caller has left
// meanwhile, which says nothing.
func TestProbeThatCannotBeVerified(t *testing.T) {
	cert := certificate(t)
	up := listen(t, &tls.Config{Certificates: []tls.Certificate{cert}}, says("HTTP/1.1 200 OK\r\nExecution-Context: token\r\nContent-Length: 0\r\n\r\n"))
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "tls": {"ca": {"provider": "inline", "trusted_ca_certs": ["%s"]}},
		"breaker": {"cooldown": "10h", "verify_probe": true, "downstream": {"%s": "%s"}}}, "upstreams": [{"dial": "%s"}]}`,
		base64.StdEncoding.EncodeToString(cert.Certificate[0]), up.addr, identity, up.addr)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for _, test := range []struct {
		name   string
		verify error
		state  breaker.State
		cause  string
	}{
		{"verified", nil, breaker.Closed, ""},
		{"refused", &ect.Error{Code: ect.CodeKeyID}, breaker.Open, "probe answered by somebody else: its token is refused (kid)"},
		{"unknown", ect.ErrUnavailable, breaker.Open, "probe not verified: the token of its answer cannot be checked at the moment"},
		{"left", context.Canceled, breaker.HalfOpen, ""},
	} {
		began := time.Now()
		proxy.VerifyWith(p.transport(t), func(of context.Context, header http.Header, issuer string, since time.Time) error {
			if header.Get(ect.FieldName) != "token" || issuer != identity || since.Before(began) || since.After(time.Now()) {
				t.Errorf("%s: asked for a token of %s since %v in %v", test.name, issuer, since, header)
			}
			if test.verify == context.Canceled {
				leave()
				return of.Err()
			}
			return test.verify
		})
		halfOpen(t, p, up.addr)
		_ = unguarded(p, request("GET", "").WithContext(ctx)) // what becomes of the breaker matters
		if s := statusOf(t, up.addr); s.State != test.state || s.Probing || test.cause != "" && s.Cause != test.cause {
			t.Errorf("%s: %+v", test.name, s)
		}
	}
}

// A transport that can verify nobody is refused when it is loaded, not when a probe fails.
func TestVerifyProbeNeedsSomebodyToVerify(t *testing.T) {
	for name, test := range map[string]struct{ options, want string }{
		"no identity":         {`"tls": {}, "breaker": {"verify_probe": true}`, "breaker: verify_probe: there is no identity"},
		"another's identity":  {`"tls": {}, "breaker": {"verify_probe": true, "downstream": {"localhost:2": "spiffe://a/b"}}`, "verify_probe: localhost:1 has no identity"},
		"no proof":            {`"breaker": {"verify_probe": true, "downstream": {"localhost:1": "spiffe://a/b"}}`, "verify_probe: nothing can prove who answers"},
		"proof not looked at": {`"tls": {"insecure_skip_verify": true}, "breaker": {"verify_probe": true, "downstream": {"localhost:1": "spiffe://a/b"}}`, "verify_probe: nothing can prove who answers"},
		"all":                 {`"tls": {}, "breaker": {"verify_probe": true, "downstream": {"localhost:1": "spiffe://a/b"}}`, ""},
		"off":                 {`"breaker": {"off": true, "verify_probe": true}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := caddy.NewContext(caddy.ActiveContext())
			defer cancel()
			_, err := ctx.LoadModuleByID("http.handlers.reverse_proxy", fmt.Appendf(nil,
				`{"transport": {"protocol": "agent_guard", %s}, "upstreams": [{"dial": "localhost:1"}]}`, test.options))
			if (test.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}
