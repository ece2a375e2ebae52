package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/agent-guard/caddy-agent-guard/bench/table"
)

// form is how a report is printed.
type form struct {
	json, markdown bool
}

func (f *form) flags(flags *flag.FlagSet) {
	flags.BoolVar(&f.json, "json", false, "print JSON")
	flags.BoolVar(&f.markdown, "markdown", false, "print Markdown")
}

func (f *form) check() error {
	if f.json && f.markdown {
		return usageError{errors.New("-json or -markdown, not both")}
	}
	return nil
}

// printed is what has all forms.
type printed interface {
	Text(io.Writer) error
	Markdown(io.Writer) error
}

func (f *form) print(out io.Writer, r printed) error {
	switch {
	case f.json:
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(r)
	case f.markdown:
		return r.Markdown(out)
	default:
		return r.Text(out)
	}
}

// finish prints the report; with check a bar that was not reached is an error.
func (f *form) finish(out io.Writer, r *table.Report, check bool) error {
	if err := f.print(out, r); err != nil {
		return err
	}
	if n := r.Below(); check && n > 0 {
		return fmt.Errorf("%d of the bars were not reached: %w", n, errBelow)
	}
	return nil
}

// tableFlags are the flags of everything that measures rows.
func tableFlags(flags *flag.FlagSet, o *table.Options) {
	flags.IntVar(&o.Rounds, "rounds", o.Rounds, "pairs of rounds of each row")
	flags.DurationVar(&o.Round, "round", o.Round, "length of a round")
	flags.IntVar(&o.Limit, "limit", o.Limit, "most requests in a round")
	flags.DurationVar(&o.Sustained, "sustained", o.Sustained, "length of sustained load; 0 leaves its rows out")
	flags.IntVar(&o.SustainedCalls, "sustained-calls", o.SustainedCalls, "calls of sustained load at least, for five times as long at most")
	flags.IntVar(&o.Keys, "keys", o.Keys, "calls of which replays of many keys are")
	flags.StringVar(&o.Dir, "dir", os.TempDir(), "directory on the file system to measure")
	flags.StringVar(&o.GOGC, "gogc", o.GOGC, "GOGC of every process")
	flags.StringVar(&o.GOMEMLIMIT, "gomemlimit", o.GOMEMLIMIT, "GOMEMLIMIT of every process")
	flags.StringVar(&o.Rows, "rows", "", "regular expression of the rows to measure, as 'awaited @64$'")
}

func runTable(ctx context.Context, args []string, out, log io.Writer) error {
	o, quick := table.Default, false
	var f form
	check := false
	flags := flag.NewFlagSet("table", flag.ContinueOnError)
	flags.BoolVar(&quick, "quick", false, "half a minute; says less")
	tableFlags(flags, &o)
	flags.BoolVar(&check, "check", false, "exit 1 where a bar is not reached")
	f.flags(flags)
	if err := parse(flags, args, log); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	if quick {
		set := map[string]bool{}
		flags.Visit(func(f *flag.Flag) { set[f.Name] = true })
		if !set["rounds"] {
			o.Rounds = table.Quick.Rounds
		}
		if !set["round"] {
			o.Round = table.Quick.Round
		}
		if !set["sustained"] {
			o.Sustained = table.Quick.Sustained
		}
		if !set["keys"] {
			o.Keys = table.Quick.Keys
		}
	}
	report, err := table.Run(ctx, o, func(what string) { fmt.Fprintln(log, what) })
	if err != nil {
		return err
	}
	return f.finish(out, report, check)
}
