// Command bench measures the agent guard: against a bare reverse_proxy and a
// handler as people write it by hand, with many records, and over minutes of load with kills and reloads.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/agent-guard/caddy-agent-guard/bench/contain"
	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/peer"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/records"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
)

// roles are the parts that run in processes of their own.
var roles = proc.Roles{
	gateway.Role:  gateway.Run,
	upstream.Role: upstream.Run,
	peer.Role:     peer.Run,
	contain.Role:  contain.Run,

	records.FillRole: records.Fill,
	records.OpenRole: records.Open,
}

// command is a subcommand. It writes its result to out, and what it does to log.
type command struct {
	name, what string
	run        func(ctx context.Context, args []string, out, log io.Writer) error
}

var commands = []command{
	{"table", "ratios to a bare reverse_proxy (about six minutes)", runTable},
	{"compare", "two commits in one run: compare [<flags>] OLD NEW (about five minutes)", runCompare},
	{"store", "opening and memory with a million records (about three minutes)", runStore},
	{"rollback", "a thousand calls undone by one gateway, and by three (about five minutes)", runRollback},
	{"contain", "a chain of agents of which one fails, with and without the guard (about three minutes)", runContain},
	{"soak", "minutes of load with kills and reloads, and what was executed", runSoak},
}

// errBelow is the error of a run whose result is not what it should be.
var errBelow = errors.New("below the bar")

func main() {
	proc.Child(roles)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run runs the named command and returns the exit status: 1 where the result is bad
// or there is none, 2 where the command line is wrong.
func run(ctx context.Context, args []string, out, log io.Writer) int {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	for _, c := range commands {
		if c.name != name {
			continue
		}
		err := c.run(ctx, args[1:], out, log)
		switch {
		case err == nil, errors.Is(err, flag.ErrHelp):
			return 0
		case errors.As(err, new(usageError)):
			fmt.Fprintln(log, err)
			return 2
		default:
			fmt.Fprintln(log, err)
			return 1
		}
	}
	fmt.Fprintln(log, "usage: go run . <command> [<flags>]; -h after a command lists its flags")
	for _, c := range commands {
		fmt.Fprintf(log, "  %-8s  %s\n", c.name, c.what)
	}
	return 2
}

// usageError is a wrong command line.
type usageError struct{ error }

// parse reads the flags of a command, which takes nothing else.
func parse(flags *flag.FlagSet, args []string, log io.Writer) error {
	_, err := parseNames(flags, args, log)
	return err
}

// parseNames reads the flags of a command, and what it takes behind them.
func parseNames(flags *flag.FlagSet, args []string, log io.Writer, names ...string) ([]string, error) {
	flags.SetOutput(log)
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return nil, err
	case err != nil:
		return nil, usageError{err}
	case flags.NArg() > len(names):
		return nil, usageError{fmt.Errorf("%s takes no %q", flags.Name(), flags.Arg(len(names)))}
	case flags.NArg() < len(names):
		return nil, usageError{fmt.Errorf("%s needs %s, in this order and after the flags", flags.Name(), strings.Join(names, " and "))}
	}
	return flags.Args(), nil
}
