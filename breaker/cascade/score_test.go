package cascade_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// start is the time of the first event of every trace.
var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

type score struct {
	traces, cascades, found, rooted, first, findings, right, twice int
	delays                                                         []time.Duration
	events                                                         int
}

func (s *score) add(o score) {
	s.traces += o.traces
	s.cascades += o.cascades
	s.found += o.found
	s.rooted += o.rooted
	s.first += o.first
	s.findings += o.findings
	s.right += o.right
	s.twice += o.twice
	s.events += o.events
	s.delays = append(s.delays, o.delays...)
}

func ratio(a, b int) float64 {
	if b == 0 {
		return 1
	}
	return float64(a) / float64(b)
}

func (s *score) p95() time.Duration {
	if len(s.delays) == 0 {
		return 0
	}
	slices.Sort(s.delays)
	return s.delays[(len(s.delays)*95+99)/100-1]
}

// alerted are the alerts of a finding.
type alerted struct {
	opened, closed time.Duration
	at             []time.Duration
	alerts         []cascade.Finding
}

// by is the last alert until a time, or the first one.
func (a *alerted) by(at time.Duration) *cascade.Finding {
	last := 0
	for i := range a.alerts {
		if a.at[i] <= at {
			last = i
		}
	}
	return &a.alerts[last]
}

// replay feeds a trace to a detector.
func replay(t *testing.T, w *world) []*alerted {
	t.Helper()
	set, err := cascade.Settings{}.Check()
	if err != nil {
		t.Fatal(err)
	}
	d := cascade.New(set)
	for _, s := range w.services {
		d.Pool(s.pool, s.addresses)
	}
	byID := map[string]*alerted{}
	var all []*alerted
	note := func(at time.Duration, changes []cascade.Change) {
		for _, c := range changes {
			a := byID[c.Finding.ID]
			if a == nil {
				a = &alerted{opened: at}
				byID[c.Finding.ID] = a
				all = append(all, a)
			}
			if c.Kind == cascade.Closed {
				a.closed = at
				continue
			}
			a.at, a.alerts = append(a.at, at), append(a.alerts, c.Finding)
		}
	}
	next := time.Second
	for _, e := range w.events {
		for ; next < e.at; next += time.Second {
			note(next, d.Advance(start.Add(next)))
		}
		note(e.at, e.what(d, start.Add(e.at)))
	}
	return all
}

// causeOf is what most of the errors of a finding go back to.
func (w *world) causeOf(f *cascade.Finding) *cause {
	votes := map[*cause]int{}
	for _, p := range f.Parts {
		for _, e := range p.Errors {
			votes[w.of[e]]++
		}
	}
	if len(votes) == 0 {
		votes[w.of[f.Root.Error]]++
	}
	var best *cause
	for _, c := range append([]*cause{nil}, w.causes...) {
		if votes[c] > votes[best] {
			best = c
		}
	}
	return best
}

// rooted reports whether a finding names the root of a cause. What several services share counts as seen if
// calls to two of them had failed.
func (c *cause) rooted(f *cascade.Finding, by time.Duration) bool {
	met := 0
	for _, at := range c.direct {
		if at <= by {
			met++
		}
	}
	if c.shared && met > 1 && f.Class != cascade.Infrastructure {
		return false
	}
	for s := range c.services {
		if f.Root.Agent == s.agent || f.Root.Pool != "" && f.Root.Pool == s.pool {
			return true
		}
	}
	return false
}

// settles is how long after the begin of a cascade its alerts are looked at.
const settles = 30 * time.Second

// about reports whether a finding is the alert of a cascade: most of its errors go back to the cause, or it
// was open when that became a cascade, in one of its workflows, and names its root.
func (a *alerted) about(w *world, c *cause) bool {
	at, is := c.began()
	if !is || a.closed != 0 && a.closed < at {
		return false
	}
	f := a.by(at + settles)
	return w.causeOf(&a.alerts[0]) == c || w.causeOf(f) == c || a.opened <= at+settles && c.rooted(f, at+settles) &&
		slices.ContainsFunc(f.Parts, func(p cascade.Part) bool { return c.workflows[p.Workflow] })
}

func (w *world) score(t *testing.T, verbose bool) score {
	t.Helper()
	s := score{traces: 1, events: len(w.events)}
	all := replay(t, w)
	first := map[*cause]bool{}
	for _, a := range all {
		s.findings++
		if c := w.causeOf(&a.alerts[0]); first[c] {
			s.twice++
		} else {
			first[c] = true
		}
		if slices.ContainsFunc(w.causes, func(c *cause) bool { return a.about(w, c) }) {
			s.right++
		} else if verbose {
			t.Logf("%d %s: false: %v %+v", w.seed, w.scenario, a.opened, a.alerts[0])
		}
	}
	for _, c := range w.causes {
		at, is := c.began()
		if !is {
			continue
		}
		s.cascades++
		var best *alerted
		rooted := false
		var opened []time.Duration
		for _, a := range all {
			if !a.about(w, c) {
				continue
			}
			opened = append(opened, a.opened)
			if r := c.rooted(a.by(at+settles), at+settles); best == nil || r && !rooted {
				best, rooted = a, r
			}
		}
		if best == nil {
			if verbose {
				t.Logf("%d %s: missed %s %v", w.seed, w.scenario, c.what, c.agents)
			}
			continue
		}
		s.found++
		delay := max(slices.Min(opened)-at, 0)
		s.delays = append(s.delays, delay)
		if c.rooted(&best.alerts[0], best.opened) {
			s.first++
		}
		if rooted {
			s.rooted++
		} else if verbose {
			var names []string
			for x := range c.services {
				names = append(names, x.agent)
			}
			f := best.by(at + settles)
			t.Logf("%d %s: root of %s %v, not %s %+v", w.seed, w.scenario, c.what, names, f.Class, f.Root)
		}
		if verbose && delay > 2*time.Second {
			t.Logf("%d %s: late by %v: %s %v", w.seed, w.scenario, delay, c.what, c.agents)
		}
	}
	return s
}

// The detector was made with the seeds from 1,000 and from 20,000, and not with those of the score.
const (
	scored = 50_000
	traces = 300
)

// TestScore replays 300 traces and holds the detector to what issue 16 asks for. With -v it prints the table
// of docs/cascades.md.
func TestScore(t *testing.T) {
	var total score
	by := map[string]*score{}
	for seed := range uint64(traces) {
		if raced && seed == 20 {
			return // too few for a score
		}
		w := trace(scored + seed)
		s := w.score(t, false)
		total.add(s)
		if by[w.scenario] == nil {
			by[w.scenario] = new(score)
		}
		by[w.scenario].add(s)
	}
	var out strings.Builder
	line := func(name string, s *score) {
		fmt.Fprintf(&out, "| %s | %d | %d | %d | %d | %d | %d | %d | %.2f s |\n",
			name, s.traces, s.cascades, s.found, s.first, s.rooted, s.findings, s.right, s.p95().Seconds())
	}
	for _, s := range scenarios {
		line(s.name, by[s.name])
	}
	line("all", &total)
	precision, recall, roots, p95 := ratio(total.right, total.findings), ratio(total.found, total.cascades), ratio(total.rooted, total.found), total.p95()
	t.Logf("%d events\n\n| traces | number | cascades | found | root, at first | root | findings | right | time to detect, p95 |\n|---|---|---|---|---|---|---|---|---|\n%s\n"+
		"precision %.3f, recall %.3f, root found %.3f, time to detect p95 %.2f s, findings for each cascade that was found %.2f",
		total.events, &out, precision, recall, roots, p95.Seconds(), float64(total.findings)/float64(total.found))
	if precision < 0.95 || recall < 0.9 || roots < 0.95 || p95 > 2*time.Second {
		t.Error("below 0.95, 0.9, 0.95, or over 2 s")
	}
	if total.cascades < 300 || by["flood"].findings > by["flood"].right+by["flood"].traces/10 {
		t.Error("too few cascades, or lies open findings")
	}
}
