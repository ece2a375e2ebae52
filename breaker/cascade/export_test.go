package cascade

import (
	"fmt"
	"slices"
	"time"
)

// LatencyOf is a Latency that knows what is usual.
func LatencyOf(usual time.Duration) *Latency { return &Latency{usual: usual} }

// Spiking reports whether the p99 is far above what is usual.
func (l *Latency) Spiking() bool { return l.spiking }

// Work counts the steps that the events have taken.
func (d *Detector) Work() int64 { return d.work }

// Faults names what does not fit together.
func (d *Detector) Faults() error {
	g := &d.graph
	cost, live := 0, 0
	byAgent := map[*agent]int{}
	for i := range g.nodes {
		v := &g.nodes[i]
		if v.hold == nil {
			continue
		}
		live++
		cost += int(v.cost)
		byAgent[v.hold.agent] += int(v.cost)
		if g.ids[key{v.hold.workflow, v.id}] != int32(i) {
			return fmt.Errorf("node %q is not found", v.id)
		}
		for e := v.children; e != none; e = g.edges[e].nextChild {
			if g.edges[e].parent != int32(i) || !g.parent(int32(i), g.edges[e].child) {
				return fmt.Errorf("edge %d of %q is wrong", e, v.id)
			}
		}
		if v.fail != nil && (v.fail.node != int32(i) || v.fail.group == nil) {
			return fmt.Errorf("failure of %q is not its own", v.id)
		}
		if v.fail != nil && v.fail.group.finding == nil {
			for _, m := range v.fail.group.members {
				if m.node == none {
					return fmt.Errorf("a forgotten failure is kept beside %q", v.id)
				}
			}
		}
	}
	waits := 0
	for i := range g.nodes {
		for _, id := range g.nodes[i].awaits {
			k := key{g.nodes[i].hold.workflow, id}
			if waits++; g.find(k.workflow.id, id) != none || !slices.Contains(g.waiting[k], int32(i)) {
				return fmt.Errorf("node %q waits for %q in vain", g.nodes[i].id, id)
			}
		}
	}
	for k, all := range g.waiting {
		if waits -= len(all); len(all) == 0 {
			return fmt.Errorf("nobody waits for %q", k.id)
		}
	}
	if waits != 0 {
		return fmt.Errorf("%d wait too much", -waits)
	}
	targets := map[*target]int{}
	for i := range g.nodes {
		if r := g.nodes[i].target; r != nil {
			targets[r]++
		}
	}
	for name, r := range g.targets {
		if r.name != name || r.nodes != targets[r] || r.nodes == 0 {
			return fmt.Errorf("target %q counts %d nodes of %d", name, r.nodes, targets[r])
		}
	}
	if len(targets) != len(g.targets) {
		return fmt.Errorf("%d targets of nodes, %d are known", len(targets), len(g.targets))
	}
	if live != len(g.nodes)-len(g.free) || cost != g.cost {
		return fmt.Errorf("%d nodes cost %d, not %d", live, cost, g.cost)
	}
	for _, a := range g.agents {
		if byAgent[a] != a.cost || g.heap[a.place] != a {
			return fmt.Errorf("agent %q pays %d for %d", a.name, a.cost, byAgent[a])
		}
		for h := a.first; h != nil; h = h.next {
			if h.first == none || g.nodes[h.first].hold != h || h.workflow.holds[a] != h {
				return fmt.Errorf("agent %q holds nothing in %q", a.name, h.workflow.id)
			}
		}
	}
	if len(d.awaited) > live*maxCauses || len(d.errors) > live {
		return fmt.Errorf("%d errors, %d awaited, of %d nodes", len(d.errors), len(d.awaited), live)
	}
	for _, f := range d.open {
		if f.group.finding != f {
			return fmt.Errorf("finding %s has lost its group", f.id)
		}
		if f.cluster == nil && len(f.group.parties.list) < d.set.Agents {
			return fmt.Errorf("finding %s has %d agents", f.id, len(f.group.parties.list))
		}
		for _, x := range f.group.members {
			if x.group != f.group {
				return fmt.Errorf("finding %s lists a failure of another group", f.id)
			}
		}
	}
	return nil
}
