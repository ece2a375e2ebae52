// Package transport is the transport agent_guard of Caddy's reverse_proxy: its
// HTTP transport, which in addition proves what of a guarded request was sent
// (section "Sent or not"), and passes each request by the circuit breaker of its
// upstream (section "Breakers").
package transport

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

func init() {
	caddy.RegisterModule(Transport{})
}

// DefaultKeepaliveGuarded is the default of Transport.KeepaliveGuarded. It is
// below the idle timeout of common servers (Node.js closes after 5 s).
const DefaultKeepaliveGuarded = caddy.Duration(2 * time.Second)

// Transport is Caddy's `http` transport for upstreams of guarded requests. It
// takes all options of that transport and treats requests that are not guarded
// exactly as it does.
//
// A guarded request goes over connections of its own, which count the bytes of
// each request. If a request fails before its first byte was written, that is
// proven, and the guard releases the key. Over HTTP/2 the bytes of one request
// cannot be told from those of others; what is proven there is that the request
// was never encoded. Over HTTP/3 nothing is proven.
//
// Every request, guarded or not, passes the circuit breaker of its upstream.
//
// As guarded requests have connections of their own, max_conns_per_host and
// keepalive_idle_conns hold for each kind of request, not for both together.
type Transport struct {
	*reverseproxy.HTTPTransport

	// How long a connection may have been idle to be used for a guarded request.
	// An upstream that closes an idle connection just as a request is written to
	// it leaves the request in doubt, so this should be less than the upstream's
	// own idle timeout. It never lengthens keep_alive.idle_timeout. A negative
	// value disables the reuse of connections for guarded requests. Default: `2s`.
	KeepaliveGuarded caddy.Duration `json:"keepalive_guarded,omitempty"`

	// The circuit breakers of the upstreams, one for each address. A call that one
	// refuses fails like one whose connection is refused, so that `lb_retries` or
	// `lb_try_duration` take it to the next upstream, whatever its method. Default: on,
	// with the defaults of its options.
	Breaker *circuits.Settings `json:"breaker,omitempty"`

	circuits *circuits.Circuits // nil if they are off
	inBand   lookInto
	verify   AnswerVerifier // of probes' answers; nil where no tokens are trusted

	guarded *http.Transport
	http3   bool
	h2c     bool
}

// CaddyModule returns the Caddy module information.
func (Transport) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID: "http.reverse_proxy.transport.agent_guard",
		New: func() caddy.Module {
			return &Transport{HTTPTransport: new(reverseproxy.HTTPTransport)}
		},
	}
}

// Provision sets up the embedded transport and its counting twin.
func (t *Transport) Provision(ctx caddy.Context) error {
	if err := t.HTTPTransport.Provision(ctx); err != nil {
		return err
	}
	if t.KeepaliveGuarded == 0 {
		t.KeepaliveGuarded = DefaultKeepaliveGuarded
	}
	t.http3 = slices.Contains(t.Versions, "3")
	t.h2c = slices.Contains(t.Versions, "h2c")
	guarded, err := t.twin()
	if err != nil {
		return err
	}
	t.guarded = guarded
	return t.openCircuits(ctx)
}

// Cleanup closes the idle connections of both transports, and lets the breakers go.
func (t *Transport) Cleanup() error {
	if t.circuits != nil {
		_ = t.circuits.Close() // it has nothing to tell; calls on their way still settle
	}
	if t.guarded != nil {
		t.guarded.CloseIdleConnections()
	}
	return t.HTTPTransport.Cleanup()
}

// RoundTrip implements http.RoundTripper. It asks the upstream's breaker first. For a
// guarded request it reports to the request's watch what it sends, and refuses to send
// it a second time.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	watch := sent.FromContext(req.Context())
	var attempt *sent.Attempt
	if watch != nil {
		if attempt = watch.Attempt(); attempt == nil {
			closeBody(req)
			return nil, context.Canceled
		}
	}
	c, err := t.admit(req, watch)
	if err != nil {
		closeBody(req)
		if attempt != nil {
			attempt.Done(err)
		}
		return nil, err
	}
	if c == nil {
		return t.forward(req, attempt)
	}
	defer c.leave()
	res, err := t.forward(c.request(req), attempt)
	return c.answered(res, err)
}

// closeBody is the contract of RoundTripper for a request that is not sent.
func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close() // the request failed already
	}
}

// forward sends a request: one that is guarded with its attempt, others without.
func (t *Transport) forward(req *http.Request, attempt *sent.Attempt) (*http.Response, error) {
	if attempt == nil {
		return t.HTTPTransport.RoundTrip(req)
	}
	res, err := t.send(req, attempt)
	if err == nil && unframed(req, res) {
		attempt.Unframed()
	}
	attempt.Done(err)
	return res, err
}

// send passes req to the transport that can count it, if one can. A request that
// changes the protocol takes the connection away from HTTP, and HTTP/3 has no
// connection that could be wrapped.
func (t *Transport) send(req *http.Request, attempt *sent.Attempt) (*http.Response, error) {
	if t.http3 || req.Header.Get("Upgrade") != "" {
		attempt.Unknown()
		return t.HTTPTransport.RoundTrip(req)
	}
	t.SetScheme(req)
	own := req.WithContext(withOwnVars(req.Context()))
	late := t.lateBodyOf(own, attempt)
	res, err := t.guarded.RoundTrip(own)
	late.close()
	return res, err
}

// withOwnVars gives a request a copy of Caddy's variables. A dial reads them in a
// goroutine that may outlive the attempt, when others write them again.
func withOwnVars(ctx context.Context) context.Context {
	vars, ok := ctx.Value(caddyhttp.VarsCtxKey).(map[string]any)
	if !ok {
		return ctx
	}
	return context.WithValue(ctx, caddyhttp.VarsCtxKey, maps.Clone(vars))
}

// unframed reports whether the body of res ends only with its connection. A body
// that Go unpacked is framed by gzip itself.
func unframed(req *http.Request, res *http.Response) bool {
	return res.ProtoMajor == 1 && req.Method != http.MethodHead &&
		res.ContentLength < 0 && len(res.TransferEncoding) == 0 && !res.Uncompressed
}

// Interface guards. reverse_proxy asks its transport for each of these.
var (
	_ caddy.Provisioner  = (*Transport)(nil)
	_ caddy.CleanerUpper = (*Transport)(nil)
	_ http.RoundTripper  = (*Transport)(nil)

	_ reverseproxy.TLSTransport                        = (*Transport)(nil)
	_ reverseproxy.H2CTransport                        = (*Transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*Transport)(nil)
	_ reverseproxy.ProxyProtocolTransport              = (*Transport)(nil)
	_ reverseproxy.RequestHeaderOpsTransport           = (*Transport)(nil)
)
