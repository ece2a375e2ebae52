package cli

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

const (
	agentA  = "spiffe://example.com/agent/a"
	gateway = "spiffe://example.com/gateway"
	someID  = "550e8400-e29b-41d4-a716-446655440000"
	someWID = "a0b1c2d3-e4f5-6789-abcd-ef0123456789"
)

// agentKey makes a key with its public set.
func agentKey(t *testing.T) (key, public string) {
	t.Helper()
	dir := t.TempDir()
	key, public = filepath.Join(dir, "agent.key"), filepath.Join(dir, "trusted.json")
	says(t, "ect", "keygen", "--owner", agentA, "--out", key, "--public", public)
	return key, public
}

// issueArgs are the flags of a token that is fine.
func issueArgs(key string, more ...string) []string {
	return append([]string{"ect", "issue", "--key", key, "--iss", agentA, "--aud", gateway, "--action", "charge"}, more...)
}

// Issue 4, "for people without a token service": a key, a token with every claim, and
// what a verifier makes of it, by files alone.
func TestTokenRoundTrip(t *testing.T) {
	key, public := agentKey(t)
	body := put(t, "body", "test")
	for _, spelling := range []string{"00", "01"} {
		args := issueArgs(key, "--aud", "urn:ledger", "--wid", someWID, "--jti", strings.ToUpper(someID), "--parent", "7c9e6679-7425-40de-944b-e07fc1f90ae7",
			"--body", body, "--out-hash", "LCa0a2j_xo_5m0U8HTBBNBNCLXBkg7-g-YpeiGJm564", "--ext", `{"z.first":1,"a.second":{"deep":[true]}}`, "--life", "90s", "--spelling", spelling)
		out := says(t, args...)
		raw, found := strings.CutSuffix(out, "\n")
		if !found || strings.Count(raw, ".") != 2 || strings.ContainsAny(raw, " \n") {
			t.Fatalf("more than the token is printed: %q", out)
		}
		source, err := ect.NewFileSource(ect.FileOptions{Path: public})
		if err != nil {
			t.Fatal(err)
		}
		v, err := ect.NewVerifier(ect.Policy{Audience: []string{gateway}, Sources: []ect.Source{source}})
		if err != nil {
			t.Fatal(err)
		}
		token, err := v.Verify(t.Context(), raw, ect.Presentation{Now: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		if token.Issuer() != agentA || strings.Join(token.Audience(), " ") != gateway+" urn:ledger" || token.ID() != someID ||
			token.Workflow() != someWID || token.Action() != "charge" || len(token.Parents()) != 1 ||
			token.InputHash().String() != "n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg" || token.OutputHash() != ect.Sum([]byte("foo")) ||
			token.Ext().JSON() != `{"z.first":1,"a.second":{"deep":[true]}}` || token.Expires().Sub(token.IssuedAt()) != 90*time.Second ||
			token.Spelling().String() != spelling || token.Key().Owner().String() != agentA {
			t.Errorf("%s", token.Payload())
		}
		for _, how := range [][]string{{raw}, {"@" + put(t, "token", "Execution-Context: "+out)}} {
			if shown := says(t, append([]string{"ect", "show", "--jwks", public, "--aud", gateway}, how...)...); !strings.HasPrefix(shown, "VERIFIED: signed with the key ") {
				t.Errorf("%s", shown)
			}
		}
		for _, args := range [][]string{{}, {"-"}} {
			shown, _, err := runWith(t, out, append([]string{"ect", "show"}, args...)...)
			if err != nil || !strings.HasPrefix(shown, "NOT VERIFIED") {
				t.Errorf("%v %s", err, shown)
			}
		}
	}
	piped, _, err := runWith(t, "test", issueArgs(key, "--body", "-")...)
	if token, failed := ect.ParseInsecure(strings.TrimSpace(piped)); err != nil || failed != nil || token.InputHash() != ect.Sum([]byte("test")) {
		t.Errorf("%v %v %s", err, failed, piped)
	}
}

// P8: the private key is readable by its owner alone and is in no output, and no key is
// ever written over.
func TestKeygenFiles(t *testing.T) {
	dir := t.TempDir()
	key, public := filepath.Join(dir, "a.key"), filepath.Join(dir, "set.json")
	made := document[published](t, "ect", "keygen", "--alg", "ES384", "--owner", "spiffe://example.com", "--out", key, "--public", public)
	if made.Algorithm != "ES384" || made.Owner != "spiffe://example.com" || made.Keys != 1 || made.Private != key || made.Public != public {
		t.Errorf("%+v", made)
	}
	if runtime.GOOS != "windows" {
		for file, mode := range map[string]os.FileMode{key: 0o600, public: 0o644} {
			if info, err := os.Stat(file); err != nil || info.Mode().Perm() != mode {
				t.Errorf("%s: %v %v, want %v", file, info.Mode(), err, mode)
			}
		}
	}
	before, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	refuses(t, "a key is never overwritten", "ect", "keygen", "--owner", agentA, "--out", key)
	if after, err := os.ReadFile(key); err != nil || string(after) != string(before) {
		t.Errorf("the key file was changed: %v", err)
	}
	var secret struct{ Keys []struct{ D string } }
	if err := json.Unmarshal(before, &secret); err != nil || len(secret.Keys) != 1 || secret.Keys[0].D == "" {
		t.Fatalf("%v in the key file", err)
	}
	for _, printed := range []string{
		says(t, "ect", "public", "--key", key, "--owner", agentA), says(t, "ect", "public", "--key", key, "--owner", "spiffe://example.com", "--public", public),
	} {
		if strings.Contains(printed, secret.Keys[0].D) || !strings.Contains(printed, made.KeyID) {
			t.Errorf("%s", printed)
		}
	}
}

// The set that a gateway trusts is added to: keys of others, and members that nobody
// here knows, stay as they are.
func TestPublicSetGrows(t *testing.T) {
	key, public := agentKey(t)
	one, err := os.ReadFile(public)
	if err != nil {
		t.Fatal(err)
	}
	with := strings.Replace(string(one), `"use": "sig"`, `"use": "sig", "x-note": "ada's"`, 1)
	with = strings.Replace(with, `{`, `{"x-set": 7,`, 1)
	if err := os.WriteFile(public, []byte(with), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(public, 0o640); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(public, link); err != nil {
		t.Fatal(err)
	}
	second := filepath.Join(t.TempDir(), "b.key")
	if made := document[published](t, "ect", "keygen", "--owner", "urn:b", "--out", second, "--public", link); made.Keys != 2 {
		t.Errorf("%+v", made)
	}
	text, err := os.ReadFile(public)
	if err != nil {
		t.Fatal(err)
	}
	set, err := ect.ParseSet(text, ect.Owner{})
	if err != nil || set.Len() != 2 || !strings.Contains(string(text), "ada's") || !strings.Contains(string(text), `"x-set": 7`) {
		t.Errorf("%v %s", err, text)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link has become %v %v", info, err)
	}
	if info, err := os.Stat(public); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o640 {
		t.Errorf("%v %v", info, err)
	}
	// Twice is once; a key does not change hands.
	if made := document[published](t, "ect", "public", "--key", second, "--owner", "urn:b", "--public", public); made.Keys != 2 {
		t.Errorf("%+v", made)
	}
	if text := says(t, "ect", "public", "--key", second, "--owner", "urn:b2", "--former", "urn:b"); !strings.Contains(text, "\"former_sub\": [\n") {
		t.Errorf("%s", text)
	}
	refuses(t, "--former: ", "ect", "public", "--key", second, "--owner", "urn:b2", "--former", "spiffe://")
	refuses(t, `of "urn:b" already; one key must not speak for two`, "ect", "public", "--key", second, "--owner", "urn:c", "--public", public)
	refuses(t, "it holds a private key", "ect", "public", "--key", second, "--owner", "urn:b", "--public", key)
	refuses(t, "it is the file of the private key", "ect", "public", "--key", second, "--owner", "urn:b", "--public", second)
	// Nothing is made where the set is of no use.
	third := filepath.Join(t.TempDir(), "c.key")
	refuses(t, "this is not a JSON Web Key Set", "ect", "keygen", "--owner", "urn:c", "--out", third, "--public", put(t, "bad", `{"keys": 7}`))
	if _, err := os.Stat(third); !os.IsNotExist(err) {
		t.Errorf("a key was made all the same: %v", err)
	}
	refuses(t, "publish it with `ect public --key", "ect", "keygen", "--owner", "urn:c", "--out", third, "--public", filepath.Join(t.TempDir(), "none", "set.json"))
}

// What a shell needs: the token alone on stdout, the fresh workflow beside it, and a
// next call that needs nothing but the token before.
func TestIssueChains(t *testing.T) {
	key, _ := agentKey(t)
	first, hint, err := run(t, issueArgs(key, "--wid", "new")...)
	if err != nil {
		t.Fatal(err)
	}
	root, err := ect.ParseInsecure(strings.TrimSpace(first))
	if err != nil || root.Workflow() == "" || hint != "workflow "+root.Workflow()+"\n" || len(root.Parents()) != 0 {
		t.Fatalf("%v %q %s", err, hint, root.Payload())
	}
	next := document[issued](t, issueArgs(key, "--parent", strings.TrimSpace(first), "--parent", someID)...)
	child, err := ect.ParseInsecure(next.Token)
	if err != nil || next.Workflow != root.Workflow() || strings.Join(child.Parents(), " ") != root.ID()+" "+someID || next.ID != child.ID() || !next.Expires.Equal(child.Expires()) {
		t.Errorf("%v %+v", err, next)
	}
	elsewhere := document[issued](t, issueArgs(key, "--parent", next.Token, "--wid", someWID)...)
	if elsewhere.Workflow != someWID {
		t.Errorf("%+v", elsewhere)
	}
	refuses(t, "--parent: the parents belong to different workflows", issueArgs(key, "--parent", next.Token, "--parent", elsewhere.Token)...)
	none := document[issued](t, issueArgs(key)...)
	if none.Workflow != "" {
		t.Errorf("%+v", none)
	}
}

// Events are written under the given name, with a hint on missing members.
func TestIssueEvents(t *testing.T) {
	key, _ := agentKey(t)
	for action, want := range map[string]struct{ ext, hint string }{
		"checkpoint":      {`"ext":{"cascade.ttl":60}`, "A checkpoint should have more members in --ext: cascade.reversible, cascade.rollback_uri.\n"},
		"atd:checkpoint":  {`"ext":{"atd.ttl":60}`, "A atd:checkpoint should have more members in --ext: atd.reversible, atd.rollback_uri.\n"},
		"aerr:checkpoint": {`"ext":{"aerr.ttl":60}`, "A aerr:checkpoint should have more members in --ext: aerr.reversible, aerr.rollback_uri.\n"},
		"atd:own":         {`"ext":{"cascade.ttl":60}`, ""},
	} {
		out, hint, err := run(t, append(issueArgs(key), "--action", action, "--ext", `{"cascade.ttl":60}`)...)
		if err != nil {
			t.Fatal(err)
		}
		token, err := ect.ParseInsecure(strings.TrimSpace(out))
		if err != nil || token.Action() != action || !strings.Contains(token.Payload(), want.ext) || hint != want.hint {
			t.Errorf("%s: %v %q %s", action, err, hint, token.Payload())
		}
	}
}

// What is asked wrongly is refused with the name of the flag, before anything is made.
func TestWrongTokenFlags(t *testing.T) {
	key, public := agentKey(t)
	many := make([]string, 0, 202)
	for range 101 {
		many = append(many, "--parent", someID)
	}
	keygen := func(more ...string) []string {
		return append([]string{"ect", "keygen", "--out", filepath.Join(t.TempDir(), "k")}, more...)
	}
	for _, c := range []struct {
		words string
		args  []string
	}{
		{`required flag(s) "out" not set`, []string{"ect", "keygen", "--owner", agentA}},
		{"--owner: say whose tokens the key signs", keygen()},
		{`--owner: "spiffe://Example.com" is not a SPIFFE trust domain`, keygen("--owner", "spiffe://Example.com")},
		{"use ES256, ES384 or EdDSA", keygen("--owner", agentA, "--alg", "HS256")},
		{`required flag(s) "action", "aud", "iss", "key" not set`, []string{"ect", "issue"}},
		{"--key: open", issueArgs("none")},
		{"--key: key file " + public + ": the key file holds no private key", issueArgs(public)},
		{`--iss: "a b" is not an identity`, issueArgs(key, "--iss", "a b")},
		{"--aud: name one to 100", issueArgs(key, "--aud", "")},
		{"--action: write a name", issueArgs(key, "--action", "a\nb")},
		{"--action: aerr:rollback_escalated is an old name", issueArgs(key, "--action", "aerr:rollback_escalated")},
		{`--wid: "w-1" is no UUID; write new`, issueArgs(key, "--wid", "w-1")},
		{"--jti: it is no UUID; leave it out", issueArgs(key, "--jti", "00000000-0000-0000-0000-000000000000")},
		{`--parent: "p" is neither a UUID nor a token`, issueArgs(key, "--parent", "p")},
		{`--parent: "" is neither a UUID nor a token`, issueArgs(key, "--parent", "")},
		{"--parent: neither an id nor a token", issueArgs(key, "--parent", strings.Repeat("p", 40))},
		{"--parent: one stands twice", issueArgs(key, "--parent", someID, "--parent", strings.ToUpper(someID))},
		{"--parent: there are more than 100", issueArgs(key, many...)},
		{"--parent: a token is not its own parent", issueArgs(key, "--parent", someID, "--jti", someID)},
		{"--body: open", issueArgs(key, "--body", "none")},
		{"--out-hash: open", issueArgs(key, "--out-hash", "@none")},
		{`--out-hash: "sha256:x" is not the SHA-256 in 43 characters`, issueArgs(key, "--out-hash", "sha256:x")},
		{"--ext: write a JSON object", issueArgs(key, "--ext", "[]")},
		{"--ext: write a JSON object", issueArgs(key, "--ext", `{"a":1,}`)},
		{"--ext: write a JSON object", issueArgs(key, "--ext", `{"a":1} {}`)},
		{"--ext: write a JSON object", issueArgs(key, "--ext", `{"a":1`)},
		{"--ext: the extension a is set twice", issueArgs(key, "--ext", `{"a":1,"a":1}`)},
		{"--ext: the members contradict each other", issueArgs(key, "--action", "checkpoint", "--ext", `{"cascade.ttl":1,"atd.ttl":2}`)},
		{"--ext: the extensions are over 4096 bytes", issueArgs(key, "--ext", `{"a":"`+strings.Repeat("x", 4096)+`"}`)},
		{"--life: 24h0m1s is not from 1s to 24h", issueArgs(key, "--life", "24h0m1s")},
		{"--life: 0s is not from 1s to 24h", issueArgs(key, "--life", "0s")},
		{"--life: 2d is not from 1s to 24h", issueArgs(key, "--life", "2d")},
		{`for "--life" flag: it is no duration; write one like`, issueArgs(key, "--life", "soon")},
		{"use 00 or 01", issueArgs(key, "--spelling", "02")},
		{"this is no token that can be shown: the token cannot be parsed (malformed)", []string{"ect", "show", "a.b.c"}},
		{"there is more than one token", []string{"ect", "show", "a,b"}},
		{"there is no token", []string{"ect", "show", " "}},
		{"has more than", []string{"ect", "show", "@" + put(t, "large", strings.Repeat("x", maxToken+1))}},
		{"no such file", []string{"ect", "show", "@none"}},
		{"--aud needs --jwks", []string{"ect", "show", "x", "--aud", "a"}},
		{"--stored needs --jwks", []string{"ect", "show", "x", "--stored"}},
		{"accepts at most 1 arg", []string{"ect", "show", "a", "b"}},
	} {
		refuses(t, c.words, c.args...)
	}
	if day := document[issued](t, issueArgs(key, "--life", "1d")...); time.Until(day.Expires) < 23*time.Hour {
		t.Errorf("%v", day.Expires)
	}
	for owner, warned := range map[string]bool{"foo": true, agentA: false, "urn:b": false} {
		if _, hint, err := run(t, keygen("--owner", owner)...); err != nil || strings.Contains(hint, "is no URI") != warned {
			t.Errorf("%s: %v %s", owner, err, hint)
		}
	}
}

// unsigned is a token of level L1.
func unsigned(payload string) string { return base64.RawURLEncoding.EncodeToString([]byte(payload)) }

// A token is never shown without saying how far it can be believed.
func TestShowSaysWhatHolds(t *testing.T) {
	key, public := agentKey(t)
	_, stranger := agentKey(t)
	raw := strings.TrimSpace(says(t, issueArgs(key)...))
	for _, c := range []struct {
		words, code string // code is empty where it holds
		verified    bool
		args        []string
	}{
		{"NOT VERIFIED: anybody can have written this", "", false, []string{raw}},
		{"VERIFIED: signed with the key ", "", true, []string{raw, "--jwks", public, "--aud", gateway}},
		{"Whether it is meant for you was not looked at", "", true, []string{raw, "--jwks", public}},
		{"VERIFIED", "", true, []string{raw, "--jwks", public, "--stored"}},
		{"DOES NOT HOLD: the claim aud does not name this verifier (aud). Believe nothing", "aud", false, []string{raw, "--jwks", public, "--aud", "urn:other"}},
		{"DOES NOT HOLD", "kid", false, []string{raw, "--jwks", stranger}},
		{"DOES NOT HOLD", "signature", false, []string{raw[:len(raw)-4] + "AAAA", "--jwks", public}},
		{"NOT VERIFIED", "", false, []string{raw[:len(raw)-4] + "AAAA"}},
		{"DOES NOT HOLD", "level", false, []string{unsigned(`{"jti":"` + someID + `"}`), "--jwks", public}},
	} {
		out, _, err := run(t, append([]string{"ect", "show"}, c.args...)...)
		wrong := err != nil && err.Error() != "the token does not hold: "+c.code
		if (err != nil) != (c.code != "") || wrong || !strings.Contains(out, c.words) || strings.HasPrefix(out, "VERIFIED") != c.verified {
			t.Errorf("%q: %v\n%s", c.args, err, out)
		}
		out, _, err = run(t, append([]string{"ect", "show", "-o", "json"}, c.args...)...)
		var doc shown
		if json.Unmarshal([]byte(out), &doc) != nil || (err != nil) != (c.code != "") || doc.Verified != c.verified || (doc.Key != nil) != c.verified ||
			(doc.Refused != nil) != (c.code != "") || doc.Refused != nil && string(doc.Refused.Code) != c.code {
			t.Errorf("%q: %v\n%s", c.args, err, out)
		}
	}
	refuses(t, "it is a private key, which does not belong", "ect", "show", raw, "--jwks", key)
}

// Expired tokens say so; as records they stay valid (facts, "life").
func TestShowExpired(t *testing.T) {
	key, public := agentKey(t)
	ring, err := ect.LoadRing(key)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := ect.NewIssuer(ect.IssuerOptions{Identity: agentA, Ring: ring})
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Issue(time.Now().Add(2*time.Hour), ect.Claims{Audience: []string{gateway}, Action: "charge"})
	if err != nil {
		t.Fatal(err)
	}
	if out, _, err := run(t, "ect", "show", token.Raw(), "--jwks", public); err == nil || !strings.Contains(out, "(not-yet)") {
		t.Errorf("%v %s", err, out)
	}
	if out := says(t, "ect", "show", token.Raw(), "--jwks", public, "--stored"); !strings.HasPrefix(out, "VERIFIED") {
		t.Errorf("%s", out)
	}
	token, err = issuer.Issue(time.Now().Add(-2*time.Hour), ect.Claims{Audience: []string{gateway}, Action: "charge"})
	if err != nil {
		t.Fatal(err)
	}
	out, _, err := run(t, "ect", "show", token.Raw(), "--jwks", public)
	if err == nil || !strings.Contains(out, "--stored looks") || !strings.Contains(out, "(EXPIRED 1h ago)") {
		t.Errorf("%v %s", err, out)
	}
	if out := says(t, "ect", "show", token.Raw(), "--jwks", public, "--stored"); !strings.HasPrefix(out, "VERIFIED") {
		t.Errorf("%s", out)
	}
}

// Every line that a token can have, at a moment that stands still; what its issuer
// chose gives a terminal no orders.
func TestGoldenDescribeToken(t *testing.T) {
	now := time.Unix(1772064150, 0).Add(5 * time.Minute)
	for name, payload := range map[string]string{
		"whole": `{"iss":"spiffe://example.com/agent/a","aud":["urn:b","urn:c"],"iat":1772064150,"exp":1772064750,"jti":"` + someID + `","wid":"` + someWID + `",
			"exec_act":"atd:circuit_close","pred":["7c9e6679-7425-40de-944b-e07fc1f90ae7"],"inp_hash":"n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg",
			"out_hash":"LCa0a2j_xo_5m0U8HTBBNBNCLXBkg7-g-YpeiGJm564","ect_ext":{"atd.cooldown_s":60,"own":"\u001b[2J"},"sub":"\u001b]0;evil","target":[1]}`,
		"event": `{"exec_act":"cascade_detected","par":[],"exp":1772000000}`,
		"bare":  `{"exec_act":"\u202eevil"}`,
	} {
		u, err := ect.ParseInsecure(unsigned(payload))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		golden(t, "token_"+name, describeToken(u, nil, now))
	}
	sum := sha256.Sum256([]byte("a header of another kind"))
	raw := unsigned(`{"alg":"none","typ":"JWT"}`) + "." + unsigned(`{"iat":1772064150}`) + "." + base64.RawURLEncoding.EncodeToString(sum[:])
	u, err := ect.ParseInsecure(raw)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "token_foreign", describeToken(u, headerOf(raw), now))
}

// A path that was mistyped must not leave directories behind, with a key where nobody
// looks for it.
func TestKeygenMakesNoDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "mistyped")
	refuses(t, "--out: the directory "+dir+" is not there: make it, or correct the path", "ect", "keygen", "--owner", "urn:a", "--out", filepath.Join(dir, "a.key"))
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory was made: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refuses(t, "--out: "+file+" is no directory", "ect", "keygen", "--owner", "urn:a", "--out", filepath.Join(file, "a.key"))
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
