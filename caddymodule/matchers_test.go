package caddymodule

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Matchers of the configuration reach the decision: several lines are alternatives,
// several matchers of one block must all match.
func TestConfiguredMatchers(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	ctx, err := caddy.ProvisionContext(&caddy.Config{Admin: &caddy.AdminConfig{Disabled: true}})
	if err != nil {
		t.Fatal(err)
	}
	mod, err := ctx.LoadModuleByID("http.handlers.agent_guard", json.RawMessage(`{
		"exempt": [{"path": ["/search"]}, {"path": ["/find"], "header": {"X-Dry-Run": ["yes"]}}],
		"consequential": [{"path": ["/export"]}],
		"actions": [
			{"name": "pay", "match": [{"path": ["/pay"], "method": ["POST"]}, {"path": ["/charge"]}]},
			{"name": "rest"}
		]}`))
	if err != nil {
		t.Fatal(err)
	}
	h := mod.(*Handler)
	for _, c := range []struct {
		r    *http.Request
		want string
	}{
		{request("POST", "/search"), ""},
		{request("POST", "/find", "X-Dry-Run", "yes"), ""},
		{request("POST", "/find"), "rest"},
		{request("GET", "/export"), "rest"},
		{request("GET", "/search"), ""},
		{request("POST", "/pay"), "pay"},
		{request("PUT", "/pay"), "rest"},
		{request("PUT", "/charge"), "pay"},
	} {
		if got := matched(t, h.handler, c.r); got != c.want {
			t.Errorf("%s %s: %q, want %q", c.r.Method, c.r.URL, got, c.want)
		}
	}
}

// matched is the action of a request, or empty where it is not guarded.
func matched(t *testing.T, h *guard.Handler, r *http.Request) string {
	t.Helper()
	match := func(m guard.Match) bool {
		matches, err := m(r)
		if err != nil {
			t.Fatal(err)
		}
		return matches
	}
	if r.Method == http.MethodGet && !match(h.Consequential) || r.Method != http.MethodGet && match(h.Exempt) {
		return ""
	}
	for _, a := range h.Actions {
		if a.Match == nil || match(a.Match) {
			return a.Name
		}
	}
	return ""
}
