package cli

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// listing is what `executions list` was asked for.
type listing struct {
	*options
	states                                  []string
	guard, action, method, caller, workflow string
	id, checkpoint, undos                   string
	olderThan, newerThan                    string
	paging
}

// undoWords say what to do with the executions of undos.
var undoWords = []string{"with", "without", "only"}

func stateWords() (words []string) {
	for _, s := range guard.States() {
		words = append(words, s.String())
	}
	return words
}

func list(o *options) *cobra.Command {
	l := listing{options: o}
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Lists executions, the youngest first",
		Long: `Lists executions, the youngest first. Filters may be combined; --state may
stand several times.

Ages count from when a call was claimed. A caller is named by its hash, as
listings and logs show it, and a workflow by its caller's name or its UUID. An
--id alone is looked for in all that is recorded, youngest first; with --caller
it is found at once.

What a rollback has sent stands here too, with the action undo and the method
(undo).`,
		Example: `  # What waits for a decision?
  caddy agent-guard executions list --state in_doubt

  # What has been running for longer than it should?
  caddy agent-guard executions list --state running --older-than 10m

  # Which call is it that an escalation, or its caller, names?
  caddy agent-guard executions list --checkpoint 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30
  caddy agent-guard executions list --id order-7

  # All payments of the last two days, for a script
  caddy agent-guard executions list --action charge --newer-than 2d --all --output json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return l.run(cmd) },
	}
	f := cmd.Flags()
	f.Var(&words{&l.states, stateWords()}, "state", "Only those in this state: claimed, running, completed, in_doubt or rolled_back")
	f.StringVar(&l.guard, "guard", "", "Only those of the guard with this name")
	f.StringVar(&l.action, "action", "", "Only those of this action")
	f.StringVar(&l.method, "method", "", "Only those with this method")
	f.StringVar(&l.caller, "caller", "", "Only those of the caller with this hash")
	f.StringVar(&l.workflow, "workflow", "", "Only those of this workflow: its UUID, or its caller's name")
	f.StringVar(&l.id, "id", "", "Only those that their callers have named so, usually in Idempotency-Key")
	f.StringVar(&l.checkpoint, "checkpoint", "", "Only the one of this checkpoint, a UUID as in Execution-Checkpoint")
	f.Var(&word{&l.undos, undoWords}, "undos", "What rollbacks have sent: with (all, which is the default), without or only")
	f.StringVar(&l.olderThan, "older-than", "", "Only those claimed longer ago, like 10m or 2d")
	f.StringVar(&l.newerThan, "newer-than", "", "Only those claimed since, like 10m or 2d")
	l.flags(cmd)
	complete(cmd, "state", stateWords()...)
	for _, flag := range []string{"guard", "action", "caller", "workflow", "id", "checkpoint", "older-than", "newer-than"} {
		complete(cmd, flag)
	}
	complete(cmd, "undos", undoWords...)
	complete(cmd, "method", "POST", "PUT", "PATCH", "DELETE")
	return cmd
}

// query is the listing's query, without its page.
func (l *listing) query() (url.Values, error) {
	if err := l.valid(); err != nil {
		return nil, err
	}
	q := url.Values{}
	for _, state := range l.states {
		q.Add("state", state)
	}
	for name, value := range map[string]string{
		"guard": l.guard, "action": l.action, "method": l.method, "caller": l.caller, "workflow": l.workflow,
		"id": l.id, "checkpoint": l.checkpoint, "undos": l.undos,
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	for name, flag := range map[string]struct{ flag, age string }{
		"min_age": {"--older-than", l.olderThan}, "max_age": {"--newer-than", l.newerThan},
	} {
		if flag.age == "" {
			continue
		}
		if age, err := caddy.ParseDuration(flag.age); err != nil || age < 0 {
			return nil, fmt.Errorf("%s: %q is no duration; write one like 10m, 4h or 2d", flag.flag, flag.age)
		}
		q.Set(name, flag.age)
	}
	return q, nil
}

func (l *listing) run(cmd *cobra.Command) error {
	query, err := l.query()
	if err != nil {
		return err
	}
	c, err := l.client()
	if err != nil {
		return err
	}
	out := newListOutput(l, cmd)
	next, err := l.follow(query, func(query url.Values) ([]json.RawMessage, string, error) {
		var page struct {
			Executions []json.RawMessage `json:"executions"`
			Next       string            `json:"next"`
		}
		_, err := c.get(cmd.Context(), "executions", query, &page)
		return page.Executions, page.Next, err
	}, out.page)
	if err != nil {
		return err
	}
	return out.end(next)
}

// listOutput prints pages as they come.
type listOutput struct {
	cmd    *cobra.Command
	json   *jsonList // nil for a table
	table  table
	listed int
}

func newListOutput(l *listing, cmd *cobra.Command) *listOutput {
	o := &listOutput{cmd: cmd, table: table{out: cmd.OutOrStdout()}}
	if l.json() {
		o.json = &jsonList{out: cmd.OutOrStdout(), name: "executions"}
	}
	return o
}

var listHeader = []string{"KEY", "STATE", "AGE", "GUARD", "ACTION", "METHOD", "STATUS", "CAUSE", "CALLER", "PATH"}

func (o *listOutput) page(executions []json.RawMessage) error {
	if o.json != nil {
		return o.json.add(executions...)
	}
	rows := make([][]string, 0, len(executions))
	for _, text := range executions {
		var x admin.Execution
		if err := json.Unmarshal(text, &x); err != nil {
			return err
		}
		status, cause := "", ""
		if x.Status != 0 {
			status = strconv.Itoa(x.Status)
		}
		if x.State == guard.StateInDoubt.String() {
			cause = x.Cause
		}
		rows = append(rows, []string{
			short(x.Key, 16), x.State, ago(x.Age), printable(x.Guard), printable(x.Action), printable(x.Method),
			dash(status), dash(cause), short(x.Caller, 8), cut(printable(x.Path), 60),
		})
	}
	o.listed += len(rows)
	if o.listed == 0 {
		return nil
	}
	return o.table.print(listHeader, rows)
}

// end says how to go on where there is more.
func (o *listOutput) end(next string) error {
	if o.json != nil {
		return o.json.end(next)
	}
	if o.listed == 0 {
		fmt.Fprintln(o.cmd.ErrOrStderr(), "no executions")
	}
	if next != "" {
		fmt.Fprintf(o.cmd.ErrOrStderr(), "There are more: --after %s goes on, --all lists all.\n", next)
	}
	return nil
}
