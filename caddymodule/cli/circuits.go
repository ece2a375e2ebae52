package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

func circuitGroup(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "circuits",
		Short: "Shows the circuit breakers of a server's upstreams, and sets their modes",
		Long: `Shows the circuit breakers of a server's upstreams, and sets their modes. An
upstream has a breaker from its first call on.`,
	}
	group(cmd)
	o.server(cmd)
	cmd.AddCommand(circuitList(o), circuitSet(o))
	return cmd
}

func circuitList(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "Lists the circuit breakers",
		Long:    `Lists the circuit breakers, by upstream. ERRORS and CALLS are of the window.`,
		Example: "  caddy agent-guard circuits list",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.circuits(cmd, func(c *client, doc *circuits.Document) (json.RawMessage, error) {
				return c.get(cmd.Context(), "circuits", url.Values{}, doc)
			})
		},
	}
}

// modeWords are the modes that an operator can set.
var modeWords = []string{breaker.Auto.String(), breaker.Observe.String(), breaker.ForcedOpen.String(), breaker.ForcedClosed.String()}

func circuitSet(o *options) *cobra.Command {
	var class string
	cmd := &cobra.Command{
		Use:   "set UPSTREAM MODE",
		Short: "Sets the mode of a circuit breaker",
		Long: `Sets the mode of a circuit breaker. forced_open refuses all calls to the
upstream, forced_closed and observe none; auto gives the breaker back to itself.
The mode outlives reloads and restarts, unless the configuration has one of its
own.`,
		Example: `  caddy agent-guard circuits set 10.0.0.7:9001 forced_open
  caddy agent-guard circuits set 10.0.0.7:9001 auto`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return fmt.Errorf("give UPSTREAM and MODE; `circuits list` shows the upstreams, and a mode is one of %s", strings.Join(modeWords, ", "))
			}
			return nil
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) != 1 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return modeWords, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(modeWords, args[1]) {
				return fmt.Errorf("%q is no mode; it is one of %s", args[1], strings.Join(modeWords, ", "))
			}
			wanted := admin.CircuitMode{Upstream: args[0], Class: class, Mode: new(breaker.Mode)}
			if err := wanted.Mode.UnmarshalText([]byte(args[1])); err != nil {
				return err
			}
			return o.circuits(cmd, func(c *client, doc *circuits.Document) (json.RawMessage, error) {
				return c.post(cmd.Context(), "circuits/mode", &wanted, doc)
			})
		},
	}
	cmd.Flags().StringVar(&class, "class", "", "read or write, where the configuration says by_operation")
	return cmd
}

// circuits asks for the breakers, and prints them.
func (o *options) circuits(cmd *cobra.Command, ask func(*client, *circuits.Document) (json.RawMessage, error)) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	var doc circuits.Document
	text, err := ask(c, &doc)
	if err != nil {
		return err
	}
	if o.json() {
		return encode(cmd.OutOrStdout(), text)
	}
	return printCircuits(cmd.OutOrStdout(), &doc, time.Now())
}

func printCircuits(out io.Writer, doc *circuits.Document, now time.Time) error {
	if len(doc.Circuits) == 0 {
		_, err := fmt.Fprintln(out, "No upstream has been called yet.")
		return err
	}
	var rows [][]string
	for i := range doc.Circuits {
		c := &doc.Circuits[i]
		rows = append(rows, []string{
			printable(c.Upstream), dash(printable(c.Class)), printable(c.State), printable(c.Mode),
			strconv.FormatFloat(100*c.ErrorRate, 'f', -1, 64) + "%", strconv.Itoa(c.Calls),
			dash(moment(c.NextProbe, now)), dash(printable(c.LastCause)),
		})
	}
	table := table{out: out}
	return table.print([]string{"UPSTREAM", "CLASS", "STATE", "MODE", "ERRORS", "CALLS", "NEXT PROBE", "CAUSE"}, rows)
}
