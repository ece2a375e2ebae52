package transport

import (
	"fmt"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// openCircuits opens the breakers of the upstreams. Those that are known are the static
// ones of the reverse_proxy that loads this transport.
func (t *Transport) openCircuits(ctx caddy.Context) error {
	settings := circuits.Settings{}
	if t.Breaker != nil {
		settings = *t.Breaker
	}
	if settings.Off {
		return nil
	}
	var upstreams []string
	more := true
	if modules := ctx.Modules(); len(modules) > 1 {
		if proxy, ok := modules[len(modules)-2].(*reverseproxy.Handler); ok {
			more = proxy.DynamicUpstreamsRaw != nil
			for _, upstream := range proxy.Upstreams {
				upstreams = append(upstreams, upstream.Dial)
			}
		}
	}
	if settings.VerifyProbe {
		if err := t.openIdentities(ctx); err != nil {
			return fmt.Errorf("breaker: %w", err)
		}
	}
	opened, err := circuits.Open(settings, upstreams, more)
	if err != nil {
		return fmt.Errorf("breaker: %w", err)
	}
	t.circuits = opened
	t.inBand.json, t.inBand.events = opened.LooksInto()
	return nil
}

// Refusal tells with what a call of this method and view would be refused at the moment
// whatever upstream it came to; nil if it would not, or if nobody knows.
func (t *Transport) Refusal(method string, view *breaker.View) *breaker.OpenError {
	if t.circuits == nil {
		return nil
	}
	return t.circuits.Refusal(method, view)
}

// BreakerPolicy is what callers may know of the breakers; nil without any that refuse.
func (t *Transport) BreakerPolicy() *circuits.Policy {
	if t.circuits == nil {
		return nil
	}
	return t.circuits.Policy()
}

// Downstream is the identity of an upstream, by its address, where one is configured.
func (t *Transport) Downstream(upstream string) string {
	if t.circuits == nil {
		return ""
	}
	return t.circuits.Identity(upstream)
}

// LeadsTo reports whether an upstream is one of the static ones.
func (t *Transport) LeadsTo(upstream string) bool {
	return t.circuits != nil && t.circuits.Known(upstream)
}

// refusedError is a breaker's refusal. reverse_proxy and the proof of sending read it as
// what it amounts to: no connection was made.
type refusedError struct {
	dial reverseproxy.DialError
	open *breaker.OpenError
	t    *Transport
}

func (e *refusedError) Error() string   { return e.open.Error() }
func (e *refusedError) Unwrap() []error { return []error{e.dial, e.open} }

// Downstream is the identity of the upstream that was not called, where one is configured.
func (e *refusedError) Downstream() string { return e.t.Downstream(e.open.Key.Upstream) }

// admit asks the breaker of the request's upstream. Without a breaker the call is nil.
func (t *Transport) admit(req *http.Request, watch *sent.Watch) (*call, error) {
	ctx := req.Context()
	if t.circuits == nil || ctx.Value(caddyhttp.ServerCtxKey) == nil {
		return nil, nil // a health check of reverse_proxy has a way of its own to tell
	}
	if circuits.IsUndo(ctx) {
		return nil, nil // what is broken must be undone while it is (ADR 0033)
	}
	upstream := req.URL.Host
	if dial, ok := reverseproxy.GetDialInfo(ctx); ok {
		upstream = circuits.AddressOf(dial.Network, dial.Address)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err() // over before it could be sent
	}
	c := &call{t: t, ctx: ctx, watch: watch, began: time.Now()}
	op := breaker.Op{Safe: circuits.Safe(req.Method), ClientPaced: uploads(req, watch), View: circuits.ViewOf(ctx)}
	if patience, ok := circuits.PatienceOf(ctx); ok {
		op.Patience, c.impatient = patience, true
	} else if deadline, ok := ctx.Deadline(); ok {
		op.Patience = max(deadline.Sub(c.began), 1)
	}
	var err error
	if c.permit, err = t.circuits.Breaker(upstream, req.Method).Acquire(op); err != nil {
		return nil, &refusedError{dial: reverseproxy.NewDialError(err), open: err.(*breaker.OpenError), t: t}
	}
	if c.permit.Probe() {
		c.identity = t.circuits.Verified(upstream)
	}
	return c, nil
}
