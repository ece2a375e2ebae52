package contain

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/table"
)

// Text prints the report as aligned columns.
func (r *Report) Text(w io.Writer) error {
	fmt.Fprintln(w, r.preface())
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cells := range r.cells() {
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// Markdown prints the report for a document.
func (r *Report) Markdown(w io.Writer) error {
	fmt.Fprintf(w, "%s\n\n", r.preface())
	return table.Markdown(w, r.cells())
}

func (r *Report) preface() string {
	m, o := r.Machine, r.Options
	return fmt.Sprintf("%s on %s/%s, %d cores (%s), stores on %s. %g calls a second of the failing workflow, %g of its neighbour; %s before the fault, %s of it, %s after it.",
		r.Go, m.OS, m.Arch, m.Cores, m.CPU, m.FileSystem, o.Failing, o.Neighbour, o.Before, o.Fault, o.After)
}

// cascades is the name of a row that only gateways have which detect them.
const cascades = "cascades named in the ledgers"

// cells are a row of titles, and one of each value, with a column for each trial.
func (r *Report) cells() [][]string {
	rows := [][]string{{""}}
	for _, t := range r.Trials {
		rows[0] = append(rows[0], t.Fault+": "+t.Chain)
	}
	for _, v := range []struct {
		name string
		of   func(t *Trial) string
	}{
		{"neighbour: good calls during the fault", func(t *Trial) string { return t.Neighbour.share() }},
		{"neighbour: median (before the fault)", func(t *Trial) string { return ms(t.Neighbour.Median) + " (" + ms(t.Usual.Median) + ")" }},
		{"neighbour: p99 (before the fault)", func(t *Trial) string { return ms(t.Neighbour.P99) + " (" + ms(t.Usual.P99) + ")" }},
		{"failing workflow: median until its failure is known", func(t *Trial) string { return ms(t.Failing.Median) }},
		{"refused at the edge after", func(t *Trial) string { return seconds(t.Contained) }},
		{"times another agent was seen refused too", func(t *Trial) string { return fmt.Sprint(t.Spread) }},
		{"calls that reached the failing agent", func(t *Trial) string { return fmt.Sprint(t.Reached) }},
		{"effects that came twice", func(t *Trial) string { return fmt.Sprintf("%d of %d", t.Repeated, t.Items) }},
		{"most requests held by the two agents before it", func(t *Trial) string { return fmt.Sprint(t.Held) }},
		{"most goroutines of them", func(t *Trial) string { return fmt.Sprint(t.Goroutines) }},
		{"works again after the fault, by itself", func(t *Trial) string { return seconds(t.Recovered) }},
		{"errors in the ledgers", func(t *Trial) string { return t.events("error") }},
		{"openings and rejections in the ledgers", func(t *Trial) string { return t.events("circuit_breaker_open") }},
		{cascades, func(t *Trial) string { return t.events("cascade_detected") }},
		{"questions to people", func(t *Trial) string { return t.people() }},
	} {
		if v.name == cascades && !slices.ContainsFunc(r.Trials, func(t Trial) bool { return t.Informed["cascade_detected"] > 0 }) {
			continue // nothing is on that detects them
		}
		row := []string{v.name}
		for i := range r.Trials {
			row = append(row, v.of(&r.Trials[i]))
		}
		rows = append(rows, row)
	}
	return rows
}

func (c *Calls) share() string {
	if c.Made == 0 {
		return "none made"
	}
	return fmt.Sprintf("%d of %d (%.0f %%)", c.Good, c.Made, 100*float64(c.Good)/float64(c.Made))
}

func (t *Trial) events(kind string) string {
	if t.Chain == Bare {
		return "nobody"
	}
	return fmt.Sprint(t.Informed[kind])
}

func (t *Trial) people() string {
	if t.Chain == Bare {
		return "nobody"
	}
	return fmt.Sprint(t.Asked)
}

func ms(d time.Duration) string { return fmt.Sprintf("%.0f ms", d.Seconds()*1e3) }

func seconds(d *time.Duration) string {
	if d == nil {
		return "never"
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}
