package plan

import (
	"slices"
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

// Request asks for a plan.
type Request struct {
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

// Step is what is to be done with one checkpoint.
type Step struct {
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
	Levels [][]Step `json:"levels"`
	// Passed are the actions in the scope that no step undoes, since nobody made a
	// checkpoint for them, in the order of their ids.
	Passed []string `json:"passed,omitempty"`
	// Along are the actions outside the scope that are undone all the same, since a
	// checkpoint of an action in it was made for them too, in the order of their ids.
	Along []string `json:"along,omitempty"`
	// Dependants are the completed actions that no step undoes and that depend on what
	// the plan undoes, however indirectly, in the order of their ids.
	Dependants []string `json:"dependants,omitempty"`
	// Left is how many checkpoints of the workflow a FullWorkflow leaves to others, since they
	// are not linked to what By has made. Who asks is not told which (P3).
	Left int `json:"left,omitempty"`
	// Missing are ids that groups in the plan contain and that are no nodes, in their
	// order. A rollback that could not look at them is not completed (P6).
	Missing []string `json:"missing,omitempty"`
}

// Partial reports whether the rest of the workflow may be left as it is. The error is a
// *DependedOnError: a completed action that is not undone depends on one that is (ATD,
// "Partial Rollback and Blast Radius Containment"), so that the rollback cannot be
// prepared. With Single, which is asked for in order to leave consequences as they are,
// and with FullWorkflow, which leaves nothing, there is none.
func (p *Plan) Partial() error {
	if p.Scope == SubDAG && len(p.Dependants) > 0 {
		return &DependedOnError{p.Dependants}
	}
	return nil
}

// Overlap reports whether two plans have a checkpoint in common. Those of different
// workflows do not.
func Overlap(a, b *Plan) bool {
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
	case n.Kind == Group:
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
func (g *Graph) step(i int, now time.Time) Step {
	s := Step{Checkpoint: g.nodes[i].ID}
	s.What, s.Then = g.nodes[i].what(now)
	guards := slices.Clone(g.guards[i])
	slices.SortFunc(guards, func(a, b int) int { return latestFirst(&g.nodes[a], &g.nodes[b]) })
	for _, a := range guards {
		s.Actions = append(s.Actions, g.nodes[a].ID)
	}
	return s
}
