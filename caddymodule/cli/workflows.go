package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/guard/plan"
)

func workflowCommands(o *options) *cobra.Command {
	return group(&cobra.Command{
		Use:   "workflows",
		Short: "Checks plans of workflows",
		Long: `Checks plans of workflows: descriptors of the type
` + plan.MediaType + `. It works on files, without a server. A server does
not take plans yet: nothing at run time follows from one.`,
	}, workflowsValidate(o), &cobra.Command{
		Use:   "schema",
		Short: "Prints the JSON schema of plans",
		Long: `Prints the JSON schema of plans, for editors. ` + "`workflows validate`" + ` also finds
what a schema cannot say: equal ids, edges without ends, and cycles.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(plan.Schema())
			return err
		},
	})
}

func workflowsValidate(o *options) *cobra.Command {
	var config, adapter string
	cmd := &cobra.Command{
		Use:   "validate FILE",
		Short: "Checks a plan, and lists its nodes in their order",
		Long: `Checks a plan whole, and names everything that is wrong with it. With --config,
'reversible' of each node is compared with what undoes the action that is called
like the node's label, or like its id. Differences are warnings.

FILE may be -, the standard input. With --output json, a plan that is refused is
described by a document too. Either way the exit code is 1 then.`,
		Example: `  caddy agent-guard workflows validate failover.json --config Caddyfile`,
		Args:    oneArg("FILE with a plan"),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := readAtMost(cmd.InOrStdin(), args[0], plan.MaxSize)
			if err != nil {
				return err
			}
			d, err := plan.Parse(text)
			if wrong := (*plan.Error)(nil); errors.As(err, &wrong) {
				return refusePlan(cmd, o, args[0], wrong)
			}
			if err != nil {
				return err
			}
			warnings := append([]plan.Problem{}, d.Warnings...)
			if config != "" {
				undo, err := waysToUndo(config, adapter)
				if err != nil {
					return err
				}
				warnings = append(warnings, d.CheckUndo(func(action string) (reversible, known bool) {
					reversible, known = undo[action]
					return reversible, known
				})...)
			} else if adapter != "" {
				return errors.New("--adapter goes with --config")
			}
			return showPlan(cmd, o, d, warnings)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&config, "config", "c", "", "Configuration file with the actions, to compare 'reversible' with")
	f.StringVarP(&adapter, "adapter", "a", "", "Name of the adapter for that file")
	_ = cmd.MarkFlagFilename("config") // the flag is there
	return cmd
}

func refusePlan(cmd *cobra.Command, o *options, file string, wrong *plan.Error) error {
	n := len(wrong.Problems) + wrong.More
	if file == "-" {
		file = "the input"
	}
	if o.json() {
		if err := encode(cmd.OutOrStdout(), map[string]any{"problems": wrong.Problems, "more": wrong.More}); err != nil {
			return err
		}
		return fmt.Errorf("%s is no plan: %d problems", file, n)
	}
	var b strings.Builder
	for _, p := range wrong.Problems {
		b.WriteString("\n  " + printable(p.String()))
	}
	if wrong.More > 0 {
		fmt.Fprintf(&b, "\n  and %d more", wrong.More)
	}
	return fmt.Errorf("%s is no plan:%s", file, b.String())
}

func showPlan(cmd *cobra.Command, o *options, d *plan.Descriptor, warnings []plan.Problem) error {
	if o.json() {
		return encode(cmd.OutOrStdout(), map[string]any{
			"wf_id": d.WorkflowID, "version": d.Version(), "nodes": len(d.Nodes), "edges": d.Edges, "levels": d.Levels(), "warnings": warnings,
		})
	}
	for _, w := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "Warning: "+printable(w.String()))
	}
	yes := map[bool]string{true: "yes", false: "no"}
	rows := [][]string{{"LEVEL", "NODE", "LABEL", "AFTER", "PRIORITY", "TIMEOUT", "REVERSIBLE", "APPROVAL"}}
	for _, id := range slices.Concat(d.Levels()...) {
		place, _ := d.Find(id)
		n := &d.Nodes[place]
		after := make([]string, len(n.Before))
		for k, j := range n.Before {
			after[k] = d.Nodes[j].ID
		}
		timeout, reversible := "", ""
		if n.Hints.TimeoutS > 0 {
			timeout = strconv.FormatInt(n.Hints.TimeoutS, 10) + "s"
		}
		if n.Reversible != nil {
			reversible = yes[*n.Reversible]
		}
		rows = append(rows, []string{
			strconv.Itoa(n.Level), n.ID, printable(cut(n.Label, 40)), cut(strings.Join(after, " "), 40), n.Hints.Priority, timeout, reversible, yes[n.HITLRequired],
		})
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %d nodes, %d edges, %d levels, version %s\n\n%s",
		printable(d.WorkflowID), len(d.Nodes), d.Edges, len(d.Levels()), d.Version(), new(table).page(rows))
	return err
}

// waysToUndo finds the actions of a configuration, by name, and whether they can be undone. Of several
// with one name all have to.
func waysToUndo(config, adapter string) (map[string]bool, error) {
	text, _, _, err := caddycmd.LoadConfig(config, adapter)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", config, err)
	}
	found := make(map[string]bool)
	var walk func(raw json.RawMessage) error
	walk = func(raw json.RawMessage) error {
		var list []json.RawMessage
		if json.Unmarshal(raw, &list) == nil {
			for _, e := range list {
				if err := walk(e); err != nil {
					return err
				}
			}
			return nil
		}
		var members map[string]json.RawMessage
		if json.Unmarshal(raw, &members) != nil {
			return nil // a value in which nothing can stand
		}
		if string(members["handler"]) == `"agent_guard"` {
			var guard struct {
				Actions []struct {
					Name       string    `json:"name"`
					Restore    *struct{} `json:"restore"`
					Compensate *struct{} `json:"compensate"`
					Delegate   string    `json:"delegate"`
				} `json:"actions"`
			}
			if err := json.Unmarshal(raw, &guard); err != nil {
				return fmt.Errorf("reading the actions in %s: %w", config, err)
			}
			for _, a := range guard.Actions {
				before, twice := found[a.Name]
				found[a.Name] = (before || !twice) && (a.Restore != nil || a.Compensate != nil || a.Delegate != "")
			}
		}
		for _, m := range members {
			if err := walk(m); err != nil {
				return err
			}
		}
		return nil
	}
	return found, walk(text)
}
