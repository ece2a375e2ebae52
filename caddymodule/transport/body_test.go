package transport_test

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// writes counts how often a connection is written to.
type writes struct {
	net.Conn
	n *atomic.Int64
}

func (w writes) Write(p []byte) (int, error) {
	w.n.Add(1)
	return w.Conn.Write(p)
}

// A small body leaves with its header; others, and bodies of another length than
// announced, leave as Go sends them.
func TestSmallBodyLeavesInOneWrite(t *testing.T) {
	up := newUpstream(t, func(c *serverConn, _ int) bool { return c.ok() })
	p := newProxy(t, `{"transport": {"protocol": "agent_guard"}, "upstreams": [{"dial": "%s"}]}`, up.addr)
	var n atomic.Int64
	err := transport.Redial(p.transport(t), func(ctx context.Context, network, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, up.addr)
		return writes{c, &n}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	for size, want := range map[int]int64{1: 1, 200: 1, 2000: 1, 100_000: 2} {
		n.Store(0)
		if o := forward(p, request("POST", strings.Repeat("x", size))); o.status != 200 || o.NotSent() {
			t.Errorf("%d bytes: %v", size, o)
		}
		if got := n.Load(); got != want && (want == 1 || got < want) {
			t.Errorf("%d bytes left in %d writes, want %d", size, got, want)
		}
	}
	for _, announced := range []int64{3, 5} {
		r := request("POST", "four")
		r.ContentLength = announced
		if o := forward(p, r); o.status == 200 {
			t.Errorf("%d bytes announced, 4 given: %v", announced, o)
		}
	}
	p.end()
}
