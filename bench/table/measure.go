package table

import (
	"context"
	"fmt"
	"regexp"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/bench/proc"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
)

// Run measures the table. progress is told what is under way.
func Run(ctx context.Context, o Options, progress func(string)) (_ *Report, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	wanted, err := regexp.Compile(o.Rows)
	if err != nil {
		return nil, fmt.Errorf("rows: %w", err)
	}
	report := &Report{Settings: settings(o)}
	if report.Machine, err = Look(o.Dir); err != nil {
		return nil, err
	}
	before := soFar()
	s, err := newScene(o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if closing := s.close(); err == nil {
			err = closing
		}
		// Processes count once they have ended.
		report.Machine.Others = others(before, soFar(), report.Machine.Cores)
	}()
	for i := range rows {
		name := fmt.Sprintf("%s @%d", rows[i].name, rows[i].conns)
		if !wanted.MatchString(name) {
			continue
		}
		progress(name + " against " + string(rows[i].reference))
		if err := measure(ctx, o, s, &rows[i], report); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	if len(report.Rows) == 0 {
		return nil, fmt.Errorf("no row matches %q", o.Rows)
	}
	return report, nil
}

// side is one of the two that a row compares.
type side struct {
	place  place
	job    load.Job
	caller *caller // where each call has a token
	rates  []float64
	tails  []float64
	drains []float64
	calls  int
	// gateway is the process whose work is reported; nil where it is not, or cannot be.
	gateway *proc.Proc
	work    time.Duration
}

func newSide(o Options, s *scene, r *row, p place, line string) (*side, error) {
	addr, err := s.addr(p)
	if err != nil {
		return nil, err
	}
	made := &side{place: p, job: load.Job{
		Addr: addr, Request: r.request(), Conns: r.conns, For: o.Round, Limit: o.Limit, Status: 200, Line: line,
	}}
	if sites[p].ledger {
		made.job.Drain = s.gateways[p].Drain
	}
	if g := s.gateways[p]; g != nil && proc.Measures && (sites[r.subject].ledger || r.syncs) {
		made.gateway = g.Proc()
	}
	if r.kind == signed {
		made.caller = s.caller
		most := max(int(o.Round.Seconds()*tokensPerSecond), 1)
		if o.Limit == 0 || o.Limit > most {
			made.job.Limit = most
		}
	}
	return made, nil
}

// tokensPerSecond bounds the calls with tokens of a round, because all are signed
// before its clock starts. A round that has made them is over.
const tokensPerSecond = 30_000

func (s *side) round(ctx context.Context) error {
	if s.caller != nil {
		// One for each connection is used before the clock starts, one is measured.
		all, err := s.caller.tokens(s.job.Limit + 2*s.job.Conns)
		if err != nil {
			return err
		}
		s.job.Request.Keys = all.append
	}
	before, err := s.used()
	if err != nil {
		return err
	}
	result, err := load.Run(ctx, s.job)
	if err != nil {
		return err
	}
	after, err := s.used()
	if err != nil {
		return err
	}
	s.work += after - before
	s.rates = append(s.rates, result.Rate())
	s.tails = append(s.tails, float64(stat.Percentile(result.Latencies, 99)))
	s.drains = append(s.drains, float64(result.Draining))
	s.calls += result.Requests
	return nil
}

// used is the processor time of the gateway so far.
func (s *side) used() (time.Duration, error) {
	if s.gateway == nil {
		return 0, nil
	}
	u, err := proc.UsageOf(s.gateway.Pid())
	return u.Work, err
}

// measure takes rounds of the two sides in turn, and who begins changes each time:
// what happens to the machine happens to both.
func measure(ctx context.Context, o Options, s *scene, r *row, report *Report) error {
	subject, err := newSide(o, s, r, r.subject, r.proof())
	if err != nil {
		return err
	}
	reference, err := newSide(o, s, r, r.reference, "")
	if err != nil {
		return err
	}
	if r.kind == replay {
		// The first call is executed, all others are not.
		once := subject.job
		once.Conns, once.Limit, once.For, once.Line = 1, 1, time.Minute, ""
		if _, err := load.Run(ctx, once); err != nil {
			return err
		}
	}
	for _, side := range []*side{subject, reference} { // what is cold gets warm
		if err := side.round(ctx); err != nil {
			return err
		}
		side.rates, side.tails, side.drains, side.calls, side.work = nil, nil, nil, 0, 0
	}
	before, err := s.stats(ctx, r)
	if err != nil {
		return err
	}
	for n := range o.Rounds {
		first, second := subject, reference
		if n%2 == 1 {
			first, second = second, first
		}
		if err := first.round(ctx); err != nil {
			return err
		}
		if err := second.round(ctx); err != nil {
			return err
		}
	}
	after, err := s.stats(ctx, r)
	if err != nil {
		return err
	}
	report.add(r, subject, reference)
	if r.syncs {
		report.syncs(r, before[0], after[0])
		for i, side := range []*side{subject, reference} {
			report.collections(r, side, after[i].GCs-before[i].GCs)
		}
	}
	return nil
}

// stats are those of both sides, where the row needs them.
func (s *scene) stats(ctx context.Context, r *row) (both [2]gateway.Stats, err error) {
	if !r.syncs {
		return both, nil
	}
	for i, p := range []place{r.subject, r.reference} {
		if both[i], err = s.gateways[p].Stats(ctx); err != nil {
			return both, err
		}
	}
	return both, nil
}
