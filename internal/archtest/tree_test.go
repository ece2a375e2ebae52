package archtest

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// tree is a checkout: its Go files parsed, its other texts read.
type tree struct {
	module string // the root module's path
	fset   *token.FileSet
	gos    []goFile
	texts  []textFile
	paths  map[string]bool // every file and directory, by slash path
}

// goFile is one parsed file.
type goFile struct {
	path  string // slash path from the root
	dir   string // its directory; "." is the root
	test  bool   // name ends in _test.go
	lines int
	body  string
	ast   *ast.File
	fset  *token.FileSet
}

// span is how many lines n takes.
func (f *goFile) span(n ast.Node) int {
	return f.fset.Position(n.End()).Line - f.fset.Position(n.Pos()).Line + 1
}

// textFile is one file that people read or programs run, Go files included.
type textFile struct {
	path string
	body string
}

// violation is one place where a rule is broken.
type violation struct {
	rule, where, what string
}

func (v violation) String() string { return fmt.Sprintf("%s: %s: %s", v.where, v.rule, v.what) }

// textEndings are the names by which a file counts as text.
var textEndings = []string{".go", ".md", ".sh", ".sql", ".yml", ".yaml", ".txt", ".html", ".css", ".js", "Dockerfile", "Makefile", "Caddyfile", ".example", ".dockerignore", ".gitignore", ".ci/run"}

// load reads the checkout at root. testdata holds what tests are fed with, so it is
// left out, as are directories that Go itself does not see; .ci and .github are the
// project's own.
func load(root string) (*tree, error) {
	t := &tree{fset: token.NewFileSet(), paths: make(map[string]bool)}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		t.paths[rel] = true
		name := d.Name()
		if d.IsDir() {
			hidden := strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_")
			if rel != "." && (name == "testdata" || name == "dist" || name == "node_modules" || hidden && name != ".ci" && name != ".github") {
				return filepath.SkipDir
			}
			return nil
		}
		return t.read(p, rel)
	})
	if err != nil {
		return nil, err
	}
	if t.module == "" {
		return nil, fmt.Errorf("no go.mod at %s", root)
	}
	return t, nil
}

func (t *tree) read(file, rel string) error {
	if !slices.ContainsFunc(textEndings, func(end string) bool { return strings.HasSuffix(rel, end) }) && rel != "go.mod" {
		return nil
	}
	body, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if rel == "go.mod" {
		line, _ := bufio.NewReader(strings.NewReader(string(body))).ReadString('\n')
		t.module = strings.TrimSpace(strings.TrimPrefix(line, "module "))
		return nil
	}
	t.texts = append(t.texts, textFile{path: rel, body: string(body)})
	if !strings.HasSuffix(rel, ".go") || strings.HasPrefix(rel, ".") {
		return nil
	}
	parsed, err := parser.ParseFile(t.fset, rel, body, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	t.gos = append(t.gos, goFile{
		path:  rel,
		dir:   path.Dir(rel),
		test:  strings.HasSuffix(rel, "_test.go"),
		lines: strings.Count(string(body), "\n"),
		body:  string(body),
		ast:   parsed,
		fset:  t.fset,
	})
	return nil
}

// imports are the import paths of f.
func (f *goFile) imports() []string {
	var all []string
	for _, spec := range f.ast.Imports {
		if p, err := strconv.Unquote(spec.Path.Value); err == nil {
			all = append(all, p)
		}
	}
	return all
}

// localName is the name by which f calls the package at importPath; "" if it does
// not import it.
func (f *goFile) localName(importPath string) string {
	for _, spec := range f.ast.Imports {
		if spec.Path.Value != strconv.Quote(importPath) {
			continue
		}
		if spec.Name != nil {
			return spec.Name.Name
		}
		return path.Base(importPath)
	}
	return ""
}

// within reports whether the slash path dir is at or below one of roots. A root with
// an exclamation mark at its end stands for itself alone.
func within(dir string, roots ...string) bool {
	for _, root := range roots {
		if exact, ok := strings.CutSuffix(root, "!"); ok {
			if dir == exact {
				return true
			}
			continue
		}
		if dir == root || strings.HasPrefix(dir, root+"/") {
			return true
		}
	}
	return false
}
