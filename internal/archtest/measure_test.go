package archtest

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// notProduct are the directories that the measures are not about: modules of their own, the tools of tests, and the store
// in memory, which only tests import.
var notProduct = []string{
	"bench", "e2e", "examples", "internal/archtest", "internal/mutate", "internal/pgserver", "guard/store/storetest", "guard/store/memory",
}

// product are the Go files that the measures are about.
func (t *tree) product() []*goFile {
	var files []*goFile
	for i := range t.gos {
		if f := &t.gos[i]; !f.test && !within(f.dir, notProduct...) {
			files = append(files, f)
		}
	}
	return files
}

// measured is one number, and what it was counted from, largest first, for the reader of
// the table.
type measured struct {
	value int
	of    []string
}

// measures are the numbers that have bars, by name.
func (t *tree) measures() map[string]measured {
	files := t.product()
	lines, comments, wide := 0, 0, make(map[string]int)
	for _, f := range files {
		lines += f.lines
		comments += t.commentLines(f)
		for line := range strings.Lines(f.body) {
			if utf8.RuneCountInString(line) > 120+1 { // and the end of the line
				wide[f.path]++
			}
		}
	}
	all := t.stopMeasures()
	maps.Copy(all, t.stateMeasures())
	maps.Copy(all, map[string]measured{
		"lines":          {value: lines},
		"comments":       {value: (1000*comments + lines/2) / lines},
		"exported":       exportedNames(files),
		"function-lines": functionLines(files),
		"wide-lines":     {sum(wide), largest(wide)},
		"options":        t.options(),
		"circles":        t.circles(),
	})
	return all
}

// options counts the words of code in the first cells of the tables of options, each once.
func (t *tree) options() measured {
	words := make(map[string]bool)
	for _, f := range t.texts {
		if f.path != "docs/caddyfile.md" {
			continue
		}
		for line := range strings.Lines(f.body) {
			cell, _, _ := strings.Cut(strings.TrimPrefix(strings.ReplaceAll(line, `\|`, " "), "|"), "|")
			if !strings.HasPrefix(line, "|") {
				continue
			}
			for _, m := range optionWord.FindAllStringSubmatch(cell, -1) {
				words[m[1]] = true
			}
		}
	}
	return measured{value: len(words)}
}

var optionWord = regexp.MustCompile("`([a-z_0-9]+)[ `]")

// functionLines is the length of the longest function, without what composite literals of several lines hold: tables
// are no code.
func functionLines(files []*goFile) measured {
	per, most := make(map[string]int), 0
	for _, f := range files {
		for _, decl := range f.ast.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			n := f.span(fn)
			ast.Inspect(fn.Body, func(at ast.Node) bool {
				table, ok := at.(*ast.CompositeLit)
				if ok {
					n -= f.span(table) - 1
				}
				return !ok
			})
			per[f.path+" "+fn.Name.Name] = n
			most = max(most, n)
		}
	}
	return measured{most, largest(per)}
}

func sum(counted map[string]int) int {
	total := 0
	for _, n := range counted {
		total += n
	}
	return total
}

// commentLines counts the lines of f that hold nothing but a comment.
func (t *tree) commentLines(f *goFile) int {
	n := 0
	for _, group := range f.ast.Comments {
		for _, c := range group.List {
			from := t.fset.Position(c.Pos())
			n += t.fset.Position(c.End()).Line - from.Line
			start := from.Offset - (from.Column - 1)
			if strings.TrimSpace(f.body[start:from.Offset]) == "" {
				n++
			}
		}
	}
	return n
}

// exportedNames counts what a package shows: its exported constants, variables, types and
// functions, and the exported methods of its exported types. Fields are not counted, nor
// the methods of interfaces: they come with their type.
func exportedNames(files []*goFile) measured {
	per := make(map[string]int)
	for _, f := range files {
		for _, decl := range f.ast.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				if decl.Name.IsExported() && (decl.Recv == nil || token.IsExported(baseName(decl.Recv.List[0].Type))) {
					per[f.dir]++
				}
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						if spec.Name.IsExported() {
							per[f.dir]++
						}
					case *ast.ValueSpec:
						for _, name := range spec.Names {
							if name.IsExported() {
								per[f.dir]++
							}
						}
					}
				}
			}
		}
	}
	return measured{sum(per), largest(per)}
}

// circles counts the pairs of neighbouring directories, each with everything below it,
// that import one another. Go forbids it to packages only. Those at the root are not
// neighbours: rule imports has their order.
func (t *tree) circles() measured {
	imports := make(map[[2]string]bool) // from, to
	for _, f := range t.product() {
		for _, imported := range f.imports() {
			ours, ok := strings.CutPrefix(imported, t.module+"/")
			if !ok {
				continue
			}
			from, to := strings.Split(f.dir, "/"), strings.Split(ours, "/")
			n := 0
			for n < len(from) && n < len(to) && from[n] == to[n] {
				n++
			}
			if n > 0 && n < len(from) && n < len(to) {
				imports[[2]string{strings.Join(from[:n+1], "/"), strings.Join(to[:n+1], "/")}] = true
			}
		}
	}
	var found []string
	for pair := range imports {
		if back := [2]string{pair[1], pair[0]}; pair[0] < pair[1] && imports[back] {
			found = append(found, pair[0]+" <-> "+pair[1])
		}
	}
	slices.Sort(found)
	return measured{len(found), found}
}

// largest are the first few of counted, with their numbers.
func largest(counted map[string]int) []string {
	names := slices.SortedFunc(maps.Keys(counted), func(a, b string) int {
		return cmp.Or(cmp.Compare(counted[b], counted[a]), cmp.Compare(a, b))
	})
	var top []string
	for _, name := range names[:min(len(names), 5)] {
		top = append(top, fmt.Sprintf("%s %d", name, counted[name]))
	}
	return top
}
