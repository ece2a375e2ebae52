package guard

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

func paths(patterns ...string) Match {
	return func(r *http.Request) (bool, error) {
		for _, p := range patterns {
			if prefix, all := strings.CutSuffix(p, "*"); strings.EqualFold(r.URL.Path, p) || all && strings.HasPrefix(strings.ToLower(r.URL.Path), prefix) {
				return true, nil
			}
		}
		return false, nil
	}
}

// "Words", consequential, and step 1: what is guarded.
func TestClassify(t *testing.T) {
	h := newHandler(t, Config{
		Consequential: paths("/export", "/run"),
		Exempt:        paths("/search", "/find"),
		Actions: []*Action{
			{Name: "grpc", Match: paths("/pkg.service/*"), Policy: Policy{GRPC: GRPCUnary}},
			{Name: "pay", Match: paths("/pay", "/charge")},
			{Name: "pay_again", Match: paths("/pay")},
			{Name: "default"},
		},
	})
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
			status := notedOf(c.r, "status")
			if name != c.action || status != c.status {
				t.Errorf("action %q, status %q; want %q, %q", name, status, c.action, c.status)
			}
		})
	}
}

func TestTunnelsAreNotGuarded(t *testing.T) {
	r := request("POST", "/")
	r.Method = http.MethodConnect
	if _, as, err := newHandler(t, Config{}).classify(r); as != classStream || err != nil {
		t.Errorf("CONNECT: %v, %v", as, err)
	}
}

// Only a guard of MCP takes a DELETE for the end of a session: with auto that is the caller's word.
func TestEndsOfSessions(t *testing.T) {
	for p, want := range map[protocol.Protocol]class{protocol.MCP: classPass, protocol.Auto: classGuarded, protocol.A2A: classGuarded, protocol.JSONRPC: classGuarded} {
		h := newHandler(t, Config{Settings: Settings{Protocol: p}})
		if _, as, err := h.classify(request("DELETE", "/mcp", "Mcp-Session-Id", "s")); as != want || err != nil {
			t.Errorf("%s: %v, %v", p, as, err)
		}
	}
}
