package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	ev "github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// entryListing is what `ledger list` was asked for.
type entryListing struct {
	*options
	evidence
	workflow, action, id string
}

func ledgerList(o *options) *cobra.Command {
	l := entryListing{options: o}
	cmd := &cobra.Command{
		Use:   "list FILE --key KEY",
		Short: "Lists the entries of an export, after verifying it",
		Long: `Verifies an export as ` + "`ledger verify`" + ` does, and then lists its entries in their
order. Entries that were pruned have no content and are left out. With --output
json an entry has its token, which ` + "`ect show`" + ` reads.

The file is read twice, so that nothing is printed that does not hold.`,
		Example: `  caddy agent-guard ledger list ledger.export \
      --key agent-guard/node-4c1f+8b3c1a7e+AVq0… --workflow 1f0c9a52-6d3e-4b8a-9c44-0d6a7e5b2f10`,
		Args: oneExport,
		RunE: func(cmd *cobra.Command, args []string) error { return exitOf(cmd, l.run(cmd, args[0])) },
	}
	l.flags(cmd)
	f := cmd.Flags()
	f.StringVar(&l.workflow, "workflow", "", "Only those of this workflow: its UUID, or its caller's name")
	f.StringVar(&l.action, "action", "", "Only those of this action")
	f.StringVar(&l.id, "id", "", "Only those with this id")
	for _, flag := range []string{"workflow", "action", "id"} {
		complete(cmd, flag)
	}
	return cmd
}

// of reports whether a workflow is the one that is asked for. Tokens know it by a UUID, which
// is derived from the caller's name.
func (l *entryListing) of(workflow string) bool {
	return l.workflow == "" || slices.Contains([]string{l.workflow, ev.WorkflowID(l.workflow), ev.NamedWorkflowID(l.workflow)}, workflow)
}

// listedEntry is an entry as JSON.
type listedEntry struct {
	Index    int64     `json:"index"`
	Recorded time.Time `json:"recorded"`
	ID       string    `json:"id"`
	Workflow string    `json:"workflow,omitempty"`
	Action   string    `json:"action"`
	Issuer   string    `json:"issuer"`
	Parents  []string  `json:"parents"`
	Time     time.Time `json:"time"`
	// Unsigned says that no token could be made of it: what stands in Token is what it
	// would have been made of.
	Unsigned bool   `json:"unsigned,omitempty"`
	Token    string `json:"token"`
}

func (l *entryListing) run(cmd *cobra.Command, file string) error {
	if file == "-" {
		return errors.New("list reads twice; give it a file")
	}
	keys, known, err := l.read()
	if err != nil {
		return err
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := beginsLikeExport(bufio.NewReader(f), file); err != nil {
		return err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("%s cannot be read twice; give a file", file)
	}
	if _, err := ledger.VerifyExport(f, l.origin, keys, nil, known...); err != nil {
		return unproved(file, err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("%s cannot be read twice; give a file", file)
	}
	out := entryOutput{cmd: cmd, table: table{out: cmd.OutOrStdout()}}
	if l.json() {
		out.json = &jsonList{out: cmd.OutOrStdout(), name: "entries"}
	}
	_, err = ledger.VerifyExport(f, l.origin, keys, func(e ledger.Entry) error {
		if !l.of(e.Workflow) || l.action != "" && e.Action != l.action || l.id != "" && e.ID != l.id {
			return nil
		}
		return out.entry(&e)
	}, known...)
	if errors.Is(err, ledger.ErrProof) {
		return fmt.Errorf("%s has changed meanwhile: believe nothing of this list", file)
	}
	if err != nil {
		return err
	}
	return out.end()
}

// entryOutput prints entries as they come.
type entryOutput struct {
	cmd   *cobra.Command
	json  *jsonList // nil for a table
	table table
	rows  [][]string
}

var entryHeader = []string{"INDEX", "RECORDED", "ACTION", "ISSUER", "WORKFLOW", "ID"}

// entryPage is how many rows share the widths of columns.
const entryPage = 1000

func (o *entryOutput) entry(e *ledger.Entry) error {
	if o.json != nil {
		text, err := json.Marshal(listedEntry{
			Index: e.Index, Recorded: e.Recorded.UTC(), ID: e.ID, Workflow: e.Workflow, Action: e.Action, Issuer: e.Issuer,
			Parents: append([]string{}, e.Parents...), Time: e.Time.UTC(), Unsigned: e.Unsigned, Token: string(e.Payload),
		})
		if err != nil {
			return err
		}
		return o.json.add(text)
	}
	o.rows = append(o.rows, []string{
		strconv.FormatInt(e.Index, 10), e.Recorded.UTC().Format(time.RFC3339), dash(printable(e.Action)),
		dash(printable(e.Issuer)), dash(printable(e.Workflow)), printable(e.ID),
	})
	if len(o.rows) < entryPage {
		return nil
	}
	return o.flush()
}

func (o *entryOutput) flush() error {
	rows := o.rows
	o.rows = o.rows[:0]
	return o.table.print(entryHeader, rows)
}

func (o *entryOutput) end() error {
	if o.json != nil {
		return o.json.end("")
	}
	if len(o.rows) == 0 && !o.table.begun {
		fmt.Fprintln(o.cmd.ErrOrStderr(), "no entries")
		return nil
	}
	return o.flush()
}
