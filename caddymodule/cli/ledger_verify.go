package cli

import (
	"bufio"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// verification is what `ledger verify` was asked for.
type verification struct {
	*options
	evidence
	jwks string
}

func ledgerVerify(o *options) *cobra.Command {
	v := verification{options: o}
	cmd := &cobra.Command{
		Use:   "verify FILE --key KEY",
		Short: "Verifies an export of the ledger, without a server",
		Long: `Verifies an export of the ledger: that every entry has the content and the
place that it had when the gateway signed the head of the export, and that none
is missing: of what was pruned by age the hash is left, and a note that the
gateway has signed says which entries these are. - reads the standard input.

An export is only ever as good as its head. With --head it is held against
heads that were kept before: the log must have grown out of each of them.

With --jwks, a file of public keys like the one that the gateway publishes at
/.well-known/cascade/jwks, the signatures of the tokens are verified too. Tokens
under other keys, those of agents, are counted and not looked at.

It exits with 1 and the first entry that does not hold, where one does not, and
with 2 where FILE is no export at all.`,
		Example: `  caddy agent-guard ledger verify ledger.export \
      --key agent-guard/node-4c1f+8b3c1a7e+AVq0… --head head-2026-11.txt`,
		Args: oneExport,
		RunE: func(cmd *cobra.Command, args []string) error { return exitOf(cmd, v.run(cmd, args[0])) },
	}
	v.flags(cmd)
	cmd.Flags().StringVar(&v.jwks, "jwks", "", "File with public keys to verify the tokens with")
	return cmd
}

// proved is what an export holds, as JSON.
type proved struct {
	Holds   bool   `json:"holds"`
	Origin  string `json:"origin"`
	Size    int64  `json:"size"`
	Root    string `json:"root"`
	Entries int64  `json:"entries"`
	Pruned  int64  `json:"pruned"`
	// Vouchers are the keys that vouched for what was pruned.
	Vouchers []admin.LedgerVoucher `json:"vouchers,omitempty"`
	// Heads is the number of known heads that it has grown out of.
	Heads int `json:"heads"`
	// Newest is when the last entry came into the log.
	Newest     time.Time   `json:"newest,omitzero"`
	Signatures *signatures `json:"signatures,omitempty"`
}

func (v *verification) run(cmd *cobra.Command, file string) error {
	keys, known, err := v.read()
	if err != nil {
		return err
	}
	var doc proved
	if v.jwks != "" {
		if doc.Signatures, err = newSignatures(v.jwks); err != nil {
			return err
		}
	}
	from, err := openInput(cmd.InOrStdin(), file)
	if err != nil {
		return err
	}
	defer from.Close()
	export := bufio.NewReader(from)
	if err := beginsLikeExport(export, file); err != nil {
		return err
	}
	found, err := ledger.VerifyExport(export, v.origin, keys, func(e ledger.Entry) error {
		doc.Newest = e.Recorded
		if doc.Signatures == nil {
			return nil
		}
		if err := doc.Signatures.take(cmd.Context(), &e); err != nil {
			return fmt.Errorf("%s DOES NOT HOLD: %w", inputName(file), err)
		}
		return nil
	}, known...)
	if err != nil {
		return unproved(file, err)
	}
	doc.Holds, doc.Origin, doc.Size, doc.Root = true, found.Head.Origin, found.Head.Size, found.Head.Root.String()
	doc.Entries, doc.Pruned, doc.Heads = found.Entries, found.Pruned, len(known)
	for _, by := range found.Vouchers {
		doc.Vouchers = append(doc.Vouchers, admin.LedgerVoucher(by))
	}
	if v.json() {
		return encode(cmd.OutOrStdout(), doc)
	}
	_, err = fmt.Fprint(cmd.OutOrStdout(), describeProved(&doc, inputName(file), time.Now()))
	return err
}

func describeProved(doc *proved, file string, now time.Time) string {
	s := sheet{width: 7}
	s.line("log", printable(doc.Origin))
	s.line("size", strconv.FormatInt(doc.Size, 10))
	s.line("root", doc.Root)
	s.line("entries", strconv.FormatInt(doc.Entries, 10))
	s.line("pruned", describePruned(doc.Pruned, doc.Vouchers))
	s.line("newest", moment(doc.Newest, now))
	switch doc.Heads {
	case 0:
		s.line("heads", "none to compare with: --head gives those that were kept")
	default:
		s.line("heads", fmt.Sprintf("it has grown out of all %d that are known", doc.Heads))
	}
	if doc.Signatures != nil {
		s.line("tokens", doc.Signatures.describe())
	}
	return file + " holds.\n\n" + s.b.String()
}
