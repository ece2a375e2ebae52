// Package sent decides for one forwarded request whether it is proven that no
// byte of it left, and sees to it that no second copy of it can leave (P1,
// section "Sent or not").
//
// Two things send a request again without asking: Go's HTTP transports, after a
// reused connection broke, and Caddy's reverse_proxy with lb_retry_match. Arm
// puts a fuse into the request's context that stops both. What had been sent
// when the forward ended is answered by Proof, on positive evidence only: an
// event that was not seen proves nothing.
package sent

import (
	"context"
	"net/http/httptrace"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
)

// Watch follows one forward of one request. Its methods are safe for concurrent
// use: transports still write and report after RoundTrip has returned.
type Watch struct {
	parent context.Context
	cancel context.CancelFunc
	fields atomic.Bool // a header field was written; keeps the hook cheap

	mu      sync.Mutex
	blown   bool     // bytes may have left, or the forward is over
	conns   int      // how often a connection was asked for
	outside bool     // a connection was asked for outside of our transport
	inside  bool     // our transport's RoundTrip has not returned
	attempt *Attempt // the last one through our transport, or nil
}

type contextKey struct{}

// Arm returns a child of ctx that carries the fuse, and the watch that reads it.
// The request must be forwarded once with that context; forwarding again takes
// another Arm of the same unarmed ctx. Release must be called when the forward
// has ended and its response is read.
//
// The fuse blows with the first event after which bytes of the request can be on
// the wire. Once it has blown, the next connection that is asked for cancels the
// context, and the forward ends with context.Canceled (which reverse_proxy turns
// into status 499 without an error).
//
// Every further request made with the context counts as a copy: a response
// handler or a forward_auth between here and reverse_proxy is cut off like one.
// A transport that reports no events does not blow the fuse: with fastcgi,
// lb_retry_match does send again (and Proof proves nothing).
func Arm(ctx context.Context) (context.Context, *Watch) {
	forgetEarlierProxy(ctx)
	w := &Watch{parent: ctx}
	child, cancel := context.WithCancel(context.WithValue(ctx, contextKey{}, w))
	w.cancel = cancel
	return httptrace.WithClientTrace(child, &httptrace.ClientTrace{
		GetConn:          w.getConn,
		GotConn:          w.gotConn,
		WroteHeaderField: w.wroteHeaderField,
	}), w
}

// FromContext returns the watch that ctx was armed with, or nil for a request
// that is not guarded.
func FromContext(ctx context.Context) *Watch {
	w, _ := ctx.Value(contextKey{}).(*Watch)
	return w
}

// Release cancels the context and blows the fuse, so that nothing is sent from
// here on. Calling it again is harmless.
func (w *Watch) Release() {
	w.mu.Lock()
	w.blown = true
	w.mu.Unlock()
	w.cancel()
}

// Cut reports whether the fuse has ended the forward, and not its caller: the first
// sending failed on the way, and a second one was about to begin.
func (w *Watch) Cut(ctx context.Context) bool {
	return ctx.Err() != nil && w.parent.Err() == nil
}

// Ours reports whether every connection that was asked for was asked for by our
// transport, so that Unframed can be relied on.
func (w *Watch) Ours() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attempt != nil && !w.outside
}

// Unframed reports whether our transport saw that nothing but the end of the
// connection ends the response body, so that a cut body looks whole.
func (w *Watch) Unframed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attempt != nil && w.attempt.unframed
}

// getConn is called before a connection is looked for. After the fuse has blown
// that is a second sending.
func (w *Watch) getConn(string) {
	w.mu.Lock()
	w.conns++
	w.outside = w.outside || !w.inside
	blown := w.blown
	w.mu.Unlock()
	if blown {
		w.cancel()
	}
}

// gotConn is called with the connection that the request will be written to.
//
// On HTTP/1 the fuse blows here and not with the first header field: the request
// line is written before any field is reported, and one that is longer than the
// write buffer is on the wire by then. HTTP/2 reports its first field before it
// writes anything, and re-sends after this event what it never began to send.
//
// After the fuse has blown, cancelling is not enough on HTTP/1: with an idle
// connection at hand Go chooses at random between it and the cancellation, and
// then writes without looking at the context again. So the connection is closed.
// Cancelling here too is not redundant: the HTTP/2 pool leaves GetConn out for a
// connection that another request dialed.
func (w *Watch) gotConn(info httptrace.GotConnInfo) {
	shared := multiplexed(info.Conn)
	w.mu.Lock()
	if w.blown {
		w.mu.Unlock()
		w.cancel()
		if !shared && writesUnasked(info.Conn) {
			closeBelow(info.Conn)
		}
		return
	}
	var onConn func()
	if w.inside {
		w.attempt.take(info.Conn, shared)
		onConn = w.attempt.onConn
	} else {
		w.outside = true
	}
	w.blown = !shared
	w.mu.Unlock()
	if onConn != nil {
		onConn()
	}
}

// wroteHeaderField blows the fuse for HTTP/2, and for transports that do not
// report the connection. Only the first call matters.
func (w *Watch) wroteHeaderField(string, []string) {
	if w.fields.Load() {
		return
	}
	w.mu.Lock()
	w.blown = true
	late := w.attempt.encoding()
	w.mu.Unlock()
	w.fields.Store(true)
	if late != nil {
		closeBelow(late)
	}
}

// forgetEarlierProxy removes what an earlier reverse_proxy (forward_auth is one)
// left behind, so that Retries tells of this forward.
func forgetEarlierProxy(ctx context.Context) {
	if repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Delete(retriesPlaceholder)
		repl.Delete(statusPlaceholder)
	}
}
