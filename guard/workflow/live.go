package workflow

import (
	"cmp"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Live has the states of a workflow while its records come. They are those that New finds of the same
// records: only what a record can change is derived again, by New from the records of one call. Events
// about the checkpoints of agents can change anything, so from such a one on New gets them all.
//
// It is for one goroutine at a time.
type Live struct {
	// Links have what is linked, for reading only.
	Links *Links

	records []*Record
	at      []derived // of each record
	// places are what is at each place of Links.
	places []livePlace
	names  []int // room for those that a record names
	// executions are the first of the gateway's records of each execution.
	executions map[string]int
	// asked are the checkpoints that a request for a rollback is about.
	asked   map[int][]int
	changed []*Calls
	room    []*Calls // for the next of them
	// plain are the states of calls of which nothing but tokens, checkpoints and outcomes is recorded, by what they
	// depend on: most calls have one of a few.
	plain map[shape]*plainStates

	whole *Calls // all tasks, once New gets all records; else nil
	graph *Graph // see whole
}

// livePlace is what is known of an id.
type livePlace struct {
	record int  // its record's place, plus one; 0 without
	named  bool // a record names it that came before
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

	records []int  // whose states are derived here
	few     [3]int // room for as many as most have
	near    []int  // further ones that these depend on
	changed bool
}

// Changed reports whether Changes will return them.
func (c *Calls) Changed() bool { return c.changed }

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
	return &Live{
		Links: NewLinks(), executions: map[string]int{}, asked: map[int][]int{}, plain: map[shape]*plainStates{},
	}
}

// Len is how many records there are.
func (l *Live) Len() int { return len(l.records) }

// Add adds a record, behind those that it follows from, and keeps it: it must not change any more. Of two with one id
// the first counts; first is whether this is it. place is its place in Links, and parents are those that link it, until
// the next Add.
func (l *Live) Add(r *Record) (place int, parents []int, first bool) {
	place = l.place(r.ID)
	if l.places[place].record > 0 {
		return place, nil, false
	}
	i := len(l.records)
	l.records, l.at = append(l.records, r), append(l.at, derived{})
	l.places[place].record = i + 1
	if l.places[place].named {
		l.widen()
	}
	l.names = l.names[:0]
	for _, id := range r.Parents {
		l.names = append(l.names, l.place(id))
	}
	if !r.Own || r.Event != ect.EventCascadeDetected { // the failures in that need not be of one part
		parents = l.names
		l.Links.link(place, parents, r.Report)
		if r.Own && r.Event == ect.EventError {
			l.Links.Lead(r.ID, r.UpstreamErrors)
		}
	}
	l.add(i)
	return place, parents, true
}

// place is the place of an id in Links, from now on.
func (l *Live) place(id string) int {
	place := l.Links.place(id)
	for len(l.places) <= place {
		l.places = append(l.places, livePlace{})
	}
	return place
}

// add adds record i to what it changes. names has the places of its parents.
func (l *Live) add(i int) {
	r, named := l.records[i], l.names
	if r.CheckpointID != "" {
		named = append(named, l.place(r.CheckpointID))
	}
	var room [8]int
	parents := room[:0]
	var checkpoint []int
	for n, place := range named {
		p := l.places[place].record - 1
		switch {
		case p < 0:
			l.places[place].named = true
		case p == i:
		case n == len(r.Parents):
			if l.records[p].IsCheckpoint() {
				checkpoint = []int{p}
			}
		case !slices.Contains(parents, p):
			parents = append(parents, p)
		}
	}
	switch {
	case l.whole != nil:
		l.change(l.whole)
	case r.Own && (r.IsCheckpoint() || r.settlement()):
		l.call(i, parents)
	case r.IsTask():
		c := l.newCalls()
		c.records = append(c.records, i)
		l.at[i].calls = c
		l.change(c)
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

// record is the place of the record with an id among the records; -1 without.
func (l *Live) record(id string) int {
	place, known := l.Links.Place(id)
	if !known || place >= len(l.places) {
		return -1
	}
	return l.places[place].record - 1
}

// find finds the records with these ids, each once and without record i.
func (l *Live) find(ids []string, i int) (found []int) {
	for _, id := range ids {
		if p := l.record(id); p >= 0 && p != i && !slices.Contains(found, p) {
			found = append(found, p)
		}
	}
	return found
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
	r := l.records[i]
	var c *Calls
	tasks := func(of []int) {
		for _, p := range of {
			if t := l.records[p]; t.IsTask() && !t.settlement() {
				c = l.merge(c, l.at[p].calls)
			}
		}
	}
	tasks(parents)
	var near []int
	joined := false
	for _, p := range parents {
		switch parent := l.records[p]; {
		case !parent.IsCheckpoint():
		case !parent.Own:
			near = append(near, p)
			tasks(l.find(parent.Parents, p))
		case r.settlement() && (r.Execution == parent.Execution || r.Execution == "" || parent.Execution == ""):
			c = l.merge(c, l.at[p].calls)
			joined = joined || r.Execution == parent.Execution
		}
	}
	if r.Execution != "" && !joined { // else its checkpoint has joined those of its execution
		if first, known := l.executions[r.Execution]; known {
			c = l.merge(c, l.at[first].calls)
		} else {
			l.executions[r.Execution] = i
		}
	}
	if c == nil {
		c = l.newCalls()
	}
	c.records, c.near = append(c.records, i), append(c.near, near...)
	l.at[i].calls = c
	l.change(c)
}

func (l *Live) newCalls() *Calls {
	c := &Calls{}
	c.records = c.few[:0]
	return c
}

// merge merges b into a, or a into b; a may be nil.
func (l *Live) merge(a, b *Calls) *Calls {
	if a == nil || a == b {
		return b
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
			for _, t := range l.find(l.records[p].Parents, p) {
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
	r := l.records[i]
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
		switch r := l.records[p]; {
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

// At are the calls that the record at a place of Links is among, and the record; nil where there is none, and no calls
// for what is part of none.
func (l *Live) At(place int) (*Calls, *Record) {
	if place >= len(l.places) || l.places[place].record == 0 {
		return nil, nil
	}
	i := l.places[place].record - 1
	if l.whole != nil {
		return l.whole, l.records[i]
	}
	return l.at[i].calls, l.records[i]
}

// Changes derives what has changed since the last call, and returns it. The list is good until the next Add.
func (l *Live) Changes() []*Calls {
	all := l.changed
	l.changed, l.room = l.room[:0], all
	for _, c := range all {
		c.changed = false
		switch {
		case c == l.whole:
			l.graph = withStates(l.nodes(from(0, len(l.records))))
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
	var room [maxPlain]int
	places := append(append(room[:0], c.records...), c.near...)
	slices.Sort(places)
	places = slices.Compact(places)
	key, plain := l.shapeOf(c, places)
	if plain {
		if known := l.plain[key]; known != nil {
			l.apply(c, places, known)
			return
		}
	}
	g := withStates(l.nodes(places))
	c.Tasks = g.live(func(id string) bool { return l.at[l.record(id)].calls == c })
	for _, i := range c.records {
		n := &g.nodes[g.index[l.records[i].ID]]
		l.at[i].state, l.at[i].detail, l.at[i].called = n.State, n.Detail, n.Called
	}
	if plain && len(l.plain) < maxShapes {
		l.plain[key] = l.statesOf(c, places)
	}
}

// nodes are the records at these places.
func (l *Live) nodes(places []int) []Node {
	nodes := make([]Node, len(places))
	for k, i := range places {
		nodes[k].Record = *l.records[i]
	}
	return nodes
}

const (
	// maxPlain is how many records a call has at most whose states are remembered.
	maxPlain = 6
	// maxShapes is how many such states are remembered.
	maxShapes = 256
)

// shape is all that the states of plain records depend on, in the order of recording: of each what it is, whose states
// are derived here, its outcome, the first with the same execution, and the parents among them.
type shape [maxPlain]uint16

// plainStates are the states of records of a shape, and their tasks, by their places among them.
type plainStates struct {
	at    [maxPlain]derived // without calls
	tasks []plainTask
}

type plainTask struct {
	at          int
	checkpoints []int
}

// shapeOf is the shape of the records at these places. It is not plain where there are too many, or others than tokens
// of tasks and the gateway's checkpoints and outcomes: what errors and rollbacks do depends on more.
func (l *Live) shapeOf(c *Calls, places []int) (key shape, plain bool) {
	if len(places) > maxPlain {
		return key, false
	}
	for k, i := range places {
		r, s := l.records[i], uint16(0)
		switch {
		case r.Escalated:
			return key, false
		case r.IsCheckpoint() && r.Own:
			s = 1
		case r.settlement():
			outcome := slices.Index(outcomes, r.Outcome)
			if outcome < 0 {
				return key, false
			}
			s = 2 | uint16(outcome)<<2
		case r.IsTask():
			s = 3
		default:
			return key, false
		}
		if l.at[i].calls == c {
			s |= 1 << 4
		}
		if r.Execution != "" {
			first := slices.IndexFunc(places, func(p int) bool { return l.records[p].Execution == r.Execution })
			s |= uint16(first+1) << 5
		}
		for p, place := range places {
			if slices.Contains(r.Parents, l.records[place].ID) {
				s |= 1 << (8 + p)
			}
		}
		key[k] = s
	}
	return key, true
}

var outcomes = []Outcome{Completed, InDoubt, Released}

// statesOf are the states that were derived of the records at these places.
func (l *Live) statesOf(c *Calls, places []int) *plainStates {
	s := &plainStates{}
	place := func(id string) int { return slices.Index(places, l.record(id)) }
	for k, i := range places {
		if l.at[i].calls == c {
			s.at[k] = l.at[i]
		}
	}
	for i := range c.Tasks {
		t := plainTask{at: place(c.Tasks[i].ID)}
		for _, id := range c.Tasks[i].Checkpoints {
			t.checkpoints = append(t.checkpoints, place(id))
		}
		s.tasks = append(s.tasks, t)
	}
	return s
}

// apply gives records at these places the states of their shape.
func (l *Live) apply(c *Calls, places []int, s *plainStates) {
	for k, i := range places {
		if d := &l.at[i]; d.calls == c {
			d.state, d.detail, d.called = s.at[k].state, s.at[k].detail, s.at[k].called
		}
	}
	c.Tasks = make([]Task, len(s.tasks))
	for n := range s.tasks {
		of := &s.tasks[n]
		r, d := l.records[places[of.at]], &s.at[of.at]
		t := &c.Tasks[n]
		*t = Task{ID: r.ID, Action: r.Action, Event: r.Event, Node: r.Node, State: d.state, Detail: d.detail, Called: d.called}
		if len(of.checkpoints) > 0 {
			t.Checkpoints = make([]string, len(of.checkpoints))
		}
		for k, at := range of.checkpoints {
			checkpoint := l.records[places[at]]
			t.Checkpoints[k], t.Node = checkpoint.ID, cmp.Or(t.Node, checkpoint.Node)
		}
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
	for todo := l.find(ids, -1); len(todo) > 0; todo = todo[1:] {
		i := todo[0]
		if seen[i] {
			continue
		}
		seen[i] = true
		r := l.records[i]
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
			todo = append(todo, l.find(r.Parents, i)...)
		case r.Event == ect.EventError:
			todo = append(todo, l.culprits(i, l.find(r.Parents, i))...)
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

// Links have for each id of a workflow those linked to it, in both directions. A report is linked to its
// followers only, so that it does not connect separate parts of a workflow. Each id has a place, from 0 on.
type Links struct {
	places map[string]int
	ids    []string // by place
	to     [][]int  // by place
}

// NewLinks begins without any.
func NewLinks() *Links { return &Links{places: map[string]int{}} }

// ID is the id at a place.
func (l *Links) ID(place int) string { return l.ids[place] }

// To are the places that one is linked to, for reading only.
func (l *Links) To(place int) []int { return l.to[place] }

// Place finds the place of an id that is recorded, or named by a record.
func (l *Links) Place(id string) (place int, known bool) {
	place, known = l.places[id]
	return place, known
}

func (l *Links) place(id string) int {
	place, known := l.places[id]
	if !known {
		place = len(l.ids)
		l.places[id] = place
		l.ids, l.to = append(l.ids, id), append(l.to, nil)
	}
	return place
}

// Add links an id with its parents. report says that it is an agent's report.
func (l *Links) Add(id string, parents []string, report bool) {
	places := make([]int, len(parents))
	for n, parent := range parents {
		places[n] = l.place(parent)
	}
	l.link(l.place(id), places, report)
}

func (l *Links) link(place int, parents []int, report bool) {
	for _, p := range parents {
		l.to[p] = append(l.to[p], place)
		if !report {
			l.to[place] = append(l.to[place], p)
		}
	}
}

// Lead links an id with others, which are not linked with it: who takes part in a call got the errors with its answer
// that led to the gateway's own.
func (l *Links) Lead(id string, others []string) {
	for _, other := range others {
		from, to := l.place(id), l.place(other)
		l.to[from] = append(l.to[from], to)
	}
}

// Places are a set of places of Links.
type Places []uint64

// Has reports whether a place is among them.
func (s Places) Has(place int) bool {
	return place>>6 < len(s) && s[place>>6]>>(place&63)&1 != 0
}

// Add adds a place, and reports whether it was not among them.
func (s *Places) Add(place int) bool {
	if s.Has(place) {
		return false
	}
	if more := place>>6 + 1 - len(*s); more > 0 {
		*s = append(*s, make([]uint64, more)...)
	}
	(*s)[place>>6] |= 1 << (place & 63)
	return true
}

// Reach adds the places that can be reached from some to met, and returns those that it has added. From what is in met
// nothing is looked for again.
func (l *Links) Reach(met *Places, from ...int) (added []int) {
	for _, place := range from {
		if met.Add(place) {
			added = append(added, place)
		}
	}
	for n := 0; n < len(added); n++ {
		for _, place := range l.to[added[n]] {
			if met.Add(place) {
				added = append(added, place)
			}
		}
	}
	return added
}
