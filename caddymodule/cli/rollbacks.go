package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
)

// pollWait is how long the server delays its answer while a rollback runs.
const pollWait = "20s"

type rollbackFlags struct {
	*options
	admin.RollbackRequest
	given  url.Values // has the scope
	noWait bool
}

func rollbackCommand(o *options) *cobra.Command {
	r := rollbackFlags{options: o, given: url.Values{}}
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
		Args:              nArgs(1, "one CHECKPOINT"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, args []string) error { return r.run(cmd, args[0]) },
	}
	stringFlag(cmd, &r.Reason, "reason", "Why, in a sentence for people; a dry run needs none")
	operatorFlag(cmd, &r.Operator, "asks")
	wordFlag(cmd, r.given, "word", "scope", "How far to go: single, sub_dag or full_workflow",
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
	doc, text, err := ask[rollback.Rollback](cmd.Context(), r.options, question{path: "rollback", body: &r.RollbackRequest})
	if err != nil {
		return err
	}
	waits := !r.DryRun && !r.noWait
	if waits {
		if !r.json() && doc.State != rollback.Finished {
			fmt.Fprintf(cmd.ErrOrStderr(), "Rollback %s goes on by itself; this waits for its end, and with --no-wait it would not.\n", id)
		}
		if doc, text, err = r.waitFinished(cmd, id, doc, text); err != nil {
			return fmt.Errorf("%w\nThe rollback was accepted: `caddy agent-guard rollbacks %s` shows it", err, id)
		}
	}
	if err := r.print(cmd, text, func(now time.Time) string { return describeRollback(doc, now) }); err != nil {
		return err
	}
	if waits && doc.Status != rollback.Completed {
		return fmt.Errorf("not all is undone: the rollback is %s", doc.Status)
	}
	return nil
}

// complete checks the request, fills in what was left out, and returns the rollback's id.
func (r *rollbackFlags) complete(checkpoint string) (id string, err error) {
	r.CheckpointID, r.Scope = checkpoint, r.given.Get("scope")
	switch {
	case !isUUID(checkpoint):
		return "", fmt.Errorf("CHECKPOINT: %q is no UUID; it stands in Execution-Checkpoint", checkpoint)
	case r.Cascade && r.Scope != "":
		return "", errors.New("give --scope or --cascade, which is --scope sub_dag")
	case r.DryRun && r.noWait:
		return "", errors.New("give --dry-run or --no-wait: a dry run is nothing to wait for")
	case r.Reason == "" && !r.DryRun:
		return "", errors.New("--reason: say why, in a sentence for people; only --dry-run needs none")
	}
	if r.RollbackID == "" {
		r.RollbackID = uuid.NewString()
	}
	if id, err = router.ParseID(r.RollbackID); err != nil {
		return "", fmt.Errorf("--id: %q is no UUID", r.RollbackID)
	}
	r.RollbackID = "urn:uuid:" + id
	return id, nil
}

// warnFailing reports whose decision is waited for, or the first step that failed and is retried.
func (r *rollbackFlags) warnFailing(cmd *cobra.Command, doc *rollback.Rollback) {
	if !r.json() && doc.Waits != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "It waits until somebody else decides: `caddy agent-guard escalations show %s`.\n", printable(doc.Waits))
		return
	}
	for i := range doc.Steps {
		if step := &doc.Steps[i]; !r.json() && step.LastCause != "" {
			fmt.Fprintf(cmd.ErrOrStderr(), "Checkpoint %s: %d attempts were in vain, the last one: %s. It is tried again until %s.\n",
				printable(step.Checkpoint), step.Attempts, cut(printable(step.LastCause), 200), doc.Due.UTC().Format(time.RFC3339))
			return // one is enough: `rollbacks` shows all
		}
	}
}

// waitFinished polls a rollback until it is finished.
func (r *rollbackFlags) waitFinished(
	cmd *cobra.Command, id string, doc *rollback.Rollback, text json.RawMessage,
) (*rollback.Rollback, json.RawMessage, error) {
	for doc.State != rollback.Finished {
		began := time.Now()
		var err error
		doc, text, err = ask[rollback.Rollback](cmd.Context(), r.options, question{path: "rollback/" + id, query: url.Values{"wait": {pollWait}}})
		if err != nil {
			return nil, nil, err
		}
		if doc.State == rollback.Finished {
			break
		}
		r.warnFailing(cmd, doc)
		if time.Since(began) > time.Second {
			continue
		}
		select { // a server that does not wait is not asked all the time
		case <-time.After(time.Second):
		case <-cmd.Context().Done():
			return nil, nil, cmd.Context().Err()
		}
	}
	return doc, text, nil
}

func rollbacksCommand(o *options) *cobra.Command {
	page := paging{query: url.Values{}}
	var tree bool
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
				return listPages(cmd, o, &page, "rollbacks", rollbackRow)
			}
			if _, err := router.ParseID(args[0]); err != nil {
				return fmt.Errorf("ID: %q is no UUID; `rollbacks` lists them", args[0])
			}
			describe := describeRollback
			if tree {
				describe = func(doc *rollback.Rollback, _ time.Time) string { return rollback.Drawing(doc).Tree() }
			}
			return showing(o, question{path: "rollback/{}"}, describe)(cmd, args)
		},
	}
	page.flags(cmd, false)
	cmd.Flags().BoolVar(&tree, "tree", false, "Show the steps of the rollback as a tree")
	return o.server(cmd)
}

func rollbackRow(doc *rollback.Rollback) []any {
	by := doc.Requester
	if doc.Operator != "" {
		by = "operator " + doc.Operator
	}
	return []any{
		"ROLLBACK", plainID(cmp.Or(doc.KeptAs, doc.ID)), "STATE", doc.State, "STATUS", doc.Status, "SCOPE", doc.Scope,
		"CHECKPOINT", doc.Checkpoint, "ASKED", doc.Asked, "BY", by, "REASON", cut(printable(doc.Reason), 40),
	}
}

// plainID is the id in the form that commands take.
func plainID(urn string) string { return strings.TrimPrefix(urn, "urn:uuid:") }

// describeRollback shows a rollback line by line, its steps in order, and what is left to do.
func describeRollback(doc *rollback.Rollback, now time.Time) string {
	state, asked := string(doc.State), ""
	if doc.Status != "" {
		state += ", " + string(doc.Status)
	}
	if doc.TimedOut {
		state += ", not in time"
	}
	if doc.KeptAs != "" {
		asked = plainID(doc.ID)
	}
	text := lines(now, 10,
		"rollback", plainID(cmp.Or(doc.KeptAs, doc.ID)), "asked as", asked, "state", state, "effect", doc.Effect,
		"checkpoint", doc.Checkpoint, "workflow", named(doc.Workflow, doc.WorkflowName), "scope", doc.Scope,
		"operator", doc.Operator, "requester", doc.Requester, "reason", doc.Reason,
		"asked", doc.Asked, "due", doc.Due, "finished", doc.Finished, "joined", plainID(doc.Joined))
	if len(doc.Steps) > 0 {
		text += "\n" + describeSteps(doc.Steps, now)
	}
	for i, what := range doc.FollowUp {
		if i == 0 {
			text += "\nWhat a person must still do:\n"
		}
		text += "  " + printable(what) + "\n"
	}
	return text
}

// describeSteps is a table of the steps without empty columns.
func describeSteps(steps []rollback.Step, now time.Time) string {
	filled := map[any]bool{}
	rows := make([][]any, len(steps))
	for i := range steps {
		rows[i] = stepRow(&steps[i])
		for pair := range slices.Chunk(rows[i], 2) {
			filled[pair[0]] = filled[pair[0]] || shown(pair[1], now) != ""
		}
	}
	return tableOf(now, rows, func(row *[]any) (cells []any) {
		for pair := range slices.Chunk(*row, 2) {
			if filled[pair[0]] {
				cells = append(cells, pair...)
			}
		}
		return cells
	})
}

func stepRow(step *rollback.Step) []any {
	status := string(step.Status)
	if step.State == rollback.StepRunning {
		status = "running"
	}
	if step.Effect != "" {
		status += " (" + step.Effect + ")"
	}
	call, called := "", time.Time{}
	if c := step.Call; c != nil {
		call = strings.TrimSpace(printable(c.Action) + " " + printable(c.Method) + " " + cut(printable(c.Path), 60))
		called = c.Created
	}
	reason := step.Reason
	if step.LastCause != "" {
		reason = cut(printable(step.LastCause), 120)
	}
	return []any{
		"LEVEL", step.Level, "ACTION", step.Action, "CALL", call, "CALLED", called, "WAY", cut(printable(step.Way), 80),
		"CHECKPOINT", step.Checkpoint, "AGENT", step.Agent, "STATUS", status, "ANSWER", number(step.HTTPStatus),
		"ATTEMPTS", number(step.Attempts), "REASON", reason,
	}
}

// isUUID reports whether an id is a UUID in its usual form.
func isUUID(text string) bool {
	id, err := uuid.Parse(text)
	return err == nil && len(text) == len(id.String())
}
