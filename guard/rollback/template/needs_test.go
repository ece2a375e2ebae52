package template_test

import (
	"reflect"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// The checkpoint records what the template reads and no more (P8).
func TestNeeds(t *testing.T) {
	for _, c := range []struct {
		spec     template.Spec
		want     template.Needs
		response bool
	}{
		{template.Spec{Method: "DELETE", URL: "/{execution.id}/{workflow.id}/{rollback.id}/{checkpoint.id}"}, template.Needs{}, false},
		{template.Spec{Method: "DELETE", URL: "/{request.path.1}"}, template.Needs{Path: true}, false},
		{template.Spec{Method: "DELETE", URL: "/?x={request.path}"}, template.Needs{Path: true}, false},
		{template.Spec{Method: "DELETE", URL: "/{response.status}"}, template.Needs{Status: true}, true},
		{template.Spec{Method: "DELETE", URL: "/", Header: []template.Field{{"If-Match", "{response.header.etag}"}}}, template.Needs{ResponseHeader: []string{"Etag"}}, true},
		{template.Spec{
			Method: "POST", URL: "/{response.json./b}?x={request.query.q}&y={request.query.p}&z={request.query.q}", ContentType: jsonType,
			Body: `["{response.json./b}",{response.json./a},{request.json./c},{request.header.x-a},{request.header.X-A}]`,
		}, template.Needs{
			Query: []string{"p", "q"}, RequestHeader: []string{"X-A"}, RequestBody: []string{"/c"}, ResponseBody: []string{"/a", "/b"},
		}, true},
	} {
		got := mustParse(t, c.spec).Needs()
		if !reflect.DeepEqual(got, c.want) || got.Response() != c.response {
			t.Errorf("%v: %+v, %v", c.spec, got, got.Response())
		}
	}
}
