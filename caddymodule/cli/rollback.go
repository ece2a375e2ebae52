package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// scopeWords are the scopes of a rollback.
var scopeWords = []string{string(plan.Single), string(plan.SubDAG), string(plan.FullWorkflow)}

// lookPause is how long one look at a rollback waits for its end.
const lookPause = "20s"

// undoing is what `rollback` was asked for.
type undoing struct {
	*options
	admin.RollbackRequest
	noWait bool
}

func rollbackCommand(o *options) *cobra.Command {
	u := undoing{options: o}
	cmd := &cobra.Command{
		Use:   "rollback CHECKPOINT --reason TEXT | --dry-run",
		Short: "Undoes what a call, and what followed from it, has changed",
		Long: `Undoes what a call, and what followed from it, has changed. CHECKPOINT is what
the call's answer has in Execution-Checkpoint, or an entry of the ledger. Who asks
and why are recorded, logged, and told to agents.

--scope single undoes that call alone, which is the default; sub_dag, or
--cascade, what followed from it too; full_workflow every call of its workflow.

--dry-run shows the order, the steps with the calls that they undo and how, and
what cannot be undone; nothing is touched. A rollback goes on by itself, also when this command is stopped; the
same --id asks for the same one again, and nothing runs twice.

It exits with 0 only where all is undone, or with --dry-run and --no-wait.`,
		Example: `  # What would be undone, in which order, and what cannot be?
  caddy agent-guard rollback 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30 --cascade \
      --reason 'wrong price list' --dry-run

  # Undo it
  caddy agent-guard rollback 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30 --cascade \
      --reason 'wrong price list'`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("give one CHECKPOINT; there are %d", len(args))
			}
			return nil
		},
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, args []string) error { return u.run(cmd, args[0]) },
	}
	o.server(cmd)
	f := cmd.Flags()
	f.StringVar(&u.Reason, "reason", "", "Why, in a sentence for people; a dry run needs none")
	f.StringVar(&u.Operator, "operator", "", "Who asks (default: $USER)")
	f.Var(&word{&u.Scope, scopeWords}, "scope", "How far to go: single, sub_dag or full_workflow")
	f.BoolVar(&u.Cascade, "cascade", false, "Undo what followed from it too; the same as --scope sub_dag")
	f.BoolVar(&u.DryRun, "dry-run", false, "Show what would be done, and touch nothing")
	f.StringVar(&u.RollbackID, "id", "", "The rollback's id, a UUID (default: a fresh one)")
	f.BoolVar(&u.noWait, "no-wait", false, "Do not wait for the end")
	for _, flag := range []string{"reason", "operator", "id"} {
		complete(cmd, flag)
	}
	complete(cmd, "scope", scopeWords...)
	return cmd
}

func (u *undoing) run(cmd *cobra.Command, checkpoint string) error {
	u.CheckpointID = checkpoint
	if !isUUID(checkpoint) {
		return fmt.Errorf("CHECKPOINT: %q is no UUID; it stands in Execution-Checkpoint", checkpoint)
	}
	if u.Cascade && u.Scope != "" {
		return errors.New("give --scope or --cascade, which is --scope sub_dag")
	}
	if u.DryRun && u.noWait {
		return errors.New("give --dry-run or --no-wait: a dry run is nothing to wait for")
	}
	if u.Reason == "" && !u.DryRun {
		return errors.New("--reason: say why, in a sentence for people; only --dry-run needs none")
	}
	if u.Operator == "" {
		u.Operator = me()
	}
	if u.Operator == "" {
		return errors.New("who asks? neither --operator nor $USER says")
	}
	if u.RollbackID == "" {
		u.RollbackID = uuid.NewString()
	}
	id, err := rollbackapi.ParseID(u.RollbackID)
	if err != nil {
		return fmt.Errorf("--id: %q is no UUID", u.RollbackID)
	}
	u.RollbackID = "urn:uuid:" + id
	c, err := u.client()
	if err != nil {
		return err
	}
	var doc rollbackapi.Document
	text, err := c.post(cmd.Context(), "rollback", &u.RollbackRequest, &doc)
	if err != nil {
		return err
	}
	if !u.DryRun && !u.noWait {
		if !u.json() && doc.State != string(rollback.Finished) {
			fmt.Fprintf(cmd.ErrOrStderr(), "Rollback %s goes on by itself; this waits for its end, and with --no-wait it would not.\n", id)
		}
		if text, err = c.finished(cmd.Context(), id, text, &doc, u.hanging(cmd)); err != nil {
			return fmt.Errorf("%w\nThe rollback was accepted: `caddy agent-guard rollbacks %s` shows it", err, id)
		}
	}
	if err := u.print(cmd, text, &doc); err != nil {
		return err
	}
	if !u.DryRun && !u.noWait && doc.Status != rollback.Completed {
		return fmt.Errorf("not all is undone: the rollback is %s", doc.Status)
	}
	return nil
}

// hanging says what a rollback hangs at, each time that one is looked at in vain.
func (u *undoing) hanging(cmd *cobra.Command) func(*rollbackapi.Document) {
	return func(doc *rollbackapi.Document) {
		for i := range doc.Steps {
			if step := &doc.Steps[i]; !u.json() && step.LastCause != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "Checkpoint %s: %d attempts were in vain, the last one: %s. It is tried again until %s.\n",
					printable(step.CheckpointID), step.Attempts, cut(printable(step.LastCause), 200), doc.Due.UTC().Format(time.RFC3339))
				return // one is enough: `rollbacks` shows all
			}
		}
	}
}

// finished looks at a rollback until it is finished, and tells each time that it is not.
func (c *client) finished(ctx context.Context, id string, text json.RawMessage, doc *rollbackapi.Document, told func(*rollbackapi.Document)) (json.RawMessage, error) {
	for doc.State != string(rollback.Finished) {
		began := time.Now()
		*doc = rollbackapi.Document{}
		var err error
		if text, err = c.get(ctx, "rollback/"+id, url.Values{"wait": {lookPause}}, doc); err != nil {
			return nil, err
		}
		if doc.State == string(rollback.Finished) {
			continue
		}
		told(doc)
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

func (o *options) print(cmd *cobra.Command, text json.RawMessage, doc *rollbackapi.Document) error {
	if o.json() {
		return encode(cmd.OutOrStdout(), text)
	}
	return printRollback(cmd.OutOrStdout(), doc, time.Now())
}
