package caddymodule

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func paths(patterns ...string) caddyhttp.MatcherSets {
	var sets caddyhttp.MatcherSets
	for _, pattern := range patterns {
		sets = append(sets, caddyhttp.MatcherSet{caddyhttp.MatchPath{pattern}})
	}
	return sets
}

// "Words", consequential, and step 1: what is guarded.
func TestClassify(t *testing.T) {
	h := &Handler{
		counts:            new(guardCounts),
		consequentialSets: paths("/export", "/run"),
		exemptSets:        paths("/search", "/find"),
		actions: []*Action{
			{Name: "grpc", matchers: paths("/pkg.service/*"), Policy: Policy{GRPC: grpcUnary}},
			{Name: "pay", matchers: paths("/pay", "/charge")},
			{Name: "pay_again", matchers: paths("/pay")},
			{Name: defaultAction},
		},
	}
	upgrade := []string{"Connection", "keep-alive, Upgrade", "Upgrade", "websocket"}
	grpc := func(contentType string) *http.Request {
		r := request("POST", "/pay", "Content-Type", contentType, "Te", "trailers")
		r.ProtoMajor = 2
		return r
	}
	with := func(r *http.Request, change func(*http.Request)) *http.Request {
		change(r)
		return r
	}
	for _, c := range []struct {
		name   string
		r      *http.Request
		action string // empty: not guarded
		status string // the placeholder of what is let through
	}{
		{"POST", request("POST", "/"), "default", ""},
		{"PUT", request("PUT", "/"), "default", ""},
		{"PATCH", request("PATCH", "/"), "default", ""},
		{"DELETE", request("DELETE", "/"), "default", ""},
		{"an unknown method", request("FROB", "/"), "default", ""},
		{"a method in small letters, which an upstream may read otherwise", request("get", "/"), "default", ""},
		{"GET", request("GET", "/"), "", ""},
		{"HEAD", request("HEAD", "/"), "", ""},
		{"OPTIONS", request("OPTIONS", "/"), "", ""},
		{"TRACE", request("TRACE", "/"), "", ""},
		{"QUERY", request("QUERY", "/"), "", ""},
		{"SEARCH", request("SEARCH", "/"), "", ""},
		{"PROPFIND", request("PROPFIND", "/"), "", ""},
		{"REPORT", request("REPORT", "/"), "", ""},
		{"a GET that is consequential", request("GET", "/export"), "default", ""},
		{"by the other line", request("GET", "/run"), "default", ""},
		{"a POST that is exempt", request("POST", "/search"), "", "unguarded"},
		{"by the other line, exempt", request("POST", "/find"), "", "unguarded"},
		{"exempt is for unsafe methods", request("GET", "/search"), "", ""},
		{"consequential is for safe methods", request("POST", "/export"), "default", ""},
		{"an action", request("POST", "/pay"), "pay", ""},
		{"by its other line", request("POST", "/charge"), "pay", ""},
		{"an upgrade", request("GET", "/export", upgrade...), "", "unguarded"},
		{"an upgrade of a GET that is not consequential", request("GET", "/", upgrade...), "", "unguarded"},
		{"CONNECT", with(request("GET", "/export"), func(r *http.Request) { r.Method = "CONNECT" }), "", "unguarded"},
		{"an upgrade with POST is none", request("POST", "/pay", upgrade...), "pay", ""},
		{"with another method that is consequential", request("QUERY", "/export", upgrade...), "default", ""},
		{"with a body", with(request("GET", "/export", upgrade...), func(r *http.Request) { r.ContentLength = -1 }), "default", ""},
		{"Upgrade without Connection is none", request("GET", "/export", "Upgrade", "websocket"), "default", ""},
		{"an offer of HTTP/2 is none", request("GET", "/export", "Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c"), "default", ""},
		{"an offer of TLS or HTTP/2 is none", request("GET", "/export", "Connection", "Upgrade", "Upgrade", "TLS/1.2, HTTP/2.0"), "default", ""},
		{"an offer among others is one", request("GET", "/export", "Connection", "Upgrade", "Upgrade", "h2c, websocket"), "", "unguarded"},
		{"Connection without Upgrade is none", request("GET", "/export", "Connection", "upgrade"), "default", ""},
		{"gRPC", grpc("application/grpc+proto"), "", "unguarded"},
		{"gRPC in capitals", grpc("Application/GRPC"), "", "unguarded"},
		{"gRPC with a parameter", grpc("application/grpc;x=y"), "", "unguarded"},
		{"gRPC-Web is none", grpc("application/grpc-web+proto"), "pay", ""},
		{"nor is anything else that begins so", grpc("application/grpcx"), "pay", ""},
		{"gRPC over HTTP/1 is none", with(grpc("application/grpc"), func(r *http.Request) { r.ProtoMajor = 1 }), "pay", ""},
		{"gRPC without trailers is none", with(grpc("application/grpc"), func(r *http.Request) { r.Header.Del("Te") }), "pay", ""},
		{"unary gRPC", with(grpc("application/grpc"), func(r *http.Request) { r.URL.Path = "/pkg.Service/Pay" }), "grpc", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			action, as, err := h.classify(c.r)
			if err != nil {
				t.Fatal(err)
			}
			name := ""
			if as == classGuarded {
				name = action.Name
			}
			status, _ := replacer(c.r).GetString("http.agent_guard.status")
			if name != c.action || status != c.status {
				t.Errorf("action %q, status %q; want %q, %q", name, status, c.action, c.status)
			}
		})
	}
}

func TestTunnelsAreNotGuarded(t *testing.T) {
	r := request("POST", "/")
	r.Method = http.MethodConnect
	r = r.WithContext(context.WithValue(r.Context(), caddyhttp.OriginalRequestCtxKey, *r))
	if _, as, err := (&Handler{counts: new(guardCounts), actions: []*Action{{Name: defaultAction}}}).classify(r); as != classStream || err != nil {
		t.Errorf("CONNECT: %v, %v", as, err)
	}
}

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
		action, as, err := h.classify(c.r)
		if err != nil || (as == classGuarded) != (c.want != "") || as == classGuarded && action.Name != c.want {
			t.Errorf("%s %s: %v, %v, %v; want %q", c.r.Method, c.r.URL, action, as, err, c.want)
		}
	}
}
