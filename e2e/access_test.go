package e2e

import (
	"encoding/base64"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/crypto/bcrypt"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A made-up credential is no authentication: it opens no ledger, and holds no connection.
// Who has made calls with one sees what came of them.
func TestCredentialsAtTheLedger(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + upstream.addr})
	get := func(path string, header map[string]string) reply {
		return g.call(request{method: "GET", path: "/.well-known/cascade/" + path, header: header})
	}
	for _, junk := range []map[string]string{{"X-Auth-Token": "x"}, {"Authorization": "Bearer junk"}, {"X-Api-Key": "junk"}} {
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

// The gateway's own paths ask for themselves: `require_ect` is for what goes on to the
// upstream.
func TestOwnPathsRequireNoToken(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "basic_auth {\n ops " + string(hash) + "\n }\n agent_proxy " + upstream.addr + " {\n require_ect\n }"})
	ops := map[string]string{"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte("ops:secret"))}
	get := func(path string) reply { return g.call(request{method: "GET", path: path, header: ops}) }
	get("/status").refusedFor(t, 403, "missing")
	if got := get("/.well-known/cascade/ledger/head"); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
	get("/.well-known/cascade/workflows/w").terminal(t, 404, "workflow-unknown")
	get("/.well-known/cascade/checkpoints/"+uuid.NewString()+"?wait=0").terminal(t, 403, "not-in-workflow")
	get("/.well-known/cascade/executions/x").terminal(t, 404, "execution-unknown")
	if got := get("/.well-known/cascade/circuits"); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
	token := a.issue(ect.Claims{})
	if got := g.call(request{path: "/pay", header: map[string]string{"Authorization": ops["Authorization"], ect.FieldName: token.Raw()}}); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
}
