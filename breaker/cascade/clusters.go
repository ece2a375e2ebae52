package cascade

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// downstream is an agent, or an address, or a target that several services change.
type downstream struct {
	name   string
	target bool
}

// opening is a breaker that is open: that of an agent in a workflow, or of a gateway for an address.
type opening struct {
	of                       downstream
	by, workflow             string // by is empty for those of gateways
	holder, address, service string // of those of gateways
	event                    string
	at                       int64
}

// same reports whether two openings are of one breaker. About a target, the breakers of one service are one.
func (o *opening) same(n *opening) bool {
	if o.of != n.of || o.by != n.by || o.holder != n.holder {
		return false
	}
	if o.by != "" {
		return o.workflow == n.workflow
	}
	return o.address == n.address || o.of.target && o.service == n.service
}

func (o *opening) name() string {
	return cmp.Or(o.by, strings.TrimPrefix(o.holder+" "+o.address, " "))
}

const (
	// clusterSize is how many breakers must have opened on one downstream within Settings.Window (ATD,
	// "Coordinated Circuit Breaking").
	clusterSize = 3
	maxOpenings = 16384
	maxReports  = 64 // of openings, of an agent within Settings.Window
)

// Breaker records the opening or closing of a breaker.
func (d *Detector) Breaker(now time.Time, b Breaker) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock(now)
	if len(b.Downstream) > maxName || b.By != "" && !d.believes(&b) {
		return nil
	}
	if p := d.pool(b.Pool); p != nil && b.By == "" {
		if a := p.at(b.Address); b.Open && len(a.open) < maxMembers {
			a.open[strings.Clone(b.Holder)] = true
		} else {
			delete(a.open, b.Holder)
		}
	}
	of := []downstream{{name: strings.Clone(b.Downstream)}}
	if b.By == "" && b.Pool != "" {
		for _, name := range b.Targets {
			of = append(of, downstream{strings.Clone(name), true})
		}
	}
	for _, of := range of {
		o := &opening{
			of: of, at: now.UnixNano(),
			by: strings.Clone(b.By), workflow: strings.Clone(b.Workflow), event: strings.Clone(b.Event),
			holder: strings.Clone(b.Holder), address: strings.Clone(b.Address), service: strings.Clone(b.Pool),
		}
		d.openings = slices.DeleteFunc(d.openings, func(old *opening) bool {
			d.work++
			return old.same(o) || d.now-old.at > int64(d.set.Window) && d.about(old.of) == nil
		})
		if b.Open && d.room(o) {
			d.openings = append(d.openings, o)
			d.cluster(o)
		}
	}
	return d.take()
}

// believes reports whether an agent may report a breaker: it takes part in the workflow, has called the downstream
// as far as the gateway knows that, and has not reported too many.
func (d *Detector) believes(b *Breaker) bool {
	a := d.graph.agents[b.By]
	if a == nil || !d.graph.takesPart(b.Workflow, a) {
		return false
	}
	if p := d.poolOf(b.Downstream); p != nil && !p.callers.has(b.By) {
		return false
	}
	if !b.Open {
		return true
	}
	if d.now-a.reported > int64(d.set.Window) {
		a.reported, a.openings = d.now, 0
	}
	a.openings++
	return a.openings <= maxReports
}

// poolOf finds the pool of a downstream.
func (d *Detector) poolOf(agent string) (found *pool) {
	for _, p := range d.pools {
		d.work++
		if p.agent == agent && (found == nil || p.name < found.name) {
			found = p
		}
	}
	return found
}

// room makes room for an opening: one that a gateway saw takes the place of the oldest report.
func (d *Detector) room(o *opening) bool {
	if len(d.openings) < maxOpenings {
		return true
	}
	i := slices.IndexFunc(d.openings, func(old *opening) bool { return old.by != "" })
	if o.by != "" || i < 0 {
		return false
	}
	d.openings = slices.Delete(d.openings, i, i+1)
	return true
}

// about is the open finding that has the breakers of a downstream.
func (d *Detector) about(of downstream) *finding {
	for _, f := range d.open {
		if slices.Contains(f.downstreams, of) {
			return f
		}
	}
	return nil
}

// counted returns the openings on a downstream within the window that count for a workflow: those of gateways, and
// those that its agents report. The first comes first.
func (d *Detector) counted(of downstream, workflow string) (all []*opening) {
	for _, o := range d.openings {
		d.work++
		if o.of == of && d.now-o.at <= int64(d.set.Window) && (o.by == "" || o.workflow == workflow) {
			all = append(all, o)
		}
	}
	slices.SortStableFunc(all, func(a, b *opening) int { return cmp.Compare(a.at, b.at) })
	return all
}

// cluster looks whether enough breakers are open on the downstream of one that has just opened. Reports of several
// workflows are not added up.
func (d *Detector) cluster(o *opening) {
	if f := d.about(o.of); f != nil {
		f.group.last = d.now
		return
	}
	workflow := o.workflow
	reports := map[string]int{}
	for _, other := range d.openings {
		if other.of == o.of && other.by != "" && d.now-other.at <= int64(d.set.Window) {
			reports[other.workflow]++
		}
	}
	for name, n := range reports {
		if most := reports[workflow]; o.by == "" && (n > most || n == most && name < workflow) {
			workflow = name
		}
	}
	all := d.counted(o.of, workflow)
	if len(all) < clusterSize {
		return
	}
	var service *pool
	if !o.of.target {
		if service = d.pools[o.service]; o.service == "" {
			service = d.poolOf(o.of.name)
		}
	}
	for _, f := range d.open {
		if f.explains(all, workflow, service) {
			f.downstreams = append(f.downstreams, o.of)
			f.group.last = d.now
			d.announce(f, Grown)
			return
		}
	}
	first := all[0]
	g := &group{began: first.at, last: d.now}
	g.workflows.add(workflow)
	for _, o := range all {
		g.workflows.add(o.workflow)
	}
	f := &finding{group: g, downstreams: []downstream{o.of}, openings: all}
	f.ID, f.Pattern, f.Class = identify(Clustering, workflow, o.of.name, first.at), Clustering, Service
	f.Root = Root{
		Workflow: cmp.Or(first.workflow, workflow), Error: first.event, Agent: o.of.name, Reasons: []string{breakerOpen},
	}
	switch {
	case o.of.target:
		f.Class = Infrastructure
		f.Root.Agent, f.Root.Target, f.Root.Reasons = "", o.of.name, append(f.Root.Reasons, sharedState)
	case service != nil:
		if f.Root.Pool = service.name; !service.down(d.now, int64(d.set.Window)) {
			f.Class = Agent
		}
	}
	g.finding = f
	d.add(f)
}

// explains reports whether breakers have opened because of what a finding is about: a service, as far as the same
// have seen it fail, a target, or breakers of which one is among these.
func (f *finding) explains(all []*opening, workflow string, service *pool) bool {
	own := 0
	for _, o := range all {
		if o.by == "" {
			own++
		}
	}
	of, seen := all[0].of, f.from != nil && f.from.own
	if !of.target {
		known := f.group.workflows.has(workflow) || own >= clusterSize && seen
		return known && service != nil && f.Root.Pool == service.name
	}
	return f.Root.Target == of.name || slices.ContainsFunc(all, func(o *opening) bool {
		return seen && o.service == f.Root.Pool || slices.ContainsFunc(f.openings, func(other *opening) bool {
			return o.by == "" && o.holder == other.holder && o.address == other.address
		})
	})
}
