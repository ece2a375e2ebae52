package archtest

import (
	"go/ast"
	"go/token"
)

// shown finds the exported declarations of f that name something of the imported
// package: who uses them would come to depend on it too. Bodies and unexported names
// are free to.
func (t *tree) shown(f *goFile, imported string) []violation {
	local := f.localName(imported)
	var found []violation
	look := func(name string, n ast.Node) {
		if n == nil {
			return
		}
		ast.Inspect(n, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == local {
					found = append(found, violation{"shown", t.at(sel), name + " shows " + local + "." + sel.Sel.Name})
				}
			}
			return true
		})
	}
	for _, decl := range f.ast.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if decl.Name.IsExported() && (decl.Recv == nil || token.IsExported(baseName(decl.Recv.List[0].Type))) {
				look(decl.Name.Name, decl.Type)
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				shownSpec(spec, look)
			}
		}
	}
	return found
}

// shownSpec looks at the types of exported names, and of the exported fields of a type.
func shownSpec(spec ast.Spec, look func(string, ast.Node)) {
	switch spec := spec.(type) {
	case *ast.TypeSpec:
		if !spec.Name.IsExported() {
			return
		}
		fields, ok := spec.Type.(*ast.StructType)
		if !ok {
			look(spec.Name.Name, spec.Type)
			return
		}
		for _, field := range fields.Fields.List {
			if len(field.Names) == 0 {
				look(spec.Name.Name, field.Type)
			}
			for _, name := range field.Names {
				if name.IsExported() {
					look(spec.Name.Name+"."+name.Name, field.Type)
				}
			}
		}
	case *ast.ValueSpec:
		for _, name := range spec.Names {
			if !name.IsExported() {
				continue
			}
			if spec.Type != nil {
				look(name.Name, spec.Type)
			}
			for _, value := range spec.Values {
				look(name.Name, value)
			}
		}
	}
}
