package caddymodule

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// request makes a request as Caddy hands it to a handler, with header fields given
// as name, value, name, value...
func request(method, target string, fields ...string) *http.Request {
	r := httptest.NewRequest(method, target, nil)
	for i := 0; i < len(fields); i += 2 {
		r.Header.Add(fields[i], fields[i+1])
	}
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), nil)
}

// defaulted is a handler as Provision makes it, without what needs a context.
func defaulted(t testing.TB, h Handler) *Handler {
	t.Helper()
	h.setDefaults()
	if err := h.provisionIDs(); err != nil {
		t.Fatal(err)
	}
	return &h
}

// P1: writing the same credential fields another way makes no other caller.
func TestCredentialsHaveOneSpelling(t *testing.T) {
	one := defaulted(t, Handler{Settings: guard.Settings{Credentials: []string{"X-Api-Key", "authorization"}}})
	two := defaulted(t, Handler{Settings: guard.Settings{Credentials: []string{"Authorization", "x-api-key", "X-Api-Key"}}})
	if one.naming != two.naming {
		t.Errorf("%q and %q", one.naming, two.naming)
	}
}
