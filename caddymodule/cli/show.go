package cli

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

const keyHelp = `KEY is an execution key, or the first digits of one, at least four: logs show
sixteen. It may also be the UUID of the call's checkpoint, or the caller's id of
the execution where one alone has it.`

func show(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "show KEY",
		Short: "Shows an execution, and what was decided about it",
		Long: `Shows all that is recorded of an execution but its body and its answer, and
what operators have decided about it.

` + keyHelp,
		Example: `  caddy agent-guard executions show 9f3c51a07b2e44d1
  caddy agent-guard executions show 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30
  caddy agent-guard executions show order-7`,
		Args:              oneKey,
		ValidArgsFunction: completeKey(o),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			var x admin.Execution
			text, err := c.get(cmd.Context(), keyPath(args[0]), url.Values{}, &x)
			if err != nil {
				return err
			}
			if o.json() {
				return encode(cmd.OutOrStdout(), text)
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), describe(&x, time.Now()))
			return err
		},
	}
}

func oneKey(_ *cobra.Command, args []string) error {
	switch len(args) {
	case 0:
		return errors.New("give a KEY; `executions list` shows them")
	case 1:
		return nil
	}
	return fmt.Errorf("give one KEY; there are %d", len(args))
}

func keyPath(key string) string { return "executions/" + url.PathEscape(key) }

// describe is x line by line.
func describe(x *admin.Execution, now time.Time) string {
	s := sheet{width: 12}
	state := x.State
	if x.Detail != "" {
		state += ", " + x.Detail
	}
	s.line("key", x.Key)
	s.line("state", state)
	s.line("cause", x.Cause)
	if x.Status != 0 {
		s.line("status", strconv.Itoa(x.Status))
	}
	s.line("call", printable(x.Method)+" "+printable(x.Host)+printable(x.Path))
	if x.ExecutionID != "" {
		s.line("execution id", printable(x.ExecutionID)+" ("+x.Origin+")")
	}
	s.line("guard", printable(x.Guard))
	s.line("action", printable(x.Action))
	s.line("caller", x.Caller)
	s.line("workflow", named(x.WorkflowID, x.Workflow))
	s.line("checkpoint", printable(x.Checkpoint))
	s.line("node", x.Node)
	s.line("created", moment(x.Created, now))
	if x.Settled.IsZero() {
		s.line("deadline", moment(x.Deadline, now))
	}
	s.line("settled", moment(x.Settled, now))
	if x.Result != nil {
		s.line("result", describeResult(x.Result, now))
	}
	s.line("key expires", moment(x.KeyExpires, now))
	for _, r := range x.Resolutions {
		what := "not applied"
		if r.Applied {
			what = "applied"
		}
		s.line("resolved", fmt.Sprintf("%s, %s, by %s: %s", moment(r.At, now), what, printable(r.Operator), printable(r.Reason)))
	}
	return s.b.String()
}

// named is a workflow's UUID with the caller's name for it, where both are known.
func named(id, name string) string {
	switch {
	case name == "" || id == name:
		return printable(id)
	case id == "":
		return printable(name)
	}
	return printable(id) + " (" + printable(name) + ")"
}

func describeResult(r *admin.Result, now time.Time) string {
	switch {
	case !r.Kept:
		return "not kept"
	case r.Replayable:
		return fmt.Sprintf("%s, replayable until %s", size(uint64(r.Size)), moment(r.Expires, now))
	default:
		return "expired " + moment(r.Expires, now)
	}
}
