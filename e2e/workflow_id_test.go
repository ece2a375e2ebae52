package e2e

import (
	"net/http"
	"strings"
	"testing"
)

// A call never leaves its workflow in silence: a Workflow-Id that is none is refused before
// anything is looked up or forwarded, and says what would be right. Its execution id stays
// free.
func TestWorkflowIDThatIsNone(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	for name, lines := range map[string][]string{
		"a space":          {"order 7"},
		"too long":         {strings.Repeat("w", 256)},
		"not ASCII":        {"pedido-ñ"},
		"more than a line": {"a", "b"},
	} {
		req := g.build(request{path: "/x", id: "k"})
		req.Header["Workflow-Id"] = lines
		res, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got := read(res)
		doc := got.terminal(t, http.StatusBadRequest, "workflow-id-invalid")
		if !strings.Contains(doc.Detail, "Workflow-Id") || doc.SafeNewKey == nil || *doc.SafeNewKey {
			t.Errorf("%s: %s", name, got.body)
		}
	}
	u.arrived("/x", 0)
	g.call(request{path: "/x", id: "k", header: headers{"Workflow-Id": "order-7"}}).want(t, 201, "arrival 1", "executed")
	if got := u.seen["/x"][0].Header.Get("Workflow-Id"); got != "order-7" {
		t.Errorf("the upstream got the workflow %q", got)
	}
}
