package undo_test

import (
	"context"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// A charge is undone by a refund. Its answer is recorded, so that asking for the same
// undo again sends nothing.
func Example() {
	ctx := context.Background()
	st, ring := memory.New(memory.Options{}), seal.Generate()
	g, _, err := guard.Open(ctx, st, ring)
	if err != nil {
		panic(err)
	}
	undoer := undo.New(undo.Options{Guard: g, Vault: checkpoint.New(st, ring), Sender: senderFunc(
		func(_ context.Context, o *undo.Outgoing) (*undo.Answer, error) {
			fmt.Println(o.Method, o.URL, o.Header.Get("Idempotency-Key"))
			return &undo.Answer{Status: 201}, nil
		})})

	how := undo.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/v1/charges/{response.json./id}/refunds"}}
	charge := &checkpoint.Checkpoint{
		Snapshot: &checkpoint.Snapshot{ID: "ckpt-7", Way: checkpoint.Compensate, Undo: how.Encode()},
		Result:   &checkpoint.Result{Status: 201, Answer: checkpoint.Message{Body: []byte(`{"id": "ch_1"}`)}},
	}
	for range 2 {
		result, err := undoer.Undo(ctx, undo.Task{Rollback: "3f0e8d5a", Checkpoint: charge, Due: time.Now().Add(time.Hour)})
		fmt.Println("done:", result.Done, result.Status, err)
	}
	// Output:
	// POST /v1/charges/ch_1/refunds 3f0e8d5a/ckpt-7
	// done: true 201 <nil>
	// done: true 201 <nil>
}
