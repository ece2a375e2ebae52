package transport_test

import (
	"net/http"
	"strings"
	"testing"
)

// transports are the two that the fuse must hold in.
var transports = []string{"agent_guard", "http"}

const single = `{"transport": {"protocol": "%s"}, "upstreams": [{"dial": "%s"}]}`

// Section "Sent or not": Go re-sends a request without a body on a broken
// kept-alive connection if it carries Idempotency-Key, whatever its method.
func TestGoDoesNotSendAgain(t *testing.T) {
	dropped := func(c *serverConn, _ int) bool { c.read(); return false }
	reset := func(c *serverConn, _ int) bool { c.read(); return c.reset() }
	long := strings.Repeat("x", 16<<10)

	tests := []struct {
		name   string
		lost   answer
		method string
		header string // value of a header field
		query  string
		body   string
	}{
		{name: "empty POST dropped", lost: dropped, method: "POST"},
		{name: "empty DELETE dropped", lost: dropped, method: "DELETE"},
		{name: "POST with a body dropped", lost: dropped, method: "POST", body: `{"amount":1}`},
		{name: "empty POST reset", lost: reset, method: "POST"},
		{name: "header over 4 KiB", lost: reset, method: "POST", header: long},
		{name: "request line over 4 KiB", lost: reset, method: "POST", query: long},
		{name: "request line over 4 KiB, reset at the first byte", lost: (*serverConn).resetAtOnce, method: "POST", query: long},
	}
	for _, protocol := range transports {
		for _, tt := range tests {
			t.Run(protocol+"/"+tt.name, func(t *testing.T) {
				up := newUpstream(t, okThen(tt.lost))
				p := newProxy(t, single, protocol, up.addr)
				if o := forward(p, request("POST", "warm")); o.status != 200 {
					t.Fatalf("the first request: %v", o)
				}
				r := request(tt.method, tt.body)
				r.URL.RawQuery = tt.query
				if tt.header != "" {
					r.Header.Set("X-Long", tt.header)
				}
				o := forward(p, r)
				p.end()
				if got := up.total(); got != 2 {
					t.Errorf("%d requests arrived, not 2", got)
				}
				if o.NotSent() {
					t.Errorf("P1: %v, but it was sent", o)
				}
			})
		}
	}
}

func (c *serverConn) resetAtOnce(int) bool { return c.reset() }

// The upstream of TestGoDoesNotSendAgain does provoke a second sending.
func TestGoSendsAgainWithoutTheFuse(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, n int) bool {
		if n == 2 {
			c.read()
			return false
		}
		return c.ok()
	})
	p := newProxy(t, single, "http", up.addr)
	for _, body := range []string{"warm", ""} {
		if err := unguarded(p, request("POST", body)); err != nil {
			t.Fatal(err)
		}
	}
	p.end()
	if got := up.total(); got != 3 {
		t.Errorf("%d requests arrived; the trap is gone", got)
	}
}

const retrying = `{
	"transport": {"protocol": "%s"},
	"load_balancing": {"selection_policy": {"policy": "round_robin"}, "retries": 2, "retry_match": [{"method": ["POST"]}]},
	"upstreams": [{"dial": "%s"}, {"dial": "%s"}]
}`

// Section "Sent or not": lb_retry_match sends a failed POST to the next upstream.
func TestCaddyDoesNotSendAgain(t *testing.T) {
	lost := func(c *serverConn, _ int) bool { c.read(); return c.reset() }
	for _, protocol := range transports {
		for _, body := range []string{"", `{"amount":1}`} {
			t.Run(protocol+"/"+body, func(t *testing.T) {
				a, b := newUpstream(t, lost), newUpstream(t, lost)
				p := newProxy(t, retrying, protocol, a.addr, b.addr)
				o := forward(p, request("POST", body))
				p.end()
				if got := a.total() + b.total(); got != 1 {
					t.Errorf("%d requests arrived, not 1", got)
				}
				if o.NotSent() {
					t.Errorf("P1: %v, but it was sent", o)
				}
			})
		}
	}
}

func TestCaddySendsAgainWithoutTheFuse(t *testing.T) {
	lost := func(c *serverConn, _ int) bool { c.read(); return c.reset() }
	a, b := newUpstream(t, lost), newUpstream(t, lost)
	p := newProxy(t, retrying, "http", a.addr, b.addr)
	if err := unguarded(p, request("POST", "")); err == nil {
		t.Error("no error from two dead upstreams")
	}
	p.end()
	if got := a.total() + b.total(); got != 3 {
		t.Errorf("%d requests arrived, not 3; the trap is gone", got)
	}
}

// Section "Sent or not": with idle connections at hand Go chooses at random
// between them and the cancellation, so one run in two would send again.
func TestIdleConnectionAtHandIsNotUsed(t *testing.T) {
	for _, protocol := range transports {
		t.Run(protocol, func(t *testing.T) {
			for range 60 {
				idle := make(chan struct{}, 2)
				both := make(chan struct{})
				up := newUpstream(t, func(c *serverConn, n int) bool {
					if n > 2 {
						c.read()
						return false
					}
					// Two at once, so that two connections are made.
					idle <- struct{}{}
					<-both
					return c.ok()
				})
				p := newProxy(t, single, protocol, up.addr)
				done := make(chan outcome, 2)
				for range 2 {
					go func() { done <- forward(p, request("POST", "warm")) }()
				}
				<-idle
				<-idle
				close(both)
				for range 2 {
					if o := <-done; o.status != 200 {
						t.Fatalf("a first request: %v", o)
					}
				}
				o := forward(p, request("POST", ""))
				p.end()
				if got := up.total(); got != 3 {
					t.Fatalf("%d requests arrived, not 3", got)
				}
				if o.NotSent() || o.err == nil && o.status != 499 {
					t.Fatalf("%v, neither an error nor Caddy's 499", o)
				}
			}
		})
	}
}

// P1: what was answered is not proven unsent, whatever the status.
func TestAnsweredIsNotUnsent(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { return c.ok() })
	for _, protocol := range transports {
		o := forward(newProxy(t, single, protocol, up.addr), request(http.MethodPost, "x"))
		if o.status != 200 || o.NotSent() {
			t.Errorf("%s: %v", protocol, o)
		}
		if o.ours != (protocol == "agent_guard") {
			t.Errorf("%s: ours = %v", protocol, o.ours)
		}
	}
}
