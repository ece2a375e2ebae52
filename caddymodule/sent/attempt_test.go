package sent_test

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptrace"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

var errFailed = errors.New("failed")

// countedConn is a counting connection as a transport makes it.
type countedConn struct {
	net.Conn
	attempt *sent.Attempt
	shared  bool
	closed  bool
}

func (c *countedConn) Count(a *sent.Attempt) { c.attempt = a }
func (c *countedConn) Multiplexed() bool     { return c.shared }
func (c *countedConn) Close() error          { c.closed = true; return nil }
func (c *countedConn) LocalAddr() net.Addr   { return new(net.TCPAddr) }

// h2Conn is a counted connection below TLS that negotiated HTTP/2.
type h2Conn struct{ *countedConn }

func (c h2Conn) ConnectionState() tls.ConnectionState {
	return tls.ConnectionState{NegotiatedProtocol: "h2"}
}
func (c h2Conn) NetConn() net.Conn { return c.countedConn }

// Section "Sent or not": what our transport's count proves.
func TestProofByCount(t *testing.T) {
	tests := []struct {
		name  string
		do    func(w *sent.Watch, trace *httptrace.ClientTrace)
		want  sent.Reason
		again bool
	}{
		{
			name: "no connection was obtained",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				a.Done(errFailed)
			},
			want: sent.NothingWritten,
		},
		{
			name: "fields were encoded and nothing was accepted",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
				trace.WroteHeaderField("Host", nil)
				a.Begin()
				a.Wrote(0)
				a.Done(errFailed)
			},
			want: sent.NothingWritten, again: true,
		},
		{
			name: "one byte was accepted",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
				a.Begin()
				a.Wrote(1)
				a.Begin()
				a.Wrote(0)
				a.Done(errFailed)
			},
		},
		{
			name: "a write is not over",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
				a.Begin()
				a.Done(errFailed)
			},
		},
		{
			name: "the connection is not counted",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				c, _ := net.Pipe()
				trace.GotConn(httptrace.GotConnInfo{Conn: c})
				a.Done(errFailed)
			},
		},
		{
			name: "the transport cannot count",
			do:   func(w *sent.Watch, _ *httptrace.ClientTrace) { a := w.Attempt(); a.Unknown(); a.Done(errFailed) },
		},
		{
			name: "HTTP/2 that was never encoded",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: h2Conn{new(countedConn)}})
				a.Done(errFailed)
			},
			want: sent.NothingWritten, again: true,
		},
		{
			name: "HTTP/2 that was encoded",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: h2Conn{new(countedConn)}})
				trace.WroteHeaderField(":authority", nil)
				a.Done(errFailed)
			},
		},
		{
			name: "cleartext HTTP/2 that was encoded",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				a := w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: &countedConn{shared: true}})
				trace.WroteHeaderField(":authority", nil)
				a.Done(errFailed)
			},
		},
		{
			name: "another transport sent after ours did not",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				w.Attempt().Done(errFailed)
				c, _ := net.Pipe()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: c})
			},
		},
		{
			name: "RoundTrip has not returned, and is cut off by the proof",
			do: func(w *sent.Watch, trace *httptrace.ClientTrace) {
				w.Attempt()
				trace.GetConn("")
				trace.GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
			},
			want: sent.NothingWritten, again: true,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ctx, w := sent.Arm(t.Context())
			tt.do(w, httptrace.ContextClientTrace(ctx))
			v := w.Proof(errFailed, 0)
			if v.Reason != tt.want || v.Again != tt.again || v.NotSent() != (tt.want != sent.Unknown) {
				t.Errorf("%v, again %v; want %v, %v", v.Reason, v.Again, tt.want, tt.again)
			}
			if ctx.Err() == nil {
				t.Error("something can still be sent")
			}
		})
	}
}

// P1: a proof holds after it was given: what comes later is refused.
func TestProofIsFinal(t *testing.T) {
	t.Run("HTTP/1", func(t *testing.T) {
		ctx, w := sent.Arm(t.Context())
		c := new(countedConn)
		a := w.Attempt()
		httptrace.ContextClientTrace(ctx).GotConn(httptrace.GotConnInfo{Conn: c})
		if !w.Proof(nil, 0).NotSent() {
			t.Fatal("nothing was written, and it is not proven")
		}
		if c.attempt != a || a.Begin() {
			t.Error("a write was allowed after the proof")
		}
	})
	t.Run("HTTP/2", func(t *testing.T) {
		ctx, w := sent.Arm(t.Context())
		c := h2Conn{new(countedConn)}
		trace := httptrace.ContextClientTrace(ctx)
		w.Attempt()
		trace.GotConn(httptrace.GotConnInfo{Conn: c})
		if !w.Proof(nil, 0).NotSent() {
			t.Fatal("nothing was encoded, and it is not proven")
		}
		trace.WroteHeaderField(":authority", nil)
		if !c.closed {
			t.Error("the connection is open to a request that was encoded after the proof")
		}
	})
	t.Run("a new attempt", func(t *testing.T) {
		ctx, w := sent.Arm(t.Context())
		w.Proof(nil, 0)
		if w.Attempt() != nil || ctx.Err() == nil {
			t.Error("an attempt was opened after the proof")
		}
	})
}

// P1: of writers that race with the proof, either the proof sees the byte, or the
// write is refused.
func TestProofAgainstWriters(t *testing.T) {
	for range 500 {
		ctx, w := sent.Arm(t.Context())
		a := w.Attempt()
		httptrace.ContextClientTrace(ctx).GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
		var wire int
		var v sent.Verdict
		var both sync.WaitGroup
		both.Go(func() {
			if a.Begin() {
				wire++
				a.Wrote(1)
			}
		})
		both.Go(func() { v = w.Proof(errFailed, 0) })
		both.Wait()
		if wire > 0 && v.NotSent() {
			t.Fatal("a byte was written, and it is proven that none was")
		}
	}
}

// Section "Sent or not": an attempt opens only after one that sent nothing.
func TestAttemptAfterAttempt(t *testing.T) {
	ctx, w := sent.Arm(t.Context())
	w.Attempt().Done(errFailed)
	second := w.Attempt()
	if second == nil {
		t.Fatal("no second attempt after one without a connection")
	}
	if !second.Begin() {
		t.Fatal("the second attempt may not write")
	}
	second.Wrote(1)
	second.Done(errFailed)
	if w.Attempt() != nil {
		t.Error("P1: a third attempt after one that sent")
	}
	if ctx.Err() == nil {
		t.Error("the third attempt did not cancel the request")
	}
}

// Section "Sent or not": forwarding again is of no use when the forward ended
// because its caller or its deadline did.
func TestNotAgainAfterTheCallerLeft(t *testing.T) {
	parent, leave := context.WithCancel(t.Context())
	ctx, w := sent.Arm(parent)
	w.Attempt()
	httptrace.ContextClientTrace(ctx).GotConn(httptrace.GotConnInfo{Conn: new(countedConn)})
	leave()
	if v := w.Proof(nil, 0); v.Reason != sent.NothingWritten || v.Again {
		t.Errorf("%+v", v)
	}
}

// Unframed is of the last attempt, and worth nothing if it was not ours.
func TestOursAndUnframed(t *testing.T) {
	ctx, w := sent.Arm(t.Context())
	defer w.Release()
	if w.Ours() || w.Unframed() {
		t.Error("nothing was forwarded")
	}
	a := w.Attempt()
	httptrace.ContextClientTrace(ctx).GetConn("")
	a.Unframed()
	a.Done(nil)
	if !w.Ours() || !w.Unframed() {
		t.Error("our transport's report is lost")
	}
	httptrace.ContextClientTrace(ctx).GetConn("")
	if w.Ours() {
		t.Error("another transport asked for a connection")
	}
}
