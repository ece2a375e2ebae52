package undo_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// recorded records the checkpoint of a task with the credentials of its call.
func (r *rig) recorded(t undo.Task, credentials map[string][]string, ttl time.Duration) undo.Task {
	r.t.Helper()
	ctx := context.Background()
	p, err := r.vault.Prepare(ctx, *t.Checkpoint.Snapshot, credentials, checkpoint.Terms{TTL: ttl})
	if err != nil {
		r.t.Fatal(err)
	}
	_, err = r.mem.Commit(ctx, p.Writes()...)
	if err := p.Done(err); err != nil {
		r.t.Fatal(err)
	}
	c, err := r.vault.Open(ctx, t.Checkpoint.Snapshot.ID, checkpoint.Want{Sum: p.Sum()})
	if err != nil {
		r.t.Fatal(err)
	}
	c.Result = t.Checkpoint.Result
	t.Checkpoint = c
	return t
}

var secret = map[string][]string{"Authorization": {"Bearer sesame"}, "X-Tenant": {"7"}}

// Recorded credentials go to the upstream of the call, on each request, and nowhere else.
func TestRecordedCredentials(t *testing.T) {
	post := func(url string) undo.Spec {
		return undo.Spec{
			Auth: undo.AuthRecorded, Compensate: &template.Spec{Method: "POST", URL: url, Header: []template.Field{{Name: "X-Tenant", Value: "8"}}},
			Status: &template.Spec{Method: "GET", URL: url},
		}
	}
	for _, c := range []struct {
		spec undo.Spec
		way  checkpoint.Way
		goes bool
	}{
		{post("/refunds"), checkpoint.Compensate, true},
		{post("https://other.example/refunds"), checkpoint.Compensate, false},
		{undo.Spec{Auth: undo.AuthRecorded}, checkpoint.Delegate, false},
		{func() undo.Spec { s := post("/refunds"); s.Auth = undo.AuthConfig; return s }(), checkpoint.Compensate, false},
	} {
		bubble(t, func(t *testing.T, r *rig) {
			task := r.recorded(task(c.way, c.spec), secret, 24*time.Hour)
			r.answers(errLost, 202, 200)
			if got := r.undo(task); !got.Done {
				t.Fatalf("%+v", got)
			}
			for _, o := range r.sent {
				if has := o.Header.Get("Authorization") == "Bearer sesame"; has != c.goes || o.Recorded != c.goes {
					t.Errorf("%s %s: %v, recorded: %v", o.Method, o.URL, has, o.Recorded)
				}
			}
			if o := r.sent[0]; c.way == checkpoint.Compensate && o.Header.Get("X-Tenant") != "8" {
				t.Errorf("what the configuration writes does not win: %v", o.Header)
			}
		})
	}
	bubble(t, func(t *testing.T, r *rig) {
		u := &resource{tags: true}
		r.answer = u.serve
		r.wantsDone(r.recorded(restoring(u, "old", "new", undo.Spec{Auth: undo.AuthRecorded, Verify: true}), secret, 24*time.Hour))
		for _, o := range r.sent {
			if o.Header.Get("Authorization") == "" || !o.Recorded || o.Upstream != "up:9001" {
				t.Errorf("%+v", o)
			}
		}
	})
	bubble(t, func(t *testing.T, r *rig) { // the Location of another origin gets none
		task := r.recorded(task(checkpoint.Compensate, undo.Spec{Auth: undo.AuthRecorded}), secret, 24*time.Hour)
		r.answers(accepted("https://evil.example/"), accepted("/jobs/1"), 200)
		r.wantsDone(task)
		for _, o := range r.sent {
			if !strings.HasPrefix(o.URL, "/") {
				t.Errorf("asked at %s", o.URL)
			}
		}
	})
}

func (r *rig) wantsDone(t undo.Task) {
	r.t.Helper()
	if got := r.undo(t); !got.Done {
		r.t.Errorf("%+v", got)
	}
}

// A call without credentials is undone without: those of the configuration are not asked
// for either.
func TestRecordedWithoutCredentials(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.answers(200)
		r.wantsDone(r.recorded(task(checkpoint.Compensate, undo.Spec{Auth: undo.AuthRecorded}), nil, 24*time.Hour))
		if !r.sent[0].Recorded {
			t.Errorf("%+v", r.sent[0])
		}
	})
}

// Credentials that are gone are no reason to go without.
func TestCredentialsAreGone(t *testing.T) {
	spec := undo.Spec{Auth: undo.AuthRecorded}
	bubble(t, func(t *testing.T, r *rig) {
		u := &resource{}
		r.answer = u.serve
		for _, task := range []undo.Task{task(checkpoint.Compensate, spec), restoring(u, "old", "new", spec)} {
			task.Checkpoint.Snapshot.ID += task.Checkpoint.Snapshot.Way.String()
			task = r.recorded(task, secret, time.Minute)
			r.pass(time.Minute)
			r.wants(task, undo.Result{Reason: undo.ReasonNoCredentials})
		}
		if len(r.sent) > 0 {
			t.Error("sent without")
		}
	})
	bubble(t, func(t *testing.T, r *rig) { // between an attempt and the question what came of it
		spec.Status = status
		task := r.recorded(task(checkpoint.Compensate, spec), secret, time.Minute)
		r.answer = func(*undo.Outgoing) (*undo.Answer, error) {
			r.pass(time.Minute)
			return nil, errLost
		}
		r.wants(task, undo.Result{Unknown: true, Reason: undo.ReasonNoCredentials, Attempts: 1})
	})
	bubble(t, func(t *testing.T, r *rig) { // they are not known to be gone where the store is down
		r.answers(200)
		task := r.recorded(task(checkpoint.Compensate, spec), secret, time.Hour)
		if err := r.mem.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Undo(context.Background(), task); err == nil {
			t.Error("no error")
		}
	})
}

// A key that would be no valid execution id is sent as a hash.
func TestIdempotencyKeyIsValid(t *testing.T) {
	for _, id := range []string{"with space", "a,b", strings.Repeat("x", 300), "é"} {
		bubble(t, func(t *testing.T, r *rig) {
			task := task(checkpoint.Compensate, undo.Spec{})
			task.Checkpoint.Snapshot.ID = id
			r.answers(500, 200)
			r.wantsDone(task)
			a, b := r.sent[0].Header.Get("Idempotency-Key"), r.sent[1].Header.Get("Idempotency-Key")
			if a != b || len(a) != len("undo-")+64 {
				t.Errorf("%q, %q", a, b)
			}
		})
	}
}

func TestSendErrorUnwraps(t *testing.T) {
	err := error(&undo.SendError{Err: http.ErrServerClosed})
	if !errors.Is(err, http.ErrServerClosed) || err.Error() != http.ErrServerClosed.Error() {
		t.Error(err)
	}
}
