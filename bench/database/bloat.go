//go:build unix

package database

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/agent-guard/caddy-agent-guard/bench/table"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// BloatOptions are those of MeasureBloat.
type BloatOptions struct {
	// Executions is how many calls are executed; For ends the run sooner, if it is not zero.
	Executions int64
	For        time.Duration
	// Callers is how many are executed at the same time.
	Callers int
	// Keep is how long the records and their answers stay.
	Keep time.Duration
	// Answer is the size of an answer in bytes.
	Answer int
	// Every is the time between two looks at the tables, and After how long they are looked at when all
	// has been executed.
	Every, After time.Duration
	// Settings are further ones of the server, as in its configuration file.
	Settings []string
}

// DefaultBloat executes a million calls.
var DefaultBloat = BloatOptions{
	Executions: 1_000_000, Callers: 64, Keep: 20 * time.Second, Answer: 1024, Every: 10 * time.Second, After: 2 * time.Minute,
}

func (o *BloatOptions) check() error {
	switch {
	case o.Executions < 1:
		return errors.New("executions: at least 1")
	case o.Callers < 1:
		return errors.New("callers: at least 1")
	case o.Keep < time.Second:
		return errors.New("keep: at least 1s")
	case o.Answer < 0 || o.Answer > 1<<20:
		return errors.New("answer: from 0 to 1048576 bytes")
	case o.Every < 100*time.Millisecond:
		return errors.New("every: at least 100ms")
	}
	return nil
}

// Bloat is how large the tables were while calls were executed and forgotten.
type Bloat struct {
	Machine table.Machine `json:"machine"`
	Options BloatOptions  `json:"options"`
	Looks   []Look        `json:"looks"`
	// Executed is the number of calls, in Took.
	Executed int64         `json:"executed"`
	Took     time.Duration `json:"took"`
	// Growth is the largest size in the last third of the run over that in the second third, each for as many
	// executions a second; 0 where the run was too short.
	Growth  float64       `json:"growth"`
	Verdict table.Verdict `json:"verdict"`
}

// growthBar is the most that the tables may grow from the second third of a run to the last.
const growthBar = 1.25

// Look is the state of the tables at a moment. Sizes are in bytes.
type Look struct {
	At       time.Duration `json:"at"`
	Executed int64         `json:"executed"`
	// Rows are living rows of the entries, and Dead those that are not removed yet, as the server
	// estimates them.
	Rows int64 `json:"rows"`
	Dead int64 `json:"dead"`
	// Heap, Toast and Indexes are of the entries; Notes is the table of commits, Others what else the
	// schema has.
	Heap    int64 `json:"heap"`
	Toast   int64 `json:"toast"`
	Indexes int64 `json:"indexes"`
	Notes   int64 `json:"notes"`
	Others  int64 `json:"others"`
	// Vacuums is how often the entries were vacuumed.
	Vacuums int64 `json:"vacuums"`
}

// Total is the size of the schema.
func (l *Look) Total() int64 { return l.Heap + l.Toast + l.Indexes + l.Notes + l.Others }

const bloatSchema = "agent_guard"

const lookSQL = `select s.n_live_tup, s.n_dead_tup, pg_relation_size(c.oid),
	case when c.reltoastrelid = 0 then 0 else pg_total_relation_size(c.reltoastrelid) end, pg_indexes_size(c.oid),
	pg_total_relation_size('` + bloatSchema + `.commits'),
	(select coalesce(sum(pg_total_relation_size(o.oid)), 0)::bigint from pg_class o where o.relnamespace = c.relnamespace and o.relkind = 'r' and o.relname not in ('entries', 'commits')),
	s.autovacuum_count + s.vacuum_count
	from pg_class c join pg_stat_user_tables s on s.relid = c.oid where c.oid = '` + bloatSchema + `.entries'::regclass`

// MeasureBloat executes calls that are forgotten soon, and looks at the tables meanwhile.
func MeasureBloat(ctx context.Context, o BloatOptions, progress func(string)) (_ *Bloat, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	b := &Bloat{Options: o}
	if b.Machine, err = table.Look(serversDir); err != nil {
		return nil, err
	}
	server, err := pgserver.Start(append(durable[:len(durable):len(durable)], o.Settings...)...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Remove()) }()
	st, err := postgres.Open(ctx, postgres.Options{DSN: server.DSN(), Schema: bloatSchema, Lease: postgres.DefaultLease})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	g, _, err := execution.Open(ctx, st, seal.Generate())
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, server.DSN())
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(context.Background()) }()

	begun := time.Now()
	running, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	if o.For > 0 {
		timer := time.AfterFunc(o.For, func() { stop(errOver) })
		defer timer.Stop()
	}
	var executed atomic.Int64
	over := make(chan struct{})
	go func() {
		defer close(over)
		o.execute(running, g, &executed, stop)
		b.Took = time.Since(begun)
	}()
	look := func() error {
		l := Look{At: time.Since(begun), Executed: executed.Load()}
		err := conn.QueryRow(ctx, lookSQL).Scan(&l.Rows, &l.Dead, &l.Heap, &l.Toast, &l.Indexes, &l.Notes, &l.Others, &l.Vacuums)
		if err != nil {
			return err
		}
		b.Looks = append(b.Looks, l)
		progress(strings.Join(l.cells(), "  "))
		return nil
	}
	progress(strings.Join(lookTitles, "  "))
	tick := time.NewTicker(o.Every)
	defer tick.Stop()
	var late <-chan time.Time
	for wait := over; ; {
		select {
		case <-wait:
			if cause := context.Cause(running); cause != nil && !errors.Is(cause, errOver) {
				return nil, cause
			}
			b.Executed, wait, late = executed.Load(), nil, time.After(o.After)
		case <-tick.C:
			if err := look(); err != nil {
				<-over
				return nil, err
			}
		case <-late:
			if err := look(); err != nil {
				return nil, err
			}
			b.judge()
			return b, nil
		}
	}
}

var errOver = errors.New("the time is over")

// execute claims and settles the calls.
func (o *BloatOptions) execute(ctx context.Context, g *execution.Guard, executed *atomic.Int64, stop func(error)) {
	answer := make([]byte, o.Answer)
	for i := range answer {
		answer[i] = byte(i*i>>3) | 1
	}
	var next atomic.Int64
	var all sync.WaitGroup
	for range o.Callers {
		all.Go(func() {
			for n := next.Add(1); n <= o.Executions && ctx.Err() == nil; n = next.Add(1) {
				if err := o.one(ctx, g, n, answer); err != nil {
					stop(err)
					return
				}
				executed.Add(1)
			}
		})
	}
	all.Wait()
}

func (o *BloatOptions) one(ctx context.Context, g *execution.Guard, n int64, answer []byte) error {
	scope := execution.Scope{Caller: "anonymous", Guard: "default", Method: "POST", Path: "/v1/charges", ID: fmt.Sprint(n)}
	e, err := g.Claim(context.WithoutCancel(ctx), &execution.Call{
		Key: g.Key(scope), Scope: scope, Origin: execution.OriginGiven, Action: "charge",
		Deadline: time.Minute, KeepResult: o.Keep, KeepKey: o.Keep, ResultCap: 8 << 20,
	}, execution.Finding{})
	if err != nil {
		return err
	}
	e.Recording().Start(200, map[string][]string{"Content-Type": {"application/json"}})
	e.Write(answer, false)
	return e.Settle(context.WithoutCancel(ctx), execution.Outcome{Verdict: execution.Completed, Status: 200, Whole: true})
}

// judge compares the thirds of the run: the largest size in each, for every execution a second in it,
// since a machine with other work does not execute as many in each.
func (b *Bloat) judge() {
	var size, from, to [3]float64
	var begin, end [3]time.Duration
	for i := range b.Looks {
		l := &b.Looks[i]
		if l.At >= b.Took {
			break
		}
		third := int(3 * l.At / b.Took)
		if size[third] == 0 {
			begin[third], from[third] = l.At, float64(l.Executed)
		}
		size[third] = max(size[third], float64(l.Total()))
		end[third], to[third] = l.At, float64(l.Executed)
	}
	rate := func(third int) float64 { return (to[third] - from[third]) / (end[third] - begin[third]).Seconds() }
	if rate(1) > 0 && rate(2) > 0 {
		b.Growth = size[2] / rate(2) * rate(1) / size[1]
		b.Verdict = table.AtMost(b.Growth, growthBar)
	}
}

// Below is 1 where the tables have grown too much.
func (b *Bloat) Below() int {
	if b.Verdict.Below {
		return 1
	}
	return 0
}

var lookTitles = []string{"time", "executed", "rows", "dead", "heap", "toast", "indexes", "notes", "others", "total", "vacuums"}

func (l *Look) cells() []string {
	return []string{
		l.At.Round(time.Second).String(), fmt.Sprint(l.Executed), fmt.Sprint(l.Rows), fmt.Sprint(l.Dead),
		mib(l.Heap), mib(l.Toast), mib(l.Indexes), mib(l.Notes), mib(l.Others), mib(l.Total()), fmt.Sprint(l.Vacuums),
	}
}

// mib formats bytes in MiB.
func mib(bytes int64) string { return fmt.Sprintf("%.1f", float64(bytes)/(1<<20)) }

func (b *Bloat) preface() string {
	return fmt.Sprintf("%s\n%d executions in %s with %d callers, kept for %s with answers of %d B; sizes in MiB. Last third over second third, per execution a second: %.2f (%s) %s",
		machineLine(b.Machine), b.Executed, b.Took.Round(time.Second), b.Options.Callers, b.Options.Keep, b.Options.Answer, b.Growth, b.Verdict.Bar, b.Verdict)
}

func (b *Bloat) rows() [][]string {
	rows := [][]string{lookTitles}
	for i := range b.Looks {
		rows = append(rows, b.Looks[i].cells())
	}
	return rows
}

// Text prints the looks for people.
func (b *Bloat) Text(w io.Writer) error {
	fmt.Fprintln(w, b.preface())
	return aligned(w, b.rows())
}

// Markdown prints them as a table.
func (b *Bloat) Markdown(w io.Writer) error {
	fmt.Fprintln(w, b.preface()+"\n")
	return table.Markdown(w, b.rows())
}
