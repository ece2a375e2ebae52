// Command mutate breaks the code on purpose, one place after another, each where a
// requirement of docs/conformance.md is held, and runs the tests that the requirement's row
// names. They must fail. It is run by hand (ADR 0058), from anywhere in the project:
//
//	go run ./internal/mutate [-only <regexp>] [-keep]
//
// It works in a copy of the tree as it stands, never in the tree itself. It exits with 1
// where a change survives, does not apply any more, or does not compile, and where the tests
// fail without it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// mutation is one change, and what must notice it.
type mutation struct {
	id     string   // of the requirement
	file   string   // slash path from the root
	old    string   // stands in it exactly once
	now    string   // takes its place
	dir    string   // package of the tests; empty is e2e
	tests  []string // must fail, at least one of them
	breaks string   // what is wrong then, in a few words
}

func (m *mutation) pkg() string {
	if m.dir == "" {
		return "./e2e/..."
	}
	return "./" + m.dir
}

// limit bounds one run of tests. The tests' own patience is 20 s an event.
const limit = 10 * time.Minute

func main() {
	only := flag.String("only", "", "try the requirements that match `regexp` alone")
	keep := flag.Bool("keep", false, "leave the copy where it is")
	flag.Parse()
	if err := run(os.Stdout, *only, *keep); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, only string, keep bool) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	chosen := slices.DeleteFunc(slices.Clone(mutations), func(m mutation) bool { return !wanted.MatchString(m.id) })
	if len(chosen) == 0 {
		return fmt.Errorf("no change is for %q", only)
	}
	root, err := projectRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	if keep {
		fmt.Fprintln(w, "the copy is", dir)
	} else {
		defer os.RemoveAll(dir)
	}
	if err := copyTree(root, dir); err != nil {
		return err
	}
	if err := sound(dir, chosen); err != nil {
		return err
	}
	bad := 0
	for _, m := range chosen {
		began := time.Now()
		verdict, good := try(dir, &m)
		if !good {
			bad++
		}
		fmt.Fprintf(w, "%-8s %s  %s: %s (%s, %.0f s)\n", verdict, m.id, m.file, m.breaks, strings.Join(m.tests, ", "), time.Since(began).Seconds())
	}
	fmt.Fprintf(w, "%d changes, %d of them not noticed or not tried\n", len(chosen), bad)
	if bad > 0 {
		return fmt.Errorf("%d of %d changes were not noticed, or could not be tried", bad, len(chosen))
	}
	return nil
}

// sound holds that the tests pass before anything is broken.
func sound(dir string, chosen []mutation) error {
	tests := make(map[string][]string) // package -> names
	for _, m := range chosen {
		tests[m.pkg()] = append(tests[m.pkg()], m.tests...)
	}
	for pkg, names := range tests {
		if out, err := runTests(dir, pkg, names); err != nil {
			return fmt.Errorf("the tests of %s fail without any change: %w\n%s", pkg, err, out)
		}
	}
	return nil
}

// try makes one change, runs its tests, and takes the change back.
func try(dir string, m *mutation) (verdict string, good bool) {
	at := filepath.Join(dir, filepath.FromSlash(m.file))
	text, err := os.ReadFile(at)
	if err != nil {
		return "GONE", false
	}
	if strings.Count(string(text), m.old) != 1 {
		return "MOVED", false
	}
	if err := os.WriteFile(at, []byte(strings.Replace(string(text), m.old, m.now, 1)), 0o600); err != nil {
		return "ERROR", false
	}
	out, err := runTests(dir, m.pkg(), m.tests)
	if restored := os.WriteFile(at, text, 0o600); restored != nil {
		return "ERROR", false
	}
	switch {
	case err == nil:
		return "SURVIVED", false
	case strings.Contains(out, "--- FAIL: "), strings.Contains(out, "panic: "):
		return "killed", true
	case strings.Contains(out, "[build failed]"):
		return "BROKEN", false
	}
	return "ERROR", false
}

// runTests runs tests of a package in the copy; an error says that they fail.
func runTests(dir, pkg string, names []string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	cmd := exec.CommandContext(ctx, "go", "test", pkg, "-count=1", "-vet=off", "-failfast", "-run", "^("+strings.Join(names, "|")+")$", "-v")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), err
	}
	for _, name := range names {
		if !strings.Contains(string(out), "--- PASS: "+name+" ") {
			return string(out), fmt.Errorf("%s did not run", name)
		}
	}
	return string(out), nil
}

// projectRoot is the directory with our go.mod, above the one that we stand in.
func projectRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", err
	}
	file := strings.TrimSpace(string(out))
	if file == "" || file == os.DevNull {
		return "", errors.New("this is no directory of the project")
	}
	return filepath.Dir(file), nil
}

// copyTree copies what belongs to the project, changed or not yet committed files too.
func copyTree(from, to string) error {
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = from
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("the files of the project: %w", err)
	}
	for _, name := range strings.Split(strings.TrimRight(string(out), "\x00"), "\x00") {
		body, err := os.ReadFile(filepath.Join(from, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and not committed yet
		}
		if err != nil {
			return err
		}
		at := filepath.Join(to, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(at, body, 0o600); err != nil {
			return err
		}
	}
	return nil
}
