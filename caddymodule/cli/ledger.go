package cli

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"golang.org/x/mod/sumdb/note"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

func ledgerGroup(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ledger",
		Short: "Shows, exports and verifies the ledger",
		Long: `Shows, exports and verifies the ledger: the log of what the gateway has decided.

verify and list work on an export, without a server and on any machine. They
need the log's public key, which ` + "`ledger head`" + ` shows. Note it when the
gateway is set up, and keep heads from time to time elsewhere: who can
change the log can change what the server says too, but not what you have kept.`,
	}
	group(cmd)
	cmd.AddCommand(ledgerHead(o), ledgerExport(o), ledgerCheck(o), ledgerVerify(o), ledgerList(o))
	return cmd
}

// evidence is what an export is held against.
type evidence struct {
	origin string
	keys   []string
	heads  []string // files
}

func (e *evidence) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&e.origin, "origin", "", "Name of the log, where it is not that of its key")
	f.StringArrayVar(&e.keys, "key", nil, "Public key of its heads, as 'ledger head' shows it; may stand several times")
	f.StringArrayVar(&e.heads, "head", nil, "File with a head that was kept before, as 'ledger head --note' prints it; may stand several times")
	require(cmd, "key")
	complete(cmd, "origin")
	complete(cmd, "key")
}

// read reads the keys, and the heads that were kept.
func (e *evidence) read() (note.Verifiers, []ledger.Head, error) {
	var keys []note.Verifier
	for _, text := range e.keys {
		key, err := note.NewVerifier(text)
		if err != nil {
			return nil, nil, fmt.Errorf("--key: %q is no public key of a ledger; `ledger head` shows it, and it looks like agent-guard/node-4c1f+8b3c1a7e+AVq0…", text)
		}
		keys = append(keys, key)
	}
	if e.origin == "" {
		e.origin = keys[0].Name() // the gateway's keys are called like their log
	}
	verifiers := note.VerifierList(keys...)
	var heads []ledger.Head
	for _, file := range e.heads {
		text, err := readAtMost(nil, file, ledger.MaxHead)
		if err != nil {
			return nil, nil, fmt.Errorf("--head: %w", err)
		}
		head, err := ledger.ParseHead(text, e.origin, verifiers)
		if err != nil {
			return nil, nil, fmt.Errorf("--head: %s: %s", file, plain(err))
		}
		heads = append(heads, head)
	}
	return verifiers, heads, nil
}

// exportTitle begins the first line of every export.
const exportTitle = "agent-guard ledger export"

// errNoExport is the error of a file that never was an export. It has an exit code of its
// own: a wrong file is no alarm.
type errNoExport struct{ file string }

func (e errNoExport) Error() string { return e.file + " is no export of a ledger" }

// beginsLikeExport looks whether a file is an export at all. One that was cut short or whose
// first line was changed is: what was done to it is to be found out.
func beginsLikeExport(from *bufio.Reader, file string) error {
	head, err := from.Peek(256)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	first, rest, _ := bytes.Cut(head, []byte("\n"))
	switch {
	case bytes.HasPrefix(first, []byte(exportTitle)), strings.HasPrefix(exportTitle, string(first)):
		return nil // an empty file is one of which nothing is left
	case bytes.HasPrefix(rest, []byte("head ")):
		return nil
	}
	return errNoExport{inputName(file)}
}

// exitNoExport is the exit code for a file that is no export.
const exitNoExport = 2

// exitOf gives an error its exit code.
func exitOf(cmd *cobra.Command, err error) error {
	if !errors.As(err, new(errNoExport)) {
		return err
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "Error:", err) // a code of its own silences cobra
	return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return exitNoExport, err })(cmd, nil)
}

// unproved is the error of an export that does not hold, or cannot be read.
func unproved(file string, err error) error {
	if errors.Is(err, ledger.ErrProof) {
		return fmt.Errorf("%s DOES NOT HOLD: %s", inputName(file), plain(err))
	}
	return err
}

func inputName(file string) string {
	if file == "-" {
		return "the export"
	}
	return file
}

func oneExport(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("give one FILE with an export; there are %d", len(args))
	}
	return nil
}

// createNew creates a file that nobody else can read, and none that is there.
func createNew(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("--out: %s is there; name another file", name)
	}
	if err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}
	return f, nil
}
