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

// internalRequest is a request of the gateway's own to the upstream of a call: it asks what a
// call in doubt has done, reads what stands at a target, or undoes a call. All of them are sent
// here. What does not go through an upstream's handlers has other rules: undos to whole URLs
// (undoSender.send), escalations (guard/hitl) and the keys of issuers (ect).
type internalRequest struct {
	method string
	// path is escaped, query without the question mark.
	path, query string
	host        string
	remote      string // the address of the client that it is made for
	header      http.Header
	body        []byte
	// most is how much of the answer's body is kept, in bytes.
	most int64
	// forceQuery: there is a question mark also without a query.
	forceQuery bool
	// https: the upstream is told that it came over TLS.
	https bool
}

// send sends the request through handlers that lead to the upstream. Guards and endpoints on the
// way let it by, and ctx bounds its time. Go and Caddy send nothing twice by themselves and follow
// no redirects; it is sent again only if a connection was dead before a byte was written. The
// answer is never nil. An error says that there is no whole one.
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
	// Made anew, since handlers on the way change it.
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
	r.Header.Set("Accept-Encoding", "identity") // bodies are compared, and read
	if len(o.body) > 0 {
		r.Body = io.NopCloser(bytes.NewReader(o.body))
	}
	if o.https {
		r.TLS = new(tls.ConnectionState)
	}
	// With a replacer of its own: that of the call has the placeholders of the call.
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), a, server)
	armed, watch := proxy.Arm(r.Context())
	defer watch.Release()
	r = r.WithContext(armed)
	panicked, err := handOn(next, a, r)
	a.ended = armed.Err() != nil
	// Of a request that is cut off before its answer reverse_proxy makes a 499 without an error.
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

// internalAnswer is a response writer that keeps the answer to an internal request.
type internalAnswer struct {
	status int
	header http.Header
	body   []byte
	most   int64
	cut    bool // the body is longer than what is kept
	// unframed: the body's end cannot be distinguished from a broken connection.
	unframed bool
	// replaced: another handler has replaced the upstream's answer.
	replaced bool
	// ended: the request's time was over, or a second sending was cut off.
	ended bool
	// notSent: there is no answer, and it is proven that not a byte was sent.
	notSent bool
}

func (a *internalAnswer) Header() http.Header { return a.header }

// WriteHeader passes over interim answers.
func (a *internalAnswer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

// Write goes on to take what is not kept: a long answer is still known to be whole.
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

// send asks the upstream of the guard, whose server that of ctx is: without site authentication
// and this guard. The answer is all of it.
func (h *Handler) send(ctx context.Context, o *guard.InternalRequest) (*guard.InternalAnswer, error) {
	server, _ := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	r := internalRequest{
		method: o.Method, path: o.Path, query: o.Query, host: o.Host, remote: o.Remote, header: o.Header, most: o.MaxAnswer,
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

// untraced is a context without the trace of another request: a guard around this one would take the
// request for a second attempt at its call, and stop that.
type untraced struct{ context.Context }

// Value implements context.Context.
func (c untraced) Value(key any) any {
	value := c.Context.Value(key)
	if _, trace := value.(*httptrace.ClientTrace); trace {
		return nil
	}
	return value
}
