package main

import (
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// The program that users build has our modules, and no store that forgets.
func TestProgramHasOurModules(t *testing.T) {
	modules := caddy.Modules()
	for _, want := range []string{
		"admin.api.agent_guard", "agent_guard", "agent_guard.stores.badger", "agent_guard.stores.postgres", "http.handlers.agent_guard", "http.reverse_proxy.transport.agent_guard",
	} {
		if !slices.Contains(modules, want) {
			t.Errorf("no module %s", want)
		}
	}
	if slices.Contains(modules, "agent_guard.stores.memory") {
		t.Error("P1: the memory store forgets every execution at exit, and can be configured")
	}
}
