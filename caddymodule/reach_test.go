package caddymodule

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/intercept"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy/fastcgi"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Undos with recorded credentials go nowhere else than their calls did (P6, P8).
func TestUndoGoesNowhereElse(t *testing.T) {
	to := func(dial string) *reverseproxy.Handler {
		return &reverseproxy.Handler{Upstreams: reverseproxy.UpstreamPool{{Dial: dial}}, Transport: new(reverseproxy.HTTPTransport)}
	}
	request := func(ops headers.HeaderOps) *reverseproxy.Handler {
		h := to("a:1")
		h.Headers = &headers.Handler{Request: &ops}
		return h
	}
	php := func(root string) *reverseproxy.Handler {
		h := to("a:1")
		h.Transport = &fastcgi.Transport{Root: root}
		return h
	}
	ifNot := func(path string) any {
		return &caddyhttp.Subroute{Routes: caddyhttp.RouteList{
			{
				MatcherSets: caddyhttp.MatcherSets{{&caddyhttp.MatchNot{MatcherSets: []caddyhttp.MatcherSet{{caddyhttp.MatchPath{path}}}}}},
				Handlers:    []caddyhttp.MiddlewareHandler{&rewrite.Rewrite{URI: "/v2{uri}"}},
			},
			{Handlers: []caddyhttp.MiddlewareHandler{to("a:1")}},
		}}
	}
	for name, c := range map[string]struct{ before, after []any }{
		"a handler that is no proxy, and passes on": {[]any{new(intercept.Intercept), to("a:1")}, []any{new(intercept.Intercept), to("b:1")}},
		"variables": {
			[]any{caddyhttp.VarsMiddleware{"to": "a:1"}, to("{http.vars.to}")}, []any{caddyhttp.VarsMiddleware{"to": "b:1"}, to("{http.vars.to}")},
		},
		"a Host that is added":     {[]any{to("a:1")}, []any{request(headers.HeaderOps{Add: http.Header{"Host": {"other.example.com"}}})}},
		"a Host that is replaced":  {[]any{to("a:1")}, []any{request(headers.HeaderOps{Replace: map[string][]headers.Replacement{"Host": {{Search: "a", Replace: "b"}}}})}},
		"another FastCGI root":     {[]any{php("/srv/a")}, []any{php("/srv/b")}},
		"other requests rewritten": {[]any{ifNot("/a/*")}, []any{ifNot("/b/*")}},
	} {
		before, after := reachOf(c.before, ""), reachOf(c.after, "")
		way := passage{reach: after, own: true, guards: []*Handler{{Settings: guard.Settings{Name: defaultGuard}}}}
		app := new(App)
		app.passagesOnce.Do(func() { app.knownPassages = []passage{way} })
		p, err := app.find(&rollback.Outgoing{Guard: defaultGuard, Recorded: true, Spec: &rollback.Spec{Reach: before}})
		if p != nil || err == nil {
			t.Errorf("%s: the undo goes to %+v, though its call went to %+v", name, after, before)
		}
	}
}

// P1: guards of one name that lead to different services are refused. Services behind one PHP-FPM differ in their roots.
func TestGuardsOfOneNameBehindOneAddress(t *testing.T) {
	php := func(root string) *reverseproxy.Handler {
		return &reverseproxy.Handler{Upstreams: reverseproxy.UpstreamPool{{Dial: "a:1"}}, Transport: &fastcgi.Transport{Root: root}}
	}
	if textOf(php("/srv/a")) == textOf(php("/srv/b")) {
		t.Error("two services count as one")
	}
}

// A configuration that is loaded again leads where it led: what an undo needs is in its checkpoint.
func TestWayIsTheSameAfterAReload(t *testing.T) {
	const upstream = `[
		{"handler": "subroute", "routes": [
			{"match": [{"method": ["POST"], "path": ["/v1/*"], "header": {"X-Tier": ["a"]}}], "handle": [{"handler": "rewrite", "uri": "/v2{http.request.uri}"}]},
			{"handle": [{"handler": "reverse_proxy", "upstreams": [{"dial": "127.0.0.1:1"}]}]}
		]}
	]`
	var first *rollback.Reach
	for range 8 {
		app := loadedApp(t, `{"store": {"module": "badger", "path": "`+t.TempDir()+`/store"}}`, `{"servers": {"site": {
			"listen": ["127.0.0.1:0"], "automatic_https": {"disable": true}, "routes": [{"handle": [
				{"handler": "agent_guard", "name": "g", "actions": [{"name": "pay"}], "upstream": `+upstream+`}, {"handler": "static_response"}
			]}]
		}}}`)
		reach := app.guards.all[0].reach
		if first == nil {
			first = &reach
		}
		if !first.Leads(&reach) {
			t.Fatalf("%+v, and after a reload %+v", *first, reach)
		}
	}
}

// Of a handler that is not known loading tells, and not a guard before it that nothing would answer.
func TestUnknownHandlersMayAnswer(t *testing.T) {
	server := &caddyhttp.Server{Routes: caddyhttp.RouteList{{
		HandlersRaw: []json.RawMessage{[]byte(`{"handler": "agent_guard"}`), []byte(`{"handler": "misspelt"}`)},
	}}}
	visits, passages := visitsIn(server, "a")
	if len(visits) != 1 || len(passages) != 0 {
		t.Fatalf("%d visits, %d passages", len(visits), len(passages))
	}
	if err := checkVisits(visits, false); err != nil {
		t.Error(err)
	}
}
