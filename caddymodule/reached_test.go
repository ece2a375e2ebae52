package caddymodule_test

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
)

// P1: a guard that no call can come to is refused where that is certain, and nothing else is.
func TestProvisionRefusesAGuardBehindWhatAnswersAll(t *testing.T) {
	const refused = ", which answers every request: no call would come to the guard"
	for name, c := range map[string]struct {
		config string
		want   []string // nil is accepted
	}{
		"reverse_proxy": {"route {\n reverse_proxy localhost:9001\n agent_guard\n}", []string{
			"apps/http/servers/srv0/routes/0", "this agent_guard stands behind reverse_proxy" + refused,
			"Put agent_guard before reverse_proxy", "write agent_proxy in place of both"}},
		"agent_proxy":        {"route {\n agent_proxy localhost:9001\n agent_guard {\n name b\n }\n}", []string{"behind reverse_proxy" + refused}},
		"respond":            {"route {\n respond ok\n agent_proxy localhost:9001\n}", []string{"behind respond" + refused}},
		"error":              {"route {\n error 404\n agent_guard\n}", []string{"behind error" + refused}},
		"file_server":        {"route {\n file_server\n agent_guard\n}", []string{"behind file_server" + refused}},
		"in a route":         {"route {\n reverse_proxy localhost:9001\n route /b {\n agent_guard\n }\n}", []string{"behind reverse_proxy" + refused}},
		"behind a route":     {"route {\n route {\n vars a b\n reverse_proxy localhost:9001\n }\n agent_guard\n}", []string{"behind reverse_proxy" + refused}},
		"in handle_path":     {"handle_path /a/* {\n route {\n reverse_proxy localhost:9001\n agent_guard\n }\n}", []string{"behind reverse_proxy" + refused}},
		"in handle_errors":   {"handle_errors {\n route {\n reverse_proxy localhost:9001\n agent_guard\n }\n}", []string{"/errors/routes/0", "behind reverse_proxy" + refused}},
		"the second of two":  {"agent_guard /a/*\nroute {\n reverse_proxy localhost:9001\n agent_guard {\n name b\n }\n}", []string{"behind reverse_proxy" + refused}},
		"before it":          {"route {\n agent_guard\n reverse_proxy localhost:9001\n}", nil},
		"directive order":    {"reverse_proxy localhost:9001\nagent_guard", nil},
		"some requests":      {"route {\n reverse_proxy /a/* localhost:9001\n respond /b ok\n agent_proxy localhost:9001\n}", nil},
		"in a matched route": {"route {\n route /a/* {\n reverse_proxy localhost:9001\n }\n agent_proxy localhost:9001\n}", nil},
		"another handle":     {"handle /a/* {\n reverse_proxy localhost:9001\n}\nhandle {\n agent_proxy localhost:9001\n}", nil},
		"forward_auth":       {"route {\n forward_auth localhost:9002 {\n uri /auth\n }\n agent_proxy localhost:9001\n}", nil},
		"pass_thru":          {"route {\n file_server {\n pass_thru\n }\n agent_proxy localhost:9001\n}", nil},
		"early hints":        {"route {\n respond 103\n agent_proxy localhost:9001\n}", nil},
		"some status":        {"route {\n respond ok {http.vars.status}\n agent_proxy localhost:9001\n}", nil},
		"errors of a proxy":  {"reverse_proxy localhost:9001\nhandle_errors {\n agent_proxy localhost:9001\n}", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("XDG_DATA_HOME", t.TempDir())
			config, err := adapt(t, ":8080 {\n"+c.config+"\n}")
			if err != nil {
				t.Fatal(err)
			}
			caddymodule.WantError(t, provision(t, config), c.want)
		})
	}
}

// P3: whom an authentication knows is the same whether it is loaded when a guard is looked at
// or not. Where only loading tells, nothing is refused before the start.
func TestProvisionComparesAuthentications(t *testing.T) {
	const hash = " $2a$04$4Uiko3PMnYC8tSDoKvXl2.nFa1a5lIH5IGhcPjUu4c8EUmzzHvFpS"
	t.Setenv("AGENT_GUARD_TEST_USER", "alice")
	for name, c := range map[string]struct {
		second  string
		refused bool
	}{
		"the same":       {"alice" + hash, false},
		"of other users": {"bob" + hash, true},
		"of more users":  {"alice" + hash + "\n bob" + hash, true},
		"unknown yet":    {"{env.AGENT_GUARD_TEST_USER}" + hash, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("XDG_DATA_HOME", t.TempDir())
			// The first is loaded when the guard in the middle is, the second is not: Caddy takes
			// longer paths first.
			config, err := adapt(t, ":8080 {\nroute /aaa/* {\n basic_auth {\n alice"+hash+"\n}\n}\nroute /xx/* {\n agent_guard {\n name one\n}\n}\n"+
				"route /b/* {\n basic_auth {\n "+c.second+"\n}\n}\nroute {\n agent_proxy localhost:9001 {\n name two\n}\n}\n}")
			if err != nil {
				t.Fatal(err)
			}
			err = provision(t, config)
			if (err != nil) != c.refused || err != nil && !strings.Contains(err.Error(), `requests come to the guard "two" through 2 authentications`) {
				t.Error(err)
			}
		})
	}
}
