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
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
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
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("give one ID, or none; there are %d", len(args))
			}
			return nil
		},
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				if _, err := rollbackapi.ParseID(args[0]); err != nil {
					return fmt.Errorf("ID: %q is no UUID; `rollbacks` lists them", args[0])
				}
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
	s.line("workflow", named(doc.Workflow, doc.WorkflowName))
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
	if err := printSteps(out, doc.Steps, now); err != nil {
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

// stepHeader are the columns of steps. Those are left out that are empty in all of them.
var stepHeader = []string{"LEVEL", "ACTION", "CALL", "CALLED", "WAY", "CHECKPOINT", "AGENT", "STATUS", "ANSWER", "ATTEMPTS", "REASON"}

func printSteps(out io.Writer, steps []rollbackapi.StepDocument, now time.Time) error {
	if len(steps) == 0 {
		return nil
	}
	rows := make([][]string, 0, len(steps))
	filled := make([]bool, len(stepHeader))
	for i := range steps {
		row := stepRow(&steps[i], now)
		for column, cell := range row {
			filled[column] = filled[column] || cell != ""
			row[column] = dash(cell)
		}
		rows = append(rows, row)
	}
	shown := func(row []string) (kept []string) {
		for column, cell := range row {
			if filled[column] {
				kept = append(kept, cell)
			}
		}
		return kept
	}
	for i := range rows {
		rows[i] = shown(rows[i])
	}
	if _, err := fmt.Fprintln(out); err != nil {
		return err
	}
	table := table{out: out}
	return table.print(shown(stepHeader), rows)
}

// stepRow is a step in the order of stepHeader; what is not known is empty.
func stepRow(step *rollbackapi.StepDocument, now time.Time) []string {
	status := printable(string(step.Status))
	if step.State == rollback.StepRunning {
		status = "running"
	}
	if step.Effect != "" {
		status += " (" + printable(step.Effect) + ")"
	}
	answer, attempts, call, called := "", "", "", ""
	if step.HTTPStatus != 0 {
		answer = strconv.Itoa(step.HTTPStatus)
	}
	if step.Attempts > 0 {
		attempts = strconv.Itoa(step.Attempts)
	}
	if c := step.Call; c != nil {
		call = strings.TrimSpace(printable(c.Action) + " " + printable(c.Method) + " " + cut(printable(c.Path), 60))
		called = moment(c.Created, now)
	}
	reason := printable(step.Reason)
	if step.LastCause != "" {
		reason = cut(printable(step.LastCause), 120)
	}
	return []string{
		strconv.Itoa(step.Level), printable(step.Action), call, called, cut(printable(step.Way), 80),
		printable(step.CheckpointID), printable(step.Agent), status, answer, attempts, reason,
	}
}
