package transport

import (
	"errors"
	"net"
	"sync/atomic"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// conn counts what is written for each request. It lies below TLS, so that a
// record that was begun counts.
type conn struct {
	net.Conn
	h2c     bool
	attempt atomic.Pointer[sent.Attempt]
}

var errAttemptOver = errors.New("the request was given up before this write")

// Count implements sent.Conn. HTTP/1 calls it for each request that the
// connection is used for, before the first byte.
func (c *conn) Count(a *sent.Attempt) { c.attempt.Store(a) }

// Multiplexed implements sent.Conn.
func (c *conn) Multiplexed() bool { return c.h2c }

// Write counts p to the present attempt, or to none: handshakes, requests to a
// proxy to connect, and HTTP/2.
func (c *conn) Write(p []byte) (int, error) {
	a := c.attempt.Load()
	if a == nil {
		return c.Conn.Write(p)
	}
	if !a.Begin() {
		return 0, errAttemptOver
	}
	n, err := c.Conn.Write(p)
	a.Wrote(n)
	return n, err
}

var _ sent.Conn = (*conn)(nil)
