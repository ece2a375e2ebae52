package evidence

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P3: who uses another caller's execution id in the same workflow does not see what that
// one's execution causes.
func TestP3SameIDInOneWorkflow(t *testing.T) {
	upstream := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{App: "identity " + harness.GatewayIdentity, Site: "agent_proxy " + upstream.Addr, Badger: true})
	call := func(key, id, parent string) string {
		t.Helper()
		return g.Call(harness.Request{Path: "/pay", Id: id, Header: map[string]string{
			"X-Api-Key": key, "Workflow-Id": "nightly", "Execution-Parent": parent,
		}}).Header.Get("Execution-Checkpoint")
	}
	call("ada", "order-7", "")
	call("eve", "order-7", "")
	nested := call("tool", "", "order-7")
	look := func(key string) harness.Reply {
		return g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/nightly", Header: map[string]string{"X-Api-Key": key}})
	}
	harness.Eventually(t, "the nested call is in the ledger", func() bool {
		got := look("tool")
		return got.Status == http.StatusOK && harness.Document[harness.WorkflowView](t, got).State(nested) != "none"
	})
	if v := harness.Document[harness.WorkflowView](t, look("eve")); v.State(nested) != "none" {
		t.Errorf("eve sees the call that ada's upstream has made: %+v", v)
	}
}

// The gateway's key may have been given, for another algorithm than a made one has.
func TestGivenKeyOfAnotherAlgorithm(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	file := filepath.Join(t.TempDir(), "given")
	if _, err := ect.CreateRing(file, ect.EdDSA); err != nil {
		t.Fatal(err)
	}
	app := strings.Replace(harness.Trusting(t, a), "key_file", "retain 24h\n key_file "+file+"\n #", 1)
	g := harness.Launch(t, harness.Setup{App: app, Site: "agent_proxy " + upstream.Addr + " {\n identity spiffe://example.com/billing\n }"})
	if got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Path: "/pay"})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	lines := upstream.Last("/pay").Header.Values(ect.FieldName)
	r := harness.Request{Path: "/nested", Header: map[string]string{ect.FieldName: lines[len(lines)-1]}}
	if got := g.Call(r); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}
