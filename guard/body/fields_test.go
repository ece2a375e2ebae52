package body_test

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
)

// Every name of the table is written as it is read, stands once, and has its class.
func TestEveryKnownFieldHasItsClass(t *testing.T) {
	table, seen := body.NewFields(), map[string]bool{}
	for _, f := range body.Known {
		for _, name := range strings.Fields(f.Names) {
			if name != strings.ToLower(name) || seen[name] {
				t.Errorf("%s is not in lower case, or stands twice", name)
			}
			seen[name] = true
			field := http.CanonicalHeaderKey(strings.Replace(name, "*", "anything", 1))
			if got := table.Class(field); got != f.Class {
				t.Errorf("%s has the class %d, not %d", field, got, f.Class)
			}
		}
	}
	if got := table.Class("X-Unheard-Of"); got != body.Content {
		t.Errorf("an unknown field has the class %d", got)
	}
	table.Set(body.Volatile, "x-unheard-*", "IF-MATCH")
	for name, want := range map[string]body.Class{"X-Unheard-Of": body.Volatile, "If-Match": body.Volatile, "If-None-Match": body.Operand} {
		if got := table.Class(name); got != want {
			t.Errorf("%s has the class %d, not %d", name, got, want)
		}
	}
}

var update = flag.Bool("update", false, "write the tables of docs/same-call.md anew")

// The tables of the page are those of the code.
func TestGoldenFields(t *testing.T) {
	const begin, end = "<!-- fields -->\n", "<!-- end of fields -->\n"
	page := filepath.Join("..", "..", "docs", "same-call.md")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no place for the tables", page)
	}
	var b strings.Builder
	for _, section := range []struct {
		class body.Class
		title string
	}{
		{body.Operand, "Operands"}, {body.Tenant, "Tenant fields"}, {body.Credential, "Credentials"},
		{body.Volatile, "Volatile fields"}, {body.Elsewhere, "Compared by other means"},
	} {
		fmt.Fprintf(&b, "\n## %s\n\n| | |\n|---|---|\n", section.title)
		for _, f := range body.Known {
			if names := strings.Fields(f.Names); f.Class == section.class && len(names) > 0 {
				for i, name := range names {
					names[i] = "`" + http.CanonicalHeaderKey(name) + "`"
				}
				fmt.Fprintf(&b, "| %s | %s |\n", f.About, strings.Join(names, ", "))
			}
		}
		list := func(words []string) string { return "`" + strings.Join(words, "`, `") + "`" }
		switch section.class {
		case body.Tenant:
			fmt.Fprintf(&b, "\nSo does every other field with one of these words in its name, also with `id` behind it: %s. `tenant` adds fields, and with `-` in front takes some out.\n",
				list(body.Words.Tenant))
		case body.Credential:
			fmt.Fprintf(&b, "\nSo is every other field with a word in its name that is, or ends in, one of these: %s; and `key` behind a word that is, or ends in, one of these: %s. "+
				"Words stand between `-`, `_` and `.`, in any case.\n\nNo credential is a field with a word that contains one of %s, or is one of %s, and none of %s: "+
				"they change with every attempt, or say where in a list one is. `credentials` adds fields, and with `-` in front takes some out. A field without a value does not count.\n",
				list(body.Words.Credential), list(body.Words.Key), list(body.Words.Never), list(body.Words.Once), list(body.Words.Names))
		}
	}
	want := before + begin + b.String() + "\n" + end + after
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(text) != want {
		t.Error("the tables of docs/same-call.md are not those of the code; run make golden, and read the diff")
	}
}

// What one Sum tells apart of header fields: operands count always, the others of no class in Whole only, and no
// field flows over into another.
func TestHeaderFieldsThatCount(t *testing.T) {
	config := &body.Comparison{Fields: body.NewFields()}
	sums := func(fields ...string) (sum, whole body.Fingerprint) {
		req := request("application/json", []byte(`{"a":1}`))
		req.Header = http.Header{}
		for i := 0; i < len(fields); i += 2 {
			req.Header.Add(fields[i], fields[i+1])
		}
		sum = mustSum(t, config, req)
		return sum, config.Fields.Whole(sum, req.Header)
	}
	plain, none := sums("User-Agent", "a", "Authorization", "b", "Content-Type", "c")
	if plain != mustSum(t, nil, request("application/json", []byte(`{"a":1}`))) {
		t.Error("fields that are not compared change the sum")
	}
	seen, wholes := map[body.Fingerprint]string{plain: "none"}, map[body.Fingerprint]string{none: "none"}
	for _, fields := range [][]string{
		{"Destination", "/a"}, {"Destination", "/b"}, {"Destination", ""}, {"Destination", "/a", "Destination", "/b"}, {"Destination", "/b", "Destination", "/a"},
		{"Destination", "/a", "Depth", "0"}, {"Depth", "/a", "Destination", "0"}, {"If-None-Match", "*"}, {"Destination", "/a", "Connection", "Depth", "Depth", "1"},
	} {
		sum, whole := sums(fields...)
		if other, ok := seen[sum]; ok {
			t.Errorf("%q and %s have the same sum", fields, other)
		}
		if other, ok := wholes[whole]; ok {
			t.Errorf("%q and %s have the same whole sum", fields, other)
		}
		seen[sum], wholes[whole] = fmt.Sprint(fields), fmt.Sprint(fields)
	}
	for _, fields := range [][]string{{"X-A", "1"}, {"X-A", "2"}, {"X-A", ""}, {"X-B", "1"}, {"X-A", "1", "X-A", "2"}, {"X-A", "1", "X-B", "2"}} {
		sum, whole := sums(fields...)
		if sum != plain {
			t.Errorf("%q changes the sum", fields)
		}
		if other, ok := wholes[whole]; ok {
			t.Errorf("%q and %s have the same whole sum", fields, other)
		}
		wholes[whole] = fmt.Sprint(fields)
	}
	if _, whole := sums("X-A", "1", "Connection", "close, x-a"); whole != none {
		t.Error("a field that Connection names counts")
	}
}

// Neither of the sums allocates for the header.
func BenchmarkFields(b *testing.B) {
	config := &body.Comparison{Fields: body.NewFields()}
	req := request("application/json", []byte(`{"amount":1999,"currency":"eur"}`))
	h := http.Header{}
	for name, value := range map[string]string{
		"User-Agent": "openai/6.49.0", "Accept": "application/json", "Accept-Encoding": "gzip", "Accept-Language": "*", "Authorization": "Bearer 0123456789abcdef",
		"Content-Type": "application/json", "Content-Length": "32", "X-Stainless-Retry-Count": "0", "X-Stainless-Lang": "js", "X-Stainless-Os": "Linux",
		"Openai-Beta": "assistants=v2", "Api-Version": "2026-11-01", "Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	} {
		h.Set(name, value)
	}
	for _, bench := range []struct {
		name   string
		header http.Header
		whole  bool
	}{{"none", nil, false}, {"with a key", h, false}, {"without a key", h, true}} {
		b.Run(bench.name, func(b *testing.B) {
			req.Header = bench.header
			b.ReportAllocs()
			for b.Loop() {
				sum, err := config.Sum(req)
				if err != nil {
					b.Fatal(err)
				}
				if bench.whole {
					config.Fields.Whole(sum, bench.header)
				}
			}
		})
	}
}
