package undo_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// A lost answer is asked for where there is somebody to ask: the compensation itself is
// sent once.
func TestLostAnswerIsAskedFor(t *testing.T) {
	for _, c := range []struct {
		answers []any
		want    undo.Result
		sent    int
	}{
		{[]any{errLost, 200}, undo.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{500, 410}, undo.Result{Done: true, Status: 410, Attempts: 1}, 1},
		{[]any{errLost, errLost, errUnsent, 503, 429, 202, 202, 204}, undo.Result{Done: true, Status: 204, Attempts: 1}, 1},
		{[]any{errLost, 409}, undo.Result{Reason: undo.ReasonRefused, Status: 409, Attempts: 1}, 1},
		{[]any{errLost, "FailedToCompensate"}, undo.Result{Reason: undo.ReasonRefused, Status: 200, Attempts: 1}, 1},
		// P6: an upstream that knows the refund need not have made it.
		{[]any{`{"id": "re_1", "status": "failed"}`}, undo.Result{Reason: undo.ReasonRefused, Status: 200, Attempts: 1}, 1},
		{[]any{`{"id": "order", "status": "canceled"}`}, undo.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, `{"status": "pending"}`, `{"status": "succeeded"}`}, undo.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, `{"status": "failed"}`}, undo.Result{Reason: undo.ReasonRefused, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, `{"status":"Compensating"}`, `"Compensated"`}, undo.Result{Done: true, Status: 200, Attempts: 1}, 1},
		{[]any{errLost, 403}, undo.Result{Unknown: true, Reason: undo.ReasonUnauthorized, Attempts: 1}, 1},
		{[]any{errLost, 418}, undo.Result{Unknown: true, Reason: undo.ReasonUnexpected, Attempts: 1}, 1},
		// Nothing has arrived: sent again.
		{[]any{errLost, 404, 200}, undo.Result{Done: true, Status: 200, Attempts: 2}, 2},
		{[]any{errLost, "Active", 200}, undo.Result{Done: true, Status: 200, Attempts: 2}, 2},
		// 202 without a Location: the status is asked for.
		{[]any{202, 202, 200}, undo.Result{Done: true, Status: 200, Attempts: 1}, 1},
	} {
		t.Run(fmt.Sprint(c.answers...), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(c.answers...)
				r.wants(task(checkpoint.Compensate, undo.Spec{Status: status}), c.want)
				if len(r.changing()) != c.sent {
					t.Errorf("sent %d times", len(r.changing()))
				}
				for _, o := range r.sent {
					if o.Method == http.MethodGet && (o.URL != "/refunds/"+rollbackID || o.Host != "api.example") {
						t.Errorf("asked %+v", o)
					}
				}
			})
		})
	}
	bubble(t, func(t *testing.T, r *rig) { // the status tells later, in another life
		r.answers(errLost, 500)
		task := task(checkpoint.Compensate, undo.Spec{Status: status, OnLost: undo.Escalate})
		r.wants(task, undo.Result{Unknown: true, Reason: undo.ReasonTimeout, Attempts: 1})
		r.restart(-1)
		r.answers(200)
		r.wants(task, undo.Result{Done: true, Status: 200, Attempts: 1})
		r.restart(-1)
		asked := r.asked()
		r.wants(task, undo.Result{Done: true, Status: 200, Attempts: 1})
		if len(r.changing()) != 1 || r.asked() != asked {
			t.Errorf("sent %d times, asked %d times more", len(r.changing()), r.asked()-asked)
		}
	})
}

// With on_lost escalate nothing that is in doubt is sent again.
func TestOnLostEscalate(t *testing.T) {
	for _, answer := range []any{errLost, 500, 408, 202} {
		for _, spec := range []undo.Spec{{OnLost: undo.Escalate}, {OnLost: undo.Escalate, Status: status}} {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(answer, 404)
				for range 2 {
					got := r.undo(task(checkpoint.Compensate, spec))
					if got.Done || !got.Unknown || got.Reason != undo.ReasonLost || got.Attempts != 1 || len(r.changing()) != 1 {
						t.Errorf("%v: %+v", answer, got)
					}
					r.restart(-1)
				}
			})
		}
	}
	bubble(t, func(t *testing.T, r *rig) { // what was not executed is sent again
		r.answers(429, errUnsent, 200)
		r.wants(task(checkpoint.Compensate, undo.Spec{OnLost: undo.Escalate}), undo.Result{Done: true, Status: 200, Attempts: 2})
	})
}

// 202: called once, then asked for where its Location leads, if that is the same origin.
func TestAccepted(t *testing.T) {
	for _, c := range []struct {
		way      checkpoint.Way
		location string
		asked    string
	}{
		{checkpoint.Compensate, "/jobs/1?x=2", "/jobs/1?x=2"},
		{checkpoint.Compensate, "jobs/1", "/jobs/1"},
		{checkpoint.Compensate, "http://api.example/jobs/1#f", "/jobs/1"},
		{checkpoint.Compensate, "//API.example/jobs/1", "/jobs/1"},
		{checkpoint.Compensate, "http://evil.example/jobs/1", ""},
		{checkpoint.Compensate, "//evil.example/jobs/1", ""},
		{checkpoint.Compensate, "ftp://api.example/jobs/1", ""},
		{checkpoint.Compensate, "http://user@api.example/jobs/1", ""},
		{checkpoint.Compensate, "mailto:jobs", ""},
		{checkpoint.Compensate, "/jobs/\x01", ""},
		{checkpoint.Delegate, "/jobs/1", "https://agent.example/jobs/1"},
		{checkpoint.Delegate, "https://agent.example/jobs/1", "https://agent.example/jobs/1"},
		{checkpoint.Delegate, "http://agent.example/jobs/1", ""},
		{checkpoint.Delegate, "https://agent.example:8443/jobs/1", ""},
	} {
		t.Run(c.way.String()+" "+c.location, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.answers(accepted(c.location), 202, 500, errLost, later(202, "100"), 200)
				began := time.Now()
				want := undo.Result{Done: true, Status: 200, Attempts: 1}
				if c.asked == "" { // sent again under the same key
					want.Attempts = 6
					r.wants(task(c.way, undo.Spec{}), want)
					if len(r.changing()) != 6 {
						t.Errorf("sent %d times", len(r.changing()))
					}
					return
				}
				r.wants(task(c.way, undo.Spec{}), want)
				if took := time.Since(began); took != 130*time.Second { // 2 + 4 + 8 + 16 + 100
					t.Errorf("took %v", took)
				}
				for i, o := range r.sent {
					if i > 0 && (o.Method != http.MethodGet || o.URL != c.asked || o.Delegated != (c.way == checkpoint.Delegate)) {
						t.Errorf("asked %+v", o)
					}
				}
				// Another life asks, and sends nothing.
				r.restart(-1)
				r.wants(task(c.way, undo.Spec{}), want)
				if len(r.changing()) != 1 {
					t.Errorf("sent %d times", len(r.changing()))
				}
			})
		})
	}
	bubble(t, func(t *testing.T, r *rig) { // who lost the job does not say what came of it
		r.answers(accepted("/jobs/1"), 404)
		r.wants(task(checkpoint.Compensate, undo.Spec{}), undo.Result{Unknown: true, Reason: undo.ReasonUnexpected, Status: 202, Attempts: 1})
	})
}
