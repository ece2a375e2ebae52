package caddymodule

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"net/url"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// errand is a request of the guard's own to the upstream: a status probe, or one for
// an undo.
type errand struct {
	method string
	// path is escaped, query without the question mark.
	path, query string
	host        string
	remote      string // the address of the client that it is made for
	header      http.Header
	body        []byte
	// most is the largest answer that is read, in bytes.
	most int64
}

// errandAnswer is a response writer that keeps a small answer.
type errandAnswer struct {
	status int
	header http.Header
	body   []byte
	most   int64
	large  bool
	// unframed says that a body whose end was cut off would look the same.
	unframed bool
	// replaced says that a handler on the way has put its answer in the place of the
	// upstream's.
	replaced bool
}

func (a *errandAnswer) Header() http.Header { return a.header }

func (a *errandAnswer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

func (a *errandAnswer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if int64(len(a.body)+len(p)) > a.most {
		a.large = true
		return len(p), nil
	}
	a.body = append(a.body, p...)
	return len(p), nil
}

// send makes a request by the handlers in `upstream`: past site authentication, and past
// this guard. ctx is a request's, whose server it is made for. What Go and Caddy would
// send twice by themselves is sent once, and once more only where not a byte had left.
func (h *Handler) send(ctx context.Context, o *errand) (*errandAnswer, error) {
	ctx = asOwn(untraced{ctx})
	for again := false; ; again = true {
		a, retry, err := h.sendOnce(ctx, o)
		if err == nil || again || !retry {
			return a, err
		}
	}
}

// untraced is a context without the trace of another request: a guard around this one would
// take what is sent for a second sending of its call, and cut that off.
type untraced struct{ context.Context }

// Value implements context.Context.
func (c untraced) Value(key any) any {
	value := c.Context.Value(key)
	if _, trace := value.(*httptrace.ClientTrace); trace {
		return nil
	}
	return value
}

// sendOnce reports besides whether sending once more is likely to succeed, and safe.
func (h *Handler) sendOnce(ctx context.Context, o *errand) (a *errandAnswer, retry bool, err error) {
	a = &errandAnswer{header: http.Header{}, most: o.most}
	r, err := http.NewRequestWithContext(ctx, o.method, (&url.URL{Path: "/"}).String(), bytes.NewReader(o.body))
	if err != nil {
		return a, false, err
	}
	if len(o.body) == 0 {
		r.Body = http.NoBody
	}
	if r.URL.Path, err = url.PathUnescape(o.path); err != nil {
		return a, false, err
	}
	r.URL.RawPath, r.URL.RawQuery = o.path, o.query
	r.RequestURI = r.URL.RequestURI()
	r.Host, r.RemoteAddr, r.Header = o.host, o.remote, o.header.Clone()
	r.Header.Set("Accept-Encoding", "identity")
	server, _ := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	// With a replacer of its own: that of the call tells what became of the call.
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), a, server)
	armed, watch := sent.Arm(r.Context())
	defer watch.Release()
	panicked, err := handOn(h.upstream, a, r.WithContext(armed))
	a.unframed = watch.Unframed()
	upstream, answered := replacer(r).Get(upstreamStatus)
	a.replaced = answered && upstream != a.status
	switch {
	case panicked != nil:
		return a, false, fmt.Errorf("the answer was cut short: %v", panicked)
	case err != nil:
		return a, a.status == 0 && watch.Proof(err, sent.Retries(armed)).Again, err
	case ctx.Err() != nil || armed.Err() != nil:
		return a, false, errNoAnswer
	case a.large:
		return a, false, fmt.Errorf("the answer is larger than %d bytes", o.most)
	}
	return a, false, nil
}
