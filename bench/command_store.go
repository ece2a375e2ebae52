package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/agent-guard/caddy-agent-guard/bench/records"
)

func runStore(ctx context.Context, args []string, out, log io.Writer) error {
	o, check := records.Default, false
	var f form
	flags := flag.NewFlagSet("store", flag.ContinueOnError)
	flags.IntVar(&o.Records, "records", o.Records, "records in the store")
	flags.IntVar(&o.Calls, "calls", o.Calls, "calls that each gateway has served when its memory is read")
	flags.IntVar(&o.Openings, "openings", o.Openings, "times that the store is opened")
	flags.StringVar(&o.Dir, "dir", os.TempDir(), "directory on the file system to measure")
	flags.StringVar(&o.GOGC, "gogc", o.GOGC, "GOGC of every process")
	flags.StringVar(&o.GOMEMLIMIT, "gomemlimit", o.GOMEMLIMIT, "GOMEMLIMIT of every process")
	flags.BoolVar(&check, "check", false, "exit 1 where a bar is not reached")
	f.flags(flags)
	if err := parse(flags, args, log); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	report, err := records.Measure(ctx, o, func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.finish(out, report, check)
}
