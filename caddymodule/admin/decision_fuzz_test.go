package admin_test

import (
	"net/http"
	"net/textproto"
	"testing"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
)

// Whatever is taken for a decision can be recorded, and its answer replayed.
func FuzzDecision(f *testing.F) {
	for _, seed := range []string{
		`{"decision": "not_applied", "operator": "ada", "reason": "none"}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": {"status": 204}}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": {"status": 201, "header": {"content-type": ["text/plain"]}, "body": "ok"}}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": {"status": 200, "header": {"Content-Length": ["1"]}, "body_base64": "/w=="}}`,
		`{"decision": "applied", "operator": "ada", "reason": "x", "result": null}`,
		"\xff", `[]`, `{`, ``,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, head, body, err := admin.ReadDecision(text)
		if err != nil {
			return
		}
		if d.Decision != admin.DecisionApplied && d.Decision != admin.DecisionNotApplied || d.Operator == "" || d.Reason == "" {
			t.Fatalf("taken for a decision: %+v", d)
		}
		if !utf8.ValidString(d.Operator + d.Reason) {
			t.Errorf("%q, %q are logged", d.Operator, d.Reason)
		}
		if head == nil {
			if body != nil {
				t.Errorf("a body of %d bytes without an answer", len(body))
			}
			return
		}
		if d.Decision == admin.DecisionNotApplied || head.Status < 200 || head.Status > 599 {
			t.Errorf("%s with the status %d", d.Decision, head.Status)
		}
		replayed := answer.Replayable(head.Header)
		for name, values := range head.Header {
			if name != textproto.CanonicalMIMEHeaderKey(name) || !httpguts.ValidHeaderFieldName(name) || len(replayed[name]) != len(values) {
				t.Errorf("%q cannot be replayed", name)
			}
			for _, value := range values {
				if !httpguts.ValidHeaderFieldValue(value) {
					t.Errorf("%s: %q cannot be replayed", name, value)
				}
			}
		}
		if (head.Status == http.StatusNoContent || head.Status == http.StatusNotModified) && len(body) > 0 {
			t.Errorf("%d with a body", head.Status)
		}
	})
}
