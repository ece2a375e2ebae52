package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
)

func init() {
	caddy.RegisterModule(PostgresStore{})
}

// PostgresStore keeps executions in a schema of a PostgreSQL database, which several gateways may
// use at the same time, each under a name of its own. The keys must be given, with `keys file` or
// `keys value`, and with an `identity` its `key_file`. If the database cannot be reached, guarded
// calls get 503 `store-unavailable`, also from the start on, and are taken again as soon as it can.
type PostgresStore struct {
	// Where the database is and who logs in, as PostgreSQL's own clients take it:
	// `postgres://user:password@host:5432/database?sslmode=verify-full`. Usually a placeholder like
	// `{env.AGENT_GUARD_DSN}`. Placeholders are replaced once, at load; one without a value is an
	// error. No error and no log shows it. Behind a pooler in transaction mode it needs
	// `default_query_exec_mode=cache_describe`. With `pool_max_conns` it names the largest number of
	// connections for reading (2 to 1000, 10 without it; commits and the lease have one each besides), and
	// with `statement_timeout` how long the database may work on one statement (100ms to 7s, 5s without it): a
	// call is refused at most two seconds later.
	DSN string `json:"dsn,omitempty"`

	// The gateway's name among those that use the schema: 1 to 64 letters, digits, dots, underscores and
	// dashes. Its log in the ledger is named after it, so it stays the same over restarts. A second
	// gateway with the same name waits until the first is gone. Placeholders are replaced once, at load;
	// one without a value is an error. A change takes effect when the process is started again. Default:
	// the name of the host.
	Node string `json:"node,omitempty"`

	// The schema of the database that holds the store's tables, a plain name in lower case. It is
	// created, and holds nothing else. Default: `agent_guard`.
	Schema string `json:"schema,omitempty"`

	// How long a gateway that does not respond still counts as one that runs its calls, by the
	// database's clock: at least 2s and twice `statement_timeout`, at most 1h. Then the others remove
	// it, and its calls are in doubt. One that ends leaves at once, and one whose process is gone is
	// removed within two seconds. Default: 15s.
	Lease caddy.Duration `json:"lease,omitempty"`

	observer postgres.Observer
	logger   *zap.Logger
	dsn      string // with its placeholders replaced
	node     string // the gateway's name
}

// CaddyModule returns the Caddy module information.
func (PostgresStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "agent_guard.stores.postgres", New: func() caddy.Module { return new(PostgresStore) }}
}

// UnmarshalJSON implements json.Unmarshaler. Errors have the path of the member.
func (p *PostgresStore) UnmarshalJSON(text []byte) error {
	type plain PostgresStore
	return option.DecodeJSON(text, (*plain)(p))
}

// UnmarshalCaddyfile reads
//
//	postgres {
//		dsn    <dsn>
//		node   <name>
//		schema <name>
//		lease  <duration>
//	}
func (p *PostgresStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the store's name
	at := originOf(d)
	if d.NextArg() { // it is not shown: it may be a password
		return errors.New("store postgres takes no argument, but a block with dsn in it")
	}
	return postgresOptions().Read(d, "store postgres", p, at)
}

func postgresOptions() option.Set[*PostgresStore] {
	return option.Set[*PostgresStore]{
		"dsn": {Usage: "<dsn>", Parse: func(d *caddyfile.Dispenser, p *PostgresStore) error {
			words := d.RemainingArgs()
			if len(words) > 1 { // they are not shown
				return errors.New("it has spaces; put it in quotes, or in a variable like {env.AGENT_GUARD_DSN}")
			}
			if len(words) == 0 {
				return option.ErrSyntax
			}
			p.DSN = words[0]
			return nil
		}},
		"node":   word("<name>", func(p *PostgresStore) *string { return &p.Node }),
		"schema": word("<name>", func(p *PostgresStore) *string { return &p.Schema }),
		"lease":  duration(func(p *PostgresStore) *caddy.Duration { return &p.Lease }),
	}
}

// Provision replaces the placeholders.
func (p *PostgresStore) Provision(ctx caddy.Context) (err error) {
	p.logger = ctx.Logger()
	repl := caddy.NewReplacer()
	if p.dsn, err = repl.ReplaceOrErr(p.DSN, true, true); err != nil {
		return errors.New("postgres: dsn: a placeholder in it has no value (it is not shown here)") // the replacer's error may show a part of a password
	}
	if p.Node == "" {
		if p.node, err = os.Hostname(); err != nil {
			return fmt.Errorf("postgres: node: the host has no name that can be read (%w); name the gateway with `node <name>`", err)
		}
		return nil
	}
	if p.node, err = repl.ReplaceOrErr(p.Node, true, true); err != nil {
		return fmt.Errorf("postgres: node: %w", err)
	}
	return nil
}

func (p *PostgresStore) options() postgres.Options {
	return postgres.Options{DSN: p.dsn, Node: p.node, Schema: p.Schema, Lease: time.Duration(p.Lease), Observer: p.observer}
}

// StorePath names the store by its schema and a hash of the place of its database. It does not
// connect.
func (p *PostgresStore) StorePath() (string, error) {
	name, err := postgres.Check(p.options())
	if err != nil {
		if p.Node == "" && strings.HasPrefix(err.Error(), "node: ") {
			err = fmt.Errorf("%w; it is the name of the host, so give another with `node <name>`", err)
		}
		return "", fmt.Errorf("postgres: %w", err)
	}
	return name, nil
}

// openTime bounds an attempt to open a store.
const openTime = 8 * time.Second

// OpenStore connects to the database, and becomes one of the gateways that use the schema.
func (p *PostgresStore) OpenStore(logger *zap.Logger) (store.Store, error) {
	o := p.options()
	o.Logger = slogOf(logger.Named("postgres"))
	ctx, cancel := context.WithTimeout(context.Background(), openTime)
	defer cancel()
	st, err := postgres.Join(ctx, o)
	if err != nil {
		return nil, err
	}
	return st, nil
}

// AdjustStore uses the DSN of this configuration for new connections: its password may be another.
func (p *PostgresStore) AdjustStore(st store.Store) {
	open, ok := st.(postgres.Member)
	if !ok {
		return
	}
	_ = open.SetDSN(p.dsn) // it is the same database, or the store would have another path
	if has := open.Self().Node; has != p.node {
		p.logger.Warn("the gateway keeps its name in the store until the process is started again", zap.String("node", has), zap.String("configured", p.node))
	}
}

// ObserveStore implements ObservedOpener.
func (p *PostgresStore) ObserveStore(o StoreObserver) { p.observer = o }

// ReportStore implements StoreReporter. The database's disk is not known here.
func (p *PostgresStore) ReportStore(st store.Store) *admin.Report {
	s, ok := st.(postgres.Member)
	if !ok {
		return nil
	}
	stats := s.Stats()
	server, pool := &stats.Server, &stats.Pool
	d := &admin.Database{
		LeaseLeft:   time.Until(stats.LeaseEnds).Seconds(),
		Removed:     stats.Removed,
		Connections: map[string]int{"in_use": pool.InUse, "idle": pool.Open - pool.InUse, "max": pool.Most},
		Waits:       pool.Waits, Waited: pool.Waited.Seconds(),
		Known: !server.Asked.IsZero(), Living: server.Living, Dead: server.Dead, Vacuumed: server.Vacuumed.UTC(),
		OldestTransaction: server.OldestTransaction.Seconds(), Standbys: server.Standbys,
	}
	if server.Lag >= 0 {
		lag := server.Lag.Seconds()
		d.Lag = &lag
	}
	report := &admin.Report{Database: d}
	if d.Known {
		report.Size = map[string]uint64{
			"rows": uint64(server.Rows), "large": uint64(server.Large), "indexes": uint64(server.Indexes), "others": uint64(server.Others),
		}
	}
	return report
}

var (
	_ StoreOpener           = (*PostgresStore)(nil)
	_ StoreAdjuster         = (*PostgresStore)(nil)
	_ ObservedOpener        = (*PostgresStore)(nil)
	_ StoreReporter         = (*PostgresStore)(nil)
	_ caddy.Provisioner     = (*PostgresStore)(nil)
	_ caddyfile.Unmarshaler = (*PostgresStore)(nil)
)
