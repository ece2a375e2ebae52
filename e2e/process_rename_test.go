//go:build unix

package e2e

import (
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// read asks below /.well-known/cascade/ as the caller of all calls.
func (g *procGateway) read(t *testing.T, path string) (status int, body string) {
	t.Helper()
	client := procDial()
	defer client.CloseIdleConnections()
	eventuallyWithin(t, procBound, "an answer", func() bool {
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+g.site.addr+"/.well-known/cascade/"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+procCredential)
		resp, err := client.Do(req)
		if err != nil { // a reload closes connections
			return false
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		status, body = resp.StatusCode, string(text)
		return err == nil
	})
	return status, body
}

// ADR 0040: a gateway that is renamed stays the one that told what it has told. What was
// signed under the name of before is its own word, here and for those who verify the
// ledger with its published keys, over restarts too.
func TestProcessRenamesTheIdentity(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.app = "identity spiffe://example.com/gateway"
	gateway := site.start(t)
	wid := uuid.NewString()
	in := map[string]string{"Workflow-Id": wid}
	first := gateway.post(t, procCall{id: "one", header: in})
	id := first.header.Get("Execution-Checkpoint")
	ledgersOf(t, site)
	before := map[string]string{}
	for _, path := range []string{"workflows/" + wid, "checkpoints/" + id} {
		status, body := gateway.read(t, path)
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
			if status, body := gateway.read(t, path); status != http.StatusOK || body != want {
				t.Errorf("%s, %s:\n%d %s\nand was\n%s", when, path, status, body, want)
			}
		}
		jwks, _ := gateway.jwks(t)
		site.wantSigned(t, jwks)
	}
	site.app = "identity spiffe://example.com/gateway2"
	gateway.reload(t)
	eventuallyWithin(t, procBound, "the new name", func() bool { return site.identity(t, "show").Name == "spiffe://example.com/gateway2" })
	same("renamed")
	gateway.retry(t, procCall{id: "two"})
	same("with entries under both names")
	site.identity(t, "rotate")
	gateway.retry(t, procCall{id: "three"})
	same("with another key")
	gateway.end(t)
	gateway = site.start(t)
	same("restarted")
	gateway.end(t)

	// Another ring in the place of the right one is told of.
	other := site.path("other.key")
	if _, err := ect.CreateRing(other, ect.ES256); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, site.path("data.identity")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(site.path("data.identity"), 0o644); err != nil {
		t.Fatal(err)
	}
	gateway = site.start(t)
	wantProcSays(t, gateway.log.String(), "the key file lacks keys that the gateway has signed with",
		"others than the owner may use the identity's key file")
	gateway.end(t)
}
