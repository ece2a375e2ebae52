package caddymodule_test

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
)

// P1, P3: a name that stands twice is refused in JSON too, with both places. A site with
// addresses in several servers is one guard.
func TestProvisionRefusesTwoGuardsOfOneName(t *testing.T) {
	guard := func(options string) string { return `{"handler": "agent_guard"` + options + `}` }
	nested := func(handler string) string {
		return `{"handler": "subroute", "routes": [{"handle": [{"handler": "vars", "a": "b"}]}, {"handle": [` + handler + `, {"handler": "static_response"}]}]}`
	}
	server := func(listen string, handlers ...string) string {
		var routes []string
		for i, h := range handlers {
			host := `{"host": ["` + string(rune('a'+i)) + `.example"]}`
			routes = append(routes, `{"match": [`+host+`], "handle": [`+h+`, {"handler": "static_response"}]}`)
		}
		return `{"listen": ["` + listen + `"], "automatic_https": {"disable": true}, "routes": [` + strings.Join(routes, ",") + `]}`
	}
	config := func(servers ...string) string {
		text := ""
		for i, s := range servers {
			text += `,"srv` + string(rune('0'+i)) + `": ` + s
		}
		return `{"apps": {"http": {"servers": {` + text[1:] + `}}}}`
	}
	for name, c := range map[string]struct {
		config string
		want   []string // nil is accepted
	}{
		"two sites": {config(server(":8080", nested(guard("")), nested(guard("")))), []string{
			"apps/http/servers/srv0: name: ",
			`the guard at apps/http/servers/srv0 is called "default" too`,
			"Write `name default-2`", "`name default shared` in both"}},
		"the same in one route": {config(server(":8080", guard("")+","+guard(""))), []string{`is called "default" too`}},
		"one of them shares":    {config(server(":8080", guard(`, "shared": true`), guard(""))), []string{`is called "default" too`}},
		"other servers":         {config(server(":8080", guard(`, "name": "a", "fail_open": true`)), server(":8081", guard(`, "name": "a"`))), []string{`is called "a" too`}},
		"both share":            {config(server(":8080", guard(`, "shared": true`), guard(`, "shared": true`))), nil},
		"two names":             {config(server(":8080", guard(""), guard(`, "name": "b"`))), nil},
		"one site twice":        {config(server(":8080", guard("")), server(":8081", guard(""))), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("XDG_DATA_HOME", t.TempDir())
			caddymodule.WantError(t, provision(t, c.config), c.want)
		})
	}
}
