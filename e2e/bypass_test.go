package e2e

import (
	"bufio"
	"net/http"
	"testing"
)

// P1: some clients offer HTTP/2 with every cleartext call. Such an offer is no
// upgrade that would lead past the guard, and it is not made to the upstream.
func TestOfferOfHTTP2IsGuarded(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for range 2 {
		conn := g.dial()
		write(t, conn, "POST /pay HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"+
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
	u.arrived("/pay", 1)
	for _, name := range []string{"Upgrade", "Connection", "Http2-Settings"} {
		if v := u.last("/pay").Header.Get(name); v != "" {
			t.Errorf("the upstream got %s: %s", name, v)
		}
	}
}

// A call that passes two guards of one configuration is guarded by the first: the
// second would wait for itself.
func TestGuardInsideAGuard(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "route {\nagent_guard\nagent_proxy %s\n}", u.addr)
	r := request{path: "/pay", id: "k"}
	g.call(r).want(t, 201, "arrival 1", "executed")
	g.call(r).want(t, 201, "arrival 1", "replayed")
	u.arrived("/pay", 1)
}
