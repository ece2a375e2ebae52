package cascade

import (
	"cmp"
	"container/heap"
	"slices"
	"strings"
)

// graph holds the nodes in a slab, so that 100,000 of them cost the garbage collector little.
type graph struct {
	nodes     []node
	free      []int32
	edges     []edge
	freeEdges []int32
	ids       map[key]int32
	waiting   map[key][]int32 // for a parent that is not known yet
	workflows map[string]*workflow
	agents    map[string]*agent
	targets   map[string]*target
	heap      accounts
	cost      int // of all nodes
}

const none = int32(-1)

// What things cost in bytes, about.
const (
	perNode     = 600 // of Settings.Nodes
	costNode    = 320
	costAlias   = 100
	costEdge    = 30
	costFailure = 700
	costNotices = 80
	costKids    = 200
	costAwaited = 150
	costTarget  = 400
)

// key names something in a workflow: ids of others cannot be taken.
type key struct {
	workflow *workflow
	id       string
}

type workflow struct {
	id    string
	holds map[*agent]*holding
}

// agent pays for its nodes.
type agent struct {
	name        string
	cost        int
	place       int      // in the heap
	first, last *holding // the quietest first
	reported    int64    // when it began to report the breakers below
	breakers    int
}

// holding is what an agent has in a workflow, the oldest first.
type holding struct {
	agent       *agent
	workflow    *workflow
	prev, next  *holding
	first, last int32
}

type state uint8

const (
	running state = iota
	succeeded
	failed
)

type node struct {
	id                string
	aliases           []string
	hold              *holding
	pool              *pool
	target            *target
	fail              *failure
	kids              *family
	under             *[4]notice // failures below, the newest last
	started, ended    int64      // ended is of the latest good end
	awaits            []string   // parents that are not known yet
	ok                recent
	children, parents int32 // edges
	prev, next        int32 // in the holding
	calls             int32 // that follow from it, also if they are forgotten
	cost              int32
	state             state
	seen              bool // the gateway saw it end well
}

// party is who fails if the node does: the callee of a call, or whose task it is.
func (v *node) party() string {
	if v.pool != nil {
		return cmp.Or(v.pool.agent, v.pool.name)
	}
	return v.hold.agent.name
}

// notice is a failure below a node, and the child on the way to it.
type notice struct {
	failure *failure
	via     int32
}

type edge struct {
	parent, child        int32
	prevChild, nextChild int32 // of the parent
	nextParent           int32 // of the child
}

func (g *graph) find(workflow, id string) int32 {
	if w := g.workflows[workflow]; w != nil {
		if i, there := g.ids[key{w, id}]; there {
			return i
		}
	}
	return none
}

// holding is what an agent has in a workflow; nil for strangers.
func (g *graph) holding(workflow, name string) *holding {
	if w, a := g.workflows[workflow], g.agents[name]; w != nil && a != nil {
		return w.holds[a]
	}
	return nil
}

func (g *graph) add(now int64, n *Node) int32 {
	w := g.workflows[n.Workflow]
	if w == nil {
		w = &workflow{id: strings.Clone(n.Workflow), holds: map[*agent]*holding{}}
		g.workflows[w.id] = w
	}
	a := g.agents[n.Agent]
	if a == nil {
		a = &agent{name: strings.Clone(n.Agent)}
		g.agents[a.name] = a
		heap.Push(&g.heap, a)
	}
	h := w.holds[a]
	if h == nil {
		h = &holding{agent: a, workflow: w, first: none, last: none}
		w.holds[a] = h
		a.append(h)
	}
	g.touch(h)
	i := int32(len(g.nodes))
	if last := len(g.free) - 1; last >= 0 {
		i, g.free = g.free[last], g.free[:last]
	} else {
		g.nodes = append(g.nodes, node{})
	}
	id := strings.Clone(n.ID)
	g.nodes[i] = node{id: id, hold: h, started: now, children: none, parents: none, prev: h.last, next: none}
	if h.last == none {
		h.first = i
	} else {
		g.nodes[h.last].next = i
	}
	h.last = i
	g.ids[key{w, id}] = i
	g.charge(i, costNode+len(id))
	g.changes(i, n.Target)
	return i
}

// target is a system that calls change, of one service or of several (cascade 3.1.2). It is kept while one of
// their nodes is, and each of these is charged with it: it outlives the first.
type target struct {
	name   string
	nodes  int
	kin    family
	oks    recent
	writes [4]write // the newest last
}

// write is a call that has changed a target.
type write struct {
	workflow *workflow
	node     string
	at       int64
}

// changes notes which target the call of a node changes.
func (g *graph) changes(i int32, name string) {
	if name == "" || len(name) > 1024 {
		return
	}
	r := g.targets[name]
	if r == nil {
		r = &target{name: strings.Clone(name)}
		g.targets[r.name] = r
	}
	g.charge(i, costTarget)
	r.nodes++
	g.nodes[i].target = r
}

// charge adds to the cost of a node.
func (g *graph) charge(i int32, cost int) {
	a := g.nodes[i].hold.agent
	g.nodes[i].cost += int32(cost)
	g.cost += cost
	a.cost += cost
	heap.Fix(&g.heap, a.place)
}

// alias gives a node further names, and returns those that are new.
func (g *graph) alias(i int32, ids []string) (added []string) {
	w := g.nodes[i].hold.workflow
	for _, id := range ids {
		k := key{w, id}
		if _, taken := g.ids[k]; taken || id == "" || len(id) > maxID || len(g.nodes[i].aliases) >= maxAliases {
			continue
		}
		k.id = strings.Clone(id)
		g.ids[k] = i
		g.nodes[i].aliases = append(g.nodes[i].aliases, k.id)
		g.charge(i, costAlias+len(id))
		added = append(added, k.id)
	}
	return added
}

// maxWaiting is how many nodes wait for one parent; further ones do without it.
const maxWaiting = 256

// await notes that a node follows from one that is not known yet.
func (g *graph) await(i int32, id string) {
	v := &g.nodes[i]
	k := key{v.hold.workflow, id}
	waiting := g.waiting[k]
	if id == "" || len(id) > maxID || len(v.awaits) >= maxParents || len(waiting) >= maxWaiting || slices.Contains(v.awaits, id) {
		return
	}
	k.id = strings.Clone(id)
	g.waiting[k] = append(waiting, i)
	v.awaits = append(v.awaits, k.id)
	g.charge(i, costAwaited+len(id))
}

// arrived ends the waiting for a node, and returns who has waited.
func (g *graph) arrived(w *workflow, id string) []int32 {
	k := key{w, id}
	waited := g.waiting[k]
	delete(g.waiting, k)
	for _, i := range waited {
		v := &g.nodes[i]
		v.awaits = slices.DeleteFunc(v.awaits, func(o string) bool { return o == id })
		g.charge(i, -costAwaited-len(id))
	}
	return waited
}

// link adds an edge, and reports whether it was not there.
func (g *graph) link(parent, child int32) bool {
	n := 0
	for e := g.nodes[child].parents; e != none; e = g.edges[e].nextParent {
		if n++; g.edges[e].parent == parent || n >= maxParents {
			return false
		}
	}
	i := int32(len(g.edges))
	if last := len(g.freeEdges) - 1; last >= 0 {
		i, g.freeEdges = g.freeEdges[last], g.freeEdges[:last]
	} else {
		g.edges = append(g.edges, edge{})
	}
	p, c := &g.nodes[parent], &g.nodes[child]
	g.edges[i] = edge{parent: parent, child: child, prevChild: none, nextChild: p.children, nextParent: c.parents}
	if p.children != none {
		g.edges[p.children].prevChild = i
	}
	p.children, c.parents = i, i
	if c.pool != nil {
		p.calls++
	}
	g.charge(child, costEdge)
	return true
}

func (g *graph) parent(p, child int32) bool {
	for e := g.nodes[child].parents; p != none && e != none; e = g.edges[e].nextParent {
		if g.edges[e].parent == p {
			return true
		}
	}
	return false
}

// remove takes a node out.
func (g *graph) remove(i int32) {
	v := &g.nodes[i]
	for e := v.parents; e != none; {
		next := g.edges[e].nextParent
		g.unchild(e)
		e = next
	}
	for v.children != none {
		e := v.children
		c := &g.nodes[g.edges[e].child]
		for at := &c.parents; *at != none; at = &g.edges[*at].nextParent {
			if *at == e {
				*at = g.edges[e].nextParent
				break
			}
		}
		g.unchild(e)
	}
	w, h := v.hold.workflow, v.hold
	for _, id := range v.awaits {
		k := key{w, id}
		if left := slices.DeleteFunc(g.waiting[k], func(o int32) bool { return o == i }); len(left) > 0 {
			g.waiting[k] = left
		} else {
			delete(g.waiting, k)
		}
	}
	delete(g.ids, key{w, v.id})
	for _, id := range v.aliases {
		delete(g.ids, key{w, id})
	}
	if r := v.target; r != nil {
		if r.nodes--; r.nodes == 0 {
			delete(g.targets, r.name)
		}
	}
	g.charge(i, -int(v.cost))
	if v.prev == none {
		h.first = v.next
	} else {
		g.nodes[v.prev].next = v.next
	}
	if v.next == none {
		h.last = v.prev
	} else {
		g.nodes[v.next].prev = v.prev
	}
	*v = node{children: none, parents: none}
	g.free = append(g.free, i)
	if h.first != none {
		return
	}
	delete(w.holds, h.agent)
	if len(w.holds) == 0 {
		delete(g.workflows, w.id)
	}
	h.agent.remove(h)
	if h.agent.first == nil {
		heap.Remove(&g.heap, h.agent.place)
		delete(g.agents, h.agent.name)
	}
}

// unchild takes an edge out of its parent's list.
func (g *graph) unchild(i int32) {
	e := &g.edges[i]
	if e.prevChild == none {
		g.nodes[e.parent].children = e.nextChild
	} else {
		g.edges[e.prevChild].nextChild = e.nextChild
	}
	if e.nextChild != none {
		g.edges[e.nextChild].prevChild = e.prevChild
	}
	*e = edge{}
	g.freeEdges = append(g.freeEdges, i)
}

// touch makes a holding the one that its agent used last.
func (g *graph) touch(h *holding) {
	if a := h.agent; a.last != h {
		a.remove(h)
		a.append(h)
	}
}

func (a *agent) append(h *holding) {
	h.prev, h.next = a.last, nil
	if a.last == nil {
		a.first = h
	} else {
		a.last.next = h
	}
	a.last = h
}

func (a *agent) remove(h *holding) {
	if h.prev == nil {
		a.first = h.next
	} else {
		h.prev.next = h.next
	}
	if h.next == nil {
		a.last = h.prev
	} else {
		h.next.prev = h.prev
	}
}

// accounts is a heap of agents, the one with the highest cost first.
type accounts []*agent

func (a accounts) Len() int { return len(a) }

func (a accounts) Less(i, j int) bool { return a[i].cost > a[j].cost }

func (a accounts) Swap(i, j int) {
	a[i], a[j] = a[j], a[i]
	a[i].place, a[j].place = i, j
}

func (a *accounts) Push(x any) {
	x.(*agent).place = len(*a)
	*a = append(*a, x.(*agent))
}

func (a *accounts) Pop() any {
	last := len(*a) - 1
	x := (*a)[last]
	(*a)[last] = nil
	*a = (*a)[:last]
	return x
}

// forget makes room for some nodes of the given cost: of the agent that holds the most, the oldest node of
// its quietest workflow. So nobody loses what it has within an equal part of the memory because of others.
func (d *Detector) forget(nodes, cost int) {
	g := &d.graph
	for len(g.heap) > 0 && (g.cost+cost > perNode*d.set.Nodes || len(g.nodes)-len(g.free)+nodes > d.set.Nodes) {
		d.work++
		i := g.heap[0].first.first
		if x := g.nodes[i].fail; x != nil {
			d.drop(x)
		}
		g.remove(i)
		d.forgotten++
	}
}
