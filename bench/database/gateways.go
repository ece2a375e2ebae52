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
	// Clients is how many call each gateway, so that the load grows with the fleet; 0 shares Conns.
	Clients int
	// GatewayCPU is the share of a processor that each gateway has, and DatabaseCPU that of the database; 0 is no
	// limit. With both, a machine is several small ones, as long as it is not busy itself.
	GatewayCPU, DatabaseCPU float64
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
		if o.Clients == 0 && (o.Conns < n || o.Conns > 10_000) {
			return fmt.Errorf("conns: %d; at least one for each of %d gateways, at most 10000", o.Conns, n)
		}
	}
	for _, c := range []struct {
		name  string
		share float64
	}{{"gateway-cpu", o.GatewayCPU}, {"database-cpu", o.DatabaseCPU}} {
		if c.share == 0 {
			continue
		}
		if err := proc.CheckShare(c.share); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	switch {
	case o.Clients < 0 || o.Clients > 1000:
		return fmt.Errorf("clients: %d; from 0 to 1000 for each gateway", o.Clients)
	case o.Rounds < 1:
		return errors.New("rounds: at least 1")
	case o.Round < 50*time.Millisecond:
		return errors.New("round: at least 50ms")
	}
	return nil
}

// at is how many clients call each of so many gateways.
func (o *GatewaysOptions) at(nodes int) int {
	if o.Clients > 0 {
		return o.Clients
	}
	return o.Conns / nodes
}

// Gateways are the measurements of fleets.
type Gateways struct {
	Machine table.Machine `json:"machine"`
	// GatewayCPU and DatabaseCPU are the shares that were given; 0 is no limit.
	GatewayCPU  float64       `json:"gateway_cpu"`
	DatabaseCPU float64       `json:"database_cpu"`
	Rows        []GatewaysRow `json:"rows"`
}

// GatewaysRow is the one of a fleet.
type GatewaysRow struct {
	Nodes int `json:"nodes"`
	// Clients is how many called each gateway.
	Clients int `json:"clients"`
	// Rate is guarded calls a second, and Ratio the one to the first fleet, round by round.
	Rate  stat.Spread `json:"rate"`
	Ratio stat.Spread `json:"ratio"`
	// Linear is the ratio of the calls of one gateway: 1 where each new one brings as many as those of the first fleet.
	Linear stat.Spread `json:"linear"`
	// Gateway, Database and Others are the processor time of a call, in microseconds: of all gateways, of all
	// processes of the database, and of the clients and the upstream; zero where the system does not say.
	Gateway  stat.Spread `json:"gateway_us"`
	Database stat.Spread `json:"database_us"`
	Others   stat.Spread `json:"others_us"`
	// Busy is the part of the machine's processors that all of them used.
	Busy stat.Spread `json:"busy"`
	// Strangers is the part that whoever else runs there used.
	Strangers stat.Spread `json:"strangers"`
	// GatewayUsed and DatabaseUsed are the parts that were used of what the gateways and the database may, and
	// Throttled is the part of the periods in which the database had used up its own; zero without a limit.
	GatewayUsed  stat.Spread `json:"gateway_used"`
	DatabaseUsed stat.Spread `json:"database_used"`
	Throttled    stat.Spread `json:"database_throttled"`
	// Middle and Tail are the 50th and the 99th percentile of the time of a call, in milliseconds.
	Middle stat.Spread `json:"p50_ms"`
	Tail   stat.Spread `json:"p99_ms"`

	rates, gateways, databases, others, busy, strangers, middles, tails []float64
	gatewayUsed, databaseUsed, throttled                                []float64
}

// fleetKeys is the ring of all gateways.
const fleetKeys = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

// fleets is what all measurements share.
type fleets struct {
	GatewaysOptions
	dir, upstream string
	server        *pgserver.Server
	behind        *proc.Proc
	quotas        *quotas
}

// MeasureGateways has clients call fleets of several sizes, each on a schema of its own in one database. Fleets are
// started for a round and stopped after it, so that those that wait use nothing.
func MeasureGateways(ctx context.Context, o GatewaysOptions, progress func(string)) (_ *Gateways, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	g := &Gateways{GatewayCPU: o.GatewayCPU, DatabaseCPU: o.DatabaseCPU}
	if g.Machine, err = table.Look(serversDir); err != nil {
		return nil, err
	}
	f := &fleets{GatewaysOptions: o}
	if f.quotas, err = newQuotas(&o); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.quotas.remove()) }() // when all processes have ended
	if f.dir, err = os.MkdirTemp("", "agb"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(f.dir)) }()
	if f.server, err = pgserver.Start(append([]string{"max_connections=400"}, durable...)...); err != nil { // the largest fleet has 16 pools
		return nil, err
	}
	defer func() { err = errors.Join(err, f.server.Remove()) }()
	if err := f.quotas.limitDatabase(f.server.Pid()); err != nil {
		return nil, err
	}
	if f.behind, err = proc.Start(proc.Spec{Role: upstream.Role}); err != nil {
		return nil, err
	}
	defer f.behind.Kill()
	f.upstream = f.behind.Word
	for _, n := range o.Nodes {
		g.Rows = append(g.Rows, GatewaysRow{Nodes: n, Clients: o.at(n)})
	}
	for round := range o.Rounds + 1 { // the first one makes the tables and warms up
		for i := range g.Rows {
			r := &g.Rows[(i+round)%len(g.Rows)] // which of them comes first changes, too
			progress(fmt.Sprintf("round %d of %d: %d gateways", round, o.Rounds, r.Nodes))
			if err := f.round(ctx, r); err != nil {
				return nil, fmt.Errorf("%d gateways: %w", r.Nodes, err)
			}
			if round == 0 {
				*r = GatewaysRow{Nodes: r.Nodes, Clients: r.Clients}
			}
		}
	}
	for i := range g.Rows {
		r := &g.Rows[i]
		ratios := stat.Ratios(r.rates, g.Rows[0].rates)
		r.Rate, r.Ratio = stat.Of(r.rates), stat.Of(ratios)
		for i := range ratios {
			ratios[i] *= float64(g.Rows[0].Nodes) / float64(r.Nodes)
		}
		r.Linear, r.Strangers = stat.Of(ratios), stat.Of(r.strangers)
		r.GatewayUsed, r.DatabaseUsed, r.Throttled = stat.Of(r.gatewayUsed), stat.Of(r.databaseUsed), stat.Of(r.throttled)
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
		if f.GatewayCPU > 0 { // a machine with so many has as many threads
			g.Env = append(g.Env, fmt.Sprintf("GOMAXPROCS=%.0f", math.Ceil(f.GatewayCPU)))
		}
		if err := g.Start(); err != nil {
			return err
		}
		all = append(all, g)
	}
	for n, g := range all { // now that they have started, which would take long
		if err := f.quotas.limitGateway(n, g.Proc().Pid()); err != nil {
			return err
		}
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
	spent := after.minus(before)
	calls, rate := 0, 0.0
	var latencies []time.Duration
	for _, one := range results {
		calls += one.Requests
		rate += one.Rate()
		latencies = append(latencies, one.Latencies...)
	}
	each := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(max(calls, 1)) }
	of := func(d time.Duration, processors float64) float64 { return d.Seconds() / took.Seconds() / processors }
	cores, ours := float64(runtime.NumCPU()), spent.gateways+spent.database+spent.others
	r.rates = append(r.rates, rate)
	r.gateways, r.databases, r.others = append(r.gateways, each(spent.gateways)), append(r.databases, each(spent.database)), append(r.others, each(spent.others))
	r.busy, r.strangers = append(r.busy, of(ours, cores)), append(r.strangers, max(0, of(spent.machine-ours, cores)))
	if f.GatewayCPU > 0 {
		r.gatewayUsed = append(r.gatewayUsed, of(spent.gateways, f.GatewayCPU*float64(r.Nodes)))
	}
	if f.DatabaseCPU > 0 {
		r.databaseUsed = append(r.databaseUsed, of(spent.database, f.DatabaseCPU))
		r.throttled = append(r.throttled, float64(spent.throttled.Throttled)/float64(max(spent.throttled.Periods, 1)))
	}
	r.middles = append(r.middles, stat.Percentile(latencies, 50).Seconds()*1000)
	r.tails = append(r.tails, stat.Percentile(latencies, 99).Seconds()*1000)
	return nil
}

// work is processor time: of the gateways, of the database, of clients and upstream, and of the whole machine.
type work struct {
	gateways, database, others, machine time.Duration
	throttled                           proc.Throttling // the database
}

func (w work) minus(b work) work {
	return work{
		w.gateways - b.gateways, w.database - b.database, w.others - b.others, w.machine - b.machine,
		proc.Throttling{Periods: w.throttled.Periods - b.throttled.Periods, Throttled: w.throttled.Throttled - b.throttled.Throttled},
	}
}

// work is the processor time so far.
func (f *fleets) work(all []*gateway.Gateway) (w work, err error) {
	for _, g := range all {
		u, err := proc.UsageOf(g.Proc().Pid())
		if err != nil {
			return w, err
		}
		w.gateways += u.Work
	}
	if w.database, err = proc.FamilyWork(f.server.Pid()); err != nil {
		return w, err
	}
	for _, pid := range []int{os.Getpid(), f.behind.Pid()} {
		u, err := proc.UsageOf(pid)
		if err != nil {
			return w, err
		}
		w.others += u.Work
	}
	if w.throttled, err = f.quotas.throttling(); err != nil {
		return w, err
	}
	w.machine, err = proc.MachineWork()
	return w, err
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
				Addr: g.Addr, Request: request, Conns: f.at(len(all)), For: length, Status: 200, Line: "Execution-Status: executed",
			})
			if failures[i] != nil {
				failures[i] = fmt.Errorf("%w, and the gateway wrote last:\n%s", failures[i], g.Proc().Tail())
			}
		})
	}
	loads.Wait()
	return results, errors.Join(failures...)
}

func (g *Gateways) cells() [][]string {
	titles := []string{"gateways", "clients each", "calls/s", "ratio to the first", "low", "high", "of linear", "gateways, µs", "database, µs",
		"clients and upstream, µs", "processors used", "by others", "p50 ms", "p99 ms"}
	if g.GatewayCPU > 0 {
		titles = append(titles, "gateways' share used")
	}
	if g.DatabaseCPU > 0 {
		titles = append(titles, "database's share used", "throttled")
	}
	rows := [][]string{titles}
	percent := func(s stat.Spread) string { return fmt.Sprintf("%.0f %%", 100*s.Median) }
	for i := range g.Rows {
		r := &g.Rows[i]
		cells := []string{
			fmt.Sprint(r.Nodes), fmt.Sprint(r.Clients), fmt.Sprint(math.Round(r.Rate.Median)),
			fmt.Sprintf("%.2f", r.Ratio.Median), fmt.Sprintf("%.2f", r.Ratio.Low), fmt.Sprintf("%.2f", r.Ratio.High), fmt.Sprintf("%.2f", r.Linear.Median),
			fmt.Sprint(math.Round(r.Gateway.Median)), fmt.Sprint(math.Round(r.Database.Median)), fmt.Sprint(math.Round(r.Others.Median)),
			percent(r.Busy), percent(r.Strangers), fmt.Sprintf("%.1f", r.Middle.Median), fmt.Sprintf("%.1f", r.Tail.Median),
		}
		if g.GatewayCPU > 0 {
			cells = append(cells, percent(r.GatewayUsed))
		}
		if g.DatabaseCPU > 0 {
			cells = append(cells, percent(r.DatabaseUsed), percent(r.Throttled))
		}
		rows = append(rows, cells)
	}
	return rows
}

// Text prints the measurements for people.
func (g *Gateways) Text(w io.Writer) error {
	fmt.Fprintln(w, machineLine(g.Machine))
	if g.GatewayCPU > 0 || g.DatabaseCPU > 0 {
		fmt.Fprintf(w, "Shares of a processor (0 is no limit): %v for each gateway, %v for the database.\n", g.GatewayCPU, g.DatabaseCPU)
	}
	return aligned(w, g.cells())
}

// Markdown prints them as a table.
func (g *Gateways) Markdown(w io.Writer) error { return table.Markdown(w, g.cells()) }
