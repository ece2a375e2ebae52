package call

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Section "Words": the upstream is told the parent of what the call may cause, and
// the workflow. It gets no Execution-Id, which an agent would hand on.
func TestWhatTheUpstreamReceives(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	for _, row := range []struct {
		name       string
		header     harness.Headers
		id, parent string
		workflow   string
	}{
		{name: "plain", id: "k", parent: "k"},
		{name: "quoted", id: `"k"`, parent: "k"},
		{name: "named", id: "k", parent: "k", header: harness.Headers{"Workflow-Id": "w"}, workflow: "w"},
		{name: "traced", id: "k", parent: "k", header: harness.Headers{"Traceparent": trace}, workflow: "4bf92f3577b34da6a3ce929d0e0e4736"},
		{name: "both", id: "k", parent: "k", header: harness.Headers{"Traceparent": trace, "Workflow-Id": "w"}, workflow: "w"},
		{name: "no-trace", id: "k", parent: "k", header: harness.Headers{"Traceparent": "00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01"}},
		{name: "bad-trace", id: "k", parent: "k", header: harness.Headers{"Traceparent": "00-xyz-1-01"}},
		{name: "child", id: "k", parent: "k", header: harness.Headers{"Execution-Parent": "grandparent"}},
		{name: "own", header: harness.Headers{"Execution-Id": "e"}, parent: "e"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := harness.Request{Path: "/" + row.name, Id: row.id, Header: row.header}
			g.Call(r).Want(t, 201, "arrival 1", "executed")
			got := u.Last(r.Path).Header
			for name, want := range map[string]string{
				"Execution-Parent": row.parent, "Workflow-Id": row.workflow, "Execution-Id": "",
				"Idempotency-Key": row.id, "Traceparent": row.header["Traceparent"], "Content-Type": "application/json",
			} {
				if v := strings.Join(got[name], "|"); v != want {
					t.Errorf("%s is %q, want %q", name, v, want)
				}
			}
		})
	}
	got := g.Call(harness.Request{Path: "/minted"})
	if parent := u.Last("/minted").Header.Get("Execution-Parent"); parent == "" || parent != got.Header.Get("Execution-Id") {
		t.Errorf("minted %q, forwarded %q", got.Header.Get("Execution-Id"), parent)
	}
}

// What is forwarded is else what was sent: line, length, credentials and body.
func TestForwardedRequestIsTheCallers(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	body := "a=1&b=%20"
	g.Call(harness.Request{
		Method: http.MethodPatch, Path: "/a%2Fb/c%20d?q=%2F&q=2", Id: "k", Body: body, Host: "shop.example",
		Header: harness.Headers{"Authorization": "Bearer t", "Content-Type": "application/x-www-form-urlencoded", "X-Any": "1", "Cookie": "c=1"},
	}).Want(t, 201, "arrival 1", "executed")
	got := u.Last("/a%2Fb/c%20d")
	if got.Method != "PATCH" || got.RequestURI != "/a%2Fb/c%20d?q=%2F&q=2" || got.Body != body || got.Host != "shop.example" ||
		got.ContentLength != int64(len(body)) || len(got.TransferEncoding) > 0 {
		t.Errorf("%s %s %s %q %d %v", got.Method, got.Host, got.RequestURI, got.Body, got.ContentLength, got.TransferEncoding)
	}
	for name, want := range map[string]string{
		"Authorization": "Bearer t", "X-Any": "1", "Cookie": "c=1", "Content-Type": "application/x-www-form-urlencoded",
		"X-Forwarded-Host": "shop.example", "X-Forwarded-Proto": "http",
	} {
		if got.Header.Get(name) != want {
			t.Errorf("%s is %q, want %q", name, got.Header.Get(name), want)
		}
	}
}
