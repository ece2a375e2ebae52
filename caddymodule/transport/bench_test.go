package transport_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// BenchmarkRoundTrip compares a guarded request with one that is not, and with
// Caddy's transport, over loopback.
func BenchmarkRoundTrip(b *testing.B) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	defer up.Close()
	ctx, cancel := caddy.NewContext(caddy.ActiveContext())
	defer cancel()
	tr := new(transport.Transport).CaddyModule().New().(*transport.Transport)
	if err := tr.Provision(ctx); err != nil {
		b.Fatal(err)
	}
	defer tr.Cleanup()
	served := context.WithValue(context.Background(), caddyhttp.ServerCtxKey, new(caddyhttp.Server)) // else breakers are passed by
	run := func(b *testing.B, rt http.RoundTripper, guarded bool) {
		b.ReportAllocs()
		for b.Loop() {
			ctx, release := served, func() {}
			if guarded {
				var watch *sent.Watch
				ctx, watch = sent.Arm(ctx)
				release = watch.Release
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, up.URL, nil)
			if err != nil {
				b.Fatal(err)
			}
			req.Header.Set("Idempotency-Key", "one")
			res, err := rt.RoundTrip(req)
			if err != nil {
				b.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
			release()
		}
	}
	b.Run("caddy", func(b *testing.B) { run(b, tr.HTTPTransport, false) })
	b.Run("unguarded", func(b *testing.B) { run(b, tr, false) })
	b.Run("guarded", func(b *testing.B) { run(b, tr, true) })
}
