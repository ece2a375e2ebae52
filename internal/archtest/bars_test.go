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

// barFile has a line for each measure: its name and its bar.
const barFile = "testdata/bars"

// atLeast are the measures whose bar is the least that they may be. The bars of the others are the most.
var atLeast = map[string]bool{"comments": true}

// readBars reads lines of a name and a number. Lines that begin with # and empty ones are for the reader.
func readBars(body string) (map[string]int, error) {
	all := make(map[string]int)
	for i, line := range strings.Split(body, "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) != 2 {
			return nil, fmt.Errorf("line %d: want a name and a number", i+1)
		}
		bar, err := strconv.Atoi(fields[1])
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		if _, twice := all[fields[0]]; twice {
			return nil, fmt.Errorf("line %d: %s has two bars", i+1, fields[0])
		}
		all[fields[0]] = bar
	}
	return all, nil
}

// compare holds what was measured against the bars: wrong fails, better is worth another bar.
func compare(got map[string]measured, bars map[string]int) (wrong, better []string) {
	for _, name := range slices.Sorted(maps.Keys(got)) {
		m := got[name]
		bar, there := bars[name]
		missed, passed := m.value > bar, m.value < bar
		if atLeast[name] {
			missed, passed = passed, missed
		}
		switch {
		case !there:
			wrong = append(wrong, fmt.Sprintf("%s is %d, and has no bar", name, m.value))
		case missed:
			wrong = append(wrong, fmt.Sprintf("%s is %d, the bar is %d; most are in: %s", name, m.value, bar, strings.Join(m.of, ", ")))
		case passed:
			better = append(better, fmt.Sprintf("%s is %d: the bar can be set there, from %d", name, m.value, bar))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(bars)) {
		if _, there := got[name]; !there {
			wrong = append(wrong, fmt.Sprintf("%s has a bar, and is no measure", name))
		}
	}
	return wrong, better
}

// TestBars: the project is not larger, nor more entangled, than its bars say (CONTRIBUTING, "Bars"). Run it with -v
// for the table.
func TestBars(t *testing.T) {
	project, err := checkout()
	if err != nil {
		t.Fatal(err)
	}
	body, err := os.ReadFile(barFile)
	if err != nil {
		t.Fatal(err)
	}
	bars, err := readBars(string(body))
	if err != nil {
		t.Fatalf("%s: %v", barFile, err)
	}
	got := project.measures()

	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "measure\tis\tbar\tmost are in")
	for _, name := range slices.Sorted(maps.Keys(got)) {
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\n", name, got[name].value, bars[name], strings.Join(got[name].of, ", "))
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &table)

	wrong, better := compare(got, bars)
	for _, line := range wrong {
		t.Errorf("%s: %s", barFile, line)
	}
	for _, line := range better {
		t.Logf("%s: %s", barFile, line)
	}
}

// TestCompareBars: what misses its bar fails, what is better is said, and a measure without a bar or a bar without a
// measure fails.
func TestCompareBars(t *testing.T) {
	bars, err := readBars("# a comment\n\nfiles 3\nlines 10\nold 1\nsame 2\ncomments 5\n")
	if err != nil {
		t.Fatal(err)
	}
	wrong, better := compare(map[string]measured{
		"files": {value: 4, of: []string{"a 3", "b 1"}}, "lines": {value: 9}, "new": {value: 1}, "same": {value: 2}, "comments": {value: 4},
	}, bars)
	wantWrong := []string{
		"comments is 4, the bar is 5; most are in: ",
		"files is 4, the bar is 3; most are in: a 3, b 1",
		"new is 1, and has no bar",
		"old has a bar, and is no measure",
	}
	if !slices.Equal(wrong, wantWrong) {
		t.Errorf("wrong %q, want %q", wrong, wantWrong)
	}
	if want := []string{"lines is 9: the bar can be set there, from 10"}; !slices.Equal(better, want) {
		t.Errorf("better %q, want %q", better, want)
	}
	for _, bad := range []string{"files", "files many", "files 1 a", "files 1\nfiles 2"} {
		if _, err := readBars(bad); err == nil {
			t.Errorf("%q is taken for bars", bad)
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

// Box is changed after it was made.
type Box struct {
	Field, other int
	part
	tray *tray
}

type part struct{ a, b, c int }

type tray struct{ cup cup }

type cup struct{ full bool }

// Record has members.
type Record struct {
	A, B, C, D, E, F, G, H int ` + "`json:\"a\"`" + `
}

func (b *Box) Open(n int) { b.Field = n } // no comment line

func short() { use(deep.Name) }

func Long() { /* not a line */ short() }

func made() *Box {
	b := &Box{}
	b.Field = 1
	return b
}

var hidden, Shown = 1, 2
`,
		"a/more.go": `package a

func (b *Box) Close() {}

func pour(t *tray) { t.cup.full = true }

func look(_ string, b *Box, r Record) {
	use(deepest{
		A: 1,
		B: 2,
	})
}

func use(any) {}
`,
		"a/a_test.go": `package a

func TestTwice() { (&Box{}).Open(1) }
`,
		"guard/x/deep/deep.go": `// Package deep is deep.
package deep

const Name = "rider"
`,
		"guard/y/y.go": `// Package y opens a box.
package y

import "example.com/m/a"

func Open(b *a.Box) {}
`,
		"internal/pgserver/p.go": "// Package pgserver is for tests.\npackage pgserver\n",
		"docs/request.md":        "1. `a/a.go` `Box.Open` opens.\n1. `a/a.go` `Long` is long.\n1. `a/more.go` `use` takes a string.\n",
		"docs/caddyfile.md":      "| option | what |\n|---|---|\n| `one`, `two` | `three` |\n| none | |\n| `one` | twice |\n",
		"bench/b.go":             "package bench\n\nfunc Bar() {}\n",
		"examples/e.go":          "package examples\n\nfunc Bar() {}\n",
		"guard/y/testdata/i.go":  "package ignored\n",
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
		"lines":           60,
		"comments":        83, // 5 of 60 lines
		"exported":        8,  // Box, Record, Open and Close of Box, Long, Shown; Name of deep, Open of y
		"circles":         0,
		"state-functions": 4, // Open, Close, look and Open of y take a Box
		"state-files":     3, // of these
		"fields":          6, // of Box: two, three of part, and tray, which pour takes too
		"function-lines":  5, // made; of look, the table does not count
		"wide-lines":      0,
		"options":         2, // one and two
		"stops":           3,
		"stop-files":      2,
		"stop-packages":   1,
	}
	for name, m := range got {
		if m.value != want[name] {
			t.Errorf("%s is %d of %q, want %d", name, m.value, m.of, want[name])
		}
	}
}
