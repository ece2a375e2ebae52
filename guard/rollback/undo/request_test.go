package undo_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// What the upstream receives.
func TestCompensationRequest(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(200)
		r.undo(task(checkpoint.Compensate, undo.Spec{Compensate: &template.Spec{
			Method: "POST", URL: "/refunds", ContentType: "application/json",
			Header: []template.Field{{Name: "Idempotency-Key", Value: "another"}, {Name: "X-Order", Value: "{execution.id}"}},
			Body:   `{{"charge":"{response.json./id}","for":"{workflow.id} {rollback.id} {checkpoint.id}"}}`,
		}}))
		o := r.sent[0]
		if o.Method != "POST" || o.URL != "/refunds" || o.Host != "api.example" || o.Guard != "default" || o.Action != "charge" ||
			o.Upstream != "up:9001" || o.Rollback != rollbackID || o.Checkpoint != checkpointID || o.Workflow != "w-1" || o.Recorded || o.Delegated {
			t.Errorf("%+v", o)
		}
		if o.Header.Get("Idempotency-Key") != key || o.Header.Get("X-Order") != "order-7" || o.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%v", o.Header)
		}
		if want := `{"charge":"ch_1","for":"w-1 ` + rollbackID + ` ckpt-1"}`; string(o.Body) != want {
			t.Errorf("%s, want %s", o.Body, want)
		}
	})
}

// A call that the upstream has refused by its own word had no effect: nothing is sent.
func TestRefusedCallsNeedNoUndo(t *testing.T) {
	for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Delegate} {
		for status, refused := range map[int]bool{400: true, 404: true, 422: true, 200: false, 302: false, 408: false, 409: false, 500: false} {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(200)
				task := task(way, undo.Spec{})
				task.Checkpoint.Result.Upstream = status
				if got := r.undo(task); !got.Done || len(r.changing()) == 0 != refused {
					t.Errorf("%v %d: %+v, sent %d times", way, status, got, len(r.changing()))
				}
			})
		}
	}
}

// P6: a refusal says nothing of an attempt before it.
func TestARefusedAttemptIsUndone(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(200)
		task := task(checkpoint.Compensate, undo.Spec{})
		task.Checkpoint.Result.Upstream, task.Checkpoint.Snapshot.First = 400, "ckpt-0"
		if got := r.undo(task); !got.Done || len(r.changing()) != 1 {
			t.Errorf("%+v, sent %d times", got, len(r.changing()))
		}
	})
}

// What a delegate is asked.
func TestDelegateRequest(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(200)
		r.undo(task(checkpoint.Delegate, undo.Spec{Auth: undo.AuthRecorded}))
		o := r.sent[0]
		var body map[string]any
		if err := json.Unmarshal(o.Body, &body); err != nil {
			t.Fatal(err)
		}
		want := map[string]any{"rollback_id": "urn:uuid:" + rollbackID, "checkpoint_id": checkpointID, "phase": "execute", "cascade": true, "reason": "wrong order"}
		if fmt.Sprint(body) != fmt.Sprint(want) {
			t.Errorf("%v", body)
		}
		if o.Method != "POST" || !o.Delegated || o.Recorded || o.Host != "" || o.Reason != "wrong order" || o.Header.Get("Idempotency-Key") != key {
			t.Errorf("%+v", o)
		}
	})
}
