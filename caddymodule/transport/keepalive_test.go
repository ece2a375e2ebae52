package transport_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// pipes is an upstream over pipes, whose time is that of a bubble. It closes a
// connection that was idle for idle.
type pipes struct {
	idle     time.Duration
	dialed   int
	arrivals int
}

func (u *pipes) dial(context.Context, string, string) (net.Conn, error) {
	u.dialed++
	client, server := net.Pipe()
	go func() {
		defer server.Close()
		in := bufio.NewReader(server)
		for {
			_ = server.SetReadDeadline(time.Now().Add(u.idle))
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			u.arrivals++
			_, _ = io.Copy(io.Discard, req.Body)
			if req.Header.Get("X-Lose") != "" {
				return
			}
			if _, err := io.WriteString(server, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"); err != nil {
				return
			}
		}
	}()
	return client, nil
}

// send makes a request directly with tr, guarded or not.
func send(tr *transport.Transport, guarded bool, header string) (sent.Verdict, error) {
	ctx := context.Background()
	var watch *sent.Watch
	if guarded {
		ctx, watch = sent.Arm(ctx)
		defer watch.Release()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://upstream/", nil)
	if err != nil {
		return sent.Verdict{}, err
	}
	req.Header.Set("Idempotency-Key", "one")
	if header != "" {
		req.Header.Set(header, "1")
	}
	res, err := tr.RoundTrip(req)
	if err == nil {
		_, err = io.Copy(io.Discard, res.Body)
		err = errors.Join(err, res.Body.Close())
	}
	var v sent.Verdict
	if guarded {
		v = watch.Proof(err, 0)
	}
	return v, err
}

// inBubble provisions a transport and runs f in a bubble, which also shows that
// nothing is left running.
func inBubble(t *testing.T, guarded time.Duration, f func(tr *transport.Transport, u *pipes)) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.ActiveContext())
	t.Cleanup(cancel)
	tr := new(transport.Transport).CaddyModule().New().(*transport.Transport)
	tr.KeepaliveGuarded = caddy.Duration(guarded)
	if err := tr.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		u := &pipes{idle: time.Second}
		if err := transport.Redial(tr, u.dial); err != nil {
			t.Fatal(err)
		}
		f(tr, u)
		if err := tr.Cleanup(); err != nil {
			t.Error(err)
		}
	})
}

// wait lets the bubble's time pass.
func wait(d time.Duration) { <-time.After(d) }

// Section "Sent or not": a connection that was idle longer than keepalive_guarded
// is not used for a guarded call, so that idle closes do not become doubts.
func TestKeepaliveGuarded(t *testing.T) {
	inBubble(t, 300*time.Millisecond, func(tr *transport.Transport, u *pipes) {
		for _, pause := range []time.Duration{0, 250 * time.Millisecond, 299 * time.Millisecond} {
			wait(pause)
			if v, err := send(tr, true, ""); err != nil || v.NotSent() {
				t.Fatal(v, err)
			}
		}
		if u.dialed != 1 {
			t.Errorf("%d connections where one was young enough", u.dialed)
		}
		for n := range 300 {
			// Up to and beyond the time at which the upstream closes.
			wait(301*time.Millisecond + time.Duration(n)*3*time.Millisecond)
			if v, err := send(tr, true, ""); err != nil || v.NotSent() {
				t.Fatalf("a doubt for an idle connection: %v, %v", v, err)
			}
		}
		if u.dialed != 301 || u.arrivals != 303 {
			t.Errorf("%d connections and %d requests, not 301 and 303", u.dialed, u.arrivals)
		}
	})
}

// keepalive_guarded does not touch requests that are not guarded, and shares no
// connection with them.
func TestUnguardedKeepalive(t *testing.T) {
	inBubble(t, 300*time.Millisecond, func(tr *transport.Transport, u *pipes) {
		for range 3 {
			if _, err := send(tr, false, ""); err != nil {
				t.Fatal(err)
			}
			wait(900 * time.Millisecond)
		}
		if u.dialed != 1 {
			t.Errorf("%d connections for requests that are not guarded, not 1", u.dialed)
		}
		if _, err := send(tr, true, ""); err != nil {
			t.Fatal(err)
		}
		if u.dialed != 2 {
			t.Error("a guarded request used a connection of the others")
		}
	})
}

func TestKeepaliveOff(t *testing.T) {
	inBubble(t, -1, func(tr *transport.Transport, u *pipes) {
		for range 3 {
			if _, err := send(tr, true, ""); err != nil {
				t.Fatal(err)
			}
		}
		if u.dialed != 3 {
			t.Errorf("%d connections for 3 requests", u.dialed)
		}
	})
}

// Requests that are lost, cancelled or proven unsent leave nothing running and no
// connection open.
func TestNothingIsLeftRunning(t *testing.T) {
	inBubble(t, 0, func(tr *transport.Transport, u *pipes) {
		for range 20 {
			if _, err := send(tr, true, ""); err != nil {
				t.Fatal(err)
			}
			if v, err := send(tr, true, "X-Lose"); err == nil || v.NotSent() {
				t.Fatal(v, err)
			}
		}
		if u.arrivals != 40 {
			t.Errorf("%d requests arrived, not 40", u.arrivals)
		}
	})
}
