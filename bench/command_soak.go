package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/agent-guard/caddy-agent-guard/bench/soak"
)

// errBroken is the error of a soak whose report is bad.
var errBroken = errors.New("the soak found something")

func runSoak(ctx context.Context, args []string, out, log io.Writer) error {
	o, asJSON := soak.Default, false
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.DurationVar(&o.For, "for", o.For, "length of the load")
	flags.Uint64Var(&o.Seed, "seed", o.Seed, "what decides when what happens")
	flags.IntVar(&o.Clients, "clients", o.Clients, "clients that call at the same time")
	flags.Float64Var(&o.Rate, "rate", o.Rate, "most new calls per second, 0 for no limit")
	flags.DurationVar(&o.Every, "every", o.Every, "mean time between two disturbances")
	flags.DurationVar(&o.Keep, "keep", o.Keep, "how long keys stay taken; results half as long")
	flags.StringVar(&o.Dir, "dir", os.TempDir(), "directory on the file system to use")
	flags.BoolVar(&asJSON, "json", false, "print the report, with all samples, as JSON")
	if err := parse(flags, args, log); err != nil {
		return err
	}
	report, err := soak.Run(ctx, o, func(line string) { fmt.Fprintln(log, line) })
	if err != nil {
		return err
	}
	if asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		err = e.Encode(report)
	} else {
		report.Text(out)
	}
	if err == nil && !report.Good() {
		err = errBroken
	}
	return err
}
