package workflow

import (
	"slices"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Live has the states of a workflow while its records come. They are those that New finds of the same records: Add
// notes which records are derived together, and New gets these when somebody asks for one of them. What it finds is
// kept until a further record concerns it. Events about the checkpoints of agents can change anything, so from such
// a one on New gets all records.
//
// It is for one goroutine at a time.
type Live struct {
	// Links have what is linked, for reading only.
	Links *Links

	records []*Record
	at      []liveNode // of each record
	places  []livePlace
	names   []int // buffer for the places that a record names
	// executions are the first of the gateway's records of each execution.
	executions map[string]int
	// asked are the checkpoints that a request for a rollback is about.
	asked map[int][]int
	round int   // number of the last walk
	met   []int // buffer for the records that it meets
	room  Graph // of few records, for the next of its kind

	mixed bool   // New gets all records
	all   *Calls // what New has found of all records; nil before
}

// maxRoom is how many records a graph has at most whose memory is used again.
const maxRoom = 32

// livePlace is what is known of an id.
type livePlace struct {
	record int  // its record's place, plus one; 0 without
	named  bool // a record names it that came before
}

// liveNode is what is known of a record.
type liveNode struct {
	with     []int // records of the same call
	near     []int // further records that its state depends on
	followed bool  // a task that follows from it is among near
	round    int   // of the last walk that has met it

	calls  *Calls // nil before its state is derived
	state  State
	detail Detail
	called bool
}

// Calls are tasks whose states were derived together: those of one call, as a rule.
type Calls struct {
	// Tasks are those that count, as Graph.Tasks has them.
	Tasks []Task
	stale bool // a later record concerns them
}

// Task is a task as it is now.
type Task struct {
	ID string
	// Place is that of ID in Links.
	Place int
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
	return &Live{Links: NewLinks(), executions: map[string]int{}, asked: map[int][]int{}}
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
	l.records, l.at = append(l.records, r), append(l.at, liveNode{})
	l.places[place].record = i + 1
	if l.places[place].named {
		l.mix()
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

// add notes what record i changes. names has the places of its parents.
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
	case l.mixed:
		l.changed(i)
	case r.Own && (r.IsCheckpoint() || r.settlement()):
		l.call(i, parents)
	case r.IsTask():
		l.follows(i, parents)
	case r.IsCheckpoint():
		if r.Node != "" || r.Escalated {
			l.mix() // it stands for a node as long as nothing else does, or says something of its tasks
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

// changed says that the state of a record may be another one now.
func (l *Live) changed(i int) {
	c := l.at[i].calls
	if l.mixed {
		c = l.all
	}
	if c != nil {
		c.stale = true
	}
}

// join says that the states of record i and of an earlier one are derived together.
func (l *Live) join(i, earlier int) {
	if i == earlier || slices.Contains(l.at[i].with, earlier) {
		return
	}
	l.at[i].with, l.at[earlier].with = append(l.at[i].with, earlier), append(l.at[earlier].with, i)
	l.changed(earlier)
}

// depends says that the state of a record depends on further ones.
func (l *Live) depends(i int, on ...int) {
	l.at[i].near = append(l.at[i].near, on...)
	l.changed(i)
}

// call joins the gateway's checkpoint or settlement to what it is about: the tasks that it announces, the
// checkpoint that it settles, and the earlier attempts of its execution.
func (l *Live) call(i int, parents []int) {
	r := l.records[i]
	tasks := func(of []int) {
		for _, p := range of {
			if t := l.records[p]; t.IsTask() && !t.settlement() {
				l.join(i, p)
			}
		}
	}
	tasks(parents)
	for _, p := range parents {
		switch parent := l.records[p]; {
		case !parent.IsCheckpoint():
		case !parent.Own:
			l.depends(i, p)
			tasks(l.find(parent.Parents, p))
		case r.settlement() && (r.Execution == parent.Execution || r.Execution == "" || parent.Execution == ""):
			l.join(i, p)
		}
	}
	if r.Execution == "" {
		return
	}
	if first, known := l.executions[r.Execution]; known {
		l.join(i, first)
	} else {
		l.executions[r.Execution] = i
	}
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
	if !l.at[t].followed {
		l.at[t].followed = true
		l.depends(t, by...)
	}
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
		switch r := l.records[p]; {
		case r.IsCheckpoint() && !r.Own:
			l.mix()
			return
		case !r.IsTask() && !r.IsCheckpoint(), slices.Contains(about[:n], p):
		case n > 0 && l.records[i].Own && l.records[about[0]].settlement() &&
			!slices.Contains(l.at[about[0]].with, p) && !slices.Contains(l.together(about[0]), p):
			l.mix() // whom the gateway's error blames depends on all of them
			return
		default:
			l.depends(p, i)
		}
	}
}

// mix has New get all records from now on.
func (l *Live) mix() {
	if l.mixed {
		return
	}
	clear(l.at)
	l.mixed = true
}

// together are the records whose states are derived together with that of one.
func (l *Live) together(i int) []int {
	if l.mixed {
		return from(0, len(l.records))
	}
	l.round++
	l.at[i].round = l.round
	met := append(l.met[:0], i)
	for n := 0; n < len(met); n++ {
		for _, k := range l.at[met[n]].with {
			if l.at[k].round != l.round {
				l.at[k].round = l.round
				met = append(met, k)
			}
		}
	}
	return met
}

// At is the record at a place of Links; nil where there is none.
func (l *Live) At(place int) *Record {
	if place >= len(l.places) || l.places[place].record == 0 {
		return nil
	}
	return l.records[l.places[place].record-1]
}

// Calls are those that the record at a place of Links is among; nil where it is among none.
func (l *Live) Calls(place int) *Calls {
	r := l.At(place)
	if r == nil || !l.mixed && !r.IsTask() && !(r.IsCheckpoint() && r.Own) { // an agent's checkpoint stands for no node
		return nil
	}
	return l.derive(l.places[place].record - 1)
}

// derive derives the state of record i, unless it is known.
func (l *Live) derive(i int) *Calls {
	if c := l.at[i].calls; c != nil && !c.stale {
		return c
	}
	c, records := &Calls{}, l.together(i)
	places := records
	for _, k := range records {
		l.at[k].calls = c
		places = append(places, l.at[k].near...)
	}
	slices.Sort(places)
	l.met, places = places, slices.Compact(places)
	g := &l.room
	if len(places) > maxRoom {
		g = new(Graph)
	}
	nodes := g.nodes[:0]
	for _, i := range places {
		nodes = append(nodes, Node{Record: *l.records[i]})
	}
	g.withStates(nodes)
	c.Tasks = g.live(func(id string) bool { return l.at[l.record(id)].calls == c })
	for k := range c.Tasks {
		c.Tasks[k].Place, _ = l.Links.Place(c.Tasks[k].ID)
	}
	for i := range g.nodes {
		if n, d := &g.nodes[i], &l.at[l.record(g.nodes[i].ID)]; d.calls == c {
			d.state, d.detail, d.called = n.State, n.Detail, n.Called
		}
	}
	if l.mixed {
		l.all = c
	}
	return c
}

// live are the tasks with these ids.
func (g *Graph) live(has func(id string) bool) []Task {
	var all []Task
	at := make([]int, len(g.nodes)) // of each node its place in all, plus one
	for i := range g.nodes {
		if n := &g.nodes[i]; g.counts(i) && has(n.ID) {
			at[i] = len(all) + 1
			all = append(all, Task{ID: n.ID, Action: n.Action, Event: n.Event, Node: n.Node, State: n.State, Detail: n.Detail, Called: n.Called})
		}
	}
	for i := range g.nodes {
		n := &g.nodes[i]
		if !n.IsCheckpoint() || !n.Own {
			continue
		}
		of := func(t int) {
			k := at[t] - 1
			if k < 0 || slices.Contains(all[k].Checkpoints, n.ID) {
				return
			}
			if all[k].Checkpoints = append(all[k].Checkpoints, n.ID); all[k].Node == "" {
				all[k].Node = n.Node
			}
		}
		of(i)
		for _, tasks := range [...][]int{g.guards[i], g.executions[n.Execution]} {
			for _, t := range tasks {
				of(t)
			}
		}
	}
	return all
}

// Holding are the tasks that a token waits for which names these ids as its parents (ATD, "Topological
// Order"). A checkpoint or an error counts by what it is about. What is no call of the gateway's holds
// only where it has failed or was undone: otherwise the token that follows from it says that it is done.
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
			l.derive(i)
			d := &l.at[i]
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
