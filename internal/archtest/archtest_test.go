// Package archtest holds the rules of the house that a compiler does not know: which
// package may import which, how large the whole may be, which words are not used, that
// exported names are explained, that tests wait on events and are never skipped, that
// nothing is put off in a comment.
package archtest

import (
	"cmp"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

// rules are all checks, by name.
var rules = []struct {
	name  string
	check func(*tree) []violation
}{
	{"imports", checkImports},
	{"docs", checkDocs},
	{"waits", checkWaits},
	{"stacks", checkStacks},
	{"words", checkWords},
	{"conformance", checkConformance},
	{"stops", checkStops},
}

// checkout is this project, read once for all tests.
var checkout = sync.OnceValues(func() (*tree, error) { return load("../..") })

// TestHouse: the project keeps its rules.
func TestHouse(t *testing.T) {
	project, err := checkout()
	if err != nil {
		t.Fatal(err)
	}
	if len(project.gos) < 10 {
		t.Fatalf("only %d Go files found, so the rules were not asked", len(project.gos))
	}
	for _, rule := range rules {
		t.Run(rule.name, func(t *testing.T) {
			for _, v := range rule.check(project) {
				t.Error(v)
			}
		})
	}
}

// TestRulesBite: in a tree where every rule is broken, exactly the broken places are
// found. Lines of the wanted file are the violations, sorted.
func TestRulesBite(t *testing.T) {
	bad, err := load("testdata/bad")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, rule := range rules {
		for _, v := range rule.check(bad) {
			got = append(got, v.String())
		}
	}
	slices.SortFunc(got, cmp.Compare[string])

	body, err := os.ReadFile("testdata/bad.want")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSpace(string(body)), "\n")
	for _, line := range got {
		if !slices.Contains(want, line) {
			t.Errorf("found, though allowed: %s", line)
		}
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("not found, though forbidden: %s", line)
		}
	}
}

// TestWithin: a path with an exclamation mark stands for itself alone.
func TestWithin(t *testing.T) {
	for _, c := range []struct {
		dir, root string
		want      bool
	}{
		{"guard", "guard", true},
		{"guard/store", "guard", true},
		{"guards", "guard", false},
		{"guard", "guard!", true},
		{"guard/store", "guard!", false},
		{".", ".!", true},
		{"guard", ".!", false},
	} {
		if got := within(c.dir, c.root); got != c.want {
			t.Errorf("within(%q, %q) = %v", c.dir, c.root, got)
		}
	}
}
