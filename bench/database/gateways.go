//go:build unix

package database

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// GatewaysOptions are those of MeasureGateways.
type GatewaysOptions struct {
	// Nodes are the sizes of the fleets.
	Nodes []int
	// Conns is how many clients call at the same time, as many at each gateway.
	Conns int
	// Rounds is how often each fleet is measured, and Round for how long.
	Rounds int
	Round  time.Duration
}

// DefaultGateways takes about four minutes.
var DefaultGateways = GatewaysOptions{Nodes: []int{1, 2, 4}, Conns: 64, Rounds: 7, Round: 6 * time.Second}

func (o *GatewaysOptions) check() error {
	for _, n := range o.Nodes {
		if n < 1 || n > 16 {
			return fmt.Errorf("nodes: %d; from 1 to 16", n)
		}
		if o.Conns < n || o.Conns > 10_000 {
			return fmt.Errorf("conns: %d; at least one for each of %d gateways, at most 10000", o.Conns, n)
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

// Gateways are the measurements of fleets.
type Gateways struct {
	Machine table.Machine `json:"machine"`
	Conns   int           `json:"conns"`
	Rows    []GatewaysRow `json:"rows"`
}

// GatewaysRow is the one of a fleet.
type GatewaysRow struct {
	Nodes int `json:"nodes"`
	// Rate is guarded calls a second, and Ratio the one to the first fleet, round by round.
	Rate  stat.Spread `json:"rate"`
	Ratio stat.Spread `json:"ratio"`
	// Gateway, Database and Others are the processor time of a call, in microseconds: of all gateways, of all
	// processes of the database, and of the clients and the upstream; zero where the system does not say.
	Gateway  stat.Spread `json:"gateway_us"`
	Database stat.Spread `json:"database_us"`
	Others   stat.Spread `json:"others_us"`
	// Busy is the part of the machine's processors that all of them used.
	Busy stat.Spread `json:"busy"`
	// Middle and Tail are the 50th and the 99th percentile of the time of a call, in milliseconds.
	Middle stat.Spread `json:"p50_ms"`
	Tail   stat.Spread `json:"p99_ms"`

	rates, gateways, databases, others, busy, middles, tails []float64
}

// fleetKeys is the ring of all gateways.
const fleetKeys = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

// fleets is what all measurements share.
type fleets struct {
	GatewaysOptions
	dir, upstream string
	server        *pgserver.Server
	behind        *proc.Proc
}

// MeasureGateways has clients call fleets of several sizes, each on a schema of its own in one database. Fleets are
// started for a round and stopped after it, so that those that wait use nothing.
func MeasureGateways(ctx context.Context, o GatewaysOptions, progress func(string)) (_ *Gateways, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	g := &Gateways{Conns: o.Conns}
	if g.Machine, err = table.Look(serversDir); err != nil {
		return nil, err
	}
	f := &fleets{GatewaysOptions: o}
	if f.dir, err = os.MkdirTemp("", "agb"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(f.dir)) }()
	if f.server, err = pgserver.Start(durable...); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.server.Remove()) }()
	if f.behind, err = proc.Start(proc.Spec{Role: upstream.Role}); err != nil {
		return nil, err
	}
	defer f.behind.Kill()
	f.upstream = f.behind.Word
	for _, n := range o.Nodes {
		g.Rows = append(g.Rows, GatewaysRow{Nodes: n})
	}
	for round := range o.Rounds + 1 { // the first one makes the tables and warms up
		for i := range g.Rows {
			r := &g.Rows[(i+round)%len(g.Rows)] // which of them comes first changes, too
			progress(fmt.Sprintf("round %d of %d: %d gateways", round, o.Rounds, r.Nodes))
			if err := f.round(ctx, r); err != nil {
				return nil, fmt.Errorf("%d gateways: %w", r.Nodes, err)
			}
			if round == 0 {
				*r = GatewaysRow{Nodes: r.Nodes}
			}
		}
	}
	for i := range g.Rows {
		r := &g.Rows[i]
		r.Rate, r.Ratio = stat.Of(r.rates), stat.Of(stat.Ratios(r.rates, g.Rows[0].rates))
		r.Gateway, r.Database, r.Others, r.Busy = stat.Of(r.gateways), stat.Of(r.databases), stat.Of(r.others), stat.Of(r.busy)
		r.Middle, r.Tail = stat.Of(r.middles), stat.Of(r.tails)
	}
	return g, nil
}

// round starts a fleet, measures it, and stops it.
func (f *fleets) round(ctx context.Context, r *GatewaysRow) (err error) {
	var all []*gateway.Gateway
	defer func() {
		for _, g := range all {
			err = errors.Join(err, g.Proc().Stop())
		}
	}()
	for n := range r.Nodes {
		g, err := gateway.New(filepath.Join(f.dir, fmt.Sprintf("%d-%d", r.Nodes, n)), "agent_proxy "+f.upstream, true)
		if err != nil {
			return err
		}
		g.Shared = fmt.Sprintf("postgres {\n\t\tdsn {env.BENCH_DSN}\n\t\tnode n%d\n\t\tschema fleet_%d\n\t}", n, r.Nodes)
		g.Options, g.Env = "\t\tkeys value "+fleetKeys, []string{"BENCH_DSN=" + f.server.DSN()}
		if err := g.Start(); err != nil {
			return err
		}
		all = append(all, g)
	}
	if _, err := f.load(ctx, all, f.Round/4); err != nil { // new processes are slower
		return err
	}
	before, err := f.work(all)
	if err != nil {
		return err
	}
	begun := time.Now()
	results, err := f.load(ctx, all, f.Round)
	if err != nil {
		return err
	}
	took := time.Since(begun)
	after, err := f.work(all)
	if err != nil {
		return err
	}
	calls, rate := 0, 0.0
	var latencies []time.Duration
	for _, one := range results {
		calls += one.Requests
		rate += one.Rate()
		latencies = append(latencies, one.Latencies...)
	}
	each := func(i int) float64 { return float64((after[i] - before[i]).Microseconds()) / float64(max(calls, 1)) }
	r.rates = append(r.rates, rate)
	r.gateways, r.databases, r.others = append(r.gateways, each(0)), append(r.databases, each(1)), append(r.others, each(2))
	r.busy = append(r.busy, (each(0)+each(1)+each(2))*float64(calls)/float64(took.Microseconds())/float64(runtime.NumCPU()))
	r.middles = append(r.middles, stat.Percentile(latencies, 50).Seconds()*1000)
	r.tails = append(r.tails, stat.Percentile(latencies, 99).Seconds()*1000)
	return nil
}

// work is the processor time so far: of the gateways, of the database, and of clients and upstream.
func (f *fleets) work(all []*gateway.Gateway) (sum [3]time.Duration, err error) {
	for _, g := range all {
		u, err := proc.UsageOf(g.Proc().Pid())
		if err != nil {
			return sum, err
		}
		sum[0] += u.Work
	}
	if sum[1], err = proc.FamilyWork(f.server.Pid()); err != nil {
		return sum, err
	}
	for _, pid := range []int{os.Getpid(), f.behind.Pid()} {
		u, err := proc.UsageOf(pid)
		if err != nil {
			return sum, err
		}
		sum[2] += u.Work
	}
	return sum, nil
}

// load has clients call all gateways at the same time.
func (f *fleets) load(ctx context.Context, all []*gateway.Gateway, length time.Duration) ([]load.Result, error) {
	results, failures := make([]load.Result, len(all)), make([]error, len(all))
	var loads sync.WaitGroup
	for i, g := range all {
		loads.Go(func() {
			request := load.Payment(200)
			request.Keys = load.Fresh
			results[i], failures[i] = load.Run(ctx, load.Job{
				Addr: g.Addr, Request: request, Conns: f.Conns / len(all), For: length, Status: 200, Line: "Execution-Status: executed",
			})
		})
	}
	loads.Wait()
	return results, errors.Join(failures...)
}

func (g *Gateways) cells() [][]string {
	rows := [][]string{{"gateways", "calls/s", "ratio to the first", "low", "high", "gateways, µs", "database, µs", "clients and upstream, µs", "processors used", "p50 ms", "p99 ms"}}
	for i := range g.Rows {
		r := &g.Rows[i]
		rows = append(rows, []string{
			fmt.Sprint(r.Nodes), fmt.Sprint(math.Round(r.Rate.Median)),
			fmt.Sprintf("%.2f", r.Ratio.Median), fmt.Sprintf("%.2f", r.Ratio.Low), fmt.Sprintf("%.2f", r.Ratio.High),
			fmt.Sprint(math.Round(r.Gateway.Median)), fmt.Sprint(math.Round(r.Database.Median)), fmt.Sprint(math.Round(r.Others.Median)),
			fmt.Sprintf("%.0f %%", 100*r.Busy.Median), fmt.Sprintf("%.1f", r.Middle.Median), fmt.Sprintf("%.1f", r.Tail.Median),
		})
	}
	return rows
}

// Text prints the measurements for people.
func (g *Gateways) Text(w io.Writer) error {
	fmt.Fprintln(w, machineLine(g.Machine))
	return aligned(w, g.cells())
}

// Markdown prints them as a table.
func (g *Gateways) Markdown(w io.Writer) error { return table.Markdown(w, g.cells()) }
