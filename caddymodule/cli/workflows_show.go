package cli

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// workflowFlags are the flags of `workflows show`.
type workflowFlags struct {
	*options
	tree, watch bool
}

func workflowsShow(o *options) *cobra.Command {
	f := workflowFlags{options: o}
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Shows where a workflow is",
		Long: `Shows what a running server has recorded of a workflow: where it is in its plan,
or without one its tokens. ID is the workflow's UUID, or its caller's name. With
--tree it shows what follows from what as a tree. With --watch it shows the
workflow again with every change, until its plan is over, or until Ctrl-C.`,
		Example: `  caddy agent-guard workflows show 1f0c9a52-6d3e-4b8a-9c44-0d6a7e5b2f10 --tree --watch`,
		Args:    nArgs(1, "one ID of a workflow"),
		RunE: func(cmd *cobra.Command, args []string) error {
			q := question{path: "workflows/{}"}
			if f.watch {
				return f.follow(cmd, q.of(args))
			}
			return showing(o, q, f.describe)(cmd, args)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().BoolVar(&f.tree, "tree", false, "Show it as a tree")
	cmd.Flags().BoolVar(&f.watch, "watch", false, "Show it again with every change")
	return o.server(cmd)
}

func (f *workflowFlags) describe(doc *evidence.Workflow, now time.Time) string {
	if f.tree {
		return doc.Drawing().Tree()
	}
	return describeWorkflow(doc, now)
}

// follow shows the workflow with every change. A stream that ends is taken up again: the server ends it after a
// while, and with each load of its configuration.
func (f *workflowFlags) follow(cmd *cobra.Command, q question) error {
	c, err := f.client()
	if err != nil {
		return err
	}
	q.slow, q.accept = true, "text/event-stream"
	doc, shown := new(evidence.Workflow), false
	for {
		over, err := c.events(cmd.Context(), &q, func(name string, data []byte) (bool, error) {
			change := new(evidence.Workflow)
			if err := json.Unmarshal(data, change); err != nil {
				return false, c.foreign(err)
			}
			if name == "change" {
				doc.Apply(change)
			} else {
				doc = change
			}
			if shown && !f.json() {
				fmt.Fprintln(cmd.OutOrStdout())
			}
			shown = true
			err := f.print(cmd, doc, func(now time.Time) string { return f.describe(doc, now) })
			return doc.Plan != nil && doc.Plan.Status != workflow.StatusRunning, err
		})
		if over || err != nil || cmd.Context().Err() != nil {
			return err
		}
		select {
		case <-time.After(time.Second):
		case <-cmd.Context().Done():
			return nil
		}
	}
}

// maxEvent bounds an event of a stream, in bytes.
const maxEvent = 16 << 20

// events reads a stream until take says that this is enough, or the stream ends. The next one goes on behind the
// last event.
func (c *client) events(ctx context.Context, q *question, take func(name string, data []byte) (enough bool, err error)) (bool, error) {
	resp, err := c.open(ctx, *q)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	name, data := "", ""
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "event":
			name = value
		case "id":
			q.last = value
		case "data":
			data = value
		}
		if lines.Text() != "" || data == "" {
			continue
		}
		if enough, err := take(name, []byte(data)); enough || err != nil {
			return enough, err
		}
		name, data = "", ""
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return false, fmt.Errorf("an event of %s has more than %d bytes", c.address, maxEvent)
	}
	return false, nil // it ended, or broke off
}

// describeWorkflow shows a workflow line by line, and its plan or its tokens as a table.
func describeWorkflow(doc *evidence.Workflow, now time.Time) string {
	pairs := []any{
		"workflow", doc.ID, "status", cmp.Or(inWords(string(doc.Status), ""), "not all of it was read"), "stated", inWords(doc.Stated, ""),
	}
	if p := doc.Plan; p != nil {
		return lines(now, 8, append(pairs, "plan", p.PlanID+", version "+p.Version)...) + "\n" + progressTable(p)
	}
	rows := make([][]any, len(doc.Nodes))
	for i := range doc.Nodes {
		n := &doc.Nodes[i]
		rows[i] = []any{
			"TOKEN", n.ID, "ACTION", blank(cut(n.Action, 40)), "STATE", inWords(string(n.State), string(n.Detail)),
			"ISSUER", cut(n.Issuer, 60), "TIME", n.Time,
		}
	}
	return lines(now, 8, pairs...) + "\n" + (&table{now: now}).page(rows...)
}
