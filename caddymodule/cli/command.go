// Package cli is the command `caddy agent-guard`. Operators use it, from a terminal or a
// script, with the admin API of a running server. It reads exports of the ledger from files,
// and opens a store only to export it or to import into it, alone; else only the server does.
package cli

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"os/user"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

const long = `Shows the records of a running server's agent guard, settles calls in doubt, and
rolls calls back; checks plans of workflows, verifies the ledger, and exports and
imports a store.

executions, store stats, nodes, keys, identity, circuits, cascades, rollback,
rollbacks, escalations, and head, export and check of ledger ask the server's
admin endpoint: that of --address, else the one in --config, else Caddy's
default, which the environment variable CADDY_ADMIN changes. Unix sockets are
written unix//run/caddy/admin.sock. workflows, export and import of store, and
verify and list of ledger, work without a server.

With --output json they print one document; those that ask the server print the
answer of the admin API. They exit with 0, or with 1 and a message on stderr.`

// Command returns the command for caddycmd.RegisterCommand.
func Command() caddycmd.Command {
	return caddycmd.Command{
		Name:  "agent-guard",
		Short: "Shows records, settles calls in doubt, rolls back, verifies the ledger",
		Long:  long,
		CobraFunc: func(cmd *cobra.Command) {
			o, forms := options{given: url.Values{}}, []string{"table", "json"}
			cmd.PersistentFlags().VarP(oneOf(o.given, "word", "output", forms), "output", "o", "Form of the output: table or json")
			complete(cmd, "output", forms...)
			group(cmd, executionCommands(&o), storeCommands(&o), nodesCommand(&o), keyCommands(&o), identityCommands(&o), circuitCommands(&o), cascadeCommands(&o),
				escalationCommands(&o), rollbackCommand(&o), rollbacksCommand(&o), workflowCommands(&o), ledgerCommands(&o))
		},
	}
}

// group gives cmd subcommands. Without one it shows its help.
func group(cmd *cobra.Command, commands ...*cobra.Command) *cobra.Command {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.AddCommand(commands...)
	return cmd
}

// noArgs is for commands without arguments and subcommands.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("`%s` takes no arguments, and %q is one", cmd.CommandPath(), args[0])
	}
	return nil
}

// nArgs is for commands that take n arguments.
func nArgs(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return fmt.Errorf("give %s; there are %d", what, len(args))
		}
		return nil
	}
}

// options are the flags that all commands have, and those of commands that ask a server.
type options struct {
	address, config, adapter string
	store                    string
	given                    url.Values // has the form of the output
	connection               *client    // made when it is first needed
}

func (o *options) json() bool { return o.given.Get("output") == "json" }

// server adds the flags of a command, and of those below it, that ask a server.
func (o *options) server(cmd *cobra.Command) *cobra.Command {
	f := cmd.PersistentFlags()
	f.StringVar(&o.address, "address", "", "Address of the server's admin endpoint (default: that of --config, else "+caddy.DefaultAdminListen+")")
	f.StringVarP(&o.config, "config", "c", "", "Configuration file that names the admin endpoint")
	f.StringVarP(&o.adapter, "adapter", "a", "", "Name of the adapter for that file")
	f.StringVar(&o.store, "store", "", "Path of the store, if the server has several open")
	complete(cmd, "store")
	_ = cmd.MarkPersistentFlagFilename("config") // the flag is there
	return cmd
}

// stringFlag adds a flag that takes any text; words are what completion offers.
func stringFlag(cmd *cobra.Command, value *string, name, usage string, words ...string) {
	cmd.Flags().StringVar(value, name, "", usage)
	complete(cmd, name, words...)
}

// stringsFlag adds a flag that takes any text and may be repeated.
func stringsFlag(cmd *cobra.Command, values *[]string, name, usage string) {
	cmd.Flags().StringArrayVar(values, name, nil, usage)
	complete(cmd, name)
}

// flagValue is the value of a flag, kept by a name: often that of a parameter of the admin API.
type flagValue struct {
	given url.Values
	name  string
	kind  string             // as the help calls it; words may be several, separated by commas or repeated
	check func(string) error // nil if any text will do
}

func (v *flagValue) String() string { return strings.Join(v.given[v.name], ",") }

func (v *flagValue) Type() string { return v.kind }

func (v *flagValue) Set(text string) error {
	all := []string{text}
	if v.kind == "words" {
		all = strings.Split(text, ",")
	} else {
		v.given.Del(v.name)
	}
	for _, one := range all {
		if v.check != nil {
			if err := v.check(one); err != nil {
				return err
			}
		}
		if one != "" {
			v.given.Add(v.name, one)
		}
	}
	return nil
}

// filterFlag adds a flag that takes any text and is a parameter of the admin API; words are what completion offers.
func filterFlag(cmd *cobra.Command, query url.Values, name, usage string, words ...string) {
	cmd.Flags().Var(&flagValue{query, name, "string", nil}, name, usage)
	complete(cmd, name, words...)
}

// ageFlag adds a flag that takes a duration and is a parameter of the admin API.
func ageFlag(cmd *cobra.Command, query url.Values, name, parameter, usage string) {
	cmd.Flags().Var(&flagValue{query, parameter, "string", func(text string) error {
		if age, err := caddy.ParseDuration(text); err != nil || age < 0 {
			return fmt.Errorf("%q is no duration; write one like 10m, 4h or 2d", text)
		}
		return nil
	}}, name, usage)
	complete(cmd, name)
}

// wordFlag adds a flag that takes one of some words, or of kind words several of them.
func wordFlag(cmd *cobra.Command, given url.Values, kind, name, usage string, words []string) {
	cmd.Flags().Var(oneOf(given, kind, name, words), name, usage)
	complete(cmd, name, words...)
}

// oneOf is the value of a flag that takes some words.
func oneOf(given url.Values, kind, name string, words []string) *flagValue {
	return &flagValue{given, name, kind, func(text string) error {
		if slices.Contains(words, text) {
			return nil
		}
		last := len(words) - 1
		return fmt.Errorf("use %s or %s", strings.Join(words[:last], ", "), words[last])
	}}
}

// operatorFlag adds the flag that says who acts: the user, unless it is given. Nobody is an error.
func operatorFlag(cmd *cobra.Command, operator *string, acts string) {
	stringFlag(cmd, operator, "operator", "Who "+acts+" (default: $USER)")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		*operator = cmp.Or(*operator, os.Getenv("USER"))
		if *operator == "" {
			if who, err := user.Current(); err == nil {
				*operator = who.Username
			}
		}
		if *operator == "" {
			return fmt.Errorf("who %s? neither --operator nor $USER says", acts)
		}
		return nil
	}
}

func require(cmd *cobra.Command, flags ...string) {
	for _, flag := range flags {
		if err := cmd.MarkFlagRequired(flag); err != nil {
			panic(err) // the flag is not there: a mistake in this package
		}
	}
}

func names[T any](values []T) []string {
	words := make([]string, 0, len(values))
	for _, v := range values {
		words = append(words, fmt.Sprint(v))
	}
	return words
}

// complete sets the words that completion offers for a flag: without any, not even files.
func complete(cmd *cobra.Command, flag string, words ...string) {
	offer := func(_ *cobra.Command, _ []string, typed string) (all []string, _ cobra.ShellCompDirective) {
		before := typed[:strings.LastIndexByte(typed, ',')+1] // of a list
		for _, w := range words {
			all = append(all, before+w)
		}
		return all, cobra.ShellCompDirectiveNoFileComp
	}
	if err := cmd.RegisterFlagCompletionFunc(flag, offer); err != nil {
		panic(err) // the flag is not there: a mistake in this package
	}
}

// completionTimeout bounds how long the Tab key waits for a server.
const completionTimeout = time.Second

// completeKey offers the execution keys of a running server, youngest first, in the given states
// or in all. Without a server it silently offers nothing.
func completeKey(o *options, states ...string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) (keys []string, _ cobra.ShellCompDirective) {
		if len(args) > 0 || o.config != "" { // reading a configuration may log
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
		defer cancel()
		page, _, err := ask[admin.Page](ctx, o, question{path: "executions", query: url.Values{"limit": {"50"}, "state": states}})
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		for i := range page.Executions {
			x := &page.Executions[i]
			if key := short(x.Key, 16); strings.HasPrefix(key, typed) {
				keys = append(keys, cobra.CompletionWithDesc(key, x.State+" "+printable(x.Action)+" "+ago(x.Age)))
			}
		}
		return keys, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	}
}
