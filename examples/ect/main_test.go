package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// P8: the private half is in no output. A token that was altered is never shown as verified.
func TestKeyTokenAndVerdict(t *testing.T) {
	dir := t.TempDir()
	key, set := filepath.Join(dir, "a.key"), filepath.Join(dir, "set.json")
	command := func(args ...string) (string, error) {
		var out bytes.Buffer
		err := run(args, &out, io.Discard)
		return out.String(), err
	}
	for _, file := range []string{key, filepath.Join(dir, "b.key")} {
		if _, err := command("keygen", "--owner", "urn:a", "--out", file, "--public", set); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(set); err != nil || strings.Contains(string(text), `"d"`) || strings.Count(string(text), `"kid"`) != 2 {
		t.Fatalf("%v: %s", err, text)
	}
	if _, err := command("keygen", "--owner", "urn:a", "--out", key); err == nil {
		t.Error("a key was overwritten")
	}
	issue := []string{"issue", "--key", key, "--iss", "urn:a", "--aud", "urn:g", "--action", "atd:checkpoint", "--wid", "new"}
	root, err := command(issue...)
	if err != nil {
		t.Fatal(err)
	}
	root = strings.TrimSpace(root)
	next, err := command("issue", "--key", key, "--iss", "urn:a", "--aud", "urn:g", "--action", "b", "--parent", root, "--ext", `{"x":1}`)
	if err != nil {
		t.Fatal(err)
	}
	show := []string{"show", "--jwks", set, "--aud", "urn:g"}
	if out, err := command(append(show, strings.TrimSpace(next))...); err != nil || !strings.HasPrefix(out, "VERIFIED") || !strings.Contains(out, `"wid"`) {
		t.Errorf("%v: %s", err, out)
	}
	for _, wrong := range [][]string{{root[:len(root)-8] + "AAAAAAAA"}, {"--aud", "x", root + "x"}, {root, "--stored"}} {
		if out, err := command(append(show, wrong...)...); err == nil {
			t.Errorf("shown: %s", out)
		}
	}
	if out, err := command("show", root); err != nil || !strings.HasPrefix(out, "NOT VERIFIED") {
		t.Errorf("%v: %s", err, out)
	}
}
