package transport_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// undoing is a request of an undo.
func undoing(t *testing.T, method, body string) *http.Request {
	return request(method, body).WithContext(circuits.Undo(t.Context()))
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
		{"forced by the operator", `"mode": "forced_open"`},
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
			forward(p, request("POST", "x")) // where it is not forced, this opens it
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
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"consecutive": 1, "mode": "forced_open"}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	forward(p, request("GET", ""))
	m := circuits.Join()
	defer m.Leave()
	// An operator who gives a breaker back that was forced open lets it begin with a probe.
	if !m.SetMode(breaker.Key{Upstream: up.addr}, breaker.Auto) {
		t.Fatal("there is no breaker")
	}
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
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"min_volume": 4, "workflow_threshold": 0.1}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	for range 40 {
		forward(p, request("GET", ""))
	}
	view, err := breaker.NewView(0.1, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	viewed := func(next *proxy) caddyhttp.MiddlewareHandler { return viewing{next, view} }
	if o := forward(viewed(p), request("POST", "")); !errors.As(o.err, new(*breaker.OpenError)) {
		t.Fatalf("the view refuses nothing: %v", o)
	}
	if o := forward(viewed(p), undoing(t, "POST", "")); o.err != nil {
		t.Errorf("the view refuses an undo: %v", o)
	}
}

// viewing sets a view on the way.
type viewing struct {
	*proxy
	view *breaker.View
}

func (v viewing) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	circuits.SetView(r.Context(), v.view)
	return v.proxy.ServeHTTP(w, r, next)
}

// In its lane it is known as well whether anything of an undo was sent.
func TestUndoIsProvenUnsent(t *testing.T) {
	addr := refusing(1)[0]
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, addr)
	if o := forward(p, undoing(t, "POST", "x")); o.Reason != sent.DialFailed {
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
