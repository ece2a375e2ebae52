package cascade

import (
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// LatencyOf is a Latency that knows what is usual.
func LatencyOf(usual time.Duration) *Latency { return &Latency{usual: usual} }

// Spiking reports whether the p99 is far above what is usual.
func (l *Latency) Spiking() bool { return l.spiking }

// SettingsOf are settings with other limits; zero stands for the defaults.
func SettingsOf(nodes, agents int, window time.Duration) Settings {
	s, err := Settings{nodes: nodes, agents: agents, Window: jsontime.Duration(window)}.Check()
	if err != nil {
		panic(err)
	}
	return s
}

// Stats are the sizes of a detector.
type Stats struct{ Nodes, Workflows, Findings int }

// Stats returns the sizes.
func (d *Detector) Stats() Stats { return Stats{d.graph.nodes, len(d.graph.workflows), len(d.open)} }

// Findings returns the open findings, the newest first.
func (d *Detector) Findings() (all []Finding) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.open {
		all = append(all, d.show(f, alertWalk))
	}
	slices.SortStableFunc(all, func(a, b Finding) int { return b.Began.Compare(a.Began) })
	return all
}

// Work counts the steps that the events have taken.
func (d *Detector) Work() int64 { return d.work }

// Faults names what does not fit together.
func (d *Detector) Faults() error {
	g := &d.graph
	cost, live, failures, waits := 0, 0, 0, 0
	targets := map[*target]int{}
	for _, a := range g.agents {
		paid, workflows := 0, map[*workflow]int{}
		for _, v := range a.nodes {
			live++
			paid += v.cost
			workflows[v.workflow]++
			if v.agent != a || g.ids[key{v.workflow, v.id}] != v {
				return fmt.Errorf("node %q is not found", v.id)
			}
			for _, c := range v.children {
				if !slices.Contains(c.parents, v) {
					return fmt.Errorf("an edge of %q is wrong", v.id)
				}
			}
			if v.target != nil {
				targets[v.target]++
			}
			for _, id := range v.awaits {
				k := key{v.workflow, id}
				if waits++; g.find(k.workflow.id, id) != nil || !slices.Contains(g.waiting[k], v) {
					return fmt.Errorf("node %q waits for %q in vain", v.id, id)
				}
			}
			if x := v.fail; x != nil {
				failures++
				if x.node != v || v.gone {
					return fmt.Errorf("failure of %q is not its own", v.id)
				}
				if x.group != nil && x.group.finding == nil {
					for _, m := range x.group.members {
						if m.node.gone {
							return fmt.Errorf("a forgotten failure is kept beside %q", v.id)
						}
					}
				}
			}
		}
		if paid != a.cost || g.payers[a.place] != a {
			return fmt.Errorf("agent %q pays %d for %d", a.name, a.cost, paid)
		}
		for w, n := range workflows {
			if g.workflows[w.id] != w || w.nodes[a] != n {
				return fmt.Errorf("agent %q has %d nodes in %q", a.name, n, w.id)
			}
		}
		cost += paid
	}
	if live != g.nodes || cost != g.cost {
		return fmt.Errorf("%d nodes cost %d, not %d and %d", live, cost, g.nodes, g.cost)
	}
	for k, all := range g.waiting {
		if waits -= len(all); len(all) == 0 {
			return fmt.Errorf("nobody waits for %q", k.id)
		}
	}
	if waits != 0 {
		return fmt.Errorf("%d wait too much", -waits)
	}
	for name, r := range g.targets {
		if r.name != name || r.nodes != targets[r] || r.nodes == 0 {
			return fmt.Errorf("target %q counts %d nodes of %d", name, r.nodes, targets[r])
		}
	}
	if len(targets) != len(g.targets) {
		return fmt.Errorf("%d targets of nodes, %d are known", len(targets), len(g.targets))
	}
	if len(d.naming) > failures*maxCauses || len(d.errors) > failures {
		return fmt.Errorf("%d errors, %d are named, of %d failures", len(d.errors), len(d.naming), failures)
	}
	for _, f := range d.open {
		if f.group.finding != f {
			return fmt.Errorf("finding %s has lost its group", f.ID)
		}
		if len(f.downstreams) == 0 && len(f.group.parties.list) < d.set.agents {
			return fmt.Errorf("finding %s has %d agents", f.ID, len(f.group.parties.list))
		}
		for _, x := range f.group.members {
			if x.in() != f.group {
				return fmt.Errorf("finding %s lists a failure of another group", f.ID)
			}
		}
	}
	return nil
}

const (
	NamedByError = namedByError
	IsSlow       = isSlow
	IsExhausted  = isExhausted
	AllAddresses = allAddresses
	SharedState  = sharedState
)
