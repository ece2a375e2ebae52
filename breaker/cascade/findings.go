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

// Reason is why a node is the candidate for the root.
type Reason string

// The reasons.
const (
	Followed     Reason = "followed"        // others failed because of it
	NamedByError Reason = "named_by_errors" // the errors of others name it
	Earliest     Reason = "earliest"        // it failed first
	StillWaits   Reason = "still_waits"     // those that gave up waited for it
	BreakerOpen  Reason = "breaker_open"    // a breaker of its address is open
	IsSlow       Reason = "slow"            // its address answers slowly
	IsExhausted  Reason = "exhausted"       // a resource is exhausted
	AllAddresses Reason = "all_addresses"   // all addresses of its pool fail
	Siblings     Reason = "siblings"        // others failed beside it
	WrongAnswers Reason = "wrong_answers"   // what follows from its answers is refused
	SharedState  Reason = "shared_state"    // calls of several agents that change the same target failed
)

// Root is the candidate for the root of a cascade.
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
	Reasons           []Reason
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
	maxClosed  = 256
	maxErrors  = 64
	maxShown   = 1000 // names in the lists of closed findings, workflows of any
	maxReroots = 4
	alertWalk  = 4096
)

type finding struct {
	id         string
	pattern    Pattern
	class      Class
	root       Root
	from       *failure // the root
	group      *group
	cluster    *cluster
	openings   []counted // of which it was found, the first first
	alerted    int       // agents
	workflows  int       // at the last alert
	considered int       // failures when the root was last sought
	reroots    int
}

// judge opens a finding about a group, or updates it.
func (d *Detector) judge(g *group, t int64) {
	f := g.finding
	if f == nil {
		if len(g.parties.list) < d.set.Agents {
			return
		}
		f = &finding{group: g}
		d.seek(f, t)
		if other := d.same(f, t); other != nil {
			d.adopt(other, g, t)
			f = other
		} else {
			f.id = identify(f.pattern, f.root.Workflow, f.root.Node, g.began)
			g.finding = f
			d.begin(f)
			return
		}
	}
	if n := len(g.parties.list); n >= 2*f.alerted || len(g.workflows.list) >= 2*f.workflows {
		d.seek(f, t)
		d.announce(f, Grown)
		return
	}
	if g.size <= f.considered && !g.news || g.size > 32 && g.size < f.considered*5/4 {
		return
	}
	before, class, pattern := f.root, f.class, f.pattern
	d.seek(f, t)
	if (f.root.Agent != before.Agent || f.root.Pool != before.Pool || f.root.Target != before.Target || f.class != class || f.pattern != pattern) && f.reroots < maxReroots {
		f.reroots++
		d.announce(f, Rerooted)
	}
}

func (d *Detector) begin(f *finding) {
	if len(d.open) >= maxOpen {
		d.finish(slices.MinFunc(d.open, func(a, b *finding) int { return cmp.Compare(a.group.last, b.group.last) }), d.now)
	}
	d.open = append(d.open, f)
	d.announce(f, Opened)
}

// adopt adds a group to a finding.
func (d *Detector) adopt(f *finding, g *group, t int64) {
	if g == f.group {
		return
	}
	if len(g.members) == 0 || len(f.group.members) == 0 {
		// Only breakers were seen until now.
		f.group.finding = nil
		g.finding, g.began = f, min(g.began, f.group.began)
		for _, w := range f.group.workflows.list {
			g.workflows.add(w)
		}
		f.group = g
		return
	}
	d.union(g.members[0], f.group.members[0])
	f.group.last = max(f.group.last, t)
}

// same finds the open finding that a new one has the cause of: the same pool, as the gateway saw it, or
// calls of one workflow that could not be sent, or were not answered, at the same time.
func (d *Detector) same(f *finding, t int64) *finding {
	for _, o := range d.open {
		d.work++
		if t-o.group.last > int64(d.set.Window) {
			continue
		}
		own := f.from != nil && f.from.own
		within := slices.ContainsFunc(f.group.workflows.list, o.group.workflows.has)
		if own && f.root.Pool != "" && f.root.Pool == o.root.Pool && (within || o.from != nil && o.from.own || o.cluster != nil && o.cluster.own > 0) {
			return o
		}
		if own && f.root.Target != "" && f.root.Target == o.root.Target && (o.from == nil || o.from.own) {
			return o
		}
		if within && own && o.from != nil && o.from.own && silent(f.from) && silent(o.from) && max(f.from.at-o.from.at, o.from.at-f.from.at) <= period {
			return o
		}
	}
	return nil
}

func silent(x *failure) bool { return x.kind == Unreachable || x.kind == Timeout }

// merge ends a finding that has turned out to be a part of another.
func (d *Detector) merge(into, f *finding) {
	at := slices.Index(d.open, f)
	if at < 0 {
		return
	}
	d.open = slices.Delete(d.open, at, at+1)
	end := d.show(f, alertWalk)
	end.Into, end.Closed = into.id, moment(d.now)
	d.keep(end)
	if into.cluster == nil {
		into.cluster = f.cluster
	}
	d.settle(f, into)
}

// settle has the breakers that belong to a finding belong to another one, or to none.
func (d *Detector) settle(f, into *finding) {
	for _, c := range d.clusters {
		d.work++
		if c.finding == f {
			c.finding = into
		}
	}
}

func (d *Detector) finish(f *finding, t int64) {
	d.open = slices.Delete(d.open, slices.Index(d.open, f), slices.Index(d.open, f)+1)
	end := d.show(f, alertWalk)
	end.Closed = moment(t)
	d.settle(f, nil)
	// Its failures begin anew: what they say again is another cascade.
	for _, x := range f.group.members {
		x.over, x.place = true, -1
		if x.kept {
			d.kept--
		}
	}
	f.group.finding = nil
	f.group.members = nil
	f.group.size = 0
	f.group.parties, f.group.workflows = names{}, names{}
	d.keep(end)
}

// keep keeps a closed finding.
func (d *Detector) keep(end Finding) {
	d.changes = append(d.changes, Change{Closed, end})
	end.Parts = slices.Clone(end.Parts) // those of the change stay whole
	for i := range end.Parts {
		p := &end.Parts[i]
		if n := maxShown / len(end.Parts); len(p.BlastRadius) > n {
			p.BlastRadius, p.Cut = slices.Clone(p.BlastRadius[:n]), true
			p.Failed = slices.Clone(p.Failed[:min(n, len(p.Failed))])
		}
	}
	if len(d.closed) >= maxClosed {
		d.closed = slices.Delete(d.closed, 0, 1)
	}
	d.closed = append(d.closed, end)
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

// pattern is that of a group: in depth, if one failure explains enough others, or none is beside it.
func (d *Detector) pattern(g *group) Pattern {
	if !g.broad {
		return DepthFirst
	}
	for _, n := range d.heads(g) {
		if len(n.parties.list) >= d.set.Agents {
			return DepthFirst
		}
	}
	return BreadthFirst
}

// head is a failure without a cause in its group, and whom it explains.
type head struct {
	failure *failure
	parties names
	named   bool
}

func (d *Detector) heads(g *group) []*head {
	var all []*head
	at := map[*failure]*head{}
	for _, x := range g.members {
		if x.over || !x.sure {
			continue
		}
		top, via := x, x
		for range 64 {
			d.work++
			if top.cause == nil || top.cause.over || top.cause.group != g {
				break
			}
			via, top = top, top.cause
		}
		h := at[top]
		if h == nil {
			h = &head{failure: top}
			at[top] = h
			all = append(all, h)
		}
		if x.kind != Canceled {
			h.parties.add(x.party)
		}
		h.named = h.named || via != top && via.how == declared
	}
	return all
}

// seek finds the root: the earliest failure without a cause that others follow from, or the earliest of all where
// none does (cascade 3.4.3).
func (d *Detector) seek(f *finding, t int64) {
	g := f.group
	f.considered, g.news = g.size, false
	if f.pattern != Clustering {
		f.pattern = d.pattern(g)
	}
	heads := d.heads(g)
	if len(heads) == 0 {
		return
	}
	window := int64(d.set.Window)
	follows := func(h *head) int { return min(len(h.parties.list), 2) } // 2 where others do
	best := slices.MinFunc(heads, func(a, b *head) int {
		return cmp.Or(follows(b)-follows(a), cmp.Compare(a.failure.at, b.failure.at), cmp.Compare(a.failure.id, b.failure.id))
	})
	x := best.failure
	f.from = x
	r := Root{Workflow: x.wf.id, Node: x.id, Error: cmp.Or(x.err, x.id), Agent: x.party}
	if x.pool != nil && x.own {
		r.Pool, r.Address = x.pool.name, x.address
		r.Agent = x.pool.agent
	}
	if follows(best) > 1 {
		r.Reasons = append(r.Reasons, Followed)
	}
	if best.named {
		r.Reasons = append(r.Reasons, NamedByError)
	}
	if !slices.ContainsFunc(heads, func(h *head) bool { return h.failure.at < x.at }) {
		r.Reasons = append(r.Reasons, Earliest)
	}
	f.class = Agent
	if x.pool != nil && x.own {
		if a := x.pool.addresses[x.address]; a != nil {
			if len(a.open) > 0 {
				r.Reasons = append(r.Reasons, BreakerOpen)
			}
			if a.slow {
				r.Reasons = append(r.Reasons, IsSlow)
			}
		}
		if x.pool.down(t, window) && x.pool.kin.fails.total > 1 {
			f.class = Service
			r.Reasons = append(r.Reasons, AllAddresses)
		}
		if x.kind == Exhausted && d.exhausted("") {
			f.class = Infrastructure
		}
		if x.kind == Exhausted && (d.exhausted("") || d.exhausted(x.pool.name)) {
			r.Reasons = append(r.Reasons, IsExhausted)
		}
	}
	pools := map[*pool]bool{}
	for _, h := range heads {
		y := h.failure
		if gap := y.at - x.at; y.pool == nil || !y.own || max(gap, -gap) > partition {
			continue
		}
		pools[y.blamed()] = true
	}
	f.root = r
	switch {
	case x.spoilt:
		f.class = Service
		f.root = Root{
			Workflow: x.wf.id, Node: x.givenBy, Error: x.givenBy, Agent: x.given.agent, Pool: x.given.name,
			Reasons: append(f.root.Reasons, WrongAnswers),
		}
	case d.common(f, heads, t):
	case len(pools) > 1 && g.wide:
		f.class = Infrastructure
		f.root.Reasons = append(f.root.Reasons, Siblings)
	case x.waits != nil:
		f.root = Root{
			Workflow: x.wf.id, Node: x.waitsFor, Error: x.waitsFor, Agent: x.waits.agent, Pool: x.waits.name,
			Reasons: append(f.root.Reasons, StillWaits),
		}
		if i := d.graph.find(x.wf.id, x.waitsFor); i != none && d.graph.nodes[i].fail != nil {
			y := d.graph.nodes[i].fail
			f.root.Error, f.root.Address = cmp.Or(y.err, x.waitsFor), y.address
		}
	}
}

// common makes the target the root of a finding if that is what its failures have in common: they are of several
// services, or of several agents at one service that fails nowhere else.
func (d *Detector) common(f *finding, heads []*head, t int64) bool {
	x := f.from
	if x.target == nil || !x.own || x.waits != nil {
		return false
	}
	var agents names
	pools, others := map[*pool]bool{}, map[*pool]bool{}
	first := x.at
	for _, h := range heads {
		y := h.failure
		p := y.blamed()
		if p == nil || !y.own {
			continue
		}
		if y.target != x.target {
			others[p] = true
			continue
		}
		agents.add(y.agent)
		pools[p] = true
		first = min(first, y.at)
	}
	for p := range pools {
		if others[p] { // it fails elsewhere, too
			return false
		}
	}
	one := len(pools) == 1
	if len(agents.list) < 2 || one && x.blamed().unwell(t) {
		return false
	}
	r := &f.root
	r.Target, r.Address = x.target.name, ""
	r.Reasons = append(slices.DeleteFunc(r.Reasons, func(r Reason) bool { return r == AllAddresses }), SharedState)
	f.class = Service
	if !one {
		f.class = Infrastructure
		r.Agent, r.Pool = "", ""
	}
	if !silent(x) {
		for _, w := range x.target.writes {
			if w.workflow == x.wf && w.at <= first {
				r.LastWrite = w.node
			}
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

// show is a finding as it is now. Its blast radius is walked over at most the given number of nodes.
func (d *Detector) show(f *finding, limit int) Finding {
	g := f.group
	out := Finding{
		ID: f.id, Pattern: f.pattern, Class: f.class, Root: f.root, Failed: len(g.parties.list),
		Began: moment(g.began), Last: moment(g.last),
	}
	out.Root.Reasons = slices.Clone(f.root.Reasons)
	type lists struct{ errors, failed, blast names }
	parts := map[string]*lists{}
	for _, w := range g.workflows.list[:min(len(g.workflows.list), maxShown)] {
		parts[w] = new(lists)
	}
	var all names
	affect := func(l *lists, name string) {
		l.blast.add(name)
		all.add(name)
	}
	members := slices.Clone(g.members)
	slices.SortStableFunc(members, func(a, b *failure) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.id, b.id)) })
	for _, x := range members {
		l := parts[x.wf.id]
		if l == nil || x.over || !x.sure {
			continue
		}
		if x.err != "" && len(l.errors.list) < maxErrors {
			l.errors.add(x.err)
		}
		if x.kind != Canceled {
			l.failed.add(x.party)
		}
		affect(l, x.party)
		affect(l, x.agent)
	}
	from := d.graph.find(f.root.Workflow, f.root.Node)
	cut := false
	if l := parts[f.root.Workflow]; from != none && l != nil {
		queue, seen := []int32{from}, map[int32]bool{from: true}
		for at := 0; at < len(queue); at++ {
			d.work++
			v := &d.graph.nodes[queue[at]]
			affect(l, v.party())
			affect(l, v.hold.agent.name)
			for e := v.children; e != none; e = d.graph.edges[e].nextChild {
				d.work++
				if len(queue) >= limit {
					cut = true
					break
				}
				if c := d.graph.edges[e].child; !seen[c] {
					seen[c] = true
					queue = append(queue, c)
				}
			}
		}
	}
	for _, o := range f.openings { // the downstream has failed, and calls of those who report it
		l := parts[o.workflow]
		if l == nil {
			l = new(lists) // those of gateways may be of calls without a workflow
		}
		if o.event != "" && len(l.errors.list) < maxErrors {
			l.errors.add(o.event)
		}
		affect(l, o.by)
		if f.root.Target == "" {
			l.failed.add(o.downstream)
			affect(l, o.downstream)
		}
	}
	for w, l := range parts {
		slices.Sort(l.failed.list)
		slices.Sort(l.blast.list)
		out.Parts = append(out.Parts, Part{
			Workflow: w, Errors: l.errors.list, Failed: l.failed.list, BlastRadius: l.blast.list, Cut: cut && w == f.root.Workflow,
		})
	}
	slices.SortFunc(out.Parts, func(a, b Part) int { return strings.Compare(a.Workflow, b.Workflow) })
	if out.Failed == 0 && len(f.openings) > 0 && f.root.Target == "" {
		out.Failed = 1
	}
	out.Affected = max(len(all.list), out.Failed)
	if c := f.cluster; c != nil {
		out.Downstream, out.OneProbe = c.downstream.name, !c.downstream.target
		out.Breakers = c.names()
	}
	return out
}

func moment(t int64) time.Time { return time.Unix(0, t).UTC() }

// Findings returns the open findings and the last 256 closed ones, the newest first.
func (d *Detector) Findings() []Finding {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]Finding, 0, len(d.open)+len(d.closed))
	for _, f := range d.open {
		all = append(all, d.show(f, alertWalk))
	}
	all = append(all, d.closed...)
	slices.SortStableFunc(all, func(a, b Finding) int { return b.Began.Compare(a.Began) })
	return all
}

// Finding returns a finding with its whole blast radius.
func (d *Detector) Finding(id string) (Finding, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.open {
		if f.id == id {
			return d.show(f, len(d.graph.nodes)), true
		}
	}
	for _, f := range d.closed {
		if f.ID == id {
			return f, true
		}
	}
	return Finding{}, false
}

// downstream is an agent, or an address, or a target that several services change.
type downstream struct {
	name   string
	target bool
}

// cluster are the open breakers on one downstream.
type cluster struct {
	downstream downstream
	opens      map[opening]opened
	own        int // of them those of gateways
	finding    *finding
}

// opening is whose breaker it is: that of an agent in a workflow, or of a gateway for an address; for a target
// that of a service, whose addresses are one.
type opening struct{ workflow, by, holder, address string }

type opened struct {
	at, own                  int64  // newest time of any event, and its own: after a restart they differ
	seq                      uint64 // orders openings of one time
	event, address, workflow string
}

// counted is an opening for which a finding was opened.
type counted struct {
	opened
	by, downstream string
}

// counted returns the openings on a downstream within the window that count for a workflow: those of gateways, and
// those that its agents report. The first comes first.
func (c *cluster) counted(workflow string, since int64) (all []counted) {
	for o, at := range c.opens {
		if at.at >= since && (o.by == "" || o.workflow == workflow) {
			all = append(all, counted{at, o.by, c.downstream.name})
		}
	}
	slices.SortFunc(all, func(a, b counted) int { return cmp.Or(cmp.Compare(a.own, b.own), cmp.Compare(a.seq, b.seq)) })
	return all
}

func (c *cluster) names() []string {
	var all []string
	for o, at := range c.opens {
		name := strings.TrimPrefix(o.holder+" "+at.address, " ")
		all = append(all, cmp.Or(o.by, name))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// cluster counts the breakers on one downstream: those of gateways, and those that agents of one
// workflow report. It has opened or closed at its own time, which may be before t, the newest of any event.
func (d *Detector) cluster(t, own int64, of downstream, b *Breaker) {
	o := opening{holder: b.Holder, address: b.Address}
	if of.target {
		o.address = b.Pool
	}
	if b.By != "" {
		o = opening{workflow: b.Workflow, by: b.By}
	}
	name := b.Pool
	for _, p := range d.pools {
		d.work++
		if b.Pool == "" && p.agent == b.Downstream && (name == "" || p.name < name) {
			name = p.name
		}
	}
	if of.target {
		name = ""
	}
	known := d.pools[name]
	if b.By != "" && known != nil && !known.callers.has(b.By) {
		return // it has not called that downstream
	}
	c := d.clusters[of]
	if !b.Open {
		if c != nil {
			d.remove(c, o)
			if len(c.opens) == 0 && c.finding == nil {
				delete(d.clusters, c.downstream)
			}
		}
		return
	}
	if c == nil {
		if len(d.clusters) >= maxNames && !d.sweep(t, b.By == "") {
			return
		}
		c = &cluster{downstream: downstream{strings.Clone(of.name), of.target}, opens: map[opening]opened{}}
		d.clusters[c.downstream] = c
	}
	if _, there := c.opens[o]; !there {
		if len(c.opens) >= maxMembers || d.opens >= maxOpens && !d.sweep(t, b.By == "") {
			return
		}
		d.opens++
		d.clusters[c.downstream] = c // also if it was swept
		if b.By == "" {
			c.own++
		}
	}
	d.openings++
	c.opens[o] = opened{t, own, d.openings, strings.Clone(b.Event), strings.Clone(b.Address), strings.Clone(b.Workflow)}
	ours := 0
	reported := map[string]int{b.Workflow: 0}
	for k, v := range c.opens {
		d.work++
		if t-v.at > int64(d.set.Window) {
			if c.finding == nil {
				d.remove(c, k)
			}
			continue
		}
		if k.by == "" {
			ours++
		} else {
			reported[k.workflow]++
		}
	}
	workflow, most := b.Workflow, reported[b.Workflow]
	if b.By == "" {
		for w, n := range reported {
			if n > most || n == most && w < workflow {
				workflow, most = w, n
			}
		}
	}
	if ours+most < clusterSize || c.finding != nil {
		if f := c.finding; f != nil {
			f.group.last = t
		}
		return
	}
	for _, f := range d.open {
		joins := name != "" && f.root.Pool == name && (f.group.workflows.has(workflow) || ours >= clusterSize && f.from != nil && f.from.own)
		if of.target { // they have opened because of its failures, or are those that it is about
			joins = f.root.Target == of.name || f.from != nil && f.from.own && c.opens[opening{address: f.root.Pool}].at != 0 || f.cluster != nil && f.cluster.within(c)
		}
		if joins {
			c.finding = f
			if f.cluster == nil {
				f.cluster = c
			}
			f.group.last = t
			d.announce(f, Grown)
			return
		}
	}
	openings := c.counted(workflow, t-int64(d.set.Window))
	first := openings[0]
	g := &group{began: first.own, last: t}
	g.workflows.add(workflow)
	for _, o := range openings {
		g.workflows.add(o.workflow)
	}
	f := &finding{
		id: identify(Clustering, workflow, of.name, first.own), pattern: Clustering, class: Service, group: g, cluster: c, openings: openings,
		root: Root{Workflow: cmp.Or(first.workflow, workflow), Error: first.event, Agent: of.name, Pool: name, Reasons: []Reason{BreakerOpen}},
	}
	if of.target {
		f.class = Infrastructure
		f.root.Agent, f.root.Target, f.root.Reasons = "", c.downstream.name, append(f.root.Reasons, SharedState)
	}
	if known != nil && !known.down(t, int64(d.set.Window)) {
		f.class = Agent
	}
	g.finding, c.finding = f, f
	d.begin(f)
}

// within reports whether one of the breakers is of a service of the target's cluster.
func (c *cluster) within(of *cluster) bool {
	for _, at := range c.opens {
		for _, other := range of.opens {
			if at.address == other.address {
				return true
			}
		}
	}
	return false
}

func (d *Detector) remove(c *cluster, o opening) {
	if _, there := c.opens[o]; !there {
		return
	}
	if o.by == "" {
		c.own--
	}
	delete(c.opens, o)
	d.opens--
}

// sweep makes room for a downstream: of those that are too old to count, and for a breaker of a gateway
// also of those that agents report.
func (d *Detector) sweep(t int64, own bool) bool {
	if !own && t-d.swept < int64(time.Second) {
		return false
	}
	d.swept = t
	for name, c := range d.clusters {
		newest := never
		for _, v := range c.opens {
			newest = max(newest, v.at)
		}
		if c.finding == nil && (t-newest > int64(d.set.Window) || own && c.own == 0) {
			d.opens -= len(c.opens)
			delete(d.clusters, name)
		}
	}
	return len(d.clusters) < maxNames && d.opens < maxOpens
}
