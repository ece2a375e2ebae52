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

// sendOwn sends a request of the gateway's own through handlers that lead to the upstream of a call: a probe of a
// call in doubt, a read of a target's state, or an undo. Requests that do not go through an upstream's handlers are
// sent elsewhere, by other rules: undos to whole URLs (undoSender.send), escalations (guard/hitl) and the keys of
// issuers (ect). Guards and endpoints on the way let it pass. ctx bounds its time. Go and Caddy do not repeat it or
// follow redirects; sendOwn itself repeats it only if the connection was dead before a byte was written. The answer is never nil; an error says that it is incomplete or missing.
func sendOwn(
	ctx context.Context, o *guard.InternalRequest, next guard.Next, server *caddyhttp.Server,
) (*internalAnswer, error) {
	ctx = guard.AsOwn(untraced{ctx})
	for again := false; ; again = true {
		a, retry, err := forwardOwn(ctx, o, next, server)
		if err == nil || again || !retry {
			return a, err
		}
	}
}

// forwardOwn sends the request once. retry says that doing so again is safe and likely to succeed.
func forwardOwn(
	ctx context.Context, o *guard.InternalRequest, next guard.Next, server *caddyhttp.Server,
) (a *internalAnswer, retry bool, err error) {
	a = newInternalAnswer(o.MaxAnswer)
	// New for each attempt, since handlers change the request.
	r := (&http.Request{
		Method: o.Method, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		URL:  &url.URL{RawPath: o.Path, RawQuery: o.Query, ForceQuery: o.ForceQuery},
		Host: o.Host, RemoteAddr: o.Remote, Header: o.Header.Clone(),
		Body: http.NoBody, ContentLength: int64(len(o.Body)),
	}).WithContext(ctx)
	if r.URL.Path, err = url.PathUnescape(o.Path); err != nil {
		return a, false, err
	}
	r.RequestURI = r.URL.RequestURI()
	r.Header.Set("Accept-Encoding", "identity") // bodies are compared and parsed
	if len(o.Body) > 0 {
		r.Body = io.NopCloser(bytes.NewReader(o.Body))
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
	silent := a.Status == 0 || a.ended && a.Status == 499
	proof := watch.Proof(err, proxy.Retries(armed))
	upstream, answered := replacer(r).Get(upstreamStatus)
	a.Unframed, a.Replaced = watch.Unframed(), answered && upstream != a.Status
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
	guard.InternalAnswer
	most int64 // how many bytes of the body are kept
	// ended: the time was over, or the request was cut off before a second sending.
	ended bool
	// notSent: there is no answer, and provably no byte was sent.
	notSent bool
}

func newInternalAnswer(most int64) *internalAnswer {
	return &internalAnswer{InternalAnswer: guard.InternalAnswer{Header: http.Header{}}, most: most}
}

func (a *internalAnswer) Header() http.Header { return a.InternalAnswer.Header }

// WriteHeader ignores interim (1xx) answers.
func (a *internalAnswer) WriteHeader(status int) {
	if a.Status == 0 && status >= 200 {
		a.Status = status
	}
}

// Write accepts more than it keeps, so that a long answer is known to be complete.
func (a *internalAnswer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	kept := p[:min(int64(len(p)), a.most-int64(len(a.Body)))]
	a.Body = append(a.Body, kept...)
	a.Cut = a.Cut || len(kept) < len(p)
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
	a, err := sendOwn(ctx, o, h.upstream, server)
	switch {
	case err != nil:
		return nil, err
	case ctx.Err() != nil || a.ended:
		return nil, errNoAnswer
	case a.Cut:
		return nil, fmt.Errorf("the answer is larger than %d bytes", o.MaxAnswer)
	}
	return &a.InternalAnswer, nil
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
