package archtest

import (
	"cmp"
	"fmt"
	"go/ast"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

const (
	conformancePage = "docs/conformance.md"
	requirementList = "docs/requirements.txt"
)

// overTheWire are the packages whose tests are clients of a running gateway, over real
// sockets. Those below them count too.
var overTheWire = []string{"e2e"}

// kinds are what a row of the page can be, in the order of its table of counts.
var kinds = []string{"held", "held inside", "departed", "not yet"}

// strengths are those of the documents, in the same order.
var strengths = []string{"MUST", "SHOULD", "MAY", "DEF"}

var (
	requirementRow = regexp.MustCompile(`^\| ([A-Z]-[A-Za-z0-9.-]+) \|`)
	countRow       = regexp.MustCompile(`^\| (MUST|SHOULD|MAY|DEF) \|`)
	record         = regexp.MustCompile(`\]\((adr/[0-9]{4}-[a-z0-9-]+\.md)\)`)
	qualified      = regexp.MustCompile("`((?:Test|Fuzz|Benchmark|Example)[A-Z][A-Za-z0-9_]*)(?:/[^`]*)?`(?: of `([^`]+)`)?")
)

// row is a statement of the five documents with what became of it here.
type row struct {
	line                            int
	id, strength, kind, text, tests string
}

// checkConformance holds that the page of conformance has one row for each statement of the
// documents and for nothing else, each of one kind that says what its kind must, and that
// its counts are right. It also holds, for every document, that a test is named so that it
// can be found: with its package where several have one of that name.
func checkConformance(t *tree) []violation {
	packages := t.testPackages()
	found := t.ambiguous(packages)
	list, there := t.text(requirementList)
	if !there {
		return append(found, violation{"conformance", requirementList, "is not there"})
	}
	page, _ := t.text(conformancePage)
	want := make(map[string]string) // id -> strength
	for _, line := range strings.Split(list, "\n") {
		if id, strength, ok := strings.Cut(line, " "); ok && !strings.HasPrefix(line, "#") {
			want[id] = strength
		}
	}
	rows, counts := readConformance(page)
	say := func(line int, format string, args ...any) {
		found = append(found, violation{"conformance", fmt.Sprintf("%s:%d", conformancePage, line), fmt.Sprintf(format, args...)})
	}
	seen, tally := make(map[string]bool), make(map[string]int)
	for _, r := range rows {
		switch strength := want[r.id]; {
		case strength == "":
			say(r.line, "%s is no statement of the documents", r.id)
		case seen[r.id]:
			say(r.line, "%s has two rows", r.id)
		case strength != r.strength:
			say(r.line, "%s is %s, not %s", r.id, strength, r.strength)
		}
		seen[r.id] = true
		tally[r.strength+" "+r.kind]++
		if wrong := t.wrong(r, packages); wrong != "" {
			say(r.line, "%s %s", r.id, wrong)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(want)) {
		if !seen[id] {
			say(0, "%s has no row", id)
		}
	}
	for _, strength := range strengths {
		line, total := "| "+strength, 0
		for _, kind := range kinds {
			n := tally[strength+" "+kind]
			line, total = fmt.Sprintf("%s | %d", line, n), total+n
		}
		if line = fmt.Sprintf("%s | %d |", line, total); !slices.Contains(counts, line) {
			say(0, "the counts are %s", line)
		}
	}
	return found
}

// wrong says what a row lacks that its kind asks for.
func (t *tree) wrong(r row, packages map[string][]string) string {
	switch r.kind {
	case "held":
		for _, m := range qualified.FindAllStringSubmatch(r.tests, -1) {
			dirs := packages[m[1]]
			if m[2] != "" {
				dirs = []string{m[2]}
			}
			if slices.ContainsFunc(dirs, func(dir string) bool { return within(dir, overTheWire...) }) {
				return ""
			}
		}
		return "is held, and names no test over the wire"
	case "held inside":
		if !strings.HasPrefix(r.text, "Not over the wire: ") {
			return "is held inside, and does not begin with why no test over the wire shows it"
		}
	case "departed":
		m := record.FindStringSubmatch(r.text)
		if m == nil || !t.paths[path.Join(path.Dir(conformancePage), m[1])] {
			return "is departed from, and links to no record"
		}
	case "not yet":
		if !strings.HasPrefix(r.text, "Missing: ") {
			return "is not held, and does not begin with what is missing"
		}
	default:
		return fmt.Sprintf("is %q, which is no kind", r.kind)
	}
	return ""
}

// readConformance reads the rows of the page, and those of its table of counts.
func readConformance(page string) (rows []row, counts []string) {
	for i, line := range strings.Split(page, "\n") {
		if countRow.MatchString(line) {
			counts = append(counts, line)
		}
		m := requirementRow.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		r := row{line: i + 1, id: m[1]}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		for n, cell := range []*string{1: &r.strength, 3: &r.kind, 4: &r.text, 5: &r.tests} {
			if cell != nil && n < len(cells) {
				*cell = cells[n]
			}
		}
		rows = append(rows, r)
	}
	return rows, counts
}

// ambiguous finds where a document names a test that several packages have without saying
// whose, or says that a package has a test which it has not.
func (t *tree) ambiguous(packages map[string][]string) (found []violation) {
	for _, f := range t.texts {
		if !strings.HasSuffix(f.path, ".md") || within(f.path, "internal/archtest") {
			continue
		}
		for i, line := range strings.Split(f.body, "\n") {
			for _, m := range qualified.FindAllStringSubmatch(line, -1) {
				at, dirs := fmt.Sprintf("%s:%d", f.path, i+1), packages[m[1]]
				switch {
				case m[2] == "" && len(dirs) > 1:
					found = append(found, violation{"conformance", at, fmt.Sprintf("%s is a test of %s: write of which", m[1], strings.Join(dirs, ", "))})
				case m[2] != "" && len(dirs) > 0 && !slices.ContainsFunc(dirs, func(dir string) bool { return within(dir, m[2]) }):
					found = append(found, violation{"conformance", at, fmt.Sprintf("%s is no test of %s", m[1], m[2])})
				}
			}
		}
	}
	return found
}

// testPackages are the directories in which each test stands.
func (t *tree) testPackages() map[string][]string {
	dirs := make(map[string][]string)
	for i := range t.gos {
		f := &t.gos[i]
		if !f.test {
			continue
		}
		for _, decl := range f.ast.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil && !slices.Contains(dirs[fn.Name.Name], f.dir) {
				dirs[fn.Name.Name] = append(dirs[fn.Name.Name], f.dir)
			}
		}
	}
	for _, all := range dirs {
		slices.SortFunc(all, cmp.Compare[string])
	}
	return dirs
}

// text is the file at a path.
func (t *tree) text(at string) (string, bool) {
	for _, f := range t.texts {
		if f.path == at {
			return f.body, true
		}
	}
	return "", false
}
