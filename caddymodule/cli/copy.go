package cli

import (
	"context"
	"encoding/hex"
	"encoding/json"
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

// same reports whether both name one store.
func (s storeSpec) same(other storeSpec) bool {
	if s.kind != other.kind {
		return false
	}
	if s.kind == kindBadger {
		a, errA := os.Stat(s.path)
		b, errB := os.Stat(other.path)
		return s.path == other.path || errA == nil && errB == nil && os.SameFile(a, b)
	}
	a, errA := postgres.Check(postgres.Options{DSN: os.Getenv(s.variable), Schema: s.name})
	b, errB := postgres.Check(postgres.Options{DSN: os.Getenv(other.variable), Schema: other.name})
	return errA == nil && errB == nil && a == b
}

// keptPrefixes are the keys whose values Badger keeps in segments of their own: entries of the ledger
// (docs/storage.md).
var keptPrefixes = []string{"le"}

func storeCopy(o *options) *cobra.Command {
	var from, to string
	cmd := &cobra.Command{
		Use:   "copy --from SPEC --to SPEC",
		Short: "Copies a store, from Badger to PostgreSQL or back",
		Long: `Copies a whole store, from Badger to PostgreSQL, back, or to another place: all
records with their expiries, the ledger and the check of the key ring. The gateway
that used it must be stopped, as must any that waits for it: the command refuses a
store that a gateway has open.

A SPEC is badger:PATH or postgres:VARIABLE, where VARIABLE is the variable of the
environment that has the DSN; :SCHEMA may stand behind it.

The target must be empty, or be left of a copy that was interrupted: the same
command then goes on. Until all entries were written and compared, no gateway
opens the target. The source is not changed.

The key files are not in a store. A gateway on the target needs those that it had:
that of keys and, with an identity, its key_file with the .head beside it.`,
		Example: `  # From the embedded store to a database
  export AGENT_GUARD_DSN='postgres://guard@db.example.com/guard?sslmode=verify-full'
  caddy agent-guard store copy --from badger:/var/lib/caddy/agent_guard --to postgres:AGENT_GUARD_DSN

  # And back
  caddy agent-guard store copy --from postgres:AGENT_GUARD_DSN --to badger:/var/lib/caddy/agent_guard_2`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			source, err := parseSpec("--from", from)
			if err != nil {
				return err
			}
			target, err := parseSpec("--to", to)
			if err != nil {
				return err
			}
			return o.copyStore(cmd, source, target)
		},
	}
	stringFlag(cmd, &from, "from", "The store to copy: badger:PATH or postgres:VARIABLE[:SCHEMA]", kindBadger+":", kindPostgres+":")
	stringFlag(cmd, &to, "to", "Where to copy it: badger:PATH or postgres:VARIABLE[:SCHEMA]", kindBadger+":", kindPostgres+":")
	require(cmd, "from", "to")
	return cmd
}

// copyDocument is what `store copy` prints as JSON.
type copyDocument struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Entries and Bytes are those of both stores, Written what this run has written.
	Entries int64 `json:"entries"`
	Bytes   int64 `json:"bytes"`
	Written int64 `json:"written"`
	// SHA256 is of all keys, values and expiries.
	SHA256 string `json:"sha256"`
}

func (o *options) copyStore(cmd *cobra.Command, source, target storeSpec) (err error) {
	if source.same(target) {
		return errors.New("--to: it is the store of --from")
	}
	if source.kind == kindBadger {
		if _, err := os.Stat(filepath.Join(source.path, "STORE")); err != nil {
			return fmt.Errorf("--from: there is no store in %s", printable(source.path)) // opening would make one
		}
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	diagnostics := cmd.ErrOrStderr()
	logger := slog.New(slog.NewTextHandler(diagnostics, &slog.HandlerOptions{Level: slog.LevelWarn}))
	from, err := source.open(ctx, logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	to, err := target.open(ctx, logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	m := &meter{out: diagnostics, moving: isTerminal(diagnostics)}
	done, err := execution.Copy(ctx, from, to, execution.CopyOptions{Kept: keptPrefixes, Count: m.moving, Progress: m.show})
	if m.moving {
		fmt.Fprint(diagnostics, "\r\x1b[K")
	}
	switch {
	case ctx.Err() != nil:
		return errors.New("the copy was interrupted; the same command goes on with it")
	case errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) || errors.Is(err, store.ErrFull) || errors.Is(err, store.ErrUnhealthy):
		return fmt.Errorf("%w\nThe same command goes on with the copy", err)
	case err != nil:
		return err
	}
	doc := copyDocument{source.text, target.text, done.Entries, done.Bytes, done.Written, hex.EncodeToString(done.Digest[:])}
	if o.json() {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(doc)
	}
	_, err = io.WriteString(cmd.OutOrStdout(), describeCopy(doc, source))
	return err
}

func describeCopy(doc copyDocument, source storeSpec) string {
	text := fmt.Sprintf("%s has the %d entries of %s (%s), with the same keys, values and expiries.\nThis run wrote %d. SHA-256 %s\n\n"+
		"Start gateways on the copy alone: what the source records from now on is not in it. They need\nthe same key files",
		printable(doc.To), doc.Entries, printable(doc.From), size(uint64(doc.Bytes)), doc.Written, doc.SHA256)
	var beside []string
	for _, suffix := range []string{".key", ".identity", ".identity.head"} {
		if _, err := os.Stat(source.path + suffix); source.kind == kindBadger && err == nil {
			beside = append(beside, printable(source.path+suffix))
		}
	}
	if beside != nil {
		return text + "; beside the source are " + strings.Join(beside, ", ") + ".\n"
	}
	return text + ".\n"
}

// meter shows how far a copy has come: in one line that changes on a terminal, else by a line now and then.
type meter struct {
	out    io.Writer
	moving bool
	last   time.Time
	step   execution.CopyStep
}

const (
	meterWidth = 30
	moveEvery  = 100 * time.Millisecond
	lineEvery  = 10 * time.Second
)

func (m *meter) show(p execution.CopyProgress) {
	every := lineEvery
	if m.moving {
		every = moveEvery
	}
	if p.Step == m.step && time.Since(m.last) < every {
		return
	}
	m.step, m.last = p.Step, time.Now()
	if !m.moving {
		fmt.Fprintf(m.out, "%s: %d entries, %s\n", p.Step, p.Entries, size(uint64(p.Bytes)))
		return
	}
	full := 0
	if p.Of > 0 {
		full = int(meterWidth * p.Entries / p.Of)
	}
	of := ""
	if p.Of > 0 {
		of = fmt.Sprintf(" of %d", p.Of)
	}
	fmt.Fprintf(m.out, "\r%-9s [%s%s] %d%s entries, %s\x1b[K", p.Step, strings.Repeat("#", full), strings.Repeat(" ", meterWidth-full), p.Entries, of, size(uint64(p.Bytes)))
}
