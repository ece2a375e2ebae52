package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// gatewayKeys are keys in every state.
func gatewayKeys() *admin.Identity {
	at := time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)
	return &admin.Identity{
		Name: gateway, File: "/data/agent_guard.identity", Algorithm: "EdDSA",
		Keys: []admin.IdentityKey{
			{ID: strings.Repeat("r", 43), Algorithm: "ES256", Until: at.Add(-72 * time.Hour), Revoked: true},
			{ID: strings.Repeat("a", 43), Algorithm: "ES256", Created: at.Add(-90 * 24 * time.Hour), Until: at.Add(-time.Second)},
			{ID: "evil\x1b[2J", Algorithm: "ES256", Created: at.Add(-time.Hour), Until: at.Add(23 * time.Hour)},
			{ID: strings.Repeat("b", 43), Algorithm: "EdDSA", Created: at, Signs: true},
		},
	}
}

// Section "CLI": what each key of the identity is for.
func TestGoldenIdentity(t *testing.T) {
	var out strings.Builder
	if err := printIdentity(&out, gatewayKeys(), time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)); err != nil {
		t.Fatal(err)
	}
	golden(t, "identity_show", out.String())
}

// Section "CLI": what is asked of the server, and what is printed of its answer.
func TestIdentityAsks(t *testing.T) {
	text, err := json.Marshal(gatewayKeys())
	if err != nil {
		t.Fatal(err)
	}
	var asked string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked = r.Method + " " + r.URL.String() + " " + string(body)
		w.Header().Set(admin.Mark, "1")
		_, _ = w.Write(text)
	}))
	defer server.Close()
	for args, want := range map[string]string{
		"identity show":                     "GET /agent_guard/identity ",
		"identity show --store /data/one":   "GET /agent_guard/identity?store=%2Fdata%2Fone ",
		"identity rotate":                   "POST /agent_guard/identity/rotate {}",
		"identity rotate --stolen":          `POST /agent_guard/identity/rotate {"stolen":true}`,
		"identity rotate --store /data/one": "POST /agent_guard/identity/rotate?store=%2Fdata%2Fone {}",
	} {
		command := append(strings.Fields(args), "--address", server.Listener.Addr().String())
		out, hint, err := run(t, command...)
		if err != nil || asked != want || !strings.HasPrefix(out, "The gateway is "+gateway+", and makes keys for EdDSA.\n") {
			t.Errorf("%s asks %s: %v\n%s", args, asked, err, out)
		}
		if strings.Contains(args, "rotate") != strings.HasPrefix(hint, "Copy the key file anew. ") {
			t.Errorf("%s says %q", args, hint)
		}
		if got := document[admin.Identity](t, command...); len(got.Keys) != 4 || got.File != "/data/agent_guard.identity" {
			t.Errorf("%s: %+v", args, got)
		}
	}
}

// Section "CLI": a refusal is the error, and nothing says that a key was made.
func TestIdentityRefused(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte("{\"error\":\"configure `identity`\"}"))
	}))
	defer server.Close()
	for _, verb := range []string{"show", "rotate"} {
		out, hint, err := run(t, "identity", verb, "--address", server.Listener.Addr().String())
		if err == nil || err.Error() != "configure `identity`" || out != "" || strings.Contains(hint, "Copy") {
			t.Errorf("%s: %v %q %q", verb, err, out, hint)
		}
	}
	refuses(t, "`caddy agent-guard identity show` takes no arguments", "identity", "show", "more")
	refuses(t, "unknown flag: --stolen", "identity", "show", "--stolen")
}

// Replaced keys are in a set only where they are asked for; then they verify what was
// signed with them.
func TestPublicOfReplacedKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	ring, err := ect.CreateRing(file, ect.ES256)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: gateway, Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now().Add(-time.Hour)
	old, err := issuer.Issue(now, ect.Claims{Audience: []string{agentA}, Action: "charge"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(file, ect.ES256, now, time.Minute); err != nil {
		t.Fatal(err)
	}
	public := []string{"ect", "public", "--key", file, "--owner", gateway}
	current := put(t, "current", says(t, public...))
	all := put(t, "all", says(t, append(public, "--replaced")...))
	show := []string{"ect", "show", old.Raw(), "--stored", "--aud", agentA, "--jwks"}
	if out, _, err := run(t, append(show, current)...); err == nil {
		t.Errorf("a replaced key is published:\n%s", out)
	}
	if out := says(t, append(show, all)...); !strings.HasPrefix(out, "VERIFIED") {
		t.Errorf("%s", out)
	}
}
