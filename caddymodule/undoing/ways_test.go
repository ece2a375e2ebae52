package undoing_test

import (
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
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
		{"X-Token", "{request.header.Execution-Context}", "token"},
	} {
		header := map[string]string{c.name: c.value}
		plain := undoing.Request{Method: "POST", URL: "/refunds"}
		ways := map[string]undoing.Ways{
			"compensate": {Compensate: &undoing.Compensation{Request: undoing.Request{Method: "POST", URL: "/refunds", Header: header}}},
			"status":     {Compensate: &undoing.Compensation{Request: plain, Status: &undoing.Request{Method: "GET", URL: "/refunds/1", Header: header}}},
		}
		if c.name != "X-Token" {
			ways["restore"] = undoing.Ways{Restore: &undoing.Restore{Header: header}}
		}
		for name, w := range ways {
			_, err := undoing.Compile(&w, &undoing.Defaults, "tools", nil)
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(strings.ToLower(err.Error()), "header") {
				t.Errorf("%s with %s %q: %v", name, c.name, c.value, err)
			}
		}
	}
	w := undoing.Ways{Compensate: &undoing.Compensation{Request: undoing.Request{
		Method: "POST", URL: "/refunds", Header: map[string]string{"X-Workflow": "{workflow.id}", "Execution-Id": "{execution.id}"},
	}}}
	if _, err := undoing.Compile(&w, &undoing.Defaults, "tools", nil); err != nil {
		t.Error(err)
	}
}
