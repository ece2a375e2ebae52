package transport_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// shortLease makes every call fit to be a probe, and its lease end in the test's time.
const shortLease = `{"transport": {"protocol": "agent_guard", %s "breaker": {"probe_prefer": -1, "probe_timeout": "3s", "cooldown": "10h"}}, "upstreams": [{"dial": "%s"}]}`

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
	p := newProxy(t, shortLease, "", up.addr)
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
	p := newProxy(t, `{"transport": {"protocol": "agent_guard", "breaker": {"probe_prefer": "10h"}}, "upstreams": [{"dial": "%s"}]}`, up.addr)
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
	p := newProxy(t, shortLease, "", up.addr)
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
	p := newProxy(t, shortLease, client+",", addr)
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
