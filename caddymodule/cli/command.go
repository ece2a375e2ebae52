// Package cli is the command `caddy agent-guard`: what operators do, from a terminal
// or a script, over the admin API of a running server, and what people do with tokens
// and exports of the ledger, which needs files only. It opens no store: that is the
// server's alone.
package cli

import (
	"fmt"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

const long = `Shows what the agent guard of a running server has recorded, settles what is in
doubt, and undoes what calls have done; makes and reads tokens, and verifies the
ledger.

executions, store, keys, identity, circuits, rollback, rollbacks, escalations,
and head, export and check of ledger ask the server's admin endpoint. It is that of
--address, else the one that --config names, else Caddy's default, which the
environment variable CADDY_ADMIN changes. Unix sockets are written
unix//run/caddy/admin.sock. ect, and verify and list of ledger, work on files
without a server.

With --output json they print one document; those that ask the server, what
the admin API answers. They exit with 0, or with 1 and a message on stderr.`

// Command is what caddycmd.RegisterCommand takes.
func Command() caddycmd.Command {
	return caddycmd.Command{
		Name:  "agent-guard",
		Short: "Shows what was recorded, settles what is in doubt, undoes, makes and verifies tokens",
		Long:  long,
		CobraFunc: func(cmd *cobra.Command) {
			group(cmd)
			var o options
			o.form(cmd)
			cmd.AddCommand(executions(&o), storeGroup(&o), keys(&o), identity(&o), circuitGroup(&o), escalationGroup(&o),
				rollbackCommand(&o), rollbacksCommand(&o), tokens(&o), ledgerGroup(&o))
		},
	}
}

// group makes cmd one that has subcommands, and shows them by itself.
func group(cmd *cobra.Command) {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
}

// noArgs is for commands below which there are no others.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("`%s` takes no arguments, and %q is one", cmd.CommandPath(), args[0])
	}
	return nil
}

func executions(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "executions",
		Short: "Lists, shows and resolves executions",
		Long:  "Lists and shows what was recorded of guarded calls, and settles those that are in doubt.",
	}
	group(cmd)
	o.server(cmd)
	cmd.AddCommand(list(o), show(o), resolve(o))
	return cmd
}

func storeGroup(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "store",
		Short: "Shows how the store is",
		Long:  "Shows how the store is that holds the executions.",
	}
	group(cmd)
	o.server(cmd)
	cmd.AddCommand(stats(o))
	return cmd
}

// options are the flags that all commands have, and those of commands that ask a
// server.
type options struct {
	address, config, adapter string
	store                    string
	output                   string
}

const (
	outputTable = "table"
	outputJSON  = "json"
)

// form adds the flag that all commands have.
func (o *options) form(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.VarP(&word{&o.output, []string{outputTable, outputJSON}}, "output", "o", "Form of the output: table or json")
	o.output = outputTable
	complete(cmd, "output", outputTable, outputJSON)
}

// server adds the flags of a command, and of those below it, that ask a server.
func (o *options) server(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVar(&o.address, "address", "", "Address of the server's admin endpoint (default: that of --config, else "+caddy.DefaultAdminListen+")")
	f.StringVarP(&o.config, "config", "c", "", "Configuration file that names the admin endpoint")
	f.StringVarP(&o.adapter, "adapter", "a", "", "Name of the adapter for that file")
	f.StringVar(&o.store, "store", "", "Path of the store, where the server has several open")
	complete(cmd, "store")
	_ = cmd.MarkPersistentFlagFilename("config") // the flag is there
}

func (o *options) json() bool { return o.output == outputJSON }
