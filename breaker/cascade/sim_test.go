package cascade_test

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// This file makes labelled traces: it simulates agents that call one another with deadlines, retries and
// fallbacks, breaks some of them, and writes down what a gateway and the agents see, and for each failure
// what has caused it. It knows nothing of how the detector works.

// cause is what failures go back to: a fault, or a failure of a single action.
type cause struct {
	what      string
	services  map[*service]bool // that are the root
	shared    bool              // several services at once, by what they share
	agents    map[string]time.Duration
	workflows map[string]bool
	direct    map[*service]time.Duration          // calls that met the fault itself, as the gateway saw
	opens     map[string]map[string]time.Duration // openings of breakers, by downstream and holder
}

// began is when it had become a cascade: three agents had failed because of it, or three breakers had
// opened on one downstream within a minute.
func (c *cause) began() (at time.Duration, is bool) {
	at = math.MaxInt64
	third := func(times map[string]time.Duration, within time.Duration) {
		var all []time.Duration
		for _, t := range times {
			all = append(all, t)
		}
		slices.Sort(all)
		for i := 2; i < len(all); i++ {
			if within == 0 || all[i]-all[i-2] <= within {
				at = min(at, all[i])
			}
		}
	}
	third(c.agents, 0)
	for _, holders := range c.opens {
		third(holders, time.Minute)
	}
	return at, at != math.MaxInt64
}

func (c *cause) met(s *service) (at time.Duration, there bool) {
	if c != nil {
		at, there = c.direct[s]
	}
	return at, there
}

// fault breaks services, or addresses of one, for a time.
type fault struct {
	mode       string // refuse, hang, error, slow, nonsense, partition
	addresses  map[string]bool
	begin, end time.Duration
	share      float64 // of the calls that it concerns
	cause      *cause
}

type service struct {
	agent, pool string
	addresses   []string
	turn        int
	needs       []*service
	parallel    bool
	work        time.Duration
	spread      float64
	flaky       float64 // share of actions that fail by themselves
	tolerant    float64 // share of failed dependencies that it does without
	retries     int
	reports     float64 // share of its failures that it reports
	names       float64 // and of these of those that name the errors behind them
	budget      float64 // of its caller's time that it waits for a dependency
	bypass      float64 // share of its calls that do not pass the gateway
}

type event struct {
	at   time.Duration
	what func(d *cascade.Detector, now time.Time) []cascade.Change
}

type outcome struct {
	at             time.Duration
	caller, wf     string
	service        *service
	address        string
	through, ended bool
	cause          *cause
}

type world struct {
	*rand.Rand
	scenario string
	seed     uint64
	length   time.Duration
	services []*service
	agents   []*service // that begin workflows
	faults   []*fault
	causes   []*cause
	events   []event
	calls    []outcome
	of       map[string]*cause // by error, node and event
	nodes    map[string][]string
	errors   map[string][]string
	last     int
}

func (w *world) chance(p float64) bool { return w.Float64() < p }

func (w *world) between(a, b time.Duration) time.Duration {
	return a + time.Duration(w.Int64N(int64(b-a)+1))
}

func (w *world) id(kind string) string {
	w.last++
	return fmt.Sprintf("%s-%06d-0000-4000-8000-000000000000", kind, w.last)
}

func (w *world) cause(what string, shared bool, services ...*service) *cause {
	c := &cause{what: what, services: map[*service]bool{}, shared: shared, agents: map[string]time.Duration{}, workflows: map[string]bool{}, direct: map[*service]time.Duration{}, opens: map[string]map[string]time.Duration{}}
	for _, s := range services {
		c.services[s] = true
	}
	w.causes = append(w.causes, c)
	return c
}

func (w *world) emit(at time.Duration, what func(d *cascade.Detector, now time.Time) []cascade.Change) {
	w.events = append(w.events, event{at: at, what: what})
}

func (w *world) node(at time.Duration, n cascade.Node) {
	w.nodes[n.Workflow] = append(w.nodes[n.Workflow], n.ID)
	w.emit(at, func(d *cascade.Detector, now time.Time) []cascade.Change { d.Node(now, n); return nil })
}

func (w *world) fail(at time.Duration, f cascade.Failure, c *cause) {
	w.of[f.Error], w.of[f.Node] = c, c
	w.errors[f.Workflow] = append(w.errors[f.Workflow], f.Error)
	w.emit(at, func(d *cascade.Detector, now time.Time) []cascade.Change { return d.Fail(now, f) })
}

// result is what a caller sees of an action.
type result struct {
	at       time.Duration
	good     bool
	cause    *cause
	errors   []string // that its answer carries
	kind     cascade.Kind
	node     string
	tainted  *cause // a good answer that is nonsense
	reported bool   // by the agent itself
}

// action is a request to a service.
type action struct {
	service  *service
	workflow string
	caller   *service // nil at the begin of a workflow
	parents  []string
	at       time.Duration
	begun    time.Duration // by the caller
	patience time.Duration // of the caller
	leaves   time.Duration // when the caller itself is given up
	depth    int
	tainted  *cause // nonsense that it is given
	delayed  *cause // what has used up the time that it has
}

func (w *world) run(a action) result {
	s := a.service
	address := s.addresses[s.turn%len(s.addresses)]
	s.turn++
	through := a.caller != nil && !w.chance(a.caller.bypass)
	limit := min(a.at+a.patience, a.leaves)
	parents := a.parents
	call := w.id("call")
	if through {
		w.node(a.at, cascade.Node{
			ID: call, Aliases: []string{"settled-" + call}, Workflow: a.workflow, Parents: parents, Agent: a.caller.agent,
			Upstream: cascade.Upstream{Pool: s.pool, Agent: s.agent},
		})
		parents = []string{call}
	}
	r := w.serve(a, address, parents, limit)
	var why *cause
	if !r.good {
		why = r.cause
	}
	if r.at > limit {
		// Whatever kept it is why its caller gets nothing.
		canceled := a.leaves < a.at+a.patience
		if why = r.cause; why == nil && !(canceled && 2*(limit-a.at) < limit-a.begun) {
			why = w.cause("late", false, s) // it took most of the time
		}
		r = result{at: limit, cause: why, kind: cascade.Timeout, errors: nil, node: r.node}
		if canceled {
			r.kind = cascade.Canceled
		}
	}
	// What nobody has seen is no part of the trace.
	if !r.good && r.kind != cascade.Canceled && (through || r.reported) {
		why.workflows[a.workflow] = true
		if _, there := why.agents[s.agent]; !there || r.at < why.agents[s.agent] {
			why.agents[s.agent] = r.at
		}
	}
	if a.caller != nil && r.kind != cascade.Canceled {
		w.calls = append(w.calls, outcome{r.at, a.caller.agent, a.workflow, s, address, through, r.good, why})
	}
	if !through {
		return r
	}
	if _, there := why.met(s); !r.good && why != nil && why.services[s] && !there {
		why.direct[s] = r.at
	}
	r.node = call
	if r.good {
		w.emit(r.at, func(d *cascade.Detector, now time.Time) []cascade.Change {
			d.Answered(now, s.pool, address, 1)
			return d.Succeed(now, a.workflow, call)
		})
		return r
	}
	f := cascade.Failure{Workflow: a.workflow, Node: "settled-" + call, Error: w.id("gw"), Kind: r.kind, Causes: r.errors, Address: address}
	w.of[call] = why
	w.fail(r.at, f, why)
	r.errors = []string{f.Error}
	return r
}

// serve is what happens at the service.
func (w *world) serve(a action, address string, parents []string, limit time.Duration) result {
	s := a.service
	t := a.at + w.between(time.Millisecond, 8*time.Millisecond)
	task := w.id("task")
	hang := result{at: math.MaxInt64}
	slow := 1.0
	var slowed, nonsense *cause
	for _, f := range w.faults {
		if !f.addresses[address] || t < f.begin || t >= f.end || !w.chance(f.share) {
			continue
		}
		hang.cause = f.cause
		switch f.mode {
		case "partition":
			if w.chance(0.3) {
				return hang
			}
			return result{at: t + w.between(0, 30*time.Millisecond), kind: cascade.Unreachable, cause: f.cause}
		case "refuse":
			return result{at: t, kind: cascade.Unreachable, cause: f.cause}
		case "error":
			return result{at: t + w.between(0, 50*time.Millisecond), kind: cascade.Failed, cause: f.cause}
		case "hang":
			w.node(t, cascade.Node{ID: task, Workflow: a.workflow, Parents: parents, Agent: s.agent})
			return hang
		case "slow":
			if grown := float64(t-f.begin) / float64(f.end-f.begin); grown > 0 {
				slow, slowed = 1+60*grown*grown, f.cause
			}
		case "nonsense":
			nonsense = f.cause
		}
	}
	if a.tainted != nil && w.chance(0.8) {
		return result{at: t + 20*time.Millisecond, kind: cascade.Rejected, cause: a.tainted}
	}
	w.node(t, cascade.Node{ID: task, Workflow: a.workflow, Parents: parents, Agent: s.agent})
	bad := func(at time.Duration, kind cascade.Kind, c *cause, errors []string) result {
		r := result{at: at, kind: kind, cause: c, node: task}
		if at > limit || !w.chance(s.reports) {
			return r
		}
		f := cascade.Failure{Workflow: a.workflow, Node: task, Error: w.id("err"), Kind: kind, By: s.agent}
		if w.chance(s.names) {
			f.Causes = errors
		}
		delay := w.between(5*time.Millisecond, 900*time.Millisecond)
		if a.caller != nil && w.chance(0.7) {
			delay = 0 // with the answer
			r.errors = []string{f.Error}
		}
		w.fail(at+delay, f, c)
		r.reported = true
		return r
	}
	t += time.Duration(float64(s.work) * math.Exp(w.NormFloat64()*s.spread) * slow)
	// An address that breaks meanwhile takes its work with it.
	for _, f := range w.faults {
		if f.addresses[address] && f.begin > a.at && f.begin < t && (f.mode == "refuse" || f.mode == "hang") {
			if f.mode == "hang" {
				hang.cause = f.cause
				return hang
			}
			return result{at: f.begin, kind: cascade.Failed, cause: f.cause, node: task}
		}
	}
	slowed = cmp.Or(slowed, a.delayed)
	if t > limit {
		return result{at: t, good: true, cause: slowed, node: task}
	}
	if w.chance(s.flaky) {
		return bad(t, []cascade.Kind{cascade.Failed, cascade.Failed, cascade.Rejected, cascade.Exhausted}[w.IntN(4)], w.cause("flaky", false, s), nil)
	}
	begun, end := t, t
	inputs := []string{task}
	tainted := a.tainted
	for _, need := range s.needs {
		given := a.tainted
		if !s.parallel {
			begun, given = end, tainted
		}
		at := begun
		var r result
		for try := 0; ; try++ {
			r = w.run(action{
				service: need, workflow: a.workflow, caller: s, parents: slices.Clone(inputs), at: at, begun: a.at, leaves: limit,
				patience: time.Duration(float64(limit-a.at) * s.budget), depth: a.depth + 1, tainted: given, delayed: slowed,
			})
			if r.good || r.kind == cascade.Canceled || r.kind == cascade.Rejected || try >= s.retries {
				break
			}
			if r.at-begun > (limit-a.at)/5 {
				slowed = r.cause
			}
			at = r.at + w.between(100*time.Millisecond, 600*time.Millisecond)
		}
		end = max(end, r.at)
		if !r.good && end-begun > (limit-a.at)/5 {
			slowed = r.cause
		}
		switch {
		case r.kind == cascade.Canceled && !r.good:
			return result{at: limit + 1, cause: r.cause, node: task}
		case r.good:
			if !s.parallel && r.node != "" {
				inputs = []string{task, r.node}
			}
			if r.tainted != nil {
				tainted = r.tainted
			}
		case !w.chance(s.tolerant):
			return bad(end+w.between(time.Millisecond, 20*time.Millisecond), cascade.Failed, r.cause, r.errors)
		}
	}
	return result{at: end, good: true, node: task, tainted: cmp.Or(nonsense, tainted), cause: slowed}
}

// breakers open and close as breakers do: half of at least ten calls in a minute at the gateway, five
// failures in a row at an agent.
func (w *world) breakers() {
	slices.SortStableFunc(w.calls, func(a, b outcome) int { return cmp.Compare(a.at, b.at) })
	type breaker struct {
		calls []outcome
		row   int
		open  bool
	}
	all := map[string]*breaker{}
	change := func(b *breaker, key string, c outcome, delay time.Duration, e cascade.Breaker) {
		b.open = !b.open
		e.Downstream, e.Open, e.Event = c.service.agent, b.open, w.id("cb")
		if b.open {
			w.of[e.Event] = c.cause
			if c.cause.opens[e.Downstream] == nil {
				c.cause.opens[e.Downstream] = map[string]time.Duration{}
			}
			c.cause.opens[e.Downstream][key] = c.at
			c.cause.workflows[c.wf] = true
		}
		w.emit(c.at+delay, func(d *cascade.Detector, now time.Time) []cascade.Change { return d.Breaker(now, e) })
	}
	for _, c := range w.calls {
		if c.through {
			key := c.service.pool + c.address
			b := all[key]
			if b == nil {
				b = &breaker{}
				all[key] = b
			}
			b.calls = append(slices.DeleteFunc(b.calls, func(o outcome) bool { return c.at-o.at > time.Minute }), c)
			failed := 0
			for _, o := range b.calls {
				if !o.ended {
					failed++
				}
			}
			if !b.open && !c.ended && len(b.calls) >= 10 && 2*failed >= len(b.calls) || b.open && c.ended {
				change(b, key, c, 0, cascade.Breaker{Pool: c.service.pool, Address: c.address, Workflow: c.wf})
				b.calls = nil
			}
		}
		key := c.caller + " to " + c.service.agent
		b := all[key]
		if b == nil {
			b = &breaker{}
			all[key] = b
		}
		b.row++
		if c.ended {
			b.row = 0
		}
		if b.open && c.ended || !b.open && b.row >= 5 {
			change(b, key, c, w.between(5*time.Millisecond, 500*time.Millisecond), cascade.Breaker{By: c.caller, Workflow: c.wf})
		}
	}
}

// liar is an agent of the workflows that reports what is not so.
func (w *world) liar(wfs []string) {
	name := "spiffe://example.com/liar"
	pick := func(ids []string) string {
		if len(ids) == 0 {
			return "none"
		}
		return ids[w.IntN(len(ids))]
	}
	begin := w.between(0, w.length/3)
	pause := w.between(30*time.Millisecond, 400*time.Millisecond)
	for at := begin; at < w.length; at += pause {
		wf := pick(wfs)
		id := w.id("lie")
		parent, victim, named := pick(w.nodes[wf]), pick(w.nodes[wf]), pick(w.errors[wf])
		w.emit(at, func(d *cascade.Detector, now time.Time) []cascade.Change {
			d.Node(now, cascade.Node{ID: id, Workflow: wf, Parents: []string{parent}, Agent: name})
			return nil
		})
		switch w.IntN(4) {
		case 0, 1:
			w.emit(at, func(d *cascade.Detector, now time.Time) []cascade.Change {
				return d.Fail(now, cascade.Failure{Workflow: wf, Node: id, Error: "e" + id, By: name, Causes: []string{named, "e" + victim}})
			})
		case 2:
			w.emit(at, func(d *cascade.Detector, now time.Time) []cascade.Change {
				return d.Fail(now, cascade.Failure{Workflow: wf, Node: victim, Error: "e" + id, By: name})
			})
		default:
			down := w.services[w.IntN(len(w.services))].agent
			w.emit(at, func(d *cascade.Detector, now time.Time) []cascade.Change {
				return d.Breaker(now, cascade.Breaker{Downstream: down, By: name, Workflow: wf, Open: true, Event: "e" + id})
			})
		}
	}
}

// scenarios, and how many of a hundred traces are of each.
var scenarios = []struct {
	name  string
	share int
}{
	{"noise", 14}, {"service refuses", 8}, {"service errors", 8}, {"service hangs", 9}, {"one address", 9}, {"partition", 11},
	{"slow burn", 10}, {"nonsense", 4}, {"short and tolerated", 8}, {"two unrelated", 7}, {"flood", 5}, {"flood and fault", 7},
}

// trace makes the trace of a seed.
func trace(seed uint64) *world {
	w := &world{seed: seed,
		Rand: rand.New(rand.NewPCG(seed, 16)), of: map[string]*cause{}, nodes: map[string][]string{}, errors: map[string][]string{},
	}
	place := int(seed % 100)
	for _, s := range scenarios {
		if w.scenario = s.name; place < s.share {
			break
		}
		place -= s.share
	}
	w.length = w.between(40*time.Second, 120*time.Second)
	layers := 3 + w.IntN(3)
	var above []*service
	var all [][]*service
	for l := range layers {
		var layer []*service
		for i := range 2 + w.IntN(3) {
			s := &service{
				agent: fmt.Sprintf("spiffe://example.com/agent/%d-%d", l, i), pool: fmt.Sprintf("pool-%d-%d", l, i),
				work: w.between(20*time.Millisecond, 400*time.Millisecond), spread: 0.3 + 0.4*w.Float64(), flaky: 0.015 * w.Float64(),
				tolerant: []float64{0, 0.1, 0.3, 0.9}[w.IntN(4)], retries: w.IntN(3), parallel: w.chance(0.4),
				reports: []float64{1, 0.9, 0.6, 0}[w.IntN(4)], names: []float64{1, 0.8, 0.3}[w.IntN(3)],
				budget: 0.6 + 0.3*w.Float64(), bypass: []float64{0, 0, 0.1, 0.3}[w.IntN(4)],
			}
			if w.chance(0.1) {
				s.budget = 1.5 // its own deadlines are longer than its callers'
			}
			if w.chance(0.05) {
				s.flaky = 0.1
			}
			for n := range 1 + w.IntN(3) {
				s.addresses = append(s.addresses, fmt.Sprintf("10.%d.%d.%d:443", l, i, n))
			}
			layer = append(layer, s)
		}
		for _, s := range above {
			for _, n := range w.Perm(len(layer))[:1+w.IntN(2)] {
				s.needs = append(s.needs, layer[n])
			}
		}
		w.services = append(w.services, layer...)
		all = append(all, layer)
		above = layer
	}
	var wfs []string
	for i := range 1 + w.IntN(3) {
		o := &service{
			agent: fmt.Sprintf("spiffe://example.com/begins/%d", i), addresses: []string{"-"}, work: 50 * time.Millisecond, spread: 0.3,
			tolerant: 0.3 * w.Float64(), reports: w.Float64(), names: 0.7, budget: 0.9, parallel: w.chance(0.5), retries: w.IntN(2),
		}
		for _, n := range w.Perm(len(all[0]))[:1+w.IntN(len(all[0]))] {
			o.needs = append(o.needs, all[0][n])
		}
		if w.chance(0.2) { // one that asks the same many times at once
			o.parallel = true
			for range 6 + w.IntN(12) {
				o.needs = append(o.needs, o.needs[0])
			}
			o.tolerant = 0.9
		}
		w.agents = append(w.agents, o)
		wfs = append(wfs, fmt.Sprintf("workflow-%d", i))
	}
	w.breakSome(all)
	for i, o := range w.agents {
		previous := []string(nil)
		for at := w.between(0, 3*time.Second); at < w.length; at += w.between(time.Second, 9*time.Second) {
			r := w.run(action{service: o, workflow: wfs[i], parents: previous, at: at, patience: w.between(5*time.Second, 40*time.Second), leaves: math.MaxInt64})
			if r.node != "" && w.chance(0.5) {
				previous = []string{r.node}
			}
		}
	}
	w.breakers()
	if w.scenario == "flood" || w.scenario == "flood and fault" {
		w.liar(wfs)
	}
	slices.SortStableFunc(w.events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	return w
}

func (w *world) breakSome(layers [][]*service) {
	pick := func(from int) *service {
		l := layers[from+w.IntN(len(layers)-from)]
		return l[w.IntN(len(l))]
	}
	add := func(mode string, long time.Duration, share float64, addresses int, services ...*service) {
		f := &fault{mode: mode, addresses: map[string]bool{}, begin: w.between(w.length/6, w.length/2), share: share}
		f.end = f.begin + long
		f.cause = w.cause(mode, len(services) > 1, services...)
		for _, s := range services {
			for _, a := range s.addresses[:min(addresses, len(s.addresses))] {
				f.addresses[a] = true
			}
		}
		w.faults = append(w.faults, f)
	}
	long := w.between(10*time.Second, w.length)
	modes := []string{"refuse", "error", "hang"}
	switch w.scenario {
	case "service refuses":
		add("refuse", long, 1, 9, pick(1))
	case "service errors":
		add("error", long, 0.6+0.4*w.Float64(), 9, pick(1))
	case "service hangs":
		add("hang", long, 1, 9, pick(1))
	case "one address":
		add(modes[w.IntN(3)], long, 1, 1, pick(1))
	case "partition":
		hit := map[*service]bool{}
		for n := 3 + w.IntN(3); len(hit) < n; {
			hit[pick(0)] = true
		}
		var services []*service
		for _, s := range w.services {
			if hit[s] {
				services = append(services, s)
			}
		}
		add("partition", long, 1, 9, services...)
	case "slow burn":
		add("slow", w.length, 1, 9, pick(1))
	case "nonsense":
		add("nonsense", long, 1, 9, pick(0))
	case "short and tolerated":
		for _, s := range w.services {
			s.tolerant = 0.95
		}
		for range 3 {
			add(modes[w.IntN(2)], w.between(200*time.Millisecond, 2*time.Second), 1, 9, pick(1))
		}
	case "two unrelated":
		for range 2 {
			add(modes[w.IntN(3)], w.between(5*time.Second, 30*time.Second), 1, 9, pick(1))
		}
	case "flood and fault":
		add(modes[w.IntN(3)], long, 1, 9, pick(1))
	}
}
