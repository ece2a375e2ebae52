package e2e

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P3: who uses another caller's execution id in the same workflow does not see what that
// one's execution causes.
func TestP3SameIDInOneWorkflow(t *testing.T) {
	upstream := newUpstream(t)
	g := launch(t, setup{app: "identity " + gatewayIdentity, site: "agent_proxy " + upstream.addr, badger: true})
	call := func(key, id, parent string) string {
		t.Helper()
		return g.call(request{path: "/pay", id: id, header: map[string]string{
			"X-Api-Key": key, "Workflow-Id": "nightly", "Execution-Parent": parent,
		}}).header.Get("Execution-Checkpoint")
	}
	call("ada", "order-7", "")
	call("eve", "order-7", "")
	nested := call("tool", "", "order-7")
	look := func(key string) reply {
		return g.call(request{method: "GET", path: "/.well-known/cascade/workflows/nightly", header: map[string]string{"X-Api-Key": key}})
	}
	eventually(t, "the nested call is in the ledger", func() bool {
		got := look("tool")
		return got.status == http.StatusOK && document[workflowView](t, got).state(nested) != "none"
	})
	if v := document[workflowView](t, look("eve")); v.state(nested) != "none" {
		t.Errorf("eve sees the call that ada's upstream has made: %+v", v)
	}
}

// The gateway's key may have been given, for another algorithm than a made one has.
func TestGivenKeyOfAnotherAlgorithm(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	file := filepath.Join(t.TempDir(), "given")
	if _, err := ect.CreateRing(file, ect.EdDSA); err != nil {
		t.Fatal(err)
	}
	app := strings.Replace(trusting(t, a), "key_file", "retain 24h\n key_file "+file+"\n #", 1)
	g := launch(t, setup{app: app, site: "agent_proxy " + upstream.addr + " {\n identity spiffe://example.com/billing\n }"})
	if got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{path: "/pay"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	lines := upstream.last("/pay").Header.Values(ect.FieldName)
	r := request{path: "/nested", header: map[string]string{ect.FieldName: lines[len(lines)-1]}}
	if got := g.call(r); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
}
