package workflow

import (
	"slices"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Live has the states of a workflow while its records come. They are those that New finds of the same
// records: only what a record can change is derived again, by New from the records of one call. Events
// about the checkpoints of agents can change anything, so from such a one on New gets them all.
//
// It is for one goroutine at a time.
type Live struct {
	records []Record
	index   map[string]int // id -> place in records
	at      []derived      // of each record
	// named are ids that records name and that had none when these came.
	named map[string]bool
	// executions are the first of the gateway's records of each execution.
	executions map[string]int
	// asked are the checkpoints that a request for a rollback is about.
	asked   map[int][]int
	changed []*Calls

	whole *Calls // all tasks, once New gets all records; else nil
	graph *Graph // see whole
}

// derived is what is known of a record.
type derived struct {
	calls    *Calls // nil for events that are part of no call
	state    State
	detail   Detail
	called   bool
	followed bool // a task that follows from it is among the near
}

// Calls are tasks whose states are derived together: those of one call, as a rule.
type Calls struct {
	// Tasks are those that count, as Graph.Tasks has them. There are none once other Calls have them.
	Tasks []Task

	records []int // whose states are derived here
	near    []int // further ones that these depend on
	changed bool
}

// Task is a task as it is now.
type Task struct {
	ID string
	// Action is the exec_act. Event is empty, except for a checkpoint that stands for a task.
	Action string
	Event  ect.Event // see Action
	// Node is the node of a plan that the task is: as its own token says, else the gateway's checkpoint.
	Node   string
	State  State
	Detail Detail
	// Called says that the gateway has recorded a call for it.
	Called bool
	// Checkpoints are the gateway's for it.
	Checkpoints []string
}

// NewLive begins a workflow.
func NewLive() *Live {
	return &Live{index: map[string]int{}, named: map[string]bool{}, executions: map[string]int{}, asked: map[int][]int{}}
}

// Len is how many records there are.
func (l *Live) Len() int { return len(l.records) }

// Add adds a record, behind those that it follows from. Of two with one id the first counts.
func (l *Live) Add(r Record) {
	if _, known := l.index[r.ID]; known {
		return
	}
	i := len(l.records)
	l.records, l.at = append(l.records, r), append(l.at, derived{})
	l.index[r.ID] = i
	if l.named[r.ID] {
		l.widen()
	}
	named := []string{r.CheckpointID}
	if r.CheckpointID == "" {
		named = nil
	}
	for _, id := range slices.Concat(r.Parents, named) {
		if _, known := l.index[id]; !known {
			l.named[id] = true
		}
	}
	parents, checkpoint := l.places(r.Parents, i), l.places(named, i)
	checkpoint = slices.DeleteFunc(checkpoint, func(c int) bool { return !l.records[c].IsCheckpoint() })
	switch {
	case l.whole != nil:
		l.change(l.whole)
	case r.Own && (r.IsCheckpoint() || r.settlement()):
		l.call(i, parents)
	case r.IsTask():
		l.at[i].calls = &Calls{records: []int{i}}
		l.change(l.at[i].calls)
		l.follows(i, parents)
	case r.IsCheckpoint():
		if r.Node != "" || r.Escalated {
			l.widen() // it stands for a node as long as nothing else does, or says something of its tasks
		}
	case r.Stranger:
	case r.Event == ect.EventError:
		if !r.Own || !r.Attempt {
			l.concerns(i, append(l.culprits(i, parents), checkpoint...))
		}
	case r.Event == ect.EventRollbackRequest, r.Event == ect.EventRollbackStart, r.Event == ect.EventRollbackComplete, r.Event == ect.EventCompensate:
		l.concerns(i, l.undone(i, parents, checkpoint))
	}
}

// places are those of the records with these ids, each once and without record i.
func (l *Live) places(ids []string, i int) []int {
	places := make([]int, 0, len(ids))
	for _, id := range ids {
		if p, known := l.index[id]; known && p != i && !slices.Contains(places, p) {
			places = append(places, p)
		}
	}
	return places
}

func (l *Live) change(c *Calls) {
	if !c.changed {
		c.changed = true
		l.changed = append(l.changed, c)
	}
}

// call adds the gateway's checkpoint or settlement to what it is about: the tasks that it announces, the
// checkpoint that it settles, and the earlier attempts of its execution.
func (l *Live) call(i int, parents []int) {
	r := &l.records[i]
	c := &Calls{records: []int{i}}
	l.at[i].calls = c
	l.change(c)
	tasks := func(of []int) {
		for _, p := range of {
			if t := &l.records[p]; t.IsTask() && !t.settlement() {
				c = l.merge(c, l.at[p].calls)
			}
		}
	}
	tasks(parents)
	for _, p := range parents {
		switch parent := &l.records[p]; {
		case !parent.IsCheckpoint():
		case !parent.Own:
			c.near = append(c.near, p)
			tasks(l.places(parent.Parents, p))
		case r.settlement() && (r.Execution == parent.Execution || r.Execution == "" || parent.Execution == ""):
			c = l.merge(c, l.at[p].calls)
		}
	}
	if r.Execution == "" {
		return
	}
	if first, known := l.executions[r.Execution]; known {
		l.merge(c, l.at[first].calls)
		return
	}
	l.executions[r.Execution] = i
}

func (l *Live) merge(a, b *Calls) *Calls {
	if a == b {
		return a
	}
	if len(a.records) < len(b.records) {
		a, b = b, a
	}
	for _, i := range b.records {
		l.at[i].calls = a
	}
	a.records, a.near = append(a.records, b.records...), append(a.near, b.near...)
	b.records, b.near = nil, nil
	l.change(a)
	l.change(b)
	return a
}

// follows notes a task that follows from others, also through an agent's checkpoint: they are done then,
// unless a call of theirs says otherwise.
func (l *Live) follows(i int, parents []int) {
	for _, p := range parents {
		switch {
		case l.records[p].IsTask():
			l.followed(p, i)
		case l.records[p].IsCheckpoint() && !l.records[p].Own:
			for _, t := range l.places(l.records[p].Parents, p) {
				if t != i && l.records[t].IsTask() {
					l.followed(t, p, i)
				}
			}
		}
	}
}

// followed notes the records by which task t is done. One such task is enough.
func (l *Live) followed(t int, by ...int) {
	if l.at[t].followed {
		return
	}
	l.at[t].followed = true
	c := l.at[t].calls
	c.near = append(c.near, by...)
	l.change(c)
}

// culprits are the parents of error i that it may be about. The gateway's is about its settlement.
func (l *Live) culprits(i int, parents []int) []int {
	if !l.records[i].Own {
		return parents
	}
	settled := slices.DeleteFunc(slices.Clone(parents), func(p int) bool { return !l.records[p].settlement() })
	if len(settled) == 0 {
		return parents
	}
	return settled
}

// undone are the checkpoints that an event of a rollback is about.
func (l *Live) undone(i int, parents, checkpoint []int) []int {
	r := &l.records[i]
	about := checkpoint
	if len(about) == 0 && r.Event == ect.EventRollbackRequest {
		about = slices.DeleteFunc(slices.Clone(parents), func(p int) bool { return !l.records[p].IsCheckpoint() })
	}
	if r.Event == ect.EventRollbackRequest || r.Event == ect.EventRollbackStart {
		l.asked[i] = about
		return about
	}
	if len(about) == 0 && r.CheckpointID == "" && r.Event == ect.EventRollbackComplete {
		for _, p := range parents {
			about = append(about, l.asked[p]...)
		}
	}
	return about
}

// concerns notes event i with what it is about.
func (l *Live) concerns(i int, about []int) {
	for n, p := range about {
		c := l.at[p].calls
		switch r := &l.records[p]; {
		case r.IsCheckpoint() && !r.Own:
			l.widen()
			return
		case c == nil || slices.Contains(about[:n], p):
		case l.records[i].Own && l.records[about[0]].settlement() && l.at[about[0]].calls != c:
			l.widen() // whom the gateway's error blames depends on all of them
			return
		case len(c.near) == 0 || c.near[len(c.near)-1] != i:
			c.near = append(c.near, i)
			l.change(c)
		}
	}
}

// widen has New get all records from now on.
func (l *Live) widen() {
	if l.whole != nil {
		return
	}
	for i := range l.at {
		if c := l.at[i].calls; c != nil {
			c.records, c.near = nil, nil
			l.change(c)
		}
	}
	l.whole = &Calls{}
	l.change(l.whole)
}

// Changes derives what has changed since the last call, and returns it.
func (l *Live) Changes() []*Calls {
	all := l.changed
	l.changed = nil
	for _, c := range all {
		c.changed = false
		switch {
		case c == l.whole:
			l.graph = New(l.records)
			c.Tasks = l.graph.live(func(string) bool { return true })
		case len(c.records) == 0:
			c.Tasks = nil
		default:
			l.derive(c)
		}
	}
	return all
}

// All are the calls of all tasks.
func (l *Live) All() []*Calls {
	if l.whole != nil {
		return []*Calls{l.whole}
	}
	var all []*Calls
	seen := map[*Calls]bool{nil: true}
	for i := range l.at {
		if c := l.at[i].calls; !seen[c] {
			seen[c] = true
			all = append(all, c)
		}
	}
	return all
}

func (l *Live) derive(c *Calls) {
	places := slices.Concat(c.records, c.near)
	slices.Sort(places)
	places = slices.Compact(places)
	records := make([]Record, len(places))
	for k, i := range places {
		records[k] = l.records[i]
	}
	g := New(records)
	c.Tasks = g.live(func(id string) bool { return l.at[l.index[id]].calls == c })
	for _, i := range c.records {
		n := &g.nodes[g.index[l.records[i].ID]]
		l.at[i].state, l.at[i].detail, l.at[i].called = n.State, n.Detail, n.Called
	}
}

// live are the tasks with these ids.
func (g *Graph) live(has func(id string) bool) []Task {
	var all []Task
	at := map[int]int{}
	for _, i := range g.Tasks() {
		if n := &g.nodes[i]; has(n.ID) {
			at[i] = len(all)
			all = append(all, Task{ID: n.ID, Action: n.Action, Event: n.Event, Node: n.Node, State: n.State, Detail: n.Detail, Called: n.Called})
		}
	}
	for i := range g.nodes {
		n := &g.nodes[i]
		if !n.IsCheckpoint() || !n.Own {
			continue
		}
		for _, t := range slices.Concat([]int{i}, g.guards[i], g.executions[n.Execution]) {
			k, counts := at[t]
			if !counts || slices.Contains(all[k].Checkpoints, n.ID) {
				continue
			}
			if all[k].Checkpoints = append(all[k].Checkpoints, n.ID); all[k].Node == "" {
				all[k].Node = n.Node
			}
		}
	}
	return all
}

// Holding are the tasks that a token waits for which names these ids as its parents (ATD, "Topological
// Order"). A checkpoint or an error counts by what it is about. What is no call of the gateway's holds
// only where it has failed or was undone: otherwise the token that follows from it says that it is done.
// Changes must have been called since the last Add.
func (l *Live) Holding(ids []string) []Task {
	var all []Task
	seen := map[int]bool{}
	for todo := l.places(ids, -1); len(todo) > 0; todo = todo[1:] {
		i := todo[0]
		if seen[i] {
			continue
		}
		seen[i] = true
		r := &l.records[i]
		switch {
		case r.IsTask(), r.IsCheckpoint() && r.Own:
			d := l.at[i]
			if l.whole != nil {
				n := &l.graph.nodes[l.graph.index[r.ID]]
				d.state, d.detail, d.called = n.State, n.Detail, n.Called
			}
			t := Task{ID: r.ID, Action: r.Action, Event: r.Event, Node: r.Node, State: d.state, Detail: d.detail, Called: d.called}
			waits := t.State != Done || t.Detail != ""
			if t.State == Running || t.State == Pending {
				waits = t.Called
			}
			if waits {
				all = append(all, t)
			}
		case r.IsCheckpoint():
			todo = append(todo, l.places(r.Parents, i)...)
		case r.Event == ect.EventError:
			todo = append(todo, l.culprits(i, l.places(r.Parents, i))...)
		}
	}
	return all
}

// Final is Final of the task's state.
func (t *Task) Final() bool { return Final(t.State, t.Detail) }

// Final reports whether waiting for what has this state is in vain: it has failed or was undone. A doubt can
// still be settled, what was not executed be made again, and people decide what was escalated.
func Final(s State, d Detail) bool {
	return s == RolledBack || s == Failed && d != DetailInDoubt && d != DetailReleased
}
