package template_test

import (
	"errors"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// Bodies out of names and values are what they would be written by hand, whatever the
// text in them is.
func TestFields(t *testing.T) {
	fields := []template.Field{
		{Name: "charge", Value: "{response.json./id}"},
		{Name: "amount", Value: "{request.json./amount}"},
		{Name: "note \"&=\"", Value: "a=\"{{b}}\"&\\\n é {response.status}%"},
		{Name: "by", Value: "{rollback.id}{checkpoint.id}"},
		{Name: "empty"},
	}
	for _, c := range []struct {
		contentType string
		write       func([]template.Field) (string, error)
		want, none  string
	}{
		{jsonType, template.JSONObject, `{"charge":"ch_7","amount":12345678901234567890,"note \"&=\"":"a=\"{b}\"&\\\n é 201%","by":"rb-1cp-1","empty":""}`, "{{}}"},
		{formType, template.Form, `charge=ch_7&amount=12345678901234567890&note%20%22%26%3D%22=a%3D%22%7Bb%7D%22%26%5C%0A%20%C3%A9%20201%25&by=rb-1cp-1&empty=`, ""},
	} {
		body, err := c.write(fields)
		if err != nil {
			t.Fatal(err)
		}
		tmpl := mustParse(t, template.Spec{Method: "POST", URL: "/", ContentType: c.contentType, Body: body})
		if got := string(mustFill(t, tmpl, charge()).Body); got != c.want {
			t.Errorf("%s\nwant\n%s", got, c.want)
		}
		if none, err := c.write(nil); err != nil || none != c.none {
			t.Errorf("no fields: %q, %v", none, err)
		}
		for _, bad := range []template.Field{
			{Name: "{execution.id}", Value: "x"}, {Name: "x{{", Value: "x"}, {Name: "\xff", Value: "x"}, {Name: "x", Value: "\xff"},
			{Name: "x", Value: "{response.body./id}"}, {Name: "x", Value: "{"},
		} {
			var parse *template.ParseError
			if body, err := c.write([]template.Field{bad}); !errors.As(err, &parse) || body != "" {
				t.Errorf("%q: %q, %v", bad, body, err)
			}
		}
	}
}
