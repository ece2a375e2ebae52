package archtest

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
)

// budgetFile has a line for each measure: its name, its bar and the reason.
const budgetFile = "testdata/budgets"

// budget is the most that a measure may be.
type budget struct {
	bar    int
	reason string
}

// readBudgets reads lines of a name, a number and a reason. Lines that begin with # and
// empty ones are for the reader.
func readBudgets(body string) (map[string]budget, error) {
	all := make(map[string]budget)
	for i, line := range strings.Split(body, "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 3 {
			return nil, fmt.Errorf("line %d: want a name, a bar and a reason", i+1)
		}
		bar, err := strconv.Atoi(fields[1])
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		if _, twice := all[fields[0]]; twice {
			return nil, fmt.Errorf("line %d: %s has two bars", i+1, fields[0])
		}
		all[fields[0]] = budget{bar, strings.Join(fields[2:], " ")}
	}
	return all, nil
}

// compare holds what was measured against the bars: wrong fails, better is worth a lower
// bar.
func compare(got map[string]measured, bars map[string]budget) (wrong, better []string) {
	for _, name := range slices.Sorted(maps.Keys(got)) {
		m := got[name]
		b, there := bars[name]
		switch {
		case !there:
			wrong = append(wrong, fmt.Sprintf("%s is %d, and has no bar", name, m.value))
		case m.value > b.bar:
			wrong = append(wrong, fmt.Sprintf("%s is %d, the bar is %d (%s); most are in: %s", name, m.value, b.bar, b.reason, strings.Join(m.of, ", ")))
		case m.value < b.bar:
			better = append(better, fmt.Sprintf("%s is %d: the bar can be lowered from %d", name, m.value, b.bar))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(bars)) {
		if _, there := got[name]; !there {
			wrong = append(wrong, fmt.Sprintf("%s has a bar, and is no measure", name))
		}
	}
	return wrong, better
}

// TestBudgets: the project is not larger, nor more entangled, than it says (CONTRIBUTING,
// "Budgets"). Run it with -v for the table.
func TestBudgets(t *testing.T) {
	project, err := checkout()
	if err != nil {
		t.Fatal(err)
	}
	body, err := os.ReadFile(budgetFile)
	if err != nil {
		t.Fatal(err)
	}
	bars, err := readBudgets(string(body))
	if err != nil {
		t.Fatalf("%s: %v", budgetFile, err)
	}
	got := project.measures()

	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "measure\tis\tbar\tmost are in")
	for _, name := range slices.Sorted(maps.Keys(got)) {
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\n", name, got[name].value, bars[name].bar, strings.Join(got[name].of, ", "))
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &table)

	wrong, better := compare(got, bars)
	for _, line := range wrong {
		t.Errorf("%s: %s", budgetFile, line)
	}
	for _, line := range better {
		t.Logf("%s: %s", budgetFile, line)
	}
}

// TestCompareBudgets: what is above its bar fails, what is below is said, and a measure
// without a bar or a bar without a measure fails.
func TestCompareBudgets(t *testing.T) {
	bars, err := readBudgets("# a comment\n\nfiles 3 so many\nlines 10 so long\nold 1 gone\nsame 2 as it is\n")
	if err != nil {
		t.Fatal(err)
	}
	wrong, better := compare(map[string]measured{
		"files": {value: 4, of: []string{"a 3", "b 1"}}, "lines": {value: 9}, "new": {value: 1}, "same": {value: 2},
	}, bars)
	wantWrong := []string{
		"files is 4, the bar is 3 (so many); most are in: a 3, b 1",
		"new is 1, and has no bar",
		"old has a bar, and is no measure",
	}
	if !slices.Equal(wrong, wantWrong) {
		t.Errorf("wrong %q, want %q", wrong, wantWrong)
	}
	if want := []string{"lines is 9: the bar can be lowered from 10"}; !slices.Equal(better, want) {
		t.Errorf("better %q, want %q", better, want)
	}
	for _, bad := range []string{"files 3", "files many so", "files 1 a\nfiles 2 b"} {
		if _, err := readBudgets(bad); err == nil {
			t.Errorf("%q is taken for budgets", bad)
		}
	}
}

// TestMeasures: a small tree has the numbers that one counts by hand.
func TestMeasures(t *testing.T) {
	root := t.TempDir()
	for name, body := range map[string]string{
		"go.mod": "module example.com/m\n",
		"a/a.go": `// Package a is one.
package a

import "example.com/m/guard/x/deep"

// Opener is met by one type.
type Opener interface{ Open(n int) error }

// Closer is met by two.
type Closer interface{ Close() }

// Box opens, though its other file closes it.
type Box struct{ Field int }

func (b *Box) Open(n int) error { return nil } // no comment line

func short() { use(deep.Name) }

func Long() { /* not a line */ short() }

var hidden, Shown = 1, 2
`,
		"a/more.go": `package a

func (b *Box) Close() {}

type lock struct{ told int }

func (lock) Close() { use(""); Long(); Long() }

func use(string) {}
`,
		"a/a_test.go": `package a

func TestToldTwice() { _ = lock{told: 1} }
`,
		"guard/x/deep/deep.go": `// Package deep names a vault, and the Vault. Tell nobody.
package deep

import _ "example.com/m/guard/y"

const Name = "rider"
`,
		"guard/y/y.go": `// Package y is what x/deep imports.
package y
`,
		"guard/y/z/z.go": `// Package z closes the circle.
package z

import _ "example.com/m/guard/x"

type sealer struct{}
`,
		"guard/x/x.go":                  "// Package x is empty.\npackage x\n",
		"guard/store/badger/seal.go":    "// Package badger keeps a manifest.\npackage badger\n\ntype sealer struct{}\n",
		"docs/request.md":               "1. `a/a.go` `Box.Open` opens.\n1. `a/a.go` `Long` is long.\n1. `a/more.go` `use` takes a string.\n",
		"docs/page.md":                  "The desk told it to `TestCourier`, in the bar.\n",
		"CONTRIBUTING.md":               "Not: desk.\n",
		"bench/b.go":                    "package bench\n\nfunc Bar() {}\n",
		"guard/y/testdata/ignored.go":   "package ignored\n",
		"guard/y/another/other_test.go": "package another\n",
	} {
		file := filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(body), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	project, err := load(root)
	if err != nil {
		t.Fatal(err)
	}
	got := project.measures()
	want := map[string]int{
		"files": 7, "packages": 6, "lines": 50,
		"comments":       180, // 9 of 50 lines
		"exported":       8,   // Opener, Closer, Box, its Open and Close, Long, Shown, Name
		"receiver-files": 2,   // of Box
		"interfaces":     1,   // Opener
		"circles":        1,   // guard/x and guard/y
		"used-once":      2,   // short, and Open, which its interface names
		"word/vault":     2, "word/cargo": 1, "word/desk": 1, "word/courier": 1,
		"word/telling": 2, // the field, and its use in the test
		"word/seal":    1, // of the store alone
		"stops":        3, "stop-files": 2, "stop-packages": 1,
	}
	for name, m := range got {
		if m.value != want[name] {
			t.Errorf("%s is %d of %q, want %d", name, m.value, m.of, want[name])
		}
	}
}
