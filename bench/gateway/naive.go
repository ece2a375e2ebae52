package gateway

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(new(Naive))
	httpcaddyfile.RegisterHandlerDirective("bench_naive", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(Naive), nil
	})
}

// Naive is the idempotency middleware that people write by hand: it keeps whole
// answers in a map and looks there first. It is here for its price alone. It forgets
// everything at a restart, runs concurrent duplicates twice, knows no caller and no
// fingerprint, never gives memory back, and holds every byte until the answer is whole.
type Naive struct {
	mu      sync.Mutex
	answers map[string]*naiveAnswer
}

type naiveAnswer struct {
	status int
	header http.Header
	body   bytes.Buffer
}

// CaddyModule returns the Caddy module information.
func (*Naive) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.bench_naive", New: func() caddy.Module { return new(Naive) }}
}

// Provision makes the map.
func (n *Naive) Provision(caddy.Context) error {
	n.answers = map[string]*naiveAnswer{}
	return nil
}

// ServeHTTP answers from the map, or from the next handler.
func (n *Naive) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	key := r.Header.Get("Idempotency-Key")
	if key == "" {
		return next.ServeHTTP(w, r)
	}
	n.mu.Lock()
	a := n.answers[key]
	n.mu.Unlock()
	if a == nil {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		a = &naiveAnswer{status: http.StatusOK, header: http.Header{}}
		if err := next.ServeHTTP(a, r); err != nil {
			return err
		}
		n.mu.Lock()
		n.answers[key] = a
		n.mu.Unlock()
	}
	maps.Copy(w.Header(), a.header)
	w.WriteHeader(a.status)
	_, err := w.Write(a.body.Bytes())
	return err
}

// Header is the header of the answer.
func (a *naiveAnswer) Header() http.Header { return a.header }

// WriteHeader keeps the status.
func (a *naiveAnswer) WriteHeader(status int) { a.status = status }

// Write keeps p.
func (a *naiveAnswer) Write(p []byte) (int, error) { return a.body.Write(p) }

var (
	_ caddy.Provisioner           = (*Naive)(nil)
	_ caddyhttp.MiddlewareHandler = (*Naive)(nil)
)
