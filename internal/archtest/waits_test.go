package archtest

import (
	"go/ast"
	"slices"
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
