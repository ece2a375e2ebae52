package table

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/load"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
)

// Run measures the table. progress is told what is under way.
func Run(ctx context.Context, o Options, progress func(string)) (*Report, error) {
	report := &Report{Settings: settings(o)}
	machine, err := each(ctx, o, rows, progress, func(s *scene, r *row) error {
		m, err := measure(ctx, o, s, r, []program{{}})
		if err != nil {
			return err
		}
		report.add(r, m)
		if r.few {
			sync, err := syncTime(o.Dir, syncSamples*syncAppend)
			if err != nil {
				return err
			}
			report.added(r, m, sync)
		}
		return nil
	})
	report.Machine = machine
	if err != nil {
		return nil, err
	}
	return report, nil
}

// each does something for every row of all that o asks for, in one scene.
func each(ctx context.Context, o Options, all []row, progress func(string), do func(*scene, *row) error) (machine Machine, err error) {
	if err := o.check(); err != nil {
		return machine, err
	}
	wanted, err := regexp.Compile(o.Rows)
	if err != nil {
		return machine, fmt.Errorf("rows: %w", err)
	}
	if machine, err = Look(o.Dir); err != nil {
		return machine, err
	}
	before := soFar()
	s, err := newScene(o)
	if err != nil {
		return machine, err
	}
	defer func() {
		if closing := s.close(); err == nil {
			err = closing
		}
		// Processes count once they have ended.
		machine.Others = others(before, soFar(), machine.Cores)
	}()
	machine.Device = s.device != nil
	done := 0
	for i := range all {
		r := &all[i]
		if !wanted.MatchString(r.title()) || r.sustained && o.Sustained == 0 {
			continue
		}
		done++
		progress(r.title() + " against " + string(r.reference))
		if err := do(s, r); err != nil {
			return machine, fmt.Errorf("%s: %w", r.title(), err)
		}
		if err := ctx.Err(); err != nil {
			return machine, err
		}
	}
	if done == 0 {
		return machine, fmt.Errorf("no row matches %q", o.Rows)
	}
	return machine, nil
}

// measured is what came of a row: what it is compared with, and one subject of each
// program.
type measured struct {
	reference *side
	subjects  []*side
	// idle is how many bytes a second reached the device while a sustained row's
	// reference ran, which writes none.
	idle      float64
	idleKnown bool
}

// side is one of those that a row compares.
type side struct {
	place  place
	server *server
	job    load.Job
	caller *caller // where each call has a token
	// before and after are the gateway's counters around all rounds, of rows with syncs.
	before, after gateway.Stats
	outcome
}

// outcome is what the rounds of a side brought.
type outcome struct {
	rates, middles, tails []float64
	spent                 spent
}

func (s *scene) side(o Options, r *row, of kind, at spot, line string) (*side, error) {
	serve := s.serve
	if r.sustained && sites[at.place].guarded {
		serve = s.fresh
	}
	one, err := serve(at)
	if err != nil {
		return nil, err
	}
	made := &side{place: at.place, server: one, job: load.Job{
		Addr: one.addr, Request: of.request(recorded, s.keys), Conns: r.conns, For: o.Round, Limit: o.Limit, Status: of.status(), Line: line, First: of == streamed,
	}}
	if r.kind == signed {
		made.caller = s.callers[sites[r.subject].algorithm]
	}
	return made, nil
}

// tokensPerSecond bounds the calls with tokens of a round, because all are signed
// before its clock starts. A round that has made them is over.
const tokensPerSecond = 30_000

// round makes one round of the side's job.
func (s *side) round(ctx context.Context) error {
	job := s.job
	if s.caller != nil {
		most := max(int(job.For.Seconds()*tokensPerSecond), 1)
		if job.Least > 0 { // of a load that lasts, somewhat more than it has been seen to make
			most = max(job.Least, int(1.5*job.For.Seconds()*stat.Median(s.rates)))
		}
		if job.Limit == 0 || job.Limit > most {
			job.Limit = most
		}
		// One for each connection is used before the clock starts, one is measured. Who
		// does not verify them may get them again.
		n := job.Limit + 2*job.Conns
		if !sites[s.place].trust {
			n = min(n, callsOfWorkflow)
		}
		all, err := s.caller.tokens(n)
		if err != nil {
			return err
		}
		job.Request.Keys = all.append
	}
	before, err := s.server.read(ctx)
	if err != nil {
		return err
	}
	result, err := load.Run(ctx, job)
	if err != nil {
		return err
	}
	after, err := s.server.read(ctx)
	if err != nil {
		return err
	}
	// Each connection makes a call before the clock starts.
	s.spent.add(before, after, result.Requests+job.Conns)
	s.rates = append(s.rates, result.Rate())
	s.middles = append(s.middles, float64(stat.Percentile(result.Latencies, 50)))
	s.tails = append(s.tails, float64(stat.Percentile(result.Latencies, 99)))
	return nil
}

// warm makes a round that does not count: what is cold gets warm.
func (s *side) warm(ctx context.Context) error {
	err := s.round(ctx)
	s.outcome = outcome{rates: s.rates}
	return err
}

// measure takes a row: its reference beside a subject of each program.
func measure(ctx context.Context, o Options, s *scene, r *row, programs []program) (*measured, error) {
	m := &measured{}
	for _, p := range programs {
		subject, err := s.side(o, r, r.kind, spot{r.subject, p}, r.proof())
		if err != nil {
			return nil, err
		}
		m.subjects = append(m.subjects, subject)
	}
	var err error
	if m.reference, err = s.side(o, r, cmp.Or(r.against, r.kind), spot{place: r.reference}, ""); err != nil {
		return nil, err
	}
	for _, subject := range m.subjects {
		if err := s.prepare(ctx, r, subject); err != nil {
			return nil, err
		}
	}
	for _, side := range append([]*side{m.reference}, m.subjects...) {
		if err := side.warm(ctx); err != nil {
			return nil, err
		}
	}
	if r.sustained {
		return m, m.sustain(ctx, o, s)
	}
	return m, m.alternate(ctx, o, r)
}

// prepare makes the calls that a row replays: all others are not executed.
func (s *scene) prepare(ctx context.Context, r *row, subject *side) error {
	switch r.kind {
	case failed:
		once := subject.job
		once.Limit, once.For, once.Line = once.Conns, time.Minute, ""
		_, err := load.Run(ctx, once)
		return err
	case replay:
		once := subject.job
		once.Conns, once.Limit, once.For, once.Line = 1, 1, time.Minute, ""
		_, err := load.Run(ctx, once)
		return err
	case replays:
		return s.fill(ctx, subject.server)
	default:
		return nil
	}
}

// alternate takes rounds of all sides in turn, and who begins changes each time: what
// happens to the machine happens to all.
func (m *measured) alternate(ctx context.Context, o Options, r *row) error {
	sides := append(append([]*side{}, m.subjects...), m.reference)
	for _, side := range sides {
		side.outcome = outcome{}
		if err := side.count(ctx, r, &side.before); err != nil {
			return err
		}
	}
	for n := range o.Rounds {
		for i := range sides {
			if err := sides[(n+i)%len(sides)].round(ctx); err != nil {
				return err
			}
		}
	}
	for _, side := range sides {
		if err := side.count(ctx, r, &side.after); err != nil {
			return err
		}
	}
	return nil
}

// sustain has every subject work without a pause, between two rounds of the reference.
func (m *measured) sustain(ctx context.Context, o Options, s *scene) error {
	m.reference.outcome, m.reference.job.For, m.reference.job.Limit = outcome{}, o.leastRound(), 0
	rest := func() error {
		begin := time.Now()
		bytes, known, err := s.onDevice(func() error { return m.reference.round(ctx) })
		m.idle, m.idleKnown = float64(bytes)/time.Since(begin).Seconds(), known
		return err
	}
	if err := rest(); err != nil {
		return err
	}
	for _, subject := range m.subjects {
		seen := subject.rates // by which tokens are signed
		subject.outcome = outcome{rates: seen}
		subject.job.For, subject.job.Least, subject.job.Limit = o.Sustained, o.SustainedCalls, 0
		bytes, known, err := s.onDevice(func() error { return subject.round(ctx) })
		if err != nil {
			return err
		}
		subject.rates = subject.rates[len(seen):]
		subject.spent.device, subject.spent.deviceKnown = bytes, known
		// One load, held against both rounds of the reference.
		subject.rates = append(subject.rates, subject.rates[0])
		subject.tails = append(subject.tails, subject.tails[0])
		subject.spent.works = append(subject.spent.works, subject.spent.works[0])
	}
	return rest()
}

// count reads the gateway's counters, where the row needs them.
func (s *side) count(ctx context.Context, r *row, into *gateway.Stats) (err error) {
	if r.syncs && s.server.gateway != nil {
		*into, err = s.server.gateway.Stats(ctx)
	}
	return err
}
