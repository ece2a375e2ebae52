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

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

// resolution is what `executions resolve` was told.
type resolution struct {
	*options
	applied, notApplied bool
	reason, operator    string
	status              int
	header              []string
	body, bodyFile      string
	yes                 bool
}

func resolve(o *options) *cobra.Command {
	r := resolution{options: o}
	cmd := &cobra.Command{
		Use:   "resolve KEY --applied|--not-applied --reason TEXT",
		Short: "Settles an execution that is in doubt",
		Long: `Settles an execution that is in doubt, with what you have found out at the
upstream. The decision, who made it and why are recorded and logged.

--applied: the call was executed. Retries never run it again. With --status
they get the answer that you give, as it was the call's own; without, they
are told that it was executed and that its answer is gone.

--not-applied: the call was not executed, and cannot be any more. Its key is
free, so that a retry RUNS. On a terminal you are asked first; elsewhere,
give --yes.

` + keyHelp,
		Example: `  # The payment is there: retries get what it would have answered
  caddy agent-guard executions resolve 9f3c51a07b2e44d1 --applied \
      --reason 'charge ch_81 is in the dashboard' \
      --status 201 --header 'Content-Type: application/json' --body '{"id":"ch_81"}'

  # There is none, and there will be none: let a retry run
  caddy agent-guard executions resolve 9f3c51a07b2e44d1 --not-applied \
      --reason 'no charge with this key, the provider confirms' --yes`,
		Args:              oneKey,
		ValidArgsFunction: completeKey(o, "in_doubt"),
		RunE:              func(cmd *cobra.Command, args []string) error { return r.run(cmd, args[0]) },
	}
	f := cmd.Flags()
	f.BoolVar(&r.applied, "applied", false, "The call was executed")
	f.BoolVar(&r.notApplied, "not-applied", false, "The call was not executed, and cannot be any more")
	f.StringVar(&r.reason, "reason", "", "What you have found out, and where")
	f.StringVar(&r.operator, "operator", "", "Who decides (default: $USER)")
	f.IntVar(&r.status, "status", 0, "Status of the answer that retries get, 200 to 599")
	f.StringArrayVar(&r.header, "header", nil, "Header field of that answer, 'Name: value'; may stand several times")
	f.StringVar(&r.body, "body", "", "Body of that answer")
	f.StringVar(&r.bodyFile, "body-file", "", "File with the body of that answer; - is the standard input")
	f.BoolVar(&r.yes, "yes", false, "Do not ask")
	for _, flag := range []string{"reason", "operator", "status", "header", "body"} {
		complete(cmd, flag)
	}
	return cmd
}

func (r *resolution) run(cmd *cobra.Command, key string) error {
	d, err := r.decision(cmd)
	if err != nil {
		return err
	}
	terminal := term.IsTerminal(int(os.Stdin.Fd()))
	if r.notApplied && !r.yes && !terminal {
		return errors.New("--not-applied lets a retry run; without a terminal to ask on, confirm it with --yes")
	}
	c, err := r.client()
	if err != nil {
		return err
	}
	var x admin.Execution
	if r.notApplied && !r.yes {
		if _, err := c.get(cmd.Context(), keyPath(key), url.Values{}, &x); err != nil {
			return err
		}
		key = x.Key // what was shown is what is decided about
		if err := confirm(cmd.InOrStdin(), cmd.ErrOrStderr(), &x); err != nil {
			return err
		}
	}
	x = admin.Execution{}
	text, err := c.post(cmd.Context(), keyPath(key)+"/resolve", d, &x)
	if err != nil {
		return err
	}
	if r.json() {
		return encode(cmd.OutOrStdout(), text)
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), short(x.Key, 16)+": "+outcome(&x))
	return err
}

// outcome says what happens from now on.
func outcome(x *admin.Execution) string {
	switch {
	case x.State == admin.StateFree:
		return "not applied; its key is free, and a retry runs"
	case x.Result != nil && x.Result.Replayable:
		return "applied; retries get the given answer until " + x.Result.Expires.UTC().Format(time.RFC3339)
	case x.State == "completed":
		return "applied; retries are told so, and that its answer is gone"
	default: // a retry was faster than this answer
		return "resolved, and " + x.State + " by now"
	}
}

// confirm shows the execution and asks whether to go on.
func confirm(in io.Reader, out io.Writer, x *admin.Execution) error {
	fmt.Fprint(out, describe(x, time.Now()))
	fmt.Fprint(out, "\nIf this call was executed after all, a retry executes it again.\nIs it certain that it was not? Type yes: ")
	answer, err := bufio.NewReader(in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if strings.TrimSpace(answer) != "yes" {
		return errors.New("nothing was changed")
	}
	return nil
}

// complete says all that is missing at once.
func (r *resolution) complete() error {
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

// decision is what is sent to the server.
func (r *resolution) decision(cmd *cobra.Command) (*admin.Decision, error) {
	if err := r.complete(); err != nil {
		return nil, err
	}
	d := &admin.Decision{Decision: admin.DecisionNotApplied, Operator: r.operator, Reason: r.reason}
	if r.applied {
		d.Decision = admin.DecisionApplied
	}
	if d.Operator == "" {
		d.Operator = me()
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

func me() string {
	if name := os.Getenv("USER"); name != "" {
		return name
	}
	if who, err := user.Current(); err == nil {
		return who.Username
	}
	return ""
}

// answer is the answer that the flags give.
func (r *resolution) answer(stdin io.Reader) (*admin.Answer, error) {
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
		if body, err = readBody(r.bodyFile, stdin); err != nil {
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

// maxBody is the most that an answer's body has.
const maxBody = 256 << 10

func readBody(file string, stdin io.Reader) ([]byte, error) {
	from := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		from = f
	}
	body, err := io.ReadAll(io.LimitReader(from, maxBody+1))
	if err == nil && len(body) > maxBody {
		err = fmt.Errorf("%s has more than 256 KiB, which is the most that is kept of an answer", file)
	}
	return body, err
}
