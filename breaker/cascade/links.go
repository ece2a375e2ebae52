package cascade

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"
)

// failure is a failed node. It survives the node while a finding lists it.
type failure struct {
	node     int32 // none when that was forgotten
	wf       *workflow
	pool     *pool
	target   *target
	group    *group
	cause    *failure
	id, err  string
	agent    string // whose action it is
	party    string // who failed, as far as the evidence goes
	address  string
	awaits   []key
	place    int // in the members of its group
	at       int64
	started  int64
	kind     Kind
	how      link
	waits    *pool  // what it waited for in the end, if it timed out
	waitsFor string // that call
	given    *pool  // whose answer a refused call follows from
	givenBy  string // that call
	spoilt   bool   // and it is not the only one
	own      bool   // the gateway saw it
	sure     bool   // somebody else than its agent attests it
	open     []tie  // of one that is not sure
	kept     bool   // its node is forgotten, and a finding lists it
	over     bool   // it was retried with success, or taken back
}

// link is what a cause rests on, the weakest first.
type link uint8

const (
	placed   link = iota // by their places in the DAG
	late                 // the effect was seen before the cause: it gave up waiting
	declared             // the error names it
)

// tie is a link that does not count yet, since one of the two is not sure.
type tie struct {
	effect, cause *failure
	how           link
}

// group is a set of failures that are linked.
type group struct {
	members     []*failure // at most maxMembers
	size        int
	parties     names
	workflows   names
	broad       bool // linked side by side, not only as cause and effect
	wide        bool // several pools failed together
	news        bool // a cause has changed since the root was sought
	began, last int64
	finding     *finding
}

const (
	maxMembers  = 1024
	maxParties  = 1024 // and workflows of a finding, callers of a pool
	maxKept     = 4096 // failures that findings list and whose nodes are forgotten
	hops        = 3    // between an ancestor and a descendant that are linked
	maxTies     = 8
	visits      = 32 // of nodes, to find ancestors
	period      = int64(10 * time.Second)
	slack       = int64(time.Second)      // reports of one moment may be so far apart
	together    = int64(2 * time.Second)  // failures of one moment
	maxBreakers = 64                      // that an agent may report within Settings.Window
	partition   = int64(20 * time.Second) // pools that cannot be reached within it have failed together
	chance      = 1e-3                    // at which failures side by side are no coincidence
	usual       = 0.03                    // rate of failures that is always assumed
	worst       = 0.3                     // and the highest one that is learned
)

// names is a set of names in the order of their arrival.
type names struct {
	list  []string
	index map[string]bool
}

func (n *names) add(name string) {
	if len(n.list) >= maxParties || name == "" || n.has(name) {
		return
	}
	n.list = append(n.list, name)
	if n.index != nil {
		n.index[name] = true
	} else if len(n.list) > 16 {
		n.index = map[string]bool{}
		for _, l := range n.list {
			n.index[l] = true
		}
	}
}

func (n *names) has(name string) bool {
	if n.index != nil {
		return n.index[name]
	}
	return slices.Contains(n.list, name)
}

func (g *group) join(x *failure) {
	x.group = g
	g.size++
	x.place = -1
	if len(g.members) < maxMembers {
		x.place = len(g.members)
		g.members = append(g.members, x)
	}
	g.party(x)
	g.workflows.add(x.wf.id)
	g.began = min(g.began, x.at)
}

// leave takes a failure out of the members of its group. Who failed is counted anew if few remain: one
// failure more or less decides there.
func (g *group) leave(x *failure) {
	if x.place < 0 {
		return
	}
	last := len(g.members) - 1
	g.members[x.place] = g.members[last]
	g.members[x.place].place = x.place
	g.members[last] = nil
	g.members = g.members[:last]
	x.place = -1
	g.size--
	if g.finding != nil || last > visits {
		return
	}
	g.parties, g.workflows = names{}, names{}
	for _, m := range g.members {
		g.party(m)
		g.workflows.add(m.wf.id)
	}
}

// party counts who failed. An agent whose work nobody waited for has not, and one that only says so itself
// is not counted.
func (g *group) party(x *failure) {
	if x.sure && x.kind != Canceled {
		g.parties.add(x.party)
	}
}

// recent counts what happened in the present period and the one before.
type recent struct{ total, now, before, period int32 }

func (r *recent) turn(t int64) {
	p := int32(t / period)
	switch {
	case p == r.period+1:
		r.before, r.now = r.now, 0
	case p > r.period:
		r.before, r.now = 0, 0
	}
	r.period = p
}

func (r *recent) add(t int64) {
	r.turn(t)
	r.now++
	r.total++
}

func (r *recent) addMany(t int64, n int) {
	r.turn(t)
	r.now += int32(n)
}

func (r *recent) count(t int64) int {
	r.turn(t)
	return int(r.now + r.before)
}

// family are the failures of nodes side by side: of one parent, or of one pool.
type family struct {
	recent [16]*failure
	next   int
	fails  recent
}

// add adds a failure and returns the others that are of the same time.
func (f *family) add(x *failure, t int64) []*failure {
	f.fails.add(t)
	var same []*failure
	for _, y := range f.recent {
		if y != nil && y != x && !y.over && y.cause == nil && max(x.at-y.at, y.at-x.at) <= period {
			same = append(same, y)
		}
	}
	f.recent[f.next%len(f.recent)] = x
	f.next++
	return same
}

// pool is an upstream service.
type pool struct {
	name, agent string
	addresses   map[string]*address
	known       map[string]bool
	kin         family
	followers   family // refused calls that follow from its answers
	fed         recent // others that do
	oks         recent
	rate        float64 // of failures, over a long time
	callers     names   // whose calls passed the gateway
}

type address struct {
	failed, answered int64
	open             map[string]bool // holders of open breakers
	slow             bool
}

// opens notes the breaker of a holder.
func (a *address) opens(holder string, open bool) {
	switch {
	case !open:
		delete(a.open, holder)
	case a.open == nil:
		a.open = map[string]bool{strings.Clone(holder): true}
	case len(a.open) < maxMembers:
		a.open[strings.Clone(holder)] = true
	}
}

func (p *pool) at(name string) *address {
	a := p.addresses[name]
	if a == nil {
		a = &address{failed: never, answered: never}
		if len(p.addresses) < maxMembers {
			p.addresses[strings.Clone(name)] = a
		}
	}
	return a
}

func (p *pool) learn(outcome float64) { p.rate += (outcome - p.rate) / 512 }

func (p *pool) usual() float64 { return min(max(p.rate, usual), worst) }

// down reports whether all addresses fail, have open breakers or are slow.
func (p *pool) down(t, window int64) bool {
	if len(p.addresses) < max(len(p.known), 1) {
		return false
	}
	for _, a := range p.addresses {
		if len(a.open) == 0 && !a.slow && (a.failed <= a.answered || t-a.failed > window) {
			return false
		}
	}
	return true
}

// unwell reports whether more of its calls fail than is usual.
func (p *pool) unwell(t int64) bool {
	fails := p.kin.fails.count(t)
	return unlikely(fails, fails+p.oks.count(t), p.usual())
}

// unlikely reports whether k or more failures of n are no coincidence at the given rate: the tail of the
// binomial distribution.
func unlikely(k, n int, rate float64) bool {
	if k < 2 {
		return false
	}
	n = max(n, k)
	term := math.Pow(1-rate, float64(n))
	if term == 0 {
		return float64(k) > float64(n)*rate*2
	}
	tail := 1.0
	for i := range k {
		tail -= term
		term *= float64(n-i) / float64(i+1) * rate / (1 - rate)
	}
	return tail < chance
}

// called looks for the call to an agent that its node belongs to: whether there is one, and whether the
// gateway saw it end well.
func (d *Detector) called(i int32) (called, well bool) {
	v := &d.graph.nodes[i]
	for e := v.parents; e != none; e = d.graph.edges[e].nextParent {
		d.work++
		p := &d.graph.nodes[d.graph.edges[e].parent]
		if p.pool != nil && p.party() == v.hold.agent.name {
			called, well = true, well || p.seen && p.state == succeeded
		}
	}
	return called, well
}

// retract takes back what an agent has reported of its part of a call that ended well.
func (d *Detector) retract(i int32) {
	v := &d.graph.nodes[i]
	seen := 0
	for e := v.children; e != none && seen < visits; e = d.graph.edges[e].nextChild {
		seen++
		x := d.graph.nodes[d.graph.edges[e].child].fail
		if x != nil && !x.own && x.agent == v.party() {
			x.over = true
			if x.group.finding == nil {
				x.group.leave(x)
			}
		}
	}
	d.work += int64(seen)
}

// drop forgets a failure with its node.
func (d *Detector) drop(x *failure) {
	x.node = none
	if k := (key{x.wf, x.err}); d.errors[k] == x {
		delete(d.errors, k)
	}
	for _, k := range x.awaits {
		if left := slices.DeleteFunc(d.awaited[k], func(y *failure) bool { return y == x }); len(left) > 0 {
			d.awaited[k] = left
		} else {
			delete(d.awaited, k)
		}
	}
	x.awaits, x.open = nil, nil
	d.work += visits
	if x.group.finding != nil && x.place >= 0 && d.kept < maxKept {
		d.kept++
		x.kept = true
		return
	}
	x.cause = nil // a chain of causes keeps nothing alive
	x.group.leave(x)
}

// explain makes y the cause of x, unless x has a better one, and links them.
func (d *Detector) explain(x, y *failure, how link) {
	if x == y || x.wf != y.wf {
		return
	}
	if how == declared && x.agent != y.agent {
		d.attest(y)
	}
	if !x.sure || !y.sure {
		for _, z := range []*failure{x, y} {
			if !z.sure && len(z.open) < maxTies {
				z.open = append(z.open, tie{x, y, how})
			}
		}
		return
	}
	better := x.cause == nil || how > x.how || how == x.how && y.at > x.cause.at && y.at <= x.at+slack
	steps := 0
	for z := y; z != nil && better; z = z.cause {
		if steps++; z == x || steps > 64 {
			better = false
		}
	}
	d.work += int64(steps)
	if better {
		x.cause, x.how, x.group.news = y, how, true
	}
	d.union(x, y)
}

// attest makes a failure count that only its agent had reported.
func (d *Detector) attest(x *failure) {
	if x.sure {
		return
	}
	x.sure = true
	x.group.party(x)
	ties := x.open
	x.open = nil
	for _, t := range ties {
		if !t.effect.over && !t.cause.over {
			d.explain(t.effect, t.cause, t.how)
		}
	}
}

// union makes one group of two.
func (d *Detector) union(x, y *failure) *group {
	a, b := x.group, y.group
	if a == b {
		return a
	}
	if len(a.members) < len(b.members) || len(a.members) == len(b.members) && a.began > b.began {
		a, b = b, a
	}
	d.work += int64(len(b.members) + len(b.parties.list))
	for _, m := range b.members {
		m.group, m.place = a, -1
		if len(a.members) < maxMembers {
			m.place = len(a.members)
			a.members = append(a.members, m)
		} else if m.kept {
			d.kept--
		}
	}
	a.size += b.size
	a.broad, a.wide, a.news = a.broad || b.broad, a.wide || b.wide, a.news || b.news
	a.began, a.last = min(a.began, b.began), max(a.last, b.last)
	for _, p := range b.parties.list {
		a.parties.add(p)
	}
	for _, w := range b.workflows.list {
		a.workflows.add(w)
	}
	if f := b.finding; f != nil {
		if a.finding == nil {
			a.finding, f.group = f, a
		} else {
			d.merge(a.finding, f)
		}
	}
	return a
}

// named links a failure with those that its error names, now or when they become known.
func (d *Detector) named(x *failure, causes []string) {
	for _, id := range causes[:min(len(causes), maxCauses)] {
		d.work++
		k := key{x.wf, id}
		if y := d.errors[k]; y != nil {
			d.explain(x, y, declared)
			continue
		}
		if i, there := d.graph.ids[k]; there && d.graph.nodes[i].fail != nil {
			if y := d.graph.nodes[i].fail; y.at <= x.at+period {
				d.explain(x, y, declared)
			}
			continue
		}
		waiting := d.awaited[k]
		if len(id) > maxID || len(x.awaits) >= maxCauses || len(waiting) >= maxCauses || slices.Contains(waiting, x) {
			continue
		}
		k.id = strings.Clone(id)
		d.awaited[k] = append(waiting, x)
		x.awaits = append(x.awaits, k)
		d.graph.charge(x.node, costAwaited)
	}
}

// awaitedAs links a failure with those that have named its node before it was known to fail.
func (d *Detector) awaitedAs(x *failure, v *node) {
	for _, id := range append([]string{v.id}, v.aliases...) {
		k := key{x.wf, id}
		for _, y := range d.awaited[k] {
			if d.work++; x.at <= y.at+period {
				d.explain(y, x, declared)
			}
		}
		delete(d.awaited, k)
	}
}

// link adds an edge. What is known of the child by then counts for the parent, as if that had been known first.
func (d *Detector) link(p, c int32, t int64) {
	if !d.graph.link(p, c) {
		return
	}
	u, v := &d.graph.nodes[p], &d.graph.nodes[c]
	if v.state == succeeded {
		d.went(p, v, t)
	}
	var late []*failure
	if x := v.fail; x != nil && !x.over {
		called, well := d.called(c)
		switch {
		case !x.own && well, d.retried(c, x.at, x.own):
			x.over = true
			if x.group.finding == nil {
				x.group.leave(x)
			}
		default:
			if called {
				d.attest(x)
			}
			d.siblings(x, p)
			if x.own && x.kind == Rejected && x.cause == nil {
				d.spoilt(x, u)
			}
			late = append(late, x)
		}
	}
	if v.under != nil {
		for _, n := range v.under {
			if y := n.failure; y != nil && y.node != none && !y.over {
				late = append(late, y)
			}
		}
	}
	for _, x := range late {
		d.above(x)
	}
	if v.started < t {
		late = append(late, d.waiters(p)...)
	}
	for _, x := range late {
		d.judge(x.group, t)
	}
}

// went counts a good end at a parent. One that was a retry shows that what it replaces has caused nothing.
func (d *Detector) went(parent int32, v *node, t int64) {
	d.work++
	p := &d.graph.nodes[parent]
	if v.pool != nil {
		p.ok.add(t)
	}
	if v.seen && v.pool != nil && p.pool != nil && p.state == succeeded {
		p.pool.fed.add(t)
	}
	if p.kids == nil {
		return
	}
	for _, x := range p.kids.recent {
		if x != nil && x.at <= v.ended && x.party == v.party() && x.agent == v.hold.agent.name && (v.seen || !x.own) {
			x.over = true
		}
	}
}

// retried reports whether a later retry of what a node has failed in has gone well: it is known first if it
// was made elsewhere.
func (d *Detector) retried(i int32, at int64, own bool) bool {
	g := &d.graph
	v := &g.nodes[i]
	party := v.hold.agent.name
	if own {
		party = v.party()
	}
	for e := v.parents; e != none; e = g.edges[e].nextParent {
		steps := 0
		for c := g.nodes[g.edges[e].parent].children; c != none && steps < visits; c = g.edges[c].nextChild {
			steps++
			o := &g.nodes[g.edges[c].child]
			if o.state == succeeded && o.ended > at && (o.seen || !own) && o.hold.agent == v.hold.agent && o.party() == party {
				return true
			}
		}
		d.work += int64(steps)
	}
	return false
}

// waiters finds anew what those have waited for that timed out above a node, or at it, and returns those for which
// that is something else now.
func (d *Detector) waiters(i int32) (changed []*failure) {
	g := &d.graph
	queue := make([]int32, 1, visits)
	queue[0] = i
	for at := 0; at < len(queue); at++ {
		u := &g.nodes[queue[at]]
		if x := u.fail; x != nil && x.kind == Timeout && !x.over {
			before := x.waits
			if d.waited(x); x.waits != before {
				x.group.news = true
				changed = append(changed, x)
			}
		}
		for e := u.parents; e != none && len(queue) < visits; e = g.edges[e].nextParent {
			d.work++
			if p := g.edges[e].parent; !slices.Contains(queue, p) {
				queue = append(queue, p)
			}
		}
	}
	return changed
}

// above looks for failed ancestors, and leaves a notice at all, for those that fail later. A node that
// ended well has passed nothing on.
func (d *Detector) above(x *failure) {
	type step struct {
		node, hops int32
	}
	g := &d.graph
	queue := make([]step, 1, visits)
	queue[0] = step{x.node, 0}
	for at := 0; at < len(queue); at++ {
		s := queue[at]
		for e := g.nodes[s.node].parents; e != none; e = g.edges[e].nextParent {
			if len(queue) >= visits {
				return
			}
			d.work++
			i := g.edges[e].parent
			u := &g.nodes[i]
			if u.state == succeeded || slices.ContainsFunc(queue, func(q step) bool { return q.node == i }) {
				continue
			}
			if x.kind != Canceled {
				d.leave(i, notice{x, s.node})
			}
			switch y := u.fail; {
			case y == nil || y.over:
			case y.at > x.at:
				d.below(y) // it was known first, but has failed later
			default:
				d.relate(y, x)
			}
			if s.hops+1 < hops {
				queue = append(queue, step{i, s.hops + 1})
			}
		}
	}
}

// leave leaves a notice at a node: one of the reports of each agent, so that they do not push out others. The
// newest failures stay.
func (d *Detector) leave(i int32, n notice) {
	u := &d.graph.nodes[i]
	if u.under == nil {
		u.under = new([4]notice)
		d.graph.charge(i, costNotices)
	}
	x := n.failure
	place := slices.IndexFunc(u.under[:], func(o notice) bool {
		y := o.failure
		return y != nil && y.agent == x.agent && y.own == x.own && (!x.own || y.party == x.party)
	})
	if place < 0 {
		place = slices.IndexFunc(u.under[:], func(o notice) bool { return o.failure == nil || o.failure.node == none })
	}
	if place < 0 {
		for i := range u.under {
			if y := u.under[i].failure; place < 0 || u.under[place].failure.own && !y.own || u.under[place].failure.own == y.own && y.at < u.under[place].failure.at {
				place = i
			}
		}
	}
	if y := u.under[place].failure; y != nil && y.node != none && y.at > x.at && y.own == x.own {
		return
	}
	copy(u.under[place:], u.under[place+1:])
	u.under[len(u.under)-1] = n
}

// below looks for failures that can have caused one: the last before it, which the gateway saw if
// there is one, and others of the same moment.
func (d *Detector) below(x *failure) {
	v := &d.graph.nodes[x.node]
	if v.under == nil {
		return
	}
	var best *failure
	fits := func(n *notice) bool {
		f := n.failure
		return f != nil && !f.over && f.node != none && f.at <= x.at+slack && x.at-f.at <= int64(d.set.Window) &&
			d.graph.nodes[n.via].state != succeeded
	}
	for k := range v.under {
		if n := &v.under[k]; fits(n) && (best == nil || n.failure.own && !best.own || n.failure.own == best.own && n.failure.at >= best.at) {
			best = n.failure
		}
	}
	if best == nil {
		return
	}
	d.relate(x, best)
	for k := range v.under {
		if n := &v.under[k]; fits(n) && n.failure != best && max(best.at-n.failure.at, n.failure.at-best.at) <= together {
			d.relate(x, n.failure)
		}
	}
}

// relate decides which of two failures is the cause of the other: u is that of an ancestor.
func (d *Detector) relate(u, v *failure) {
	if gap := u.at - v.at; max(gap, -gap) > int64(d.set.Window) {
		return
	}
	if v.agent != u.agent || v.own {
		d.attest(u) // who failed below names it as what it follows from
	}
	switch {
	case v.kind == Canceled:
		if u.at <= v.at+slack {
			d.explain(v, u, placed)
		}
	case u.kind == Canceled:
		if v.at >= u.at {
			d.explain(v, u, placed)
		}
	case v.at <= u.at+slack:
		d.explain(u, v, placed) // a callee failed
	case v.started <= u.at && (u.kind == Timeout || u.kind == Dependency):
		d.explain(u, v, late)
	case u.cause == nil && (v.started <= u.at || v.started-u.at <= period && d.graph.parent(u.node, v.node)):
		d.explain(v, u, placed) // it was given nothing to go on with
	}
}

// blamed is the pool that failed: that of the call, of the one that it still waited for, or of the wrong
// answer that it was made from.
func (x *failure) blamed() *pool {
	if x.spoilt {
		return x.given
	}
	return cmp.Or(x.waits, x.pool)
}

// waited follows what a node that timed out waited for down to the call that had no answer then: none if it was
// its own work. The call must have taken half of the time.
func (d *Detector) waited(x *failure) {
	g := &d.graph
	deepest := none
	at, steps := x.node, 0
	if x.kind != Timeout {
		return
	}
	for at != none && steps < visits {
		next := none
		for e := g.nodes[at].children; e != none && next == none && steps < visits; e = g.edges[e].nextChild {
			steps++
			c := g.edges[e].child
			v := &g.nodes[c]
			open := v.state == running || v.state == succeeded && v.ended > x.at ||
				v.fail != nil && (v.fail.at > x.at || v.fail.kind == Canceled && v.fail.at >= x.at-slack)
			if open && 4*(x.at-v.started) >= x.at-g.nodes[at].started && (v.pool != nil || v.children != none) {
				next = c
			}
		}
		if at = next; at != none && g.nodes[at].pool != nil {
			deepest = at
		}
	}
	d.work += int64(steps)
	if x.waits = nil; deepest != none {
		x.waits, x.waitsFor = g.nodes[deepest].pool, g.nodes[deepest].id
	}
}

// beside links failures of siblings, and of calls to one pool, if they are no coincidence. Only what the
// gateway saw is counted (P3).
func (d *Detector) beside(x *failure) {
	if !x.own || x.kind == Canceled || x.cause != nil {
		return
	}
	g, t := &d.graph, d.now
	for e := g.nodes[x.node].parents; e != none; e = g.edges[e].nextParent {
		d.siblings(x, g.edges[e].parent)
	}
	for e := g.nodes[x.node].parents; e != none && x.kind == Rejected; e = g.edges[e].nextParent {
		d.spoilt(x, &g.nodes[g.edges[e].parent])
	}
	p := x.blamed()
	if p == nil || x.kind == Rejected || x.kind == Refused {
		return
	}
	if x.kind == Unreachable {
		d.lost(x)
	}
	if x.target != nil {
		d.shared(x)
	}
	same := p.kin.add(x, t)
	if p.unwell(t) {
		for _, y := range same {
			d.union(x, y).broad = true
		}
	}
}

// siblings links the failures of one parent.
func (d *Detector) siblings(x *failure, parent int32) {
	d.work++
	if !x.own || x.kind == Canceled || x.cause != nil {
		return
	}
	p := &d.graph.nodes[parent]
	if p.kids == nil {
		p.kids = new(family)
		d.graph.charge(parent, costKids)
	}
	same := p.kids.add(x, d.now)
	rate := usual
	var parties names
	parties.add(x.party)
	for _, y := range same {
		parties.add(y.party)
		if y.pool != nil {
			rate = max(rate, y.pool.usual())
		}
	}
	n := int(p.calls-p.ok.total) + p.ok.count(d.now)
	if len(parties.list) >= d.set.Agents && unlikely(p.kids.fails.count(d.now), n, rate) {
		for _, y := range same {
			g := d.union(x, y)
			g.broad, g.wide = true, true
		}
	}
}

// shared links failures of calls of several agents that change one target, of one service or of several, if they
// are no coincidence (cascade 3.1.2, shared state).
func (d *Detector) shared(x *failure) {
	r := x.target
	same := r.kin.add(x, d.now)
	fails, rate := r.kin.fails.count(d.now), usual
	var agents names
	for _, y := range append(same, x) {
		agents.add(y.agent)
		if p := y.blamed(); p != nil {
			rate = max(rate, p.usual())
		}
	}
	if len(agents.list) > 1 && unlikely(fails, fails+r.oks.count(d.now), rate) {
		for _, y := range same {
			d.union(x, y).broad = true
		}
	}
}

// spoilt links calls that were refused for what they were given, if they follow from answers of one pool
// and that is no coincidence: its answers are wrong (cascade 3.1.1, semantic failures).
func (d *Detector) spoilt(x *failure, p *node) {
	d.work++
	if p.pool == nil || p.state != succeeded {
		return
	}
	x.given, x.givenBy = p.pool, p.id
	same := p.pool.followers.add(x, d.now)
	fails := p.pool.followers.fails.count(d.now)
	if unlikely(fails, fails+p.pool.fed.count(d.now), usual) {
		for _, y := range same {
			y.spoilt = true
			d.union(x, y).broad = true
		}
		x.spoilt = true
	}
}

// lost links the failures of pools that cannot be reached at the same time: what they share has failed.
func (d *Detector) lost(x *failure) {
	d.unreachable = slices.DeleteFunc(d.unreachable, func(y *failure) bool {
		return y.pool == x.pool || y.over || y.cause != nil || x.at-y.at > partition
	})
	if len(d.unreachable) < visits {
		d.unreachable = append(d.unreachable, x)
	}
	if len(d.unreachable) < 2 {
		return
	}
	for _, y := range d.unreachable {
		if y.at-x.at <= partition {
			g := d.union(x, y)
			g.broad, g.wide = true, true
		}
	}
}
