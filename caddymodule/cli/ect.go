package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// tokens is the group of commands for people without a token service.
func tokens(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ect",
		Short: "Makes keys and execution context tokens, and shows tokens",
		Long: `Makes keys and execution context tokens, and shows tokens, for people without
a token service. It works on files, and asks no server.`,
		Example: `  # A key for an agent, and its public half among those that the gateway trusts
  caddy agent-guard ect keygen --owner spiffe://example.com/agent/a \
      --out agent.key --public trusted.json

  # A call with a token
  curl https://gateway.example/v1/charges --data-binary @body.json \
      -H "Execution-Context: $(caddy agent-guard ect issue --key agent.key \
          --iss spiffe://example.com/agent/a --aud spiffe://example.com/gateway \
          --action charge --wid new --body body.json)"`,
	}
	group(cmd)
	cmd.AddCommand(keygen(o), public(o), issue(o), showToken(o))
	return cmd
}

// maxToken bounds what is read where a token is expected.
const maxToken = ect.MaxToken + 1<<10

// readToken reads the token that is given as an argument: itself, - for the standard
// input, or @FILE. The name of the header field may stand before it.
func readToken(cmd *cobra.Command, arg string) (string, error) {
	text := arg
	if file, ok := strings.CutPrefix(arg, "@"); ok || arg == "-" {
		if arg == "-" {
			file = arg
			if in, ok := cmd.InOrStdin().(*os.File); ok && term.IsTerminal(int(in.Fd())) {
				return "", errors.New("give a TOKEN, or @FILE, or the token on the standard input")
			}
		}
		b, err := readAtMost(cmd.InOrStdin(), file, maxToken)
		if err != nil {
			return "", err
		}
		text = string(b)
	}
	text = strings.TrimSpace(text)
	if name, value, ok := strings.Cut(text, ":"); ok && strings.EqualFold(name, ect.FieldName) {
		text = strings.TrimSpace(value)
	}
	switch {
	case text == "":
		return "", errors.New("there is no token")
	case strings.ContainsAny(text, ", \t\r\n"):
		return "", errors.New("there is more than one token; give one at a time")
	}
	return text, nil
}

// readAtMost reads a file, or the standard input where its name is -, that has no more
// than limit bytes.
func readAtMost(stdin io.Reader, file string, limit int64) ([]byte, error) {
	from, err := openInput(stdin, file)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	b, err := io.ReadAll(io.LimitReader(from, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", file, limit)
	}
	return b, err
}

// openInput opens a file, or the standard input where its name is -.
func openInput(stdin io.Reader, file string) (io.ReadCloser, error) {
	if file == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(file)
}

// plain is the text of an error without the names of the packages that it comes from,
// which are of no use to whoever has typed a command.
func plain(err error) string {
	text := err.Error()
	for _, name := range []string{"ect: ", "ledger: "} {
		text = strings.ReplaceAll(strings.TrimPrefix(text, name), ": "+name, ": ")
	}
	return text
}

// trusted reads a file of public keys.
func trusted(file string) (ect.Source, error) {
	source, err := ect.NewFileSource(ect.FileOptions{Path: file})
	if err != nil {
		return nil, fmt.Errorf("--jwks: %s", plain(err))
	}
	return source, nil
}
