package cli

import (
	"encoding/json"
	"fmt"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

func escalationGroup(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "escalations",
		Short: "Lists what waits for a person",
		Long: `Lists what only a person can decide: what cannot be undone, rollbacks that have
failed, upstreams that do not come back.`,
	}
	group(cmd)
	o.server(cmd)
	cmd.AddCommand(escalationList(o))
	return cmd
}

func levelWords() (words []string) {
	for l := hitl.Pause; l <= hitl.Stop; l++ {
		words = append(words, l.String())
	}
	return words
}

func escalationStates() (words []string) {
	for _, s := range hitl.States() {
		words = append(words, s.String())
	}
	return words
}

func escalationList(o *options) *cobra.Command {
	var page paging
	var state, level, workflow string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Lists escalations, the newest first",
		Long: `Lists escalations, the newest first. open: nobody was told yet. notified: the
receiver has taken it, or it stands in the log. undeliverable: the receiver does
not take it, so that this list may be the only one who tells of it.`,
		Example: `  # What does nobody know of?
  caddy agent-guard escalations list --state undeliverable

  # All there are, for a script
  caddy agent-guard escalations list --all --output json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := page.valid(); err != nil {
				return err
			}
			query := url.Values{}
			for name, value := range map[string]string{"state": state, "level": level, "workflow": workflow} {
				if value != "" {
					query.Set(name, value)
				}
			}
			return o.escalations(cmd, &page, query)
		},
	}
	f := cmd.Flags()
	f.Var(&word{&state, escalationStates()}, "state", "Only those in this state: open, notified or undeliverable")
	f.Var(&word{&level, levelWords()}, "level", "Only those of this level: pause, approval or stop")
	f.StringVar(&workflow, "workflow", "", "Only those of this workflow: its UUID, or its caller's name")
	page.flags(cmd)
	complete(cmd, "state", escalationStates()...)
	complete(cmd, "level", levelWords()...)
	complete(cmd, "workflow")
	return cmd
}

// escalations asks for a list, and prints it.
func (o *options) escalations(cmd *cobra.Command, page *paging, query url.Values) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	unreadable := 0
	ask := func(query url.Values) ([]json.RawMessage, string, error) {
		var answer struct {
			Escalations []json.RawMessage `json:"escalations"`
			Unreadable  int               `json:"unreadable"`
			Next        string            `json:"next"`
		}
		_, err := c.get(cmd.Context(), "escalations", query, &answer)
		unreadable += answer.Unreadable
		return answer.Escalations, answer.Next, err
	}
	if o.json() {
		out := &jsonList{out: cmd.OutOrStdout(), name: "escalations"}
		next, err := page.follow(query, ask, func(all []json.RawMessage) error { return out.add(all...) })
		if err != nil {
			return err
		}
		return out.end(next)
	}
	rows := escalationRows{now: time.Now(), table: table{out: cmd.OutOrStdout()}}
	next, err := page.follow(query, ask, rows.print)
	if err != nil {
		return err
	}
	switch {
	case rows.listed == 0:
		fmt.Fprintln(cmd.ErrOrStderr(), "no escalations")
	case next != "":
		fmt.Fprintf(cmd.ErrOrStderr(), "There are more: --after %s goes on, --all lists all.\n", next)
	}
	if unreadable > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "%d escalations are recorded and cannot be read.\n", unreadable)
	}
	return nil
}

// escalationRows prints pages as they come.
type escalationRows struct {
	now    time.Time
	table  table
	listed int
}

// escalatedIn is the workflow of an escalation.
func escalatedIn(e *admin.Escalation) string {
	if e.WorkflowName == "" {
		return cut(printable(e.Workflow), 36)
	}
	return cut(printable(e.Workflow), 36) + " (" + cut(printable(e.WorkflowName), 36) + ")"
}

var escalationHeader = []string{"OPENED", "LEVEL", "STATE", "CAUSE", "WORKFLOW", "SUMMARY", "ID"}

func (r *escalationRows) print(page []json.RawMessage) error {
	rows := make([][]string, 0, len(page))
	for _, text := range page {
		var e admin.Escalation
		if err := json.Unmarshal(text, &e); err != nil {
			return err
		}
		rows = append(rows, []string{
			moment(e.Opened, r.now), printable(e.LevelName), printable(e.State), printable(e.Cause),
			dash(escalatedIn(&e)), cut(printable(e.Summary), 100), printable(e.ID),
		})
	}
	r.listed += len(rows)
	if r.listed == 0 {
		return nil
	}
	return r.table.print(escalationHeader, rows)
}
