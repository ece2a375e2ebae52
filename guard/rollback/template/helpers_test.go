package template_test

import (
	"errors"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

const (
	jsonType = "application/json"
	formType = "application/x-www-form-urlencoded"
)

func mustParse(t testing.TB, spec template.Spec) *template.Template {
	t.Helper()
	tmpl, err := template.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

func mustFill(t testing.TB, tmpl *template.Template, src *template.Source) template.Request {
	t.Helper()
	req, err := tmpl.Fill(src)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// charge is a call that was made and answered.
func charge() *template.Source {
	return &template.Source{
		Path: "/v1/customers/c%207/charges", Query: "currency=eur&note=a%26b+c&tag=1&tag=2&empty=",
		Request: template.Message{
			Header:      http.Header{"X-Tenant": {"acme"}, "X-Many": {"a", "b"}, "X-Empty": {""}},
			ContentType: "application/json; charset=utf-8",
			Body:        []byte(`{"amount":12345678901234567890,"to":{"name":"Zoë \"Z\""},"live":true}`),
		},
		Status: 201,
		Response: template.Message{
			Header:      http.Header{"Etag": {`"v1"`}, "Location": {"/v1/charges/ch_7"}},
			ContentType: "application/vnd.api+json",
			Body:        []byte(`{"id":"ch_7","fee":1e400,"seq":7,"void":false,"gone":null,"lines":[{"id":"l0"},{"id":"l1"}]}`),
		},
		ExecutionID: "exec-1", WorkflowID: "wf-1", RollbackID: "rb-1", CheckpointID: "cp-1",
	}
}

// with puts a value where {response.header.X-Value} finds it.
func with(value string) *template.Source {
	src := charge()
	src.Response.Header["X-Value"] = []string{value}
	return src
}

// reason is the sentinel in a FillError.
func reason(t *testing.T, err error) error {
	t.Helper()
	var fill *template.FillError
	if err == nil || !errors.As(err, &fill) {
		t.Fatalf("%v is no *FillError", err)
	}
	return fill.Err
}
