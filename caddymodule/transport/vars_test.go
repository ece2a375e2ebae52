package transport

import (
	"context"
	"errors"
	"net"
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
)

// Go's transport dials in a goroutine that outlives a forward that was cut, and
// Caddy's dial reads the request's variables there. Forwarding again writes them, and
// a map that is read and written at once ends the process.
func TestDialHasVariablesOfItsOwn(t *testing.T) {
	refused := errors.New("refused")
	var seen map[string]any
	tr := &Transport{HTTPTransport: &reverseproxy.HTTPTransport{
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			seen, _ = ctx.Value(caddyhttp.VarsCtxKey).(map[string]any)
			return nil, refused
		}},
	}}
	var err error
	if tr.guarded, err = tr.twin(); err != nil {
		t.Fatal(err)
	}
	vars := map[string]any{"before": 1}
	ctx, watch := sent.Arm(context.WithValue(context.Background(), caddyhttp.VarsCtxKey, vars))
	defer watch.Release()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:1/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.RoundTrip(req); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	vars["after"] = 2
	if seen["before"] != 1 || seen["after"] != nil {
		t.Errorf("the dial has the variables %v", seen)
	}
}
