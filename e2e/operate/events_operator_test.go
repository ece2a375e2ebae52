package operate

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// operator asks the admin API of this process.
func operator(t *testing.T, method, path, body string, answer any) {
	t.Helper()
	w := httptest.NewRecorder()
	req := httptest.NewRequest(method, "/agent_guard/"+path, strings.NewReader(body))
	module, err := caddy.GetModule("admin.api.agent_guard")
	if err != nil {
		t.Fatal(err)
	}
	if err := module.New().(caddy.AdminRouter).Routes()[0].Handler.ServeHTTP(w, req); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if err := json.Unmarshal(w.Body.Bytes(), answer); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// What operators decide, and that they rotate keys, is told as events, with data that
// name nobody (P8).
func TestEventsOfOperators(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Global: `events {
		on agent_guard.execution_resolved e2e
		on agent_guard.keys_rotated e2e
		on agent_guard.identity_rotated e2e
	}`, App: "identity spiffe://example.com/gateway", Site: "agent_proxy " + u.Addr})
	u.On("/x", harness.Status(http.StatusGatewayTimeout, ""))
	for id, decision := range map[string]string{"secret-1": "applied", "secret-2": "not_applied"} {
		g.Call(harness.Request{Path: "/x", Id: id})
		var page struct {
			Executions []struct{ Key, Caller string }
		}
		operator(t, "GET", "executions?state=in_doubt", "", &page)
		if len(page.Executions) != 1 {
			t.Fatalf("%+v", page)
		}
		x := page.Executions[0]
		operator(t, "POST", "executions/"+x.Key+"/resolve",
			fmt.Sprintf(`{"decision": %q, "operator": "secret-ada", "reason": "secret-reason"}`, decision), &struct{}{})
		e := o.Event()
		want := map[string]any{
			"guard": "default", "action": "default", "key": x.Key[:16], "caller": x.Caller, "by": "operator",
			"outcome": map[string]string{"applied": "completed", "not_applied": "released"}[decision],
		}
		if e.Name() != "agent_guard.execution_resolved" || fmt.Sprint(e.Data) != fmt.Sprint(want) {
			t.Errorf("%s %v, want %v", e.Name(), e.Data, want)
		}
	}
	operator(t, "POST", "keys/rotate", "", &struct{}{})
	if e := o.Event(); e.Name() != "agent_guard.keys_rotated" || len(e.Data) != 0 {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
	operator(t, "POST", "identity/rotate", "", &struct{}{})
	if e := o.Event(); e.Name() != "agent_guard.identity_rotated" || len(e.Data) != 0 {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
}
