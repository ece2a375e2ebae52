// Package cascade finds failures that spread along the DAG of workflows, while they spread, and names
// where each began (cascade 3.4).
//
// A Detector is fed with events: a node appears, fails or ends well, a breaker opens or closes. A
// failure that explains another one is its cause, and failures that are linked so are one group. A group
// in which Settings.Agents agents have failed is a finding.
//
// What the gateway saw itself counts everywhere. What an agent reports counts for its own nodes, in
// workflows in which it has some, and never against what the gateway saw (P3).
//
// Events of several logs may come late, twice, and in another order than they happened in: each is judged by its
// own time, and a node waits for the parents that are not known yet.
package cascade

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Settings are the limits of a Detector. Zero values stand for the defaults.
type Settings struct {
	// Nodes is how many nodes are kept, from 1,000 to 10,000,000; by default 100,000 (about 50 MB).
	Nodes int
	// Agents is how many agents must have failed, from 2; by default 3.
	Agents int
	// Window is how far apart failures may be that are linked by their places in the DAG, from 1 s; by
	// default 60 s. Those that an error names are linked at any distance.
	Window time.Duration
}

const (
	// Quiet is how long after its last failure a finding is closed.
	Quiet = 5 * time.Minute
	// clusterSize is how many breakers must have opened on one downstream within Settings.Window (ATD,
	// "Coordinated Circuit Breaking").
	clusterSize = 3
)

// Check fills in the defaults and checks the ranges. The error names the option that is out of its
// range.
func (s Settings) Check() (Settings, error) {
	s.Nodes = cmp.Or(s.Nodes, 100_000)
	s.Agents = cmp.Or(s.Agents, 3)
	s.Window = cmp.Or(s.Window, time.Minute)
	switch {
	case s.Nodes < 1000 || s.Nodes > 10_000_000:
		return s, fmt.Errorf("nodes is %d; it must be from 1000 to 10000000", s.Nodes)
	case s.Agents < 2 || s.Agents > 1000:
		return s, fmt.Errorf("agents is %d; it must be from 2 to 1000", s.Agents)
	case s.Window < time.Second || s.Window > time.Hour:
		return s, fmt.Errorf("window is %s; it must be from 1s to 1h", s.Window)
	}
	return s, nil
}

// Node is an action in a workflow: a task, or a call through the gateway.
type Node struct {
	// ID is the jti of its token. Longer ones than 256 bytes are ignored.
	ID string
	// Aliases are other tokens of the same action, such as its checkpoint. At most 4 are kept.
	Aliases []string
	// Workflow is the wid.
	Workflow string
	// Parents are the tokens that it follows from (par). Those that the workflow does not have yet count
	// once it has them.
	Parents []string
	// Agent is the verified identity whose action it is. The memory of the node is charged to it.
	Agent string
	// Upstream is whom a call is sent to; zero for a task.
	Upstream Upstream
	// Target is the system that a call changes (cascade.target), where that is not just its Upstream: several
	// agents may write it (cascade 3.1.2). Longer ones than 1,024 bytes are ignored.
	Target string
}

// Upstream is a service.
type Upstream struct {
	// Pool is the name of its addresses in the gateway.
	Pool string
	// Agent is its identity; empty if unknown.
	Agent string
}

// Kind is how an action failed.
type Kind uint8

// The kinds of failures.
const (
	// Failed is an answer that says so, or an unknown failure.
	Failed Kind = iota
	// Timeout is no answer in time.
	Timeout
	// Unreachable is a call that was not sent, since there was no connection.
	Unreachable
	// Rejected is a refusal of what was asked for, such as a 4xx.
	Rejected
	// Exhausted is a refusal for want of a resource, such as a 429.
	Exhausted
	// Dependency is a failure that its agent attributes to another one.
	Dependency
	// Refused is a call that was not sent, since a breaker was open.
	Refused
	// Canceled is an action whose caller did not wait.
	Canceled
)

// ParseKind reads an error_type (ATD, "Error Signaling").
func ParseKind(errorType string) Kind {
	switch errorType {
	case "timeout":
		return Timeout
	case "constraint_violation":
		return Rejected
	case "resource_exhausted":
		return Exhausted
	case "upstream_cascade":
		return Dependency
	}
	return Failed
}

// Failure is the failure of a node.
type Failure struct {
	// Workflow and Node say which node; Node may be an alias. Failures of unknown nodes are ignored.
	Workflow, Node string
	// Error is the jti of the error token; it may be empty.
	Error string
	Kind  Kind
	// Causes are the errors, or nodes, that the error names (upstream_errors). At most 16 are used.
	Causes []string
	// By is the verified agent that reports it; empty if the gateway saw it.
	By string
	// Address is the upstream's, where the gateway called it.
	Address string
}

// Success is the good end of a node, also after a failure.
type Success struct {
	// Workflow and Node say which node; Node may be an alias.
	Workflow, Node string
	// By and Address are as in Failure. Agents are believed about their own nodes.
	By, Address string
}

// Breaker is the opening or closing of a breaker.
type Breaker struct {
	// Downstream is the identity of what it protects against; its address if unknown.
	Downstream string
	// Pool and Address are those of a breaker of a gateway.
	Pool, Address string
	// Holder is the node of a fleet that has it; empty for this process.
	Holder string
	// By is the verified agent that reports it; empty for breakers of gateways.
	By string
	// Workflow is that of the report, or of the failure that opened it. It may be empty for breakers
	// of gateways.
	Workflow string
	// Event is the jti of circuit_breaker_open; it may be empty.
	Event string
	Open  bool
	// Targets are the systems that all calls to the Pool change, of breakers of gateways.
	Targets []string
}

// SignalKind is what a Signal is about.
type SignalKind uint8

const (
	// Slow is the latency of an address (Latency).
	Slow SignalKind = iota
	// Full is the exhaustion of a resource.
	Full
)

// Signal is the beginning or the end of what lasts (cascade 3.4.1).
type Signal struct {
	Kind SignalKind
	// Pool is whose latency, permits or connections it is about; empty for the gateway's own resources.
	Pool string
	// Address is that of a slow upstream.
	Address string
	// Resource names what is exhausted: permits, queue, connections, memory, disk, store.
	Resource string
	Active   bool
}

const (
	maxID      = 256
	maxAliases = 4
	maxParents = 100
	maxCauses  = 16
	maxNames   = 4096 // pools and downstreams
	maxOpens   = 16384
	never      = int64(-1 << 62)
)

// Detector finds cascades. Its methods may be called from any goroutine. The times of events may step
// back: nodes and failures have their own, for the rest the newest one counts.
type Detector struct {
	mu  sync.Mutex
	set Settings
	now int64

	graph       graph
	errors      map[key]*failure
	awaited     map[key][]*failure // named causes that are not known yet
	pools       map[string]*pool
	clusters    map[downstream]*cluster
	full        map[Signal]bool
	open        []*finding
	unreachable []*failure // the last of each pool
	closed      []Finding
	work        int64

	changes   []Change
	forgotten int64
	swept     int64
	kept      int    // failures without a node
	opens     int    // breakers in clusters
	openings  uint64 // of breakers, since the start
}

// New makes a detector. The settings must be those that Check returned.
func New(s Settings) *Detector {
	return &Detector{
		set: s, now: never, swept: never, graph: graph{ids: map[key]int32{}, waiting: map[key][]int32{}, workflows: map[string]*workflow{}, agents: map[string]*agent{}, targets: map[string]*target{}},
		errors: map[key]*failure{}, awaited: map[key][]*failure{},
		pools: map[string]*pool{}, clusters: map[downstream]*cluster{}, full: map[Signal]bool{},
	}
}

// Configure changes the settings. Findings stay.
func (d *Detector) Configure(s Settings) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.set = s
	d.forget(0, 0)
}

// Pool says which addresses a pool has, so that the failure of all of them is known as that of a service
// (cascade 3.1.1).
func (d *Detector) Pool(name string, addresses []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.pool(name); p != nil {
		p.known = map[string]bool{}
		for _, a := range addresses {
			p.known[a] = true
		}
		maps.DeleteFunc(p.addresses, func(a string, _ *address) bool { return !p.known[a] })
	}
}

// Node records that a node has appeared. What is known of it stays; further parents and aliases are
// added. It returns what that changes in the findings: failures that were known before may follow from it.
func (d *Detector) Node(now time.Time, n Node) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	if n.ID == "" || len(n.ID) > maxID || len(n.Agent) > 1024 || len(n.Workflow) > maxID {
		return nil
	}
	parents := n.Parents[:min(len(n.Parents), maxParents)]
	d.forget(1, costNode+costTarget+len(n.ID)+maxAliases*(costAlias+maxID)+len(parents)*(costAwaited+maxID))
	i := d.graph.find(n.Workflow, n.ID)
	var names []string // by which others may wait for it
	if i == none {
		i = d.graph.add(now.UnixNano(), &n)
		names = append(names, n.ID)
		v := &d.graph.nodes[i]
		if v.pool = d.pool(cmp.Or(n.Upstream.Pool, n.Upstream.Agent)); v.pool != nil {
			v.pool.agent = cmp.Or(v.pool.agent, strings.Clone(n.Upstream.Agent))
			v.pool.callers.add(v.hold.agent.name)
		}
	} else if d.graph.nodes[i].hold.agent.name != n.Agent {
		return nil // the id of somebody else's
	}
	names = append(names, d.graph.alias(i, n.Aliases)...)
	for _, id := range parents {
		d.work++
		switch p := d.graph.find(n.Workflow, id); {
		case p == none:
			d.graph.await(i, id)
		case p != i:
			d.link(p, i, t)
		}
	}
	for _, id := range names {
		for _, c := range d.graph.arrived(d.graph.nodes[i].hold.workflow, id) {
			if c != i {
				d.link(i, c, t)
			}
		}
	}
	return d.take()
}

// Knows reports whether a node has appeared, under this id or as an alias.
func (d *Detector) Knows(workflow, id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.graph.find(workflow, id) != none
}

// Fail records that a node has failed. It returns what that changes in the findings.
func (d *Detector) Fail(now time.Time, f Failure) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	d.forget(0, costFailure+maxCauses*costAwaited+visits*(costNotices+costKids))
	i := d.graph.find(f.Workflow, f.Node)
	if i == none {
		return nil
	}
	v := &d.graph.nodes[i]
	h := v.hold
	d.graph.touch(h)
	own := f.By == ""
	called, well := d.called(i)
	if !own && (f.By != h.agent.name || well) {
		return nil // hearsay, or against what the gateway saw
	}
	at, x := now.UnixNano(), v.fail
	first := x == nil || x.over
	switch {
	case first && x != nil && x.err != "" && x.err == f.Error && at <= x.at:
		return nil // that is over
	case first && v.state == succeeded && v.ended > at && (v.seen || !own), first && d.retried(i, at, own):
		return nil // so is this, and it comes late
	}
	if first {
		if x != nil {
			d.drop(x)
		} else {
			d.graph.charge(i, costFailure)
		}
		x = &failure{node: i, at: at, kind: f.Kind, wf: h.workflow, id: v.id, agent: h.agent.name, party: h.agent.name, pool: v.pool, target: v.target, started: v.started, sure: own || called}
		d.waited(x)
		v.fail, v.state = x, failed
	}
	seen := own && !x.own // now for the first time
	if seen {
		x.own, x.party, x.address = true, v.party(), strings.Clone(f.Address)
	}
	switch {
	case first:
		(&group{began: at, last: t}).join(x)
	case seen && x.sure:
		x.group.party(x)
	case seen:
		d.attest(x)
	}
	if seen && x.pool != nil {
		x.pool.at(x.address).failed = t
		x.pool.learn(1)
	}
	if f.Error != "" && len(f.Error) <= maxID && x.err == "" {
		x.err = strings.Clone(f.Error)
		k := key{x.wf, x.err}
		d.errors[k] = x
		for _, y := range d.awaited[k] {
			d.explain(y, x, declared)
		}
		delete(d.awaited, k)
	}
	if first {
		d.awaitedAs(x, v)
	}
	d.named(x, f.Causes)
	if first || seen {
		d.above(x)
		d.below(x)
		d.beside(x)
	}
	d.judge(x.group, t)
	return d.take()
}

// Succeed records that a node has ended well.
func (d *Detector) Succeed(now time.Time, s Success) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	i := d.graph.find(s.Workflow, s.Node)
	if i == none {
		return nil
	}
	v := &d.graph.nodes[i]
	d.graph.touch(v.hold)
	own, at := s.By == "", now.UnixNano()
	if !own && (s.By != v.hold.agent.name || v.pool != nil || v.fail != nil && v.fail.own) {
		return nil
	}
	if x := v.fail; x != nil && !x.over {
		if x.at > at {
			return nil // it has failed since then
		}
		x.over = true
	}
	first := v.state != succeeded
	v.state, v.ended = succeeded, max(v.ended, at)
	v.seen = v.seen || own
	if own && v.pool != nil {
		if s.Address != "" {
			v.pool.at(s.Address).answered = t
		}
		v.pool.oks.add(t)
		v.pool.learn(0)
		if v.target != nil && first {
			r := v.target
			r.oks.add(t)
			copy(r.writes[:], r.writes[1:])
			r.writes[len(r.writes)-1] = write{v.hold.workflow, v.id, at}
			slices.SortStableFunc(r.writes[:], func(a, b write) int { return cmp.Compare(a.at, b.at) })
		}
	}
	for e := v.parents; e != none && first; e = d.graph.edges[e].nextParent {
		d.went(d.graph.edges[e].parent, v, t)
	}
	if own && v.pool != nil {
		d.retract(i)
	}
	return d.take()
}

// Answered records n good answers of an address, of calls whose nodes are not known: what fails beside them is
// judged against their number.
func (d *Detector) Answered(now time.Time, name, address string, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	p := d.pool(name)
	if p == nil || n <= 0 {
		return
	}
	p.at(address).answered = t
	p.oks.addMany(t, min(n, 1<<24))
	for range min(n, 2048) {
		p.learn(0)
	}
}

// AnsweredAbout records n good answers to calls that change a target, as Answered does. An empty target is any.
func (d *Detector) AnsweredAbout(now time.Time, target string, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	n = min(n, 1<<24)
	if r := d.graph.targets[target]; r != nil {
		r.oks.addMany(t, n)
	}
	if target == "" {
		for _, r := range d.graph.targets {
			d.work++
			r.oks.addMany(t, n)
		}
	}
}

// Breaker records the opening or closing of a breaker.
func (d *Detector) Breaker(now time.Time, b Breaker) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	if len(b.Downstream) > 1024 {
		return nil
	}
	if b.By != "" {
		h := d.graph.holding(b.Workflow, b.By)
		if h == nil {
			return nil
		}
		if a := h.agent; b.Open {
			if t-a.reported > int64(d.set.Window) {
				a.reported, a.breakers = t, 0
			}
			if a.breakers++; a.breakers > maxBreakers {
				return nil
			}
		}
	} else if p := d.pool(b.Pool); p != nil {
		p.at(b.Address).opens(b.Holder, b.Open)
	}
	d.cluster(t, now.UnixNano(), downstream{name: b.Downstream}, &b)
	if b.By == "" && b.Pool != "" {
		for _, name := range b.Targets {
			d.cluster(t, now.UnixNano(), downstream{name: name, target: true}, &b)
		}
	}
	return d.take()
}

// Signal records the beginning or the end of a signal. Signals open no finding: they are reasons for a
// root and for its class.
func (d *Detector) Signal(now time.Time, s Signal) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock(now)
	if s.Kind == Slow {
		if p := d.pool(s.Pool); p != nil {
			p.at(s.Address).slow = s.Active
		}
		return
	}
	k := Signal{Kind: Full, Pool: s.Pool, Resource: s.Resource}
	if !s.Active {
		delete(d.full, k)
	} else if len(d.full) < maxNames {
		d.full[k] = true
	}
}

// Advance closes the findings that have been quiet. Call it about every second.
func (d *Detector) Advance(now time.Time) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	for _, f := range slices.Clone(d.open) {
		if t-f.group.last >= int64(Quiet) {
			d.finish(f, t)
		}
	}
	return d.take()
}

// Stats are the sizes of a detector, for metrics.
type Stats struct {
	// Nodes and Workflows are kept, Findings are open.
	Nodes, Workflows, Findings int
	// Forgotten counts the nodes that made room for others.
	Forgotten int64
}

// Stats returns the sizes.
func (d *Detector) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return Stats{Nodes: len(d.graph.nodes) - len(d.graph.free), Workflows: len(d.graph.workflows), Findings: len(d.open), Forgotten: d.forgotten}
}

func (d *Detector) clock(now time.Time) int64 {
	d.now = max(d.now, now.UnixNano())
	return d.now
}

func (d *Detector) take() []Change {
	changes := d.changes
	d.changes = nil
	return changes
}

// pool finds or makes a pool; nil without a name, or if there are too many.
func (d *Detector) pool(name string) *pool {
	p := d.pools[name]
	if p == nil && name != "" && len(d.pools) < maxNames {
		p = &pool{name: strings.Clone(name), addresses: map[string]*address{}, known: map[string]bool{}}
		d.pools[p.name] = p
	}
	return p
}
