package caddymodule_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
)

func compile(t *testing.T, w caddymodule.Ways) *guard.UndoPlan {
	t.Helper()
	fields := body.NewFields()
	fields.Set(body.Credential, "X-Tenant")
	p, err := caddymodule.Compile(&w, &caddymodule.DefaultTerms, "tools", fields)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

var refund = &caddymodule.Compensation{
	Request: caddymodule.Request{Method: "POST", URL: "/refunds/{request.path.1}", Header: map[string]string{
		"Authorization": "Bearer {env.UNDO_TOKEN}", "X-Version": "7",
	}},
	JSON: map[string]string{"id": "{response.json./data/0/id}", "amount": "{request.json./amount}", "by": "{request.header.X-By}"},
}

func call(body string) *template.Source {
	return &template.Source{
		Path: "/charges/a", ExecutionID: "k", WorkflowID: "w", CheckpointID: "c",
		Request: template.Message{Header: http.Header{"X-By": {"me"}, "Accept": {"a/b"}, "X-Other": {"x"}}, ContentType: "application/json", Body: []byte(body)},
	}
}

// C-4.1.2-a, -b: what stood there is put back where that is known; a compensation is for
// what cannot be. What can be done neither way is irreversible, and says why.
func TestDecide(t *testing.T) {
	both := caddymodule.Ways{Restore: &caddymodule.Restore{}, Compensate: refund}
	for name, c := range map[string]struct {
		ways   caddymodule.Ways
		method string
		body   string
		imaged bool
		way    checkpoint.Way
		reason checkpoint.Reason
	}{
		"restored":                 {caddymodule.Ways{Restore: &caddymodule.Restore{}}, "PUT", "", true, checkpoint.Restore, ""},
		"no image":                 {caddymodule.Ways{Restore: &caddymodule.Restore{}}, "DELETE", "", false, checkpoint.Irreversible, checkpoint.ReasonNoImage},
		"a method without a state": {caddymodule.Ways{Restore: &caddymodule.Restore{}}, "POST", "", false, checkpoint.Irreversible, checkpoint.ReasonMethod},
		"both, restored":           {both, "PATCH", `{}`, true, checkpoint.Restore, ""},
		"both, no image":           {both, "PATCH", `{"amount":1}`, false, checkpoint.Compensate, ""},
		"both, by method":          {both, "POST", `{"amount":1}`, false, checkpoint.Compensate, ""},
		"compensated":              {caddymodule.Ways{Compensate: refund}, "POST", `{"amount":1}`, false, checkpoint.Compensate, ""},
		"a value is absent":        {caddymodule.Ways{Compensate: refund}, "POST", `{"sum":1}`, false, checkpoint.Irreversible, checkpoint.ReasonAbsent},
		"a value is no scalar":     {caddymodule.Ways{Compensate: refund}, "POST", `{"amount":[1]}`, false, checkpoint.Irreversible, checkpoint.ReasonAbsent},
		"delegated":                {caddymodule.Ways{Delegate: "https://a.example.com/rollback", DelegateUnsigned: true}, "POST", "", false, checkpoint.Delegate, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := compile(t, c.ways)
			d := p.Decide(c.method, call(c.body), c.imaged)
			if d.Way != c.way || d.Reason != c.reason {
				t.Fatalf("%v %q, want %v %q", d.Way, d.Reason, c.way, c.reason)
			}
			if d.Way == checkpoint.Irreversible {
				if d.Undo != nil || d.Request.Body != nil || d.Request.Header != nil {
					t.Errorf("something is kept of what cannot be undone: %+v", d)
				}
				return
			}
			spec, err := rollback.ParseSpec(d.Undo)
			if err != nil || spec.Guard != "tools" || spec.ExecutionID != "k" || spec.OnLost != rollback.Resend || spec.Auth != rollback.AuthConfig {
				t.Errorf("%s: %v", d.Undo, err)
			}
			if (spec.Compensate != nil) != (d.Way == checkpoint.Compensate) || spec.Verify != (d.Way == checkpoint.Restore) {
				t.Errorf("%s", d.Undo)
			}
		})
	}
}

// P8: what is recorded of a call is what its undo needs, and nothing of the
// configuration's credentials.
func TestP8OnlyWhatIsNeededIsRecorded(t *testing.T) {
	t.Setenv("UNDO_TOKEN", "sesame")
	p := compile(t, caddymodule.Ways{Compensate: refund})
	d := p.Decide("POST", call(`{"amount":12.50}`), false)
	if len(d.Request.Header) != 1 || d.Request.Header["X-By"][0] != "me" || string(d.Request.Body) != `{"amount":12.50}` {
		t.Errorf("%+v", d.Request)
	}
	spec, err := rollback.ParseSpec(d.Undo)
	if err != nil || len(spec.Compensate.Header) != 1 || spec.Compensate.Header[0] != (template.Field{Name: "X-Version", Value: "7"}) {
		t.Errorf("%+v, %v", spec.Compensate, err)
	}
	for url, want := range map[string]string{"/refunds/a": "Bearer sesame", "https://other.example.com/refunds/a": "", "//x": "Bearer sesame"} {
		if header, err := caddymodule.Fields(p.Spec.Fields, url); err != nil || header.Get("Authorization") != want {
			t.Errorf("%s: %v, %v", url, header, err)
		}
	}
	if err := caddymodule.Unset(p); err != nil {
		t.Error(err)
	}
	t.Setenv("UNDO_TOKEN", "")
	if header, err := caddymodule.Fields(p.Spec.Fields, "/"); err == nil {
		t.Errorf("asked without the credential: %v", header)
	}
	if err := caddymodule.Unset(p); err == nil || !strings.Contains(err.Error(), "header Authorization") || !strings.Contains(err.Error(), "UNDO_TOKEN") {
		t.Errorf("a credential without a value: %v", err)
	}
	d = compile(t, caddymodule.Ways{Restore: &caddymodule.Restore{}}).Decide("PUT", call("secret"), true)
	if d.Request.Body != nil || len(d.Request.Header["Accept"]) != 1 || d.Request.Header["X-Other"] != nil {
		t.Errorf("%+v", d.Request)
	}
}

// P8: credentials that would cross the network in the clear are pointed out.
func TestP8ExposedCredentials(t *testing.T) {
	for url, want := range map[string]string{
		"http://refunds.internal/a":       "http://refunds.internal",
		"http://refunds.internal:8080/?a": "http://refunds.internal:8080",
		"https://refunds.internal/a":      "",
		"http://localhost:8080/a":         "",
		"http://[::1]:8080/a":             "",
		"/refunds/a":                      "",
	} {
		p := compile(t, caddymodule.Ways{Compensate: &caddymodule.Compensation{Request: caddymodule.Request{
			Method: "POST", URL: url, Header: map[string]string{"Authorization": "Bearer {env.UNDO_TOKEN}"},
		}}})
		if got := strings.Join(caddymodule.Exposed(p), " "); got != want {
			t.Errorf("%s: %q is pointed out", url, got)
		}
	}
	p := compile(t, caddymodule.Ways{Compensate: &caddymodule.Compensation{Request: caddymodule.Request{
		Method: "POST", URL: "http://refunds.internal/a", Header: map[string]string{"X-Version": "7"},
	}}})
	if got := caddymodule.Exposed(p); len(got) != 0 {
		t.Errorf("%q gets no credential", got)
	}
}

// An answer that lacks what the undo needs makes it impossible, and says so.
func TestAnswered(t *testing.T) {
	p := compile(t, caddymodule.Ways{Compensate: refund})
	src := call(`{"amount":1}`)
	d := p.Decide("POST", src, false)
	if !d.ReadsAnswer() {
		t.Fatal("the answer's body is not asked for")
	}
	for body, want := range map[string]checkpoint.Reason{
		`{"data":[{"id":"r1"}]}`: "",
		`{"data":[]}`:            checkpoint.ReasonAbsent,
		`no JSON`:                checkpoint.ReasonAbsent,
		``:                       checkpoint.ReasonAbsent,
	} {
		src.Status = 201
		src.Response = template.Message{Header: http.Header{"X": {"y"}}, ContentType: "application/json", Body: []byte(body)}
		kept, reason := d.Answered(src)
		if whole := reason == "" && string(kept.Body) == body; reason != want || whole != (want == "") || want != "" && kept.Body != nil || kept.Header != nil {
			t.Errorf("%s: %+v %q", body, kept, reason)
		}
	}
}
