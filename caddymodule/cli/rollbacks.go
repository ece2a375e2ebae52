package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// pollWait is how long the server delays its answer while a rollback runs.
const pollWait = "20s"

type rollbackFlags struct {
	*options
	admin.RollbackRequest
	noWait bool
}

func rollbackCommand(o *options) *cobra.Command {
	r := rollbackFlags{options: o}
	cmd := &cobra.Command{
		Use:   "rollback CHECKPOINT --reason TEXT | --dry-run",
		Short: "Undoes a call, and what followed from it",
		Long: `Undoes a call, and what followed from it. CHECKPOINT is the Execution-Checkpoint
of the call's answer, or an entry of the ledger. The operator and the reason are
recorded, logged, and sent to agents.

--scope single, the default, undoes that call alone; sub_dag, or --cascade, what
followed from it too; full_workflow every call of its workflow. If completed
calls that would stay depend on what would be undone, the rollback is refused
and names them; with --keep-dependants they stay.

--dry-run shows the order, the steps with the calls that they undo and how, and
what cannot be undone; nothing is changed. A rollback goes on by itself, also
after this command was stopped; the same --id asks for the same one again, and
nothing runs twice.

It exits with 0 only if everything is undone, or with --dry-run and --no-wait.`,
		Example: `  # What would be undone, in which order, and what cannot be?
  caddy agent-guard rollback 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30 --cascade \
      --reason 'wrong price list' --dry-run

  # Undo it
  caddy agent-guard rollback 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30 --cascade \
      --reason 'wrong price list'`,
		Args:              oneArg("CHECKPOINT"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, args []string) error { return r.run(cmd, args[0]) },
	}
	stringFlag(cmd, &r.Reason, "reason", "Why, in a sentence for people; a dry run needs none")
	stringFlag(cmd, &r.Operator, "operator", "Who asks (default: $USER)")
	wordFlag(cmd, &r.Scope, "scope", "How far to go: single, sub_dag or full_workflow",
		[]string{string(rollback.Single), string(rollback.SubDAG), string(rollback.FullWorkflow)})
	stringFlag(cmd, &r.RollbackID, "id", "The rollback's id, a UUID (default: a fresh one)")
	f := cmd.Flags()
	f.BoolVar(&r.Cascade, "cascade", false, "Undo what followed from it too; the same as --scope sub_dag")
	f.BoolVar(&r.KeepDependants, "keep-dependants", false, "Leave completed calls that depend on what is undone as they are")
	f.BoolVar(&r.DryRun, "dry-run", false, "Show what would be done, and touch nothing")
	f.BoolVar(&r.noWait, "no-wait", false, "Do not wait for the end")
	return o.server(cmd)
}

func (r *rollbackFlags) run(cmd *cobra.Command, checkpoint string) error {
	id, err := r.complete(checkpoint)
	if err != nil {
		return err
	}
	c, err := r.client()
	if err != nil {
		return err
	}
	var doc api.Document
	text, err := c.ask(cmd.Context(), question{path: "rollback", body: &r.RollbackRequest}, &doc)
	if err != nil {
		return err
	}
	waits := !r.DryRun && !r.noWait
	if waits {
		if !r.json() && doc.State != string(rollback.Finished) {
			fmt.Fprintf(cmd.ErrOrStderr(), "Rollback %s goes on by itself; this waits for its end, and with --no-wait it would not.\n", id)
		}
		if text, err = c.waitFinished(cmd.Context(), id, text, &doc, func() { r.warnFailing(cmd, &doc) }); err != nil {
			return fmt.Errorf("%w\nThe rollback was accepted: `caddy agent-guard rollbacks %s` shows it", err, id)
		}
	}
	if err := r.print(cmd, text, func(now time.Time) string { return describeRollback(&doc, now) }); err != nil {
		return err
	}
	if waits && doc.Status != rollback.Completed {
		return fmt.Errorf("not all is undone: the rollback is %s", doc.Status)
	}
	return nil
}

// complete checks the request, fills in what was left out, and returns the rollback's id.
func (r *rollbackFlags) complete(checkpoint string) (id string, err error) {
	r.CheckpointID = checkpoint
	if r.Operator == "" {
		r.Operator = currentUser()
	}
	switch {
	case !isUUID(checkpoint):
		return "", fmt.Errorf("CHECKPOINT: %q is no UUID; it stands in Execution-Checkpoint", checkpoint)
	case r.Cascade && r.Scope != "":
		return "", errors.New("give --scope or --cascade, which is --scope sub_dag")
	case r.DryRun && r.noWait:
		return "", errors.New("give --dry-run or --no-wait: a dry run is nothing to wait for")
	case r.Reason == "" && !r.DryRun:
		return "", errors.New("--reason: say why, in a sentence for people; only --dry-run needs none")
	case r.Operator == "":
		return "", errors.New("who asks? neither --operator nor $USER says")
	}
	if r.RollbackID == "" {
		r.RollbackID = uuid.NewString()
	}
	if id, err = api.ParseID(r.RollbackID); err != nil {
		return "", fmt.Errorf("--id: %q is no UUID", r.RollbackID)
	}
	r.RollbackID = "urn:uuid:" + id
	return id, nil
}

// warnFailing reports whose decision is waited for, or the first step that failed and is retried.
func (r *rollbackFlags) warnFailing(cmd *cobra.Command, doc *api.Document) {
	if !r.json() && doc.Waits != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "It waits until somebody else decides: `caddy agent-guard escalations show %s`.\n", printable(doc.Waits))
		return
	}
	for i := range doc.Steps {
		if step := &doc.Steps[i]; !r.json() && step.LastCause != "" {
			fmt.Fprintf(cmd.ErrOrStderr(), "Checkpoint %s: %d attempts were in vain, the last one: %s. It is tried again until %s.\n",
				printable(step.CheckpointID), step.Attempts, cut(printable(step.LastCause), 200), doc.Due.UTC().Format(time.RFC3339))
			return // one is enough: `rollbacks` shows all
		}
	}
}

// waitFinished polls a rollback until it is finished, and calls pending after each poll before that.
func (c *client) waitFinished(ctx context.Context, id string, text json.RawMessage, doc *api.Document, pending func()) (json.RawMessage, error) {
	for doc.State != string(rollback.Finished) {
		began := time.Now()
		*doc = api.Document{}
		var err error
		if text, err = c.ask(ctx, question{path: "rollback/" + id, query: url.Values{"wait": {pollWait}}}, doc); err != nil {
			return nil, err
		}
		if doc.State == string(rollback.Finished) {
			continue
		}
		pending()
		if time.Since(began) > time.Second {
			continue
		}
		select { // a server that does not wait is not asked all the time
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return text, nil
}

func rollbacksCommand(o *options) *cobra.Command {
	var after string
	var tree bool
	limit := 50
	cmd := &cobra.Command{
		Use:   "rollbacks [list | [show] ID]",
		Short: "Lists rollbacks, or shows one",
		Long: `Lists rollbacks, the newest first, or shows the one with this ID: its steps,
their outcomes, and what a person must still do. With --tree it shows the steps
as a tree: what followed from a call stands below it, and is undone before it.`,
		Example: `  caddy agent-guard rollbacks
  caddy agent-guard rollbacks show f1b1c2d3-e4f5-4789-abcd-ef0123456789 --tree`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 && args[0] == "show" { // as other commands have it, like list
				args = args[1:]
				if len(args) == 0 {
					return errors.New("ID: it is missing; `rollbacks` lists them")
				}
			}
			if len(args) > 1 {
				return fmt.Errorf("give one ID, or none; there are %d", len(args))
			}
			if tree && (len(args) == 0 || args[0] == "list") {
				return errors.New("--tree: give the ID of the rollback that it shows")
			}
			return nil
		},
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && args[0] == "show" {
				args = args[1:]
			}
			if len(args) == 0 || args[0] == "list" {
				return o.listRollbacks(cmd, filters("limit", strconv.Itoa(limit), "after", after))
			}
			if _, err := api.ParseID(args[0]); err != nil {
				return fmt.Errorf("ID: %q is no UUID; `rollbacks` lists them", args[0])
			}
			describe := describeRollback
			if tree {
				describe = func(doc *api.Document, _ time.Time) string { return doc.Drawing().Tree() }
			}
			_, err := show(cmd, o, question{path: "rollback/" + url.PathEscape(args[0])}, describe)
			return err
		},
	}
	cmd.Flags().IntVar(&limit, "limit", limit, "The most to list")
	complete(cmd, "limit")
	stringFlag(cmd, &after, "after", "Continue after this place, as an earlier listing printed it")
	cmd.Flags().BoolVar(&tree, "tree", false, "Show the steps of the rollback as a tree")
	return o.server(cmd)
}

func (o *options) listRollbacks(cmd *cobra.Command, query url.Values) error {
	page, err := show(cmd, o, question{path: "rollbacks", query: query}, describeRollbacks)
	if err != nil || o.json() {
		return err
	}
	if len(page.Rollbacks) == 0 {
		fmt.Fprintln(cmd.ErrOrStderr(), "no rollbacks")
	}
	if page.Unreadable > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "%d more cannot be read; look at the server's log.\n", page.Unreadable)
	}
	if page.Next != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "There are more: --after %s goes on.\n", page.Next)
	}
	return nil
}

func describeRollbacks(page *admin.RollbackPage, now time.Time) string {
	if len(page.Rollbacks) == 0 {
		return ""
	}
	var rows [][]string
	for _, doc := range page.Rollbacks {
		by := doc.Requester
		if doc.Operator != "" {
			by = "operator " + doc.Operator
		}
		rows = append(rows, []string{
			plainID(cmp.Or(doc.KeptAs, doc.RollbackID)), printable(doc.State), dash(printable(string(doc.Status))), printable(string(doc.Scope)),
			printable(doc.CheckpointID), dash(moment(doc.Asked, now)), dash(printable(by)), cut(printable(doc.Reason), 40),
		})
	}
	return tableOf([]string{"ROLLBACK", "STATE", "STATUS", "SCOPE", "CHECKPOINT", "ASKED", "BY", "REASON"}, rows)
}

// plainID is the id in the form that commands take.
func plainID(urn string) string { return printable(strings.TrimPrefix(urn, "urn:uuid:")) }

// describeRollback shows a rollback line by line, its steps in order, and what is left to do.
func describeRollback(doc *api.Document, now time.Time) string {
	s := sheet{width: 10}
	state := printable(doc.State)
	if doc.Status != "" {
		state += ", " + printable(string(doc.Status))
	}
	if doc.TimedOut {
		state += ", not in time"
	}
	s.line("rollback", plainID(cmp.Or(doc.KeptAs, doc.RollbackID)))
	if doc.KeptAs != "" {
		s.line("asked as", plainID(doc.RollbackID))
	}
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
	s.line("joined", plainID(doc.Joined))
	if len(doc.Steps) > 0 {
		s.b.WriteString("\n" + describeSteps(doc.Steps, now))
	}
	for i, text := range doc.FollowUp {
		if i == 0 {
			s.b.WriteString("\nWhat a person must still do:\n")
		}
		s.b.WriteString("  " + printable(text) + "\n")
	}
	return s.b.String()
}

// describeSteps is a table of the steps without empty columns.
func describeSteps(steps []api.StepDocument, now time.Time) string {
	rows := [][]string{{"LEVEL", "ACTION", "CALL", "CALLED", "WAY", "CHECKPOINT", "AGENT", "STATUS", "ANSWER", "ATTEMPTS", "REASON"}}
	filled := make([]bool, len(rows[0]))
	for i := range steps {
		row := stepRow(&steps[i], now)
		for column, cell := range row {
			filled[column] = filled[column] || cell != ""
			row[column] = dash(cell)
		}
		rows = append(rows, row)
	}
	for i, row := range rows {
		rows[i] = nil
		for column, cell := range row {
			if filled[column] {
				rows[i] = append(rows[i], cell)
			}
		}
	}
	return new(table).page(rows)
}

// stepRow has a cell for each column; unknown ones are empty.
func stepRow(step *api.StepDocument, now time.Time) []string {
	status := printable(string(step.Status))
	if step.State == rollback.StepRunning {
		status = "running"
	}
	if step.Effect != "" {
		status += " (" + printable(step.Effect) + ")"
	}
	call, called := "", ""
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
		printable(step.CheckpointID), printable(step.Agent), status, number(step.HTTPStatus), number(step.Attempts), reason,
	}
}

// isUUID reports whether an id is a UUID in its usual form.
func isUUID(text string) bool {
	id, err := uuid.Parse(text)
	return err == nil && len(text) == len(id.String())
}
