package postgres

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Member is a Store that several gateways use at the same time. Make one with Join.
type Member struct{ *Store }

var _ store.Shared = Member{}

// Join opens the store as one of several gateways, with Options.Node as its name. Errors are those of
// Open; while another process has the name, it is store.ErrUnavailable.
func Join(ctx context.Context, o Options) (Member, error) {
	if o.Node == "" {
		return Member{}, errors.New("postgres: node: it is missing; each gateway that shares the store needs a name of its own")
	}
	if o = o.withDefaults(); o.Lease == 0 {
		o.Lease = max(DefaultLease, 2*o.StatementTimeout)
	}
	s, err := open(ctx, o)
	return Member{s}, err
}

// membership is the right of this process to write: its row in the table of members. The transaction
// of every commit requires it, so that a gateway that was removed writes nothing, whether it knows or
// not. Whoever removes one holds the lock that puts all commits in order: what the removed one has
// written by then is final.
//
// When it may be removed is judged by the server: its lease has ended by the server's clock, or the
// session that holds its advisory lock is gone.
type membership struct {
	*Store
	self store.Member // but for About and Seen
	lock int64        // the key of the advisory lock
	end  chan struct{}

	// Of the goroutine that keeps it.
	conn     *pgx.Conn        // nil without one
	session  bool             // conn has the lock
	notified bool             // something was notified since the last poll
	due      time.Time        // the feed is not read before, unless CatchUp asks
	load     float64          // how many rows a reading of the feed has found, on average
	listens  bool             // the server notifies conn, unless busy
	others   bool             // there were other members at the last look
	renewed  time.Time        // the lease
	free     map[string]int64 // the lease's end of members whose lock was free at the last look, by boot

	busy  atomic.Bool  // so much is written that nobody has to say so: the feed is read whenever it is due
	read  atomic.Int64 // how far the feed was reported
	asked atomic.Int64 // how many times CatchUp was called
	wait  atomic.Pointer[context.CancelFunc]

	mu      sync.Mutex
	about   store.About
	written bool // about is in the table
	seen    time.Time
	caught  int64         // the calls of CatchUp that may return
	reached chan struct{} // closed when that changes
	left    chan struct{} // nil when nobody waits
	follows []*follow     // replaced as a whole
	gone    map[string]struct{}
}

type follow struct {
	prefix  []byte
	changed func(key []byte)
}

// lockKey is the key of an advisory lock of the schema. They share one space in a database.
func (s *Store) lockKey(name, of string) int64 {
	sum := sha256.Sum256([]byte("agent_guard\x00" + s.options.Schema + "\x00" + name + "\x00" + of))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// channel is the one by which members wake each other.
func (s *Store) channel() string {
	return "agent_guard_" + hex.EncodeToString(binary.BigEndian.AppendUint64(nil, uint64(s.lockKey("feed", ""))))
}

const (
	// lookEvery is how often a member looks for others that are gone. The lock of one whose lease has not
	// ended must be free at two looks: one whose connection was lost has it again by then.
	lookEvery = time.Second
	// pollEvery is how often the feed is read where no notification comes, while there are others.
	pollEvery = 100 * time.Millisecond
	// readEvery is the shortest time from one reading of the feed to the next, unless CatchUp asks for one, and the
	// pause is at least restFactor times as long as the last reading took, up to pollEvery. Every commit notifies all
	// others: without a pause a commit of a large fleet would cost as many readings as there are gateways.
	readEvery, restFactor = 10 * time.Millisecond, 4
	// A member that finds more rows than busyAbove in a reading, on average, reads the feed whenever it is due, and
	// until it finds less than one it is not notified: a notification costs the server about as much as a reading.
	busyAbove = 2
	// reconnectEvery is how often a lost session is replaced: several times in lookEvery.
	reconnectEvery = 200 * time.Millisecond
	// feedRows is how many rows of the feed are read at a time, and feedKeys the most keys of one.
	feedRows, feedKeys = 64, "8192"
	// feedKept is how long a member may be behind the feed. What it then has not read is reported as a
	// change of everything.
	feedKept = time.Minute
)

// join makes this process a member on the session of conn, which it keeps. The error is
// store.ErrUnavailable while another one has its place.
func (m *membership) join(ctx context.Context, conn *pgx.Conn) error {
	m.self = store.Member{Node: m.options.Node, Boot: rand.Text()}
	m.lock = m.lockKey("member", m.self.Boot)
	m.free, m.reached, m.gone = map[string]int64{}, make(chan struct{}), map[string]struct{}{}
	m.end = make(chan struct{})
	if err := m.listen(ctx, conn); err != nil {
		return translate(err)
	}
	seen, err := m.try(ctx, conn, nil)
	if err != nil || seen == nil {
		return err
	}
	select {
	case <-time.After(lookEvery):
	case <-ctx.Done():
		return unavailable("no answer in time")
	}
	_, err = m.try(ctx, conn, seen)
	return err
}

// place is another member, who may stand in the way.
type place struct {
	boot, node, holder string
	expires, lock      int64
	session            bool
}

// try joins, or returns those in the way that seem to be gone, with the end of their leases. They are
// removed by a second attempt that finds the same.
func (m *membership) try(ctx context.Context, conn *pgx.Conn, seen map[string]int64) (again map[string]int64, err error) {
	m.freeOrder(ctx, conn)
	tx, err := conn.Begin(ctx)
	if err != nil {
		return nil, translate(err)
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	places, now, err := m.places(ctx, tx)
	if err != nil {
		return nil, translate(err)
	}
	again = make(map[string]int64)
	var boots []string
	for _, p := range places {
		boots = append(boots, p.boot)
		if p.expires <= now {
			continue
		}
		free := p.session
		if free {
			if err := tx.QueryRow(ctx, "select pg_try_advisory_xact_lock_shared($1)", p.lock).Scan(&free); err != nil {
				return nil, translate(err)
			}
		}
		if !free || seen != nil && seen[p.boot] != p.expires {
			return nil, m.taken(p, time.Duration(p.expires-now)*time.Microsecond)
		}
		again[p.boot] = p.expires
	}
	if seen == nil && len(again) > 0 {
		return again, nil
	}
	removed, err := m.remove(ctx, tx, "boot = any($1)", boots)
	if err == nil {
		err = m.insert(ctx, tx)
	}
	if err == nil {
		err = tx.Commit(ctx)
	}
	if err != nil {
		return nil, translate(err)
	}
	for _, p := range places {
		m.options.Logger.Warn("took the place of a gateway that did not close the store", "holder", p.holder)
	}
	m.removed.Add(uint64(removed))
	m.conn = conn
	return nil, nil
}

// places locks the order of all commits, and returns who stands in the way, and the server's time.
func (m *membership) places(ctx context.Context, tx pgx.Tx) (places []place, now int64, err error) {
	err = tx.QueryRow(ctx, m.sql.in("select "+clock+" from {schema}.lease where one for update")).Scan(&now)
	if err != nil {
		return nil, 0, err
	}
	rows, err := tx.Query(ctx, m.sql.in("select boot, node, holder, expires, lock, session from {schema}.members where node = $1 or node = '' or $1 = ''"), m.self.Node)
	if err != nil {
		return nil, 0, err
	}
	places, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (p place, err error) {
		err = row.Scan(&p.boot, &p.node, &p.holder, &p.expires, &p.lock, &p.session)
		return p, err
	})
	return places, now, err
}

// taken is the error of a place that is not free.
func (m *membership) taken(p place, left time.Duration) error {
	what, rule := "has the store open for itself", "A copy needs that, and so did builds before this one: wait until it has ended"
	switch {
	case p.node != "" && m.self.Node != "":
		what = "has the name " + strconv.Quote(p.node)
		rule = "This one takes over when that one is gone; to have both serve, give each a name of its own with the option `node` of `store postgres`"
	case p.node != "":
		what, rule = "has the store open", "Stop all gateways that use it"
	}
	return fmt.Errorf("postgres: %w: another gateway (%s) %s; its lease ends in %v unless it is renewed. %s",
		store.ErrUnavailable, p.holder, what, left.Round(time.Second), rule)
}

// remove removes the members for which where holds, and lets the others know.
func (m *membership) remove(ctx context.Context, tx pgx.Tx, where string, args ...any) (removed int64, err error) {
	tag, err := tx.Exec(ctx, m.sql.in(`with gone as (delete from {schema}.members where `+where+` returning boot)
		insert into {schema}.feed (seq, boot, at, gone, keys)
		select nextval('{schema}.feed_seq'), boot, `+clock+`, true, '{}' from gone
		returning pg_notify('`+m.channel()+`', '')`), args...)
	return tag.RowsAffected(), err
}

// insert makes the row of this member.
func (m *membership) insert(ctx context.Context, tx pgx.Tx) error {
	asked := time.Now()
	var read, joined int64
	err := tx.QueryRow(ctx, m.sql.in(`insert into {schema}.feed (seq, boot, at, gone, keys)
		values (nextval('{schema}.feed_seq'), $1, `+clock+`, false, '{}') returning seq, at`), m.self.Boot).Scan(&read, &joined)
	if err != nil {
		return err
	}
	if m.session, err = m.takeLock(ctx, tx.Conn()); err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	me := host + ", process " + strconv.Itoa(os.Getpid())
	_, err = tx.Exec(ctx, m.sql.in(`insert into {schema}.members (boot, node, holder, lock, session, joined, seen, expires, read, about)
		values ($1, $2, $3, $4, $5, $6, $6, $6::bigint + $7::bigint, $8, '{}')`),
		m.self.Boot, m.self.Node, me, m.lock, m.session, joined, m.options.Lease.Microseconds(), read)
	if err != nil {
		return err
	}
	m.self.Joined, m.seen = time.UnixMicro(joined), time.UnixMicro(joined)
	m.read.Store(read)
	m.renewed = time.Now()
	m.leased(asked)
	_, err = tx.Exec(ctx, "select pg_notify($1, '')", m.channel())
	return err
}

// listen has the server notify conn of what the others write. Behind a pooler that hands the server's sessions on it
// does not: whoever has the session next would be notified, and PgBouncer 1.18 ends when that comes while a statement
// is being cancelled. There members look every pollEvery.
func (m *membership) listen(ctx context.Context, conn *pgx.Conn) error {
	if m.self.Node == "" {
		return nil
	}
	var own bool
	err := conn.QueryRow(ctx, "select pg_backend_pid() = $1", int32(conn.PgConn().PID())).Scan(&own)
	if err == nil && own {
		_, err = conn.Exec(ctx, "listen "+m.channel())
	}
	m.listens = own
	m.load = 0
	m.busy.Store(false)
	return err
}

// weigh decides by the rows of a reading whether this member has to be notified of the next.
func (m *membership) weigh(ctx context.Context, rows int) error {
	m.load = (9*m.load + float64(rows)) / 10
	busy, change := m.busy.Load(), "unlisten "
	switch {
	case busy && m.load < 1:
		change = "listen "
		m.notified = true // what was written before the server listens is read once more
	case busy || m.load <= busyAbove:
		return nil
	}
	if m.listens {
		if _, err := m.conn.Exec(ctx, change+m.channel()); err != nil {
			return err
		}
	}
	m.busy.Store(!busy)
	return nil
}

// takeLock takes the advisory lock for the session of conn. false is a session that the server still
// has from before, or a pooler that hands the server's sessions on: the lease then holds by its time
// alone.
func (m *membership) takeLock(ctx context.Context, conn *pgx.Conn) (locked bool, err error) {
	err = conn.QueryRow(ctx, "select case when pg_backend_pid() = $1 then pg_try_advisory_lock($2) else false end",
		int32(conn.PgConn().PID()), m.lock).Scan(&locked)
	return locked, err
}

// keep renews the lease, removes members that are gone, and reports the feed until the store is closed
// or lost.
func (m *membership) keep() {
	defer close(m.end)
	look := time.Now()
	for m.life.Err() == nil && !m.lost.Load() {
		if m.conn == nil {
			select {
			case <-time.After(reconnectEvery):
			case <-m.life.Done():
				continue
			}
			m.reconnect()
			look = time.Now()
			continue
		}
		m.idle(time.Until(look))
		if m.life.Err() != nil {
			break
		}
		if m.conn.IsClosed() {
			m.conn = nil
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), m.limit())
		var err error
		if !time.Now().Before(look) {
			look = time.Now().Add(lookEvery)
			err = m.checkMembers(ctx)
		}
		if err == nil && m.self.Node != "" {
			err = m.poll(ctx)
		}
		cancel()
		switch {
		case err == nil:
		case fatal(err):
			closeConn(m.conn)
			m.conn = nil
		default: // such as a statement that took too long
			select {
			case <-time.After(reconnectEvery):
			case <-m.life.Done():
			}
		}
	}
	if m.conn != nil {
		m.leave()
		closeConn(m.conn)
	}
	m.memberLeft("") // nobody waits any more
}

// idle waits until something is notified, CatchUp is called, or for at most this long.
func (m *membership) idle(most time.Duration) {
	switch {
	case m.busy.Load():
		most = min(most, time.Until(m.due))
	case m.others && m.self.Node != "":
		most = min(most, pollEvery)
	}
	ctx, cancel := context.WithTimeout(m.life, most)
	defer cancel()
	m.wait.Store(&cancel)
	m.mu.Lock()
	caught := m.caught
	m.mu.Unlock()
	if m.asked.Load() != caught { // in this order: CatchUp asks, and then ends the wait
		return
	}
	if !m.notified {
		_ = m.conn.PgConn().WaitForNotification(ctx) // a lost session is noticed by what comes next
	}
	// What is notified meanwhile is read here, or it would be taken for something that the next reading misses.
	rest, done := context.WithDeadline(ctx, m.due)
	defer done()
	for rest.Err() == nil && m.conn.PgConn().WaitForNotification(rest) == nil {
	}
}

// connect makes a session that listens.
func (m *membership) connect(ctx context.Context) (*pgx.Conn, error) {
	conf := m.conf.Load().Copy()
	conf.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) { m.notified = true }
	return pgx.ConnectConfig(ctx, conf)
}

// reconnect makes a session in place of one that was lost.
func (m *membership) reconnect() {
	ctx, cancel := context.WithTimeout(context.Background(), m.limit())
	defer cancel()
	conn, err := m.connect(ctx)
	if err != nil {
		return
	}
	m.conn, m.session = conn, false
	if err = m.listen(ctx, conn); err == nil {
		err = m.renew(ctx)
	}
	if err != nil {
		closeConn(m.conn)
		m.conn = nil
	}
}

// renew renews the lease.
func (m *membership) renew(ctx context.Context) (err error) {
	if !m.session {
		if m.session, err = m.takeLock(ctx, m.conn); err != nil {
			return err
		}
	}
	m.mu.Lock()
	about := m.about
	m.written = true
	m.mu.Unlock()
	text, err := json.Marshal(about)
	if err != nil {
		return err
	}
	var seen int64
	asked := time.Now()
	err = m.conn.QueryRow(ctx, m.sql.in(`update {schema}.members set seen = `+clock+`, expires = `+clock+` + $2, session = $3, read = $4, about = $5
		where boot = $1 returning seen`),
		m.self.Boot, m.options.Lease.Microseconds(), m.session, m.read.Load(), string(text)).Scan(&seen)
	if errors.Is(err, pgx.ErrNoRows) {
		m.lose()
		return nil
	}
	if err != nil {
		m.mu.Lock()
		m.written = false
		m.mu.Unlock()
		return err
	}
	m.renewed = time.Now()
	m.leased(asked)
	m.mu.Lock()
	m.seen = time.UnixMicro(seen)
	m.mu.Unlock()
	return nil
}

// checkMembers renews the lease when it is time, and removes other members that are gone.
func (m *membership) checkMembers(ctx context.Context) error {
	m.mu.Lock()
	written := m.written
	m.mu.Unlock()
	if !written || !m.session || time.Since(m.renewed) >= min(m.options.Lease/3, 5*time.Second) {
		if err := m.renew(ctx); err != nil {
			return err
		}
	}
	if m.self.Node == "" {
		return nil // there are no others
	}
	rows, err := m.conn.Query(ctx, m.sql.in(`select boot, expires, expires <= `+clock+`,
		case when session then pg_try_advisory_xact_lock_shared(lock) else false end from {schema}.members where boot <> $1`), m.self.Boot)
	if err != nil {
		return err
	}
	before, free, gone := m.free, map[string]int64{}, map[string]int64{}
	m.free, m.others = free, false
	var boot string
	var expires int64
	var over, unlocked bool
	_, err = pgx.ForEachRow(rows, []any{&boot, &expires, &over, &unlocked}, func() error {
		m.others = true
		if unlocked {
			free[boot] = expires
		}
		if over || unlocked && before[boot] == expires {
			gone[boot] = expires
		}
		return nil
	})
	if err != nil || len(gone) == 0 {
		return err
	}
	if err := m.renew(ctx); err != nil { // a removal may wait for as long as a commit, and this lease must not end meanwhile
		return err
	}
	return m.removeGone(ctx, gone)
}

// removeGone removes members of which another look, in the order of all commits, finds the same.
func (m *membership) removeGone(ctx context.Context, gone map[string]int64) error {
	m.freeOrder(ctx, m.conn)
	tx, err := m.conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	if _, err = tx.Exec(ctx, m.sql.order); err != nil {
		return err
	}
	boots := slices.Sorted(maps.Keys(gone))
	ends := make([]int64, len(boots))
	for i, boot := range boots {
		ends[i] = gone[boot]
	}
	removed, err := m.remove(ctx, tx, `boot = any($1::text[]) and (expires <= `+clock+` or session and
		expires = ($2::bigint[])[array_position($1::text[], boot)] and pg_try_advisory_xact_lock_shared(lock))`, boots, ends)
	if err == nil {
		err = tx.Commit(ctx)
	}
	if err == nil && removed > 0 {
		m.removed.Add(uint64(removed))
		m.options.Logger.Warn("removed gateways that do not respond; what they had under way is in doubt", "members", removed)
	}
	return err
}

// The row of the table lease puts all commits in order: whoever has its lock keeps everybody else from writing. Who
// joins, removes a member or leaves needs several round trips for that, and a commit one, whose bytes may come in
// parts. A process that is stopped meanwhile, or a machine that is gone, keeps the lock, for ever as far as the server
// is concerned. Two things take it away. The server ends sessions by itself that are idle in such a transaction
// (stillTime). And whoever finds itself held up ends what waits for its client in the middle of one: that is needed
// where the rest of a request has not come, or an answer is not read, which for the server is no idle session; and
// behind a pooler, which gives sessions their settings.

// freeSQL ends the sessions of this role which have that lock and do nothing but wait for their client, and have for
// $1 seconds. One that works goes on, however slow it is: the server bounds each of its statements. In the middle of a
// request it is not known when a session began to wait, but only when its last statement did, which may have waited for
// the lock for as long. Whoever waits for the lock now has the table's already, and waits for no client.
const freeSQL = `select pg_terminate_backend(a.pid) from pg_stat_activity a
where a.pid <> pg_backend_pid() and a.usename = current_user
	and (a.state like 'idle in transaction%' or a.wait_event_type = 'Client')
	and a.state_change < pg_catalog.clock_timestamp() - make_interval(secs => case when a.state = 'active' then 2 else 1 end * $1::float8)
	and a.pid in (select l.pid from pg_locks l where l.granted and l.locktype = 'relation'
		and l.mode in ('RowShareLock', 'RowExclusiveLock') and l.relation = '{schema}.lease'::regclass
		and l.database = (select oid from pg_database where datname = current_database()))`

const (
	// stillTime is after which the server ends a session by itself whose client is silent in the middle of a
	// transaction, unless it is a scan's.
	stillTime = defaultStatementTimeout
	// leastStill is for how long a client may be silent at least: a busy machine is none that is gone.
	leastStill = 2 * time.Second
)

// freeOrder ends sessions that hold up all commits while nobody works in them. That is safe at any time: their
// transactions are undone, and a living owner finds that out, and repeats them. A database that has no such views is
// left to its own time limits.
func (s *Store) freeOrder(ctx context.Context, conn *pgx.Conn) {
	tag, err := conn.Exec(ctx, s.sql.free, max(s.options.StatementTimeout, leastStill).Seconds())
	if err == nil && tag.RowsAffected() > 0 {
		s.options.Logger.Warn("ended sessions of the database that held up all commits", "sessions", tag.RowsAffected())
	}
}

// leave removes this member's own row. Where that fails, the others notice that its session is gone.
func (m *membership) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), margin)
	defer cancel()
	tx, err := m.conn.Begin(ctx)
	if err != nil {
		return
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	if _, err = tx.Exec(ctx, m.sql.order); err == nil {
		if _, err = m.remove(ctx, tx, "boot = $1", m.self.Boot); err == nil {
			_ = tx.Commit(ctx)
		}
	}
}

// entry is a row of the feed.
type entry struct {
	seq  int64
	boot string
	gone bool
	all  bool // any key may have changed
	keys [][]byte
}

// poll reports what is new in the feed.
func (m *membership) poll(ctx context.Context) error {
	asked, begun, rows := m.asked.Load(), time.Now(), 0
	for more := true; more && !m.lost.Load(); {
		m.notified = false
		found, err := m.conn.Query(ctx, m.sql.feed, m.read.Load(), m.self.Boot)
		if err != nil {
			return err
		}
		entries, err := pgx.CollectRows(found, func(row pgx.CollectableRow) (e entry, err error) {
			err = row.Scan(&e.seq, &e.boot, &e.gone, &e.all, &e.keys)
			return e, err
		})
		if err != nil {
			return err
		}
		more = len(entries) == feedRows
		rows += max(len(entries), 1) - 1 // the first was known
		m.report(entries)
	}
	m.due = time.Now().Add(min(max(readEvery, restFactor*time.Since(begun)), pollEvery))
	m.mu.Lock()
	m.caught = max(m.caught, asked)
	close(m.reached)
	m.reached = make(chan struct{})
	m.mu.Unlock()
	return m.weigh(ctx, rows)
}

// report hands entries on. The first is the last one of before, or something was missed.
func (m *membership) report(entries []entry) {
	if len(entries) == 0 { // the newest row always stays
		m.options.Logger.Error("the database was set back to an earlier state")
		m.lose()
		return
	}
	if entries[0].seq == m.read.Load() {
		entries = entries[1:]
	} else {
		m.changedAll()
	}
	for _, e := range entries {
		switch {
		case e.gone && e.boot == m.self.Boot:
			m.lose()
			return
		case e.gone:
			m.memberLeft(e.boot)
		case e.boot == m.self.Boot:
		case e.all:
			m.changedAll()
		}
		for _, key := range e.keys {
			m.watches.Wake(key)
			for _, f := range m.following() {
				if bytes.HasPrefix(key, f.prefix) {
					f.changed(key)
				}
			}
		}
	}
	if len(entries) > 0 {
		m.read.Store(entries[len(entries)-1].seq)
	}
}

// changedAll reports that anything may have changed, and that members may have left.
func (m *membership) changedAll() {
	m.watches.WakeAll()
	for _, f := range m.following() {
		f.changed(nil)
	}
	m.memberLeft("")
}

func (m *membership) following() []*follow {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.follows
}

// maxGone bounds how many boots are remembered as gone.
const maxGone = 4096

// memberLeft wakes those who wait in Left. An empty boot is not known.
func (m *membership) memberLeft(boot string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if boot != "" {
		m.rememberGone(boot)
	}
	if m.left != nil {
		close(m.left)
		m.left = nil
	}
}

// rememberGone remembers that a boot is gone. The caller holds mu.
func (m *membership) rememberGone(boot string) {
	if len(m.gone) >= maxGone {
		clear(m.gone) // the table says it again
	}
	m.gone[boot] = struct{}{}
}

// Self implements store.Shared.
func (s Member) Self() store.Member {
	m := s.member
	m.mu.Lock()
	defer m.mu.Unlock()
	self := m.self
	self.Seen, self.About = m.seen, m.about
	return self
}

// Members implements store.Shared.
func (s Member) Members(ctx context.Context) (all []store.Member, err error) {
	err = s.Store.read(ctx, func(ctx context.Context) error {
		rows, err := s.pool.Query(ctx, s.sql.in("select node, boot, joined, seen, about from {schema}.members order by node, boot"))
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (one store.Member, err error) {
			var joined, seen int64
			var about string
			if err = row.Scan(&one.Node, &one.Boot, &joined, &seen, &about); err == nil {
				err = json.Unmarshal([]byte(about), &one.About)
			}
			one.Joined, one.Seen = time.UnixMicro(joined), time.UnixMicro(seen)
			return one, err
		})
		return err
	})
	return all, err
}

// Gone implements store.Shared.
func (s Member) Gone(ctx context.Context, boot string) (gone bool, err error) {
	m := s.member
	m.mu.Lock()
	_, gone = m.gone[boot]
	m.mu.Unlock()
	if gone {
		return true, nil
	}
	err = s.Store.read(ctx, func(ctx context.Context) error {
		return s.pool.QueryRow(ctx, s.sql.in("select not exists (select from {schema}.members where boot = $1)"), boot).Scan(&gone)
	})
	if err != nil {
		return false, err
	}
	if gone {
		m.mu.Lock()
		m.rememberGone(boot)
		m.mu.Unlock()
	}
	return gone, nil
}

// Left implements store.Shared.
func (s Member) Left() <-chan struct{} {
	m := s.member
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.usable() != nil {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	if m.left == nil {
		m.left = make(chan struct{})
	}
	return m.left
}

// Describe implements store.Shared. It is written within a second, and what has changed in Open and LogSize
// alone with the next renewal of the lease.
func (s Member) Describe(about store.About) {
	m := s.member
	m.mu.Lock()
	defer m.mu.Unlock()
	about.SealingKeys, about.Configuration = slices.Clone(about.SealingKeys), maps.Clone(about.Configuration)
	if about.Version != m.about.Version || !slices.Equal(about.SealingKeys, m.about.SealingKeys) || !maps.Equal(about.Configuration, m.about.Configuration) {
		m.written = false
	}
	m.about = about
}

// Follow implements store.Shared.
func (s Member) Follow(prefix []byte, changed func(key []byte)) (cancel func()) {
	m := s.member
	m.mu.Lock()
	defer m.mu.Unlock()
	mine := &follow{bytes.Clone(prefix), changed}
	m.follows = append(slices.Clip(m.follows), mine)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.follows = slices.DeleteFunc(slices.Clone(m.follows), func(f *follow) bool { return f == mine })
	}
}

// CatchUp implements store.Shared. Concurrent calls have one reading of the feed.
func (s Member) CatchUp(ctx context.Context) error {
	if err := s.usable(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	m := s.member
	number := m.asked.Add(1)
	if wait := m.wait.Load(); wait != nil {
		(*wait)()
	}
	limited, cancel := context.WithTimeout(ctx, s.limit())
	defer cancel()
	for {
		m.mu.Lock()
		done, reached := m.caught >= number, m.reached
		m.mu.Unlock()
		if done {
			return s.usable()
		}
		select {
		case <-reached:
		case <-m.end:
			return s.usable()
		case <-limited.Done():
			if err := ctx.Err(); err != nil {
				return err
			}
			return unavailable("no answer in time")
		}
	}
}
