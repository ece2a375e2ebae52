package archtest

import (
	"path"
	"strings"
)

// layer is what the packages of one part of the tree may import of ours, besides the
// packages below their own. A path with an exclamation mark at its end stands for that
// package alone, without it for all below it too.
type layer struct {
	part  string
	may   []string
	tests []string // what their tests may import besides
	bare  bool     // nothing of anybody else's either: the standard library does
}

// leaves import nothing of ours but small internal packages.
var leaves = []string{"guard/body!", "guard/seal!", "guard/store!", "guard/fleet!", "internal/jsonx"}

// layers is the order of the house: cmd -> caddymodule -> guard, guard/api ->
// guard/evidence -> guard/rollback and its neighbours -> guard/execution -> guard/store.
// The first layer that holds a package decides. A package in no layer is a new top-level
// entry: write its ADR, then its line here.
var layers = []layer{
	{part: "guard/body!", may: []string{"guard/problem!", "internal/jsonx"}},
	{part: "guard/seal!", may: []string{"internal/durable"}},
	{part: "guard/caller!", may: []string{"guard/body!", "guard/problem!"}, bare: true},
	{part: "guard/protocol!", may: []string{"guard/body!", "internal/jsonx"}},
	{part: "guard/drawing!", bare: true},
	{part: "guard/problem!", bare: true},
	{part: "guard/router!", may: []string{"guard/problem!", "guard/drawing!", "ect", "internal/jsonx"}},
	{part: "guard/plan!", may: []string{"guard/workflow!", "guard/store!", "guard/problem!", "breaker", "internal/jsonx"}, tests: []string{"ect", "guard"}, bare: true},
	{part: "guard/store!"},
	{part: "guard/store", may: []string{"guard/store!", "internal/durable"}, tests: []string{"guard/store", "guard/fleet!", "internal"}},
	{part: "guard/fleet!", may: []string{"guard/store!"}, tests: []string{"guard/store", "internal"}},
	{part: "guard/execution!", may: leaves, tests: []string{"guard", "internal"}},
	{part: "guard/answer!", may: []string{"guard/execution!", "guard/protocol!"}},
	{part: "guard/workflow!", may: []string{"ect"}, tests: []string{"internal"}},
	{part: "guard/hitl!", may: append([]string{"guard/router!", "guard/problem!"}, leaves...), tests: []string{"guard", "internal"}},
	{part: "guard/checkpoint!", may: append([]string{"guard/execution!"}, leaves...), tests: []string{"guard", "internal"}},
	{part: "guard/rollback", may: append([]string{
		"guard/execution!", "guard/checkpoint!", "guard/hitl!", "guard/workflow!", "guard/protocol!", "guard/router!", "guard/problem!", "guard/drawing!", "ect",
	}, leaves...), tests: []string{"guard", "internal"}},
	{part: "guard/evidence!", may: append([]string{
		"guard/execution!", "guard/checkpoint!", "guard/hitl!", "guard/rollback!", "guard/workflow!", "guard/plan!", "guard/router!", "guard/problem!", "guard/drawing!", "ect", "breaker", "internal/durable",
	}, leaves...), tests: []string{"guard", "ect", "internal"}},
	{part: "guard/api!", may: append([]string{
		"guard/execution!", "guard/checkpoint!", "guard/hitl!", "guard/rollback!", "guard/workflow!", "guard/plan!", "guard/evidence!", "guard/answer!", "guard/drawing!", "guard/problem!", "guard/router!", "ect", "breaker",
	}, leaves...), tests: []string{"guard", "ect", "internal"}},
	{part: "guard/circuits!", may: append([]string{"breaker"}, leaves...), tests: []string{"guard", "internal"}},
	{part: "guard/cascades!", may: append([]string{"guard/hitl!", "guard/evidence!", "guard/api!", "ect", "breaker"}, leaves...), tests: []string{"guard", "internal"}},
	{part: "guard/gateway!", may: append([]string{"guard!", "guard/execution!"}, leaves...), tests: []string{"guard", "internal"}},
	{part: "guard!", may: append([]string{
		"guard/execution!", "guard/checkpoint!", "guard/hitl!", "guard/rollback", "guard/workflow!", "guard/plan!", "guard/evidence!", "guard/answer!", "guard/caller!", "guard/protocol!", "guard/problem!", "ect", "breaker",
	}, leaves...), tests: []string{"guard", "internal"}},
	{part: "breaker/jsontime!", bare: true},
	{part: "breaker", may: []string{"breaker"}, tests: []string{"internal"}, bare: true},
	// The ledger stands on the storage contract and on nothing else of the guard.
	{part: "ect/ledger!", may: []string{"ect", "guard/store!"}, tests: []string{"guard/store", "guard/seal!", "internal"}},
	{part: "ect", may: []string{"ect", "internal/durable", "internal/jsonx"}, tests: []string{"internal"}},
	{part: "caddymodule/option!", may: []string{"internal/jsonx", "internal/suggest"}},
	{part: "caddymodule", may: []string{"caddymodule", "guard", "breaker", "ect", "internal/durable", "internal/jsonx"}, tests: []string{".!", "internal"}},
	{part: ".!", may: []string{"caddymodule!"}, tests: []string{"internal"}},
	{part: "cmd", may: []string{".!", "caddymodule"}, tests: []string{"internal"}},
	{part: "e2e", may: []string{".!", "caddymodule", "guard", "breaker", "ect", "e2e", "internal"}},
	{part: "bench", may: []string{".!", "caddymodule", "guard", "breaker", "ect", "bench", "internal"}},
	{part: "examples", may: []string{"ect", "internal/durable", "guard", "guard/execution", "guard/problem", "guard/store"}},
	{part: "internal", may: []string{"internal"}},
}

// fence keeps other people's modules where they are known.
type fence struct {
	module string // import path prefix
	inside []string
	tests  bool // also allowed in every _test.go
	hidden bool // and shown by no exported name there
}

var fences = []fence{
	{module: "github.com/caddyserver", inside: []string{"caddymodule", "cmd", ".!", "e2e", "bench"}},
	{module: "go.uber.org/zap", inside: []string{"caddymodule", "cmd", ".!", "e2e", "bench"}},
	{module: "github.com/dgraph-io", inside: []string{"guard/store/badger", "bench"}},
	{module: "github.com/jackc/pgx", inside: []string{"guard/store/postgres", "bench"}},
	{module: "github.com/gofiber", inside: []string{"bench"}}, // a peer to compare with
	{module: "github.com/lestrrat-go", inside: []string{"ect!"}, hidden: true},
	{module: "github.com/anishathalye/porcupine", inside: []string{"guard/store/storetest"}, tests: true},
}

// checkImports holds the directions of imports.
func checkImports(t *tree) []violation {
	var found []violation
	for i := range t.gos {
		f := &t.gos[i]
		l := layerOf(f.dir)
		if l == nil {
			found = append(found, violation{"layers", f.path, "package " + f.dir + " has no place in the house"})
			continue
		}
		for _, imported := range f.imports() {
			if what := t.forbidden(f, l, imported); what != "" {
				found = append(found, violation{"imports", f.path, what})
			}
			for _, fence := range fences {
				if fence.hidden && !f.test && within(imported, fence.module) {
					found = append(found, t.shown(f, imported)...)
				}
			}
		}
	}
	return found
}

func layerOf(dir string) *layer {
	for i := range layers {
		if within(dir, layers[i].part) {
			return &layers[i]
		}
	}
	return nil
}

// forbidden says why f in layer l may not import the package, or nothing.
func (t *tree) forbidden(f *goFile, l *layer, imported string) string {
	if ours, ok := strings.CutPrefix(imported+"/", t.module+"/"); ok {
		dir := path.Clean(ours)
		// Packages below one's own are parts of it, except where a layer is a
		// single package.
		own := dir == f.dir || within(dir, f.dir) && !strings.HasSuffix(l.part, "!")
		if own || within(dir, l.may...) || f.test && within(dir, l.tests...) {
			return ""
		}
		return f.dir + " imports " + dir
	}
	if host, _, _ := strings.Cut(imported, "/"); l.bare && strings.Contains(host, ".") {
		return f.dir + " imports " + imported
	}
	for _, fence := range fences {
		if !within(imported, fence.module) || within(f.dir, fence.inside...) || fence.tests && f.test {
			continue
		}
		return f.dir + " imports " + imported
	}
	return ""
}
