package cli

import (
	"bufio"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/user"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
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

// executionFilters are the flags of `executions list`.
type executionFilters struct {
	paging
	states                                  []string
	guard, action, method, caller, workflow string
	id, checkpoint, undos                   string
	olderThan, newerThan                    string
}

func executionList(o *options) *cobra.Command {
	var l executionFilters
	states, undos := names(execution.States()), []string{"with", "without", "only"}
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
			query, err := l.query()
			if err != nil {
				return err
			}
			out := list{cmd: cmd, name: "executions", json: o.json(), header: executionHeader}
			_, err = listPages(o, &l.paging, query, &out, executionRow)
			return err
		},
	}
	cmd.Flags().Var(&words{&l.states, states}, "state", "Only those in this state: running, completed, in_doubt or rolled_back")
	complete(cmd, "state", states...)
	stringFlag(cmd, &l.guard, "guard", "Only those of the guard with this name")
	stringFlag(cmd, &l.action, "action", "Only those of this action")
	stringFlag(cmd, &l.method, "method", "Only those with this method", "POST", "PUT", "PATCH", "DELETE")
	stringFlag(cmd, &l.caller, "caller", "Only those of the caller with this hash, or with these first digits of it")
	stringFlag(cmd, &l.workflow, "workflow", "Only those of this workflow: its UUID, or its caller's name")
	stringFlag(cmd, &l.id, "id", "Only those with this id from their caller, usually in Idempotency-Key")
	stringFlag(cmd, &l.checkpoint, "checkpoint", "Only the one of this checkpoint, a UUID as in Execution-Checkpoint")
	wordFlag(cmd, &l.undos, "undos", "Requests of rollbacks: with (all, the default), without or only", undos)
	stringFlag(cmd, &l.olderThan, "older-than", "Only those claimed longer ago, like 10m or 2d")
	stringFlag(cmd, &l.newerThan, "newer-than", "Only those claimed since, like 10m or 2d")
	l.flags(cmd)
	return cmd
}

// query returns the query without limit and page.
func (l *executionFilters) query() (url.Values, error) {
	if err := l.valid(); err != nil {
		return nil, err
	}
	for _, flag := range [][2]string{{"--older-than", l.olderThan}, {"--newer-than", l.newerThan}} {
		if flag[1] == "" {
			continue
		}
		if age, err := caddy.ParseDuration(flag[1]); err != nil || age < 0 {
			return nil, fmt.Errorf("%s: %q is no duration; write one like 10m, 4h or 2d", flag[0], flag[1])
		}
	}
	q := filters("guard", l.guard, "action", l.action, "method", l.method, "caller", l.caller, "workflow", l.workflow, "id", l.id,
		"checkpoint", l.checkpoint, "undos", l.undos, "min_age", l.olderThan, "max_age", l.newerThan)
	if l.states != nil {
		q["state"] = l.states
	}
	return q, nil
}

var executionHeader = []string{"KEY", "STATE", "AGE", "GUARD", "ACTION", "METHOD", "STATUS", "CAUSE", "CALLER", "PATH"}

func executionRow(x *admin.Execution, _ time.Time) []string {
	cause := ""
	if x.State == execution.StateInDoubt.String() {
		cause = x.Cause
	}
	return []string{
		short(x.Key, 16), x.State, ago(x.Age), printable(x.Guard), printable(x.Action), printable(x.Method),
		dash(number(x.Status)), dash(cause), short(x.Caller, 8), cut(printable(x.Path), 60),
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
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := show(cmd, o, question{path: keyPath(args[0])}, describeExecution)
			return err
		},
	}
}

func oneKey(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("give a KEY; `executions list` shows them")
	}
	return oneArg("KEY")(cmd, args)
}

func keyPath(key string) string { return "executions/" + url.PathEscape(key) }

// describeExecution shows an execution line by line.
func describeExecution(x *admin.Execution, now time.Time) string {
	s := sheet{width: 12}
	state := x.State
	if x.Detail != "" {
		state += ", " + x.Detail
	}
	s.line("key", x.Key)
	s.line("state", state)
	s.line("cause", x.Cause)
	s.line("status", number(x.Status))
	s.line("call", printable(x.Method)+" "+printable(x.Host)+printable(x.Path))
	if x.ExecutionID != "" {
		s.line("execution id", printable(x.ExecutionID)+" ("+x.Origin+")")
	}
	s.line("guard", printable(x.Guard))
	s.line("action", printable(x.Action))
	s.line("caller", x.Caller)
	s.line("workflow", named(x.Workflow, x.WorkflowName))
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

// named joins a workflow's UUID and the caller's name for it, if both are known.
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

// maxBody bounds the body of an answer, in bytes.
const maxBody = 256 << 10

// resolveFlags are the flags of `executions resolve`.
type resolveFlags struct {
	*options
	applied, notApplied bool
	reason, operator    string
	status              int
	header              []string
	body, bodyFile      string
	yes                 bool
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
	stringFlag(cmd, &r.reason, "reason", "What you have found out, and where")
	stringFlag(cmd, &r.operator, "operator", "Who decides (default: $USER)")
	f.IntVar(&r.status, "status", 0, "Status of the answer that retries get, 200 to 599")
	complete(cmd, "status")
	stringsFlag(cmd, &r.header, "header", "Header field of that answer, 'Name: value'; may stand several times")
	stringFlag(cmd, &r.body, "body", "Body of that answer")
	f.StringVar(&r.bodyFile, "body-file", "", "File with the body of that answer; - is the standard input")
	f.BoolVar(&r.yes, "yes", false, "Do not ask")
	return cmd
}

func (r *resolveFlags) run(cmd *cobra.Command, key string) error {
	d, err := r.decision(cmd)
	if err != nil {
		return err
	}
	if r.notApplied && !r.yes {
		if !term.IsTerminal(int(os.Stdin.Fd())) {
			return errors.New("--not-applied lets a retry run; without a terminal to ask on, confirm it with --yes")
		}
		c, err := r.client()
		if err != nil {
			return err
		}
		var x admin.Execution
		if _, err := c.ask(cmd.Context(), question{path: keyPath(key)}, &x); err != nil {
			return err
		}
		key = x.Key // the decision is about what was shown
		if err := confirm(cmd, describeExecution(&x, time.Now()), "If this call was executed after all, a retry executes it again.\n"+
			"Is it certain that it was not?"); err != nil {
			return err
		}
	}
	_, err = show(cmd, r.options, question{path: keyPath(key) + "/resolve", body: d}, describeResolved)
	return err
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

// check reports all missing flags at once.
func (r *resolveFlags) check() error {
	var missing []string
	switch {
	case r.applied && r.notApplied:
		return errors.New("give --applied or --not-applied, and not both")
	case r.body != "" && r.bodyFile != "":
		return errors.New("give --body or --body-file, and not both")
	case !r.applied && !r.notApplied:
		missing = append(missing, "--applied or --not-applied")
	}
	if r.reason == "" {
		missing = append(missing, "--reason with what you have found out, and where")
	}
	if missing == nil {
		return nil
	}
	return errors.New("give " + strings.Join(missing, ", and "))
}

// decision returns what is sent to the server.
func (r *resolveFlags) decision(cmd *cobra.Command) (*admin.Decision, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	d := &admin.Decision{Decision: admin.DecisionNotApplied, Operator: r.operator, Reason: r.reason}
	if r.applied {
		d.Decision = admin.DecisionApplied
	}
	if d.Operator == "" {
		d.Operator = currentUser()
	}
	if d.Operator == "" {
		return nil, errors.New("who decides? neither --operator nor $USER says")
	}
	changed := cmd.Flags().Changed
	if !changed("status") {
		for _, flag := range []string{"header", "body", "body-file"} {
			if changed(flag) {
				return nil, fmt.Errorf("--%s needs the --status of the answer", flag)
			}
		}
		return d, nil
	}
	if r.notApplied {
		return nil, errors.New("--not-applied takes no answer: a retry runs, and gets its own")
	}
	var err error
	d.Result, err = r.answer(cmd.InOrStdin())
	return d, err
}

// currentUser returns who runs the command, or "" if that is unknown.
func currentUser() string {
	if name := os.Getenv("USER"); name != "" {
		return name
	}
	if who, err := user.Current(); err == nil {
		return who.Username
	}
	return ""
}

// answer returns the answer that the flags give.
func (r *resolveFlags) answer(stdin io.Reader) (*admin.Answer, error) {
	a := &admin.Answer{Status: r.status}
	for _, line := range r.header {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("--header %q: write it as 'Name: value'", line)
		}
		if a.Header == nil {
			a.Header = map[string][]string{}
		}
		name = strings.TrimSpace(name)
		a.Header[name] = append(a.Header[name], strings.TrimSpace(value))
	}
	body := []byte(r.body)
	if r.bodyFile != "" {
		var err error
		body, err = readAtMost(stdin, r.bodyFile, maxBody)
		if errors.As(err, new(tooLarge)) {
			err = fmt.Errorf("%s has more than 256 KiB, which is the most that is kept of an answer", r.bodyFile)
		}
		if err != nil {
			return nil, err
		}
	}
	if utf8.Valid(body) {
		a.Body = string(body)
	} else {
		a.BodyBase64 = base64.StdEncoding.EncodeToString(body)
	}
	return a, nil
}
