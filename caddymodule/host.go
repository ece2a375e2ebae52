package caddymodule

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// host implements guard.Host with Caddy.
type host struct{ h *Handler }

var _ guard.Host = host{}

func (host) Original(r *http.Request) (method string, target *url.URL) { return original(r) }

func (host) Mount(r *http.Request) string { return mount(r) }

func (host) Expand(r *http.Request, text string) (string, bool) {
	value, err := replacer(r).ReplaceOrErr(text, true, true)
	return value, err == nil && value != ""
}

func replacer(r *http.Request) *caddy.Replacer {
	return r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
}

func (host) User(r *http.Request) string {
	id, _ := replacer(r).GetString("http.auth.user.id")
	return id
}

func (host) Var(r *http.Request, name string) any { return caddyhttp.GetVar(r.Context(), name) }

func (host) SetVar(r *http.Request, name string, value any) {
	caddyhttp.SetVar(r.Context(), name, value)
}

func (host) Note(r *http.Request, name, value string) { replacer(r).Set(placeholderSpace+name, value) }

func (host) Incremental(h http.Header) bool { return caddyhttp.IsIncremental(h) }

func (c host) Upstream(next guard.Next) guard.Upstream {
	return &handlerUpstream{next: next, errorRoutes: c.h.errorRoutes != nil && c.h.errorRoutes.Load()}
}

func (host) Exiting() bool { return caddy.Exiting() }

// connKey is the context key of the connection of a request.
type connKey struct{}

// Received implements guard.Host. A client that has closed its connection altogether answers what is written to it
// with a reset.
func (host) Received(r *http.Request) bool {
	conn := r.Context().Value(connKey{})
	for {
		inner, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		conn = inner.NetConn()
	}
	socket, ok := conn.(syscall.Conn)
	return ok && acknowledged(socket)
}

func (c host) Emit(e guard.Event) { c.h.app.emitCall(e) }

func (a *App) emitCall(e guard.Event) {
	if a.events.ShouldEmit(e.Name) { // else its data is not made
		a.emit(e.Name, e.Data())
	}
}

// emitCall emits an event of a call to the latest configuration, if there is one.
func (e *engine) emitCall(event guard.Event) bool {
	if event.Name == eventWorkflowStarted {
		e.counts.add(workflowsBegun, "", 1)
	}
	latest := e.activeConfigs.latest()
	if latest != nil {
		latest.emitCall(event)
	}
	return latest != nil
}

// handlerUpstream makes the handlers behind the guard a guard.Upstream for one call. The
// transport in caddymodule/proxy, or Caddy's own, gives the evidence of what was sent.
type handlerUpstream struct {
	next  guard.Next
	repl  *caddy.Replacer
	armed context.Context
	watch *proxy.Watch

	errorRoutes bool // errors are for the error routes of the server
}

func (u *handlerUpstream) Begin(ctx context.Context) context.Context {
	u.repl, _ = ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	u.armed, u.watch = proxy.Arm(ctx)
	return u.armed
}

func (u *handlerUpstream) Forward(w http.ResponseWriter, r *http.Request) (f guard.Forwarded) {
	f.Panicked, f.Err = handOn(u.next, w, r)
	_ = r.Body.Close() // no transport has closed it if no connection was made
	proof := u.watch.Proof(f.Err, proxy.Retries(u.armed))
	f.NotSent, f.Again, f.FailedAt = proof.NotSent(), proof.Again, u.watch.FailedAt()
	u.watch.Release()
	if !u.errorRoutes && f.NotSent {
		f.Status = http.StatusBadGateway
		if coded := (caddyhttp.HandlerError{}); errors.As(f.Err, &coded) {
			f.Status = coded.StatusCode
		}
		if f.Status < http.StatusInternalServerError { // 499: the client has left
			f.Status = 0
		}
	}
	return f
}

func handOn(next guard.Next, w http.ResponseWriter, r *http.Request) (panicked any, err error) {
	defer func() { panicked = recover() }()
	return nil, next.ServeHTTP(w, r)
}

func (u *handlerUpstream) Cut() bool { return u.armed.Err() != nil }

func (u *handlerUpstream) Unframed() bool { return u.watch.Unframed() }

// Status implements guard.Upstream. Only reverse_proxy reports the upstream's status.
func (u *handlerUpstream) Status() int {
	value, _ := u.repl.Get(upstreamStatus)
	status, _ := value.(int)
	return status
}

func (u *handlerUpstream) Answer() execution.Answer {
	a := execution.Answer{Status: u.Status()}
	_, a.RetryAfter = u.repl.Get("http.reverse_proxy.header.Retry-After")
	a.ShouldRetry, _ = u.repl.GetString("http.reverse_proxy.header.Stripe-Should-Retry")
	return a
}

// Silent implements guard.Upstream. reverse_proxy neither reports nor passes on an upgrade
// that was not requested.
func (u *handlerUpstream) Silent() bool {
	_, answered := u.repl.Get(upstreamStatus)
	return answered || caddyhttp.GetVar(u.armed, "unhandled") == true
}

// upstreamStatus is the placeholder that reverse_proxy sets to the status of the upstream's
// answer.
const upstreamStatus = "http.reverse_proxy.status_code"

// original returns the method and URI as the caller sent them. Caddy does not keep the
// original header; checkVisits refuses changes to the fields that matter.
func original(r *http.Request) (method string, target *url.URL) {
	if o, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request); ok && o.URL != nil {
		return o.Method, o.URL
	}
	return r.Method, r.URL
}

// ownPaths are the prefixes of the paths that a guard answers itself.
var ownPaths = []string{router.WellKnown, "/.well-known/atd/", "/.well-known/aerr/", "/aerr/"}

// asAsked returns r, or the request as it was sent if earlier handlers have rewritten a
// well-known path: a reload must not make these paths unreachable.
func asAsked(r *http.Request) *http.Request {
	method, sent := original(r)
	if method == r.Method && sent.Path == r.URL.Path && sent.RawQuery == r.URL.RawQuery {
		return r
	}
	for _, path := range ownPaths {
		if strings.HasPrefix(sent.Path, path) {
			asked, target := *r, *sent
			asked.Method, asked.URL = method, &target
			return &asked
		}
	}
	return r
}

// Begin makes the placeholders of the call available. Values are computed on demand.
func (host) Begin(r *http.Request, c *guard.Call) (outer *guard.Call) {
	ctx := r.Context()
	before, known := caddyhttp.GetVar(ctx, currentCall).(*guard.Call)
	caddyhttp.SetVar(ctx, currentCall, c)
	if known {
		if before.Over() {
			return nil
		}
		return before
	}
	replacer(r).Map(func(name string) (any, bool) {
		name, ours := strings.CutPrefix(name, placeholderSpace)
		c, begun := caddyhttp.GetVar(ctx, currentCall).(*guard.Call)
		if !ours || !begun {
			return nil, false
		}
		return c.Value(name)
	})
	return nil
}

func (host) Show(r *http.Request, c *guard.Call) { caddyhttp.SetVar(r.Context(), currentCall, c) }

// traced maps the attributes of a call's span to placeholders. None contains a value of the
// caller (P8).
var traced = []struct{ attribute, value string }{
	{"agent_guard.execution.guard", "guard"}, {"agent_guard.execution.action", "action"},
	{"agent_guard.execution.status", "status"}, {"agent_guard.execution.key", "key"},
	{"agent_guard.execution.outcome", "outcome"}, {"agent_guard.execution.problem", "problem"},
}

// Trace sets attributes of the span of Caddy's `tracing` directive, if it records.
func (host) Trace(r *http.Request, c *guard.Call) {
	span := oteltrace.SpanFromContext(r.Context())
	if !span.IsRecording() {
		return
	}
	var attributes []attribute.KeyValue
	for _, t := range traced {
		value, _ := c.Value(t.value)
		if text, _ := value.(string); text != "" || t.value == "status" {
			attributes = append(attributes, attribute.String(t.attribute, text))
		}
	}
	span.SetAttributes(attributes...)
}

// placeholderSpace is the prefix of the placeholders of guarded calls.
const placeholderSpace = "http.agent_guard."

// currentCall is the request variable with the call of the innermost guard.
const currentCall = "agent_guard.call"
