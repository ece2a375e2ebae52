package plan

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// The errors of Which.
var (
	errUnknownNode   = errors.New("plan: no node is called like this")
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
	case named != "" || same.n == 0:
		return 0, errUnknownNode
	case same.n > 1:
		return 0, ErrAmbiguousNode
	}
	return same.first, nil
}

// place finds the node of a recorded task. A checkpoint that stands for a call without a token is no node
// unless it names one: its own action says nothing of the call.
func (d *Descriptor) place(named, action string, task bool) (place int, ok bool) {
	place, err := d.Which(named, action)
	return place, err == nil && (named != "" || task)
}

// Progress says where a workflow is in its plan, as documents show it. Nothing of it is stored: it
// follows from the graph of what is recorded (ATD, "Node States").
type Progress struct {
	PlanID  string `json:"wf_id"`
	Version string `json:"version"`
	// Truncated says that not all of the workflow was read: status and states are left out, since the rest
	// could change every one (P6).
	Truncated bool `json:"truncated,omitempty"`
	// Status is running, or how the workflow has ended: all leaves are done, or nothing can go on.
	Status workflow.Status `json:"status,omitempty"`
	// Abandoned is how it has ended if nothing more comes, whatever the plan says; running while something is
	// open.
	Abandoned workflow.Status `json:"-"`
	// Nodes are those of the plan, in its order.
	Nodes []Status `json:"nodes"`
	// Others are the ids of the tasks that are no node of the plan.
	Others []string `json:"others"`
}

// Status is how far a node has come.
type Status struct {
	ID    string `json:"id"`
	Label string `json:"label,omitempty"`
	Level int    `json:"level"`
	// After are the ids of the nodes that come directly before it.
	After []string `json:"after"`
	// Reversible, HITLRequired, Hints, CircuitThreshold and CircuitWindowS are what the plan says of it.
	Reversible       *bool   `json:"reversible,omitempty"`
	HITLRequired     bool    `json:"hitl_required,omitempty"`         // see Reversible
	Hints            *Hints  `json:"resource_hints,omitempty"`        // see Reversible
	CircuitThreshold float64 `json:"atd.circuit_threshold,omitempty"` // see Reversible
	CircuitWindowS   float64 `json:"atd.circuit_window_s,omitempty"`  // see Reversible
	// State is pending without a call, else that of its calls together: an earlier call that was rolled
	// back, or not executed, does not count beside another; of the others the worst counts. So a call
	// in doubt is not done, whatever else succeeded (P6).
	State workflow.State `json:"state,omitempty"`
	// Detail refines State, as it does for a call.
	Detail workflow.Detail `json:"detail,omitempty"`
	// Tasks are the ids of its calls, in the graph's order.
	Tasks []string `json:"tasks"`
	// Begun is when the first of them began, and Ended when the last one ended; neither is there while it is
	// not known.
	Begun time.Time `json:"begun,omitzero"`
	Ended time.Time `json:"ended,omitzero"` // see Begun
	// Ready says that it can begin: nothing of it was executed, and all before it are done.
	Ready bool `json:"ready"`
	// Holds are the nodes before it that are not done. It is empty for a node that has begun.
	Holds []Hold `json:"holds"`
}

// Hold is a node that another one waits for.
type Hold struct {
	Node string `json:"node"` // its id
	// State and Detail are its own. One that is done holds only while its rollback is asked for, or
	// was not completed.
	State  workflow.State  `json:"state"`
	Detail workflow.Detail `json:"detail,omitempty"`
	// Final says that waiting does not help: it has failed or was rolled back, or cannot begin itself.
	Final bool `json:"final"`
}

// Outline is the plan as progress shows it of a workflow that was not read whole: without any states.
func (d *Descriptor) Outline() *Progress {
	p := &Progress{PlanID: d.WorkflowID, Version: d.Version(), Truncated: true, Nodes: make([]Status, len(d.Nodes)), Others: []string{}}
	for i := range p.Nodes {
		n := &d.Nodes[i]
		s := Status{
			ID: n.ID, Label: n.Label, Level: n.Level, After: []string{}, Tasks: []string{}, Holds: []Hold{},
			Reversible: n.Reversible, HITLRequired: n.HITLRequired, CircuitThreshold: n.CircuitThreshold, CircuitWindowS: n.CircuitWindowS,
		}
		if n.Hints != (Hints{}) {
			s.Hints = &n.Hints
		}
		for _, j := range n.Before {
			s.After = append(s.After, d.Nodes[j].ID)
		}
		p.Nodes[i] = s
	}
	return p
}

// Progress derives the states of all nodes from the workflow's graph. The node of a task is the one that its own token
// names, or else the gateway's checkpoint for it.
func (d *Descriptor) Progress(g *workflow.Graph) *Progress {
	p := d.Outline()
	p.Truncated = false
	for i := range p.Nodes {
		p.Nodes[i].State = workflow.Pending
	}
	guarded := make(map[string]string) // by task
	for _, n := range g.Nodes() {
		if !n.Own || len(n.Guards) == 0 {
			continue
		}
		for _, task := range n.Guards {
			guarded[task] = cmp.Or(n.Node, guarded[task])
		}
	}
	var ending workflow.Ending
	times := g.Times()
	for _, t := range g.Tasks() {
		n := g.At(t)
		place, ok := d.place(cmp.Or(n.Node, guarded[n.ID]), n.Action, n.IsTask())
		if !ok {
			p.Others = append(p.Others, n.ID)
			ending.Add(n.State, n.Detail)
			continue
		}
		s := &p.Nodes[place]
		if len(s.Tasks) == 0 || weight(n.State, n.Detail) > weight(s.State, s.Detail) {
			s.State, s.Detail = n.State, n.Detail
		}
		s.Tasks = append(s.Tasks, n.ID)
		at := times[t]
		if s.Begun.IsZero() || at.Begun.Before(s.Begun) {
			s.Begun = at.Begun
		}
		if len(s.Tasks) == 1 || at.Ended.IsZero() || !s.Ended.IsZero() && at.Ended.After(s.Ended) {
			s.Ended = at.Ended
		}
		ending.Await(n.State, n.Detail)
	}
	lost, stuck := make([]bool, len(d.Nodes)), make([]bool, len(d.Nodes))
	for _, i := range d.order {
		s := &p.Nodes[i]
		if s.State == workflow.Running {
			s.Ended = time.Time{}
		}
		if begun(s.State, s.Detail) {
			continue
		}
		for _, j := range d.Nodes[i].Before {
			if b := &p.Nodes[j]; holds(b.State, b.Detail) {
				s.Holds = append(s.Holds, Hold{Node: b.ID, State: b.State, Detail: b.Detail, Final: lost[j] || workflow.Final(b.State, b.Detail)})
			}
		}
		s.Ready = len(s.Holds) == 0
		lost[i] = slices.ContainsFunc(s.Holds, func(h Hold) bool { return h.Final })
		stuck[i] = lost[i] || slices.ContainsFunc(d.Nodes[i].Before, func(j int) bool {
			s := &p.Nodes[j] // where it waits for people, what comes after it does too
			return stuck[j] || s.State == workflow.Escalated || s.State == workflow.Done && (s.Detail == workflow.RollbackFailed || s.Detail == workflow.CompensationRequired)
		})
	}
	over := !slices.ContainsFunc(d.order, func(i int) bool { // ATD, "Workflow Boundary ECTs": all leaves are done
		return len(d.Nodes[i].After) == 0 && (p.Nodes[i].State != workflow.Done || p.Nodes[i].Detail != "")
	})
	waits := false
	for i := range p.Nodes {
		if s := &p.Nodes[i]; begun(s.State, s.Detail) {
			ending.Add(s.State, s.Detail)
			continue
		}
		ending.Miss()
		waits = waits || !over && !stuck[i] // it may still come
	}
	p.Abandoned = ending.Status()
	if p.Status = p.Abandoned; waits {
		p.Status = workflow.StatusRunning
	}
	return p
}

// begun reports whether something of a node was executed, or may have been.
func begun(s workflow.State, d workflow.Detail) bool {
	return s != workflow.Pending && !(s == workflow.Failed && d == workflow.DetailReleased)
}

// holds reports whether what comes after a node has to wait.
func holds(s workflow.State, d workflow.Detail) bool { return s != workflow.Done || d != "" }

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
