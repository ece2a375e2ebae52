package table

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Text prints the report as aligned columns.
func (r *Report) Text(w io.Writer) error {
	for _, line := range r.preface() {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cells := range r.cells() {
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	if len(r.Rows) > 0 {
		fmt.Fprintln(t)
	}
	for _, f := range r.Figures {
		fmt.Fprintln(t, strings.Join([]string{f.Name, f.value(), f.Verdict.Bar, f.Verdict.String()}, "\t"))
	}
	return t.Flush()
}

// Markdown prints the report for a document.
func (r *Report) Markdown(w io.Writer) error {
	fmt.Fprintln(w, strings.Join(r.preface(), " "))
	fmt.Fprintln(w)
	if err := Markdown(w, r.cells()); err != nil {
		return err
	}
	fmt.Fprint(w, "\n| figure | value | bar | |\n|---|---|---|---|\n")
	for _, f := range r.Figures {
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", f.Name, f.value(), f.Verdict.Bar, f.Verdict)
	}
	return nil
}

// Markdown prints a table for a document, whose first row are its titles.
func Markdown(w io.Writer, rows [][]string) error {
	for i, cells := range rows {
		line := "| " + strings.Join(cells, " | ") + " |\n"
		if i == 0 {
			line += strings.Repeat("|---", len(cells)) + "|\n"
		}
		if _, err := io.WriteString(w, line); err != nil {
			return err
		}
	}
	return nil
}

func (r *Report) preface() []string {
	m, s := r.Machine, r.Settings
	lines := []string{
		fmt.Sprintf("%s on %s/%s, %d cores (%s)%s.", s.Go, m.OS, m.Arch, m.Cores, m.CPU, m.company()),
		fmt.Sprintf("Stores on %s; append of 256 B and fdatasync: p50 %s in a file of written zeros, %s in one that grows.",
			m.FileSystem, m.Sync.Round(time.Microsecond), m.Growing.Round(time.Microsecond)),
		fmt.Sprintf("GOGC=%s and GOMEMLIMIT=%s in every process; generator, upstream and each gateway are processes of their own on the loopback.", s.GOGC, s.GOMEMLIMIT),
	}
	if s.Rounds > 0 {
		lines = append(lines, fmt.Sprintf(
			"Each cost is of the subject / of its reference; ? is not known. 200 B JSON POST, 1 KiB answer, no think time; %d pairs of rounds of %s, in turn; ratios are medians over the pairs; replays of many keys are of %d.",
			s.Rounds, s.Round, s.Keys))
		if s.Sustained > 0 {
			lines = append(lines, fmt.Sprintf("Sustained load: %s and %d calls at least, on a new process with an empty store.", s.Sustained, s.SustainedCalls))
		}
		if !m.Device {
			lines = append(lines, "Bytes to the device: not known, this file system has no block device of its own.")
		}
	}
	return lines
}

// cells are the rows as text, the first one their titles; nothing without rows.
func (r *Report) cells() [][]string {
	if len(r.Rows) == 0 {
		return nil
	}
	all := [][]string{{
		"row", "conns", "of", "ratio", "low-high", "bar", "", "subject", "value", "against", "value",
		"cpu µs", "allocs", "alloc kB", "written kB", "anon MiB",
	}}
	for _, row := range r.Rows {
		subject, reference := row.SubjectCost, row.ReferenceCost
		if subject == nil || reference == nil {
			subject, reference = new(Cost), new(Cost)
		}
		all = append(all, []string{
			row.Name, fmt.Sprint(row.Conns), row.Of,
			fmt.Sprintf("%.2f", row.Ratio.Median), fmt.Sprintf("%.2f-%.2f", row.Ratio.Low, row.Ratio.High),
			row.Verdict.Bar, row.Verdict.String(),
			row.Subject, number(row.SubjectValue), row.Reference, number(row.ReferenceValue),
			both(subject.work(), reference.work(), 1), both(subject.Allocs, reference.Allocs, 1),
			both(subject.AllocBytes, reference.AllocBytes, 1e3), both(subject.Written, reference.Written, 1e3),
			both(subject.Memory, reference.Memory, mebi),
		})
	}
	return all
}

// both are the values of the subject and of its reference, in a unit.
func both(subject, reference *float64, unit float64) string {
	if subject == nil && reference == nil {
		return ""
	}
	return known(subject, unit) + " / " + known(reference, unit)
}

func known(v *float64, unit float64) string {
	if v == nil {
		return "?"
	}
	return number(*v / unit)
}

// work is the processor time of a call in the middle of all rounds.
func (c *Cost) work() *float64 {
	if c.Work == nil {
		return nil
	}
	return &c.Work.Median
}

func (f Figure) value() string { return strings.TrimSpace(number(f.Value) + " " + f.Unit) }

func number(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// company tells of others on the machine.
func (m Machine) company() string {
	switch {
	case m.Others < 0:
		return ""
	case m.Others > tolerable:
		return fmt.Sprintf(", of which others used %.0f %%: TOO BUSY, these numbers say little", 100*m.Others)
	default:
		return fmt.Sprintf(", of which others used %.0f %%", 100*m.Others)
	}
}

// tolerable is how much of the processors others may use without spoiling the run.
const tolerable = 0.1
