package rollback

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

const (
	// MaxNodes bounds the nodes of a plan: a workflow with the default number of checkpoints, for
	// calls with three tokens each and some retries and failures.
	MaxNodes = 50_000
	// maxEdges bounds the parents and guarded actions that all nodes name together.
	maxEdges = 20 * MaxNodes
)

// bounded refuses a graph that is too large for a plan, with *TooManyError.
func bounded(g *workflow.Graph) error {
	if n := g.Len(); n > MaxNodes {
		return &TooManyError{"nodes", n, MaxNodes}
	}
	links := 0
	for i := range g.Len() {
		links += len(g.At(i).Parents) + len(g.At(i).Guards)
	}
	if links > maxEdges {
		return &TooManyError{"edges", links, maxEdges}
	}
	return nil
}

// NodeState is the state of a checkpoint's call. Undone comes before everything else.
type NodeState string

// The states of checkpoints.
const (
	// Ran: its call ran, or may have run (in doubt).
	Ran NodeState = "ran"
	// Undone: a rollback has undone it.
	Undone NodeState = "undone"
	// InFlight: its call is under way.
	InFlight NodeState = "in_flight"
	// NeverRan: its call was not executed, or has not come yet.
	NeverRan NodeState = "never_ran"
	// elsewhere: whoever asks for the rollback undoes it itself. It has no step.
	elsewhere NodeState = "elsewhere"
)

// RecordedState is a checkpoint's state by its records alone. A group is not undone until all its
// members were examined: no report on the group replaces that (P6).
func RecordedState(n *workflow.Node) NodeState {
	switch {
	case n.Group:
		return Ran
	case n.State == workflow.RolledBack:
		return Undone
	case n.Detail == workflow.DetailReleased:
		return NeverRan
	case n.Own && n.State == workflow.Running:
		return InFlight
	}
	return Ran
}

// Scope is how far a rollback goes (cascade 4.1.3).
type Scope string

// The scopes, the narrowest first.
const (
	// Single is the target, and what it contains if it is a group.
	Single Scope = "single"
	// SubDAG is Single and its consequences.
	SubDAG Scope = "sub_dag"
	// FullWorkflow is every checkpoint of the workflow.
	FullWorkflow Scope = "full_workflow"
)

// breadth orders the scopes. Unknown scopes are the narrowest.
func (s Scope) breadth() int {
	return 1 + slices.Index([]Scope{Single, SubDAG, FullWorkflow}, s)
}

// What is to be done with a checkpoint.
type What string

// What can be done. The first that applies counts, in this order.
const (
	// Nothing: it has been undone, and counts as done.
	noUndo What = "nothing"
	// Block: its call never ran, so that there is nothing to undo. The call is refused when it
	// comes. This is cancellation, not rollback (architecture brief).
	block What = "block"
	// Wait: its call is in flight. Afterwards do what Step.Then says, or Block if the call was
	// not executed.
	Wait What = "wait"
	// Escalate: it is irreversible, so that a human decides (cascade 4.2.1).
	Escalate What = "escalate"
	// Expired: its ttl is over, so that it must not be used (cascade 4.2.3). A human decides here
	// too.
	expired What = "expired"
	// gather: it is a group, undone when its members are.
	gather What = "gather"
	// Undo it.
	Undo What = "undo"
)

// PlanInput asks for a plan.
type PlanInput struct {
	// Workflow is the name of the workflow, which becomes part of the plan's hash.
	Workflow string
	// Target is the checkpoint or group to go back to. FullWorkflow needs one too.
	Target string
	// Scope is how far to go.
	Scope Scope
	// Coordinator says that the requester has the authority of a rollback coordinator, which
	// FullWorkflow needs (cascade 4.1.3).
	Coordinator bool
	// By and Lineage limit SubDAG and FullWorkflow to what By takes part in, and its
	// consequences: a checkpoint made for somebody else's action does not undo that action's
	// other consequences. An empty By limits nothing.
	By      string
	Lineage Lineage
	// Now is the time by which checkpoints expire: one that ends now has expired.
	Now time.Time
}

// PlanStep is the plan for one checkpoint.
type PlanStep struct {
	// Checkpoint is its id.
	Checkpoint string `json:"checkpoint"`
	// What is to be done.
	What What `json:"what"`
	// Then is what to do after Wait if the call was executed: Escalate, Expired, gather or Undo.
	// Otherwise it is empty.
	Then What `json:"then,omitempty"`
	// Actions are those that the checkpoint was made for, the latest first; none for a group.
	Actions []string `json:"actions,omitempty"`
	// Earlier are the places, in the order of the plan, of the steps that come before this one with
	// none between, at most 64: their calls follow from its call, or a group contains them. It is
	// for people: the levels decide, and no hash covers it.
	Earlier []int `json:"earlier,omitempty"`
	// Way is how a call that ran is undone; empty if that is not known. MakePlan leaves this and
	// what follows empty: the graph does not say it.
	Way string `json:"way,omitempty"`
	// Obstacle is a fixed word for why it cannot be undone, as far as that is known before it is
	// tried; empty if nothing is known.
	Obstacle string `json:"obstacle,omitempty"`
	// Cause refines the obstacle irreversible. It is no part of the hash.
	Cause string `json:"cause,omitempty"`
	// Critical says why a rollback does not leave it out, in one word; empty where it may. It says what comes of
	// an obstacle, not what is done, and is no part of the hash.
	Critical string `json:"critical,omitempty"`
	// Review says that people are asked before it is undone: it is of severity critical, and the
	// rollback was not asked for it, but goes on to it (ATD "Interaction with HITL", case 3). It is no
	// part of the hash either.
	Review bool `json:"review,omitempty"`
	// Error is the id of an agent's critical error about it; empty without one.
	Error string `json:"error,omitempty"`
	// Agent and Via are as in Step. They are no part of the hash, and MakePlan leaves them empty.
	Agent string `json:"agent,omitempty"`
	Via   string `json:"via,omitempty"` // see Agent
}

// Why a step is critical. The first that applies counts, in this order.
const (
	criticalSeverity = "severity" // its action, or an agent's error about it, is of severity critical
	criticalTarget   = "target"   // it is what the rollback was asked for
	criticalAction   = "action"   // its action is configured as critical
	criticalPriority = "priority" // an agent's token claims the priority critical for its action
)

// Plan is what a rollback does.
type Plan struct {
	// Workflow is the plan's workflow.
	Workflow string `json:"workflow"`
	// Target and Scope are what was asked for.
	Target string `json:"target"`
	Scope  Scope  `json:"scope"`
	// Levels are done one after the other, with a barrier between them. Each has a step, each
	// checkpoint has one step in all of them. Steps of a level are in the reverse of their start,
	// so that doing some of them in this order undoes the latest first.
	Levels [][]PlanStep `json:"levels"`
	// Passed are the actions in the scope that no step undoes, for lack of a checkpoint, ordered
	// by id.
	Passed []string `json:"passed,omitempty"`
	// Along are the actions outside the scope that are undone all the same, since they share a
	// checkpoint with one in it, ordered by id.
	Along []string `json:"along,omitempty"`
	// Dependants are the completed actions that no step undoes and that depend, however
	// indirectly, on what the plan undoes, ordered by id. Other attempts of undone calls are not
	// included.
	Dependants []string `json:"dependants,omitempty"`
	// elsewhere are the checkpoints that whoever asks undoes itself, with their actions. No step
	// is about them, but what would follow from them is held back. No hash covers them.
	Elsewhere []PlanStep `json:"elsewhere,omitempty"`
	// Left is how many checkpoints a FullWorkflow leaves to others, since they are not linked to
	// By's nodes. The requester does not learn which (P3).
	Left int `json:"left,omitempty"`
	// Missing are ids that groups in the plan contain and that are no nodes, in their order. A
	// rollback that could not examine them is not completed (P6).
	Missing []string `json:"missing,omitempty"`

	// What follows is found out by asking participants; MakePlan leaves it empty, and no hash covers it.

	// Unprepared are the checkpoints whose participants could not prepare, with the reason. They
	// are not asked to execute.
	Unprepared map[string]string `json:"unprepared,omitempty"`
	// Unreached are as in Rollback.
	Unreached []Obstacle `json:"unreached,omitempty"`
	// Participants are told what holds the workflow.
	Participants []informed `json:"participants,omitempty"`
}

// partial reports whether the rest of the workflow may stay as it is. Its error is a
// *DependedOnError: a completed action that is not undone depends on one that is (ATD, "Partial
// Rollback and Blast Radius Containment"). FullWorkflow has no such error: it leaves only what is
// not the requester's.
func (p *Plan) partial() error {
	if p.Scope != FullWorkflow && len(p.Dependants) > 0 {
		return &DependedOnError{p.Dependants}
	}
	return nil
}

// overlap reports whether two plans have a checkpoint in common. Those of different workflows do
// not.
func overlap(a, b *Plan) bool {
	return a.Workflow == b.Workflow && len(b.lacks(a)) < len(a.list())
}

// like reports whether a plan says the same as an earlier one, but for steps that are excused.
func (p *Plan) like(before *Plan, excused func(was, now *PlanStep) bool) bool {
	as := *p
	as.Levels = nil
	for i, level := range p.Levels {
		level = slices.Clone(level)
		for n := range level {
			if i >= len(before.Levels) || n >= len(before.Levels[i]) {
				return false
			}
			was := &before.Levels[i][n]
			if was.Checkpoint == level[n].Checkpoint && excused(was, &level[n]) {
				level[n] = *was
			}
		}
		as.Levels = append(as.Levels, level)
	}
	return as.Hash() == before.Hash()
}

// list are all steps in their order.
func (p *Plan) list() []PlanStep { return slices.Concat(p.Levels...) }

// all are the steps in their order, to be changed in place.
func (p *Plan) all() iter.Seq[*PlanStep] {
	return func(yield func(*PlanStep) bool) {
		for _, level := range p.Levels {
			for i := range level {
				if !yield(&level[i]) {
					return
				}
			}
		}
	}
}

// lacks returns the other plan's checkpoints that p does not have.
func (p *Plan) lacks(other *Plan) []string {
	has := map[string]bool{}
	for s := range p.all() {
		has[s.Checkpoint] = true
	}
	var lacking []string
	for s := range other.all() {
		if !has[s.Checkpoint] {
			lacking = append(lacking, s.Checkpoint)
		}
	}
	return lacking
}

func whatFor(n *workflow.Node, state NodeState, now time.Time) (what, then What) {
	ran := Undo
	switch {
	case !n.Reversible:
		ran = Escalate
	case !n.Expires.IsZero() && !now.Before(n.Expires):
		ran = expired
	case n.Group:
		ran = gather
	}
	switch state {
	case Undone:
		return noUndo, ""
	case NeverRan:
		return block, ""
	case InFlight:
		return Wait, ran
	}
	return ran, ""
}

func (d *planner) step(i int) PlanStep {
	s := PlanStep{Checkpoint: d.At(i).ID}
	s.What, s.Then = whatFor(d.At(i), d.states[i], d.Now)
	guards := slices.Clone(d.Guarded(i))
	slices.SortFunc(guards, d.latestFirst)
	for _, a := range guards {
		s.Actions = append(s.Actions, d.At(a).ID)
	}
	d.weigh(i, &s)
	return s
}

// weigh says whether a step is critical. What is known of the actions that a checkpoint was made for
// counts for it.
func (d *planner) weigh(i int, s *PlanStep) {
	severe, urgent := false, false
	for _, n := range append([]int{i}, d.Guarded(i)...) {
		node := d.At(n)
		s.Error = cmp.Or(s.Error, node.CriticalError)
		severe = severe || node.CriticalError != "" || (node.IsTask() || node.IsCheckpoint()) && node.Severity == workflow.Critical
		urgent = urgent || node.Priority == workflow.Critical
	}
	switch {
	case severe:
		s.Critical = criticalSeverity
		s.Review = d.Scope != Single && !d.asked[d.At(i).ID] && !d.asked[d.At(i).Execution]
	case d.At(i).ID == d.Target:
		s.Critical = criticalTarget
	case d.At(i).Critical:
		s.Critical = criticalAction
	case urgent:
		s.Critical = criticalPriority
	}
}

// latestFirst orders nodes by the reverse of their start (cascade 4.1.1, Figure 7): the order in
// which they were recorded.
func (d *planner) latestFirst(a, b int) int { return cmp.Compare(d.Seq(b), d.Seq(a)) }

// What a hash begins with. The number changes with the encoding.
const (
	hashed         = "agent-guard rollback plan 1"
	hashedWithWays = "agent-guard rollback plan 2"
)

// Hash is what a plan is recognised by: two plans have the same one only if they say
// the same. It is the SHA-256 of an encoding that has one form for each plan. A text is
// its length in bytes, as 8 bytes with the highest first, and the bytes. A list is its
// length in the same form, and its members. The encoding is
//
//	text "agent-guard rollback plan 1"
//	text workflow, text target, text scope
//	list of levels, each a list of steps, each
//	    text checkpoint, text what, text then, list of texts actions
//	list of texts passed
//	list of texts along
//	list of texts dependants
//	list of texts missing
//	left, in the form of a length, unless it is 0
//
// Of a plan with a Way or an Obstacle the first text ends with 2, and each step has texts way and
// obstacle behind its actions.
func (p *Plan) Hash() [sha256.Size]byte {
	e, ways := encoder{sha256.New()}, p.ways()
	if ways {
		e.text(hashedWithWays)
	} else {
		e.text(hashed)
	}
	e.text(p.Workflow)
	e.text(p.Target)
	e.text(string(p.Scope))
	e.length(len(p.Levels))
	for _, level := range p.Levels {
		e.length(len(level))
		for _, s := range level {
			e.text(s.Checkpoint)
			e.text(string(s.What))
			e.text(string(s.Then))
			e.texts(s.Actions)
			if ways {
				e.text(s.Way)
				e.text(s.Obstacle)
			}
		}
	}
	e.texts(p.Passed)
	e.texts(p.Along)
	e.texts(p.Dependants)
	e.texts(p.Missing)
	if p.Left > 0 {
		e.length(p.Left)
	}
	return [sha256.Size]byte(e.Sum(nil))
}

// ways reports whether the plan says how a step is done.
func (p *Plan) ways() bool {
	return slices.ContainsFunc(p.list(), func(s PlanStep) bool { return s.Way != "" || s.Obstacle != "" })
}

type encoder struct{ hash.Hash }

func (e encoder) length(n int) {
	_, _ = e.Write(binary.BigEndian.AppendUint64(nil, uint64(n)))
}

func (e encoder) text(s string) {
	e.length(len(s))
	_, _ = e.Write([]byte(s))
}

func (e encoder) texts(all []string) {
	e.length(len(all))
	for _, s := range all {
		e.text(s)
	}
}

// MakePlan makes the plan of a rollback. It fails with *ScopeError, *CycleError or ErrCheckpointUnknown.
// Other reasons against executing it are in the plan.
//
// stateOf returns the state of each checkpoint in the plan; its error ends the planning. States
// decide what a step does, not which steps there are; but what is elsewhere has none.
func MakePlan(g *workflow.Graph, r PlanInput, stateOf func(n *workflow.Node) (NodeState, error)) (*Plan, error) {
	if r.Scope.breadth() == 0 || r.Scope == FullWorkflow && !r.Coordinator {
		return nil, &ScopeError{r.Scope}
	}
	target, known := checkpointIn(g, r.Target)
	if !known {
		return nil, ErrCheckpointUnknown
	}
	d := &planner{Graph: g, PlanInput: r}
	return d.plan(target, stateOf)
}

// planner is a plan in the making.
type planner struct {
	*workflow.Graph
	PlanInput

	followed int // links that were followed, which a test holds to be few

	asked   map[string]bool // ids of the target and all that it contains, and their executions
	steps   []bool          // nodes: the checkpoints in the plan
	states  []NodeState     // nodes: of these, what is known of their calls
	covered []bool          // nodes: the actions that these were made for
	scope   []bool          // places: what the rollback is about
	wide    []bool          // places: that, what is covered, and all that follows
}

// plan makes the plan of going back to a target.
func (d *planner) plan(target int, stateOf func(n *workflow.Node) (NodeState, error)) (*Plan, error) {
	d.measure(target)
	o := order{planner: d}
	if err := o.sort(); err != nil {
		return nil, err
	}
	p := &Plan{Workflow: d.Workflow, Target: d.Target, Scope: d.Scope}
	d.states = make([]NodeState, d.Len())
	for i, step := range d.steps {
		if !step {
			continue
		}
		var err error
		if d.states[i], err = stateOf(d.At(i)); err != nil {
			return nil, err
		}
		if d.states[i] == elsewhere {
			d.steps[i] = false
			left := d.step(i)
			p.Elsewhere = append(p.Elsewhere, PlanStep{Checkpoint: left.Checkpoint, Actions: left.Actions})
		}
	}
	heights := o.heights()
	levels := make([][]int, slices.Max(heights))
	for i, step := range d.steps {
		if step {
			levels[heights[i]-1] = append(levels[heights[i]-1], i)
		}
	}
	for _, level := range levels {
		slices.SortFunc(level, d.latestFirst)
		steps := make([]PlanStep, len(level))
		for n, i := range level {
			steps[n] = d.step(i)
		}
		p.Levels = append(p.Levels, steps)
	}
	o.connect(p, heights)
	d.rest(p)
	return p, nil
}

// measure marks how far the plan goes.
func (d *planner) measure(target int) {
	roots := contained(d.Graph, target)
	d.asked = make(map[string]bool, 2*len(roots))
	for _, i := range roots {
		d.asked[d.At(i).ID] = true
		if name := d.At(i).Execution; name != "" { // another attempt of the same call
			d.asked[name] = true
		}
	}
	d.steps, d.covered = make([]bool, d.Len()), make([]bool, d.Len())
	switch d.Scope {
	case Single:
		d.scope = make([]bool, d.Places())
		for _, i := range d.withGuards(roots) {
			d.scope[i] = true
		}
		d.take(func(i int) bool { return d.scope[i] })
	case SubDAG:
		starts := d.withGuards(roots)
		if d.By != "" {
			near := near(d.Graph, d.By, d.Lineage)
			starts = slices.DeleteFunc(starts, func(i int) bool { return d.At(i).IsTask() && !near[i] })
		}
		d.consequences(starts)
	case FullWorkflow:
		if d.By != "" {
			d.linked()
			break
		}
		d.scope = make([]bool, d.Places())
		for p := range d.scope {
			d.scope[p] = true
		}
		d.take(func(int) bool { return true })
	}
	all := d.effects(func(int) bool { return true })
	for p, in := range d.scope {
		if in {
			all = append(all, p)
		}
	}
	d.wide = d.reach(all)
}

// consequences takes what follows from some places.
func (d *planner) consequences(places []int) {
	d.scope = d.reach(places)
	d.take(func(i int) bool { return d.scope[i] })
	bare := make([]bool, d.Len())
	for i, covered := range d.covered {
		bare[i] = d.scope[i] && !covered
	}
	// Placed before its action, a checkpoint need not follow from what the action follows from.
	d.take(func(i int) bool {
		return slices.ContainsFunc(d.Guarded(i), func(a int) bool { return bare[a] })
	})
}

// linked takes what is linked to the requester's nodes, and its consequences. A group links
// nothing to its maker: it is taken if all its members are.
func (d *planner) linked() {
	var own []int
	for i, near := range near(d.Graph, d.By, d.Lineage) {
		if near && !d.At(i).Group {
			own = append(own, i)
		}
	}
	d.consequences(own)
	d.take(func(i int) bool { return d.At(i).Group && whole(d.Graph, i, d.scope) })
}

// take puts checkpoints into the plan.
func (d *planner) take(which func(i int) bool) {
	for i := range d.Len() {
		if !d.At(i).IsCheckpoint() || d.steps[i] || !which(i) {
			continue
		}
		d.steps[i] = true
		d.followed += len(d.Guarded(i))
		for _, a := range d.Guarded(i) {
			d.covered[a] = true
		}
	}
}

// effects are the checkpoints of some steps, with their actions.
func (d *planner) effects(which func(i int) bool) []int {
	var all []int
	for i, step := range d.steps {
		if step && which(i) {
			all = append(all, i)
		}
	}
	return d.withGuards(all)
}

// withGuards are checkpoints with the actions that they were made for.
func (d *planner) withGuards(checkpoints []int) []int {
	all := slices.Clone(checkpoints)
	for _, i := range checkpoints {
		d.followed += len(d.Guarded(i))
		all = append(all, d.Guarded(i)...)
	}
	return all
}

// reach marks the places that follow from some places, and these.
func (d *planner) reach(starts []int) []bool {
	met := make([]bool, d.Places())
	var todo []int
	visit := func(places []int) {
		d.followed += len(places)
		for _, p := range places {
			if !met[p] {
				met[p] = true
				todo = append(todo, p)
			}
		}
	}
	visit(starts)
	for len(todo) > 0 {
		last := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		visit(d.Next(last))
	}
	return met
}

// attempts marks the actions of calls that a step undoes, by whichever attempt: a call does not
// depend on itself.
func (d *planner) attempts() []bool {
	calls := make(map[string]bool)
	for i, step := range d.steps {
		if name := d.At(i).Execution; step && name != "" {
			calls[name] = true
		}
	}
	same := make([]bool, d.Len())
	if len(calls) == 0 {
		return same
	}
	for i := range d.Len() {
		if !calls[d.At(i).Execution] {
			continue
		}
		same[i] = true
		for _, a := range d.Guarded(i) {
			same[a] = true
		}
	}
	return same
}

// rest adds what is undone outside the scope, and what is not undone.
func (d *planner) rest(p *Plan) {
	touched := d.reach(d.effects(func(i int) bool { return d.states[i] != Undone && d.states[i] != NeverRan }))
	same := d.attempts()
	here := make([]bool, d.Len()) // the actions that are undone here
	for _, i := range d.effects(func(int) bool { return true }) {
		here[i] = true
	}
	for i := range d.Len() {
		n := d.At(i)
		if d.Scope == FullWorkflow && n.IsCheckpoint() && !d.steps[i] && d.states[i] != elsewhere {
			p.Left++
		}
		switch {
		case !n.IsTask():
			if d.steps[i] && n.Group {
				p.Missing = append(p.Missing, n.Missing...)
			}
		case here[i] && !d.scope[i]:
			p.Along = append(p.Along, n.ID)
		case d.covered[i]:
		case d.scope[i]:
			p.Passed = append(p.Passed, n.ID)
		case touched[i] && n.State == workflow.Done && !same[i]:
			p.Dependants = append(p.Dependants, n.ID)
		}
	}
	slices.Sort(p.Along)
	slices.Sort(p.Passed)
	slices.Sort(p.Dependants)
	slices.Sort(p.Missing)
	p.Missing = slices.Compact(p.Missing)
}

// order sorts the places of a draft for their rollback.
//
// Two relations decide. By the tokens a place comes before what it follows from. And a checkpoint
// comes after the consequences of its actions, which need not follow from it. The second relation
// can be circular. The places of a circle are a knot: between knots both relations decide, within
// one only the tokens.
type order struct {
	*planner
	sorted []int // places by the tokens alone, consequences first
	knots  []int // of a place: its knot, consequences have the lower number; from 1 on
	count  int   // of knots
}

// next are the places that place p comes after.
func (o *order) next(p int) (follow, guarded []int) {
	follow = o.Next(p)
	if p < o.Len() && o.steps[p] {
		guarded = o.Guarded(p)
	}
	o.followed += len(follow) + len(guarded)
	return follow, guarded
}

// sort orders the places by the tokens. It fails with *CycleError.
func (o *order) sort() error {
	waits := make([]int, o.Places())
	var todo []int
	count := 0
	for p, in := range o.wide {
		if !in {
			continue
		}
		count++
		follow, _ := o.next(p)
		for _, q := range follow {
			waits[q]++
		}
	}
	for p, in := range o.wide {
		if in && waits[p] == 0 {
			todo = append(todo, p)
		}
	}
	for n := 0; n < len(todo); n++ {
		follow, _ := o.next(todo[n])
		for _, q := range follow {
			if waits[q]--; waits[q] == 0 {
				todo = append(todo, q)
			}
		}
	}
	if len(todo) < count {
		e := &CycleError{}
		for i := range o.Len() {
			if waits[i] > 0 || waits[o.End(i)] > 0 {
				e.Nodes = append(e.Nodes, o.At(i).ID)
			}
		}
		slices.Sort(e.Nodes)
		return e
	}
	slices.Reverse(todo)
	o.sorted = todo
	return nil
}

// heights returns the level of each place's step, from 1 on. Places that are no steps have none
// of their own.
func (o *order) heights() []int {
	o.tie()
	members := make([][]int, o.count+1)
	for _, p := range o.sorted {
		members[o.knots[p]] = append(members[o.knots[p]], p)
	}
	heights := make([]int, o.Places())
	tops := make([]int, o.count+1) // of a knot: its highest level
	for k := 1; k <= o.count; k++ {
		for _, p := range members[k] {
			follow, guarded := o.next(p)
			for _, places := range [][]int{follow, guarded} {
				for _, q := range places {
					if o.knots[q] != k {
						tops[k] = max(tops[k], tops[o.knots[q]])
					}
				}
			}
		}
		below := tops[k]
		for _, p := range members[k] {
			heights[p] = below
			follow, _ := o.next(p)
			for _, q := range follow {
				if o.knots[q] == k {
					heights[p] = max(heights[p], heights[q])
				}
			}
			if p < o.Len() && o.steps[p] {
				heights[p]++
			}
			tops[k] = max(tops[k], heights[p])
		}
	}
	return heights
}

// maxEarlier bounds what a step names of those before it, so that a plan stays linear in its steps.
const maxEarlier = 64

// connect sets Earlier of the steps: those that are reached over what follows from a checkpoint and
// from its actions, up to the first step on each way.
func (o *order) connect(p *Plan, heights []int) {
	place := make([]int, o.Len()) // of a step: its place in the plan
	undoing := make([][]int, o.Len())
	for n, s := range p.list() {
		i, _ := o.Index(s.Checkpoint)
		place[i] = n
		for _, a := range o.Guarded(i) {
			undoing[a] = append(undoing[a], i)
		}
	}
	below, seen, mark := make([][]int, o.Places()), make([]int, o.Len()), 0
	collect := func(met []int, from int) []int {
		next := o.Next(from)
		o.followed += len(next)
		for _, q := range next {
			first := below[q]
			switch {
			case q >= o.Len():
			case o.steps[q]:
				first = []int{q}
			case len(undoing[q]) > 0:
				first = undoing[q]
			}
			for _, step := range first {
				if len(met) == maxEarlier {
					return met
				}
				if seen[step] != mark {
					seen[step] = mark
					met = append(met, step)
				}
			}
		}
		return met
	}
	for _, q := range o.sorted {
		mark++
		below[q] = collect(nil, q)
	}
	for l, level := range p.Levels {
		for k := range level {
			mark++
			i, _ := o.Index(level[k].Checkpoint)
			seen[i] = mark // its actions lead to it
			met := collect(nil, i)
			for _, a := range o.Guarded(i) {
				met = collect(met, a)
			}
			for _, step := range met {
				if heights[step]-1 < l { // not one of its own knot that comes with it, or later
					level[k].Earlier = append(level[k].Earlier, place[step])
				}
			}
			slices.Sort(level[k].Earlier)
		}
	}
}

// tie finds the knots: Tarjan's strongly connected components, consequences first.
func (o *order) tie() {
	o.knots = make([]int, o.Places())
	t := tarjan{order: o, seen: make([]int, o.Places()), low: make([]int, o.Places())}
	for _, p := range o.sorted {
		if t.seen[p] == 0 {
			t.visit(p)
		}
	}
}

// tarjan is the state of Tarjan's walk.
type tarjan struct {
	*order
	clock int
	seen  []int // when a place was first met; 0 is never
	low   []int // the earliest place that can be reached from it and is still open
	open  []int // places without a knot
}

// visit goes at most as deep as there are places, which the limits of New bound.
func (t *tarjan) visit(p int) {
	t.clock++
	t.seen[p], t.low[p] = t.clock, t.clock
	t.open = append(t.open, p)
	follow, guarded := t.next(p)
	for _, places := range [][]int{follow, guarded} {
		for _, q := range places {
			switch {
			case t.seen[q] == 0:
				t.visit(q)
				t.low[p] = min(t.low[p], t.low[q])
			case t.knots[q] == 0:
				t.low[p] = min(t.low[p], t.seen[q])
			}
		}
	}
	if t.low[p] < t.seen[p] {
		return
	}
	t.count++
	for {
		last := t.open[len(t.open)-1]
		t.open = t.open[:len(t.open)-1]
		t.knots[last] = t.count
		if last == p {
			return
		}
	}
}

// longestQuote bounds what an error repeats of foreign text, in bytes.
const longestQuote = 80

// shownIDs is how many ids an error names.
const shownIDs = 5

// TooManyError refuses a graph that is over a limit.
type TooManyError struct {
	// What is counted: nodes, or edges.
	What string
	// Count is how many there are, Limit how many there may be.
	Count, Limit int
}

// Error implements error.
func (e *TooManyError) Error() string {
	return fmt.Sprintf("plan: the workflow has %d %s, and at most %d can be planned for", e.Count, e.What, e.Limit)
}

// ScopeError refuses a scope: one that does not exist, or one that the requester has
// no authority for.
type ScopeError struct {
	// Scope is what was asked for.
	Scope Scope
}

// Error implements error.
func (e *ScopeError) Error() string {
	if e.Scope == FullWorkflow {
		return "plan: scope full_workflow needs the authority of a rollback coordinator"
	}
	return "plan: scope " + quote(string(e.Scope)) + " is none of single, sub_dag and full_workflow"
}

// CycleError refuses nodes that follow from themselves. Verified tokens cannot.
type CycleError struct {
	// Nodes lie on a cycle or behind one, the lowest id first. They are never none.
	Nodes []string
}

// Error implements error.
func (e *CycleError) Error() string {
	return "plan: nodes follow from themselves, or from nodes that do: " + list(e.Nodes)
}

// DependedOnError refuses to leave the rest of the workflow as it is.
type DependedOnError struct {
	// Dependants are completed actions outside the plan that depend on what it undoes.
	Dependants []string
}

// Error implements error.
func (e *DependedOnError) Error() string {
	return "plan: completed actions depend on what would be undone: " + list(e.Dependants) +
		"; ask with cascade to undo them too, or with keep_dependants to leave them as they are"
}

func list(ids []string) string {
	var shown []string
	for _, id := range ids[:min(len(ids), shownIDs)] {
		shown = append(shown, quote(id))
	}
	text := strings.Join(shown, ", ")
	if more := len(ids) - shownIDs; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

func quote(text string) string {
	if len(text) > longestQuote {
		return strconv.Quote(text[:longestQuote]) + "..."
	}
	return strconv.Quote(text)
}
