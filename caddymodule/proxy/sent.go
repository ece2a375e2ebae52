package proxy

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"reflect"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Watch follows one forward of one request. Its methods are safe for concurrent use: transports
// still write and report after RoundTrip has returned.
type Watch struct {
	parent context.Context
	armed  armed
	trace  httptrace.ClientTrace
	cancel context.CancelFunc
	fields atomic.Bool // a header field was written; keeps the hook cheap
	failed atomic.Pointer[string]

	mu      sync.Mutex
	blown   bool     // bytes may have been sent, or the forward has ended
	conns   int      // how often a connection was asked for
	outside bool     // a connection was asked for by another transport than ours
	inside  bool     // our transport's RoundTrip has not returned
	attempt *Attempt // the last one of our transport, or nil
	first   Attempt  // is nearly always the only one
}

type contextKey struct{}

// Arm returns a child of ctx that carries the fuse, and the watch that reads it. The request must
// be forwarded once with that context; forwarding again takes another Arm of the same unarmed ctx.
// Release must be called when the forward has ended and its response is read.
//
// The fuse blows with the first event after which bytes of the request can be on the wire. Once it
// has blown, the next connection that is asked for cancels the context, and the forward ends with
// context.Canceled (which reverse_proxy turns into status 499 without an error).
//
// Every further request made with the context counts as a copy: a response handler or a
// forward_auth between here and reverse_proxy is cut off like one. A transport that reports no
// events does not blow the fuse: with fastcgi, lb_retry_match does send again (and Proof proves
// nothing).
func Arm(ctx context.Context) (context.Context, *Watch) {
	forgetEarlierProxy(ctx)
	w := &Watch{parent: ctx}
	w.armed.w = w
	w.armed.Context, w.cancel = context.WithCancel(ctx)
	w.trace = httptrace.ClientTrace{
		GetConn:          w.getConn,
		GotConn:          w.gotConn,
		WroteHeaderField: w.wroteHeaderField,
	}
	return httptrace.WithClientTrace(&w.armed, &w.trace), w
}

// armed is the context of a forward, which knows its watch.
type armed struct {
	context.Context
	w *Watch
}

// Value implements context.Context.
func (a *armed) Value(key any) any {
	if _, ok := key.(contextKey); ok {
		return a.w
	}
	return a.Context.Value(key)
}

// FromContext returns the watch of a context from Arm, or nil for a request that is not
// guarded.
func FromContext(ctx context.Context) *Watch {
	w, _ := ctx.Value(contextKey{}).(*Watch)
	return w
}

// Release cancels the context and blows the fuse, so that nothing more is sent. It can be
// called several times.
func (w *Watch) Release() {
	w.mu.Lock()
	w.blown = true
	w.mu.Unlock()
	w.cancel()
}

// cutOff reports whether the fuse, and not the caller, ended the forward: the first sending
// failed, and a second one was about to begin.
func (w *Watch) cutOff(ctx context.Context) bool {
	return ctx.Err() != nil && w.parent.Err() == nil
}

// FailedAt is the address of the upstream at which the last attempt of our transport failed, in the eyes of its
// breaker; empty for none.
func (w *Watch) FailedAt() string {
	if at := w.failed.Load(); at != nil {
		return *at
	}
	return ""
}

// Unframed reports whether our transport saw that the response body ends with the
// connection, so that a truncated body looks complete.
func (w *Watch) Unframed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attempt != nil && w.attempt.unframed
}

// getConn is called before a connection is looked for. After the fuse has blown, that is a
// second sending.
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
// On HTTP/1 the fuse blows here and not with the first header field: the request line is written
// before any field is reported, and one that is longer than the write buffer is on the wire by
// then. HTTP/2 reports its first field before it writes anything, and re-sends after this event
// what it never began to send.
//
// After the fuse has blown, cancelling is not enough on HTTP/1: with an idle connection at hand Go
// chooses at random between it and the cancellation, and then writes without looking at the context
// again. So the connection is closed. Cancelling here too is not redundant: the HTTP/2 pool leaves
// GetConn out for a connection that another request dialed.
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
	var body *lateBody
	if w.inside {
		w.attempt.take(info.Conn, shared)
		body = &w.attempt.body
	} else {
		w.outside = true
	}
	w.blown = !shared
	w.mu.Unlock()
	body.fill()
}

// wroteHeaderField blows the fuse for HTTP/2, and for transports that do not report the connection.
// Only the first call matters.
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

// forgetEarlierProxy removes what an earlier reverse_proxy (forward_auth is one) left behind, so
// that Retries counts this forward only.
func forgetEarlierProxy(ctx context.Context) {
	if repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Delete(retriesPlaceholder)
		repl.Delete(statusPlaceholder)
	}
}

// Attempt is what our transport reports of one RoundTrip. A transport may have any number of
// goroutines writing; Done makes the count final by refusing what they have not begun.
type Attempt struct {
	watch *Watch
	ctx   ownContext
	body  lateBody // filled in when there is a connection, before anything is written to it

	// Guarded by watch.mu.
	shared   net.Conn // the multiplexed connection of the request, or nil
	taken    bool     // a connection was obtained
	pending  int      // writes that have begun and not ended
	wrote    bool     // at least one byte was accepted by the socket
	unknown  bool     // bytes may have been sent uncounted
	sealed   bool     // no write may begin
	unframed bool
}

// Attempt opens the next attempt of our transport. If an earlier attempt may have sent
// something, it cancels the request and returns nil; the transport must then fail without
// sending.
func (w *Watch) Attempt() *Attempt {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.blown || w.attempt != nil && !w.attempt.zero() {
		w.cancel()
		return nil
	}
	if w.attempt == nil {
		w.attempt = &w.first
	} else {
		w.attempt = new(Attempt) // connections may still hold the one before
	}
	w.attempt.watch = w
	w.inside = true
	w.failed.Store(nil)
	return w.attempt
}

// ownContext is the context with which our transport sends a request.
type ownContext struct {
	context.Context
	own    bool // vars or more are Caddy's variables
	vars   [8]variable
	n      int
	more   map[string]any // instead of vars where they are too many
	trace  httptrace.ClientTrace
	traced context.Context // has trace; nil where Context's is used
}

type variable struct {
	name  string
	value any
}

// begin makes c a child of ctx with a copy of Caddy's variables. A dial reads them in a goroutine
// that may outlive the attempt, when others write to them again. Few attempts dial, so there is a
// map of them only where one is asked for.
//
// http1 says that the request goes out over HTTP/1, where the fuse needs no event of header fields
// (see gotConn), for each of which net/http would allocate.
func (c *ownContext) begin(ctx context.Context, http1 bool) {
	c.Context = ctx
	var vars map[string]any
	if vars, c.own = ctx.Value(caddyhttp.VarsCtxKey).(map[string]any); len(vars) > len(c.vars) {
		c.more, vars = maps.Clone(vars), nil
	}
	for name, value := range vars {
		c.vars[c.n] = variable{name, value}
		c.n++
	}
	if trace := httptrace.ContextClientTrace(ctx); http1 && trace != nil && onlyOurs(trace.WroteHeaderField) {
		c.trace = *trace
		c.trace.WroteHeaderField = nil
		c.traced = httptrace.WithClientTrace(context.Background(), &c.trace)
	}
}

// onlyOurs reports that nobody but a Watch hears of header fields by this hook. Hooks of several are
// joined in another function.
func onlyOurs(hook func(string, []string)) bool {
	return hook != nil && reflect.ValueOf(hook).Pointer() == fieldHook
}

var fieldHook = reflect.ValueOf((*Watch)(nil).wroteHeaderField).Pointer()

// Value implements context.Context.
func (c *ownContext) Value(key any) any {
	switch {
	case c.own && key == caddyhttp.VarsCtxKey:
		if c.more != nil {
			return c.more
		}
		vars := make(map[string]any, c.n)
		for _, v := range c.vars[:c.n] {
			vars[v.name] = v.value
		}
		return vars
	case c.traced != nil:
		if value := c.traced.Value(key); value != nil {
			return value
		}
	}
	return c.Context.Value(key)
}

// beginWrite announces a write of bytes of the request. If it returns false, nothing may be
// written: the attempt has ended, and its count was reported as final.
func (a *Attempt) beginWrite() bool {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	if a.sealed {
		return false
	}
	a.watch.blown = true
	a.pending++
	return true
}

// endWrite ends a write that beginWrite allowed: n bytes were accepted.
func (a *Attempt) endWrite(n int) {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.pending--
	a.wrote = a.wrote || n > 0
}

// noteUncounted notes that the attempt sends in a way that cannot be counted.
func (a *Attempt) noteUncounted() {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.unknown = true
}

// noteUnframed notes that the response body ends with the connection.
func (a *Attempt) noteUnframed() {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.unframed = true
}

// Done notes that RoundTrip has returned err. After a failure no further write may begin;
// after a response the rest of the request body may still be sent.
func (a *Attempt) Done(err error) {
	a.watch.mu.Lock()
	defer a.watch.mu.Unlock()
	a.watch.inside = false
	if err != nil {
		a.sealed = true
	}
}

// take notes the connection of the attempt. watch.mu is held.
func (a *Attempt) take(conn net.Conn, shared bool) {
	a.taken = true
	if shared {
		a.shared = conn
	} else if c := counted(conn); c != nil {
		c.Count(a)
	} else {
		a.unknown = true
	}
}

// encoding notes that the request is about to be written to a multiplexed connection, where
// its bytes cannot be told from others'. If the count was already reported as final, it
// returns the connection: closing it is the only way to keep the request from being sent.
// watch.mu is held.
func (a *Attempt) encoding() (late net.Conn) {
	switch {
	case a == nil || a.shared == nil:
		return nil
	case a.sealed:
		return a.shared
	default:
		a.unknown = true
		return nil
	}
}

// zero reports whether it is final that no byte was sent. watch.mu is held.
func (a *Attempt) zero() bool {
	return a.sealed && !a.unknown && !a.wrote && a.pending == 0
}

// evidenceKind is the evidence that nothing was sent.
type evidenceKind int

// From no evidence to the strongest.
const (
	// noEvidence: the request may have had its effect.
	noEvidence evidenceKind = iota
	// noUpstreamFound: reverse_proxy had no upstream to send to.
	noUpstreamFound
	// dialFailed: no connection to the upstream could be made.
	dialFailed
	// nothingWritten: our transport counted what was written: nothing.
	nothingWritten
)

// Verdict is what is proven about one forward. The zero value proves nothing.
type Verdict struct {
	Reason evidenceKind
	// Again says that forwarding once more right away is likely to succeed: the connection
	// was dead before a byte was written.
	Again bool
}

// NotSent reports whether it is proven that no byte of the request was sent.
func (v Verdict) NotSent() bool { return v.Reason != noEvidence }

// Placeholders that reverse_proxy sets.
const (
	retriesPlaceholder = "http.reverse_proxy.retries"
	statusPlaceholder  = "http.reverse_proxy.status_code"
	errorPlaceholder   = "http.error"
)

// noUpstream is the text of reverse_proxy's unexported error. A test holds it against the real one.
const noUpstream = "no upstreams available"

// Retries returns how many attempts reverse_proxy made after the first one in the forward
// that was armed with ctx. It is -1 if the number is unknown: no attempt ended, an upstream
// has answered, or an error was handled on the way, so that several reverse_proxy may have
// run and the number is only that of the last one.
func Retries(ctx context.Context) int {
	repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return -1
	}
	for _, name := range []string{statusPlaceholder, errorPlaceholder} {
		if _, set := repl.Get(name); set {
			return -1
		}
	}
	value, _ := repl.Get(retriesPlaceholder)
	if retries, ok := value.(int); ok {
		return retries
	}
	return -1
}

// Proof ends the forward and returns what is proven about it. err is the error of the
// handlers (nil for a cancelled request: reverse_proxy reports 499 without an error),
// retries the result of Retries.
//
// It first makes sure that nothing can be sent afterwards: it blows the fuse, cancels the
// context, and makes our transport's connections refuse the request's bytes.
func (w *Watch) Proof(err error, retries int) Verdict {
	w.mu.Lock()
	blown := w.blown
	w.blown = true
	if w.attempt != nil {
		w.attempt.sealed = true
	}
	v := w.verdict(err, retries, blown)
	w.mu.Unlock()
	w.cancel()
	return v
}

// verdict weighs the evidence. w.mu is held; blown is the state of the fuse before Proof.
func (w *Watch) verdict(err error, retries int, blown bool) Verdict {
	noConnection := err != nil && errors.As(err, new(reverseproxy.DialError))
	switch {
	case retries < 0:
		// Another proxy may have sent something unseen.
		return Verdict{}

	case w.attempt != nil && (w.outside || !w.attempt.zero()):
		return Verdict{}

	// A reverse_proxy has one transport: if one attempt was ours, all were, and each begins
	// only when the previous one provably sent nothing. So retries that found no upstream
	// need no further proof.
	case w.attempt != nil && noConnection:
		return Verdict{Reason: dialFailed}
	case w.attempt != nil:
		return Verdict{Reason: nothingWritten, Again: w.attempt.taken && w.parent.Err() == nil}

	case blown:
		return Verdict{}

	// The error is that of the last attempt only. fastcgi dials with the same error and
	// reports no events, so every earlier attempt must have been observed.
	case noConnection && (retries == 0 || w.conns > retries):
		return Verdict{Reason: dialFailed}

	// This error is proof only if no attempt reached a transport.
	case w.conns == 0 && isNoUpstream(err):
		return Verdict{Reason: noUpstreamFound}

	default:
		return Verdict{}
	}
}

func isNoUpstream(err error) bool {
	var herr caddyhttp.HandlerError
	return errors.As(err, &herr) && herr.StatusCode == http.StatusServiceUnavailable &&
		herr.Err != nil && herr.Err.Error() == noUpstream
}
