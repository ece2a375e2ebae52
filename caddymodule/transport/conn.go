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
	stale   func() // told when the connection was found closed before a request
	attempt atomic.Pointer[sent.Attempt]
	unused  atomic.Bool // by the present attempt
}

var (
	errAttemptOver = errors.New("the request was given up before this write")
	errGone        = errors.New("the upstream has closed the kept connection")
)

// Count implements sent.Conn. HTTP/1 calls it for each request that the
// connection is used for, before the first byte.
func (c *conn) Count(a *sent.Attempt) {
	c.attempt.Store(a)
	c.unused.Store(true)
}

// Multiplexed implements sent.Conn.
func (c *conn) Multiplexed() bool { return c.h2c }

// Write counts p to the present attempt, or to none: handshakes, requests to a
// proxy to connect, and HTTP/2.
func (c *conn) Write(p []byte) (int, error) {
	a := c.attempt.Load()
	if a == nil {
		return c.Conn.Write(p)
	}
	// An end that has arrived but that nobody has read yet would swallow the request
	// and leave it in doubt.
	if c.unused.Swap(false) && gone(c.Conn) {
		c.stale()
		return 0, errGone
	}
	if !a.Begin() {
		return 0, errAttemptOver
	}
	n, err := c.Conn.Write(p)
	a.Wrote(n)
	return n, err
}

var _ sent.Conn = (*conn)(nil)
