//go:build unix

package harness

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// procIdentity is what the command shows of the identity.
type procIdentity struct {
	Name, File, Algorithm string
	Keys                  []procIdentityKey
}

type procIdentityKey struct {
	ID, Alg, Created, Until string
	Signs                   bool
}

// Signs is the name of the key in use, which stands last.
func (i procIdentity) Signs(t *testing.T) string {
	t.Helper()
	last := len(i.Keys) - 1
	for n, key := range i.Keys {
		if key.Signs != (n == last) || (key.Until == "") != key.Signs {
			t.Errorf("%+v", i.Keys)
		}
	}
	return i.Keys[last].ID
}

// Identity runs the command about the gateway's identity.
func (s *ProcSite) Identity(t *testing.T, args ...string) procIdentity {
	t.Helper()
	return ProcDocument[procIdentity](t, s.Operate(t, append([]string{"identity"}, append(args, "-o", "json")...)...).Says(t))
}

// Jwks is the published set, as it came, and the names of its keys.
func (g *ProcGateway) Jwks(t *testing.T) (string, []string) {
	t.Helper()
	status, text := g.Read(t, "jwks")
	if status != http.StatusOK {
		t.Fatalf("the keys: %d %s", status, text)
	}
	var set struct{ Keys []map[string]any }
	if err := json.Unmarshal([]byte(text), &set); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	var names []string
	for _, key := range set.Keys {
		if key["d"] != nil {
			t.Fatal("P8: a private key is published")
		}
		names = append(names, key["kid"].(string))
	}
	slices.Sort(names)
	return text, names
}

// WantSigned holds that the whole ledger verifies with the keys, every signature
// included, and returns how many those were.
func (s *ProcSite) WantSigned(t *testing.T, jwks string) int {
	t.Helper()
	LedgersOf(t, s) // waits for the sequencer, and leaves the export
	head := ProcDocument[struct{ Key string }](t, s.Operate(t, "ledger", "head", "-o", "json").Says(t))
	keys := s.Path("gateway-keys.json")
	if err := os.WriteFile(keys, []byte(jwks), 0o600); err != nil {
		t.Fatal(err)
	}
	said := s.Operate(t, "ledger", "verify", s.Path("ledger.export"), "--key", head.Key, "--jwks", keys, "-o", "json").Says(t)
	proved := ProcDocument[struct {
		Holds      bool
		Entries    int
		Signatures struct {
			Verified, Unsigned int
			Unknown            map[string]int
		}
	}](t, said)
	if !proved.Holds || proved.Entries == 0 || proved.Signatures.Verified != proved.Entries {
		t.Errorf("not all signatures hold: %s", said)
	}
	return proved.Signatures.Verified
}

// WantSecret holds that nobody else can read the key file.
func (s *ProcSite) WantSecret(t *testing.T, file string) {
	t.Helper()
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("P8: %s has mode %v, not 0600", file, info.Mode())
	}
}

// TokenOf is the token of a call's checkpoint as the gateway shows it.
func (g *ProcGateway) TokenOf(t *testing.T, checkpoint string) (token string) {
	t.Helper()
	for range 2 {
		var doc struct {
			Token        string
			Verification struct{ Signature string }
		}
		EventuallyWithin(t, ProcBound, "the checkpoint is in the tree", func() bool {
			status, body := g.Read(t, "checkpoints/"+checkpoint)
			return status == http.StatusOK && json.Unmarshal([]byte(body), &doc) == nil
		})
		if doc.Token == "" || token != "" && doc.Token != token || doc.Verification.Signature != "valid" {
			t.Errorf("shown is %+v, and before it was %q", doc, token)
		}
		token = doc.Token
	}
	return token
}

// ExportedTokens are the tokens of an export by their ids, the leaves that the tree proves, and
// how many signatures stand beside their entries.
func (s *ProcSite) ExportedTokens(t *testing.T) (tokens map[string]string, leaves map[string][]byte, beside int) {
	t.Helper()
	LedgersOf(t, s) // waits for the sequencer, and leaves the export
	text, err := os.ReadFile(s.Path("ledger.export"))
	if err != nil {
		t.Fatal(err)
	}
	head := ProcDocument[struct{ Origin, Key string }](t, s.Operate(t, "ledger", "head", "-o", "json").Says(t))
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

// TokenSite gives a site the setup of a gateway that tokens of the agent are tried at.
func (s *ProcSite) TokenSite(t *testing.T, a *Agent, lab *RestLab) {
	setting := TokenSetup(t, a, lab)
	s.Host, s.App, s.Guard = s.Addr+", http://gateway.example.com", s.App+"\n"+setting.App, tokenActions(a)
}
