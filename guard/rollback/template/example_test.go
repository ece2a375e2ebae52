package template_test

import (
	"fmt"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

// A charge is compensated by a refund of what it took.
func Example() {
	refund, err := template.Parse(template.Spec{
		Method:      "POST",
		URL:         "/v1/charges/{response.json./id}/refunds?reason={checkpoint.id}",
		Header:      []template.Field{{Name: "If-Match", Value: "{response.header.ETag}"}},
		ContentType: "application/json",
		Body:        `{{"amount":{request.json./amount},"note":"undone by {rollback.id}"}}`,
	})
	if err != nil {
		panic(err)
	}
	fmt.Println("needs the response:", refund.Needs().Response())

	call := &template.Source{
		Path:       "/v1/charges",
		Request:    template.Message{ContentType: "application/json", Body: []byte(`{"amount": 12.50}`)},
		Status:     http.StatusCreated,
		Response:   template.Message{Header: http.Header{"Etag": {`"7"`}}, Body: []byte(`{"id": "ch_1"}`)},
		RollbackID: "rb-3", CheckpointID: "cp 9&x=1",
	}
	req, err := refund.Fill(call)
	if err != nil {
		panic(err)
	}
	fmt.Println(req.Method, req.URL)
	fmt.Println("If-Match:", req.Header.Get("If-Match"))
	fmt.Println(string(req.Body))

	// An upstream cannot choose another path.
	call.Response.Body = []byte(`{"id": "../../accounts/1"}`)
	_, err = refund.Fill(call)
	fmt.Println(err)
	// Output:
	// needs the response: true
	// POST /v1/charges/ch_1/refunds?reason=cp%209%26x%3D1
	// If-Match: "7"
	// {"amount":12.50,"note":"undone by rb-3"}
	// {response.json./id} as a path segment: the value cannot stand in this place
}
