package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// ADR 0058: every change still applies, and its tests are those that the row of its
// requirement names. Whether they fail under it, only a run shows.
func TestMutationsApply(t *testing.T) {
	page, err := os.ReadFile("../../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]string)
	for _, line := range strings.Split(string(page), "\n") {
		if id, rest, ok := strings.Cut(strings.TrimPrefix(line, "| "), " | "); ok {
			rows[id] = rest
		}
	}
	for _, m := range mutations {
		text, err := os.ReadFile(filepath.Join("../..", filepath.FromSlash(m.file)))
		if err != nil {
			t.Error(err)
			continue
		}
		if n := strings.Count(string(text), m.old); n != 1 || m.old == m.now {
			t.Errorf("%s: what is broken stands %d times in %s: %q", m.id, n, m.file, m.old)
		}
		for _, name := range m.tests {
			if !strings.Contains(rows[m.id], "`"+name+"`") {
				t.Errorf("%s: its row does not name %s", m.id, name)
			}
		}
		if len(m.tests) == 0 || m.breaks == "" {
			t.Errorf("%s: no tests, or not said what breaks", m.id)
		}
	}
}
