package archtest

import (
	"fmt"
	"go/ast"
	"go/token"
	"reflect"
	"strings"
)

// interfaceMethods need no comment: the interface that they fulfil says it.
var interfaceMethods = map[string]bool{"Error": true, "Unwrap": true, "String": true}

// checkDocs holds that every exported name says what it is for: packages, types,
// functions, methods of exported types, constants, variables, methods of interfaces
// that have more than one, and in caddymodule the fields of a configuration, whose
// comments become the manual on Caddy's site.
func checkDocs(t *tree) []violation {
	d := docs{tree: t, packages: make(map[string]bool)}
	seen := make(map[string]string) // directory of a package without a comment so far -> one of its files
	for i := range t.gos {
		f := &t.gos[i]
		if f.test {
			continue
		}
		if f.ast.Doc != nil {
			d.packages[f.dir] = true
		}
		if _, ok := seen[f.dir]; !ok {
			seen[f.dir] = f.path
		}
		d.file(f)
	}
	for dir, file := range seen {
		if !d.packages[dir] {
			d.found = append(d.found, violation{"docs", file, "package " + dir + " has no comment"})
		}
	}
	return d.found
}

type docs struct {
	*tree
	packages map[string]bool
	found    []violation
}

func (t *tree) at(n ast.Node) string {
	p := t.fset.Position(n.Pos())
	return fmt.Sprintf("%s:%d", p.Filename, p.Line)
}

func (d *docs) missing(n ast.Node, name string) {
	d.found = append(d.found, violation{"docs", d.at(n), name + " has no comment"})
}

func (d *docs) file(f *goFile) {
	for _, decl := range f.ast.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			d.function(decl)
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				d.spec(f, decl, spec)
			}
		}
	}
}

func (d *docs) function(fn *ast.FuncDecl) {
	if !fn.Name.IsExported() || fn.Doc != nil {
		return
	}
	name := fn.Name.Name
	if fn.Recv != nil {
		receiver := baseName(fn.Recv.List[0].Type)
		if !token.IsExported(receiver) || interfaceMethods[name] {
			return
		}
		name = receiver + "." + name
	}
	d.missing(fn, name)
}

// spec accepts a comment on the group, on the line, or above it.
func (d *docs) spec(f *goFile, decl *ast.GenDecl, spec ast.Spec) {
	switch spec := spec.(type) {
	case *ast.ValueSpec:
		if decl.Doc != nil || spec.Doc != nil || spec.Comment != nil {
			return
		}
		for _, name := range spec.Names {
			if name.IsExported() {
				d.missing(name, name.Name)
			}
		}
	case *ast.TypeSpec:
		if !spec.Name.IsExported() {
			return
		}
		if decl.Doc == nil && spec.Doc == nil && spec.Comment == nil {
			d.missing(spec, spec.Name.Name)
		}
		switch typ := spec.Type.(type) {
		case *ast.InterfaceType:
			d.methods(spec.Name.Name, typ)
		case *ast.StructType:
			if within(f.dir, "caddymodule") {
				d.fields(spec.Name.Name, typ)
			}
		}
	}
}

func (d *docs) methods(owner string, typ *ast.InterfaceType) {
	if len(typ.Methods.List) < 2 {
		return
	}
	for _, m := range typ.Methods.List {
		for _, name := range m.Names {
			if name.IsExported() && m.Doc == nil && m.Comment == nil {
				d.missing(m, owner+"."+name.Name)
			}
		}
	}
}

func (d *docs) fields(owner string, typ *ast.StructType) {
	for _, field := range typ.Fields.List {
		if field.Tag == nil || field.Doc != nil || field.Comment != nil {
			continue
		}
		tag := reflect.StructTag(strings.Trim(field.Tag.Value, "`")).Get("json")
		if tag == "" || tag == "-" {
			continue
		}
		for _, name := range field.Names {
			if name.IsExported() {
				d.missing(field, owner+"."+name.Name)
			}
		}
	}
}

// baseName is the name of a receiver's type without its pointer and parameters.
func baseName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return baseName(e.X)
	case *ast.IndexExpr:
		return baseName(e.X)
	case *ast.IndexListExpr:
		return baseName(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}
