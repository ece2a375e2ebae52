// Package proxy is the transport agent_guard of Caddy's reverse_proxy: Caddy's HTTP
// transport, which also proves what was sent of a guarded request (section "Sent or not"),
// and which asks the circuit breaker of the upstream first (section "Breakers").
//
// Two things repeat a request on their own: Go's HTTP transports, after a reused connection
// broke, and reverse_proxy with lb_retry_match. [Arm] puts a fuse into the request's
// context that stops both (P1). [Watch.Proof] returns what was sent when the forward ended,
// on positive evidence only: an event that was not seen proves nothing.
//
// The breakers belong to the process, one for each upstream address, whichever transports
// and configurations use it. A breaker has the settings of its latest call. Its state lives
// as long as any transport or member uses it, so that a reload changes neither state nor
// counts. An upstream that no configuration has any more is forgotten.
package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"golang.org/x/net/http2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func init() {
	caddy.RegisterModule(Transport{})
}

// defaultKeepaliveGuarded is the default of Transport.KeepaliveGuarded. It is below the idle
// timeout of common servers (Node.js closes after 5 s).
const defaultKeepaliveGuarded = caddy.Duration(2 * time.Second)

// defaultIdleGuarded is how many idle connections to one upstream are kept for guarded requests
// where the configuration does not say. Those that share a sync of the log leave in one burst, and
// idle connections beyond the limit would be closed and dialled anew with each. They live for
// KeepaliveGuarded only.
const defaultIdleGuarded = 256

// Transport is Caddy's `http` transport for upstreams of guarded requests. It takes all options of
// that transport, and treats requests that are not guarded exactly like it.
//
// Guarded requests have their own connections, which count the bytes of each request. If a request
// fails before its first byte was written, nothing was sent, and the guard releases the key. Over
// HTTP/2 the bytes of one request cannot be distinguished from those of others; there the proof is
// that the request was never encoded. Over HTTP/3 there is no proof.
//
// Every request, guarded or not, passes the circuit breaker of its upstream.
//
// Because guarded requests have their own connections, max_conns_per_host and keepalive_idle_conns
// apply to each kind of request separately. The default of keepalive_idle_conns_per_host is 256 for
// guarded requests, since those that were recorded together are sent in one burst.
type Transport struct {
	*reverseproxy.HTTPTransport

	// How long a connection may have been idle and still be used for a guarded request. An upstream
	// that closes an idle connection just as a request is written to it leaves the request in
	// doubt, so choose less than the upstream's own idle timeout. It never lengthens
	// keep_alive.idle_timeout. A negative value disables the reuse of connections for guarded
	// requests. Default: `2s`.
	KeepaliveGuarded caddy.Duration `json:"keepalive_guarded,omitempty"`

	// The circuit breakers of the upstreams, one per address. A refused call fails like a refused
	// connection, so that `lb_retries` or `lb_try_duration` pass it to the next upstream, whatever
	// its method. Default: on, with the defaults of its options.
	Breaker *Settings `json:"breaker,omitempty"`

	circuits *Circuits       // nil if breakers are off
	states   *recordedStates // states from the last process; nil if breakers are off
	inBand   bodyKinds
	verify   AnswerVerifier // verifies probes' answers; nil without trust

	connections *atomic.Int64 // open ones of guarded requests

	guarded *http.Transport
	idle    int // most idle connections of guarded requests to one upstream
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

// UnmarshalJSON implements json.Unmarshaler. Errors have the path of the member.
func (t *Transport) UnmarshalJSON(text []byte) error {
	type plain Transport
	return option.DecodeJSON(text, (*plain)(t))
}

// Provision sets up the embedded transport, its counting twin and the breakers.
func (t *Transport) Provision(ctx caddy.Context) error {
	t.idle = defaultIdleGuarded
	if t.KeepAlive != nil && t.KeepAlive.MaxIdleConnsPerHost != 0 {
		t.idle = t.KeepAlive.MaxIdleConnsPerHost
	}
	if err := t.HTTPTransport.Provision(ctx); err != nil {
		return err
	}
	if t.KeepaliveGuarded == 0 {
		t.KeepaliveGuarded = defaultKeepaliveGuarded
	}
	t.http3 = slices.Contains(t.Versions, "3")
	t.h2c = slices.Contains(t.Versions, "h2c")
	t.connections = new(atomic.Int64)
	guarded, err := t.twin()
	if err != nil {
		return err
	}
	t.guarded = guarded
	return t.openCircuits(ctx)
}

// Cleanup closes the idle connections of both transports, and releases the breakers.
func (t *Transport) Cleanup() error {
	if t.circuits != nil {
		_ = t.circuits.Close() // it cannot fail; running calls still settle
	}
	if t.guarded != nil {
		t.guarded.CloseIdleConnections()
	}
	return t.HTTPTransport.Cleanup()
}

// RoundTrip implements http.RoundTripper. It asks the upstream's breaker first. It reports
// to the watch of a guarded request what it sends, and refuses to send it a second time.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	watch := FromContext(req.Context())
	var attempt *Attempt
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
	defer c.settleUnanswered()
	res, err := t.forward(c.request(req), attempt)
	return c.answered(res, err)
}

// closeBody closes the body, as http.RoundTripper requires, if the request is not sent.
func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close() // the request has already failed
	}
}

// forward sends a request; attempt is nil if it is not guarded.
func (t *Transport) forward(req *http.Request, attempt *Attempt) (*http.Response, error) {
	if attempt == nil {
		return t.HTTPTransport.RoundTrip(req)
	}
	res, err := t.send(req, attempt)
	if err == nil && unframed(req, res) {
		attempt.noteUnframed()
	}
	attempt.Done(err)
	return res, err
}

// send passes req to the transport that counts, if counting is possible. An upgrade takes
// the connection away from HTTP, and HTTP/3 connections cannot be wrapped.
func (t *Transport) send(req *http.Request, attempt *Attempt) (*http.Response, error) {
	if t.http3 || req.Header.Get("Upgrade") != "" {
		attempt.noteUncounted()
		return t.HTTPTransport.RoundTrip(req)
	}
	t.SetScheme(req)
	http1 := !t.h2c && req.URL.Scheme == "http"
	attempt.ctx.begin(req.Context(), http1)
	own := req.WithContext(&attempt.ctx)
	if http1 {
		attempt.body.begin(own)
	}
	res, err := t.guarded.RoundTrip(own)
	attempt.body.close()
	return res, err
}

// unframed reports whether the body of res ends with its connection. gzip frames a body
// that Go has decompressed.
func unframed(req *http.Request, res *http.Response) bool {
	return res.ProtoMajor == 1 && req.Method != http.MethodHead &&
		res.ContentLength < 0 && len(res.TransferEncoding) == 0 && !res.Uncompressed
}

// Interface guards: reverse_proxy checks its transport for each of these.
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

// openCircuits opens the breakers of the upstreams. The known ones are the static upstreams
// of the reverse_proxy that loads this transport.
func (t *Transport) openCircuits(ctx caddy.Context) error {
	settings := Settings{}
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
			return fmt.Errorf("breaker: %w", settings.place(err))
		}
	}
	t.states = &recordedStates{app: func() (any, error) { return ctx.AppIfConfigured("agent_guard") }}
	opened, err := Open(settings, upstreams, more)
	if err != nil {
		return fmt.Errorf("breaker: %w", settings.place(err))
	}
	t.circuits = opened
	t.inBand.json, t.inBand.events = opened.inspectedBodies()
	return nil
}

// place adds the place of the settings to an error, if known.
func (s *Settings) place(err error) error {
	if err == nil || s.WrittenAt == "" {
		return err
	}
	return fmt.Errorf("%w, at %s", err, s.WrittenAt)
}

// guardApp is what the transport needs of the app agent_guard, whose package imports this
// one.
type guardApp interface {
	// AwaitCircuits returns once the breakers have the state that the last process left.
	AwaitCircuits(ctx context.Context) error
	// AnswerVerifier verifies answers to probes; nil without trust. The transport itself
	// needs it, because calls without a guard can be probes too.
	AnswerVerifier() AnswerVerifier
}

// recordedStates waits once until the stored states of the breakers are loaded.
type recordedStates struct {
	read atomic.Bool
	// app returns the app that loads them, if there is one. It is unknown until all modules
	// are provisioned: a guard behind this transport may be the first to need the app.
	app func() (any, error)
}

func (s *recordedStates) await(ctx context.Context) error {
	if s.read.Load() {
		return nil
	}
	app, err := s.app()
	switch keeps, is := app.(guardApp); {
	case errors.Is(err, caddy.ErrNotConfigured): // no guard and so no store
	case err != nil:
		return err
	case is && !guard.IsWithoutState(ctx):
		err := keeps.AwaitCircuits(ctx)
		if errors.Is(err, store.ErrUnavailable) { // guarded calls do not come so far
			return nil // the next request tries again
		}
		if err != nil {
			return err
		}
	case is:
		return nil // the next request tries again
	}
	s.read.Store(true)
	return nil
}

// Refusal returns the error with which a call of this method and view would currently be
// refused by every upstream; nil if it would not, or if that is unknown.
func (t *Transport) Refusal(method string, view *breaker.View) *breaker.OpenError {
	if t.circuits == nil {
		return nil
	}
	return t.circuits.Refusal(method, view)
}

// BreakerRules returns the rules of the breakers; nil if they are off.
func (t *Transport) BreakerRules() *breaker.Rules {
	if t.circuits == nil {
		return nil
	}
	return t.circuits.checked.rules
}

// Downstream returns the configured identity of an upstream, or its address.
func (t *Transport) Downstream(upstream string) string {
	if t.circuits == nil {
		return ""
	}
	return t.circuits.pool.identity(upstream)
}

// LeadsTo reports whether an upstream is a static one of this transport.
func (t *Transport) LeadsTo(upstream string) bool {
	return t.circuits != nil && t.circuits.known(upstream)
}

// Upstreams are the addresses of the static upstreams, if all are static and known; how many connections for
// guarded requests are open to them, and how many may be: 0 is any number.
func (t *Transport) Upstreams() (addresses []string, open, limit int64) {
	if t.circuits == nil {
		return nil, 0, 0
	}
	if !t.circuits.open {
		addresses = t.circuits.upstreams
	}
	limit = int64(t.MaxConnsPerHost) * int64(max(len(addresses), 1))
	return addresses, t.connections.Load(), limit
}

// refusedError is a breaker's refusal. reverse_proxy and Proof treat it like a failed
// connection.
type refusedError struct {
	dial reverseproxy.DialError
	open *breaker.OpenError
	t    *Transport
}

func (e *refusedError) Error() string   { return e.open.Error() }
func (e *refusedError) Unwrap() []error { return []error{e.dial, e.open} }

// Downstream returns the configured identity of the upstream that was not called, or its
// address.
func (e *refusedError) Downstream() string { return e.t.Downstream(e.open.Key.Upstream) }

// admit asks the breaker of the request's upstream. The call is nil without a breaker.
func (t *Transport) admit(req *http.Request, watch *Watch) (*call, error) {
	ctx := req.Context()
	if t.circuits == nil || ctx.Value(caddyhttp.ServerCtxKey) == nil {
		return nil, nil // reverse_proxy handles the results of its health checks itself
	}
	if guard.IsUndo(ctx) {
		return nil, nil // undos must not wait until a failing upstream recovers (ADR 0033)
	}
	if err := t.states.await(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, &guard.UnreadError{As: reverseproxy.NewDialError(err), Err: err}
	}
	upstream := req.URL.Host
	if dial, ok := reverseproxy.GetDialInfo(ctx); ok {
		upstream = addressOf(dial.Network, dial.Address)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err() // the context ended before sending
	}
	c := &call{t: t, ctx: ctx, watch: watch, began: time.Now(), upstream: upstream}
	op := breaker.Op{Safe: guard.SafeMethod(req.Method), ClientPaced: uploads(req, watch)}
	op.View, _ = caddyhttp.GetVar(ctx, guard.ViewVar).(*breaker.View) // what the caller's tokens ask of breakers
	if patience, ok := guard.PatienceOf(ctx); ok {
		op.Patience, c.callerDeadline = patience, true
	} else if deadline, ok := ctx.Deadline(); ok {
		op.Patience = max(deadline.Sub(c.began), 1)
	}
	var err error
	b := t.circuits.Breaker(upstream)
	if c.permit, err = b.Acquire(op); err != nil {
		return nil, &refusedError{dial: reverseproxy.NewDialError(err), open: err.(*breaker.OpenError), t: t}
	}
	if p := t.circuits.pool; c.permit.Probe() && p.sharesProbes(b.Key()) {
		if m := p.listener(); m != nil {
			// The time for sending is not in the lease of the breaker.
			lease := time.Duration(t.circuits.checked.rules.Settings().ProbeLease)
			release, until, ok := m.hook.Probe(ctx, b.Key(), 2*lease)
			if !ok {
				if open := c.permit.Yield(until); open != nil {
					return nil, &refusedError{dial: reverseproxy.NewDialError(open), open: open, t: t}
				}
			}
			c.release = release
		}
	}
	if c.permit.Probe() && t.circuits.set.VerifyProbe {
		c.identity = t.circuits.checked.downstream[upstream]
	}
	return c, nil
}

// twin makes the transport of guarded requests: configured like the embedded one, but with
// counted connections that are idle only briefly.
//
// It is made from the provisioned transport instead of the configuration, because Caddy
// loads guest modules only once.
func (t *Transport) twin() (*http.Transport, error) {
	rt := t.Transport.Clone()
	rt.MaxIdleConnsPerHost = t.idle
	// If one kept connection was closed, those of the same age will be too.
	stale := func() { t.guarded.CloseIdleConnections() }
	dial := countWrites(t.Transport.DialContext, stale, slices.Contains(t.Versions, "h2c"), t.connections)
	rt.DialContext = dial
	if t.Transport.DialTLSContext != nil {
		// Caddy's function dials the TCP connection itself, below TLS, where it cannot be
		// wrapped.
		rt.DialTLSContext = t.dialTLS(dial)
	}

	keepalive := time.Duration(t.KeepaliveGuarded)
	switch {
	case keepalive < 0:
		rt.DisableKeepAlives = true
	case rt.IdleConnTimeout <= 0 || keepalive < rt.IdleConnTimeout:
		rt.IdleConnTimeout = keepalive
	}

	// Clone copies the original's HTTP/2 hooks, which would put guarded requests on
	// connections of the original's pool. Replace them.
	if slices.Contains(t.Versions, "2") || slices.Contains(t.Versions, "h2c") {
		//lint:ignore SA1019 the twin must speak HTTP/2 exactly as Caddy's transport does
		if err := http2.ConfigureTransport(rt); err != nil {
			return nil, fmt.Errorf("configuring HTTP/2 for guarded requests: %w", err)
		}
	}
	return rt, nil
}

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// countWrites wraps the connections of dial. A transport uses cleartext HTTP/2 always or
// never, so h2c is known here.
func countWrites(dial dialFunc, stale func(), h2c bool, open *atomic.Int64) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		counts := &conn{Conn: c, h2c: h2c, stale: stale, open: open}
		open.Add(1)
		counts.peek.begin(c)
		return counts, nil
	}
}

// dialTLS does what Caddy's DialTLSContext does over dial: server names with placeholders,
// and the PROXY protocol, whose addresses Go cannot split.
func (t *Transport) dialTLS(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		config := t.guarded.TLSClientConfig.Clone()
		if strings.Contains(config.ServerName, "{") {
			repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
			if !ok {
				_ = c.Close() // the error below is returned
				return nil, errNoReplacer
			}
			config.ServerName = repl.ReplaceAll(config.ServerName, "")
		}
		if limit := t.guarded.TLSHandshakeTimeout; limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeoutCause(ctx, limit, fmt.Errorf("TLS handshake timeout after %s", limit))
			defer cancel()
		}
		tc := tls.Client(c, config)
		if err := tc.HandshakeContext(ctx); err != nil {
			_ = tc.Close() // the handshake's error is returned
			return nil, err
		}
		return tc, nil
	}
}

var errNoReplacer = errors.New("a server name with placeholders needs a request of Caddy's")

// maxAtOnce is the largest body that is written together with its header, in bytes.
const maxAtOnce = 8 << 10

// lateBody is a small body that is read into memory only when its request has a connection:
// without one, the request is sent elsewhere with the body unread.
//
// Go writes a header separately if the body is not of a type that it knows to be in memory:
// a second system call here, and a second wake-up of the upstream. The body of a guarded
// call was read before the call was claimed.
type lateBody struct {
	from   io.ReadCloser // nil for a body of another kind
	length int64
	buf    bytes.Buffer
	read   bool
}

// begin gives req, which is the transport's own copy, such a body if possible: only on HTTP/1,
// which reports each connection.
func (b *lateBody) begin(req *http.Request) {
	if req.Body == nil || len(req.Trailer) > 0 || req.ContentLength <= 0 || req.ContentLength > maxAtOnce {
		return
	}
	b.from, b.length = req.Body, req.ContentLength
	req.Body = io.NopCloser(&b.buf)
}

// fill reads one byte more than announced, to reach the end. Bodies of another length and
// read errors are left to Go's transport.
func (b *lateBody) fill() {
	if b == nil || b.from == nil || b.read {
		return
	}
	b.read = true
	memory := make([]byte, b.length+1)
	n, _ := io.ReadFull(b.from, memory)
	b.buf = *bytes.NewBuffer(memory[:n])
	_ = b.from.Close()
}

// close closes a body that was not read, as http.RoundTripper requires.
func (b *lateBody) close() {
	if b.from != nil && !b.read {
		_ = b.from.Close()
	}
}

// UnmarshalCaddyfile sets up the transport from Caddyfile tokens. Syntax:
//
//	transport agent_guard {
//		breaker           off | { ... }
//		keepalive_guarded off|<duration>
//		# and all options of transport http
//	}
func (t *Transport) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume transport name
	if d.CountRemainingArgs() > 0 {
		return d.ArgErr()
	}
	at := map[string]caddyfile.Segment{}
	return Options().ReadBeside(d, "transport agent_guard", t, at, t.HTTPTransport.UnmarshalCaddyfile)
}

// Options are the options of the transport that Caddy's own does not have.
func Options() option.Set[*Transport] {
	return option.Set[*Transport]{
		"breaker": {Several: true, NamesItself: true, Usage: "off | { ... }", Parse: parseBreaker},
		"keepalive_guarded": option.Value("off | <duration>", func(t *Transport) *caddy.Duration { return &t.KeepaliveGuarded },
			option.OrOff(option.ParseDuration[caddy.Duration])),
	}
}

var _ caddyfile.Unmarshaler = (*Transport)(nil)
