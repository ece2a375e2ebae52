package plan

import (
	"cmp"
	"errors"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// The errors of Which.
var (
	ErrUnknownNode   = errors.New("plan: no node is called like this")
	ErrAmbiguousNode = errors.New("plan: several nodes are called like this")
)

// Which finds the place of the node that a call is: the one with the id that the call names, if it
// names one, else the one whose id, or else whose label, is the call's action.
func (d *Descriptor) Which(named, action string) (place int, err error) {
	if place, ok := d.index[cmp.Or(named, action)]; ok {
		return place, nil
	}
	same := d.labels[action]
	switch {
	case named != "" || len(same) == 0:
		return 0, ErrUnknownNode
	case len(same) > 1:
		return 0, ErrAmbiguousNode
	}
	return same[0], nil
}

// Status is how far a node has come.
type Status struct {
	// State is pending without a call, else that of its calls together: an earlier call that was rolled
	// back, or not executed, does not count beside another; of the others the worst counts. So a call
	// in doubt is not done, whatever else succeeded (P6).
	State workflow.State
	// Detail refines State, as it does for a call.
	Detail workflow.Detail
	// Tasks are the ids of its calls, in the graph's order.
	Tasks []string
	// Ready says that it can begin: nothing of it was executed, and all before it are done.
	Ready bool
	// Holds are the nodes before it that are not done. It is empty for a node that has begun.
	Holds []Hold
}

// Hold is a node that another one waits for.
type Hold struct {
	// Node is its place in the plan.
	Node int
	// State and Detail are its own. One that is done holds only while its rollback is asked for, or
	// was not completed.
	State  workflow.State
	Detail workflow.Detail
	// Final says that waiting does not help: it has failed or was rolled back, or cannot begin itself.
	Final bool
}

// Progress says where a workflow is in its plan. Nothing of it is stored: it follows from the graph of
// what is recorded (ATD, "Node States").
type Progress struct {
	// Nodes are those of the plan.
	Nodes []Status
	// Others are the ids of the tasks that are no node of the plan.
	Others []string
}

// Progress derives the states of all nodes from the workflow's graph. which finds the place of the
// node that a task is, or a checkpoint that stands for one; ok is false for none.
func (d *Descriptor) Progress(g *workflow.Graph, which func(n *workflow.Node) (place int, ok bool)) *Progress {
	p := &Progress{Nodes: make([]Status, len(d.Nodes))}
	for i := range p.Nodes {
		p.Nodes[i].State = workflow.Pending
	}
	for _, t := range g.Tasks() {
		n := g.At(t)
		place, ok := which(n)
		if !ok {
			p.Others = append(p.Others, n.ID)
			continue
		}
		s := &p.Nodes[place]
		if len(s.Tasks) == 0 || weight(n.State, n.Detail) > weight(s.State, s.Detail) {
			s.State, s.Detail = n.State, n.Detail
		}
		s.Tasks = append(s.Tasks, n.ID)
	}
	lost := make([]bool, len(d.Nodes))
	for _, i := range d.order {
		s := &p.Nodes[i]
		if s.begun() {
			continue
		}
		s.Holds = d.holds(i, p.Nodes, lost)
		s.Ready = len(s.Holds) == 0
		lost[i] = slices.ContainsFunc(s.Holds, func(h Hold) bool { return h.Final })
	}
	return p
}

// holds finds what node i waits for. lost are the nodes that can never begin.
func (d *Descriptor) holds(i int, all []Status, lost []bool) []Hold {
	var holds []Hold
	for _, j := range d.Nodes[i].Before {
		s := &all[j]
		if s.State == workflow.Done && s.Detail == "" {
			continue
		}
		final := lost[j] || s.State == workflow.RolledBack ||
			s.State == workflow.Failed && s.Detail != workflow.DetailInDoubt && s.Detail != workflow.DetailReleased
		holds = append(holds, Hold{Node: j, State: s.State, Detail: s.Detail, Final: final})
	}
	return holds
}

// begun reports whether something of the node was executed, or may have been.
func (s *Status) begun() bool {
	return s.State != workflow.Pending && !(s.State == workflow.Failed && s.Detail == workflow.DetailReleased)
}

// weight orders the states of several calls of a node: the heaviest is the node's.
func weight(s workflow.State, d workflow.Detail) int {
	switch {
	case s == workflow.Escalated:
		return 8
	case s == workflow.Failed && d == workflow.DetailReleased:
		return 0
	case s == workflow.Failed && d == workflow.DetailInDoubt:
		return 6
	case s == workflow.Failed:
		return 7
	case s == workflow.Running:
		return 5
	case s == workflow.Pending:
		return 4
	case s == workflow.Done && d != "":
		return 3
	case s == workflow.Done:
		return 2
	}
	return 1 // rolled back
}
