package rollback_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// What is recorded today is read for as long as a checkpoint stands: the form is fixed.
func TestSpecForm(t *testing.T) {
	for form, spec := range map[string]rollback.Spec{
		`{"guard":"default","on_lost":"resend","on_changed":"overwrite","auth":"recorded","verify":true}`: {
			Guard: "default", OnLost: rollback.Resend, OnChanged: rollback.Overwrite, Auth: rollback.AuthRecorded, Verify: true,
		},
		`{"guard":"g","execution_id":"e","compensate":{"Method":"POST","URL":"/r/{execution.id}","Header":[{"Name":"A","Value":"b"}],` +
			`"ContentType":"text/plain","Body":"x"},"status":{"Method":"GET","URL":"/r","Header":null,"ContentType":"","Body":""},` +
			`"on_lost":"escalate","auth":"config"}`: {
			Guard: "g", ExecutionID: "e", Compensate: &template.Spec{
				Method: "POST", URL: "/r/{execution.id}", Header: []template.Field{{Name: "A", Value: "b"}}, ContentType: "text/plain", Body: "x",
			}, Status: &template.Spec{Method: "GET", URL: "/r"}, OnLost: rollback.UndoEscalate, Auth: rollback.AuthConfig,
		},
		`{"guard":"g","delegate":"https://agent.example/rollback","on_lost":"","auth":""}`: {Guard: "g", Delegate: "https://agent.example/rollback"},
	} {
		if got := string(spec.Encode()); got != form {
			t.Errorf("wrote %s\nwant  %s", got, form)
		}
		got, err := rollback.ParseSpec([]byte(form))
		if err != nil || !reflect.DeepEqual(*got, spec) {
			t.Errorf("%s: %+v, %v", form, got, err)
		}
	}
}

func TestSpecIsChecked(t *testing.T) {
	post, get := &template.Spec{Method: "POST", URL: "/r"}, &template.Spec{Method: "GET", URL: "/r"}
	for _, c := range []struct {
		spec rollback.Spec
		says string
	}{
		{rollback.Spec{}, "name is missing"},
		{rollback.Spec{Guard: "g", Compensate: post, Delegate: "https://a/"}, "exclude"},
		{rollback.Spec{Guard: "g", Status: get}, "compensate and delegate only"},
		{rollback.Spec{Guard: "g", Compensate: post, Status: post}, "GET"},
		{rollback.Spec{Guard: "g", Compensate: &template.Spec{Method: "POST", URL: "/{nobody.knows}"}}, "compensate"},
		{rollback.Spec{Guard: "g", Compensate: post, Status: &template.Spec{Method: "GET", URL: "r"}}, "status"},
		{rollback.Spec{Guard: "g", OnLost: "retry"}, "on_lost"},
		{rollback.Spec{Guard: "g", OnChanged: "resend"}, "on_changed"},
		{rollback.Spec{Guard: "g", Auth: "requester"}, "auth"},
		{rollback.Spec{Guard: "g", Delegate: "/rollback"}, "delegate"},
		{rollback.Spec{Guard: "g", Delegate: "ftp://a/rollback"}, "delegate"},
		{rollback.Spec{Guard: "g", Delegate: "https://user:pass@a/rollback"}, "delegate"},
		{rollback.Spec{Guard: "g", Delegate: "https:///rollback"}, "delegate"},
	} {
		err := c.spec.Check()
		if !errors.Is(err, rollback.ErrSpec) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c.spec, err)
		}
		if _, parsed := rollback.ParseSpec(c.spec.Encode()); !errors.Is(parsed, rollback.ErrSpec) {
			t.Errorf("%+v is parsed: %v", c.spec, parsed)
		}
		if _, needs := c.spec.Needs(); !errors.Is(needs, rollback.ErrSpec) {
			t.Errorf("%+v: %v", c.spec, needs)
		}
	}
	for _, text := range []string{``, `null`, `[]`, `{"guard":"g"} x`, `{"guard":"g"}{}`, `{"guard":7}`, `{"guard":"g","more":1}`, `{"guard":"g","compensate":{"Verb":"POST"}}`} {
		if _, err := rollback.ParseSpec([]byte(text)); !errors.Is(err, rollback.ErrSpec) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// What must be recorded is what one of the two templates reads.
func TestSpecNeeds(t *testing.T) {
	spec := rollback.Spec{
		Guard:      "g",
		Compensate: &template.Spec{Method: "POST", URL: "/r/{response.json./id}?a={request.query.b}", Header: []template.Field{{Name: "X", Value: "{request.header.A}{response.header.ETag}"}}},
		Status:     &template.Spec{Method: "GET", URL: "/r/{request.path.0}/{response.json./id}/{request.json./n}/{response.status}?a={request.query.a}"},
	}
	got, err := spec.Needs()
	want := template.Needs{
		Path: true, Status: true, Query: []string{"a", "b"}, RequestHeader: []string{"A"}, ResponseHeader: []string{"Etag"},
		RequestBody: []string{"/n"}, ResponseBody: []string{"/id"},
	}
	if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := (&rollback.Spec{Guard: "g"}).Needs(); err != nil || fmt.Sprint(got) != fmt.Sprint(template.Needs{}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// Whatever stands in the store is read or refused, and what is read is written the same.
func FuzzParseSpec(f *testing.F) {
	f.Add([]byte(`{"guard":"g","delegate":"https://agent.example/rollback","on_lost":"","auth":""}`))
	f.Add([]byte(`{"guard":"g","compensate":{"Method":"POST","URL":"/r/{execution.id}"},"on_lost":"resend","auth":"config"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		spec, err := rollback.ParseSpec(b)
		if err != nil {
			return
		}
		again, err := rollback.ParseSpec(spec.Encode())
		if err != nil || string(again.Encode()) != string(spec.Encode()) {
			t.Errorf("%s: %v", spec.Encode(), err)
		}
	})
}

// recorded records the checkpoint of a task with the credentials of its call.
func (r *undoRig) recorded(t rollback.Task, credentials map[string][]string, ttl time.Duration) rollback.Task {
	r.t.Helper()
	ctx := context.Background()
	p, err := r.checkpoints.Prepare(ctx, *t.Checkpoint.Snapshot, credentials, checkpoint.Terms{TTL: ttl})
	if err != nil {
		r.t.Fatal(err)
	}
	_, err = r.mem.Commit(ctx, p.Writes()...)
	if err := p.Done(err); err != nil {
		r.t.Fatal(err)
	}
	c, err := r.checkpoints.Open(ctx, t.Checkpoint.Snapshot.ID, checkpoint.Want{Sum: p.Sum()})
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
	post := func(url string) rollback.Spec {
		return rollback.Spec{
			Auth: rollback.AuthRecorded, Compensate: &template.Spec{Method: "POST", URL: url, Header: []template.Field{{Name: "X-Tenant", Value: "8"}}},
			Status: &template.Spec{Method: "GET", URL: url},
		}
	}
	for _, c := range []struct {
		spec rollback.Spec
		way  checkpoint.Way
		goes bool
	}{
		{post("/refunds"), checkpoint.Compensate, true},
		{post("https://other.example/refunds"), checkpoint.Compensate, false},
		{rollback.Spec{Auth: rollback.AuthRecorded}, checkpoint.Delegate, false},
		{func() rollback.Spec { s := post("/refunds"); s.Auth = rollback.AuthConfig; return s }(), checkpoint.Compensate, false},
	} {
		bubble(t, func(t *testing.T, r *undoRig) {
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
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{tags: true}
		r.answer = u.serve
		r.wantsDone(r.recorded(restoring(u, "old", "new", rollback.Spec{Auth: rollback.AuthRecorded, Verify: true}), secret, 24*time.Hour))
		for _, o := range r.sent {
			if o.Header.Get("Authorization") == "" || !o.Recorded || o.Spec == nil || o.Spec.Guard != o.Guard {
				t.Errorf("%+v", o)
			}
		}
	})
	bubble(t, func(t *testing.T, r *undoRig) { // the Location of another origin gets none
		task := r.recorded(task(checkpoint.Compensate, rollback.Spec{Auth: rollback.AuthRecorded}), secret, 24*time.Hour)
		r.answers(accepted("https://evil.example/"), accepted("/jobs/1"), 200)
		r.wantsDone(task)
		for _, o := range r.sent {
			if !strings.HasPrefix(o.URL, "/") {
				t.Errorf("asked at %s", o.URL)
			}
		}
	})
}

func (r *undoRig) wantsDone(t rollback.Task) {
	r.t.Helper()
	if got := r.undo(t); !got.Done {
		r.t.Errorf("%+v", got)
	}
}

// A call without credentials is undone without: those of the configuration are not asked
// for either.
func TestRecordedWithoutCredentials(t *testing.T) {
	bubble(t, func(t *testing.T, r *undoRig) {
		r.answers(200)
		r.wantsDone(r.recorded(task(checkpoint.Compensate, rollback.Spec{Auth: rollback.AuthRecorded}), nil, 24*time.Hour))
		if !r.sent[0].Recorded {
			t.Errorf("%+v", r.sent[0])
		}
	})
}

// Credentials that are gone are no reason to go without.
func TestCredentialsAreGone(t *testing.T) {
	spec := rollback.Spec{Auth: rollback.AuthRecorded}
	bubble(t, func(t *testing.T, r *undoRig) {
		u := &resource{}
		r.answer = u.serve
		for _, task := range []rollback.Task{task(checkpoint.Compensate, spec), restoring(u, "old", "new", spec)} {
			task.Checkpoint.Snapshot.ID += task.Checkpoint.Snapshot.Way.String()
			task = r.recorded(task, secret, time.Minute)
			r.pass(time.Minute)
			r.wants(task, rollback.Result{Reason: rollback.ReasonNoCredentials})
		}
		if len(r.sent) > 0 {
			t.Error("sent without")
		}
	})
	bubble(t, func(t *testing.T, r *undoRig) { // between an attempt and the question what came of it
		spec.Status = status
		task := r.recorded(task(checkpoint.Compensate, spec), secret, time.Minute)
		r.answer = func(*rollback.Outgoing) (*rollback.Answer, error) {
			r.pass(time.Minute)
			return nil, errLost
		}
		r.wants(task, rollback.Result{Unknown: true, Reason: rollback.ReasonNoCredentials, Attempts: 1})
	})
	bubble(t, func(t *testing.T, r *undoRig) { // they are not known to be gone where the store is down
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
		bubble(t, func(t *testing.T, r *undoRig) {
			task := task(checkpoint.Compensate, rollback.Spec{})
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
	err := error(&rollback.SendError{Err: http.ErrServerClosed})
	if !errors.Is(err, http.ErrServerClosed) || err.Error() != http.ErrServerClosed.Error() {
		t.Error(err)
	}
}

// A plan is approved by people: each way has words, and no value of the call or its answer.
func TestDescribe(t *testing.T) {
	compensate := rollback.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/v1/charges/{response.json./id}/refund?why=x"}}
	delegate := rollback.Spec{Guard: "default", Delegate: "https://agent.example/rollback"}
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
		if got := rollback.Describe(&c.call, c.result); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A charge is undone by a refund. Its answer is recorded, so that asking for the same
// undo again sends nothing.
func ExampleUndo() {
	ctx := context.Background()
	st, ring := memory.New(memory.Options{}), seal.Generate()
	g, _, err := execution.Open(ctx, st, ring)
	if err != nil {
		panic(err)
	}
	undoer := rollback.NewUndoer(rollback.UndoerOptions{Guard: g, Checkpoints: checkpoint.New(st, ring), Sender: senderFunc(
		func(_ context.Context, o *rollback.Outgoing) (*rollback.Answer, error) {
			fmt.Println(o.Method, o.URL, o.Header.Get("Idempotency-Key"))
			return &rollback.Answer{Status: 201}, nil
		})})

	how := rollback.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/v1/charges/{response.json./id}/refunds"}}
	charge := &checkpoint.Checkpoint{
		Snapshot: &checkpoint.Snapshot{ID: "ckpt-7", Way: checkpoint.Compensate, Undo: how.Encode()},
		Result:   &checkpoint.Result{Status: 201, Answer: checkpoint.Message{Body: []byte(`{"id": "ch_1"}`)}},
	}
	for range 2 {
		result, err := undoer.Undo(ctx, rollback.Task{Rollback: "3f0e8d5a", Checkpoint: charge, Due: time.Now().Add(time.Hour)})
		fmt.Println("done:", result.Done, result.Status, err)
	}
	// Output:
	// POST /v1/charges/ch_1/refunds 3f0e8d5a/ckpt-7
	// done: true 201 <nil>
	// done: true 201 <nil>
}
