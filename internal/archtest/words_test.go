package archtest

import (
	"fmt"
	"go/ast"
	"path"
	"regexp"
	"strings"
)

// unfinished are the words by which work is put off. An issue is the place for that.
var unfinished = regexp.MustCompile(`\b(TODO|FIXME|XXX|HACK)\b|\bnot implemented\b|\bin a real (system|implementation)\b`)

// homes are absolute paths that exist on somebody's machine only.
var homes = regexp.MustCompile("(?:^|[\\s\"'`(=:])/(?:home|root|Users|work|farm)/[A-Za-z0-9._-]+")

// upwards are relative paths that begin by going up.
var upwards = regexp.MustCompile(`(?:^|[^A-Za-z0-9_./-])((?:\.\./)+[A-Za-z0-9_.-][A-Za-z0-9_./-]*)`)

// link is the target of a Markdown link or picture.
var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// testName is a test that a document names, in backticks.
var testName = regexp.MustCompile("`((?:Test|Fuzz|Benchmark|Example)[A-Z][A-Za-z0-9_]*)(?:/[^`]*)?`")

// checkWords holds that the project stands alone and is finished: no work put off, no
// path of one machine, no path that leaves the repository, no link to a file that is
// not there, no document that names a test that is not there. This package has to name
// the words, so it is left out.
func checkWords(t *tree) []violation {
	var found []violation
	functions := t.functions()
	for _, f := range t.texts {
		if within(f.path, "internal/archtest") {
			continue
		}
		for i, line := range strings.Split(f.body, "\n") {
			at := fmt.Sprintf("%s:%d", f.path, i+1)
			if w := unfinished.FindString(line); w != "" {
				found = append(found, violation{"words", at, w})
			}
			if w := homes.FindString(line); w != "" {
				found = append(found, violation{"words", at, "path of one machine " + strings.TrimSpace(w)})
			}
			for _, m := range upwards.FindAllStringSubmatch(line, -1) {
				if to := path.Join(path.Dir(f.path), m[1]); strings.HasPrefix(to, "..") {
					found = append(found, violation{"words", at, m[1] + " leaves the repository"})
				}
			}
			if !strings.HasSuffix(f.path, ".md") {
				continue
			}
			for _, m := range link.FindAllStringSubmatch(line, -1) {
				if to := m[1]; t.broken(f.path, to) {
					found = append(found, violation{"links", at, to + " is not there"})
				}
			}
			for _, m := range testName.FindAllStringSubmatch(line, -1) {
				if !functions[m[1]] {
					found = append(found, violation{"links", at, "no test is called " + m[1]})
				}
			}
		}
	}
	return found
}

// broken reports whether a link from the file at from leads to a file of ours that
// does not exist.
func (t *tree) broken(from, to string) bool {
	if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
		return false
	}
	to, _, _ = strings.Cut(to, "#")
	return to != "" && !t.paths[path.Join(path.Dir(from), to)]
}

// functions are the names of all functions in tests.
func (t *tree) functions() map[string]bool {
	names := make(map[string]bool)
	for _, f := range t.gos {
		if !f.test {
			continue
		}
		for _, decl := range f.ast.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil {
				names[fn.Name.Name] = true
			}
		}
	}
	return names
}
