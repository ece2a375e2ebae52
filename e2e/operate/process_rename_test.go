//go:build unix

package operate

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ADR 0040: a gateway that is renamed stays the one that told what it has told. What was
// signed under the name of before is its own word, here and for those who verify the
// ledger with its published keys, over restarts too.
func TestProcessRenamesTheIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.App = "identity spiffe://example.com/gateway"
	gateway := site.Start(t)
	wid := uuid.NewString()
	in := map[string]string{"Workflow-Id": wid}
	first := gateway.Post(t, harness.ProcCall{Id: "one", Header: in})
	id := first.Header.Get("Execution-Checkpoint")
	harness.LedgersOf(t, site)
	before := map[string]string{}
	for _, path := range []string{"workflows/" + wid, "checkpoints/" + id} {
		status, body := gateway.Read(t, path)
		if status != http.StatusOK {
			t.Fatalf("%s: %d %s", path, status, body)
		}
		before[path] = body
	}
	if !strings.Contains(before["checkpoints/"+id], `"valid"`) || !strings.Contains(before["checkpoints/"+id], `"matches"`) {
		t.Fatal(before["checkpoints/"+id])
	}
	same := func(when string) {
		t.Helper()
		for path, want := range before {
			if status, body := gateway.Read(t, path); status != http.StatusOK || body != want {
				t.Errorf("%s, %s:\n%d %s\nand was\n%s", when, path, status, body, want)
			}
		}
		jwks, _ := gateway.Jwks(t)
		site.WantSigned(t, jwks)
	}
	site.App = "identity spiffe://example.com/gateway2"
	gateway.Reload(t)
	harness.EventuallyWithin(t, harness.ProcBound, "the new name", func() bool { return site.Identity(t, "show").Name == "spiffe://example.com/gateway2" })
	same("renamed")
	gateway.Retry(t, harness.ProcCall{Id: "two"})
	same("with entries under both names")
	site.Identity(t, "rotate")
	gateway.Retry(t, harness.ProcCall{Id: "three"})
	same("with another key")
	gateway.End(t)
	gateway = site.Start(t)
	same("restarted")
	gateway.End(t)

	// Another ring in the place of the right one is told of.
	other := site.Path("other.key")
	if _, err := ect.CreateRing(other, ect.ES256); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, site.Path("data.identity")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(site.Path("data.identity"), 0o644); err != nil {
		t.Fatal(err)
	}
	gateway = site.Start(t)
	harness.WantProcSays(t, gateway.Log.String(), "the key file lacks keys that the gateway has signed with",
		"others than the owner may use the identity's key file")
	gateway.End(t)
}
