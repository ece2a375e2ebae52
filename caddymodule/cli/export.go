package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
)

// The kinds of stores in a SPEC.
const (
	kindBadger   = "badger"
	kindPostgres = "postgres"
)

// storeSpec names a store on a command line. A DSN is in the environment: others may read a command line.
type storeSpec struct {
	text           string
	kind           string
	path           string // of badger
	variable, name string // of postgres: where the DSN is, and the schema
}

func parseSpec(flag, text string) (s storeSpec, err error) {
	kind, rest, _ := strings.Cut(text, ":")
	s = storeSpec{text: text, kind: kind}
	switch {
	case kind == kindBadger && rest != "":
		s.path, err = filepath.Abs(rest)
		return s, err
	case kind == kindPostgres && strings.ContainsAny(rest, "/=@ "): // not shown: it may be a password
		return s, fmt.Errorf("%s: name the variable of the environment that has the DSN, like postgres:AGENT_GUARD_DSN; a DSN on a command line can be read by others", flag)
	case kind == kindPostgres && rest != "":
		s.variable, s.name, _ = strings.Cut(rest, ":")
		if os.Getenv(s.variable) == "" {
			return s, fmt.Errorf("%s: the variable %s is not set; put the DSN there", flag, printable(s.variable))
		}
		return s, nil
	}
	return s, fmt.Errorf("%s: write badger:PATH, or postgres:VARIABLE where the DSN is in that variable of the environment, with :SCHEMA behind it unless the schema is %s", flag, postgres.DefaultSchema)
}

// open opens the store for this process alone.
func (s storeSpec) open(ctx context.Context, logger *slog.Logger) (store.Store, error) {
	if s.kind == kindBadger {
		st, err := badger.Open(s.path, badger.Options{Logger: logger})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.text, err)
		}
		return st, nil
	}
	// With a lease no gateway writes beside this process.
	st, err := postgres.Open(ctx, postgres.Options{
		DSN: os.Getenv(s.variable), Schema: s.name, Lease: postgres.DefaultLease, Logger: logger,
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.text, err)
	}
	return st, nil
}

// keptPrefixes are the keys whose values Badger keeps in segments of their own: entries of the ledger
// (docs/storage.md).
var keptPrefixes = []string{"le"}

func storeExport(o *options) *cobra.Command {
	var from, to string
	cmd := &cobra.Command{
		Use:   "export --from SPEC --to FILE",
		Short: "Writes a whole store to a file, for another kind of store or another place",
		Long: `Writes a whole store to a new file: all records with their expiries, the ledger and
the check of the key ring, sealed as they are. The gateway that uses the store must
be stopped, as must any that waits for it: the command refuses a store that a gateway
has open. What a gateway records afterwards is not in the file.

A SPEC is badger:PATH or postgres:VARIABLE, where VARIABLE is the variable of the
environment that has the DSN; :SCHEMA may stand behind it.

The key files are not in a store. A gateway on another store needs those that it had:
that of keys and, with an identity, its key_file with the .head beside it.`,
		Example: `  # From the embedded store to a database
  caddy agent-guard store export --from badger:/var/lib/caddy/agent_guard --to guard.export
  export AGENT_GUARD_DSN='postgres://guard@db.example.com/guard?sslmode=verify-full'
  caddy agent-guard store import --from guard.export --to postgres:AGENT_GUARD_DSN`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			source, err := parseSpec("--from", from)
			if err != nil {
				return err
			}
			if source.kind == kindBadger {
				if _, err := os.Stat(filepath.Join(source.path, "STORE")); err != nil {
					return fmt.Errorf("--from: there is no store in %s", printable(source.path)) // opening would make one
				}
			}
			return o.onStore(cmd, source, func(ctx context.Context, st store.Store) (moveDocument, error) {
				doc := moveDocument{From: source.text, To: to}
				// Nobody else may read the file: keys of entries are not sealed. The import refuses a part of one.
				err := writeNew("--to", to, func(file io.Writer) (err error) {
					doc.Entries, err = execution.Export(ctx, st, file)
					return err
				})
				return doc, err
			})
		},
	}
	stringFlag(cmd, &from, "from", "The store to export: badger:PATH or postgres:VARIABLE[:SCHEMA]", kindBadger+":", kindPostgres+":")
	stringFlag(cmd, &to, "to", "The file to write, which must not exist")
	require(cmd, "from", "to")
	return cmd
}

func storeImport(o *options) *cobra.Command {
	var from, to string
	cmd := &cobra.Command{
		Use:   "import --from FILE --to SPEC",
		Short: "Fills an empty store with an exported one",
		Long: `Fills an empty store with what store export has written, and compares every entry
before a gateway may open it. If the import does not end, no gateway opens the store:
remove it, and import again.

A SPEC is badger:PATH or postgres:VARIABLE, where VARIABLE is the variable of the
environment that has the DSN; :SCHEMA may stand behind it.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			target, err := parseSpec("--to", to)
			if err != nil {
				return err
			}
			file, err := os.Open(from)
			if err != nil {
				return fmt.Errorf("--from: %w", err)
			}
			defer file.Close()
			return o.onStore(cmd, target, func(ctx context.Context, st store.Store) (moveDocument, error) {
				n, err := execution.Import(ctx, st, file, keptPrefixes)
				return moveDocument{from, target.text, n}, err
			})
		},
	}
	stringFlag(cmd, &from, "from", "The file that store export has written")
	stringFlag(cmd, &to, "to", "The empty store: badger:PATH or postgres:VARIABLE[:SCHEMA]", kindBadger+":", kindPostgres+":")
	require(cmd, "from", "to")
	return cmd
}

// moveDocument is what `store export` and `store import` print as JSON.
type moveDocument struct {
	From    string `json:"from"`
	To      string `json:"to"`
	Entries int64  `json:"entries"`
}

// onStore opens a store for this process alone, and says what was done with it.
func (o *options) onStore(cmd *cobra.Command, spec storeSpec, do func(context.Context, store.Store) (moveDocument, error)) (err error) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	logger := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	st, err := spec.open(ctx, logger)
	if err != nil {
		return err
	}
	doc, err := do(ctx, st)
	if err = errors.Join(err, st.Close()); err != nil {
		return err
	}
	return o.print(cmd, doc, func(time.Time) string {
		return fmt.Sprintf("%s has the %d entries of %s.\n", printable(doc.To), doc.Entries, printable(doc.From)) +
			"A gateway on the new store needs the same key files. Start none on the old one any more.\n"
	})
}
