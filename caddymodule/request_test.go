package caddymodule

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
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

// testGuard is a guard over a store in memory.
func testGuard(t testing.TB) *execution.Guard {
	t.Helper()
	st := memory.New(memory.Options{})
	g, _, err := execution.Open(t.Context(), st, seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
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
