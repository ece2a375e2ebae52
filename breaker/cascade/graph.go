package cascade

import (
	"cmp"
	"container/heap"
	"slices"
	"strings"
)

// graph holds the nodes of all workflows, and what each agent pays for its own.
type graph struct {
	ids       map[key]*node   // by id and alias
	waiting   map[key][]*node // by the parent that is not known yet
	workflows map[string]*workflow
	agents    map[string]*agent
	targets   map[string]*target
	payers    payers
	nodes     int
	cost      int // of all nodes, in bytes
}

// Estimated memory of the parts of the graph, in bytes.
const (
	perNode     = 600 // of Settings.nodes
	costNode    = 320
	costAlias   = 100
	costEdge    = 30
	costFailure = 900
	costCause   = 150
	costTarget  = 400
)

// maxWaiting is how many nodes wait for one parent; further ones do without it.
const maxWaiting = 256

// key names something in a workflow: ids of others cannot be taken.
type key struct {
	workflow *workflow
	id       string
}

type workflow struct {
	id    string
	nodes map[*agent]int // the number of nodes of each agent
}

// agent pays for its nodes.
type agent struct {
	name     string
	cost     int
	place    int     // in the heap
	nodes    []*node // the oldest first
	reported int64   // when it began to report the openings below
	openings int
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
	workflow          *workflow
	agent             *agent
	pool              *pool
	target            *target
	fail              *failure
	below             []*failure // the latest failures below it that count, at most maxBelow
	parents, children []*node
	calls             []*node  // those of the children that are calls
	awaits            []string // parents that are not known yet
	started, ended    int64    // ended is the time of the latest good end
	cost              int
	state             state
	vouched           bool // another agent speaks of its failure
	gone              bool // it was forgotten
}

// party is who fails if the gateway sees the node fail: the callee of a call, or whose task it is.
func (v *node) party() string {
	if v.pool != nil {
		return cmp.Or(v.pool.agent, v.pool.name)
	}
	return v.agent.name
}

// blames is who has failed by a failure of the node: its own agent if only that says so, and nobody if it was given
// up.
func (v *node) blames(x *failure) string {
	switch {
	case x.kind == Canceled:
		return ""
	case x.own:
		return v.party()
	}
	return v.agent.name
}

// target is a system that calls change, of one service or of several (cascade 3.1.2). It is kept while one of
// their nodes is, and each of these is charged with it: it outlives the first.
type target struct {
	name   string
	nodes  int
	calls  meter
	writes []write // the latest, at most maxWrites, the newest last
}

// write is a call that has changed a target.
type write struct {
	workflow *workflow
	node     string
	at       int64
}

const maxWrites = 4

func (g *graph) find(workflow, id string) *node {
	return g.ids[key{g.workflows[workflow], id}]
}

// takesPart reports whether an agent has nodes in a workflow.
func (g *graph) takesPart(workflow string, a *agent) bool {
	w := g.workflows[workflow]
	return w != nil && w.nodes[a] > 0
}

func (g *graph) add(now int64, n *Node) *node {
	w := g.workflows[n.Workflow]
	if w == nil {
		w = &workflow{id: strings.Clone(n.Workflow), nodes: map[*agent]int{}}
		g.workflows[w.id] = w
	}
	a := g.agents[n.Agent]
	if a == nil {
		a = &agent{name: strings.Clone(n.Agent)}
		g.agents[a.name] = a
		heap.Push(&g.payers, a)
	}
	v := &node{id: strings.Clone(n.ID), workflow: w, agent: a, started: now, ended: never}
	a.nodes = append(a.nodes, v)
	w.nodes[a]++
	g.nodes++
	g.ids[key{w, v.id}] = v
	g.charge(v, costNode+len(v.id))
	if n.Target != "" && len(n.Target) <= maxName {
		v.target = g.targets[n.Target]
		if v.target == nil {
			v.target = &target{name: strings.Clone(n.Target)}
			g.targets[v.target.name] = v.target
		}
		v.target.nodes++
		g.charge(v, costTarget)
	}
	return v
}

// charge adds to the cost of a node.
func (g *graph) charge(v *node, cost int) {
	v.cost += cost
	v.agent.cost += cost
	g.cost += cost
	heap.Fix(&g.payers, v.agent.place)
}

// alias gives a node further names, and returns those that are new.
func (g *graph) alias(v *node, ids []string) (added []string) {
	for _, id := range ids {
		k := key{v.workflow, id}
		if g.ids[k] != nil || id == "" || len(id) > maxID || len(v.aliases) >= maxAliases {
			continue
		}
		k.id = strings.Clone(id)
		g.ids[k] = v
		v.aliases = append(v.aliases, k.id)
		g.charge(v, costAlias+len(id))
		added = append(added, k.id)
	}
	return added
}

// await notes that a node follows from one that is not known yet.
func (g *graph) await(v *node, id string) {
	k := key{v.workflow, id}
	waiting := g.waiting[k]
	full := len(v.awaits) >= maxParents || len(waiting) >= maxWaiting
	if full || id == "" || len(id) > maxID || slices.Contains(v.awaits, id) {
		return
	}
	k.id = strings.Clone(id)
	g.waiting[k] = append(waiting, v)
	v.awaits = append(v.awaits, k.id)
	g.charge(v, costCause+len(id))
}

// arrived ends the waiting for a node, and returns who has waited.
func (g *graph) arrived(w *workflow, id string) []*node {
	k := key{w, id}
	waited := g.waiting[k]
	delete(g.waiting, k)
	for _, v := range waited {
		v.awaits = without(v.awaits, id)
		g.charge(v, -costCause-len(id))
	}
	return waited
}

// remove takes the oldest node of an agent out.
func (g *graph) remove(a *agent) {
	v := a.nodes[0]
	for _, p := range v.parents {
		p.children, p.calls = without(p.children, v), without(p.calls, v)
	}
	for _, c := range v.children {
		c.parents = without(c.parents, v)
	}
	w := v.workflow
	for _, id := range v.awaits {
		drop(g.waiting, key{w, id}, v)
	}
	for _, id := range append(v.aliases, v.id) {
		delete(g.ids, key{w, id})
	}
	if r := v.target; r != nil {
		if r.nodes--; r.nodes == 0 {
			delete(g.targets, r.name)
		}
	}
	g.charge(v, -v.cost)
	g.nodes--
	a.nodes[0], a.nodes = nil, a.nodes[1:]
	*v = node{id: v.id, workflow: w, agent: a, pool: v.pool, target: v.target, started: v.started, gone: true}
	if w.nodes[a]--; w.nodes[a] == 0 {
		delete(w.nodes, a)
	}
	if len(w.nodes) == 0 {
		delete(g.workflows, w.id)
	}
	if len(a.nodes) == 0 {
		heap.Remove(&g.payers, a.place)
		delete(g.agents, a.name)
	}
}

// without returns a list without one of its values, in the same place.
func without[T comparable](list []T, value T) []T {
	if i := slices.Index(list, value); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// drop takes a value out of a list in a map, which does not keep empty ones.
func drop[T comparable](lists map[key][]T, k key, value T) {
	if left := without(lists[k], value); len(left) > 0 {
		lists[k] = left
	} else {
		delete(lists, k)
	}
}

// payers is a heap of agents, the one with the highest cost first.
type payers []*agent

func (p payers) Len() int { return len(p) }

func (p payers) Less(i, j int) bool { return p[i].cost > p[j].cost }

func (p payers) Swap(i, j int) {
	p[i], p[j] = p[j], p[i]
	p[i].place, p[j].place = i, j
}

func (p *payers) Push(x any) {
	x.(*agent).place = len(*p)
	*p = append(*p, x.(*agent))
}

func (p *payers) Pop() any {
	last := len(*p) - 1
	x := (*p)[last]
	(*p)[last] = nil
	*p = (*p)[:last]
	return x
}

// forget keeps the memory within its bounds: it forgets the oldest node of the agent that holds the most. An agent
// that holds no more than an equal part of the memory loses nothing because of others.
func (d *Detector) forget() {
	g := &d.graph
	for g.nodes > d.set.nodes || g.cost > perNode*d.set.nodes {
		d.work++
		a := g.payers[0]
		if x := a.nodes[0].fail; x != nil {
			d.drop(x)
		}
		g.remove(a)
	}
}
