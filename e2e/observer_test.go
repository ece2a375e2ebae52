package e2e

import (
	"context"
	"net/http"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

func init() {
	caddy.RegisterModule(observe{})
	caddy.RegisterModule(listener{})
	httpcaddyfile.RegisterHandlerDirective("e2e_observe", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		if h.NextArg() {
			return nil, h.ArgErr()
		}
		return new(observe), nil
	})
	httpcaddyfile.RegisterDirectiveOrder("e2e_observe", httpcaddyfile.Before, "tracing")
}

// observer is what one test gets to see. Tests of this process run one after the other.
type observer struct {
	t     *testing.T
	spans *tracetest.SpanRecorder
	trace *sdktrace.TracerProvider

	mu     sync.Mutex
	seen   []map[string]string // placeholders of each request, by name
	events chan caddy.Event
}

var present struct {
	sync.Mutex
	*observer
}

// observed lets what is observed come to this test.
func observed(t *testing.T) *observer {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	o := &observer{
		t: t, spans: spans, trace: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)),
		events: make(chan caddy.Event, 1000),
	}
	set := func(o *observer) {
		present.Lock()
		defer present.Unlock()
		present.observer = o
	}
	set(o)
	t.Cleanup(func() { set(nil) })
	return o
}

func currentObserver() *observer {
	present.Lock()
	defer present.Unlock()
	return present.observer
}

var placeholders = []string{
	"status", "guard", "action", "outcome", "cause", "problem", "age", "key", "caller", "execution_id", "workflow", "recognized",
}

// observe is a handler outside the guard: it makes a span that records, as `tracing`
// does, and notes the placeholders once the request is answered, as access logs do.
type observe struct{}

func (observe) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.e2e_observe", New: func() caddy.Module { return new(observe) }}
}

func (observe) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	o := currentObserver()
	if o == nil {
		return next.ServeHTTP(w, r)
	}
	ctx, span := o.trace.Tracer("e2e").Start(r.Context(), "call")
	defer span.End()
	defer func() {
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		values := map[string]string{}
		for _, name := range placeholders {
			if value := repl.ReplaceAll("{http.agent_guard."+name+"}", ""); value != "" {
				values[name] = value
			}
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		o.seen = append(o.seen, values)
	}()
	return next.ServeHTTP(w, r.WithContext(ctx))
}

// last are the placeholders of the n-th request, from 0; it waits for its end.
func (o *observer) request(n int) map[string]string {
	o.t.Helper()
	eventually(o.t, "the request is over", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.seen) > n
	})
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seen[n]
}

// attributes are those of the span of the n-th request.
func (o *observer) attributes(n int) map[string]string {
	o.t.Helper()
	eventually(o.t, "the span is over", func() bool { return len(o.spans.Ended()) > n })
	all := map[string]string{}
	for _, a := range o.spans.Ended()[n].Attributes() {
		all[string(a.Key)] = a.Value.AsString()
	}
	return all
}

// event waits for the next one.
func (o *observer) event() caddy.Event {
	o.t.Helper()
	return wait(o.t, o.events, "an event")
}

// listener is an event handler that passes events on to the test.
type listener struct{}

func (listener) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.e2e", New: func() caddy.Module { return new(listener) }}
}

func (listener) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	return nil
}

func (listener) Handle(_ context.Context, e caddy.Event) error {
	if o := currentObserver(); o != nil {
		o.events <- e
	}
	return nil
}
