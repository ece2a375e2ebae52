package cli

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

func ledgerHead(o *options) *cobra.Command {
	var only bool
	cmd := &cobra.Command{
		Use:   "head",
		Short: "Shows the signed head of a server's ledger, its key, and what waits",
		Long: `Shows the signed head of a server's ledger, the public key with which exports
and receipts are verified, and what has no place in the ledger yet.

Keep the head elsewhere from time to time: the log must have grown out of it
ever after, and ` + "`ledger verify --head`" + ` finds out.`,
		Example: `  caddy agent-guard ledger head
  caddy agent-guard ledger head --note > head-2026-11.txt`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			var head admin.LedgerHead
			text, err := c.get(cmd.Context(), "ledger/head", url.Values{}, &head)
			if err != nil {
				return err
			}
			if o.json() {
				return encode(cmd.OutOrStdout(), text)
			}
			shown := describeHead(&head)
			if only {
				shown = head.Note
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), shown)
			return err
		},
	}
	o.server(cmd)
	cmd.Flags().BoolVar(&only, "note", false, "Print the signed head alone, to be kept")
	return cmd
}

func describeHead(head *admin.LedgerHead) string {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	s := sheet{width: 7}
	s.line("log", printable(head.Origin))
	s.line("key", printable(head.Key))
	s.line("size", number(head.Size))
	s.line("root", printable(head.Root))
	waits := "nothing"
	if head.Backlog.Entries > 0 {
		waits = fmt.Sprintf("%d, the oldest for %s", head.Backlog.Entries, ago(head.Backlog.Age))
	}
	s.line("waiting", waits)
	s.line("refused", number(head.Refused))
	s.line("damaged", number(head.Damaged))
	s.line("retries", number(head.Retries))
	return s.b.String()
}

func ledgerExport(o *options) *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Exports a server's ledger, for `ledger verify`",
		Long: `Exports a server's ledger with its newest signed head, which proves it. Whoever
reads the export reads every token in it: who called what, and when. With --out
it goes into a new file that nobody else can read (0600).`,
		Example: `  caddy agent-guard ledger export --out ledger.export`,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return o.export(cmd, out) },
	}
	o.server(cmd)
	cmd.Flags().StringVar(&out, "out", "", "File to write, which must not be there; - is the standard output, also where that is a terminal")
	return cmd
}

// isTerminal is onTerminal. Tests say otherwise.
var isTerminal = onTerminal

// onTerminal reports whether people see what is written.
func onTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func (o *options) export(cmd *cobra.Command, out string) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	c.patient()
	if out == "" && isTerminal(cmd.OutOrStdout()) {
		return errors.New("whoever sees the export can read every token in it: give --out FILE, or --out - for the terminal")
	}
	if out == "" || out == "-" {
		return c.copy(cmd.Context(), "ledger/export", cmd.OutOrStdout())
	}
	f, err := createNew(out)
	if err != nil {
		return err
	}
	err = errors.Join(c.copy(cmd.Context(), "ledger/export", f), f.Sync(), f.Close())
	if err != nil {
		return errors.Join(err, os.Remove(out))
	}
	return nil
}

func ledgerCheck(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Lets a server verify its whole ledger, and shows what is wrong",
		Long: `Lets a server read its whole ledger and hold it against its signed head: every
entry, every stored hash, every index. It names what was changed, is missing or
stands elsewhere, and exits with 1 then. It takes a while; calls go on.

It finds what was done to the store. Whoever has the server has this answer
too: ` + "`ledger verify`" + `, elsewhere and with a head that was kept, does without trust.`,
		Example: `  caddy agent-guard ledger check`,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return o.check(cmd) },
	}
	o.server(cmd)
	return cmd
}

func (o *options) check(cmd *cobra.Command) error {
	c, err := o.client()
	if err != nil {
		return err
	}
	c.patient()
	var report admin.LedgerReport
	text, err := c.get(cmd.Context(), "ledger/verify", url.Values{}, &report)
	if err != nil {
		return err
	}
	if o.json() {
		err = encode(cmd.OutOrStdout(), text)
	} else {
		_, err = fmt.Fprint(cmd.OutOrStdout(), describeCheck(&report))
	}
	if err == nil && report.Count > 0 {
		err = fmt.Errorf("the ledger is not as it was written: %d faults", report.Count)
	}
	return err
}

// describePruned says how many entries were pruned, and who vouched for it.
func describePruned(n int64, vouchers []admin.LedgerVoucher) string {
	said := strconv.FormatInt(n, 10)
	for i, v := range vouchers {
		said += [2]string{", vouched for by ", ", "}[min(i, 1)] + printable(v.Key)
		if len(vouchers) > 1 {
			said += fmt.Sprintf(" (%d)", v.Entries)
		}
	}
	return said
}

func describeCheck(r *admin.LedgerReport) string {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	s := sheet{width: 7}
	s.line("log", printable(r.Origin))
	s.line("size", number(r.Size))
	s.line("root", printable(r.Root))
	s.line("entries", number(r.Entries))
	s.line("pruned", describePruned(r.Pruned, r.Vouchers))
	s.line("waiting", number(r.Waiting))
	if r.Count == 0 {
		s.line("faults", "none")
	}
	for _, fault := range r.Faults {
		what := printable(fault.What)
		if fault.Index != nil {
			what = "entry " + number(*fault.Index) + ": " + what
		}
		s.line("fault", what)
	}
	if more := r.Count - len(r.Faults); more > 0 {
		s.line("fault", fmt.Sprintf("and %d more", more))
	}
	return s.b.String()
}
