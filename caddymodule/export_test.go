package caddymodule

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// OptionNames lists the options of each block of the Caddyfile.
func OptionNames() map[string][]string {
	return map[string][]string{
		"the global option":    names(appOptions()),
		"a quota":              names(quotaOptions()),
		"identity":             names(identityOptions()),
		"trust":                names(trustOptions()),
		"rollback":             names(rollbackOptions()),
		"store badger":         names(badgerOptions()),
		"store postgres":       names(postgresOptions()),
		"hitl":                 names(hitlOptions()),
		"who decides":          names(roleOptions()),
		"a webhook":            names(webhookOptions()),
		"on_cascade":           names(cascadeOptions()),
		"agent_guard":          names(guardOptions()),
		"an action":            names(actionOptions()),
		"a probe":              names(probeOptions()),
		"a probe's evidence":   names(evidenceOptions()),
		"an outcome's block":   names(answerOptions()),
		"an action or a guard": names(policyOptions()),
		"restore":              names(restoreOptions()),
		"compensate":           names(compensationOptions()),
	}
}

func names[T any](opts option.Set[T]) []string { return slices.Sorted(maps.Keys(opts)) }

// DefaultTerms are the terms of a guard that says nothing.
var DefaultTerms = func() guard.Terms {
	var p guard.Policy
	p.Inherit(nil)
	return p.Terms
}()

// How the calls of an action are undone.
var (
	Compile = compileUndo
	Exposed = exposed
	Unset   = unset
	Fields  = fieldsOf
)

// Read reads the options from a Caddyfile.
func (h *Handler) Read(d *caddyfile.Dispenser) error { return h.read(d) }

// Validate checks the options.
func (h *Handler) Validate() error { return h.validate() }

// WantError checks that an error has all of these texts, or that there is none if want is nil.
func WantError(t *testing.T, err error, want []string) {
	t.Helper()
	if (err != nil) != (want != nil) {
		t.Fatal(err)
	}
	for _, text := range want {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("got  %v\nwant ...%s", err, text)
		}
	}
}
