//go:build unix

package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// BenchmarkClaims compares claims of concurrent callers, as the store groups them, with one
// transaction for each on a pool of up to 64 connections. The server syncs to the disk.
func BenchmarkClaims(b *testing.B) {
	durable, err := pgserver.Start("fsync=on", "synchronous_commit=on")
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := durable.Remove(); err != nil {
			b.Error(err)
		}
	}()
	value := bytes.Repeat([]byte("r"), 500)
	for _, callers := range []int{1, 16, 64, 256} {
		b.Run(fmt.Sprintf("%d/grouped", callers), func(b *testing.B) {
			var seen groups
			s, err := postgres.Open(b.Context(), postgres.Options{DSN: durable.DSN(), Schema: newSchema(), Lease: time.Minute, Observer: &seen})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := s.Close(); err != nil {
					b.Error(err)
				}
			}()
			concurrently(b, callers, "claims/s", func(n int64) error {
				_, err := s.Commit(context.Background(), store.Write{Key: fmt.Appendf(nil, "x%032d", n), Value: value, If: store.Absent()})
				return err
			})
			b.ReportMetric(float64(b.N)/float64(len(seen.seen)), "claims/commit")
		})
		b.Run(fmt.Sprintf("%d/single", callers), func(b *testing.B) {
			pool, err := pgxpool.New(b.Context(), durable.DSN()+fmt.Sprintf(" pool_max_conns=%d", min(callers, 64)))
			if err != nil {
				b.Fatal(err)
			}
			defer pool.Close()
			table := newSchema()
			if _, err := pool.Exec(b.Context(), "create table "+table+" (key bytea primary key, value bytea not null, version bigint not null, expires bigint not null)"); err != nil {
				b.Fatal(err)
			}
			concurrently(b, callers, "claims/s", func(n int64) error {
				tag, err := pool.Exec(context.Background(), "insert into "+table+" values ($1, $2, 1, 9223372036854775807) on conflict do nothing", fmt.Appendf(nil, "x%032d", n), value)
				if err == nil && tag.RowsAffected() != 1 {
					err = errors.New("a claim was lost")
				}
				return err
			})
		})
	}
}

// BenchmarkGets compares reads of single keys by concurrent callers, as the store groups them, with one statement
// for each on the same pool. Every second key is absent.
func BenchmarkGets(b *testing.B) {
	for _, callers := range []int{1, 16, 64} {
		for name, atOnce := range map[string]int{"grouped": 0, "single": callers} {
			b.Run(fmt.Sprintf("%d/%s", callers, name), func(b *testing.B) {
				s, err := postgres.Open(b.Context(), postgres.Options{DSN: server.DSN(), Schema: newSchema()})
				if err != nil {
					b.Fatal(err)
				}
				defer func() {
					if err := s.Close(); err != nil {
						b.Error(err)
					}
				}()
				if atOnce > 0 {
					s.GroupReads(atOnce, time.Minute)
				}
				const keys = 1000
				var batch []store.Write
				for n := range keys {
					batch = append(batch, store.Write{Key: fmt.Appendf(nil, "x%032d", 2*n), Value: make([]byte, 1000)})
				}
				if _, err := s.Commit(b.Context(), batch...); err != nil {
					b.Fatal(err)
				}
				concurrently(b, callers, "gets/s", func(n int64) error {
					_, err := s.Get(context.Background(), fmt.Appendf(nil, "x%032d", n*7919%(2*keys)))
					if errors.Is(err, store.ErrNotFound) {
						err = nil
					}
					return err
				})
			})
		}
	}
}

// concurrently calls f with one number after the other.
func concurrently(b *testing.B, callers int, unit string, f func(n int64) error) {
	var next atomic.Int64
	var all sync.WaitGroup
	b.ResetTimer()
	for range callers {
		all.Go(func() {
			for {
				n := next.Add(1)
				if n > int64(b.N) {
					return
				}
				if err := f(n); err != nil {
					b.Errorf("%d: %v", n, err)
					return
				}
			}
		})
	}
	all.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), unit)
}

// BenchmarkLargeValue compares 1 MiB in one row with the same in rows of 256 and 64 KiB, written and
// read.
func BenchmarkLargeValue(b *testing.B) {
	s, err := postgres.Open(b.Context(), postgres.Options{DSN: server.DSN(), Schema: newSchema()})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			b.Error(err)
		}
	}()
	value := make([]byte, store.MaxBulk)
	for i := range value {
		value[i] = byte(i * i >> 3)
	}
	for _, rows := range []int{1, 4, 16} {
		b.Run(fmt.Sprintf("%d", rows), func(b *testing.B) {
			b.SetBytes(store.MaxBulk)
			for n := range b.N {
				var batch []store.Write
				size := len(value) / rows
				for i := range rows {
					batch = append(batch, store.Write{Key: fmt.Appendf(nil, "r%d-%d-%d", rows, n, i), Value: value[i*size : (i+1)*size], Bulk: true, Expires: time.Now().Add(time.Hour)})
				}
				if _, err := s.Commit(b.Context(), batch...); err != nil {
					b.Fatal(err)
				}
				for _, w := range batch {
					if _, err := s.Get(b.Context(), w.Key); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
