package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
)

func rollbacksCommand(o *options) *cobra.Command {
	var after string
	limit := 50
	cmd := &cobra.Command{
		Use:   "rollbacks [ID]",
		Short: "Lists rollbacks, or shows one",
		Long: `Lists rollbacks, the newest first, or shows the one with this ID: its steps, what
came of each, and what a person must still do.`,
		Example: `  caddy agent-guard rollbacks
  caddy agent-guard rollbacks f1b1c2d3-e4f5-4789-abcd-ef0123456789`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				var doc rollbackapi.Document
				text, err := c.get(cmd.Context(), "rollback/"+url.PathEscape(args[0]), url.Values{}, &doc)
				if err != nil {
					return err
				}
				return o.print(cmd, text, &doc)
			}
			query := url.Values{"limit": {strconv.Itoa(limit)}}
			if after != "" {
				query.Set("after", after)
			}
			var page admin.RollbackPage
			text, err := c.get(cmd.Context(), "rollbacks", query, &page)
			if err != nil {
				return err
			}
			return o.printRollbacks(cmd, text, &page)
		},
	}
	o.server(cmd)
	cmd.Flags().IntVar(&limit, "limit", limit, "The most to list")
	cmd.Flags().StringVar(&after, "after", "", "Where to go on, as an earlier listing says")
	complete(cmd, "limit")
	complete(cmd, "after")
	return cmd
}

func (o *options) printRollbacks(cmd *cobra.Command, text json.RawMessage, page *admin.RollbackPage) error {
	if o.json() {
		return encode(cmd.OutOrStdout(), text)
	}
	if len(page.Rollbacks) == 0 {
		fmt.Fprintln(cmd.ErrOrStderr(), "no rollbacks")
	} else if err := listRollbacks(cmd.OutOrStdout(), page, time.Now()); err != nil {
		return err
	}
	if page.Unreadable > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "%d more cannot be read; look at the server's log.\n", page.Unreadable)
	}
	if page.Next != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "There are more: --after %s goes on.\n", page.Next)
	}
	return nil
}

func listRollbacks(out io.Writer, page *admin.RollbackPage, now time.Time) error {
	var rows [][]string
	for _, doc := range page.Rollbacks {
		by := doc.Requester
		if doc.Operator != "" {
			by = "operator " + doc.Operator
		}
		rows = append(rows, []string{
			plainID(doc.RollbackID), printable(doc.State), dash(printable(string(doc.Status))), printable(string(doc.Scope)),
			printable(doc.CheckpointID), dash(moment(doc.Asked, now)), dash(printable(by)), cut(printable(doc.Reason), 40),
		})
	}
	table := table{out: out}
	return table.print([]string{"ROLLBACK", "STATE", "STATUS", "SCOPE", "CHECKPOINT", "ASKED", "BY", "REASON"}, rows)
}

// plainID is the id as commands take it.
func plainID(urn string) string { return printable(strings.TrimPrefix(urn, "urn:uuid:")) }

// printRollback shows a rollback line by line, its steps in their order, and what is left.
func printRollback(out io.Writer, doc *rollbackapi.Document, now time.Time) error {
	s := sheet{width: 10}
	state := printable(doc.State)
	if doc.Status != "" {
		state += ", " + printable(string(doc.Status))
	}
	if doc.TimedOut {
		state += ", not in time"
	}
	s.line("rollback", plainID(doc.RollbackID))
	s.line("state", state)
	s.line("effect", printable(doc.Effect))
	s.line("checkpoint", printable(doc.CheckpointID))
	s.line("workflow", printable(doc.Workflow))
	s.line("scope", printable(string(doc.Scope)))
	s.line("operator", printable(doc.Operator))
	s.line("requester", printable(doc.Requester))
	s.line("reason", printable(doc.Reason))
	s.line("asked", moment(doc.Asked, now))
	s.line("due", moment(doc.Due, now))
	s.line("finished", moment(doc.Finished, now))
	if doc.Joined != "" {
		s.line("joined", plainID(doc.Joined))
	}
	if _, err := fmt.Fprint(out, s.b.String()); err != nil {
		return err
	}
	if err := printSteps(out, doc.Steps); err != nil {
		return err
	}
	for i, text := range doc.FollowUp {
		if i == 0 {
			_, _ = fmt.Fprint(out, "\nWhat a person must still do:\n")
		}
		if _, err := fmt.Fprintf(out, "  %s\n", printable(text)); err != nil {
			return err
		}
	}
	return nil
}

func printSteps(out io.Writer, steps []rollbackapi.StepDocument) error {
	if len(steps) == 0 {
		return nil
	}
	var rows [][]string
	for i := range steps {
		step := &steps[i]
		status := printable(string(step.Status))
		if step.Effect != "" {
			status += " (" + printable(step.Effect) + ")"
		}
		answer := ""
		if step.HTTPStatus != 0 {
			answer = strconv.Itoa(step.HTTPStatus)
		}
		rows = append(rows, []string{
			strconv.Itoa(step.Level), printable(step.Action), printable(step.CheckpointID), dash(printable(step.Agent)),
			dash(status), dash(answer), dash(printable(step.Reason)),
		})
	}
	if _, err := fmt.Fprintln(out); err != nil {
		return err
	}
	table := table{out: out}
	return table.print([]string{"LEVEL", "ACTION", "CHECKPOINT", "AGENT", "STATUS", "ANSWER", "REASON"}, rows)
}
