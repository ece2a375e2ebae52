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
	"strings"

	"github.com/agent-guard/caddy-agent-guard/bench/commit"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
)

func runCompare(ctx context.Context, args []string, out, log io.Writer) (err error) {
	o := table.Comparing
	var f form
	flags := flag.NewFlagSet("compare", flag.ContinueOnError)
	tableFlags(flags, &o)
	f.flags(flags)
	names, err := parseNames(flags, args, log, "OLD", "NEW")
	if err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	binaries, err := os.MkdirTemp("", "agb")
	if err != nil {
		return err
	}
	defer func() {
		if removing := os.RemoveAll(binaries); err == nil {
			err = removing
		}
	}()
	var made [2]commit.Build
	for i, name := range names {
		if name != commit.WorkingTree {
			fmt.Fprintln(log, "building", name)
		}
		dir, err := sources(ctx)
		if err != nil {
			return err
		}
		if made[i], err = commit.Make(ctx, dir, "./child", name, binaries); err != nil {
			return err
		}
		if made[i].OwnBench {
			fmt.Fprintln(log, name, "does not build with this benchmark; its own is used")
		}
	}
	c, err := table.Compare(ctx, o, made[0], made[1], func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.print(out, c)
}

// sources is the directory of the benchmark's module, in which the command runs.
func sources(ctx context.Context) (string, error) {
	c := exec.CommandContext(ctx, "go", "env", "GOMOD")
	c.Env = append(os.Environ(), "GOWORK=off")
	file, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	dir := filepath.Dir(strings.TrimSpace(string(file)))
	if _, err := os.Stat(filepath.Join(dir, "command_compare.go")); err != nil {
		return "", errors.New("run this in the directory bench of the repository")
	}
	return dir, nil
}
