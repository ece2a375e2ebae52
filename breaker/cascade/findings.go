package cascade

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"
)

// Pattern is how a failure spreads (cascade 3.4.2).
type Pattern string

// The patterns, as in the claim cascade.pattern.
const (
	// DepthFirst: along chains of parents.
	DepthFirst Pattern = "depth_first"
	// BreadthFirst: nodes side by side at once.
	BreadthFirst Pattern = "breadth_first"
	// Clustering: several breakers opened on one downstream.
	Clustering Pattern = "clustering"
)

// Class is the domain of the failure at the root (cascade 3.1.1). Semantic failures are not told apart.
type Class string

// The classes.
const (
	// Agent: one instance.
	Agent Class = "agent"
	// Service: all addresses of one pool.
	Service Class = "service"
	// Infrastructure: several pools, or a resource of the gateway.
	Infrastructure Class = "infrastructure"
)

// Reasons why a failure counts as the root of others.
const (
	followed     = "followed"        // others failed because of it
	namedByError = "named_by_errors" // the errors of others name it
	earliest     = "earliest"        // it failed first
	breakerOpen  = "breaker_open"    // a breaker of its address is open
	isSlow       = "slow"            // its address answers slowly
	isExhausted  = "exhausted"       // a resource is exhausted
	allAddresses = "all_addresses"   // all addresses of its pool fail
	siblings     = "siblings"        // others failed beside it
	sharedState  = "shared_state"    // calls of several agents that change the same target failed
)

// Root is where a cascade began.
type Root struct {
	// Workflow and Node say where it is; both are empty if only breakers were seen.
	Workflow, Node string
	// Error is the jti of its error, or for want of one of its node or its breaker's event.
	Error string
	// Agent is the identity that is suspected: who was called, or whose task it is.
	Agent string
	// Pool and Address are those of a call.
	Pool, Address string
	// Target is the system that the failed calls change, where that is what they have in common (cascade
	// 3.1.2); Pool is then set if they go to one service. LastWrite is the node of the last call that had changed
	// it in the Workflow before, if it is known and the system answers.
	Target, LastWrite string
	Reasons           []string // what speaks for it, in fixed words
}

// Part is what a cascade has in one workflow. A workflow may be shown its own only (P3).
type Part struct {
	Workflow string
	// Errors are the ids of the first 64 errors, the oldest first.
	Errors []string
	// Failed are the agents that failed, sorted.
	Failed []string
	// BlastRadius is Failed, those whose calls failed, and those of all that follows from the root,
	// sorted.
	BlastRadius []string
	// Cut says that BlastRadius is not whole: an alert looks at 4,096 nodes, Detector.Finding at all.
	Cut bool
}

// Finding is a cascade.
type Finding struct {
	// ID is 32 hexadecimal digits. The same events lead to the same id.
	ID      string
	Pattern Pattern
	Class   Class
	Root    Root
	// Parts are sorted by workflow, at most 1,000.
	Parts []Part
	// Failed and Affected are how many agents have failed, and are in the blast radius: at most 1,024 each
	// are counted.
	Failed, Affected int
	// Downstream is what the Breakers are open on, if there are any; the target if these are of several
	// services that change one. Each is its address, the agent that reported it, or the holder and the address.
	Downstream string
	Breakers   []string
	// OneProbe says that one probe should replace those of the breakers (ATD, "Coordinated Circuit
	// Breaking"): not of those of several services.
	OneProbe bool
	// Into is the finding that it was merged into.
	Into string
	// Began is when its first failure was recorded, Last the newest. Closed is zero while it is open.
	Began, Last, Closed time.Time
}

// ChangeKind is what has happened to a finding.
type ChangeKind uint8

const (
	// Opened is a new finding.
	Opened ChangeKind = iota
	// Grown is twice as many agents, or workflows, as at the last change of the kinds Opened and
	// Grown, or breakers that have opened.
	Grown
	// Rerooted is another candidate for the root, at most 4 times.
	Rerooted
	// Closed is the end.
	Closed
)

// Change is a change of a finding, as it is then.
type Change struct {
	Kind    ChangeKind
	Finding Finding
}

const (
	maxOpen    = 256
	maxErrors  = 64
	maxShown   = 1000 // workflows of a finding
	maxReroots = 4
	alertWalk  = 4096
)

type finding struct {
	Finding              // its id, pattern, class and root; show fills in the rest
	from        *failure // the root
	group       *group
	downstreams []downstream // whose breakers belong to it
	openings    []*opening   // for which it was opened, the first first
	alerted     int          // agents at the last alert
	workflows   int          // see alerted
	considered  int          // failures when the root was last sought
	reroots     int
}

// judge opens a finding about a group, or updates it.
func (d *Detector) judge(g *group) {
	f := g.finding
	if f == nil {
		if len(g.parties.list) < d.set.agents {
			return
		}
		g.parties = names{} // some may have been taken back
		for _, x := range g.members {
			if !x.over {
				g.parties.add(x.party)
			}
		}
		if len(g.parties.list) < d.set.agents {
			return
		}
		f = &finding{group: g}
		d.seek(f)
		other := d.same(f)
		if other == nil {
			f.ID = identify(f.Pattern, f.Root.Workflow, f.Root.Node, g.began)
			g.finding = f
			d.add(f)
			return
		}
		d.unite(other.group, g)
		f = other
	}
	g = f.group
	if len(g.parties.list) >= 2*f.alerted || len(g.workflows.list) >= 2*f.workflows {
		d.seek(f)
		d.announce(f, Grown)
		return
	}
	if n := len(g.members); n > maxVisits && n < f.considered*5/4 {
		return
	}
	before := f.Finding
	d.seek(f)
	of := func(r *Root) [3]string { return [3]string{r.Agent, r.Pool, r.Target} }
	changed := of(&f.Root) != of(&before.Root) || f.Class != before.Class || f.Pattern != before.Pattern
	if changed && f.reroots < maxReroots {
		f.reroots++
		d.announce(f, Rerooted)
	}
}

// add adds a finding. Where there are too many, the quietest ends.
func (d *Detector) add(f *finding) {
	if len(d.open) >= maxOpen {
		d.finish(slices.MinFunc(d.open, func(a, b *finding) int { return cmp.Compare(a.group.last, b.group.last) }))
	}
	d.open = append(d.open, f)
	d.announce(f, Opened)
}

// same finds the open finding that has the root of a new one: the same service, or target, as the gateway saw both, or
// saw it in one of the workflows of which agents have reported it.
func (d *Detector) same(f *finding) *finding {
	if f.from == nil || !f.from.own {
		return nil
	}
	for _, o := range d.open {
		d.work++
		seen := o.from != nil && o.from.own || slices.ContainsFunc(f.group.workflows.list, o.group.workflows.has) ||
			slices.ContainsFunc(o.openings, func(o *opening) bool { return o.by == "" })
		target := f.Root.Target != "" && f.Root.Target == o.Root.Target
		pool := f.Root.Pool != "" && f.Root.Pool == o.Root.Pool
		if d.now-o.group.last <= int64(d.set.Window) && seen && (target || pool) {
			return o
		}
	}
	return nil
}

// merge ends a finding that has turned out to be a part of another.
func (d *Detector) merge(into, f *finding) {
	end := d.show(f, alertWalk)
	end.Into = into.ID
	d.end(f, end)
	into.downstreams = append(into.downstreams, f.downstreams...)
}

// finish ends a finding. Failures of its nodes that come later belong to another cascade.
func (d *Detector) finish(f *finding) {
	d.end(f, d.show(f, alertWalk))
	for _, x := range f.group.members {
		x.over = true
	}
	*f.group = group{began: d.now}
}

func (d *Detector) end(f *finding, shown Finding) {
	d.open = without(d.open, f)
	shown.Closed = timeOf(d.now)
	d.changes = append(d.changes, Change{Closed, shown})
}

func (d *Detector) announce(f *finding, kind ChangeKind) {
	if kind != Rerooted {
		f.alerted, f.workflows = max(len(f.group.parties.list), 1), max(len(f.group.workflows.list), 1)
	}
	d.changes = append(d.changes, Change{kind, d.show(f, alertWalk)})
}

// identify derives an id, so that a restart of the same events leads to the same.
func identify(pattern Pattern, workflow, node string, began int64) string {
	h := fnv.New128a()
	fmt.Fprintf(h, "%q %q %q %d", pattern, workflow, node, began)
	return hex.EncodeToString(h.Sum(nil))
}

// head is a failure without a cause in its group, and who has failed because of it.
type head struct {
	*failure
	parties names
	named   bool
}

// earlier orders failures by their times.
func earlier(a, b *failure) int {
	return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.node.id, b.node.id))
}

// heads are the failures of a group that follow from no other one of it, the earliest first.
func (d *Detector) heads(g *group) (all []*head) {
	at := map[*failure]*head{}
	for _, x := range g.members {
		if x.over {
			continue
		}
		top, named := x, false
		for range maxChain {
			d.work++
			if top.cause == nil || top.cause.over || top.cause.in() != g {
				break
			}
			top, named = top.cause, top.named
		}
		h := at[top]
		if h == nil {
			h = &head{failure: top}
			at[top] = h
			all = append(all, h)
		}
		h.parties.add(x.party)
		h.named = h.named || named
	}
	slices.SortFunc(all, func(a, b *head) int { return earlier(a.failure, b.failure) })
	return all
}

// seek finds the root: the earliest failure without a cause that others follow from, or the earliest of all where
// none does (cascade 3.4.3). The pattern is in depth if one failure explains enough others, or none is beside it.
func (d *Detector) seek(f *finding) {
	g := f.group
	f.considered = len(g.members)
	heads := d.heads(g)
	if len(heads) == 0 {
		return
	}
	deep := len(heads) == 1
	var x *head
	for _, h := range heads {
		deep = deep || len(h.parties.list) >= d.set.agents
		if x == nil && len(h.parties.list) > 1 {
			x = h
		}
	}
	if f.Pattern != Clustering {
		f.Pattern = BreadthFirst
		if deep {
			f.Pattern = DepthFirst
		}
	}
	x = cmp.Or(x, heads[0])
	r := Root{Workflow: x.node.workflow.id, Node: x.node.id, Error: cmp.Or(x.err, x.node.id), Agent: x.party}
	if len(x.parties.list) > 1 {
		r.Reasons = append(r.Reasons, followed)
	}
	if x.named {
		r.Reasons = append(r.Reasons, namedByError)
	}
	if heads[0].at == x.at {
		r.Reasons = append(r.Reasons, earliest)
	}
	f.from, f.Class = x.failure, Agent
	if x.node.pool != nil && x.own {
		r.Pool, r.Address, r.Agent = x.node.pool.name, x.address, x.node.pool.agent
		f.Class = d.signals(x.failure, &r)
	}
	f.Root = r
	if x.node.target != nil && x.own && d.common(f, heads) {
		return
	}
	services := map[*pool]bool{}
	for _, h := range heads {
		if h.node.pool != nil && h.own && near(h.failure, x.failure, moment) {
			services[h.node.pool] = true
		}
	}
	if len(services) > 1 {
		f.Class = Infrastructure
		f.Root.Reasons = append(f.Root.Reasons, siblings)
	}
}

// signals adds to the reasons for a failed call to be the root what else is known of its service, and returns the
// class of the failure: that of a service if all addresses fail, or are known not to answer.
func (d *Detector) signals(x *failure, r *Root) Class {
	class := Agent
	at := cmp.Or(x.node.pool.addresses[x.address], new(address))
	if len(at.open) > 0 {
		r.Reasons = append(r.Reasons, breakerOpen)
	}
	if at.slow {
		r.Reasons = append(r.Reasons, isSlow)
	}
	again := func(y *failure) bool { return y != x && y.own && y.node.pool == x.node.pool }
	if x.node.pool.down(d.now, int64(d.set.Window)) && slices.ContainsFunc(x.in().members, again) {
		class = Service
		r.Reasons = append(r.Reasons, allAddresses)
	}
	gateway := d.exhausted("")
	if x.kind == Exhausted && gateway {
		class = Infrastructure
	}
	if x.kind == Exhausted && (gateway || d.exhausted(x.node.pool.name)) {
		r.Reasons = append(r.Reasons, isExhausted)
	}
	return class
}

// common makes the target the root of a finding if that is what its failures have in common: they are of several
// services, or of several agents at one service that fails nowhere else.
func (d *Detector) common(f *finding, heads []*head) bool {
	target := f.from.node.target
	var agents names
	pools, others := map[*pool]bool{}, map[*pool]bool{}
	first := f.from.at
	for _, h := range heads {
		switch {
		case h.node.pool == nil || !h.own:
		case h.node.target != target:
			others[h.node.pool] = true
		default:
			agents.add(h.node.agent.name)
			pools[h.node.pool] = true
			first = min(first, h.at)
		}
	}
	for p := range pools {
		if others[p] { // it fails without the target, too
			return false
		}
	}
	one := len(pools) == 1
	if len(agents.list) < 2 || one && f.from.node.pool.calls.unwell(d.now) {
		return false
	}
	r := &f.Root
	r.Target, r.Address = target.name, ""
	r.Reasons = append(slices.DeleteFunc(r.Reasons, func(r string) bool { return r == allAddresses }), sharedState)
	f.Class = Service
	if !one {
		f.Class = Infrastructure
		r.Agent, r.Pool = "", ""
	}
	if f.from.kind == Unreachable || f.from.kind == Timeout {
		return true // what cannot be reached was not spoilt by a write
	}
	for _, w := range target.writes {
		if w.workflow == f.from.node.workflow && w.at <= first {
			r.LastWrite = w.node
		}
	}
	return true
}

// exhausted reports whether a resource of a pool is, or of the gateway.
func (d *Detector) exhausted(pool string) bool {
	for s := range d.full {
		if s.Pool == pool {
			return true
		}
	}
	return false
}

// part is what is shown of a workflow.
type part struct{ errors, failed, reach names }

func (p *part) error(id string) {
	if len(p.errors.list) < maxErrors {
		p.errors.add(id)
	}
}

// show is a finding as it is now. Its blast radius is walked over at most the given number of nodes.
func (d *Detector) show(f *finding, limit int) Finding {
	g := f.group
	out := f.Finding
	out.Root.Reasons = slices.Clone(f.Root.Reasons)
	out.Failed, out.Began, out.Last = len(g.parties.list), timeOf(g.began), timeOf(g.last)
	parts := map[string]*part{}
	for _, w := range g.workflows.list[:min(len(g.workflows.list), maxShown)] {
		parts[w] = new(part)
	}
	members := slices.Clone(g.members)
	slices.SortStableFunc(members, earlier)
	for _, x := range members {
		if p := parts[x.node.workflow.id]; p != nil && !x.over {
			p.error(x.err)
			p.failed.add(x.party)
			p.reach.add(x.party)
			p.reach.add(x.node.agent.name)
		}
	}
	cut := false
	if p := parts[f.Root.Workflow]; p != nil {
		cut = d.follows(f, p, limit)
	}
	for _, o := range f.openings { // the downstream has failed, and calls of those who report it
		p := parts[o.workflow]
		if p == nil {
			continue // those of gateways may be of calls without a workflow
		}
		p.error(o.event)
		p.reach.add(o.by)
		if f.Root.Target == "" {
			p.failed.add(o.of.name)
			p.reach.add(o.of.name)
		}
	}
	var all names
	for w, p := range parts {
		all.addAll(p.reach)
		slices.Sort(p.failed.list)
		slices.Sort(p.reach.list)
		out.Parts = append(out.Parts, Part{
			Workflow: w, Errors: p.errors.list, Failed: p.failed.list,
			BlastRadius: p.reach.list, Cut: cut && w == f.Root.Workflow,
		})
	}
	slices.SortFunc(out.Parts, func(a, b Part) int { return strings.Compare(a.Workflow, b.Workflow) })
	if len(f.openings) > 0 && f.Root.Target == "" {
		out.Failed = max(out.Failed, 1)
	}
	out.Affected = max(len(all.list), out.Failed)
	if len(f.downstreams) > 0 {
		of := f.downstreams[0]
		out.Downstream, out.OneProbe = of.name, !of.target
		for _, o := range d.openings {
			if o.of == of {
				out.Breakers = append(out.Breakers, o.name())
			}
		}
		slices.Sort(out.Breakers)
		out.Breakers = slices.Compact(out.Breakers)
	}
	return out
}

// follows adds the agents of all that follows from the root, and reports whether these are not all.
func (d *Detector) follows(f *finding, p *part, limit int) (cut bool) {
	root := d.graph.find(f.Root.Workflow, f.Root.Node)
	if root == nil {
		return false
	}
	queue, seen := []*node{root}, map[*node]bool{root: true}
	for at := 0; at < len(queue); at++ {
		v := queue[at]
		d.work++
		p.reach.add(v.party())
		p.reach.add(v.agent.name)
		for _, c := range v.children {
			d.work++
			if len(queue) >= limit {
				return true
			}
			if !seen[c] {
				seen[c] = true
				queue = append(queue, c)
			}
		}
	}
	return false
}

func timeOf(t int64) time.Time { return time.Unix(0, t).UTC() }

// Finding returns an open finding with its whole blast radius.
func (d *Detector) Finding(id string) (Finding, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.open {
		if f.ID == id {
			return d.show(f, d.graph.nodes), true
		}
	}
	return Finding{}, false
}
