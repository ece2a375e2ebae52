package table

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/agent-guard/caddy-agent-guard/bench/commit"
	"github.com/agent-guard/caddy-agent-guard/bench/stat"
)

// Comparison is two commits measured in one run.
type Comparison struct {
	Machine  Machine      `json:"machine"`
	Settings Settings     `json:"settings"`
	Old      commit.Build `json:"old"`
	New      commit.Build `json:"new"`
	Rows     []Compared   `json:"rows"`
}

// Compared is one row of both.
type Compared struct {
	Name      string `json:"name"`
	Conns     int    `json:"conns"`
	Reference string `json:"reference"`
	Old       Part   `json:"old"`
	New       Part   `json:"new"`
	// Rate is the new one's requests per second over those of the old one, pair by
	// pair, and Work the same of the processor time of a call, where that is known.
	Rate stat.Spread  `json:"rate"`
	Work *stat.Spread `json:"work,omitempty"`
}

// Part is one of two in a row: its requests per second over those of the reference, the
// median of them, and what calls cost.
type Part struct {
	Ratio stat.Spread `json:"ratio"`
	Value float64     `json:"value"`
	Cost  Cost        `json:"cost"`
}

// Compare measures the rows of the guard with two programs, whose rounds alternate with
// each other's and with those of the reference, which is this program's.
func Compare(ctx context.Context, o Options, before, after commit.Build, progress func(string)) (*Comparison, error) {
	c := &Comparison{Settings: settings(o), Old: before, New: after}
	var all []row
	for _, r := range rows {
		if sites[r.subject].guarded {
			all = append(all, r)
		}
	}
	programs := []program{{"old", before.Binary}, {"new", after.Binary}}
	machine, err := each(ctx, o, all, progress, func(s *scene, r *row) error {
		m, err := measure(ctx, o, s, r, programs)
		if err == nil {
			c.add(r, m)
		}
		return err
	})
	c.Machine = machine
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Comparison) add(r *row, m *measured) {
	part := func(s *side) Part {
		return Part{Ratio: stat.Of(stat.Ratios(s.rates, m.reference.rates)), Value: stat.Median(s.rates), Cost: s.spent.cost()}
	}
	before, after := m.subjects[0], m.subjects[1]
	line := Compared{
		Name: r.name, Conns: r.conns, Reference: string(r.reference), Old: part(before), New: part(after),
		Rate: stat.Of(stat.Ratios(after.rates, before.rates)),
	}
	if line.Old.Cost.Work != nil && line.New.Cost.Work != nil {
		work := stat.Of(stat.Ratios(after.spent.works, before.spent.works))
		line.Work = &work
	}
	c.Rows = append(c.Rows, line)
}

// preface says what was compared, and how.
func (c *Comparison) preface() []string {
	lines := (&Report{Machine: c.Machine, Settings: c.Settings}).preface()
	for _, b := range []struct {
		which string
		commit.Build
	}{{"Old", c.Old}, {"New", c.New}} {
		line := fmt.Sprintf("%s: %s", b.which, b.Name)
		switch {
		case b.Commit == "":
			line += ", this working tree"
		case b.OwnBench:
			line += fmt.Sprintf(" (%.12s), with its own benchmark, since this one does not build against it", b.Commit)
		default:
			line += fmt.Sprintf(" (%.12s)", b.Commit)
		}
		lines = append(lines, line+".")
	}
	return append(lines, "Ratios are to the reference of the same run. Quotients are the new one's over the old one's, with the lowest and the highest.")
}

func (c *Comparison) cells() [][]string {
	all := [][]string{{
		"row", "conns", "against", "ratio old", "ratio new", "req/s new/old", "low-high",
		"cpu µs old", "cpu µs new", "new/old", "low-high", "allocs", "alloc kB", "anon MiB",
	}}
	for _, r := range c.Rows {
		quotient, spread := "?", ""
		if r.Work != nil {
			quotient, spread = fmt.Sprintf("%.2f", r.Work.Median), fmt.Sprintf("%.2f-%.2f", r.Work.Low, r.Work.High)
		}
		before, after := r.Old.Cost, r.New.Cost
		all = append(all, []string{
			r.Name, fmt.Sprint(r.Conns), r.Reference,
			fmt.Sprintf("%.2f", r.Old.Ratio.Median), fmt.Sprintf("%.2f", r.New.Ratio.Median),
			fmt.Sprintf("%.2f", r.Rate.Median), fmt.Sprintf("%.2f-%.2f", r.Rate.Low, r.Rate.High),
			known(before.work(), 1), known(after.work(), 1), quotient, spread,
			both(before.Allocs, after.Allocs, 1), both(before.AllocBytes, after.AllocBytes, 1e3), both(before.Memory, after.Memory, mebi),
		})
	}
	return all
}

// Text prints the comparison as aligned columns.
func (c *Comparison) Text(w io.Writer) error {
	for _, line := range c.preface() {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cells := range c.cells() {
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// Markdown prints the comparison for a document.
func (c *Comparison) Markdown(w io.Writer) error {
	fmt.Fprintln(w, strings.Join(c.preface(), " "))
	fmt.Fprintln(w)
	return Markdown(w, c.cells())
}
