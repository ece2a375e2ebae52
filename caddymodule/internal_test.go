package caddymodule

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddytls"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// What the gateway asks for itself passes its own guards, unchanged by what handlers did to it
// before, and only a whole answer of the upstream counts.
func TestInternalRequests(t *testing.T) {
	ask := guard.InternalRequest{
		Method: "PUT", Path: "/a%2Fb", Query: "x=1", Host: "pay.example.com", Remote: "192.0.2.1:1234",
		Header: http.Header{"Accept-Encoding": {"gzip"}, "X-Key": {"k"}}, Body: []byte("body"), MaxAnswer: 4,
	}
	failure := errors.New("failed")
	// Upstreams that require https would answer a probe or an undo with a redirect.
	overTLS := &caddyhttp.Server{TLSConnPolicies: caddytls.ConnectionPolicies{{}}}
	for name, c := range map[string]struct {
		upstream func(w http.ResponseWriter, r *http.Request) error
		status   int
		body     string
		cut      bool
		err      error
	}{
		"an answer": {func(w http.ResponseWriter, r *http.Request) error {
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusCreated)
			_, err := io.WriteString(w, "four")
			return err
		}, 201, "four", false, nil},
		"a longer one": {func(w http.ResponseWriter, r *http.Request) error {
			_, _ = io.WriteString(w, "fo")
			_, err := io.WriteString(w, "ur and more")
			return err
		}, 200, "four", true, nil},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) error {
			http.Redirect(w, &http.Request{Method: "PUT"}, "https://example.com/", http.StatusTemporaryRedirect)
			return nil
		}, 307, "", false, nil},
		"none":   {func(http.ResponseWriter, *http.Request) error { return nil }, 0, "", false, errNoAnswer},
		"failed": {func(http.ResponseWriter, *http.Request) error { return failure }, 0, "", false, failure},
		"cut": {func(w http.ResponseWriter, r *http.Request) error {
			_, _ = io.WriteString(w, "fo")
			panic(http.ErrAbortHandler)
		}, 200, "fo", false, errCutShort},
	} {
		t.Run(name, func(t *testing.T) {
			arrivals, traced := 0, false
			next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
				arrivals++
				body, _ := io.ReadAll(r.Body)
				if r.Method != "PUT" || r.RequestURI != "/a%2Fb?x=1" || r.URL.Path != "/a/b" || r.Host != "pay.example.com" ||
					r.RemoteAddr != "192.0.2.1:1234" || r.TLS == nil || string(body) != "body" || r.ContentLength != 4 || r.GetBody != nil {
					t.Errorf("%+v with %q", r, body)
				}
				if got := r.Header; got.Get("Accept-Encoding") != "identity" || got.Get("X-Key") != "k" || !guard.IsOwn(r) {
					t.Errorf("%v, its own %t", got, guard.IsOwn(r))
				}
				if trace := httptrace.ContextClientTrace(r.Context()); trace != nil && trace.WroteRequest != nil {
					traced = true
				}
				r.Header.Set("X-Key", "changed")
				return c.upstream(w, r)
			})
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) {}})
			for range 2 {
				a, err := sendOwn(ctx, &ask, next, overTLS)
				if a.Status != c.status || string(a.Body) != c.body || a.Cut != c.cut || !errors.Is(err, c.err) || a.notSent {
					t.Errorf("%d %q, cut %t, %v", a.Status, a.Body, a.Cut, err)
				}
			}
			if arrivals != 2 || traced {
				t.Errorf("%d arrivals of 2 requests, in the trace of another %t", arrivals, traced)
			}
		})
	}
	// Where the time is over, the proxy's own 499 is no answer.
	ctx, cancel := context.WithCancelCause(t.Context())
	over := errors.New("over")
	a, err := sendOwn(ctx, &ask, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		cancel(over)
		w.WriteHeader(499) // as reverse_proxy does
		if r.TLS != nil {
			t.Error("TLS on a site without")
		}
		return nil
	}), new(caddyhttp.Server))
	if !errors.Is(err, over) || !a.ended {
		t.Errorf("%+v, %v", a, err)
	}
}
