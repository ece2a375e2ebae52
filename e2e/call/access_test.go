package call

import (
	"encoding/base64"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/crypto/bcrypt"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A made-up credential is no authentication: it opens no ledger, and holds no connection.
// Who has made calls with one sees what came of them.
func TestCredentialsAtTheLedger(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + upstream.Addr})
	get := func(path string, header map[string]string) harness.Reply {
		return g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/" + path, Header: header})
	}
	for _, junk := range []map[string]string{{"X-Auth-Token": "x"}, {"Authorization": "Bearer junk"}, {"X-Api-Key": "junk"}} {
		for _, path := range []string{"ledger/head", "ledger/proof?index=0", "ledger/consistency?old=0", "ledger/entries/0", "ledger/entries?jti=" + uuid.NewString()} {
			got := get(path, junk)
			if got.Terminal(t, 401, "authentication-required"); got.Header.Get("WWW-Authenticate") == "" {
				t.Errorf("%s: %v", path, got.Header)
			}
		}
		began := time.Now()
		get("checkpoints/"+uuid.NewString()+"?wait=60s", junk).Terminal(t, 403, "not-in-workflow")
		get("workflows/w", junk).Terminal(t, 404, "workflow-unknown")
		if took := time.Since(began); took > harness.Patience {
			t.Errorf("%v held the connection for %v", junk, took)
		}
	}
	ann := map[string]string{"Authorization": "Bearer ann", "Workflow-Id": "w"}
	made := g.Call(harness.Request{Path: "/pay", Header: ann})
	if got := get("workflows/w", ann); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := get("checkpoints/"+made.Header.Get("Execution-Checkpoint"), ann); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	get("ledger/head", ann).Terminal(t, 401, "authentication-required")
	if got := g.Get(a, "ledger/head"); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// The gateway's own paths ask for themselves: `require_ect` is for what goes on to the
// upstream.
func TestOwnPathsRequireNoToken(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "basic_auth {\n ops " + string(hash) + "\n }\n agent_proxy " + upstream.Addr + " {\n require_ect\n }"})
	ops := map[string]string{"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte("ops:secret"))}
	get := func(path string) harness.Reply {
		return g.Call(harness.Request{Method: "GET", Path: path, Header: ops})
	}
	get("/status").RefusedFor(t, 403, "missing")
	if got := get("/.well-known/cascade/ledger/head"); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	get("/.well-known/cascade/workflows/w").Terminal(t, 404, "workflow-unknown")
	get("/.well-known/cascade/checkpoints/"+uuid.NewString()+"?wait=0").Terminal(t, 403, "not-in-workflow")
	get("/.well-known/cascade/executions/x").Terminal(t, 404, "execution-unknown")
	if got := get("/.well-known/cascade/circuits"); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	token := a.Issue(ect.Claims{})
	if got := g.Call(harness.Request{Path: "/pay", Header: map[string]string{"Authorization": ops["Authorization"], ect.FieldName: token.Raw()}}); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}
