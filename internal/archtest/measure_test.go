package archtest

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"maps"
	"path"
	"slices"
	"strings"
)

// product are the Go files that the measures are about: no tests, and without bench,
// which is a module of its own.
func (t *tree) product() []*goFile {
	var files []*goFile
	for i := range t.gos {
		if f := &t.gos[i]; !f.test && !within(f.dir, "bench") && !within(f.dir, "e2e") {
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

// measures are the numbers that the budgets bound, by name.
func (t *tree) measures() map[string]measured {
	files := t.product()
	packages := make(map[string]int)
	lines, comments := 0, 0
	for _, f := range files {
		packages[f.dir]++
		lines += f.lines
		comments += t.commentLines(f)
	}
	all := t.words()
	maps.Copy(all, t.stopMeasures())
	maps.Copy(all, map[string]measured{
		"files":          {value: len(files)},
		"packages":       {value: len(packages)},
		"lines":          {value: lines},
		"comments":       {value: (1000*comments + lines - 1) / lines},
		"exported":       exportedNames(files),
		"receiver-files": receiverFiles(files),
		"interfaces":     t.loneInterfaces(),
		"circles":        t.circles(),
		"used-once":      usedOnce(files),
	})
	return all
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
	total := 0
	for _, n := range per {
		total += n
	}
	return measured{total, largest(per)}
}

// receiverFiles is the largest number of files over which the methods of one type are
// spread.
func receiverFiles(files []*goFile) measured {
	spread := make(map[string]map[string]bool)
	for _, f := range files {
		for _, decl := range f.ast.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || fn.Recv == nil {
				continue
			}
			of := f.dir + "." + baseName(fn.Recv.List[0].Type)
			if spread[of] == nil {
				spread[of] = make(map[string]bool)
			}
			spread[of][f.path] = true
		}
	}
	per := make(map[string]int)
	most := 0
	for of, in := range spread {
		per[of] = len(in)
		most = max(most, len(in))
	}
	return measured{most, largest(per)}
}

// usedOnce counts the functions and methods with a body of at most eight lines that one
// place uses. Uses are counted by name, tests left out: within the package for what is not
// exported, in the whole tree for what is. So a method that shares its name with another
// counts as used more often, and the method of an interface as a use.
func usedOnce(files []*goFile) measured {
	const short = 8 + 2 // the lines of the head and of the last brace
	inPackage, anywhere := make(map[string]int), make(map[string]int)
	for _, f := range files {
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok {
				inPackage[f.dir+"."+id.Name]++
				anywhere[id.Name]++
			}
			return true
		})
	}
	per := make(map[string]int)
	total := 0
	for _, f := range files {
		for _, decl := range f.ast.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || fn.Body == nil || f.span(fn) > short {
				continue
			}
			uses := inPackage[f.dir+"."+fn.Name.Name]
			if fn.Name.IsExported() {
				uses = anywhere[fn.Name.Name]
			}
			if uses == 2 { // the declaration is the other
				per[f.dir]++
				total++
			}
		}
	}
	return measured{total, largest(per)}
}

// loneInterfaces counts the interfaces with methods that exactly one type of ours
// implements, tests left out. The types of other people's modules are all taken for the
// same unknown type: nothing is compiled for this.
func (t *tree) loneInterfaces() measured {
	c := checker{t: t, files: make(map[string][]*ast.File), done: make(map[string]*types.Package)}
	for _, f := range t.product() {
		c.files[f.dir] = append(c.files[f.dir], f.ast)
	}
	var interfaces []*types.TypeName
	concrete := make(map[*types.TypeName]*types.MethodSet)
	for _, dir := range slices.Sorted(maps.Keys(c.files)) {
		pkg, err := c.Import(path.Join(t.module, dir))
		if err != nil {
			continue
		}
		for _, name := range pkg.Scope().Names() {
			typ, ok := pkg.Scope().Lookup(name).(*types.TypeName)
			if !ok || typ.IsAlias() {
				continue
			}
			if inner, ok := typ.Type().Underlying().(*types.Interface); !ok {
				concrete[typ] = types.NewMethodSet(types.NewPointer(typ.Type()))
			} else if inner.IsMethodSet() && inner.NumMethods() > 0 {
				interfaces = append(interfaces, typ)
			}
		}
	}
	var lone []string
	for _, i := range interfaces {
		var by []string
		for typ, has := range concrete {
			if implements(has, i.Type().Underlying().(*types.Interface)) {
				by = append(by, typ.Name())
			}
		}
		if len(by) == 1 {
			lone = append(lone, fmt.Sprintf("%s.%s (%s)", i.Pkg().Name(), i.Name(), by[0]))
		}
	}
	return measured{len(lone), lone}
}

// implements reports whether has holds the methods of i. (types.Implements says yes to
// whatever embeds an unknown type.)
func implements(has *types.MethodSet, i *types.Interface) bool {
	for m := range i.Methods() {
		found := has.Lookup(m.Pkg(), m.Name())
		if found == nil || !types.Identical(found.Type(), m.Type()) {
			return false
		}
	}
	return true
}

// checker type-checks the declarations of the tree's own packages.
type checker struct {
	t     *tree
	files map[string][]*ast.File
	done  map[string]*types.Package
}

// Import implements types.Importer. Other people's packages are empty.
func (c *checker) Import(imported string) (*types.Package, error) {
	if pkg, ok := c.done[imported]; ok {
		return pkg, nil
	}
	ours, ok := strings.CutPrefix(imported+"/", c.t.module+"/")
	files := c.files[path.Clean(ours)]
	if !ok || len(files) == 0 {
		pkg := types.NewPackage(imported, path.Base(imported))
		pkg.MarkComplete()
		c.done[imported] = pkg
		return pkg, nil
	}
	config := types.Config{Importer: c, IgnoreFuncBodies: true, Error: func(error) {}}
	pkg, _ := config.Check(imported, c.t.fset, files, nil) // unknown names are expected
	c.done[imported] = pkg
	return pkg, nil
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
