package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// lease is the right of this process to write. It is a row with a number, the epoch: who takes the
// lease raises it, and the transaction of every commit requires its own, so that a gateway that
// has lost the lease writes nothing, whether it knows or not. When the lease may be taken is
// judged by the server: it was given back, or has expired by the server's clock, or the session of
// its holder has ended, whose advisory lock is then free.
type lease struct {
	epoch int64 // set before the first commit
}

// lockKey is the key of an advisory lock of the schema. They share one space in a database.
func (s *Store) lockKey(name string, n int64) int64 {
	sum := sha256.Sum256([]byte("agent_guard\x00" + s.options.Schema + "\x00" + name + "\x00" + strconv.FormatInt(n, 10)))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// goneFor is how long the lock of a holder must be free until the holder counts as gone. One whose
// connection was lost has it again before that.
const goneFor = time.Second

// takeLease takes the lease for the session of conn. The error is store.ErrUnavailable while another
// gateway has it.
func (s *Store) takeLease(ctx context.Context, conn *pgx.Conn) error {
	seen, err := s.tryLease(ctx, conn, 0)
	if err != nil || seen == 0 {
		return err
	}
	select {
	case <-time.After(goneFor):
	case <-ctx.Done():
		return unavailable("no answer in time")
	}
	_, err = s.tryLease(ctx, conn, seen)
	return err
}

// tryLease takes the lease, or returns when it expires, if its holder seems to be gone. It is
// then taken by a second attempt that finds the same.
func (s *Store) tryLease(ctx context.Context, conn *pgx.Conn, seen int64) (again int64, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, translate(err)
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	var epoch, expires, now int64
	var holder string
	err = tx.QueryRow(ctx, s.sql.in("select epoch, holder, expires, "+clock+" from {schema}.lease where one for update")).Scan(&epoch, &holder, &expires, &now)
	if err != nil {
		return 0, translate(err)
	}
	if now < expires {
		var free bool
		if err := tx.QueryRow(ctx, "select pg_try_advisory_xact_lock($1)", s.lockKey("lease", epoch)).Scan(&free); err != nil {
			return 0, translate(err)
		}
		if !free || seen != 0 && seen != expires {
			left := time.Duration(expires-now) * time.Microsecond
			return 0, fmt.Errorf("postgres: %w: another gateway (%s) has the store open; its lease ends in %v unless it is renewed. One gateway at a time may use a schema",
				store.ErrUnavailable, holder, left.Round(time.Second))
		}
		if seen == 0 {
			return expires, nil
		}
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	me := host + ", process " + strconv.Itoa(os.Getpid()) // for whoever wants the lease
	var locked bool
	s.lease.epoch = epoch + 1
	err = tx.QueryRow(ctx, s.sql.in("update {schema}.lease set epoch = $1, holder = $2, expires = "+clock+" + $3 returning pg_try_advisory_lock($4)"),
		s.lease.epoch, me, s.options.Lease.Microseconds(), s.lockKey("lease", s.lease.epoch)).Scan(&locked)
	if err == nil {
		err = tx.Commit(ctx)
	}
	if err != nil {
		return 0, translate(err)
	}
	if epoch > 0 && holder != "" {
		s.options.Logger.Warn("took the store over from a gateway that did not close it", "holder", holder)
	}
	return 0, nil
}

// reconnectEvery is how often a lost session of the lease is replaced: several times in goneFor.
const reconnectEvery = 200 * time.Millisecond

// keepLease renews the lease until the store is closed, and then gives it back.
func (s *Store) keepLease(conn *pgx.Conn) {
	for s.life.Err() == nil && !s.lost.Load() {
		if conn == nil {
			select {
			case <-time.After(reconnectEvery):
			case <-s.life.Done():
				continue
			}
		} else {
			ctx, cancel := context.WithTimeout(s.life, s.options.Lease/3)
			_, _ = conn.WaitForNotification(ctx) // nothing is notified: it ends with the time, or the session
			cancel()
		}
		if s.life.Err() == nil {
			conn = s.renew(conn)
		}
	}
	if conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), margin)
	defer cancel()
	_, _ = conn.Exec(ctx, s.sql.in("update {schema}.lease set holder = '', expires = 0 where epoch = $1"), s.lease.epoch) // else the session's end says it
	closeConn(conn)
}

// renew renews the lease, on a new session if the old one is gone. It returns the session; nil
// without one.
func (s *Store) renew(conn *pgx.Conn) *pgx.Conn {
	ctx, cancel := context.WithTimeout(context.Background(), s.limit())
	defer cancel()
	var err error
	if conn == nil || conn.IsClosed() {
		if conn, err = s.connect(ctx); err != nil {
			return nil
		}
		// Not if the server still has the old session; the lease is then held by its time alone.
		_, err = conn.Exec(ctx, "select pg_try_advisory_lock($1)", s.lockKey("lease", s.lease.epoch))
	}
	var epoch int64
	if err == nil {
		err = conn.QueryRow(ctx, s.sql.in("update {schema}.lease set expires = "+clock+" + $2 where epoch = $1 returning epoch"),
			s.lease.epoch, s.options.Lease.Microseconds()).Scan(&epoch)
	}
	switch {
	case err == nil:
		return conn
	case errors.Is(err, pgx.ErrNoRows):
		s.lose()
	case !fatal(err):
		return conn // such as a statement that took too long
	}
	closeConn(conn)
	return nil
}
