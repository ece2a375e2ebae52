package table

import (
	"fmt"
	"runtime"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/gateway"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
)

// minRecordsPerSync is the bar of group commit at 64 connections.
const minRecordsPerSync = 12

// Report is the measured table.
type Report struct {
	Machine  Machine  `json:"machine"`
	Settings Settings `json:"settings"`
	Rows     []Row    `json:"rows"`
	Figures  []Figure `json:"figures"`
}

// Settings is what was the same for everyone.
type Settings struct {
	Go         string        `json:"go"`
	GOGC       string        `json:"gogc"`
	GOMEMLIMIT string        `json:"gomemlimit"`
	Rounds     int           `json:"rounds"`
	Round      time.Duration `json:"round"`
	// Sustained is how long sustained load lasts, SustainedCalls how many calls it has at
	// least, Keys of how many calls replays of many keys are.
	Sustained      time.Duration `json:"sustained"`
	SustainedCalls int           `json:"sustained_calls"`
	Keys           int           `json:"keys"`
}

func settings(o Options) Settings {
	return Settings{
		Go: runtime.Version(), GOGC: o.GOGC, GOMEMLIMIT: o.GOMEMLIMIT, Rounds: o.Rounds, Round: o.Round,
		Sustained: o.Sustained, SustainedCalls: o.SustainedCalls, Keys: o.Keys,
	}
}

// Row is one measured ratio.
type Row struct {
	Name      string `json:"name"`
	Conns     int    `json:"conns"`
	Subject   string `json:"subject"`
	Reference string `json:"reference"`
	// Of is what the ratio is one of: requests per second, 99th percentiles, or the
	// processor time of a call.
	Of    string      `json:"of"`
	Ratio stat.Spread `json:"ratio"`
	// The medians of both sides: requests per second, milliseconds, or microseconds.
	SubjectValue   float64 `json:"subject_value"`
	ReferenceValue float64 `json:"reference_value"`
	Verdict        Verdict `json:"verdict"`
	// What the calls cost both sides, with the ratio of requests per second only.
	SubjectCost   *Cost `json:"subject_cost,omitempty"`
	ReferenceCost *Cost `json:"reference_cost,omitempty"`
}

// Figure is one measured value that is no ratio.
type Figure struct {
	Name    string  `json:"name"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	Verdict Verdict `json:"verdict"`
}

// Verdict holds a value against its bar.
type Verdict struct {
	// Bar is the bar as it is written, empty where there is none.
	Bar string `json:"bar,omitempty"`
	// Below says that the bar was not reached.
	Below bool `json:"below,omitempty"`
}

// AtLeast holds value against a lower bound; 0 is none.
func AtLeast(value, bar float64) Verdict {
	if bar == 0 {
		return Verdict{}
	}
	return Verdict{Bar: fmt.Sprintf(">= %.4g", bar), Below: value < bar}
}

// AtMost holds value against an upper bound; 0 is none.
func AtMost(value, bar float64) Verdict {
	if bar == 0 {
		return Verdict{}
	}
	return Verdict{Bar: fmt.Sprintf("<= %.4g", bar), Below: value > bar}
}

// String is a word for it.
func (v Verdict) String() string {
	switch {
	case v.Bar == "":
		return ""
	case v.Below:
		return "BELOW"
	default:
		return "ok"
	}
}

// Below is the number of bars that were not reached.
func (r *Report) Below() int {
	n := 0
	for _, row := range r.Rows {
		if row.Verdict.Below {
			n++
		}
	}
	for _, f := range r.Figures {
		if f.Verdict.Below {
			n++
		}
	}
	return n
}

func (r *Report) add(row *row, m *measured) {
	subject, reference := m.subjects[0], m.reference
	costs := [2]Cost{subject.spent.cost(), reference.spent.cost()}
	line := Row{
		Name: row.name, Conns: row.conns, Subject: string(subject.place), Reference: string(reference.place),
	}
	add := func(of string, subjects, references []float64, unit float64, verdict func(value float64) Verdict) *Row {
		line.Of = of
		line.Ratio = stat.Of(stat.Ratios(subjects, references))
		line.SubjectValue, line.ReferenceValue = stat.Median(subjects)/unit, stat.Median(references)/unit
		line.Verdict = verdict(line.Ratio.Median)
		r.Rows = append(r.Rows, line)
		return &r.Rows[len(r.Rows)-1]
	}
	first := add("req/s", subject.rates, reference.rates, 1, func(v float64) Verdict { return AtLeast(v, row.bar) })
	first.SubjectCost, first.ReferenceCost = &costs[0], &costs[1]
	if row.work > 0 && costs[0].Work != nil && costs[1].Work != nil {
		add("cpu µs", subject.spent.works, reference.spent.works, 1, func(v float64) Verdict { return AtMost(v, row.work) })
	}
	if row.tail > 0 {
		add("p99 ms", subject.tails, reference.tails, float64(time.Millisecond), func(v float64) Verdict { return AtMost(v, row.tail) })
	}
	if row.first > 0 {
		later := (stat.Median(subject.middles) - stat.Median(reference.middles)) / float64(time.Millisecond)
		r.figure(row.title()+": later than from "+line.Reference, later, "ms", AtMost(later, row.first))
	}
	if row.sustained {
		r.sustained(row, m, costs[0])
	}
	if row.syncs {
		r.syncs(row, subject.before, subject.after)
		r.collections(row, subject, costs[0])
		r.collections(row, reference, costs[1])
	}
}

func (r *Report) figure(name string, value float64, unit string, v Verdict) {
	r.Figures = append(r.Figures, Figure{Name: name, Value: value, Unit: unit, Verdict: v})
}

const mebi = 1 << 20

// sustained reports what load that lasts leaves behind.
func (r *Report) sustained(row *row, m *measured, cost Cost) {
	r.figure(row.title()+": calls", float64(cost.Calls), "", Verdict{})
	if cost.Memory != nil {
		memory := *cost.Memory / mebi
		r.figure(row.title()+": anonymous memory at the end", memory, "MiB", AtMost(memory, row.memory))
	}
	if cost.Device == nil {
		return
	}
	r.figure(row.title()+fmt.Sprintf(": bytes to the device, others' too, payload of %d B", payload), *cost.Device, "B per call",
		AtMost(*cost.Device, row.written*payload))
	if m.idleKnown {
		r.figure(row.title()+": the same while the reference ran, which writes nothing", m.idle/1e3, "kB/s", Verdict{})
	}
}

// syncs reports how many records shared a sync. A call is two records: its claim
// and its outcome.
func (r *Report) syncs(row *row, before, after gateway.Stats) {
	records := float64(after.Store.Batches - before.Store.Batches)
	commits := float64(after.Store.Commits - before.Store.Commits)
	bulk := float64(after.Store.BulkSyncs - before.Store.BulkSyncs)
	if commits == 0 {
		return
	}
	r.figure(row.title()+": records per sync of the log", records/commits, "", AtLeast(records/commits, minRecordsPerSync))
	r.figure(row.title()+": records per sync, those of the bodies' files too", records/(commits+bulk), "", Verdict{})
}

// added reports what the guard adds to the time of a call, in syncs.
func (r *Report) added(row *row, m *measured, sync time.Duration) {
	guarded, alone := stat.Median(m.subjects[0].middles), stat.Median(m.reference.middles)
	most := row.added
	if most > 0 {
		most += addedShare * alone / float64(sync)
	}
	r.figure(row.title()+": added to the middle of a bare call's times", (guarded-alone)/float64(sync),
		fmt.Sprintf("syncs of %s", sync.Round(time.Microsecond)), AtMost((guarded-alone)/float64(sync), most))
}

// collections reports how often a side collected garbage: with one GOGC, who has the
// larger heap does so less often, and is the faster for it.
func (r *Report) collections(row *row, s *side, cost Cost) {
	if cost.Collections != nil {
		r.figure(fmt.Sprintf("%s: garbage collections of %s", row.title(), s.place), *cost.Collections, "per 1000 requests", Verdict{})
	}
}
