package records

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
	"github.com/agent-guard/caddy-agent-guard/bench/table"
	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
)

// The bars, for a million records of 1.5 KB.
const (
	maxOpening = 0.2 // seconds
	maxMemory  = 60  // MiB of anonymous memory over a bare gateway
)

// Options say what to measure, and where.
type Options struct {
	// Records in the store.
	Records int
	// Calls that each gateway has served when its memory is read.
	Calls int
	// Openings is how often the store is opened.
	Openings int
	// Dir is a directory on the file system to measure.
	Dir string
	// GOGC and GOMEMLIMIT are those of every process.
	GOGC, GOMEMLIMIT string
}

// Default is what the bars are of.
var Default = Options{Records: 1_000_000, Calls: 50_000, Openings: 5, GOGC: "100", GOMEMLIMIT: "off"}

func (o Options) check() error {
	if o.Records < 1 || o.Calls < 1 || o.Openings < 1 {
		return errors.New("records, calls and openings: at least 1 of each")
	}
	return nil
}

// run is one measurement.
type run struct {
	Options
	dir      string
	env      []string
	upstream *proc.Proc
	report   *table.Report
}

// Measure fills a store, opens it in fresh processes, and reads what gateways with
// and without it use. progress is told what is under way.
func Measure(ctx context.Context, o Options, progress func(string)) (_ *table.Report, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	r := &run{Options: o, env: []string{"GOGC=" + o.GOGC, "GOMEMLIMIT=" + o.GOMEMLIMIT}, report: &table.Report{
		Settings: table.Settings{Go: runtime.Version(), GOGC: o.GOGC, GOMEMLIMIT: o.GOMEMLIMIT},
	}}
	if r.report.Machine, err = table.Look(o.Dir); err != nil {
		return nil, err
	}
	if r.dir, err = os.MkdirTemp(o.Dir, "agb"); err != nil {
		return nil, err
	}
	defer func() {
		if removing := os.RemoveAll(r.dir); err == nil {
			err = removing
		}
	}()
	if r.upstream, err = proc.Start(proc.Spec{Role: upstream.Role, Env: r.env}); err != nil {
		return nil, err
	}
	defer r.upstream.Kill()
	full, err := gateway.New(filepath.Join(r.dir, "full"), "agent_proxy "+r.upstream.Word, true)
	if err != nil {
		return nil, err
	}
	progress(fmt.Sprintf("filling a store with %d records", o.Records))
	if err := r.fill(full); err != nil {
		return nil, err
	}
	progress("opening it")
	if err := r.open(full); err != nil {
		return nil, err
	}
	progress("memory of gateways")
	return r.report, r.memory(ctx, full)
}

func (r *run) figure(name string, value float64, unit string, v table.Verdict) {
	r.report.Figures = append(r.report.Figures, table.Figure{Name: name, Value: value, Unit: unit, Verdict: v})
}

func (r *run) fill(full *gateway.Gateway) error {
	took, err := timed(proc.Spec{Role: FillRole, Env: r.env, Within: fillBound, Args: []string{
		"-store", full.StorePath(), "-host", full.Addr, "-records", fmt.Sprint(r.Records),
	}})
	if err != nil {
		return err
	}
	size, err := proc.DiskUse(full.StorePath())
	if err != nil {
		return err
	}
	r.figure("records", float64(r.Records), "", table.Verdict{})
	r.figure("filled at, claim and outcome synced", float64(r.Records)/took.Seconds(), "executions/s", table.Verdict{})
	r.figure("size on disk", float64(size)/float64(r.Records), "B per record", table.Verdict{})
	return nil
}

func (r *run) open(full *gateway.Gateway) error {
	var all []float64
	for range r.Openings {
		took, err := timed(proc.Spec{Role: OpenRole, Env: r.env, Args: []string{"-store", full.StorePath()}})
		if err != nil {
			return err
		}
		all = append(all, took.Seconds())
	}
	opening := stat.Median(all)
	r.figure("opening store and guard in a fresh process", opening, "s", table.AtMost(opening, maxOpening))
	return nil
}

// timed runs a part to its end and returns the duration that it says.
func timed(s proc.Spec) (time.Duration, error) {
	p, err := proc.Start(s)
	if err != nil {
		return 0, err
	}
	<-p.Dead
	return time.ParseDuration(p.Word)
}

const mebi = 1 << 20

// memory reads what three gateways use after the same number of calls.
func (r *run) memory(ctx context.Context, full *gateway.Gateway) error {
	bare, err := gateway.New(filepath.Join(r.dir, "bare"), "reverse_proxy "+r.upstream.Word, false)
	if err != nil {
		return err
	}
	empty, err := gateway.New(filepath.Join(r.dir, "empty"), "agent_proxy "+r.upstream.Word, true)
	if err != nil {
		return err
	}
	var opened, used []float64 // anonymous memory of each, in MiB
	for _, g := range []struct {
		name string
		*gateway.Gateway
		line string
	}{
		{"bare reverse_proxy", bare, ""},
		{"guard, empty store", empty, "Execution-Status: executed"},
		{"guard, full store, replays", full, "Execution-Status: replayed"},
	} {
		before, after, err := r.use(ctx, g.Gateway, g.line)
		if err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
		opened, used = append(opened, before.anonymous()), append(used, after.anonymous())
		r.figure(g.name+": anonymous memory once it serves", before.anonymous(), "MiB", table.Verdict{})
		r.figure(fmt.Sprintf("%s: the same after %d calls", g.name, r.Calls), after.anonymous(), "MiB", table.Verdict{})
		r.figure(g.name+": of it Go's heap", float64(after.heap)/mebi, "MiB", table.Verdict{})
		r.figure(g.name+": resident with mapped files", float64(after.RSS)/mebi, "MiB", table.Verdict{})
	}
	over := opened[2] - opened[0]
	r.figure("anonymous memory, full store over bare, once it serves", over, "MiB", table.AtMost(over, maxMemory))
	over = used[2] - used[0]
	r.figure("anonymous memory, full store over bare, after calls", over, "MiB", table.AtMost(over, maxMemory))
	return nil
}

// usage is what a gateway uses at one moment.
type usage struct {
	proc.Usage
	heap int64
}

func (u usage) anonymous() float64 { return float64(u.RssAnon) / mebi }

func look(ctx context.Context, g *gateway.Gateway) (u usage, err error) {
	if u.Usage, err = proc.UsageOf(g.Proc().Pid()); err != nil {
		return u, err
	}
	stats, err := g.Stats(ctx)
	u.heap = stats.Heap
	return u, err
}

// use is what a gateway uses once it serves, and after its calls.
func (r *run) use(ctx context.Context, g *gateway.Gateway, line string) (before, after usage, err error) {
	g.Env = r.env
	if err := g.Start(); err != nil {
		return before, after, err
	}
	defer func() {
		if stopping := g.Proc().Stop(); err == nil {
			err = stopping
		}
	}()
	if before, err = look(ctx, g); err != nil {
		return before, after, err
	}
	payment := request(r.Records)
	if line != "Execution-Status: replayed" {
		payment.Keys = load.Fresh
	}
	if _, err := load.Run(ctx, load.Job{
		Addr: g.Addr, Request: payment, Conns: 64, For: 5 * time.Minute, Limit: r.Calls, Status: 200, Line: line,
	}); err != nil {
		return before, after, err
	}
	after, err = look(ctx, g)
	return before, after, err
}
