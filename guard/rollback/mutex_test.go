package rollback_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strings"
	"testing"
)

// mutexes are those of the package, by how the code names them, with the place of each in the order in which they are
// taken. While the last ones are held nothing else is taken.
var mutexes = map[string]int{
	"c.deciding": 1, "r.mu": 2, "other.mu": 2, "c.mu": 3, "l.mu": 3, "c.locks.mu": 3, "q.mu": 3,
}

// receivers are the types of what methods are called of, and callers what is held by a method that calls a function
// which it was given.
var (
	receivers = map[string]string{
		"c": "Coordinator", "r": "run", "other": "run", "l": "workflowLocks", "c.locks": "workflowLocks", "a.locks": "workflowLocks",
		"w": "workflowLock", "q": "questions",
	}
	callers = map[string]string{
		"Coordinator.change": "r.mu", "Coordinator.behindLock": "c.deciding", "workflowLocks.remove": "l.mu",
	}
)

// locking is what a function takes and calls.
type locking struct {
	takes  map[int]bool // places of mutexes, of what it calls too
	calls  []string
	nested []nested
}

// nested is what a function takes, or calls, while it holds a mutex.
type nested struct{ held, takes, calls string }

// One order of all mutexes keeps any two goroutines from waiting for each other for ever.
func TestMutexesAreTakenInOneOrder(t *testing.T) {
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]*locking{}
	for _, file := range files {
		if !strings.HasSuffix(file.Name(), ".go") || strings.HasSuffix(file.Name(), "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file.Name(), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, is := d.(*ast.FuncDecl); is && f.Body != nil {
				name := f.Name.Name
				if f.Recv != nil {
					name = strings.TrimPrefix(nameOf(f.Recv.List[0].Type), "*") + "." + name
				}
				all[name] = &locking{takes: map[int]bool{}}
				all[name].read(t, name, f.Body, nil)
			}
		}
	}
	for changed := true; changed; {
		changed = false
		for _, one := range all {
			for _, name := range one.calls {
				if callee := all[name]; callee != nil {
					for place := range callee.takes {
						changed = changed || !one.takes[place]
						one.takes[place] = true
					}
				}
			}
		}
	}
	found := 0
	for name, one := range all {
		for _, n := range one.nested {
			places := map[int]bool{mutexes[n.takes]: n.takes != ""}
			if callee := all[n.calls]; callee != nil {
				places = callee.takes
			}
			for place, is := range places {
				found++
				if is && place <= mutexes[n.held] {
					t.Errorf("%s holds %s, and takes what does not come after it: %s%s", name, n.held, n.takes, n.calls)
				}
			}
		}
	}
	if accept := all["Coordinator.accept"]; accept == nil || !accept.takes[2] || !accept.takes[3] || found < 10 {
		t.Errorf("only %d times something is taken while something is held", found)
	}
}

// read notes what a body takes and calls while some mutexes are held. Another goroutine holds nothing.
func (k *locking) read(t *testing.T, name string, body ast.Node, held []string) {
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ReturnStmt: // whoever gets a function holds nothing
			for _, result := range n.Results {
				k.read(t, name, result, slices.DeleteFunc(slices.Clone(held), func(string) bool {
					_, is := result.(*ast.FuncLit)
					return is
				}))
			}
			return false
		case *ast.DeferStmt:
			return !strings.HasSuffix(nameOf(n.Call.Fun), ".Unlock") // that is at the end
		case *ast.CallExpr:
			on, what := "", nameOf(n.Fun)
			if i := strings.LastIndexByte(what, '.'); i >= 0 {
				on, what = what[:i], what[i+1:]
			}
			callee := receivers[on] + "." + what
			switch {
			case what == "Go":
				return false
			case what == "Lock":
				if mutexes[on] == 0 {
					t.Errorf("%s takes %s, which has no place in the order", name, on)
				}
				for _, mutex := range held {
					k.nested = append(k.nested, nested{held: mutex, takes: on})
				}
				k.takes[mutexes[on]] = true
				held = append(held, on)
			case what == "Unlock":
				held = slices.DeleteFunc(slices.Clone(held), func(mutex string) bool { return mutex == on })
			case receivers[on] != "":
				k.calls = append(k.calls, callee)
				for _, mutex := range held {
					k.nested = append(k.nested, nested{held: mutex, calls: callee})
				}
			}
			if mutex := callers[callee]; mutex != "" {
				for _, arg := range n.Args {
					if f, is := arg.(*ast.FuncLit); is {
						k.read(t, name, f.Body, append(slices.Clone(held), mutex))
					}
				}
				return false
			}
		}
		return true
	})
}

// nameOf is a chain of names, behind a star where it is a pointer.
func nameOf(x ast.Expr) string {
	switch x := x.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.StarExpr:
		return "*" + nameOf(x.X)
	case *ast.SelectorExpr:
		return nameOf(x.X) + "." + x.Sel.Name
	}
	return ""
}
