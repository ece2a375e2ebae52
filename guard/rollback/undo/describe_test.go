package undo_test

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// A plan is approved by people: each way has words, and no value of the call or its answer.
func TestDescribe(t *testing.T) {
	compensate := undo.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/v1/charges/{response.json./id}/refund?why=x"}}
	delegate := undo.Spec{Guard: "default", Delegate: "https://agent.example/rollback"}
	request := checkpoint.Request{Method: "PATCH", Path: "/v1/items/7", Query: "secret=1"}
	for want, c := range map[string]struct {
		call   checkpoint.Snapshot
		result *checkpoint.Result
	}{
		"compensate POST /v1/charges/{response.json./id}/refund": {call: checkpoint.Snapshot{Way: checkpoint.Compensate, Undo: compensate.Encode()}},
		"delegate POST https://agent.example/rollback":           {call: checkpoint.Snapshot{Way: checkpoint.Delegate, Undo: delegate.Encode()}},
		"restore PUT /v1/items/7":                                {call: checkpoint.Snapshot{Way: checkpoint.Restore, Image: &checkpoint.Image{Exists: true}}},
		"restore DELETE /v1/items/7":                             {call: checkpoint.Snapshot{Way: checkpoint.Restore, Image: &checkpoint.Image{}}},
		"restore":                                                {call: checkpoint.Snapshot{Way: checkpoint.Restore}},
		"irreversible (declared)":                                {call: checkpoint.Snapshot{Way: checkpoint.Irreversible, Reason: checkpoint.ReasonDeclared}},
		"irreversible (absent-value)":                            {call: checkpoint.Snapshot{Way: checkpoint.Compensate, Undo: compensate.Encode()}, result: &checkpoint.Result{Reason: checkpoint.ReasonAbsent}},
		"":                                                       {},
	} {
		c.call.Request = request
		if got := undo.Describe(&c.call, c.result); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
