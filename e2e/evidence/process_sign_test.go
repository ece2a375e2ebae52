//go:build unix

package evidence

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// ADR 0064, "Signing when a token is shown": a token of the gateway has the same bytes
// wherever it is shown and whenever: after a restart, a rotation, and once the key that made
// it is gone.
func TestProcessSignsWhenShown(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	file := site.Path("data.identity")
	site.App = "identity spiffe://example.com/gateway"
	gateway := site.Start(t)
	tokens := map[string]string{}
	record := func(id string) {
		t.Helper()
		checkpoint := gateway.Post(t, harness.ProcCall{Id: id}).Header.Get("Execution-Checkpoint")
		tokens[checkpoint] = gateway.TokenOf(t, checkpoint)
	}
	held := func(when string) {
		t.Helper()
		for checkpoint, want := range tokens {
			if got := gateway.TokenOf(t, checkpoint); got != want {
				t.Errorf("%s: %s\nand it was %s", when, got, want)
			}
		}
		exported, leaves, beside := site.ExportedTokens(t)
		for checkpoint, want := range tokens {
			if got := exported[checkpoint]; got != want {
				t.Errorf("%s: exported as %q, and it was %s", when, got, want)
			}
			header, _, _ := strings.Cut(want, ".")
			text, err := base64.RawURLEncoding.DecodeString(header)
			if leaf := leaves[checkpoint]; err != nil || !bytes.Contains(leaf, text) || bytes.Contains(leaf, []byte(want)) {
				t.Errorf("%s: the leaf is %q", when, leaf)
			}
		}
		if beside != len(exported) {
			t.Errorf("%s: %d signatures beside %d entries", when, beside, len(exported))
		}
		jwks, _ := gateway.Jwks(t)
		site.WantSigned(t, jwks)
	}
	private := func() int {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), `"d"`)
	}
	for n := range 3 {
		record(fmt.Sprintf("shown-%d", n))
	}
	held("recorded")
	gateway.Kill()
	gateway = site.Start(t)
	held("killed and started")
	site.Identity(t, "rotate")
	held("rotated")
	record("next")
	harness.EventuallyWithin(t, harness.ProcBound, "the replaced key is gone", func() bool { return private() == 1 })
	held("without the key")
	gateway.End(t)
	gateway = site.Start(t)
	held("started without the key")

	// After a theft nothing is signed under the stolen key, also not what nobody has asked for.
	unshown := gateway.Post(t, harness.ProcCall{Id: "never-shown"}).Header.Get("Execution-Checkpoint")
	gateway.TokenOf(t, unshown)
	site.Identity(t, "rotate", "--stolen")
	if n := private(); n != 1 {
		t.Errorf("%d private keys are in the file after a theft", n)
	}
	_, body := gateway.Read(t, "checkpoints/"+unshown)
	doc := harness.ProcDocument[struct {
		Token        string
		Claims       struct{ JTI string }
		Verification struct{ Signature string }
	}](t, body)
	if doc.Token != "" || doc.Claims.JTI != unshown || doc.Verification.Signature != "unsigned" {
		t.Errorf("of a stolen key: %s", body)
	}
	gateway.End(t)
	if said := gateway.Log.String(); strings.Contains(said, "lacks the private parts") || strings.Contains(said, `"level":"error"`) {
		t.Errorf("the log says %s", gateway.Log.Tail(4000))
	}
}
