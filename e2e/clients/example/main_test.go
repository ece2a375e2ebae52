package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// The example prints what its page says: behind the guard no charge is made twice.
func TestExample(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../../examples/mcp/README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, want, _ := strings.Cut(string(page), "<!-- output -->\n```\n")
	want, _, _ = strings.Cut(want, "```")
	if out.String() != want {
		t.Errorf("the example prints\n%s\nand its page has\n%s", out.String(), want)
	}
}
