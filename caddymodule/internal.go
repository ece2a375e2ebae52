package caddymodule

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// internalRequest is a request of the gateway's own to the upstream of a call: a probe of a
// call in doubt, a read of a target's state, or an undo. Requests that do not go through an
// upstream's handlers are sent elsewhere, by other rules: undos to whole URLs
// (undoSender.send), escalations (guard/hitl) and the keys of issuers (ect).
type internalRequest struct {
	method string
	// path is percent-encoded; query has no question mark.
	path, query string
	host        string
	remote      string // the client address to present
	header      http.Header
	body        []byte
	// most is how many bytes of the answer's body are kept.
	most int64
	// forceQuery sends a question mark even if the query is empty.
	forceQuery bool
}

// send sends the request through handlers that lead to the upstream. Guards and endpoints
// on the way let it pass. ctx bounds its time. Go and Caddy do not repeat it or follow
// redirects; send itself repeats it only if the connection was dead before a byte was
// written. The answer is never nil; an error says that it is incomplete or missing.
func (o *internalRequest) send(ctx context.Context, next guard.Next, server *caddyhttp.Server) (*internalAnswer, error) {
	ctx = guard.AsOwn(untraced{ctx})
	for again := false; ; again = true {
		a, retry, err := o.forward(ctx, next, server)
		if err == nil || again || !retry {
			return a, err
		}
	}
}

// forward sends the request once. retry says that doing so again is safe and likely to succeed.
func (o *internalRequest) forward(ctx context.Context, next guard.Next, server *caddyhttp.Server) (a *internalAnswer, retry bool, err error) {
	a = &internalAnswer{header: http.Header{}, most: o.most}
	// New for each attempt, since handlers change the request.
	r := (&http.Request{
		Method: o.method, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		URL:  &url.URL{RawPath: o.path, RawQuery: o.query, ForceQuery: o.forceQuery},
		Host: o.host, RemoteAddr: o.remote, Header: o.header.Clone(),
		Body: http.NoBody, ContentLength: int64(len(o.body)),
	}).WithContext(ctx)
	if r.URL.Path, err = url.PathUnescape(o.path); err != nil {
		return a, false, err
	}
	r.RequestURI = r.URL.RequestURI()
	r.Header.Set("Accept-Encoding", "identity") // bodies are compared and parsed
	if len(o.body) > 0 {
		r.Body = io.NopCloser(bytes.NewReader(o.body))
	}
	// The upstream gets the X-Forwarded-Proto of calls to this site. One that requires https
	// would otherwise answer with a redirect.
	if server != nil && len(server.TLSConnPolicies) > 0 {
		r.TLS = new(tls.ConnectionState)
	}
	// With its own replacer: that of the call has the call's placeholders.
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), a, server)
	armed, watch := proxy.Arm(r.Context())
	defer watch.Release()
	r = r.WithContext(armed)
	panicked, err := handOn(next, a, r)
	a.ended = armed.Err() != nil
	// reverse_proxy turns a request that was cut off before the answer into a 499 without
	// an error.
	silent := a.status == 0 || a.ended && a.status == 499
	proof := watch.Proof(err, proxy.Retries(armed))
	upstream, answered := replacer(r).Get(upstreamStatus)
	a.unframed, a.replaced = watch.Unframed(), answered && upstream != a.status
	switch {
	case panicked != nil:
		return a, false, fmt.Errorf("%w: %v", errCutShort, panicked)
	case err == nil && !silent:
		return a, false, nil
	case err == nil:
		if err = context.Cause(ctx); err == nil {
			err = errNoAnswer
		}
	}
	a.notSent = silent && proof.NotSent()
	return a, a.notSent && proof.Again, err
}

// internalAnswer is the response writer of an internal request; it keeps the answer.
type internalAnswer struct {
	status int
	header http.Header
	body   []byte
	most   int64
	cut    bool // the body is longer than most
	// unframed: the body ends with the connection, so a broken connection cannot be
	// recognised.
	unframed bool
	// replaced: another handler has replaced the upstream's answer.
	replaced bool
	// ended: the time was over, or the request was cut off before a second sending.
	ended bool
	// notSent: there is no answer, and provably no byte was sent.
	notSent bool
}

func (a *internalAnswer) Header() http.Header { return a.header }

// WriteHeader ignores interim (1xx) answers.
func (a *internalAnswer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

// Write accepts more than it keeps, so that a long answer is known to be complete.
func (a *internalAnswer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	kept := p[:min(int64(len(p)), a.most-int64(len(a.body)))]
	a.body = append(a.body, kept...)
	a.cut = a.cut || len(kept) < len(p)
	return len(p), nil
}

var (
	errCutShort = errors.New("the answer was cut short")
	errNoAnswer = errors.New("no answer came")
)

// send sends an internal request to the guard's upstream, on the server of ctx, bypassing
// the site's authentication and this guard. The answer is complete.
func (h *Handler) send(ctx context.Context, o *guard.InternalRequest) (*guard.InternalAnswer, error) {
	server, _ := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	r := internalRequest{
		method: o.Method, path: o.Path, query: o.Query, host: o.Host, remote: o.Remote, header: o.Header, body: o.Body, most: o.MaxAnswer,
	}
	a, err := r.send(ctx, h.upstream, server)
	switch {
	case err != nil:
		return nil, err
	case ctx.Err() != nil || a.ended:
		return nil, errNoAnswer
	case a.cut:
		return nil, fmt.Errorf("the answer is larger than %d bytes", o.MaxAnswer)
	}
	return &guard.InternalAnswer{Status: a.status, Header: a.header, Body: a.body, Unframed: a.unframed, Replaced: a.replaced}, nil
}

// untraced hides the call of another request: an outer guard would take the internal
// request for a second attempt of that call and stop it.
type untraced struct{ context.Context }

// Value implements context.Context.
func (c untraced) Value(key any) any {
	value := c.Context.Value(key)
	if _, trace := value.(*httptrace.ClientTrace); trace {
		return nil
	}
	return value
}
