//go:build unix

// Package database measures the store on PostgreSQL: how many claims a second its group commit makes
// durable, and how large its tables stay. Each measurement starts a server of its own, which syncs.
package database

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/agent-guard/caddy-agent-guard/bench/stat"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// serversDir is where pgserver keeps its servers.
const serversDir = "/tmp"

// durable are the server's settings: as it is installed, but for the size of its cache.
var durable = []string{"fsync=on", "synchronous_commit=on", "shared_buffers=128MB"}

// ClaimsOptions are those of Claims.
type ClaimsOptions struct {
	// Callers are how many claim at the same time, one measurement each.
	Callers []int
	// Rounds is how many pairs of rounds each has, and Round how long each takes.
	Rounds int
	Round  time.Duration
}

// DefaultClaims takes about three minutes.
var DefaultClaims = ClaimsOptions{Callers: []int{1, 16, 64, 256}, Rounds: 9, Round: 2 * time.Second}

// The goal: times as many claims a second as with a transaction for each, with so many callers.
const (
	goal        = 3.0
	goalCallers = 64
	// connections is how many the transactions of single claims share at most.
	connections = 64
)

func (o *ClaimsOptions) check() error {
	for _, n := range o.Callers {
		if n < 1 || n > 10_000 {
			return fmt.Errorf("callers: %d; from 1 to 10000", n)
		}
	}
	switch {
	case o.Rounds < 1:
		return errors.New("rounds: at least 1")
	case o.Round < 50*time.Millisecond:
		return errors.New("round: at least 50ms")
	}
	return nil
}

// Claims are the measurements of group commit.
type Claims struct {
	Machine table.Machine `json:"machine"`
	Rows    []ClaimsRow   `json:"rows"`
}

// ClaimsRow is the one of a number of callers.
type ClaimsRow struct {
	Callers int `json:"callers"`
	// Grouped and Single are claims a second: as the store groups them, and with a transaction for each.
	Grouped stat.Spread `json:"grouped"`
	Single  stat.Spread `json:"single"`
	// Ratio is Grouped over Single, within pairs of rounds.
	Ratio stat.Spread `json:"ratio"`
	// Group is how many claims a transaction of the store had on average.
	Group float64 `json:"group"`
	// Verdict holds the ratio against the goal.
	Verdict table.Verdict `json:"verdict"`
}

// Below is how many rows do not reach the goal.
func (c *Claims) Below() (n int) {
	for i := range c.Rows {
		if c.Rows[i].Verdict.Below {
			n++
		}
	}
	return n
}

// MeasureClaims compares claims as the store groups them with one transaction for each, on as many
// connections as there are callers, at most 64. The rounds of both alternate on one server.
func MeasureClaims(ctx context.Context, o ClaimsOptions, progress func(string)) (_ *Claims, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	c := new(Claims)
	if c.Machine, err = table.Look(serversDir); err != nil {
		return nil, err
	}
	server, err := pgserver.Start(durable...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Remove()) }()
	for _, callers := range o.Callers {
		progress(fmt.Sprintf("%d callers", callers))
		row, err := o.row(ctx, server, callers)
		if err != nil {
			return nil, err
		}
		c.Rows = append(c.Rows, row)
	}
	return c, nil
}

type groupCount struct{ groups, claims atomic.Int64 }

func (g *groupCount) Committed(batches int, _ time.Duration) {
	g.groups.Add(1)
	g.claims.Add(int64(batches))
}

func (o *ClaimsOptions) row(ctx context.Context, server *pgserver.Server, callers int) (row ClaimsRow, err error) {
	var seen groupCount
	s, err := postgres.Open(ctx, postgres.Options{
		DSN: server.DSN(), Schema: fmt.Sprintf("grouped_%d", callers), Lease: time.Minute, Observer: &seen,
	})
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	pool, err := pgxpool.New(ctx, server.DSN()+fmt.Sprintf(" pool_max_conns=%d", min(callers, connections)))
	if err != nil {
		return row, err
	}
	defer pool.Close()
	name := fmt.Sprintf("single_%d", callers)
	if _, err := pool.Exec(ctx, "create table "+name+" (key bytea primary key, value bytea not null, version bigint not null, expires bigint not null)"); err != nil {
		return row, err
	}
	insert := "insert into " + name + " values ($1, $2, 1, 9223372036854775807) on conflict do nothing"
	value := bytes.Repeat([]byte("r"), 500)
	grouped := func(n uint64) error {
		_, err := s.Commit(ctx, store.Write{Key: claimKey(n), Value: value, If: store.Absent()})
		return err
	}
	single := func(n uint64) error {
		tag, err := pool.Exec(ctx, insert, claimKey(n), value)
		if err == nil && tag.RowsAffected() != 1 {
			err = errors.New("a claim was lost")
		}
		return err
	}
	var next atomic.Uint64
	var first, second []float64
	for round := range o.Rounds + 1 { // the first one warms up
		var rates [2]float64
		for i := range rates { // which of them comes first changes, too
			which := (i + round) % 2
			if rates[which], err = o.round(ctx, callers, &next, []func(uint64) error{grouped, single}[which]); err != nil {
				return row, err
			}
		}
		if round > 0 {
			first, second = append(first, rates[0]), append(second, rates[1])
		}
	}
	row = ClaimsRow{Callers: callers, Grouped: stat.Of(first), Single: stat.Of(second), Ratio: stat.Of(stat.Ratios(first, second))}
	row.Group = float64(seen.claims.Load()) / float64(max(seen.groups.Load(), 1))
	if callers == goalCallers {
		row.Verdict = table.AtLeast(row.Ratio.Median, goal)
	}
	return row, nil
}

// claimKey is a key as an execution's: without an order.
func claimKey(n uint64) []byte {
	mixed := (n ^ n>>32) * 0xd6e8feb86659fd93
	return fmt.Appendf(nil, "x%016x%016x", mixed^mixed>>32, n)
}

// round is how many claims a second the callers make.
func (o *ClaimsOptions) round(ctx context.Context, callers int, next *atomic.Uint64, claim func(n uint64) error) (float64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var done atomic.Int64
	var all sync.WaitGroup
	begun := time.Now()
	for range callers {
		all.Go(func() {
			for time.Since(begun) < o.Round && ctx.Err() == nil {
				if err := claim(next.Add(1)); err != nil {
					cancel(err)
					return
				}
				done.Add(1)
			}
		})
	}
	all.Wait()
	return float64(done.Load()) / time.Since(begun).Seconds(), context.Cause(ctx)
}

func (c *Claims) cells() [][]string {
	rows := [][]string{{"callers", "grouped, claims/s", "single, claims/s", "ratio", "low", "high", "claims a transaction", "goal"}}
	for _, r := range c.Rows {
		rows = append(rows, []string{
			fmt.Sprint(r.Callers), fmt.Sprint(math.Round(r.Grouped.Median)), fmt.Sprint(math.Round(r.Single.Median)),
			fmt.Sprintf("%.2f", r.Ratio.Median), fmt.Sprintf("%.2f", r.Ratio.Low), fmt.Sprintf("%.2f", r.Ratio.High),
			fmt.Sprintf("%.1f", r.Group), r.Verdict.String(),
		})
	}
	return rows
}

// Text prints the measurements for people.
func (c *Claims) Text(w io.Writer) error {
	fmt.Fprintln(w, machineLine(c.Machine))
	return aligned(w, c.cells())
}

func machineLine(m table.Machine) string {
	return fmt.Sprintf("%s/%s, %d cores (%s); append and fdatasync on %s: p50 %s. PostgreSQL is on /tmp, and syncs.",
		m.OS, m.Arch, m.Cores, m.CPU, m.FileSystem, m.Sync.Round(time.Microsecond))
}

func aligned(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, cells := range rows {
		fmt.Fprintln(t, strings.Join(cells, "\t")+"\t")
	}
	return t.Flush()
}

// Markdown prints them as a table.
func (c *Claims) Markdown(w io.Writer) error { return table.Markdown(w, c.cells()) }
