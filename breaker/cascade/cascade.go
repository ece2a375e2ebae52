// Package cascade finds failures that spread along the DAG of workflows, while they spread, and names
// where each began (cascade 3.4).
//
// A Detector is fed with events: a node appears, fails or ends well, a breaker opens or closes. Failures of which one
// follows from the other, or that have something in common that fails, are one group. A group in which three agents
// have failed is a finding, and so are three breakers that have opened on one downstream. The rule is in
// docs/cascades.md.
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

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// Settings are the limits of a Detector. Zero values stand for the defaults. Failures that an error names are linked
// at any distance.
type Settings struct {
	// How far apart failures may be that belong together by their places in the workflow, from 1s to 1h.
	// Default: 60s.
	Window jsontime.Duration `json:"window,omitempty"`

	nodes  int // most that are kept: 100,000 take about 60 MB
	agents int // fewest that must have failed
}

// Quiet is how long after its last failure a finding is closed.
const Quiet = 5 * time.Minute

// Check fills in the defaults and checks the ranges. The error names the option that is out of its
// range.
func (s Settings) Check() (Settings, error) {
	s.nodes, s.agents, s.Window = cmp.Or(s.nodes, 100_000), cmp.Or(s.agents, 3), cmp.Or(s.Window, jsontime.Duration(time.Minute))
	if window := time.Duration(s.Window); window < time.Second || window > time.Hour {
		return s, fmt.Errorf("window is %s; it must be from 1s to 1h", window)
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
	// Refused is a call that was not sent, since a breaker was open.
	Refused
	// Canceled is an action whose caller did not wait. Nobody has failed, but it may be what the caller waited for.
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
	// Causes are the errors that the error names (upstream_errors). At most 16 are used.
	Causes []string
	// By is the verified agent that reports it; empty if the gateway saw it.
	By string
	// Address is the upstream's, where the gateway called it.
	Address string
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

const (
	maxID      = 256
	maxName    = 1024 // of agents, targets and downstreams
	maxAliases = 4
	maxParents = 100
	maxCauses  = 16
	maxNames   = 4096 // pools
	never      = int64(-1 << 62)
)

// Detector finds cascades. Its methods may be called from any goroutine. The times of events may step
// back: nodes and failures have their own, for the rest the newest one counts.
type Detector struct {
	mu  sync.Mutex
	set Settings
	now int64

	graph    graph
	errors   map[key]*failure
	naming   map[key][]*failure // failures whose errors name another one
	pools    map[string]*pool
	away     meter // of calls that could not be sent
	openings []*opening
	full     map[Resource]bool // what is exhausted
	open     []*finding

	touched []*failure // by the present event
	changes []Change
	work    int64 // steps
}

// New makes a detector. The settings must be those that Check returned.
func New(s Settings) *Detector {
	return &Detector{
		set: s, now: never,
		graph: graph{
			ids: map[key]*node{}, waiting: map[key][]*node{}, workflows: map[string]*workflow{},
			agents: map[string]*agent{}, targets: map[string]*target{},
		},
		errors: map[key]*failure{}, naming: map[key][]*failure{}, pools: map[string]*pool{}, full: map[Resource]bool{},
	}
}

// Configure changes the settings. Findings stay.
func (d *Detector) Configure(s Settings) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.set = s
	d.forget()
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
	d.clock(now)
	if n.ID == "" || len(n.ID) > maxID || len(n.Agent) > maxName || len(n.Workflow) > maxID {
		return nil
	}
	v := d.graph.find(n.Workflow, n.ID)
	var names []string // by which others may wait for it
	if v == nil {
		v = d.graph.add(now.UnixNano(), &n)
		names = append(names, n.ID)
		if v.pool = d.pool(cmp.Or(n.Upstream.Pool, n.Upstream.Agent)); v.pool != nil {
			v.pool.agent = cmp.Or(v.pool.agent, strings.Clone(n.Upstream.Agent))
			v.pool.callers.add(v.agent.name)
		}
	} else if v.agent.name != n.Agent {
		return nil // the id of somebody else's
	}
	names = append(names, d.graph.alias(v, n.Aliases)...)
	for _, id := range n.Parents[:min(len(n.Parents), maxParents)] {
		if p := d.graph.find(n.Workflow, id); p != nil {
			d.link(p, v)
		} else {
			d.graph.await(v, id)
		}
	}
	d.joined(v)
	for _, id := range names {
		for _, c := range d.graph.arrived(v.workflow, id) {
			d.link(v, c)
			d.joined(c)
		}
	}
	return d.take()
}

// link adds an edge, unless it is there.
func (d *Detector) link(parent, child *node) {
	d.work++
	if parent == child || len(child.parents) >= maxParents || slices.Contains(child.parents, parent) {
		return
	}
	parent.children = append(parent.children, child)
	child.parents = append(child.parents, parent)
	if child.pool != nil {
		parent.calls = append(parent.calls, child)
	}
	d.graph.charge(child, costEdge)
}

// joined has what is known of a node count for its new parents, as if these had been known first.
func (d *Detector) joined(v *node) {
	if v.state != running {
		d.settle(v)
	}
	for _, x := range slices.Clone(v.below) {
		d.connect(x)
	}
	if v.fail != nil {
		d.connect(v.fail)
	}
}

// Knows reports whether a node has appeared, under this id or as an alias.
func (d *Detector) Knows(workflow, id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.graph.find(workflow, id) != nil
}

// Fail records that a node has failed. It returns what that changes in the findings.
func (d *Detector) Fail(now time.Time, f Failure) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock(now)
	v := d.graph.find(f.Workflow, f.Node)
	if v == nil {
		return nil
	}
	own, at := f.By == "", now.UnixNano()
	if _, well := calledBy(v); !own && (f.By != v.agent.name || well) {
		return nil // hearsay, or against what the gateway saw
	}
	x := v.fail
	if x == nil || x.over {
		if v.ended > at || x != nil && x.err != "" && x.err == f.Error && at <= x.at {
			return nil // that is over
		}
		if x != nil {
			d.drop(x)
		} else {
			d.graph.charge(v, costFailure)
		}
		x = &failure{node: v, at: at, kind: f.Kind}
		x.party = v.blames(x)
		v.fail, v.state = x, failed
	}
	seen := own && !x.own // now for the first time
	if seen {
		x.own, x.kind, x.address = true, f.Kind, strings.Clone(f.Address)
		x.party = v.blames(x)
		if v.pool != nil && x.kind != Canceled {
			v.pool.at(x.address).failed = d.now
		}
		if x.group != nil {
			x.in().parties.add(x.party)
		}
	}
	if f.Error != "" && len(f.Error) <= maxID && x.err == "" {
		x.err = strings.Clone(f.Error)
		k := key{v.workflow, x.err}
		d.errors[k] = x
		v.vouched = v.vouched || slices.ContainsFunc(d.naming[k], func(y *failure) bool { return y.node.agent != v.agent })
	}
	d.name(x, f.Causes)
	d.settle(v)
	d.connect(x)
	if seen {
		d.together(x)
	}
	return d.take()
}

// Succeed records that the gateway saw a node end well, also after a failure. The id may be an alias.
func (d *Detector) Succeed(now time.Time, workflow, id string) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock(now)
	v, at := d.graph.find(workflow, id), now.UnixNano()
	if v == nil || v.fail != nil && !v.fail.over && v.fail.at > at { // it has failed since then
		return nil
	}
	if v.target != nil && v.state != succeeded {
		r := v.target
		r.writes = append(r.writes, write{v.workflow, v.id, at})
		slices.SortStableFunc(r.writes, func(a, b write) int { return cmp.Compare(a.at, b.at) })
		r.writes = r.writes[max(len(r.writes)-maxWrites, 0):]
	}
	if v.fail != nil {
		v.fail.over = true
	}
	v.state, v.ended = succeeded, max(v.ended, at)
	d.settle(v)
	return d.take()
}

// Answered records n good answers of an address: what fails beside them is judged against their number.
func (d *Detector) Answered(now time.Time, name, address string, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	if p := d.pool(name); p != nil && n > 0 {
		p.at(address).answered = t
		p.calls.ok(t, n)
	}
}

// AnsweredAbout records n good answers to calls that change a target, as Answered does. An empty target is any.
func (d *Detector) AnsweredAbout(now time.Time, target string, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	if r := d.graph.targets[target]; r != nil {
		r.calls.ok(t, n)
	}
	if target == "" {
		for _, r := range d.graph.targets {
			d.work++
			r.calls.ok(t, n)
		}
	}
}

// Slow records that the latency of an address begins or ends to be a spike. It opens no finding, and neither do
// resources: they are reasons for a root and for its class.
func (d *Detector) Slow(pool, address string, is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.pool(pool); p != nil {
		p.at(address).slow = is
	}
}

// Exhausted records that a resource begins or ends to be exhausted.
func (d *Detector) Exhausted(r Resource, is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !is {
		delete(d.full, r)
	} else if len(d.full) < maxNames {
		d.full[r] = true
	}
}

// Advance closes the findings that have been quiet. Call it about every second.
func (d *Detector) Advance(now time.Time) []Change {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.clock(now)
	for _, f := range slices.Clone(d.open) {
		if t-f.group.last >= int64(Quiet) {
			d.finish(f)
		}
	}
	return d.take()
}

// Open is the number of open findings.
func (d *Detector) Open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.open)
}

func (d *Detector) clock(now time.Time) int64 {
	d.now = max(d.now, now.UnixNano())
	return d.now
}

// take ends an event: it judges the groups that were touched, and returns what has changed.
func (d *Detector) take() []Change {
	d.forget()
	for _, x := range d.touched {
		if x.group != nil {
			d.judge(x.in())
		}
	}
	changes := d.changes
	d.touched, d.changes = nil, nil
	return changes
}

// pool is an upstream service.
type pool struct {
	name, agent string
	addresses   map[string]*address
	known       map[string]bool // those of the configuration
	calls       meter
	callers     names // whose calls passed the gateway
}

type address struct {
	failed, answered int64
	open             map[string]bool // holders of open breakers
	slow             bool
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

func (p *pool) at(name string) *address {
	a := p.addresses[name]
	if a == nil {
		a = &address{failed: never, answered: never, open: map[string]bool{}}
		if len(p.addresses) < maxMembers {
			p.addresses[strings.Clone(name)] = a
		}
	}
	return a
}

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
