package ect_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A set makes the verifier try eight keys of one name at most. Those beyond are told of, as
// everything in a set that is not used.
func TestManyKeysOfOneName(t *testing.T) {
	var agents []*agent
	var keys []map[string]any
	for range 10 {
		a := newAgent(t, "key-1", "ES256")
		agents, keys = append(agents, a), append(keys, a.jwk(t, nil))
	}
	other := newAgent(t, "key-2", "ES256")
	agents, keys = append(agents, other), append(keys, other.jwk(t, nil))
	set := parseSet(t, clinical, keys...)
	v := verifier(t, set, nil)
	for i, a := range agents {
		_, err := v.Verify(t.Context(), a.send(t, a.header(), figure()), ect.Presentation{Now: at})
		if i == 8 || i == 9 {
			wantCode(t, err, ect.CodeSignature)
		} else {
			wantCode(t, err, "")
		}
	}
	skipped := set.Skipped()
	if set.Len() != 9 || len(skipped) != 2 {
		t.Fatalf("%d used, skipped %v", set.Len(), skipped)
	}
	for _, s := range skipped {
		if s.KeyID != "key-1" || !strings.Contains(s.Reason, "8 keys of its name") {
			t.Errorf("%+v", s)
		}
	}
}

// Whoever replaces keys and keeps their name has the last eight that were replaced known to
// records, whatever stands in the set, and takes no more memory than that.
func TestRetiredKeysOfOneName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agents.jwks")
	when := time.Now().Add(-time.Hour)
	write := func(keys ...map[string]any) {
		t.Helper()
		if err := os.WriteFile(path, keySet(t, keys...), 0o600); err != nil {
			t.Fatal(err)
		}
		when = when.Add(time.Minute)
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	owner, err := ect.ParseOwner(clinical)
	if err != nil {
		t.Fatal(err)
	}
	last := newAgent(t, "key-1", "ES256")
	var eight []map[string]any
	for range 8 {
		eight = append(eight, newAgent(t, "key-1", "ES256").jwk(t, nil))
	}
	write(eight...)
	s, err := ect.NewFileSource(ect.FileOptions{Path: path, Owner: owner, Look: 1})
	if err != nil {
		t.Fatal(err)
	}
	write(last.jwk(t, nil))
	sourceHas(t, s, "key-1")
	for range 8 {
		eight = append(eight[1:], newAgent(t, "key-1", "ES256").jwk(t, nil))
	}
	write(eight...)
	sourceHas(t, s, "key-1")
	if n := len(s.Retired("key-1")); n != 8 {
		t.Errorf("%d keys are kept", n)
	}
	raw := last.send(t, last.header(), figure())
	v := verifier(t, s, nil)
	if _, err := v.VerifyStored(t.Context(), raw); err != nil {
		t.Errorf("a record: %v", err)
	}
	_, err = v.Verify(t.Context(), raw, ect.Presentation{Now: at})
	wantCode(t, err, ect.CodeSignature)
}
