package caddymodule

import (
	"context"
	"encoding/hex"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// What the way of a call needs of Caddy.
type nextHandler = caddyhttp.Handler

var isIncremental = caddyhttp.IsIncremental

// handlerUpstream makes the handlers behind the guard the upstream of one call. The
// transport in proxy, or Caddy's own, proves what was sent.
type handlerUpstream struct {
	next  nextHandler
	repl  *caddy.Replacer
	armed context.Context
	watch *proxy.Watch
}

// Begin implements guard.Upstream.
func (u *handlerUpstream) Begin(ctx context.Context) context.Context {
	u.repl, _ = ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	u.armed, u.watch = proxy.Arm(ctx)
	return u.armed
}

// Forward implements guard.Upstream.
func (u *handlerUpstream) Forward(w http.ResponseWriter, r *http.Request) (f guard.Forwarded) {
	f.Panicked, f.Err = handOn(u.next, w, r)
	_ = r.Body.Close() // nobody else does where no connection was made
	proof := u.watch.Proof(f.Err, proxy.Retries(u.armed))
	f.NotSent, f.Again = proof.NotSent(), proof.Again
	u.watch.Release()
	return f
}

func handOn(next nextHandler, w http.ResponseWriter, r *http.Request) (panicked any, err error) {
	defer func() { panicked = recover() }()
	return nil, next.ServeHTTP(w, r)
}

// Cut implements guard.Upstream.
func (u *handlerUpstream) Cut() bool { return u.armed.Err() != nil }

// Unframed implements guard.Upstream.
func (u *handlerUpstream) Unframed() bool { return u.watch.Unframed() }

// Status implements guard.Upstream. Only a proxy knows what its server has answered.
func (u *handlerUpstream) Status() int {
	value, _ := u.repl.Get(upstreamStatus)
	status, _ := value.(int)
	return status
}

// Answer implements guard.Upstream.
func (u *handlerUpstream) Answer() execution.Answer {
	a := execution.Answer{Status: u.Status()}
	_, a.RetryAfter = u.repl.Get("http.reverse_proxy.header.Retry-After")
	a.ShouldRetry, _ = u.repl.GetString("http.reverse_proxy.header.Stripe-Should-Retry")
	return a
}

// Silent implements guard.Upstream. An upgrade that nobody asked for is answered and not
// passed on.
func (u *handlerUpstream) Silent() bool {
	_, answered := u.repl.Get(upstreamStatus)
	return answered || caddyhttp.GetVar(u.armed, "unhandled") == true
}

// upstreamStatus is the placeholder in which reverse_proxy leaves the status of the answer
// that it got.
const upstreamStatus = "http.reverse_proxy.status_code"

// original is the request as the caller sent it: its method and URL before handlers like
// `handle_path`, `rewrite` and `method` changed them. Keys and fingerprints are made of
// it, so that a reload that adds or removes such a handler neither frees a key (P1) nor
// makes one of two requests (P3). Its header is not kept by Caddy; checkChains refuses
// what would change the fields that matter. The URL must not be changed.
func original(r *http.Request) (method string, target *url.URL) {
	if o, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request); ok && o.URL != nil {
		return o.Method, o.URL
	}
	return r.Method, r.URL
}

// ownPaths begin the paths that a guard answers itself.
var ownPaths = []string{api.WellKnown, "/.well-known/atd/", "/.well-known/aerr/", "/aerr/"}

// asAsked is r, or where handlers before the guard have rewritten a well-known path, the
// request as it was sent: who asks must not lose the way to an answer by a reload.
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

// publish lets logs and matchers read the placeholders of this call. Values are made
// when they are asked for.
func (x *call) publish() {
	ctx := x.r.Context()
	before, known := caddyhttp.GetVar(ctx, currentCall).(*call)
	if known && !before.noted.over {
		x.noted.outer = before
	}
	caddyhttp.SetVar(ctx, currentCall, x)
	if known {
		return
	}
	replacer(x.r).Map(func(name string) (any, bool) {
		name, ours := strings.CutPrefix(name, placeholderSpace)
		if !ours {
			return nil, false
		}
		return caddyhttp.GetVar(ctx, currentCall).(*call).placeholder(name)
	})
}

// unpublish gives the placeholders back to the guard around this one. Without one
// they stay, for the access log.
func (x *call) unpublish() {
	x.noted.over = true
	if x.noted.outer != nil {
		caddyhttp.SetVar(x.r.Context(), currentCall, x.noted.outer)
	}
}

// String keeps everything else of a call out of whatever prints the variable (P8).
func (x *call) String() string { return x.call.Key.String() }

// identified reports that the call has its key.
func (x *call) identified() bool { return x.call.Scope.ID != "" }

// callerHash is the caller as index entries name it.
func (x *call) callerHash() string {
	hash := x.guard.Caller(x.call.Scope.Caller)
	return hex.EncodeToString(hash[:])
}

// placeholder is the value under {http.agent_guard.name}. What is not known yet, or
// does not apply, is empty.
func (x *call) placeholder(name string) (any, bool) {
	switch name {
	case "execution_id":
		return x.call.Scope.ID, true
	case "key":
		if !x.identified() {
			return "", true
		}
		return x.call.Key.String(), true
	case "guard":
		return x.h.Name, true
	case "action":
		return x.action.Name, true
	case "caller":
		if !x.identified() {
			return "", true
		}
		return x.callerHash(), true
	case "workflow":
		return x.call.Workflow, true
	case "issuer":
		return x.evidence.tokens.issuer(), true
	case "checkpoint":
		return x.call.Checkpoint, true
	case "status":
		return x.noted.status, true
	case "outcome":
		if x.noted.outcome == 0 {
			return "", true
		}
		return x.noted.outcome.String(), true
	case "cause":
		return string(x.noted.cause), true
	case "problem":
		return x.noted.problem, true
	case "age":
		if x.noted.created.IsZero() {
			return "", true
		}
		return strconv.FormatInt(int64(max(0, time.Since(x.noted.created)).Seconds()), 10), true
	}
	return nil, false
}

// traceCall writes what came of the call into the span of Caddy's `tracing` directive. No
// value is the caller's own (P8). Without a span that records, it does nothing.
func (x *call) traceCall() {
	span := oteltrace.SpanFromContext(x.r.Context())
	if !span.IsRecording() {
		return
	}
	attributes := []attribute.KeyValue{
		attribute.String("agent_guard.execution.guard", x.h.Name),
		attribute.String("agent_guard.execution.action", x.action.Name),
		attribute.String("agent_guard.execution.status", x.noted.status),
	}
	if x.identified() {
		attributes = append(attributes, attribute.String("agent_guard.execution.key", x.call.Key.String()))
	}
	if x.noted.outcome != 0 {
		attributes = append(attributes, attribute.String("agent_guard.execution.outcome", x.noted.outcome.String()))
	}
	if x.noted.problem != "" {
		attributes = append(attributes, attribute.String("agent_guard.execution.problem", x.noted.problem))
	}
	span.SetAttributes(attributes...)
}

// emit emits an event of this call.
func (x *call) emit(name string, more map[string]any) {
	a := x.h.app
	if x.engine != nil {
		if latest := x.engine.activeConfigs.latest(); latest != nil {
			a = latest
		}
	}
	if !a.events.ShouldEmit(name) {
		return
	}
	data := map[string]any{"guard": x.h.Name, "action": x.action.Name}
	if x.identified() {
		data["key"], data["caller"] = x.call.Key.String(), x.callerHash()
	}
	for k, v := range more {
		data[k] = v
	}
	a.emit(name, data)
}

// placeholderSpace begins the names of the placeholders of guarded calls.
const placeholderSpace = "http.agent_guard."

// currentCall is the variable of a request that holds the call of the guard
// that works on it: the innermost, while there are several.
const currentCall = "agent_guard.call"

// noted is what is known of a call, for logs and matchers.
type noted struct {
	status  string // empty until it is decided
	problem string // the slug of a refusal
	outcome execution.Verdict
	cause   execution.Cause
	created time.Time // of the execution that is replayed

	outer *call // of the guard around this one
	over  bool
}
