package cascade

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// failure is the failure of a node. A group has it until the node is forgotten.
type failure struct {
	node    *node
	group   *group   // nil as long as the failure does not count; see in
	cause   *failure // the one that it follows from; nil if none is known
	named   bool     // its error names the cause
	err     string   // the id of the error
	causes  []string // the errors that this one names
	party   string   // who failed, as far as the evidence goes
	address string   // where the gateway called the upstream
	at      int64
	kind    Kind
	own     bool // the gateway saw it
	over    bool // it was retried with success, or taken back
}

// group is a set of failures that belong together.
type group struct {
	into        *group     // that it has become a part of; the rest is empty then
	members     []*failure // at most maxMembers
	parties     names      // who has failed
	workflows   names
	began, last int64
	finding     *finding
}

// in is the group of a failure that counts.
func (x *failure) in() *group {
	for x.group.into != nil {
		x.group = x.group.into
	}
	return x.group
}

const (
	maxMembers = 1024
	maxParties = 1024 // and workflows of a finding, callers of a pool
	maxBelow   = 4
	maxChain   = 64 // causes of causes
	maxVisits  = 32 // nodes above a failure
	maxBeside  = 64 // nodes beside a failure
	hops       = 3  // edges between two failures of which one follows from the other
	// slack is how much later a failure may be reported than one that follows from it.
	slack = int64(time.Second)
	// moment is how far apart failures may be that belong together though neither follows from the other.
	moment = int64(20 * time.Second)
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
	if n.index == nil {
		n.index = map[string]bool{}
	}
	n.index[name] = true
	n.list = append(n.list, name)
}

func (n *names) has(name string) bool { return n.index[name] }

func (n *names) addAll(o names) {
	for _, name := range o.list {
		n.add(name)
	}
}

// calledBy reports whether a node belongs to a call to its agent that the gateway saw, and whether that ended well.
func calledBy(v *node) (called, well bool) {
	for _, p := range v.parents {
		if p.pool != nil && p.party() == v.agent.name {
			called, well = true, well || p.state == succeeded
		}
	}
	return called, well
}

// settle takes back what the end of a node, or of one beside it, shows to have caused nothing: failures that were
// retried with success, and reports about a call that ended well.
func (d *Detector) settle(v *node) {
	if x := v.fail; x != nil && !x.own {
		_, well := calledBy(v)
		x.over = x.over || well
	}
	if v.state == succeeded {
		for _, c := range newest(v.children) {
			d.work++
			if x := c.fail; x != nil && !x.own && c.agent.name == v.party() && v.pool != nil {
				x.over = true
			}
		}
	}
	for _, p := range v.parents {
		for _, c := range newest(p.calls) {
			d.work++
			if c.agent == v.agent && c.party() == v.party() {
				retried(v, c)
				retried(c, v)
			}
		}
	}
}

// retried takes back the failure of a node if another one, of the same agent to the same, has ended well since.
func retried(v, again *node) {
	if x := v.fail; x != nil && again.ended >= x.at {
		x.over = true
	}
}

// newest are the last of a list, as many as are looked at.
func newest(list []*node) []*node { return list[max(len(list)-maxBeside, 0):] }

// ancestors are the nodes above one over so many edges as failures are linked, the nearest first. A node that ended
// well has passed nothing on.
func (d *Detector) ancestors(v *node) []*node {
	all := []*node{v}
	for begin, hop := 0, 0; hop < hops; hop++ {
		end := len(all)
		for _, u := range all[begin:end] {
			for _, p := range u.parents {
				d.work++
				if p.state == succeeded || len(all) >= maxVisits || slices.Contains(all, p) {
					continue
				}
				all = append(all, p)
			}
		}
		begin = end
	}
	return all[1:]
}

// vouch notes that another agent than its own speaks of the failure of a node. It counts from then on.
func (d *Detector) vouch(v *node) {
	before := v.vouched
	if v.vouched = true; !before && v.fail != nil && v.fail.group == nil {
		d.connect(v.fail)
	}
}

// counts reports whether a failure counts: the gateway saw it, or called its agent for it, or another agent speaks
// of it. What only its own agent says links nothing (P3).
func (x *failure) counts() bool {
	if x.own || x.node.vouched {
		return true
	}
	called, _ := calledBy(x.node)
	return called
}

// connect links a failure with those that it follows from, and that follow from it, as far as they are known. It is
// called again when more is known.
func (d *Detector) connect(x *failure) {
	if x.over || x.node.gone {
		return
	}
	above := d.ancestors(x.node)
	for _, u := range above {
		if u.agent != x.node.agent || x.own {
			d.vouch(u)
		}
	}
	if !x.counts() {
		return
	}
	if x.group == nil {
		x.group = &group{members: []*failure{x}, began: x.at, last: d.now}
		x.group.parties.add(x.party)
		x.group.workflows.add(x.node.workflow.id)
	}
	for _, id := range x.causes {
		if y := d.errors[key{x.node.workflow, id}]; y != nil {
			d.explain(x, y, true)
		}
	}
	for _, y := range d.naming[key{x.node.workflow, x.err}] {
		d.explain(y, x, true)
	}
	d.below(x)
	for _, u := range above {
		d.leave(u, x)
		switch y := u.fail; {
		case y == nil || y.over || y.group == nil:
		case y.at+slack >= x.at:
			d.below(y)
		case y.waitedFor(x):
			d.explain(y, x, false)
		case y.cause == nil && x.kind != Canceled:
			d.explain(x, y, false)
		}
	}
	d.siblings(x)
	d.touched = append(d.touched, x)
}

// leave leaves a failure at a node above it, for when that fails. Where there are too many, those stay that the
// gateway saw, and of these the latest.
func (d *Detector) leave(u *node, x *failure) {
	if slices.Contains(u.below, x) {
		return
	}
	u.below = slices.DeleteFunc(append(u.below, x), func(y *failure) bool { return y.node.gone || y.over })
	seen := map[bool]int{true: 1}
	slices.SortStableFunc(u.below, func(a, b *failure) int {
		return cmp.Or(seen[a.own]-seen[b.own], cmp.Compare(a.at, b.at))
	})
	u.below = u.below[max(len(u.below)-maxBelow, 0):]
}

// below links a failure with the last one below it before, which the gateway saw if there is one, and with others of
// the same time.
func (d *Detector) below(x *failure) {
	var last *failure
	for _, y := range slices.Backward(x.node.below) {
		switch {
		case y.over, y.node.gone, y.at > x.at+slack, last != nil && !near(y, last, slack):
		case y.kind == Canceled && !x.waitedFor(y):
		case !slices.Contains(d.ancestors(y.node), x.node): // something between them has ended well since
		default:
			last = cmp.Or(last, y)
			d.explain(x, y, false)
		}
	}
}

// waitedFor reports whether a node that timed out gave up waiting for another one below it, which then failed, or was
// given up after it had taken half of the time.
func (x *failure) waitedFor(y *failure) bool {
	long := 2*(y.at-y.node.started) >= x.at-x.node.started
	return x.kind == Timeout && y.node.started <= x.at && (y.kind != Canceled || long)
}

// near reports whether two failures are at most so far apart.
func near(x, y *failure, within int64) bool { return max(x.at-y.at, y.at-x.at) <= within }

// alone reports whether the gateway saw a failure that follows from none.
func (x *failure) alone() bool { return x.own && !x.over && x.cause == nil && x.kind != Canceled }

// explain makes y the cause of x, unless x has a better one, and links them: the best is one that the error names, or
// else the latest. Without being named, failures are linked within the window only.
func (d *Detector) explain(x, y *failure, named bool) {
	if x.group == nil || y.group == nil || x.over || y.over || !named && !near(x, y, int64(d.set.Window)) {
		return
	}
	better := x.cause == nil || named && !x.named || named == x.named && y.at > x.cause.at
	steps := 0
	for z := y; z != nil && better; z = z.cause { // none follows from itself
		steps++
		better = z != x && steps < maxChain
	}
	d.work += int64(steps)
	if better {
		x.cause, x.named = y, named
	}
	d.unite(x.in(), y.in())
}

// unite makes one group of two.
func (d *Detector) unite(a, b *group) {
	if a == b {
		return
	}
	if len(a.members) < len(b.members) || len(a.members) == len(b.members) && a.began > b.began {
		a, b = b, a
	}
	d.work += int64(len(b.members) + len(b.parties.list))
	f := b.finding
	if f != nil && a.finding != nil {
		d.merge(a.finding, f)
	} else if f != nil {
		a.finding, f.group = f, a
	}
	a.members = append(a.members, b.members[:min(len(b.members), maxMembers-len(a.members))]...)
	a.began, a.last = min(a.began, b.began), max(a.last, b.last)
	a.parties.addAll(b.parties)
	a.workflows.addAll(b.workflows)
	*b = group{into: a}
}

// drop forgets a failure with its node.
func (d *Detector) drop(x *failure) {
	if k := (key{x.node.workflow, x.err}); d.errors[k] == x {
		delete(d.errors, k)
	}
	for _, id := range x.causes {
		drop(d.naming, key{x.node.workflow, id}, x)
	}
	if x.group != nil {
		g := x.in()
		g.members = without(g.members, x)
	}
	x.cause, x.causes = nil, nil // a chain of causes keeps nothing alive
}

// name notes which errors that of a failure names.
func (d *Detector) name(x *failure, causes []string) {
	for _, id := range causes {
		k := key{x.node.workflow, id}
		full := len(x.causes) >= maxCauses || len(d.naming[k]) >= maxCauses
		if full || id == "" || len(id) > maxID || slices.Contains(x.causes, id) {
			continue
		}
		k.id = strings.Clone(id)
		d.naming[k] = append(d.naming[k], x)
		x.causes = append(x.causes, k.id)
		d.graph.charge(x.node, costCause)
		if y := d.errors[k]; y != nil && y.node.agent != x.node.agent {
			d.vouch(y.node)
		}
	}
}

// siblings links failures that follow from one node though not from each other, if they are of as many agents as a
// cascade has, and a third of what follows from that node at the time: what they have in common has failed (cascade
// 3.4.2). Only what the gateway saw is counted (P3).
func (d *Detector) siblings(x *failure) {
	if !x.alone() {
		return
	}
	for _, p := range x.node.parents {
		var same []*failure
		var parties names
		calls := 0
		for _, c := range newest(p.calls) {
			d.work++
			y := c.fail
			switch {
			case y != nil && y.alone() && near(x, y, moment):
				same = append(same, y)
				parties.add(y.party)
				calls++
			case c.state == running || c.ended >= x.at-moment:
				calls++
			}
		}
		if len(parties.list) >= d.set.agents && 3*len(same) >= calls {
			d.beside(x, same)
		}
	}
}

// beside links failures that belong together though none follows from another.
func (d *Detector) beside(x *failure, same []*failure) {
	for _, y := range same {
		if y.group != nil {
			d.unite(x.in(), y.in())
		}
	}
}

// meter counts calls that ended lately: those to one service, or that change one target.
type meter struct {
	failures   []*failure // the latest without a cause that the gateway saw, at most maxPeers
	period     int64
	fails, oks [2]int // in this period and in the one before
}

const (
	maxPeers = 16
	period   = int64(10 * time.Second)
)

func (m *meter) turn(t int64) {
	switch p := t / period; {
	case p == m.period+1:
		m.fails, m.oks = [2]int{0, m.fails[0]}, [2]int{0, m.oks[0]}
		m.period = p
	case p > m.period:
		m.fails, m.oks = [2]int{}, [2]int{}
		m.period = p
	}
}

func (m *meter) ok(t int64, n int) {
	m.turn(t)
	m.oks[0] += n
}

// fail counts a failure, and returns the others of the moment.
func (m *meter) fail(x *failure, t int64) (same []*failure) {
	m.turn(t)
	m.fails[0]++
	for _, y := range m.failures {
		if y.alone() && near(x, y, moment) {
			same = append(same, y)
		}
	}
	if len(m.failures) >= maxPeers {
		m.failures = slices.Delete(m.failures, 0, 1)
	}
	m.failures = append(m.failures, x)
	return same
}

// unwell reports whether a third of the calls fail, and two at least.
func (m *meter) unwell(t int64) bool {
	m.turn(t)
	fails := m.fails[0] + m.fails[1]
	return fails >= 2 && 3*fails >= fails+m.oks[0]+m.oks[1]
}

// together links a failed call that the gateway saw with others that follow from nothing: of the same service, and of
// several agents that change one target, where a third of such calls fail; and of services that cannot be reached
// either. What was refused is about the caller.
func (d *Detector) together(x *failure) {
	if x.node.pool == nil || !x.alone() || x.kind == Rejected || x.kind == Refused {
		return
	}
	if same := x.node.pool.calls.fail(x, d.now); x.node.pool.calls.unwell(d.now) {
		d.beside(x, same)
	}
	if x.node.target != nil {
		var agents names
		same := append(x.node.target.calls.fail(x, d.now), x)
		for _, y := range same {
			agents.add(y.node.agent.name)
		}
		if len(agents.list) > 1 && x.node.target.calls.unwell(d.now) {
			d.beside(x, same)
		}
	}
	if x.kind == Unreachable {
		d.beside(x, slices.DeleteFunc(d.away.fail(x, d.now), func(y *failure) bool { return y.node.pool == x.node.pool }))
	}
}
