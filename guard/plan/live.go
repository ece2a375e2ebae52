package plan

import (
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Live is where a workflow is in its plan while its records come: what Progress finds of the same
// records, kept up to date. Nothing of it is stored. It is for one goroutine at a time.
type Live struct {
	states *workflow.Live
	plan   *Descriptor // that Follow has set; nil before
	nodes  []liveNode
	// of are the nodes of the tasks that have one.
	of map[*workflow.Calls][]int
	// lost are the nodes that can never begin; nil where that is not known.
	lost []bool
}

type liveNode struct {
	tasks []liveTask
	// state is that of the tasks together.
	state  workflow.State
	detail workflow.Detail
	waits  int // how many nodes directly before it hold it
}

type liveTask struct {
	workflow.Task
	calls *workflow.Calls
}

// NewLive begins a workflow.
func NewLive() *Live { return &Live{states: workflow.NewLive()} }

// Len is how much memory it takes, as the number of records that take as much: of the nodes of its plan 16
// take about as much as one.
func (l *Live) Len() int { return l.states.Len() + len(l.nodes)/16 }

// Add adds records, behind those that they follow from. Of two with one id the first counts.
func (l *Live) Add(records ...workflow.Record) {
	for i := range records {
		l.states.Add(records[i])
	}
	if changed := l.states.Changes(); l.plan != nil {
		l.update(changed)
	}
}

// Follow sets the plan that the questions are about. It costs nothing where it is the same as before.
func (l *Live) Follow(d *Descriptor) {
	if l.plan == d || l.plan != nil && l.plan.Version() == d.Version() {
		return
	}
	l.plan, l.lost = d, nil
	l.nodes, l.of = make([]liveNode, len(d.Nodes)), make(map[*workflow.Calls][]int)
	for i := range l.nodes {
		l.nodes[i].state, l.nodes[i].waits = workflow.Pending, len(d.Nodes[i].Before)
	}
	l.update(l.states.All())
}

// update takes the tasks of the nodes that have changed.
func (l *Live) update(changed []*workflow.Calls) {
	d, touched := l.plan, map[int]bool{}
	for _, c := range changed {
		for _, i := range l.of[c] {
			touched[i] = true
			l.nodes[i].tasks = slices.DeleteFunc(l.nodes[i].tasks, func(t liveTask) bool { return t.calls == c })
		}
		delete(l.of, c)
		for _, t := range c.Tasks {
			i, ok := d.place(t.Node, t.Action, t.Event == "")
			if !ok {
				continue
			}
			touched[i] = true
			l.nodes[i].tasks = append(l.nodes[i].tasks, liveTask{t, c})
			if !slices.Contains(l.of[c], i) {
				l.of[c] = append(l.of[c], i)
			}
		}
	}
	for i := range touched {
		l.refresh(i)
	}
}

// refresh finds the state of a node, and whether it still holds what comes after it.
func (l *Live) refresh(i int) {
	n := &l.nodes[i]
	held := holds(n.state, n.detail)
	state, detail := n.together(nil)
	if state == n.state && detail == n.detail {
		return
	}
	n.state, n.detail, l.lost = state, detail, nil
	more := 0
	switch now := holds(state, detail); {
	case held && !now:
		more = -1
	case now && !held:
		more = 1
	default:
		return
	}
	for _, j := range l.plan.Nodes[i].After {
		l.nodes[j].waits += more
	}
}

// together is the state of all tasks of a node. Tasks that are no calls count as done where done says so.
func (n *liveNode) together(done func(id string) bool) (state workflow.State, detail workflow.Detail) {
	state = workflow.Pending
	for i := range n.tasks {
		t := &n.tasks[i]
		s, d := t.State, t.Detail
		if done != nil && s == workflow.Running && !t.Called && done(t.ID) {
			s = workflow.Done
		}
		if i == 0 || weight(s, d) > weight(state, detail) {
			state, detail = s, d
		}
	}
	return state, detail
}

// Holds are the nodes that keep a node of the plan from beginning: a call of it has to wait for them, or not to begin
// at all where one of them is final. follows reports whether the call's tokens name an id as a parent,
// which says of a task that is no call of the gateway's that it is done (ATD, "Node States").
func (l *Live) Holds(node string, follows func(id string) bool) []Hold {
	i := l.plan.index[node] // plans of one version may have it in other places
	if l.nodes[i].waits == 0 {
		return nil
	}
	var all []Hold
	for _, j := range l.plan.Nodes[i].Before {
		n := &l.nodes[j]
		if !holds(n.state, n.detail) {
			continue
		}
		if n.state == workflow.Running && !holds(n.together(follows)) {
			continue
		}
		if l.lost == nil {
			l.lose()
		}
		all = append(all, Hold{
			Node: l.plan.Nodes[j].ID, State: n.state, Detail: n.detail, Final: l.lost[j] || workflow.Final(n.state, n.detail),
		})
	}
	return all
}

// lose finds the nodes that can never begin.
func (l *Live) lose() {
	l.lost = make([]bool, len(l.nodes))
	for _, i := range l.plan.order {
		if n := &l.nodes[i]; begun(n.state, n.detail) {
			continue
		}
		l.lost[i] = slices.ContainsFunc(l.plan.Nodes[i].Before, func(j int) bool {
			return l.lost[j] || workflow.Final(l.nodes[j].state, l.nodes[j].detail)
		})
	}
}

// Before are the ids of the calls of all nodes directly before a node, and of their checkpoints.
func (l *Live) Before(node string) []string {
	var ids []string
	for _, j := range l.plan.Nodes[l.plan.index[node]].Before {
		for _, t := range l.nodes[j].tasks {
			ids = append(append(ids, t.ID), t.Checkpoints...)
		}
	}
	return ids
}

// Holding are the tasks that a token waits for which names these ids as its parents. See
// workflow.Live.Holding.
func (l *Live) Holding(parents []string) []workflow.Task { return l.states.Holding(parents) }
