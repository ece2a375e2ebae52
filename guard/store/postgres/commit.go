package postgres

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Bounds of a group of commits: one transaction, one round trip.
const (
	maxGroup      = 512      // batches
	maxGroupBytes = 16 << 20 // keys and values, unless one batch is larger
	maxSteps      = 32       // statements: batches with keys in common come one after the other
)

// timers are for callers that wait. They do not run while they are here.
var timers = sync.Pool{New: func() any {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return timer
}}

// Commit implements store.Store. It returns after the server has made the batch durable (P2).
func (s *Store) Commit(ctx context.Context, writes ...store.Write) (store.Version, error) {
	if err := store.Check(writes); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if err := s.usable(); err != nil {
		return 0, err
	}
	b := newBatch(writes)
	q := &s.queue
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return 0, store.ErrClosed
	}
	q.waiting = append(q.waiting, b)
	if n := len(q.waiting); n == 1 || n >= q.expected {
		q.signal()
	}
	q.mu.Unlock()
	late := timers.Get().(*time.Timer)
	late.Reset(s.limit())
	defer func() {
		late.Stop()
		timers.Put(late)
	}()
	select {
	case <-b.done:
	case <-late.C:
		switch {
		case b.status.CompareAndSwap(batchQueued, batchLeft):
			return 0, unavailable("no answer in time, and nothing was written")
		case b.status.CompareAndSwap(batchSent, batchLeft):
			return 0, store.ErrUnknown
		}
		<-b.done // it was answered at this moment
	}
	return b.version, b.err
}

// The life of a batch. Once the caller has left, nobody answers it.
const (
	batchQueued int32 = iota
	batchSent         // the server may have it
	batchDone
	batchLeft
)

// batch is one Commit on its way. Its keys and values are copies: the caller may leave before the
// server has answered.
type batch struct {
	writes []store.Write
	size   int
	status atomic.Int32
	step   int // of its group

	done    chan struct{} // closed when version and err are set
	version store.Version
	err     error
}

func newBatch(writes []store.Write) *batch {
	b := &batch{writes: slices.Clone(writes), done: make(chan struct{})}
	for i := range writes {
		b.size += len(writes[i].Key) + len(writes[i].Value)
	}
	memory := make([]byte, 0, b.size)
	for i := range writes {
		if p := writes[i].Place; p != nil {
			b.size += p.Size
		}
	}
	keep := func(from []byte) []byte {
		memory = append(memory, from...)
		return memory[len(memory)-len(from) : len(memory) : len(memory)]
	}
	for i := range b.writes {
		w := &b.writes[i]
		w.Key = keep(w.Key)
		if w.Delete {
			w.Value = nil
		}
		w.Value = keep(w.Value)
	}
	return b
}

// answer gives the caller the result, unless it has left.
func (b *batch) answer(version store.Version, err error) {
	if b.status.CompareAndSwap(batchSent, batchDone) || b.status.CompareAndSwap(batchQueued, batchDone) {
		b.version, b.err = version, err
		close(b.done)
	}
}

func answerAll(all []*batch, err error) {
	for _, b := range all {
		b.answer(0, err)
	}
}

// queue has the batches that wait for the committer.
type queue struct {
	mu      sync.Mutex
	waiting []*batch
	closed  bool
	wake    chan struct{} // a batch waits, expected ones do, or the queue was closed

	// expected is the recent number of concurrent commits, and took the time of the last group:
	// callers that were answered come again at once, and in one group with those that waited they
	// need one sync of the server instead of two.
	expected int
	took     time.Duration
}

// What a group waits for more commits: not at all with few callers.
const (
	fewCallers  = 4
	longestWait = time.Millisecond
)

// gather waits until as many batches wait as recently came at a time, for a fraction of the time
// that a group takes.
func (q *queue) gather() {
	q.mu.Lock()
	enough := q.closed || q.expected < fewCallers
	wait := min(q.took/4, longestWait)
	q.mu.Unlock()
	if enough {
		return
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	for {
		q.mu.Lock()
		enough = q.closed || len(q.waiting) >= min(q.expected, maxGroup)
		q.mu.Unlock()
		if enough {
			return
		}
		select {
		case <-q.wake:
		case <-late.C:
			return
		}
	}
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.signal()
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take waits for batches, and returns those that fit into one transaction; none when the queue is
// closed and empty.
func (q *queue) take() []*batch {
	for {
		q.mu.Lock()
		some, closed := len(q.waiting) > 0, q.closed
		q.mu.Unlock()
		if some {
			q.gather()
			q.mu.Lock()
			group := q.fitting()
			q.mu.Unlock()
			if len(group) > 0 {
				return group
			}
			continue // their callers have left
		}
		if closed {
			return nil
		}
		<-q.wake
	}
}

// fitting takes batches from the front, and gives each its step. Batches whose callers have left
// are dropped.
func (q *queue) fitting() (group []*batch) {
	// The first step in which a key can be read, or written, so that the batches of a group have one
	// order: a step's statement reads everything before it writes.
	type steps struct{ read, write int }
	first := make(map[string]steps)
	size, taken := 0, 0
	for _, b := range q.waiting {
		b.step = 0
		for i := range b.writes {
			if at := first[string(b.writes[i].Key)]; b.writes[i].Check {
				b.step = max(b.step, at.read)
			} else {
				b.step = max(b.step, at.read, at.write)
			}
		}
		size += b.size
		if len(group) > 0 && (len(group) == maxGroup || size > maxGroupBytes || b.step >= maxSteps) {
			break
		}
		taken++
		if !b.status.CompareAndSwap(batchQueued, batchSent) {
			continue
		}
		group = append(group, b)
		if taken == len(q.waiting) {
			break // nobody asks for its keys
		}
		for i := range b.writes {
			key := string(b.writes[i].Key)
			switch {
			case b.writes[i].Place != nil: // written behind all steps
				first[key] = steps{maxSteps, maxSteps}
			case b.writes[i].Check:
				at := first[key]
				first[key] = steps{at.read, max(at.write, b.step)}
			default:
				first[key] = steps{b.step + 1, b.step + 1}
			}
		}
	}
	q.waiting = slices.Delete(q.waiting, 0, taken)
	return group
}

// committer writes one group after the other, on a connection of its own. What it knows of the
// server's tables is only what it was answered.
type committer struct {
	*Store
	writer [16]byte  // of this opening, random
	conn   *pgx.Conn // nil without one
	warned atomic.Bool

	next    int64  // the number of the next step; none was used twice
	settled int64  // groups with lower numbers are settled, and their notes of no use any more
	tidied  int64  // up to where they were deleted
	open    *group // sent, and its verdict is not known yet
	late    bool   // a group had no answer in time
}

// tidyAfter is how many notes are deleted at a time.
const tidyAfter = 64

// group is a transaction: steps of batches without a key in common. Behind them comes a step for each sequence in
// which the batches that are written have places.
type group struct {
	steps []*step
	from  int64 // the number of its first step
	tidy  bool  // it deletes the notes of settled groups

	clock  int64   // the server's time, in microseconds
	placed bool    // some batches have places in sequences
	made   []*step // what those have made of the places of batches that are written
}

// all are the steps in the order of their numbers.
func (g *group) all() []*step { return append(g.steps[:len(g.steps):len(g.steps)], g.made...) }

type step struct {
	batches []*batch
	done    func(store.Version, error) // of the sequence that has made it, or nil

	// The server's verdict.
	removed  bool    // on all of it: this member was removed
	versions []int64 // of the batches that were written, 0 of others; empty without a verdict
	losers   []loser
}

// loser is a batch of which a condition did not hold.
type loser struct {
	batch   int
	place   int // of the first write with such a condition
	version int64
	value   []byte
	expires int64
}

func (c *committer) run() {
	for {
		all := c.queue.take()
		if len(all) == 0 {
			break
		}
		n, begun := len(all), time.Now()
		c.commit(all)
		if c.late {
			c.late = false
			c.free()
		}
		q := &c.queue
		q.mu.Lock()
		now := n + len(q.waiting)
		// Quick to rise, so that a burst takes effect at once.
		q.expected, q.took = max(now, q.expected-max(1, (q.expected-now)/4)), time.Since(begun)
		q.mu.Unlock()
	}
	c.drop()
}

// commit answers all batches, within the time that a statement has and a little more.
func (c *committer) commit(all []*batch) {
	begun := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), c.options.StatementTimeout+margin)
	defer cancel()
	for sent := false; len(all) > 0; sent = c.open != nil {
		if c.lost.Load() {
			answerAll(all, errRemoved)
			return
		}
		if err := c.ready(ctx); err != nil {
			if sent { // and their verdict is not found out
				err = store.ErrUnknown
			}
			answerAll(all, err)
			return
		}
		if all = undecided(all); len(all) == 0 { // by what ready found out
			return
		}
		g := c.group(all)
		c.open = g
		err := c.send(ctx, g)
		c.late = late(err)
		if err != nil && !fatal(err) {
			if _, ended := c.conn.Exec(ctx, "rollback"); ended != nil {
				err = ended // the connection is lost
			}
		}
		switch {
		case err == nil:
			c.settle(g, nil, begun)
		case fatal(err):
			c.drop() // the verdict is asked for on a new connection
		case again(err) && time.Since(begun) < c.options.StatementTimeout+margin-lastTry:
			c.settle(g, err, begun)
			<-time.After(againAfter)
		default:
			c.settle(g, err, begun)
			answerAll(all, translate(err))
		}
		all = undecided(all)
	}
}

// free is freeOrder for commits to come.
func (c *committer) free() {
	ctx, cancel := context.WithTimeout(context.Background(), margin)
	defer cancel()
	if c.reach(ctx) == nil {
		c.freeOrder(ctx, c.conn)
	}
}

// undecided are the batches whose callers still wait.
func undecided(all []*batch) []*batch {
	return slices.DeleteFunc(all, func(b *batch) bool { return b.status.Load() != batchSent })
}

// ready returns with a connection and no open group. It tries again for as long as ctx lasts while
// there is one, since only its verdict helps its callers; else a database that cannot be reached is
// reported at once.
func (c *committer) ready(ctx context.Context) error {
	for {
		err := c.reach(ctx)
		if err == nil && c.open != nil {
			if err = c.findOut(ctx); err != nil {
				c.drop()
			}
		}
		if err == nil {
			return nil
		}
		if c.open == nil || ctx.Err() != nil {
			return translate(err)
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
		}
	}
}

func (c *committer) reach(ctx context.Context) error {
	if c.conn != nil && !c.conn.IsClosed() {
		return nil
	}
	conf := c.conf.Load().Copy()
	conf.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.SeverityUnlocalized == "WARNING" {
			c.warned.Store(true)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, conf)
	if err != nil {
		return err
	}
	// P2: an acknowledged commit is on the disk, whatever the database's default. remote_apply is
	// more than that. And a key is looked up in the index alone: where the table was small when the statement was
	// planned, the planner may take a bitmap, which costs more for each key.
	if _, err := conn.Exec(ctx, `select set_config('synchronous_commit', case when current_setting('synchronous_commit') = 'remote_apply' then 'remote_apply' else 'on' end, false),
		(select set_config(name, 'off', false) from pg_settings where name = 'enable_bitmapscan')`); err != nil {
		closeConn(conn)
		return err
	}
	conn.TypeMap().RegisterType(byteaArray)
	c.conn = conn
	return nil
}

func (c *committer) drop() {
	if c.conn != nil {
		closeConn(c.conn)
		c.conn = nil
	}
}

// group makes a transaction of batches that were taken together, or are left of them.
func (c *committer) group(all []*batch) *group {
	g := &group{from: c.next, tidy: c.settled-c.tidied >= tidyAfter}
	slices.SortStableFunc(all, func(a, b *batch) int { return a.step - b.step })
	for i, b := range all {
		if i == 0 || b.step != all[i-1].step {
			g.steps = append(g.steps, new(step))
		}
		last := g.steps[len(g.steps)-1]
		last.batches = append(last.batches, b)
	}
	sequences := map[*store.Sequence]bool{}
	for _, b := range all {
		for i := range b.writes {
			if p := b.writes[i].Place; p != nil {
				sequences[p.In] = true
			}
		}
	}
	g.placed = len(sequences) > 0
	c.next += int64(len(g.steps) + len(sequences))
	return g
}

// A transaction that failed for others' sake is tried again after a pause, until so little time is left
// that a further attempt might be cut off, and its verdict unknown.
const (
	againAfter = 5 * time.Millisecond
	lastTry    = 250 * time.Millisecond
)

// errWarned: the server acknowledged the commit with a warning, such as that it did not wait for a
// synchronous standby.
var errWarned = errors.New("the commit was acknowledged with a warning")

// send has the server carry out the group: in one round trip, and in two where sequences have to know which batches are
// written. Without an error it is durable.
func (c *committer) send(ctx context.Context, g *group) error {
	var out pgx.Batch
	out.Queue("begin isolation level read committed read write")
	out.Queue(c.sql.order)
	for i, s := range g.steps {
		text := c.sql.apply
		if len(s.batches) == 1 {
			text = c.sql.applyOne
		}
		out.Queue(text, c.arguments(g.from+int64(i), s)...)
	}
	c.warned.Store(false)
	if !g.placed {
		return c.finish(ctx, &out, g, g.read)
	}
	out.Queue("select " + clock)
	if err := c.round(ctx, &out, g.read); err != nil {
		return err
	}
	now := time.UnixMicro(g.clock)
	if c.options.Now != nil {
		now = c.options.Now()
	}
	if err := c.assemble(g, now); err != nil {
		return store.NotAssembled(err)
	}
	out = pgx.Batch{}
	for i, s := range g.made {
		out.Queue(c.sql.applyMade, c.arguments(g.from+int64(len(g.steps)+i), s)...)
	}
	err := c.finish(ctx, &out, g, func(answers pgx.BatchResults) error { return readSteps(answers, g.made) })
	if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) && refused.Code == stateDivision {
		err = store.NotAssembled(store.ErrOvertaken)
	}
	return err
}

// read reads the answers to all that comes before what sequences make.
func (g *group) read(answers pgx.BatchResults) error {
	if _, err := answers.Exec(); err != nil { // begin
		return err
	}
	if _, err := answers.Exec(); err != nil { // the lock
		return err
	}
	if err := readSteps(answers, g.steps); err != nil || !g.placed {
		return err
	}
	return answers.QueryRow().Scan(&g.clock)
}

// round sends statements and reads their answers.
func (c *committer) round(ctx context.Context, out *pgx.Batch, read func(pgx.BatchResults) error) error {
	answers := c.conn.SendBatch(ctx, out)
	err := read(answers)
	if closing := answers.Close(); err == nil {
		err = closing // also that of a commit
	}
	return err
}

// finish sends the last statements of a group, and commits it.
func (c *committer) finish(ctx context.Context, out *pgx.Batch, g *group, read func(pgx.BatchResults) error) error {
	if g.tidy {
		out.Queue(c.sql.tidy, c.writer, c.tidied, c.settled)
	}
	out.Queue("commit")
	err := c.round(ctx, out, func(answers pgx.BatchResults) error {
		if err := read(answers); err != nil {
			return err
		}
		if g.tidy {
			if _, err := answers.Exec(); err != nil {
				return err
			}
		}
		done, err := answers.Exec()
		if err == nil && done.String() != "COMMIT" {
			err = fmt.Errorf("the commit ended with %s", done)
		}
		return err
	})
	if err == nil && c.warned.Load() {
		err = errWarned
	}
	return err
}

// readSteps reads the answers to steps.
func readSteps(answers pgx.BatchResults, steps []*step) error {
	for _, s := range steps {
		rows, err := answers.Query()
		if err != nil {
			return err
		}
		if err := s.read(rows); err != nil {
			return err
		}
	}
	return nil
}

// assemble has the sequences make what the batches add to them that are written.
func (c *committer) assemble(g *group, now time.Time) error {
	places := map[*store.Sequence][]*store.Place{}
	var sequences []*store.Sequence
	for _, s := range g.steps {
		for i, version := range s.versions {
			if version == 0 {
				continue
			}
			for j := range s.batches[i].writes {
				p := s.batches[i].writes[j].Place
				if p == nil {
					continue
				}
				if places[p.In] == nil {
					sequences = append(sequences, p.In)
				}
				places[p.In] = append(places[p.In], p)
			}
		}
	}
	for _, in := range sequences {
		writes, done, err := in.Assemble(places[in], now)
		if err != nil {
			return err
		}
		g.made = append(g.made, &step{batches: []*batch{newBatch(writes)}, done: done})
	}
	return nil
}

// read reads the answer to applySQL.
func (s *step) read(rows pgx.Rows) error {
	s.removed, s.versions, s.losers = false, nil, nil
	first := make([]int, len(s.batches)) // the place of each batch's first write, from 1
	place := 1
	for i, b := range s.batches {
		first[i] = place
		place += len(b.writes)
	}
	var l loser
	var versions []int64
	_, err := pgx.ForEachRow(rows, []any{&l.batch, &l.place, &l.version, &l.value, &l.expires, &versions}, func() error {
		if l.batch < 0 {
			s.versions, s.removed = versions, versions == nil
			return nil
		}
		l.place -= first[l.batch]
		s.losers = append(s.losers, l)
		return nil
	})
	return err
}

// What applySQL takes for a write's condition, besides a version.
const (
	wantAny   int64 = -1
	wantNever int64 = -2 // a version that no store here gives
)

// And for what a write does.
const (
	kindPut int32 = iota
	kindDelete
	kindCheck
)

// arguments are those of applySQL for a step.
func (c *committer) arguments(number int64, s *step) []any {
	n := 0
	for _, b := range s.batches {
		n += len(b.writes)
	}
	batches, kinds := make([]int32, 0, n), make([]int32, 0, n)
	keys, values := make([][]byte, 0, n), make([][]byte, 0, n)
	expiries, wants := make([]int64, 0, n), make([]int64, 0, n)
	for i, b := range s.batches {
		for j := range b.writes {
			w := &b.writes[j]
			expires, want, kind := never, int64(w.If.Version()), kindPut // 0 asks for absence
			if !w.Expires.IsZero() {
				expires = w.Expires.UnixMicro()
			}
			switch {
			case w.If.None():
				want = wantAny
			case want < 0:
				want = wantNever
			}
			switch {
			case w.Check, w.Place != nil:
				kind = kindCheck
			case w.Delete:
				kind = kindDelete
			}
			keys, values = append(keys, w.Key), append(values, w.Value)
			expiries, wants = append(expiries, expires), append(wants, want)
			batches, kinds = append(batches, int32(i)), append(kinds, kind)
		}
	}
	var boot *string
	if m := c.member; m != nil {
		boot = &m.self.Boot
	}
	all := []any{keys, c.now(), values, expiries, wants, kinds, boot, c.writer, number}
	if len(s.batches) > 1 {
		all = append(all, batches, len(s.batches))
	}
	return all
}

// applySQL carries out a step: batches without a key in common. It runs behind the lock of
// statements.order, as a statement of its own, so that it sees all earlier commits. "offset 0" makes
// the planner look each key up: it may take a full table for an empty one. It also takes any array for
// a short one, and a join of two arrays row by row is what a large group must not pay for: so the
// versions of the batches are an array with one place for each, 0 for those that lost.
//
// One row has these versions, NULL where this member was removed. The others are the losers.
const applySQL = `
with w as materialized (
	select * from unnest($1::bytea[], $3::bytea[], $4::bigint[], $5::bigint[], $6::int[], $10::int[]) with ordinality
		as w (key, value, expires, want, kind, batch, place)
), losers as materialized (
	select distinct on (w.batch) w.batch, w.place, e.version, e.value, e.expires
	from w left join lateral ` + foundSQL + ` on true
	where w.want <> -1 and coalesce(e.version, 0) <> w.want
	order by w.batch, w.place
), won as materialized (
	select case when ` + fencedSQL + ` then null else (
		select array_agg(case when b.batch in (select batch from losers) then 0 else nextval('{schema}.versions') end order by b.batch)
		from generate_series(0, $11::int - 1) b (batch)
	) end as versions
)` + writeSQL

// applyOneSQL is applySQL for a step of one batch, which is what a lone caller has: half the work.
const applyOneSQL = `
with w as materialized (
	select *, 0 as batch from unnest($1::bytea[], $3::bytea[], $4::bigint[], $5::bigint[], $6::int[]) with ordinality
		as w (key, value, expires, want, kind, place)
), losers as materialized (
	select w.batch, w.place, e.version, e.value, e.expires
	from w left join lateral ` + foundSQL + ` on true
	where w.want <> -1 and coalesce(e.version, 0) <> w.want
	order by w.place limit 1
), won as materialized (
	select case when ` + fencedSQL + ` then null
		when exists (select from losers) then array[0::bigint]
		else array[nextval('{schema}.versions')] end as versions
)` + writeSQL

// applyMadeSQL is applyOneSQL for what a sequence has made: a condition that does not hold ends the transaction, with a
// division by zero.
var applyMadeSQL = strings.ReplaceAll(applyOneSQL, "then array[0::bigint]", "then (select array[1 / (place - place)] from losers)")

// What all have in common.
const (
	foundSQL = `(
		select e.version, e.value, e.expires from {schema}.entries e where e.key = w.key and e.expires > ` + given + ` offset 0
	) e`
	fencedSQL = `$7::text is not null and not exists (
		select from {schema}.members m where m.boot = $7::text
	)`
	writeSQL = `, puts as (
	insert into {schema}.entries (key, value, version, expires)
	select w.key, w.value, won.versions[w.batch + 1], w.expires from won cross join w where w.kind = 0 and won.versions[w.batch + 1] > 0
	on conflict (key) do update set value = excluded.value, version = excluded.version, expires = excluded.expires
), deletes as (
	delete from {schema}.entries where key = any(array(
		select w.key from won cross join w where w.kind = 1 and won.versions[w.batch + 1] > 0))
), feed as (
	insert into {schema}.feed (seq, boot, at, gone, keys)
	select nextval('{schema}.feed_seq'), coalesce($7::text, ''), ` + clock + `, false,
		case when count(*) <= ` + feedKeys + ` then array_agg(w.key) end
	from won cross join w
	where w.kind < 2 and won.versions[w.batch + 1] > 0 and (select exists (select from {schema}.members where boot <> coalesce($7::text, '')))
	having count(*) > 0
	returning pg_notify('{channel}', '')
), note as (
	insert into {schema}.commits (writer, seq, at, winners, versions)
	select $8::uuid, $9::bigint, ` + clock + `, '{}', won.versions from won
)
select -1 as batch, 0::bigint as place, 0::bigint as version, null::bytea as value, 0::bigint as expires, versions from won
union all
select batch, place, coalesce(version, 0), value, coalesce(expires, 0), null from losers`
)

// settle ends the open group: written with its verdicts, or not written at all, and why.
func (c *committer) settle(g *group, why error, begun time.Time) {
	c.open = nil
	for _, s := range g.made {
		switch {
		case s.done == nil:
		case why != nil:
			s.done(0, why)
		case len(s.versions) == 0:
			s.done(0, errRemoved)
		default:
			s.done(store.Version(s.versions[0]), nil)
		}
	}
	if why != nil {
		return // a note that calls it off stays there, for the transaction may still come
	}
	if g.tidy {
		c.tidied = c.settled
	}
	c.settled = g.from + int64(len(g.steps)+len(g.made))
	winners := 0
	for _, s := range g.all() {
		if s.removed {
			c.lose()
			answerAll(s.batches, errRemoved)
		}
		for i, version := range s.versions {
			if version == 0 {
				continue
			}
			winners++
			for j := range s.batches[i].writes {
				if w := &s.batches[i].writes[j]; !w.Check && w.Place == nil {
					c.watches.Wake(w.Key)
				}
			}
		}
	}
	if winners -= len(g.made); winners > 0 && c.options.Observer != nil {
		c.options.Observer.Committed(winners, time.Since(begun))
	}
	for _, s := range g.steps {
		for i, version := range s.versions {
			if version != 0 {
				s.batches[i].answer(store.Version(version), nil)
			}
		}
		for i := range s.losers {
			s.losers[i].answer(s.batches[s.losers[i].batch])
		}
	}
}

func (l *loser) answer(b *batch) {
	lost := &store.Conflict{Index: l.place, Key: bytes.Clone(b.writes[l.place].Key)}
	if l.version != 0 {
		lost.Found = &store.Entry{
			Key: bytes.Clone(lost.Key), Value: l.value, Version: store.Version(l.version), Expires: timeOf(l.expires),
		}
	}
	b.answer(0, lost)
}

// findOut settles the open group on a new connection. Either its transaction has left its note
// there, or calling it off makes sure that it never will: both write the same row. The answer to
// the call is synced behind everything that was written before, and so proves that it is durable.
func (c *committer) findOut(ctx context.Context) error {
	g := c.open
	var written bool
	c.warned.Store(false)
	if err := c.conn.QueryRow(ctx, c.sql.callOff, c.writer, g.from).Scan(&written); err != nil {
		return err
	}
	if c.warned.Load() {
		return errWarned
	}
	if written {
		if err := c.readWinners(ctx, g); err != nil {
			return err
		}
	}
	var why error
	if !written {
		why = store.ErrUnavailable
	}
	c.settle(g, why, time.Now())
	return nil
}

// readWinners reads which batches of the group were written. The others run again, since what they
// lost to was not answered.
func (c *committer) readWinners(ctx context.Context, g *group) error {
	all := g.all()
	rows, err := c.conn.Query(ctx, c.sql.winners, c.writer, g.from, g.from+int64(len(all)))
	if err != nil {
		return err
	}
	for _, s := range all {
		s.removed, s.versions, s.losers = false, nil, nil
	}
	var seq int64
	var versions []int64
	_, err = pgx.ForEachRow(rows, []any{&seq, &versions}, func() error {
		s := all[seq-g.from]
		s.versions, s.removed = versions, versions == nil
		return nil
	})
	return err
}
