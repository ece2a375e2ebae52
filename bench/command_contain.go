package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/bench/contain"
)

func runContain(ctx context.Context, args []string, out, log io.Writer) error {
	o := contain.Default
	var f form
	flags := flag.NewFlagSet("contain", flag.ContinueOnError)
	faults := flags.String("faults", strings.Join(o.Faults, ","), "what the agent does, with commas")
	flags.DurationVar(&o.Before, "before", o.Before, "how long all works before the fault")
	flags.DurationVar(&o.Fault, "fault", o.Fault, "length of the fault")
	flags.DurationVar(&o.After, "after", o.After, "how long the agent works again after it")
	flags.Float64Var(&o.Failing, "failing", o.Failing, "calls a second of the workflow that needs the failing agent")
	flags.Float64Var(&o.Neighbour, "neighbour", o.Neighbour, "calls a second of the workflow that does not")
	flags.StringVar(&o.Dir, "dir", os.TempDir(), "directory on the file system to use")
	f.flags(flags)
	if err := parse(flags, args, log); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	o.Faults = strings.Split(*faults, ",")
	report, err := contain.Measure(ctx, o, func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.print(out, report)
}
