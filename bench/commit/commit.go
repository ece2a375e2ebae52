// Package commit builds the benchmark against the product of another commit.
package commit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Build is a program that has the parts of the benchmark.
type Build struct {
	// Name is what was asked for, Commit its hash; empty for the working tree.
	Name   string `json:"name"`
	Commit string `json:"commit,omitempty"`
	// OwnBench says that the benchmark is that of the commit too, since this one does
	// not build against its product.
	OwnBench bool `json:"own_bench,omitempty"`
	// Binary is the program; empty is the one that runs.
	Binary string `json:"-"`
}

// WorkingTree is the name of the product as it is in this program.
const WorkingTree = "."

// cleanup is how long it may take to remove a work tree.
const cleanup = time.Minute

// Make builds a package of the benchmark in dir, a directory of a git repository with a Go
// module, as it is there but against the product of the named commit, into a file below
// into. Where that does not build, it builds the command of the commit's own benchmark. It
// uses a work tree of git below into, which is gone when Make returns.
func Make(ctx context.Context, dir, pkg, name, into string) (_ Build, err error) {
	made := Build{Name: name}
	if name == WorkingTree {
		return made, nil
	}
	if made.Commit, err = run(ctx, dir, "git", "rev-parse", "--verify", "--quiet", "--end-of-options", name+"^{commit}"); err != nil {
		return made, fmt.Errorf("%q is no commit of this repository: %w", name, err)
	}
	below, err := run(ctx, dir, "git", "rev-parse", "--show-prefix")
	if err != nil {
		return made, err
	}
	place, err := os.MkdirTemp(into, "commit")
	if err != nil {
		return made, err
	}
	tree := filepath.Join(place, "tree")
	if _, err := run(ctx, dir, "git", "worktree", "add", "--detach", "--quiet", tree, made.Commit); err != nil {
		return made, err
	}
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanup)
		defer cancel()
		if _, removing := run(last, dir, "git", "worktree", "remove", "--force", tree); err == nil {
			err = removing
		}
	}()
	made.Binary, err = filepath.Abs(filepath.Join(place, "bench"))
	if err != nil {
		return made, err
	}
	bench := filepath.Join(tree, filepath.FromSlash(below))
	if err := os.RemoveAll(bench); err != nil {
		return made, err
	}
	if err := os.CopyFS(bench, os.DirFS(dir)); err != nil {
		return made, err
	}
	// The older product may need other versions than go.mod here names.
	this := build(ctx, bench, pkg, made.Binary, "-mod=mod")
	if this == nil {
		return made, nil
	}
	if err := ctx.Err(); err != nil {
		return made, err
	}
	made.OwnBench = true
	if err := os.RemoveAll(bench); err != nil {
		return made, err
	}
	if _, err := run(ctx, tree, "git", "checkout", "--quiet", made.Commit, "--", filepath.FromSlash(below)); err != nil {
		return made, errors.Join(this, err)
	}
	if err := build(ctx, bench, ".", made.Binary, "-mod=readonly"); err != nil {
		return made, fmt.Errorf("%s builds neither with this benchmark nor with its own: %w", name, errors.Join(this, err))
	}
	return made, nil
}

func build(ctx context.Context, dir, pkg, binary, mod string) error {
	_, err := run(ctx, dir, "go", "build", "-buildvcs=false", mod, "-o", binary, pkg)
	return err
}

// run runs a command in dir and returns what it wrote, without the last line's end. Its
// error has what it complained of.
func run(ctx context.Context, dir, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	// Git is asked about dir alone, and Go builds that module alone.
	c.Env = append(os.Environ(), "GOWORK=off")
	var complaints strings.Builder
	c.Stderr = &complaints
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, args[0], err, strings.TrimSpace(complaints.String()))
	}
	return strings.TrimSpace(string(out)), nil
}
