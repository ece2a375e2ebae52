package archtest

import (
	"go/ast"
	"go/token"
	"go/types"
	"maps"
	"path"
	"slices"
	"strings"
)

// state is what the product's types are made of and who handles them, by their declarations.
type state struct {
	t      *tree
	files  map[string][]*goFile
	done   map[string]*types.Package
	info   *types.Info
	spread map[*types.TypeName]map[string]bool // functions that take the type as receiver or parameter, by file and name
	change map[*types.TypeName]bool            // types of which a field is set after they were made
	users  map[*types.TypeName]map[string]bool // types and functions that name the type, but for its own methods
	record map[*types.TypeName]bool            // structs with members of JSON
}

// stateMeasures are about types that are changed after they were made: the functions that take one of them as receiver
// or parameter, in whatever package, and the files in which these stand; and the fields of a struct that is no record
// and no configuration, those of embedded structs and of structs that only it uses counted.
func (t *tree) stateMeasures() map[string]measured {
	s := &state{
		t: t, files: make(map[string][]*goFile), done: make(map[string]*types.Package),
		info:   &types.Info{Defs: make(map[*ast.Ident]types.Object), Uses: make(map[*ast.Ident]types.Object), Selections: make(map[*ast.SelectorExpr]*types.Selection), Types: make(map[ast.Expr]types.TypeAndValue)},
		spread: make(map[*types.TypeName]map[string]bool), change: make(map[*types.TypeName]bool),
		users: make(map[*types.TypeName]map[string]bool), record: make(map[*types.TypeName]bool),
	}
	for _, f := range t.product() {
		s.files[f.dir] = append(s.files[f.dir], f)
	}
	dirs := slices.Sorted(maps.Keys(s.files))
	for _, dir := range dirs {
		_, _ = s.Import(path.Join(t.module, dir)) // never fails
	}
	for _, dir := range dirs {
		for _, f := range s.files[dir] {
			for _, decl := range f.ast.Decls {
				s.read(f, decl)
			}
		}
	}
	functions, files, fields := make(map[string]int), make(map[string]int), make(map[string]int)
	for name, takers := range s.spread {
		if !s.change[name] {
			continue
		}
		in := make(map[string]bool)
		for taker := range takers {
			file, _, _ := strings.Cut(taker, " ")
			in[file] = true
		}
		functions[s.named(name)], files[s.named(name)] = len(takers), len(in)
	}
	for _, dir := range dirs {
		scope := s.done[path.Join(t.module, dir)].Scope()
		for _, n := range scope.Names() {
			if name, ok := scope.Lookup(n).(*types.TypeName); ok && !s.record[name] && structOf(name.Type()) != nil {
				fields[s.named(name)] = s.fields(name, nil)
			}
		}
	}
	return map[string]measured{
		"state-functions": {most(functions), largest(functions)},
		"state-files":     {most(files), largest(files)},
		"fields":          {most(fields), largest(fields)},
	}
}

func most(counted map[string]int) int {
	n := 0
	for _, is := range counted {
		n = max(n, is)
	}
	return n
}

func (s *state) named(name *types.TypeName) string {
	return strings.TrimPrefix(name.Pkg().Path(), s.t.module+"/") + "." + name.Name()
}

// Import implements types.Importer. The packages of other modules are empty: nothing is compiled for this.
func (s *state) Import(imported string) (*types.Package, error) {
	if pkg, ok := s.done[imported]; ok {
		return pkg, nil
	}
	ours, ok := strings.CutPrefix(imported+"/", s.t.module+"/")
	var files []*ast.File
	for _, f := range s.files[path.Clean(ours)] {
		files = append(files, f.ast)
	}
	if !ok || len(files) == 0 {
		pkg := types.NewPackage(imported, path.Base(imported))
		pkg.MarkComplete()
		s.done[imported] = pkg
		return pkg, nil
	}
	config := types.Config{Importer: s, Error: func(error) {}}
	pkg, _ := config.Check(imported, s.t.fset, files, s.info) // unknown names are expected
	s.done[imported] = pkg
	return pkg, nil
}

// typeName is the declared struct of this tree that typ is, or points to; nil if it is none.
func (s *state) typeName(typ types.Type) *types.TypeName {
	if p, ok := types.Unalias(typ).(*types.Pointer); ok {
		typ = p.Elem()
	}
	n, ok := types.Unalias(typ).(*types.Named)
	if !ok || n.Obj().Pkg() == nil || !within(n.Obj().Pkg().Path(), s.t.module) || structOf(n) == nil {
		return nil
	}
	return n.Origin().Obj()
}

func structOf(typ types.Type) *types.Struct {
	is, _ := typ.Underlying().(*types.Struct)
	return is
}

func add(to map[*types.TypeName]map[string]bool, name *types.TypeName, what string) {
	if to[name] == nil {
		to[name] = make(map[string]bool)
	}
	to[name][what] = true
}

// read reads one declaration.
func (s *state) read(f *goFile, decl ast.Decl) {
	fn, ok := decl.(*ast.FuncDecl)
	if !ok {
		for _, spec := range decl.(*ast.GenDecl).Specs {
			user := f.path
			if typ, ok := spec.(*ast.TypeSpec); ok {
				name, ok := s.info.Defs[typ.Name].(*types.TypeName)
				if !ok {
					continue // declared anew for another system
				}
				user = s.named(name)
				if body, ok := typ.Type.(*ast.StructType); ok {
					s.record[name] = slices.ContainsFunc(body.Fields.List, func(field *ast.Field) bool {
						return field.Tag != nil && strings.Contains(field.Tag.Value, "json:")
					})
				}
			}
			s.uses(spec, user)
		}
		return
	}
	user := f.path + " " + fn.Name.Name
	takes := fn.Type.Params.List
	if fn.Recv != nil {
		takes = append(slices.Clone(fn.Recv.List), takes...)
	}
	for i, field := range takes {
		name := s.typeName(s.info.TypeOf(field.Type))
		if name == nil {
			continue
		}
		if fn.Recv != nil && i == 0 {
			user = s.named(name)
			add(s.spread, name, f.path+" "+name.Name()+"."+fn.Name.Name)
			continue
		}
		taker := f.path + " " + fn.Name.Name
		if fn.Recv != nil {
			taker = f.path + " " + baseName(fn.Recv.List[0].Type) + "." + fn.Name.Name
		}
		add(s.spread, name, taker)
	}
	s.uses(fn, user)
	if fn.Body != nil {
		s.changes(fn.Body)
	}
}

// uses notes that user names the types in n.
func (s *state) uses(n ast.Node, user string) {
	ast.Inspect(n, func(at ast.Node) bool {
		if id, ok := at.(*ast.Ident); ok {
			if name, ok := s.info.Uses[id].(*types.TypeName); ok && name.Pkg() != nil && within(name.Pkg().Path(), s.t.module) && s.named(name) != user {
				add(s.users, name, user)
			}
		}
		return true
	})
}

// changes notes the types of which body sets a field, but for values that it has just made.
func (s *state) changes(body *ast.BlockStmt) {
	made := make(map[types.Object]bool)
	ast.Inspect(body, func(at ast.Node) bool {
		switch at := at.(type) {
		case *ast.AssignStmt:
			for i, left := range at.Lhs {
				if id, ok := left.(*ast.Ident); ok && at.Tok == token.DEFINE && len(at.Lhs) == len(at.Rhs) && makes(at.Rhs[i]) {
					made[s.info.Defs[id]] = true
				} else if at.Tok != token.DEFINE {
					s.set(left, made)
				}
			}
		case *ast.ValueSpec:
			for i, id := range at.Names {
				made[s.info.Defs[id]] = len(at.Values) == 0 || i < len(at.Values) && makes(at.Values[i])
			}
		case *ast.IncDecStmt:
			s.set(at.X, made)
		case *ast.CallExpr:
			if id, ok := at.Fun.(*ast.Ident); ok && (id.Name == "delete" || id.Name == "clear") && len(at.Args) > 0 {
				s.set(at.Args[0], made)
			}
		}
		return true
	})
}

// makes reports whether e makes a value.
func makes(e ast.Expr) bool {
	switch e := ast.Unparen(e).(type) {
	case *ast.CompositeLit:
		return true
	case *ast.UnaryExpr:
		return e.Op == token.AND && makes(e.X)
	case *ast.CallExpr:
		id, ok := e.Fun.(*ast.Ident)
		return ok && id.Name == "new"
	}
	return false
}

// set notes what an assignment to e changes.
func (s *state) set(e ast.Expr, made map[types.Object]bool) {
	switch e := ast.Unparen(e).(type) {
	case *ast.SelectorExpr:
		if sel := s.info.Selections[e]; sel == nil || sel.Kind() != types.FieldVal || made[s.info.Uses[root(e)]] {
			return
		}
		of := s.info.TypeOf(e.X)
		if name := s.typeName(of); name != nil {
			s.change[name] = true
		}
		if _, pointer := of.Underlying().(*types.Pointer); !pointer {
			s.set(e.X, made) // what holds the value is changed too
		}
	case *ast.IndexExpr:
		s.set(e.X, made)
	case *ast.StarExpr:
		if name := s.typeName(s.info.TypeOf(e.X)); name != nil && !made[s.info.Uses[root(e)]] {
			s.change[name] = true
		}
	}
}

// root is the variable that an expression begins with.
func root(e ast.Expr) *ast.Ident {
	switch e := ast.Unparen(e).(type) {
	case *ast.Ident:
		return e
	case *ast.SelectorExpr:
		return root(e.X)
	case *ast.IndexExpr:
		return root(e.X)
	case *ast.StarExpr:
		return root(e.X)
	}
	return nil
}

// fields counts the fields of a struct, with those of the structs in it that are embedded or that it alone uses.
func (s *state) fields(name *types.TypeName, outer []*types.TypeName) int {
	n := 0
	body := structOf(name.Type())
	for i := range body.NumFields() {
		field := body.Field(i)
		inner := s.typeName(field.Type())
		if inner == nil || slices.Contains(outer, inner) || inner == name || !field.Embedded() && !s.alone(inner, name) {
			n++
			continue
		}
		n += s.fields(inner, append(slices.Clip(outer), name))
	}
	return n
}

// alone reports whether only user, with its methods, names inner.
func (s *state) alone(inner, user *types.TypeName) bool {
	return len(s.users[inner]) == 1 && s.users[inner][s.named(user)]
}
