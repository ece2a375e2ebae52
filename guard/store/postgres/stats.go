package postgres

import (
	"context"
	"time"
)

// Stats describe an open store. What the server has to be asked for is of the last minute.
type Stats struct {
	Server serverStats
	Pool   poolStats
	// LeaseEnds is when the lease ends unless it is renewed before, by this process's clock and not later than
	// by the server's; zero without a lease.
	LeaseEnds time.Time
	// Removed counts the members that this one has removed, since they did not respond.
	Removed uint64
}

// serverStats are what the server says of the database. All is zero until it was asked.
type serverStats struct {
	// Asked is when it was asked, by this process's clock.
	Asked time.Time
	// Rows, Large, Indexes and Others are sizes in bytes: of the rows of the entries, of their values that
	// are stored apart, of their indexes, and of the other tables.
	Rows, Large, Indexes, Others int64
	// Living and Dead are the entries, and those that are deleted or replaced and not vacuumed yet, as the
	// server estimates them.
	Living, Dead int64
	// Vacuumed is when the entries were last vacuumed; zero if not since the server's statistics began.
	Vacuumed time.Time
	// OldestTransaction is how long the oldest transaction in the database has been open, of those that
	// the role may see: nothing that was deleted since then is vacuumed.
	OldestTransaction time.Duration
	// Standbys is the number of standbys that are connected to the primary. Lag is how long the one that
	// is furthest behind took to replay what was committed; 0 while nothing is, and negative if the role
	// may not see it (pg_monitor may).
	Standbys int
	Lag      time.Duration
}

// poolStats are those of the connections for reading.
type poolStats struct {
	// Open, InUse and Most are the connections that there are, that are in use, and that there may be.
	Open, InUse, Most int
	// Waits counts reads that had to wait for a connection, and Waited is how long all of them took
	// together to get one, since the store was opened.
	Waits  uint64
	Waited time.Duration
}

// Stats returns the store's statistics. It does not wait.
func (s *Store) Stats() Stats {
	p := s.pool.Stat()
	stats := Stats{Removed: s.removed.Load(), Pool: poolStats{
		Open: int(p.TotalConns()), InUse: int(p.AcquiredConns()), Most: int(p.MaxConns()),
		Waits: uint64(p.EmptyAcquireCount()), Waited: p.EmptyAcquireWaitTime(),
	}}
	if known := s.server.Load(); known != nil {
		stats.Server = *known
	}
	if ends := s.leaseEnds.Load(); ends != nil {
		stats.LeaseEnds = *ends
	}
	return stats
}

// leased notes that the lease was renewed by a statement that was sent at this moment.
func (s *Store) leased(asked time.Time) {
	ends := asked.Add(s.options.Lease)
	s.leaseEnds.Store(&ends)
}

// serverSQL asks for serverStats. Of what the role may not see, the server shows NULL.
const serverSQL = `
select pg_relation_size(c.oid),
	case when c.reltoastrelid = 0 then 0 else pg_total_relation_size(c.reltoastrelid) end,
	pg_indexes_size(c.oid),
	(select coalesce(sum(pg_total_relation_size(o.oid)), 0)::bigint from pg_class o
		where o.relnamespace = c.relnamespace and o.relkind = 'r' and o.oid <> c.oid),
	t.n_live_tup, t.n_dead_tup, greatest(t.last_vacuum, t.last_autovacuum),
	(select coalesce(max(extract(epoch from clock_timestamp() - a.xact_start)), 0)::float8 from pg_stat_activity a
		where a.datname = current_database() and a.pid <> pg_backend_pid()),
	(select count(*) from pg_stat_replication),
	(select case when count(*) > count(r.state) then -1
		else coalesce(max(extract(epoch from r.replay_lag)), 0) end::float8 from pg_stat_replication r)
from pg_class c join pg_namespace n on n.oid = c.relnamespace left join pg_stat_user_tables t on t.relid = c.oid
where n.nspname = $1 and c.relname = 'entries'`

// askServer refreshes what Stats says of the server. Where that fails, the older state stays.
func (s *Store) askServer(ctx context.Context) error {
	var now serverStats
	var vacuumed *time.Time
	var oldest, lag float64
	var living, dead *int64
	err := s.pool.QueryRow(ctx, serverSQL, s.options.Schema).Scan(&now.Rows, &now.Large, &now.Indexes, &now.Others,
		&living, &dead, &vacuumed, &oldest, &now.Standbys, &lag)
	if err != nil {
		return err
	}
	if living != nil && dead != nil {
		now.Living, now.Dead = *living, *dead
	}
	if vacuumed != nil {
		now.Vacuumed = *vacuumed
	}
	now.OldestTransaction = time.Duration(oldest * float64(time.Second))
	now.Lag = time.Duration(lag * float64(time.Second))
	now.Asked = time.Now()
	s.server.Store(&now)
	return nil
}
