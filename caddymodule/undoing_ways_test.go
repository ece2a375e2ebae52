package caddymodule_test

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
)

// Fields that the guard itself writes into an undo, or that only it can fill, are refused
// when the configuration is read: they would be overwritten, or say what is not so.
func TestFieldsOfTheGuardAreRefused(t *testing.T) {
	for _, c := range []struct{ name, value, says string }{
		{"Execution-Context", "x", "token"},
		{"execution-context", "{env.TOKEN}", "token"},
		{"Workflow-Id", "w", "workflow"},
		{"workflow-id", "{workflow.id}", "workflow"},
		{"Accept-Encoding", "gzip", "compression"},
		{"Idempotency-Key", "k", "leave it away"},
		{"X-Word", "{request.header.Execution-Context}", "token"},
	} {
		header := map[string]string{c.name: c.value}
		plain := caddymodule.Request{Method: "POST", URL: "/refunds"}
		ways := map[string]caddymodule.Ways{
			"compensate": {Compensate: &caddymodule.Compensation{Request: caddymodule.Request{Method: "POST", URL: "/refunds", Header: header}}},
			"status":     {Compensate: &caddymodule.Compensation{Request: plain, Status: &caddymodule.Request{Method: "GET", URL: "/refunds/1", Header: header}}},
		}
		if c.name != "X-Word" {
			ways["restore"] = caddymodule.Ways{Restore: &caddymodule.Restore{Header: header}}
		}
		for name, w := range ways {
			_, err := caddymodule.Compile(&w, &caddymodule.DefaultTerms, "tools", nil)
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(strings.ToLower(err.Error()), "header") {
				t.Errorf("%s with %s %q: %v", name, c.name, c.value, err)
			}
		}
	}
	w := caddymodule.Ways{Compensate: &caddymodule.Compensation{Request: caddymodule.Request{
		Method: "POST", URL: "/refunds", Header: map[string]string{"X-Workflow": "{workflow.id}", "Execution-Id": "{execution.id}"},
	}}}
	if _, err := caddymodule.Compile(&w, &caddymodule.DefaultTerms, "tools", nil); err != nil {
		t.Error(err)
	}
}

// P6: a delegate says whose answers count: an identity, or nobody's. The configuration says which, or is
// refused.
func TestWhoseAnswersOfADelegateCount(t *testing.T) {
	const uri, agent = "https://agent.example.com/rollback", "spiffe://example.com/agent"
	for _, c := range []struct {
		ways caddymodule.Ways
		says string
	}{
		{caddymodule.Ways{Delegate: uri, DelegateTo: agent}, ""},
		{caddymodule.Ways{Delegate: uri, DelegateUnsigned: true}, ""},
		{caddymodule.Ways{Delegate: uri}, "delegate: nothing says whose answers count"},
		{caddymodule.Ways{Delegate: uri, DelegateTo: agent, DelegateUnsigned: true}, "delegate: it has an identity and `unsigned`"},
		{caddymodule.Ways{DelegateTo: agent}, "delegate: its URI is missing"},
		{caddymodule.Ways{Irreversible: true, DelegateUnsigned: true}, "delegate: its URI is missing"},
		{caddymodule.Ways{Delegate: uri, DelegateTo: "no identity"}, "delegate: "},
	} {
		_, err := caddymodule.Compile(&c.ways, &caddymodule.DefaultTerms, "tools", nil)
		if (err == nil) != (c.says == "") || err != nil && !strings.HasPrefix(err.Error(), c.says) {
			t.Errorf("%+v: %v", c.ways, err)
		}
	}
}
