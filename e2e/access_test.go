package e2e

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
)

// A made-up credential is no authentication: it opens no ledger, and holds no connection.
// Who has made calls with one sees what came of them.
func TestCredentialsAtTheLedger(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + upstream.addr})
	get := func(path string, header map[string]string) reply {
		return g.call(request{method: "GET", path: "/.well-known/cascade/" + path, header: header})
	}
	for _, junk := range []map[string]string{{"Cookie": "x=1"}, {"Authorization": "Bearer junk"}, {"X-Api-Key": "junk"}} {
		for _, path := range []string{"ledger/head", "ledger/proof?index=0", "ledger/consistency?old=0", "ledger/entries/0", "ledger/entries?jti=" + uuid.NewString()} {
			got := get(path, junk)
			if got.terminal(t, 401, "authentication-required"); got.header.Get("WWW-Authenticate") == "" {
				t.Errorf("%s: %v", path, got.header)
			}
		}
		began := time.Now()
		get("checkpoints/"+uuid.NewString()+"?wait=60s", junk).terminal(t, 403, "not-in-workflow")
		get("workflows/w", junk).terminal(t, 404, "workflow-unknown")
		if took := time.Since(began); took > patience {
			t.Errorf("%v held the connection for %v", junk, took)
		}
	}
	ann := map[string]string{"Authorization": "Bearer ann", "Workflow-Id": "w"}
	made := g.call(request{path: "/pay", header: ann})
	if got := get("workflows/w", ann); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := get("checkpoints/"+made.header.Get("Execution-Checkpoint"), ann); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
	get("ledger/head", ann).terminal(t, 401, "authentication-required")
	if got := g.get(a, "ledger/head"); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
}
