package undo_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// What is recorded today is read for as long as a checkpoint stands: the form is fixed.
func TestSpecForm(t *testing.T) {
	for form, spec := range map[string]undo.Spec{
		`{"guard":"default","on_lost":"resend","on_changed":"overwrite","auth":"recorded","verify":true}`: {
			Guard: "default", OnLost: undo.Resend, OnChanged: undo.Overwrite, Auth: undo.AuthRecorded, Verify: true,
		},
		`{"guard":"g","execution_id":"e","compensate":{"Method":"POST","URL":"/r/{execution.id}","Header":[{"Name":"A","Value":"b"}],` +
			`"ContentType":"text/plain","Body":"x"},"status":{"Method":"GET","URL":"/r","Header":null,"ContentType":"","Body":""},` +
			`"on_lost":"escalate","auth":"config"}`: {
			Guard: "g", ExecutionID: "e", Compensate: &template.Spec{
				Method: "POST", URL: "/r/{execution.id}", Header: []template.Field{{Name: "A", Value: "b"}}, ContentType: "text/plain", Body: "x",
			}, Status: &template.Spec{Method: "GET", URL: "/r"}, OnLost: undo.Escalate, Auth: undo.AuthConfig,
		},
		`{"guard":"g","delegate":"https://agent.example/rollback","on_lost":"","auth":""}`: {Guard: "g", Delegate: "https://agent.example/rollback"},
	} {
		if got := string(spec.Encode()); got != form {
			t.Errorf("wrote %s\nwant  %s", got, form)
		}
		got, err := undo.ParseSpec([]byte(form))
		if err != nil || !reflect.DeepEqual(*got, spec) {
			t.Errorf("%s: %+v, %v", form, got, err)
		}
	}
}

func TestSpecIsChecked(t *testing.T) {
	post, get := &template.Spec{Method: "POST", URL: "/r"}, &template.Spec{Method: "GET", URL: "/r"}
	for _, c := range []struct {
		spec undo.Spec
		says string
	}{
		{undo.Spec{}, "name is missing"},
		{undo.Spec{Guard: "g", Compensate: post, Delegate: "https://a/"}, "exclude"},
		{undo.Spec{Guard: "g", Status: get}, "compensate and delegate only"},
		{undo.Spec{Guard: "g", Compensate: post, Status: post}, "GET"},
		{undo.Spec{Guard: "g", Compensate: &template.Spec{Method: "POST", URL: "/{nobody.knows}"}}, "compensate"},
		{undo.Spec{Guard: "g", Compensate: post, Status: &template.Spec{Method: "GET", URL: "r"}}, "status"},
		{undo.Spec{Guard: "g", OnLost: "retry"}, "on_lost"},
		{undo.Spec{Guard: "g", OnChanged: "resend"}, "on_changed"},
		{undo.Spec{Guard: "g", Auth: "requester"}, "auth"},
		{undo.Spec{Guard: "g", Delegate: "/rollback"}, "delegate"},
		{undo.Spec{Guard: "g", Delegate: "ftp://a/rollback"}, "delegate"},
		{undo.Spec{Guard: "g", Delegate: "https://user:pass@a/rollback"}, "delegate"},
		{undo.Spec{Guard: "g", Delegate: "https:///rollback"}, "delegate"},
	} {
		err := c.spec.Check()
		if !errors.Is(err, undo.ErrSpec) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c.spec, err)
		}
		if _, parsed := undo.ParseSpec(c.spec.Encode()); !errors.Is(parsed, undo.ErrSpec) {
			t.Errorf("%+v is parsed: %v", c.spec, parsed)
		}
		if _, needs := c.spec.Needs(); !errors.Is(needs, undo.ErrSpec) {
			t.Errorf("%+v: %v", c.spec, needs)
		}
	}
	for _, text := range []string{``, `null`, `[]`, `{"guard":"g"} x`, `{"guard":"g"}{}`, `{"guard":7}`, `{"guard":"g","more":1}`, `{"guard":"g","compensate":{"Verb":"POST"}}`} {
		if _, err := undo.ParseSpec([]byte(text)); !errors.Is(err, undo.ErrSpec) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// What must be recorded is what one of the two templates reads.
func TestSpecNeeds(t *testing.T) {
	spec := undo.Spec{
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
	if got, err := (&undo.Spec{Guard: "g"}).Needs(); err != nil || fmt.Sprint(got) != fmt.Sprint(template.Needs{}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// Whatever stands in the store is read or refused, and what is read is written the same.
func FuzzParseSpec(f *testing.F) {
	f.Add([]byte(`{"guard":"g","delegate":"https://agent.example/rollback","on_lost":"","auth":""}`))
	f.Add([]byte(`{"guard":"g","compensate":{"Method":"POST","URL":"/r/{execution.id}"},"on_lost":"resend","auth":"config"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		spec, err := undo.ParseSpec(b)
		if err != nil {
			return
		}
		again, err := undo.ParseSpec(spec.Encode())
		if err != nil || string(again.Encode()) != string(spec.Encode()) {
			t.Errorf("%s: %v", spec.Encode(), err)
		}
	})
}
