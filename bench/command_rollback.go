package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/agent-guard/caddy-agent-guard/bench/undo"
)

func runRollback(ctx context.Context, args []string, out, log io.Writer) error {
	o := undo.Default
	var f form
	flags := flag.NewFlagSet("rollback", flag.ContinueOnError)
	flags.IntVar(&o.Checkpoints, "checkpoints", o.Checkpoints, "calls of the workflow that is rolled back")
	flags.StringVar(&o.Dir, "dir", os.TempDir(), "directory on the file system to measure")
	flags.StringVar(&o.GOGC, "gogc", o.GOGC, "GOGC of every process")
	flags.StringVar(&o.GOMEMLIMIT, "gomemlimit", o.GOMEMLIMIT, "GOMEMLIMIT of every process")
	f.flags(flags)
	if err := parse(flags, args, log); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	report, err := undo.Measure(ctx, o, func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.finish(out, report, false)
}
