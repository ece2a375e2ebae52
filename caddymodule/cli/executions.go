package cli

import (
	"bufio"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

func executionCommands(o *options) *cobra.Command {
	return o.server(group(&cobra.Command{
		Use:   "executions",
		Short: "Lists, shows and resolves executions",
		Long:  "Lists and shows the records of guarded calls, and settles those in doubt.",
	}, executionList(o), executionShow(o), executionResolve(o)))
}

func executionList(o *options) *cobra.Command {
	page := paging{query: url.Values{}}
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Lists executions, the youngest first",
		Long: `Lists executions, the youngest first. Filters may be combined; --state may
be repeated.

Ages count from the claim of a call. A caller is named by its hash, as listings
and logs show it, and a workflow by its caller's name or its UUID. An --id alone
is searched in all records, youngest first; with --caller it is found at once.

Requests of rollbacks are listed too, with the action undo and the method
(undo).`,
		Example: `  # Which executions need a decision?
  caddy agent-guard executions list --state in_doubt

  # Which executions run for too long?
  caddy agent-guard executions list --state running --older-than 10m

  # Find the call that an escalation, or its caller, names
  caddy agent-guard executions list --checkpoint 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30
  caddy agent-guard executions list --id order-7

  # All payments of the last two days, for a script
  caddy agent-guard executions list --action charge --newer-than 2d --all --output json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listPages(cmd, o, &page, "executions", executionRow)
		},
	}
	q := page.query
	wordFlag(cmd, q, "words", "state", "Only those in this state: running, completed, in_doubt or rolled_back", names(execution.States()))
	filterFlag(cmd, q, "guard", "Only those of the guard with this name")
	filterFlag(cmd, q, "action", "Only those of this action")
	filterFlag(cmd, q, "method", "Only those with this method", "POST", "PUT", "PATCH", "DELETE")
	filterFlag(cmd, q, "caller", "Only those of the caller with this hash, or with these first digits of it")
	filterFlag(cmd, q, "workflow", "Only those of this workflow: its UUID, or its caller's name")
	filterFlag(cmd, q, "id", "Only those with this id from their caller, usually in Idempotency-Key")
	filterFlag(cmd, q, "checkpoint", "Only the one of this checkpoint, a UUID as in Execution-Checkpoint")
	undos := []string{"with", "without", "only"}
	wordFlag(cmd, q, "word", "undos", "Requests of rollbacks: with (all, the default), without or only", undos)
	ageFlag(cmd, q, "older-than", "min_age", "Only those claimed longer ago, like 10m or 2d")
	ageFlag(cmd, q, "newer-than", "max_age", "Only those claimed since, like 10m or 2d")
	page.flags(cmd, true)
	return cmd
}

func executionRow(x *admin.Execution) []any {
	return []any{
		"KEY", short(x.Key, 16), "STATE", x.State, "AGE", ago(x.Age), "GUARD", x.Guard, "ACTION", x.Action, "METHOD", x.Method,
		"STATUS", number(x.Status), "CAUSE", x.Cause, "CALLER", short(x.Caller, 8), "PATH", cut(printable(x.Path), 60),
	}
}

const keyHelp = `KEY is an execution key or its first digits, at least four; logs show sixteen.
It may also be the UUID of the call's checkpoint, or the caller's id of the
execution if only one has it.`

func executionShow(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "show KEY",
		Short: "Shows an execution, and the decisions about it",
		Long: `Shows the record of an execution without its body and its answer, and the
decisions of operators about it.

` + keyHelp,
		Example: `  caddy agent-guard executions show 9f3c51a07b2e44d1
  caddy agent-guard executions show 0193e2a7-5b1c-7d0e-8f7a-2b6c4d1e9f30
  caddy agent-guard executions show order-7`,
		Args:              oneKey,
		ValidArgsFunction: completeKey(o),
		RunE:              showing(o, question{path: "executions/{}"}, describeExecution),
	}
}

func oneKey(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("give a KEY; `executions list` shows them")
	}
	return nArgs(1, "one KEY")(cmd, args)
}

// describeExecution shows an execution line by line.
func describeExecution(x *admin.Execution, now time.Time) string {
	state, id, result, deadline := x.State, "", "", x.Deadline
	if x.Detail != "" {
		state += ", " + x.Detail
	}
	if x.ExecutionID != "" {
		id = x.ExecutionID + " (" + x.Origin + ")"
	}
	if !x.Settled.IsZero() {
		deadline = time.Time{}
	}
	if x.Result != nil {
		result = describeResult(x.Result, now)
	}
	pairs := []any{
		"key", x.Key, "state", state, "cause", x.Cause, "status", number(x.Status),
		"call", strings.TrimSpace(x.Method + " " + x.Host + x.Path), "execution id", id,
		"guard", x.Guard, "action", x.Action, "caller", x.Caller,
		"workflow", named(x.Workflow, x.WorkflowName), "checkpoint", x.Checkpoint, "node", x.Node,
		"created", x.Created, "deadline", deadline, "settled", x.Settled,
		"result", result, "key expires", x.KeyExpires,
	}
	for _, r := range x.Resolutions {
		what := "not applied"
		if r.Applied {
			what = "applied"
		}
		pairs = append(pairs, "resolved", fmt.Sprintf("%s, %s, by %s: %s", moment(r.At, now), what, r.Operator, r.Reason))
	}
	return lines(now, 12, pairs...)
}

// named joins a workflow's UUID and the caller's name for it, if both are known.
func named(id, name string) string {
	if id == "" || name == "" || id == name {
		return cmp.Or(id, name)
	}
	return id + " (" + name + ")"
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

// maxBody bounds the body of an answer, in bytes.
const maxBody = 256 << 10

// resolveFlags are the flags of `executions resolve`.
type resolveFlags struct {
	*options
	admin.Decision
	answer                   admin.Answer
	header                   []string // lines of the answer
	bodyFile                 string
	applied, notApplied, yes bool
}

func executionResolve(o *options) *cobra.Command {
	r := resolveFlags{options: o}
	cmd := &cobra.Command{
		Use:   "resolve KEY --applied|--not-applied --reason TEXT",
		Short: "Settles an execution in doubt",
		Long: `Settles an execution in doubt, with what you found out at the upstream. The
decision, who made it and why are recorded and logged.

--applied: the call was executed. Retries never run it again. With --status
they get the answer that you give; without, they learn that it was executed
and that its answer is gone.

--not-applied: the call was not executed, and cannot be any more. Its key is
free: a retry RUNS. On a terminal you are asked first; elsewhere,
give --yes.

` + keyHelp,
		Example: `  # The payment was made: retries get its answer
  caddy agent-guard executions resolve 9f3c51a07b2e44d1 --applied \
      --reason 'charge ch_81 is in the dashboard' \
      --status 201 --header 'Content-Type: application/json' --body '{"id":"ch_81"}'

  # It was not made, and will not be: let a retry run
  caddy agent-guard executions resolve 9f3c51a07b2e44d1 --not-applied \
      --reason 'no charge with this key, the provider confirms' --yes`,
		Args:              oneKey,
		ValidArgsFunction: completeKey(o, "in_doubt"),
		RunE:              func(cmd *cobra.Command, args []string) error { return r.run(cmd, args[0]) },
	}
	f := cmd.Flags()
	f.BoolVar(&r.applied, "applied", false, "The call was executed")
	f.BoolVar(&r.notApplied, "not-applied", false, "The call was not executed, and cannot be any more")
	stringFlag(cmd, &r.Reason, "reason", "What you have found out, and where")
	operatorFlag(cmd, &r.Operator, "decides")
	f.IntVar(&r.answer.Status, "status", 0, "Status of the answer that retries get, 200 to 599")
	complete(cmd, "status")
	stringsFlag(cmd, &r.header, "header", "Header field of that answer, 'Name: value'; may stand several times")
	stringFlag(cmd, &r.answer.Body, "body", "Body of that answer")
	f.StringVar(&r.bodyFile, "body-file", "", "File with the body of that answer; - is the standard input")
	f.BoolVar(&r.yes, "yes", false, "Do not ask")
	return cmd
}

func (r *resolveFlags) run(cmd *cobra.Command, key string) error {
	if err := r.check(cmd); err != nil {
		return err
	}
	if r.notApplied && !r.yes {
		if !term.IsTerminal(int(os.Stdin.Fd())) {
			return errors.New("--not-applied lets a retry run; without a terminal to ask on, confirm it with --yes")
		}
		x, _, err := ask[admin.Execution](cmd.Context(), r.options, question{path: "executions/{}"}.of([]string{key}))
		if err != nil {
			return err
		}
		key = x.Key // the decision is about what was shown
		if err := confirm(cmd, describeExecution(x, time.Now()), "If this call was executed after all, a retry executes it again.\n"+
			"Is it certain that it was not?"); err != nil {
			return err
		}
	}
	decide := question{path: "executions/{}/resolve", body: &r.Decision}
	return showing(r.options, decide, describeResolved)(cmd, []string{key})
}

// describeResolved says what retries get from now on.
func describeResolved(x *admin.Execution, _ time.Time) string {
	outcome := "resolved, and " + x.State + " by now" // a retry was faster than this answer
	switch {
	case x.State == admin.StateFree:
		outcome = "not applied; its key is free, and a retry runs"
	case x.Result != nil && x.Result.Replayable:
		outcome = "applied; retries get the given answer until " + x.Result.Expires.UTC().Format(time.RFC3339)
	case x.State == "completed":
		outcome = "applied; retries are told so, and that its answer is gone"
	}
	return short(x.Key, 16) + ": " + outcome + "\n"
}

// confirm shows what a command is about to decide and asks whether to go on.
func confirm(cmd *cobra.Command, shown, question string) error {
	fmt.Fprintf(cmd.ErrOrStderr(), "%s\n%s Type yes: ", shown, question)
	answer, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if strings.TrimSpace(answer) != "yes" {
		return errors.New("nothing was changed")
	}
	return nil
}

// check completes the decision. It reports all missing flags at once.
func (r *resolveFlags) check(cmd *cobra.Command) error {
	var missing []string
	switch {
	case r.applied && r.notApplied:
		return errors.New("give --applied or --not-applied, and not both")
	case r.answer.Body != "" && r.bodyFile != "":
		return errors.New("give --body or --body-file, and not both")
	case !r.applied && !r.notApplied:
		missing = append(missing, "--applied or --not-applied")
	}
	if r.Reason == "" {
		missing = append(missing, "--reason with what you have found out, and where")
	}
	if missing != nil {
		return errors.New("give " + strings.Join(missing, ", and "))
	}
	r.Decision.Decision = admin.DecisionNotApplied
	if r.applied {
		r.Decision.Decision = admin.DecisionApplied
	}
	changed := cmd.Flags().Changed
	if !changed("status") {
		for _, flag := range []string{"header", "body", "body-file"} {
			if changed(flag) {
				return fmt.Errorf("--%s needs the --status of the answer", flag)
			}
		}
		return nil
	}
	if r.notApplied {
		return errors.New("--not-applied takes no answer: a retry runs, and gets its own")
	}
	r.Result = &r.answer
	return r.readAnswer(cmd.InOrStdin())
}

// readAnswer completes the answer that the flags give.
func (r *resolveFlags) readAnswer(stdin io.Reader) error {
	r.answer.Header = map[string][]string{}
	for _, line := range r.header {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return fmt.Errorf("--header %q: write it as 'Name: value'", line)
		}
		name = strings.TrimSpace(name)
		r.answer.Header[name] = append(r.answer.Header[name], strings.TrimSpace(value))
	}
	body := []byte(r.answer.Body)
	if r.bodyFile != "" {
		var err error
		body, err = readAtMost(stdin, r.bodyFile, maxBody)
		if errors.As(err, new(tooLarge)) {
			err = fmt.Errorf("%s has more than 256 KiB, which is the most that is kept of an answer", r.bodyFile)
		}
		if err != nil {
			return err
		}
	}
	if utf8.Valid(body) {
		r.answer.Body = string(body)
	} else {
		r.answer.Body, r.answer.BodyBase64 = "", base64.StdEncoding.EncodeToString(body)
	}
	return nil
}
