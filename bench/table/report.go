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
}

func settings(o Options) Settings {
	return Settings{Go: runtime.Version(), GOGC: o.GOGC, GOMEMLIMIT: o.GOMEMLIMIT, Rounds: o.Rounds, Round: o.Round}
}

// Row is one measured ratio.
type Row struct {
	Name      string `json:"name"`
	Conns     int    `json:"conns"`
	Subject   string `json:"subject"`
	Reference string `json:"reference"`
	// Of is what the ratio is one of: requests per second, or 99th percentiles.
	Of    string      `json:"of"`
	Ratio stat.Spread `json:"ratio"`
	// The medians of both sides: requests per second, or milliseconds.
	SubjectValue   float64 `json:"subject_value"`
	ReferenceValue float64 `json:"reference_value"`
	Verdict        Verdict `json:"verdict"`
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

func (r *Report) add(row *row, subject, reference *side) {
	line := Row{
		Name: row.name, Conns: row.conns, Subject: string(subject.place), Reference: string(reference.place),
		Of:             "req/s",
		Ratio:          stat.Of(stat.Ratios(subject.rates, reference.rates)),
		SubjectValue:   stat.Median(subject.rates),
		ReferenceValue: stat.Median(reference.rates),
	}
	line.Verdict = AtLeast(line.Ratio.Median, row.bar)
	r.Rows = append(r.Rows, line)
	r.draining(row, subject)
	r.work(row, subject)
	r.work(row, reference)
	if row.tail == 0 {
		return
	}
	line.Of = "p99 ms"
	line.Ratio = stat.Of(stat.Ratios(subject.tails, reference.tails))
	line.SubjectValue = stat.Median(subject.tails) / float64(time.Millisecond)
	line.ReferenceValue = stat.Median(reference.tails) / float64(time.Millisecond)
	line.Verdict = AtMost(line.Ratio.Median, row.tail)
	r.Rows = append(r.Rows, line)
}

// draining reports how long a round waited for the sequencer.
func (r *Report) draining(row *row, s *side) {
	if s.job.Drain == nil {
		return
	}
	r.Figures = append(r.Figures, Figure{
		Name:  fmt.Sprintf("ledger's backlog moved after the last answer @%d, %s", row.conns, s.place),
		Value: stat.Median(s.drains) / float64(time.Millisecond), Unit: "ms of a round",
	})
}

// work reports what a call cost a gateway's process: unlike the ratio, that says nearly
// the same on a machine that has others to serve.
func (r *Report) work(row *row, s *side) {
	if s.gateway == nil {
		return
	}
	// Each connection makes a call before the clock starts.
	calls := s.calls + len(s.rates)*s.job.Conns
	r.Figures = append(r.Figures, Figure{
		Name:  fmt.Sprintf("processor time of %s, %s @%d", s.place, row.name, row.conns),
		Value: s.work.Seconds() * 1e6 / float64(calls), Unit: "µs per call",
	})
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
	r.Figures = append(r.Figures,
		Figure{
			Name:  fmt.Sprintf("records per sync of the log @%d", row.conns),
			Value: records / commits, Verdict: AtLeast(records/commits, minRecordsPerSync),
		},
		Figure{
			Name:  fmt.Sprintf("records per sync, those of the bodies' files too @%d", row.conns),
			Value: records / (commits + bulk),
		})
}

// collections reports how often a side collected garbage: with one GOGC, who has the
// larger heap does so less often, and is the faster for it.
func (r *Report) collections(row *row, s *side, n int64) {
	r.Figures = append(r.Figures, Figure{
		Name:  fmt.Sprintf("garbage collections @%d, %s", row.conns, s.place),
		Value: 1000 * float64(n) / float64(s.calls), Unit: "per 1000 requests",
	})
}
