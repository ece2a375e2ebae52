package sent_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// Section "Sent or not": what Caddy's errors prove, and when they do not.
func TestProofByError(t *testing.T) {
	dial := caddyhttp.Error(http.StatusBadGateway, reverseproxy.NewDialError(io.EOF))
	none := caddyhttp.Error(http.StatusServiceUnavailable, errors.New("no upstreams available"))
	tests := []struct {
		name    string
		err     error
		retries int
		conns   int
		blown   bool
		want    sent.Reason
	}{
		{name: "no error", err: nil},
		{name: "any error", err: errFailed},
		{name: "dial error", err: dial, want: sent.DialFailed},
		{name: "dial error with its trace", err: dial, conns: 1, want: sent.DialFailed},
		{name: "dial errors that were all seen", err: dial, retries: 2, conns: 3, want: sent.DialFailed},
		{name: "dial error after attempts that were not seen", err: dial, retries: 2, conns: 2},
		{name: "dial error of a transport without events, after another attempt", err: dial, retries: 1},
		{name: "dial error after a connection was had", err: dial, conns: 1, blown: true},
		{name: "dial error, and who knows what before", err: dial, retries: -1, conns: 9},
		{name: "no upstream", err: none, want: sent.NoUpstream},
		{name: "no upstream in any retry", err: none, retries: 4, want: sent.NoUpstream},
		{name: "no upstream after a connection was asked for", err: none, conns: 1},
		{name: "no upstream, and who knows what before", err: none, retries: -1},
		{name: "some other 503", err: caddyhttp.Error(http.StatusServiceUnavailable, errFailed)},
		{name: "the text with another status", err: caddyhttp.Error(http.StatusBadGateway, errors.New("no upstreams available"))},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ctx, w := sent.Arm(t.Context())
			trace := httptrace.ContextClientTrace(ctx)
			for range tt.conns {
				trace.GetConn("")
			}
			if tt.blown {
				c, _ := net.Pipe()
				trace.GotConn(httptrace.GotConnInfo{Conn: c})
			}
			v := w.Proof(tt.err, tt.retries)
			if v.Reason != tt.want || v.Again {
				t.Errorf("%v, again %v; want %v", v.Reason, v.Again, tt.want)
			}
		})
	}
}

// Section "Sent or not": the count of retries is the last reverse_proxy's. It is
// not believed where another one may have run in the same forward, and what ran
// before the forward does not matter.
func TestRetries(t *testing.T) {
	tests := []struct {
		name          string
		before, after map[string]any
		want          int
	}{
		{name: "none ran", want: -1},
		{name: "one ran", after: map[string]any{"http.reverse_proxy.retries": 2}, want: 2},
		{name: "forward_auth ran before", before: map[string]any{
			"http.reverse_proxy.retries": 1, "http.reverse_proxy.status_code": 200,
		}, want: -1},
		{name: "forward_auth and then one", before: map[string]any{
			"http.reverse_proxy.retries": 1, "http.reverse_proxy.status_code": 200,
		}, after: map[string]any{"http.reverse_proxy.retries": 0}, want: 0},
		{name: "one answered before the last", after: map[string]any{
			"http.reverse_proxy.retries": 0, "http.reverse_proxy.status_code": 404,
		}, want: -1},
		{name: "one failed before the last", after: map[string]any{
			"http.reverse_proxy.retries": 0, "http.error": io.EOF,
		}, want: -1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			repl := caddy.NewReplacer()
			for k, v := range tt.before {
				repl.Set(k, v)
			}
			ctx, w := sent.Arm(context.WithValue(t.Context(), caddy.ReplacerCtxKey, repl))
			defer w.Release()
			for k, v := range tt.after {
				repl.Set(k, v)
			}
			if got := sent.Retries(ctx); got != tt.want {
				t.Errorf("Retries = %d, not %d", got, tt.want)
			}
		})
	}
	if got := sent.Retries(t.Context()); got != -1 {
		t.Errorf("without a replacer: %d", got)
	}
}
