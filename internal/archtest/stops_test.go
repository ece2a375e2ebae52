package archtest

import (
	"fmt"
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strings"
)

// stopsPage lists the functions that a guarded POST passes, and says which count.
const stopsPage = "docs/request.md"

// stopLine is a stop: the file, and the function or the type and its method.
var stopLine = regexp.MustCompile("^1\\. `([^`]+\\.go)` `([^`]+)`(.*)$")

// stop is one function of the list.
type stop struct {
	line                 int
	file, function, does string
}

// stops reads the list.
func (t *tree) stops() []stop {
	var all []stop
	for _, f := range t.texts {
		if f.path != stopsPage {
			continue
		}
		for i, line := range strings.Split(f.body, "\n") {
			if m := stopLine.FindStringSubmatch(line); m != nil {
				all = append(all, stop{i + 1, m[1], m[2], strings.TrimSpace(m[3])})
			}
		}
	}
	return all
}

// checkStops holds that each stop is listed once, exists in the file of its line, and says
// what it does.
func checkStops(t *tree) []violation {
	in := make(map[string][]string) // function -> its files
	for _, f := range t.product() {
		for _, decl := range f.ast.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok {
				name := fn.Name.Name
				if fn.Recv != nil {
					name = baseName(fn.Recv.List[0].Type) + "." + name
				}
				in[name] = append(in[name], f.path)
			}
		}
	}
	var found []violation
	listed := make(map[[2]string]bool)
	for _, s := range t.stops() {
		report := func(what string) {
			found = append(found, violation{"stops", fmt.Sprintf("%s:%d", stopsPage, s.line), what})
		}
		if key := [2]string{s.file, s.function}; listed[key] {
			report(s.function + " is listed twice")
		} else {
			listed[key] = true
		}
		if s.does == "" {
			report(s.function + " does not say what it does")
		}
		switch files := in[s.function]; {
		case slices.Contains(files, s.file):
		case len(files) == 0:
			report("there is no " + s.function + " in " + s.file)
		default:
			report("there is no " + s.function + " in " + s.file + ", but in " + strings.Join(files, ", "))
		}
	}
	return found
}

// stopMeasures count the stops, their files and their packages.
func (t *tree) stopMeasures() map[string]measured {
	stops := t.stops()
	files, packages := make(map[string]int), make(map[string]int)
	for _, s := range stops {
		files[s.file]++
		packages[path.Dir(s.file)]++
	}
	return map[string]measured{
		"stops":         {len(stops), largest(packages)},
		"stop-files":    {len(files), largest(files)},
		"stop-packages": {len(packages), largest(packages)},
	}
}
