//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/bench/database"
)

// PostgreSQL's servers are started from Debian's binaries, on Unix alone.
func init() {
	commands = append(commands,
		command{"claims", "group commit on PostgreSQL against a transaction for each claim (about three minutes)", runClaims},
		command{"gateways", "guarded calls a second of several gateways on one PostgreSQL (about four minutes)", runGateways},
		command{"bloat", "PostgreSQL's tables while a million calls are executed and forgotten (many minutes; -for ends it sooner)", runBloat},
	)
}

// judged is a result with bars.
type judged interface {
	printed
	Below() int
}

// conclude prints the result; with check a bar that was not reached is an error.
func (f *form) conclude(out io.Writer, r judged, check bool) error {
	if err := f.print(out, r); err != nil {
		return err
	}
	if n := r.Below(); check && n > 0 {
		return fmt.Errorf("%w: %d", errBelow, n)
	}
	return nil
}

// numbers reads a list of numbers with commas.
func numbers(name, text string) (all []int, err error) {
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(word)
		if err != nil {
			return nil, usageError{fmt.Errorf("%s: %q is no number", name, word)}
		}
		all = append(all, n)
	}
	return all, nil
}

func runGateways(ctx context.Context, args []string, out, log io.Writer) (err error) {
	o := database.DefaultGateways
	var f form
	flags := flag.NewFlagSet("gateways", flag.ContinueOnError)
	nodes := flags.String("nodes", "1,2,4", "how many gateways, with commas")
	flags.IntVar(&o.Conns, "conns", o.Conns, "connections of clients, shared among the gateways")
	flags.IntVar(&o.Clients, "clients", 0, "connections of clients to each gateway, in the place of -conns: the load grows with the gateways")
	flags.Float64Var(&o.GatewayCPU, "gateway-cpu", 0, "share of a processor for each gateway, like 0.1; 0 is no limit (Linux, as root)")
	flags.Float64Var(&o.DatabaseCPU, "database-cpu", 0, "share of a processor, or of several, for the database; 0 is no limit (Linux, as root)")
	flags.IntVar(&o.Rounds, "rounds", o.Rounds, "rounds of each")
	flags.DurationVar(&o.Round, "round", o.Round, "length of a round")
	f.flags(flags)
	if err := parse(flags, args, log); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	if o.Nodes, err = numbers("nodes", *nodes); err != nil {
		return err
	}
	result, err := database.MeasureGateways(ctx, o, func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.print(out, result)
}

func runClaims(ctx context.Context, args []string, out, log io.Writer) error {
	o, check := database.DefaultClaims, false
	var f form
	flags := flag.NewFlagSet("claims", flag.ContinueOnError)
	callers := flags.String("callers", "1,16,64,256", "how many claim at the same time, with commas")
	flags.IntVar(&o.Rounds, "rounds", o.Rounds, "pairs of rounds for each")
	flags.DurationVar(&o.Round, "round", o.Round, "length of a round")
	flags.BoolVar(&check, "check", false, "exit 1 where the goal is not reached")
	f.flags(flags)
	if err := parse(flags, args, log); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	var err error
	if o.Callers, err = numbers("callers", *callers); err != nil {
		return err
	}
	result, err := database.MeasureClaims(ctx, o, func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.conclude(out, result, check)
}

func runBloat(ctx context.Context, args []string, out, log io.Writer) error {
	o, check := database.DefaultBloat, false
	var f form
	flags := flag.NewFlagSet("bloat", flag.ContinueOnError)
	flags.Int64Var(&o.Executions, "executions", o.Executions, "calls")
	flags.DurationVar(&o.For, "for", 0, "end after so long, however many were executed; 0 is never")
	flags.IntVar(&o.Callers, "callers", o.Callers, "calls at the same time")
	flags.DurationVar(&o.Keep, "keep", o.Keep, "how long records and answers stay")
	flags.IntVar(&o.Answer, "answer", o.Answer, "size of an answer in bytes")
	flags.DurationVar(&o.Every, "every", o.Every, "time between two looks at the tables")
	flags.DurationVar(&o.After, "after", o.After, "how long to look when all was executed")
	flags.Func("set", "a setting of the server, like autovacuum_naptime=1min; may be repeated", func(text string) error {
		o.Settings = append(o.Settings, text)
		return nil
	})
	flags.BoolVar(&check, "check", false, "exit 1 where the tables grow too much")
	f.flags(flags)
	if err := parse(flags, args, log); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	result, err := database.MeasureBloat(ctx, o, func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.conclude(out, result, check)
}
