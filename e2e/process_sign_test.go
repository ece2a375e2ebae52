//go:build unix

package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// tokenOf is the token of a call's checkpoint as the gateway shows it.
func (g *procGateway) tokenOf(t *testing.T, checkpoint string) (token string) {
	t.Helper()
	for range 2 {
		var doc struct {
			Token        string
			Verification struct{ Signature string }
		}
		eventuallyWithin(t, procBound, "the checkpoint is in the tree", func() bool {
			status, body := g.read(t, "checkpoints/"+checkpoint)
			return status == http.StatusOK && json.Unmarshal([]byte(body), &doc) == nil
		})
		if doc.Token == "" || token != "" && doc.Token != token || doc.Verification.Signature != "valid" {
			t.Errorf("shown is %+v, and before it was %q", doc, token)
		}
		token = doc.Token
	}
	return token
}

// exportedTokens are the tokens of an export by their ids, the leaves that the tree proves, and
// how many signatures stand beside their entries.
func (s *procSite) exportedTokens(t *testing.T) (tokens map[string]string, leaves map[string][]byte, beside int) {
	t.Helper()
	ledgersOf(t, s) // waits for the sequencer, and leaves the export
	text, err := os.ReadFile(s.path("ledger.export"))
	if err != nil {
		t.Fatal(err)
	}
	head := procDocument[struct{ Origin, Key string }](t, s.operate(t, "ledger", "head", "-o", "json").says(t))
	key, err := note.NewVerifier(head.Key)
	if err != nil {
		t.Fatal(err)
	}
	tokens, leaves = map[string]string{}, map[string][]byte{}
	if _, err := ledger.VerifyExport(bytes.NewReader(text), head.Origin, note.VerifierList(key), func(e ledger.Entry) error {
		tokens[e.ID], leaves[e.ID] = string(e.Payload), e.Leaf
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return tokens, leaves, strings.Count(string(text), "\nsignature ")
}

// ADR 0064, "Signing when a token is shown": a token of the gateway has the same bytes
// wherever it is shown and whenever: after a restart, a rotation, and once the key that made
// it is gone.
func TestProcessSignsWhenShown(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	file := site.path("data.identity")
	site.app = "identity spiffe://example.com/gateway"
	gateway := site.start(t)
	tokens := map[string]string{}
	record := func(id string) {
		t.Helper()
		checkpoint := gateway.post(t, procCall{id: id}).header.Get("Execution-Checkpoint")
		tokens[checkpoint] = gateway.tokenOf(t, checkpoint)
	}
	held := func(when string) {
		t.Helper()
		for checkpoint, want := range tokens {
			if got := gateway.tokenOf(t, checkpoint); got != want {
				t.Errorf("%s: %s\nand it was %s", when, got, want)
			}
		}
		exported, leaves, beside := site.exportedTokens(t)
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
		jwks, _ := gateway.jwks(t)
		site.wantSigned(t, jwks)
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
	gateway.kill()
	gateway = site.start(t)
	held("killed and started")
	site.identity(t, "rotate")
	held("rotated")
	record("next")
	eventuallyWithin(t, procBound, "the replaced key is gone", func() bool { return private() == 1 })
	held("without the key")
	gateway.end(t)
	gateway = site.start(t)
	held("started without the key")

	// After a theft nothing is signed under the stolen key, also not what nobody has asked for.
	unshown := gateway.post(t, procCall{id: "never-shown"}).header.Get("Execution-Checkpoint")
	gateway.tokenOf(t, unshown)
	site.identity(t, "rotate", "--stolen")
	if n := private(); n != 1 {
		t.Errorf("%d private keys are in the file after a theft", n)
	}
	_, body := gateway.read(t, "checkpoints/"+unshown)
	doc := procDocument[struct {
		Token        string
		Claims       struct{ JTI string }
		Verification struct{ Signature string }
	}](t, body)
	if doc.Token != "" || doc.Claims.JTI != unshown || doc.Verification.Signature != "unsigned" {
		t.Errorf("of a stolen key: %s", body)
	}
	gateway.end(t)
	if said := gateway.log.String(); strings.Contains(said, "lacks the private parts") || strings.Contains(said, `"level":"error"`) {
		t.Errorf("the log says %s", gateway.log.tail(4000))
	}
}
