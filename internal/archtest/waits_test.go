package archtest

import (
	"go/ast"
	"path"
	"slices"
	"strconv"
)

// impatient are the functions by which a test comes to depend on the machine's speed,
// or decides not to run.
var impatient = map[string][]string{
	"time":    {"Sleep"},
	"testing": {"Short"},
}

// skips are the methods of a test that leave it out, and testers what it is called.
var (
	skips   = []string{"Skip", "Skipf", "SkipNow"}
	testers = []string{"t", "b", "f", "tb"}
)

// checkWaits holds that tests wake on events: nothing sleeps, and nothing is skipped.
// Packages made for tests are held to it too. Inside synctest.Test a sleep is an
// event, since the time there is the bubble's own.
func checkWaits(t *tree) []violation {
	var found []violation
	for i := range t.gos {
		f := &t.gos[i]
		if !f.test && !within(f.dir, "e2e", "internal", "guard/store/storetest") {
			continue
		}
		var look func(n ast.Node, bubble bool)
		look = func(root ast.Node, bubble bool) {
			ast.Inspect(root, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok && !bubble && f.calls(call.Fun, "testing/synctest", "Test") {
					look(call, true)
					return false
				}
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if what := f.waits(sel); what != "" && !(bubble && what == "time.Sleep") {
					found = append(found, violation{"waits", t.at(n), what})
				}
				return true
			})
		}
		look(f.ast, false)
	}
	return found
}

// calls reports whether e is the function called name of the package at importPath.
func (f *goFile) calls(e ast.Expr, importPath, name string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	x, ok := sel.X.(*ast.Ident)
	return ok && x.Name == f.localName(importPath)
}

// waits is what sel names of the forbidden, or nothing.
func (f *goFile) waits(sel *ast.SelectorExpr) string {
	for pkg, names := range impatient {
		for _, name := range names {
			if f.calls(sel, pkg, name) {
				return pkg + "." + name
			}
		}
	}
	x, ok := sel.X.(*ast.Ident)
	if ok && slices.Contains(testers, x.Name) && slices.Contains(skips, sel.Sel.Name) && f.localName("testing") != "" {
		return x.Name + "." + sel.Sel.Name
	}
	return ""
}

// checkStacks holds that a function for which a test looks in the goroutines' stacks, with
// waiting("package.(*Type).method"), exists. After a move or a renaming a test that waits
// until nobody is in it would otherwise wait for nothing.
func checkStacks(t *tree) []violation {
	there := map[string]bool{}
	for i := range t.gos {
		f := &t.gos[i]
		for _, decl := range f.ast.Decls {
			if d, ok := decl.(*ast.FuncDecl); ok {
				there[path.Base(f.dir)+"."+stackName(d)] = true
			}
		}
	}
	var found []violation
	for i := range t.gos {
		f := &t.gos[i]
		ast.Inspect(f.ast, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 1 {
				return true
			}
			name, ok := call.Fun.(*ast.Ident)
			text, literal := call.Args[0].(*ast.BasicLit)
			if !ok || !literal || name.Name != "waiting" {
				return true
			}
			if function, err := strconv.Unquote(text.Value); err == nil && !there[function] {
				found = append(found, violation{"stacks", t.at(n), "there is no " + function})
			}
			return true
		})
	}
	return found
}

// stackName is how a stack names a function, after its package.
func stackName(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return d.Name.Name
	}
	of := ""
	switch receiver := d.Recv.List[0].Type.(type) {
	case *ast.StarExpr:
		if id, ok := receiver.X.(*ast.Ident); ok {
			of = "(*" + id.Name + ")"
		}
	case *ast.Ident:
		of = receiver.Name
	}
	return of + "." + d.Name.Name
}
