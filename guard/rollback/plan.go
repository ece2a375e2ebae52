package rollback

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Scope is how far a rollback goes (cascade 4.1.3).
type Scope string

// The scopes, the narrowest first.
const (
	// Single is the target, and what it contains if it is a group.
	Single Scope = "single"
	// SubDAG is that and its consequences.
	SubDAG Scope = "sub_dag"
	// FullWorkflow is every checkpoint of the workflow.
	FullWorkflow Scope = "full_workflow"
)

// breadth orders the scopes. What is none is narrower than all.
func (s Scope) breadth() int {
	return 1 + slices.Index([]Scope{Single, SubDAG, FullWorkflow}, s)
}

// What is to be done with a checkpoint.
type What string

// What can be done. The first that applies counts, in the order in which they stand
// here.
const (
	// Nothing: it has been undone, and counts as done.
	Nothing What = "nothing"
	// Block: its call never ran, so that there is nothing to undo. The call is refused
	// when it comes. This is cancellation, and not rollback (architecture brief).
	Block What = "block"
	// Wait: its call is in flight. When that has ended do what Step.Then says, or Block
	// if the call was not executed.
	Wait What = "wait"
	// Escalate: it is irreversible, so that a human decides (cascade 4.2.1).
	Escalate What = "escalate"
	// Expired: its ttl is over, so that it must not be used (cascade 4.2.3). A human
	// decides here too.
	Expired What = "expired"
	// Gather: it is a group, and is undone when what it contains is.
	Gather What = "gather"
	// Undo it.
	Undo What = "undo"
)

// PlanInput asks for a plan.
type PlanInput struct {
	// Target is the checkpoint or group to go back to. FullWorkflow needs one too.
	Target string
	// Scope is how far to go.
	Scope Scope
	// Coordinator says that the requester has the authority of a rollback coordinator,
	// without which there is no FullWorkflow (cascade 4.1.3).
	Coordinator bool
	// By and Lineage bound SubDAG and FullWorkflow to what By has a part in, and what follows
	// from that: who has made a checkpoint for somebody else's action does not undo with it
	// what else has followed from the action. An empty By bounds nothing.
	By      string
	Lineage Lineage
	// Now is the time by which checkpoints expire: one that ends now has expired.
	Now time.Time
}

// PlanStep is what is to be done with one checkpoint.
type PlanStep struct {
	// Checkpoint is its id.
	Checkpoint string `json:"checkpoint"`
	// What is to be done.
	What What `json:"what"`
	// Then is what is to be done after Wait if the call was executed: Escalate, Expired,
	// Gather or Undo. Otherwise it is empty.
	Then What `json:"then,omitempty"`
	// Actions are those that the checkpoint was made for, the latest first. A group
	// has none of its own.
	Actions []string `json:"actions,omitempty"`
}

// Plan is what a rollback does.
type Plan struct {
	// Workflow is the workflow that it is for.
	Workflow string `json:"workflow"`
	// Target and Scope are what was asked for.
	Target string `json:"target"`
	Scope  Scope  `json:"scope"`
	// Levels are done one after the other, with a barrier between them. Each has a step,
	// each checkpoint has one step in all of them. Within a level they stand in the reverse
	// of their start, so that whoever takes some of them one after the other takes back the
	// latest first.
	Levels [][]PlanStep `json:"levels"`
	// Passed are the actions in the scope that no step undoes, since nobody made a
	// checkpoint for them, in the order of their ids.
	Passed []string `json:"passed,omitempty"`
	// Along are the actions outside the scope that are undone all the same, since a
	// checkpoint of an action in it was made for them too, in the order of their ids.
	Along []string `json:"along,omitempty"`
	// Dependants are the completed actions that no step undoes and that depend on what
	// the plan undoes, however indirectly, in the order of their ids. Other attempts of
	// calls that a step undoes are none.
	Dependants []string `json:"dependants,omitempty"`
	// Left is how many checkpoints of the workflow a FullWorkflow leaves to others, since they
	// are not linked to what By has made. The requester does not learn which (P3).
	Left int `json:"left,omitempty"`
	// Missing are ids that groups in the plan contain and that are no nodes, in their
	// order. A rollback that could not look at them is not completed (P6).
	Missing []string `json:"missing,omitempty"`
}

// Partial reports whether the rest of the workflow may be left as it is. The error is a
// *DependedOnError: a completed action that is not undone depends on one that is (ATD,
// "Partial Rollback and Blast Radius Containment"). With FullWorkflow, which leaves nothing
// but what is not the requester's, there is none.
func (p *Plan) Partial() error {
	if p.Scope != FullWorkflow && len(p.Dependants) > 0 {
		return &DependedOnError{p.Dependants}
	}
	return nil
}

// overlap reports whether two plans have a checkpoint in common. Those of different
// workflows do not.
func overlap(a, b *Plan) bool {
	return a.Workflow == b.Workflow && len(b.lacks(a)) < a.steps()
}

func (p *Plan) steps() int {
	n := 0
	for _, level := range p.Levels {
		n += len(level)
	}
	return n
}

// lacks gives the checkpoints of another plan that p does not have.
func (p *Plan) lacks(other *Plan) []string {
	has := make(map[string]bool, p.steps())
	for _, level := range p.Levels {
		for _, s := range level {
			has[s.Checkpoint] = true
		}
	}
	var lacking []string
	for _, level := range other.Levels {
		for _, s := range level {
			if !has[s.Checkpoint] {
				lacking = append(lacking, s.Checkpoint)
			}
		}
	}
	return lacking
}

// what says what is to be done with a checkpoint.
func (n *Node) what(now time.Time) (what, then What) {
	ran := Undo
	switch {
	case !n.Reversible:
		ran = Escalate
	case !n.Expires.IsZero() && !now.Before(n.Expires):
		ran = Expired
	case n.Kind == GroupNode:
		ran = Gather
	}
	switch n.State {
	case Undone:
		return Nothing, ""
	case NeverRan:
		return Block, ""
	case InFlight:
		return Wait, ran
	}
	return ran, ""
}

// step makes the step of checkpoint i.
func (g *Graph) step(i int, now time.Time) PlanStep {
	s := PlanStep{Checkpoint: g.nodes[i].ID}
	s.What, s.Then = g.nodes[i].what(now)
	guards := slices.Clone(g.guards[i])
	slices.SortFunc(guards, func(a, b int) int { return latestFirst(&g.nodes[a], &g.nodes[b]) })
	for _, a := range guards {
		s.Actions = append(s.Actions, g.nodes[a].ID)
	}
	return s
}

// hashed is what a hash begins with. Its number changes with the encoding.
const hashed = "agent-guard rollback plan 1"

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
func (p *Plan) Hash() [sha256.Size]byte {
	e := encoder{sha256.New()}
	e.text(hashed)
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

type encoder struct{ hash.Hash }

func (e encoder) length(n int) {
	// A hash never fails to write.
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

// Plan makes the plan of a rollback. It fails with *ScopeError, *UnknownError or
// *CycleError. What speaks against executing it is in the plan.
func (g *Graph) Plan(r PlanInput) (*Plan, error) {
	d := &planner{Graph: g, PlanInput: r}
	return d.plan(nil)
}

// planner is a plan that is being made.
type planner struct {
	*Graph
	PlanInput

	followed int // links that were followed, which a test holds to be few

	steps   []bool // nodes: the checkpoints in the plan
	covered []bool // nodes: the actions that these were made for
	scope   []bool // places: what the rollback is about
	wide    []bool // places: that, what is covered, and all that follows
}

// plan makes the plan. refresh, if any, updates the state of each checkpoint in it: states decide
// what a step does, and not which steps there are.
func (d *planner) plan(refresh func(n *Node) error) (*Plan, error) {
	if d.Scope.breadth() == 0 || d.Scope == FullWorkflow && !d.Coordinator {
		return nil, &ScopeError{d.Scope}
	}
	target, known := d.checkpoint(d.Target)
	if !known {
		return nil, &unknownError{d.Target}
	}
	d.measure(target)
	o := order{planner: d}
	if err := o.sort(); err != nil {
		return nil, err
	}
	heights := o.heights()
	for i, step := range d.steps {
		if step && refresh != nil {
			if err := refresh(&d.nodes[i]); err != nil {
				return nil, err
			}
		}
	}
	p := &Plan{Workflow: d.workflow, Target: d.Target, Scope: d.Scope}
	for i, height := range heights {
		if i >= len(d.nodes) || !d.steps[i] {
			continue
		}
		for len(p.Levels) < height {
			p.Levels = append(p.Levels, nil)
		}
		p.Levels[height-1] = append(p.Levels[height-1], d.step(i, d.Now))
	}
	for _, level := range p.Levels {
		slices.SortFunc(level, func(a, b PlanStep) int {
			return latestFirst(&d.nodes[d.index[a.Checkpoint]], &d.nodes[d.index[b.Checkpoint]])
		})
	}
	d.rest(p)
	return p, nil
}

// measure finds out how far the plan goes.
func (d *planner) measure(target int) {
	roots := d.contained(target)
	d.steps, d.covered = make([]bool, len(d.nodes)), make([]bool, len(d.nodes))
	switch d.Scope {
	case Single:
		d.scope = make([]bool, len(d.down))
		for _, i := range d.withGuards(roots) {
			d.scope[i] = true
		}
		d.take(func(i int) bool { return d.scope[i] })
	case SubDAG:
		starts := d.withGuards(roots)
		if d.By != "" {
			near := d.near(d.By, d.Lineage)
			starts = slices.DeleteFunc(starts, func(i int) bool { return d.nodes[i].Kind == ActionNode && !near[i] })
		}
		d.consequences(starts)
	case FullWorkflow:
		if d.By != "" {
			d.linked()
			break
		}
		d.scope = make([]bool, len(d.down))
		for p := range d.scope {
			d.scope[p] = true
		}
		d.take(func(int) bool { return true })
	}
	all := d.effects(func(What) bool { return true })
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
	bare := make([]bool, len(d.nodes))
	for i, covered := range d.covered {
		bare[i] = d.scope[i] && !covered
	}
	// Placed before its action, a checkpoint need not follow from what the action
	// follows from.
	d.take(func(i int) bool {
		return slices.ContainsFunc(d.guards[i], func(a int) bool { return bare[a] })
	})
}

// linked takes what is linked to the nodes of who asks, and what follows from that. A group
// links nothing to who has made it: it is taken where all that it contains is.
func (d *planner) linked() {
	var own []int
	for i, near := range d.near(d.By, d.Lineage) {
		if near && d.nodes[i].Kind != GroupNode {
			own = append(own, i)
		}
	}
	d.consequences(own)
	d.take(func(i int) bool { return d.nodes[i].Kind == GroupNode && d.whole(i, d.scope) })
}

// take puts checkpoints into the plan.
func (d *planner) take(which func(i int) bool) {
	for i := range d.nodes {
		if !d.nodes[i].isCheckpoint() || d.steps[i] || !which(i) {
			continue
		}
		d.steps[i] = true
		d.followed += len(d.guards[i])
		for _, a := range d.guards[i] {
			d.covered[a] = true
		}
	}
}

// effects are the checkpoints of some steps, with their actions.
func (d *planner) effects(which func(w What) bool) []int {
	var all []int
	for i, step := range d.steps {
		what, _ := d.nodes[i].what(d.Now)
		if step && which(what) {
			all = append(all, i)
		}
	}
	return d.withGuards(all)
}

// withGuards are checkpoints with the actions that they were made for.
func (d *planner) withGuards(checkpoints []int) []int {
	all := slices.Clone(checkpoints)
	for _, i := range checkpoints {
		d.followed += len(d.guards[i])
		all = append(all, d.guards[i]...)
	}
	return all
}

// reach marks the places that follow from some places, and these.
func (d *planner) reach(starts []int) []bool {
	met := make([]bool, len(d.down))
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
		visit(d.down[last])
	}
	return met
}

// attempts marks the actions of calls that a step undoes, by whichever attempt: a call does
// not depend on itself.
func (d *planner) attempts() []bool {
	calls := make(map[string]bool)
	for i, step := range d.steps {
		if name := d.nodes[i].Execution; step && name != "" {
			calls[name] = true
		}
	}
	same := make([]bool, len(d.nodes))
	if len(calls) == 0 {
		return same
	}
	for i := range d.nodes {
		if !calls[d.nodes[i].Execution] {
			continue
		}
		same[i] = true
		for _, a := range d.guards[i] {
			same[a] = true
		}
	}
	return same
}

// rest fills in what is undone besides the scope, and what is not undone.
func (d *planner) rest(p *Plan) {
	touched := d.reach(d.effects(func(w What) bool { return w != Nothing && w != Block }))
	same := d.attempts()
	for i := range d.nodes {
		n := &d.nodes[i]
		if d.Scope == FullWorkflow && n.isCheckpoint() && !d.steps[i] {
			p.Left++
		}
		switch {
		case n.Kind != ActionNode:
			if d.steps[i] {
				p.Missing = append(p.Missing, d.unknown[i]...)
			}
		case d.covered[i] && !d.scope[i]:
			p.Along = append(p.Along, n.ID)
		case d.covered[i]:
		case d.scope[i]:
			p.Passed = append(p.Passed, n.ID)
		case touched[i] && n.Done && !same[i]:
			p.Dependants = append(p.Dependants, n.ID)
		}
	}
	slices.Sort(p.Along)
	slices.Sort(p.Passed)
	slices.Sort(p.Dependants)
	slices.Sort(p.Missing)
	p.Missing = slices.Compact(p.Missing)
}

// order puts the places of a draft in the order of their rollback.
//
// Two relations decide. By the tokens alone a place comes before what it follows from.
// Besides, a checkpoint comes after what follows from the actions that it was made for,
// which need not follow from it. The second can run in circles. The places of a circle
// are a knot: between knots both relations decide, within one the tokens alone.
type order struct {
	*planner
	sorted []int // places by the tokens alone, consequences first
	knots  []int // of a place: its knot, consequences have the lower number; from 1 on
	count  int   // of knots
}

// next are the places that place p comes after.
func (o *order) next(p int) (follow, guarded []int) {
	follow = o.down[p]
	if p < len(o.nodes) && o.steps[p] {
		guarded = o.guards[p]
	}
	o.followed += len(follow) + len(guarded)
	return follow, guarded
}

// sort orders the places by the tokens. It fails with *CycleError.
func (o *order) sort() error {
	waits := make([]int, len(o.down))
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
		for p, n := range waits {
			if n > 0 {
				e.Nodes = append(e.Nodes, o.node(p).ID)
			}
		}
		slices.Sort(e.Nodes)
		e.Nodes = slices.Compact(e.Nodes)
		return e
	}
	slices.Reverse(todo)
	o.sorted = todo
	return nil
}

// heights gives the level of each place's step, from 1 on. Places that are no steps
// take none of their own.
func (o *order) heights() []int {
	o.tie()
	members := make([][]int, o.count+1)
	for _, p := range o.sorted {
		members[o.knots[p]] = append(members[o.knots[p]], p)
	}
	heights := make([]int, len(o.down))
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
			if p < len(o.nodes) && o.steps[p] {
				heights[p]++
			}
			tops[k] = max(tops[k], heights[p])
		}
	}
	return heights
}

// tie finds the knots: Tarjan's strongly connected components, which come out with the
// consequences first.
func (o *order) tie() {
	o.knots = make([]int, len(o.down))
	t := tarjan{order: o, seen: make([]int, len(o.down)), low: make([]int, len(o.down))}
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

// precedence is what decides between two rollbacks (cascade 4.3.4).
type precedence struct {
	// ID is the rollback's id. No two rollbacks have the same one.
	ID string
	// Scope is how far it goes.
	Scope Scope
	// Asked is when it was recorded, by the clock of the store and not the requester's.
	Asked time.Time
}

// comparePrecedence orders rollbacks by precedence: it is negative if a takes precedence over b,
// positive if b does over a, and zero only if they are the same. The wider scope comes
// first, then the earlier time, then the lower id. A scope that does not exist is the
// narrowest.
func comparePrecedence(a, b precedence) int {
	return cmp.Or(
		cmp.Compare(b.Scope.breadth(), a.Scope.breadth()),
		a.Asked.Compare(b.Asked),
		cmp.Compare(a.ID, b.ID),
	)
}

// contender is a rollback that takes steps, or asks to.
type contender struct {
	precedence
	Plan *Plan
}

// conflictResolution is what comes of two rollbacks.
type conflictResolution string

// What can come of them. Who loses gets 409 rollback-conflict with the winner's id.
const (
	// noConflict: they have no checkpoint in common, and both go on.
	noConflict conflictResolution = "no conflict"
	// newcomerRefused: the new one loses.
	newcomerRefused conflictResolution = "refused"
	// earlierJoins: the earlier one loses. It finishes its level, then the new one starts, whose
	// result becomes that of both.
	earlierJoins conflictResolution = "joins"
	// newcomerWaits: the earlier one goes on to its end, and then the new one starts. To break
	// off would leave a checkpoint to nobody.
	newcomerWaits conflictResolution = "waits"
)

// resolveConflict says what comes of two different rollbacks when one of them was accepted
// first. comparePrecedence decides, but nothing that was accepted is left half done.
//
// The earlier one joins a wider one whose plan has all of its checkpoints, for which they are
// undone then. Where the wider plan lacks some of them, as the sub-DAG of one checkpoint does
// that the other's group contains, the wider one waits. So does one of the same scope that was
// asked for earlier.
func resolveConflict(there, comes contender) conflictResolution {
	switch {
	case !overlap(there.Plan, comes.Plan):
		return noConflict
	case comparePrecedence(there.precedence, comes.precedence) <= 0:
		return newcomerRefused
	case there.Scope.breadth() < comes.Scope.breadth() && len(comes.Plan.lacks(there.Plan)) == 0:
		return earlierJoins
	}
	return newcomerWaits
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

// nodeError refuses a node that cannot be, which is a mistake of whoever made it.
type nodeError struct {
	// ID is the node's.
	ID string
	// Problem is what is wrong with it.
	Problem string
}

// Error implements error.
func (e *nodeError) Error() string { return "plan: node " + quote(e.ID) + ": " + e.Problem }

// unknownError refuses a target that is no checkpoint of the workflow.
type unknownError struct {
	// Checkpoint is the id that was asked for.
	Checkpoint string
}

// Error implements error.
func (e *unknownError) Error() string {
	return "plan: checkpoint " + quote(e.Checkpoint) + " is not among the workflow's checkpoints"
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
