// Package postgres is the store on a PostgreSQL server, for gateways whose records must survive
// their machine, and for several gateways at once.
//
// Concurrent commits go to the server as one transaction in one round trip, each with its own
// verdict. The server's clock judges expiries. If the connection is lost during a commit, its
// verdict is read by a number that was written in the same transaction, before anything else is
// written. A gateway is a member, with a lease; the transaction of every commit checks that it was not
// removed.
package postgres

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Options are the settings of a store. Only DSN has to be given.
type Options struct {
	// DSN names the server, the database and the role, as libpq takes it: a URL, or keywords and
	// values. No error and no log has it or a part of it.
	DSN string
	// Schema holds the store's tables; it is created. Default: DefaultSchema.
	Schema string
	// Node is the gateway's name among those that share the store; see Join. It has 1 to 64 letters, digits,
	// dots, underscores and dashes, a letter or digit first.
	Node string
	// PoolSize is the largest number of connections for reading. Commits and the lease have one
	// each besides. Default: pool_max_conns of the DSN, or defaultPoolSize.
	PoolSize int
	// StatementTimeout is how long the server may work on one statement, between 100 ms and
	// maxStatementTimeout. Every method fails at most two seconds later. Default: statement_timeout
	// of the DSN, or defaultStatementTimeout.
	StatementTimeout time.Duration
	// Lease is how long a gateway that does not respond stays a member, and with Open keeps the store to
	// itself. For Open zero is no lease: several stores may then write, and a Watch sees only the writes
	// of its own. Default of Join: DefaultLease, or twice StatementTimeout if that is longer.
	Lease time.Duration
	// Now is the clock for expiries, for tests; nil is the server's clock.
	Now func() time.Time
	// Logger receives messages for operators, without keys or values (P8); nil logs nothing.
	Logger *slog.Logger
	// Observer is called for every group of commits; nil is none.
	Observer Observer
}

// Observer receives measurements for metrics. It must not block.
type Observer interface {
	// Committed says that batches became durable together, and how long that took.
	Committed(batches int, took time.Duration)
}

// What the zero Options mean, and how far the others go.
const (
	DefaultSchema           = "agent_guard"
	defaultPoolSize         = 10
	defaultStatementTimeout = 5 * time.Second
	maxStatementTimeout     = 7 * time.Second
	// DefaultLease is for gateways; stores without the option have no lease.
	DefaultLease = 15 * time.Second
)

const (
	connectTime = 3 * time.Second        // for a new connection, unless the DSN has a shorter connect_timeout
	margin      = time.Second            // between the server's time limit and ours, and between ours and the caller's
	idleTime    = time.Minute            // after which the server ends a scan whose reader has stopped
	clockTime   = time.Second            // how long the server's time is counted on from here, and twice that while somebody asks
	attempts    = 3                      // to read, if connections are lost
	never       = int64(math.MaxInt64)   // an expiry, in the tables
	retryEvery  = 100 * time.Millisecond // between two attempts to connect
)

func (o Options) withDefaults() Options {
	if o.Schema == "" {
		o.Schema = DefaultSchema
	}
	named := map[string]string{}
	if c, err := pgx.ParseConfig(o.DSN); err == nil { // else Check refuses it
		named = c.RuntimeParams
	}
	if o.PoolSize == 0 {
		o.PoolSize = defaultPoolSize
		if text := named["pool_max_conns"]; text != "" {
			o.PoolSize, _ = strconv.Atoi(text) // Check refuses 0
		}
	}
	if o.StatementTimeout == 0 {
		o.StatementTimeout = defaultStatementTimeout
		if text := named["statement_timeout"]; text != "" {
			o.StatementTimeout = statementTime(text)
		}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// statementTime reads a time as PostgreSQL does: milliseconds, or a number with a unit. Check refuses the 0 of others.
func statementTime(text string) time.Duration {
	if ms, err := strconv.Atoi(text); err == nil {
		return time.Duration(ms) * time.Millisecond
	}
	d, _ := time.ParseDuration(text)
	return d
}

var (
	schemaForm = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)
	nodeForm   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
)

// Check returns what is wrong with the options, or a name for the store that they lead to: the
// same for the same host, port, database and schema, and without any of them but the schema. It
// does not connect.
func Check(o Options) (name string, err error) {
	o = o.withDefaults()
	switch {
	case !schemaForm.MatchString(o.Schema) || strings.HasPrefix(o.Schema, "pg_"):
		return "", fmt.Errorf("schema: %q is no plain name; use lower-case letters, digits and underscores, and no pg_ in front", o.Schema)
	case o.Node != "" && !nodeForm.MatchString(o.Node):
		return "", fmt.Errorf("node: %.80q is no name of a gateway; use 1 to 64 letters, digits, dots, underscores and dashes, a letter or digit first", o.Node)
	case o.PoolSize < 2 || o.PoolSize > 1000:
		return "", fmt.Errorf("pool_max_conns: %d connections; it must be between 2 and 1000", o.PoolSize)
	case o.StatementTimeout < 100*time.Millisecond || o.StatementTimeout > maxStatementTimeout:
		return "", fmt.Errorf("statement_timeout: %v; it must be between 100ms and %v, so that a call is refused within 10s", o.StatementTimeout, maxStatementTimeout)
	case o.Lease != 0 && (o.Lease < 2*o.StatementTimeout || o.Lease < 2*time.Second || o.Lease > time.Hour):
		return "", fmt.Errorf("lease: %v; it must be at least twice statement_timeout and 2s, and at most 1h", o.Lease)
	}
	c, err := o.parse()
	if err != nil {
		return "", err
	}
	hosts := []string{c.ConnConfig.Host + ":" + strconv.Itoa(int(c.ConnConfig.Port))}
	for _, f := range c.ConnConfig.Fallbacks {
		if host := f.Host + ":" + strconv.Itoa(int(f.Port)); !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	sum := sha256.Sum256([]byte(strings.Join(append(hosts, c.ConnConfig.Database), "\x00")))
	return "postgres:" + o.Schema + "@" + hex.EncodeToString(sum[:4]), nil
}

// parse reads the DSN. Its error has nothing of it: pgx's own would show all but the password.
func (o Options) parse() (*pgxpool.Config, error) {
	if o.DSN == "" {
		return nil, errors.New("dsn: it is missing; give a placeholder whose value is like postgres://user:password@host:5432/database")
	}
	c, err := pgxpool.ParseConfig(o.DSN)
	if err != nil {
		return nil, errors.New("dsn: it cannot be read (it is not shown here); write it like postgres://user:password@host:5432/database?sslmode=verify-full")
	}
	if c.ConnConfig.Database == "" {
		return nil, errors.New("dsn: it names no database")
	}
	c.MaxConns, c.MinConns, c.MinIdleConns = int32(o.PoolSize), 0, 0
	if c.ConnConfig.ConnectTimeout == 0 || c.ConnConfig.ConnectTimeout > connectTime {
		c.ConnConfig.ConnectTimeout = connectTime
	}
	if c.ConnConfig.ValidateConnect == nil { // a replica may be behind: it would call a taken key free
		c.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	}
	for name, value := range map[string]string{
		"statement_timeout":                   strconv.FormatInt(o.StatementTimeout.Milliseconds(), 10),
		"idle_in_transaction_session_timeout": strconv.FormatInt(stillTime.Milliseconds(), 10), // but of scans
		"default_transaction_isolation":       "read committed",
		"default_transaction_read_only":       "off",
		// Plans must not depend on how full the tables were when they were last analysed, and each
		// statement has an index.
		"plan_cache_mode": "force_generic_plan",
		"enable_seqscan":  "off",
		"jit":             "off",
	} {
		c.ConnConfig.RuntimeParams[name] = value
	}
	if c.ConnConfig.RuntimeParams["application_name"] == "" {
		c.ConnConfig.RuntimeParams["application_name"] = "agent_guard"
	}
	return c, nil
}

// Store is a store in a schema of a PostgreSQL database. Make one with Open.
type Store struct {
	options   Options
	sql       statements
	conf      atomic.Pointer[pgx.ConnConfig] // of new connections
	pool      *pgxpool.Pool
	long      chan struct{} // one place for each scan that holds a connection
	watches   *store.Watchers
	queue     queue
	reads     reads
	member    *membership // nil without a lease
	clock     atomic.Pointer[instant]
	asking    atomic.Bool                 // somebody asks for the server's time
	server    atomic.Pointer[serverStats] // when last asked
	leaseEnds atomic.Pointer[time.Time]   // see Stats
	removed   atomic.Uint64               // see Stats

	life       context.Context // ends reads; cancelled by Close
	end        context.CancelFunc
	closed     atomic.Bool
	lost       atomic.Bool   // this member was removed
	taken      chan struct{} // closed then
	committing sync.WaitGroup
	background sync.WaitGroup
}

var _ store.Store = (*Store)(nil)

// instant is the server's time at a moment of this process.
type instant struct {
	server time.Time
	at     time.Time
}

// Open connects to the database, brings the schema to this version, and with a lease takes the store for
// this process alone. An error that is store.ErrUnavailable may pass by itself: the server does not
// answer, or another gateway uses the store. Others need a person: the schema is of a newer version, or
// holds something else.
func Open(ctx context.Context, o Options) (*Store, error) {
	if o.Node != "" {
		return nil, errors.New("postgres: node: Open has the store to itself; a gateway with a name joins")
	}
	return open(ctx, o)
}

func open(ctx context.Context, o Options) (*Store, error) {
	o = o.withDefaults()
	if _, err := Check(o); err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	c, err := o.parse()
	if err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	s := &Store{options: o, watches: store.NewWatchers(), taken: make(chan struct{})}
	s.sql = newStatements(o.Schema, s.channel())
	s.conf.Store(c.ConnConfig)
	s.queue.wake = make(chan struct{}, 1)
	s.reads.atOnce, s.reads.slow = readsAtOnce, slowRead
	s.long = make(chan struct{}, max(1, o.PoolSize/2))
	connect := s.connect
	if o.Lease > 0 {
		s.member = &membership{Store: s}
		connect = s.member.connect
	}
	conn, err := connect(ctx)
	if err != nil {
		return nil, translate(err)
	}
	if err := s.prepare(ctx, conn); err != nil {
		closeConn(conn)
		return nil, err
	}
	c.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
		*cc = *s.conf.Load().Copy()
		cc.RuntimeParams["idle_in_transaction_session_timeout"] = strconv.FormatInt(idleTime.Milliseconds(), 10)
		return nil
	}
	if s.pool, err = pgxpool.NewWithConfig(context.Background(), c); err != nil {
		closeConn(conn)
		return nil, translate(err)
	}
	s.life, s.end = context.WithCancel(context.Background())
	writer := &committer{Store: s}
	_, _ = rand.Read(writer.writer[:]) // never fails
	s.committing.Go(writer.run)
	if s.member != nil {
		s.background.Go(s.member.keep)
	} else {
		closeConn(conn)
	}
	s.background.Go(s.sweepLoop)
	return s, nil
}

// prepare makes the schema ready on a connection, and joins.
func (s *Store) prepare(ctx context.Context, conn *pgx.Conn) error {
	if err := s.migrate(ctx, conn); err != nil {
		return err
	}
	var fsync string
	if err := conn.QueryRow(ctx, "show fsync").Scan(&fsync); err != nil {
		return translate(err)
	}
	if fsync == "off" { // P2
		s.options.Logger.Warn("the database runs with fsync = off: what was recorded is lost if its machine stops, and runs again")
	}
	if s.member == nil {
		return nil
	}
	return s.member.join(ctx, conn)
}

// SetDSN changes how new connections are made, such as the password. It must lead to the same
// database.
func (s *Store) SetDSN(dsn string) error {
	o := s.options
	o.DSN = dsn
	before, err := Check(s.options)
	if err != nil {
		return err
	}
	if after, err := Check(o); err != nil || after != before {
		return errors.Join(errors.New("dsn: it names another database"), err)
	}
	c, err := o.parse()
	if err == nil {
		s.conf.Store(c.ConnConfig)
	}
	return err
}

// connect makes a connection apart from the pool.
func (s *Store) connect(ctx context.Context) (*pgx.Conn, error) {
	return pgx.ConnectConfig(ctx, s.conf.Load().Copy())
}

// closeConn says goodbye to the server, if it listens.
func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), margin)
	defer cancel()
	_ = conn.Close(ctx) // it is gone in any case
}

// limit is how long a method may take.
func (s *Store) limit() time.Duration { return s.options.StatementTimeout + 2*margin }

// usable returns why the store takes no calls, or nil.
func (s *Store) usable() error {
	switch {
	case s.closed.Load():
		return store.ErrClosed
	case s.lost.Load():
		return errRemoved
	}
	return nil
}

// removedError is a store.ErrUnhealthy that needs no restart.
type removedError struct{}

func (removedError) Error() string {
	return "postgres: this gateway was removed from the store, since it did not respond; it opens the store again by itself"
}

func (removedError) Is(target error) bool { return target == store.ErrUnhealthy }

var errRemoved = removedError{}

// lose closes the store after this member was removed: what this process remembers of the store is out
// of date.
func (s *Store) lose() {
	if !s.lost.Swap(true) {
		s.options.Logger.Error("another gateway has found this one gone, and removed it from the store; this one records nothing more until it has opened the store again")
		s.watches.WakeAll()
		close(s.taken)
	}
}

// Lost returns a channel that is closed when another gateway has removed this one from the store. What
// this process remembers of it is out of date from then on, and every call fails. It may be opened again.
func (s *Store) Lost() <-chan struct{} { return s.taken }

// read runs f, which only reads. If a connection is lost, f runs again on another.
func (s *Store) read(ctx context.Context, f func(ctx context.Context) error) error {
	return s.readUntil(ctx, time.Now().Add(s.limit()), f)
}

// readUntil is read until end at the latest.
func (s *Store) readUntil(ctx context.Context, end time.Time, f func(ctx context.Context) error) error {
	if err := s.usable(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	limited, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	for n := 1; ; n++ {
		err := f(limited)
		switch {
		case err == nil || errors.Is(err, pgx.ErrNoRows):
			return err
		case s.closed.Load():
			return store.ErrClosed
		case ctx.Err() != nil:
			return ctx.Err()
		case n < attempts && limited.Err() == nil && (fatal(err) || again(err)):
			s.pool.Reset() // the others are as old, and likely lost as well
		default:
			return translate(err)
		}
	}
}

// now is the argument of statements for the time: nil lets the server take its own.
func (s *Store) now() *int64 {
	if s.options.Now == nil {
		return nil
	}
	now := s.options.Now().UnixMicro()
	return &now
}

func timeOf(expires int64) time.Time {
	if expires == never {
		return time.Time{}
	}
	return time.UnixMicro(expires)
}

// Watch implements store.Store. It sees the commits of this store, and those of a Member the commits of all.
func (s *Store) Watch(key []byte) (changed <-chan struct{}, cancel func()) {
	changed, cancel = s.watches.Watch(key)
	if s.usable() != nil { // after the watch was made, so that it misses no end of the store
		s.watches.WakeAll()
	}
	return changed, cancel
}

// Now implements store.Store. It is the server's time, counted on from here for a second, and for another one while
// somebody asks: else all callers of that moment would ask.
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	if s.options.Now != nil {
		return s.options.Now(), s.usable()
	}
	if known := s.clock.Load(); known != nil && s.usable() == nil {
		since := time.Since(known.at)
		if since < clockTime {
			return known.server.Add(since), nil
		}
		if s.asking.CompareAndSwap(false, true) {
			defer s.asking.Store(false)
		} else if since < 2*clockTime {
			return known.server.Add(since), nil
		}
	}
	var now int64
	var asked time.Time
	err := s.read(ctx, func(ctx context.Context) error {
		asked = time.Now()
		return s.pool.QueryRow(ctx, "select "+clock).Scan(&now)
	})
	if err != nil {
		return time.Time{}, err
	}
	at := asked.Add(time.Since(asked) / 2)
	s.clock.Store(&instant{server: time.UnixMicro(now), at: at})
	return time.UnixMicro(now), nil
}

// Close implements store.Store. The membership ends.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return store.ErrClosed
	}
	s.queue.close()
	s.reads.close()
	s.committing.Wait()
	s.end()
	s.background.Wait()
	s.reads.groups.Wait()
	s.watches.WakeAll()
	s.pool.Close()
	return nil
}

const (
	page      = 256     // entries that a scan reads at a time
	pageBytes = 4 << 20 // and bytes, about
)

// Scan implements store.Store. A short range is one statement; a longer one is read in pages from
// one snapshot, on a connection of its own until it ends.
func (s *Store) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		var entries []store.Entry
		var whole bool
		err := s.read(ctx, func(ctx context.Context) (err error) {
			entries, whole, err = s.page(ctx, s.pool, r)
			return err
		})
		switch {
		case err != nil:
			yield(store.Entry{}, err)
		case whole:
			hand(ctx, entries, yield)
		default:
			s.scanLong(ctx, r, yield)
		}
	}
}

// hand yields entries until the caller or ctx ends.
func hand(ctx context.Context, entries []store.Entry, yield func(store.Entry, error) bool) bool {
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			yield(store.Entry{}, err)
			return false
		}
		if !yield(e, nil) {
			return false
		}
	}
	if err := ctx.Err(); err != nil {
		yield(store.Entry{}, err)
		return false
	}
	return true
}

func (s *Store) scanLong(ctx context.Context, r store.Range, yield func(store.Entry, error) bool) {
	var tx pgx.Tx
	err := s.read(ctx, func(ctx context.Context) (err error) {
		select {
		case s.long <- struct{}{}:
		case <-ctx.Done():
			return context.DeadlineExceeded
		}
		if tx, err = s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}); err != nil {
			<-s.long
		}
		return err
	})
	if err != nil {
		yield(store.Entry{}, err)
		return
	}
	defer func() {
		over, cancel := context.WithTimeout(context.Background(), margin)
		defer cancel()
		_ = tx.Rollback(over) // it has only read
		<-s.long
	}()
	for {
		entries, whole, err := s.pageOf(ctx, tx, r)
		if err != nil {
			yield(store.Entry{}, err)
			return
		}
		if !hand(ctx, entries, yield) || whole {
			return
		}
		last := entries[len(entries)-1].Key
		if r.Limit > 0 {
			r.Limit -= len(entries)
		}
		if r.Reverse {
			r.To = last
		} else {
			r.From = append(slices.Clip(last), 0)
		}
	}
}

// pageOf reads a page within a scan's transaction, which no other connection can go on with.
func (s *Store) pageOf(ctx context.Context, tx pgx.Tx, r store.Range) (entries []store.Entry, whole bool, err error) {
	limited, cancel := context.WithTimeout(ctx, s.limit())
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	if err = s.usable(); err != nil {
		return nil, false, err
	}
	entries, whole, err = s.page(limited, tx, r)
	switch {
	case err == nil:
		return entries, whole, nil
	case s.closed.Load():
		return nil, false, store.ErrClosed
	case ctx.Err() != nil:
		return nil, false, ctx.Err()
	}
	return nil, false, translate(err)
}

// page reads the first entries of r. whole says that there are no more.
func (s *Store) page(ctx context.Context, db interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}, r store.Range) (entries []store.Entry, whole bool, err error) {
	want := page
	if r.Limit > 0 {
		want = min(want, r.Limit)
	}
	args := []any{r.From, s.now()}
	if len(r.From) == 0 {
		args[0] = []byte{}
	}
	text, order := "select key, value, version, expires from {schema}.entries where key >= $1 and expires > "+given, "key"
	if len(r.To) > 0 {
		args = append(args, r.To)
		text += " and key < $3"
	}
	if r.Reverse {
		order = "key desc"
	}
	// The limit is written out: the planner then knows that an index serves best.
	rows, err := db.Query(ctx, s.sql.in(text+" order by "+order+" limit "+strconv.Itoa(want)), args...)
	if err != nil {
		return nil, false, err
	}
	defer rows.Close()
	size := 0
	for len(entries) < want && size < pageBytes && rows.Next() {
		var e store.Entry
		var version, expires int64
		if err := rows.Scan(&e.Key, &e.Value, &version, &expires); err != nil {
			return nil, false, err
		}
		e.Version, e.Expires = store.Version(version), timeOf(expires)
		entries = append(entries, e)
		size += len(e.Key) + len(e.Value)
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return nil, false, err
	}
	full := len(entries) == want || size >= pageBytes
	return entries, !full || len(entries) == r.Limit, nil
}

//go:embed migrations
var migrations embed.FS

// migrate brings the schema to this version. Gateways that start at the same time do it one after
// the other.
func (s *Store) migrate(ctx context.Context, conn *pgx.Conn) error {
	files, err := migrations.ReadDir("migrations")
	if err != nil {
		return err
	}
	// A process that is stopped while it has the lock keeps it: no gateway may wait for it that needs no migration.
	var now int
	err = conn.QueryRow(ctx, s.sql.in("select coalesce(max(version), 0) from {schema}.migrations")).Scan(&now)
	if err == nil && now == len(files) {
		return nil
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		return translate(err)
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", s.lockKey("migrations", "0")); err != nil {
		return translate(err)
	}
	at, err := s.schemaVersion(ctx, tx)
	if err != nil {
		return err
	}
	if at > len(files) { // whether a build of now can use it, only a newer one knows
		oldest := at
		err := tx.QueryRow(ctx, s.sql.in("select max(coalesce(oldest, version)) from {schema}.migrations where version > $1"), len(files)).Scan(&oldest)
		if err != nil {
			return translate(err)
		}
		if oldest > len(files) {
			return fmt.Errorf("postgres: the schema %s is of version %d, for builds that know %d, and this build knows up to %d; run the build that wrote it, or a newer one",
				s.options.Schema, at, oldest, len(files))
		}
	}
	for i := at; i < len(files); i++ {
		text, err := migrations.ReadFile("migrations/" + files[i].Name())
		if err != nil {
			return err
		}
		if _, err := conn.PgConn().Exec(ctx, s.sql.in(string(text))).ReadAll(); err != nil {
			return translate(err)
		}
		if _, err := tx.Exec(ctx, s.sql.in("insert into {schema}.migrations (version) values ($1)"), i+1); err != nil {
			return translate(err)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return translate(err)
	}
	return nil
}

// schemaVersion is the version of the schema, which it creates if there is none.
func (s *Store) schemaVersion(ctx context.Context, tx pgx.Tx) (version int, err error) {
	var there, ours bool
	var tables int
	err = tx.QueryRow(ctx, `select
		exists (select from information_schema.schemata where schema_name = $1),
		exists (select from information_schema.tables where table_schema = $1 and table_name = 'migrations'),
		(select count(*) from information_schema.tables where table_schema = $1)`, s.options.Schema).Scan(&there, &ours, &tables)
	if err != nil {
		return 0, translate(err)
	}
	if ours {
		if err := tx.QueryRow(ctx, s.sql.in("select coalesce(max(version), 0) from {schema}.migrations")).Scan(&version); err != nil {
			return 0, translate(err)
		}
		return version, nil
	}
	if tables > 0 {
		return 0, fmt.Errorf("postgres: the schema %s holds other tables and no store; give the store a schema of its own", s.options.Schema)
	}
	if !there {
		if _, err := tx.Exec(ctx, s.sql.in("create schema {schema}")); err != nil {
			return 0, translate(err)
		}
	}
	if _, err := tx.Exec(ctx, s.sql.in("create table {schema}.migrations (version int primary key, at timestamptz not null default now())")); err != nil {
		return 0, translate(err)
	}
	return 0, nil
}

// clock is the server's time in microseconds, and given the same where $2 has another.
const (
	clock = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"
	given = "coalesce($2::bigint, " + clock + ")"
)

// statements are the store's, with its schema in them.
type statements struct {
	schema   string
	get      string
	gets     string
	order    string
	free     string
	apply    string
	applyOne string
	// applyMade is for what sequences make.
	applyMade string
	tidy      string
	callOff   string
	winners   string
	sweep     string
	feed      string
	prune     string
}

// in puts the schema into text.
func (q *statements) in(text string) string { return strings.ReplaceAll(text, "{schema}", q.schema) }

func newStatements(schema, channel string) statements {
	q := statements{schema: pgx.Identifier{schema}.Sanitize()}
	q.get = q.in("select value, version, expires from {schema}.entries where key = $1 and expires > " + given)
	q.gets = q.in("select key, case when octet_length(value) <= " + strconv.Itoa(maxTogether) + " then value end, version, expires from {schema}.entries " +
		"where key = any($1::bytea[]) and expires > " + given)
	q.order = q.in("select epoch from {schema}.lease where one for update")
	q.free = q.in(freeSQL)
	q.apply = strings.ReplaceAll(q.in(applySQL), "{channel}", channel)
	q.applyOne = strings.ReplaceAll(q.in(applyOneSQL), "{channel}", channel)
	q.applyMade = strings.ReplaceAll(q.in(applyMadeSQL), "{channel}", channel)
	// Not those that call a group off: its transaction may still come.
	q.tidy = q.in("delete from {schema}.commits where writer = $1 and seq >= $2 and seq < $3 and winners is not null")
	q.callOff = q.in(`insert into {schema}.commits (writer, seq, at) values ($1, $2, ` + clock + `)
		on conflict (writer, seq) do update set at = excluded.at returning winners is not null`)
	q.winners = q.in("select seq, versions from {schema}.commits where writer = $1 and seq >= $2 and seq < $3")
	// The time is a subselect, so that the index is read up to it. A condition with a volatile function in it is asked of
	// each row, which reads all of them.
	q.sweep = q.in(`delete from {schema}.entries where key = any(array(
		select key from {schema}.entries where expires < 9223372036854775807 and expires <= (select ` + given + `)
		order by expires limit $1 for update skip locked))`)
	q.feed = q.in("select seq, boot, gone, boot <> $2 and keys is null, case when boot <> $2 then keys end from {schema}.feed where seq >= $1 order by seq limit " + strconv.Itoa(feedRows))
	q.prune = q.in(`delete from {schema}.feed where seq = any(array(
		select seq from {schema}.feed where seq >= $1 and seq < (select max(seq) from {schema}.feed)
			and (seq < (select min(read) from {schema}.members) or at < ` + clock + ` - $2)
		order by seq limit $3 for update skip locked)) returning seq`)
	return q
}

const (
	sweepEvery = 10 * time.Second // and at once while there is more
	sweepBatch = 1000
	tidyEvery  = 6 // sweeps between two rounds of what is less urgent
)

// tidySQL deletes notes of stores that were closed, and those that called a group off: a day later
// no connection is left on which it could still come.
const tidySQL = "delete from {schema}.commits where at < " + clock + " - 24 * 3600 * 1000000::bigint"

// sweepLoop deletes what has expired, in batches that wait for no lock and hold none for long. A
// failure is left to the next time: calls report the state of the database.
func (s *Store) sweepLoop() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	read := int64(0) // up to where the feed was deleted
	for n := 0; ; n++ {
		if s.usable() == nil {
			read = s.pruneFeed(read)
			for deleted := int64(sweepBatch); deleted == sweepBatch; {
				ctx, cancel := context.WithTimeout(s.life, s.limit())
				tag, _ := s.pool.Exec(ctx, s.sql.sweep, sweepBatch, s.now())
				cancel()
				deleted = tag.RowsAffected()
			}
			if n%tidyEvery == 0 {
				ctx, cancel := context.WithTimeout(s.life, s.limit())
				_, _ = s.pool.Exec(ctx, s.sql.in(tidySQL))
				_ = s.askServer(ctx)
				cancel()
			}
		}
		select {
		case <-tick.C:
		case <-s.life.Done():
			return
		}
	}
}

// pruneFeed deletes rows of the feed from one on that all members have read, or that are old, and returns
// where to go on: behind those that were deleted, which the server passes over slowly.
func (s *Store) pruneFeed(from int64) int64 {
	for {
		ctx, cancel := context.WithTimeout(s.life, s.limit())
		rows, err := s.pool.Query(ctx, s.sql.prune, from, feedKept.Microseconds(), sweepBatch)
		var gone []int64
		if err == nil {
			gone, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		}
		cancel()
		if err != nil || len(gone) == 0 {
			return from
		}
		from = slices.Max(gone) + 1
		if len(gone) < sweepBatch {
			return from
		}
	}
}
