package plan

import (
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Live is where those who take part in a workflow are in its plan while its records come: what Progress finds of the
// same records, derived when somebody asks. Nothing of it is stored. It is for one goroutine at a time.
//
// Neither the size of the plan nor how much came before counts for what a record costs, nor for the question whether
// anything holds a call.
type Live struct {
	states *workflow.Live
	// mine are the places of what was recorded of somebody, by the names in Record.By.
	mine map[string][]int
	// parts are those that were asked for lately, the latest first.
	parts []*Part
	// trouble says that something is recorded without which no task has failed or was undone.
	trouble bool
}

// maxParts is how many parts of a workflow are kept up to date. Others are found again when they are asked for.
const maxParts = 32

// Part is what somebody takes part in of a workflow: what is linked by tokens and calls to what is recorded of
// him. Others may use the workflow's name; what they do is no part of it (P3).
type Part struct {
	live  *Live
	who   []string
	joins []string // further ids that it began with
	has   workflow.Places
	// called says that the gateway has recorded a call in it.
	called bool
	// named are the places of its records that name a node of a plan, and acted those of other tasks, by their
	// actions.
	named, acted map[string][]int
}

// NewLive begins a workflow.
func NewLive() *Live {
	return &Live{states: workflow.NewLive(), mine: map[string][]int{}}
}

// Len is how much memory it takes, as the number of records that take as much: about a kilobyte each.
func (l *Live) Len() int {
	bytes := 0
	for _, p := range l.parts {
		bytes += 300 + 8*len(p.has) + 80*(len(p.named)+len(p.acted))
	}
	return l.states.Len() + bytes/1024
}

// Add adds records, behind those that they follow from. Of two with one id the first counts. By says whose a record
// is, and Report that it links no further ones.
func (l *Live) Add(records ...workflow.Record) {
	for i := range records {
		r := &records[i]
		place, parents, first := l.states.Add(r)
		if !first {
			continue
		}
		l.trouble = l.trouble || !r.TakesPart() || r.Outcome != "" && r.Outcome != workflow.Completed
		if r.By != "" {
			l.mine[r.By] = append(l.mine[r.By], place)
		}
		for _, p := range l.parts {
			if p.has.Has(place) || r.By != "" && slices.Contains(p.who, r.By) || slices.ContainsFunc(parents, p.has.Has) {
				p.has.Add(place)
				p.note(place)
				p.reach(l.states.Links.To(place)...)
			}
		}
	}
}

// Part is the part of somebody with these names (Record.By), who also has tokens that follow from what is named.
func (l *Live) Part(who, named []string) *Part {
	base := l.part(who, nil)
	var more []string
	for _, id := range named {
		place, known := l.states.Links.Place(id)
		if !known || base.has.Has(place) || slices.Contains(more, id) {
			continue
		}
		if l.states.At(place) != nil || len(l.states.Links.To(place)) > 0 {
			more = append(more, id)
		}
	}
	if more == nil {
		return base
	}
	return l.part(who, more)
}

func (l *Live) part(who, named []string) *Part {
	i := slices.IndexFunc(l.parts, func(p *Part) bool { return slices.Equal(p.who, who) && slices.Equal(p.joins, named) })
	if i >= 0 {
		p := l.parts[i]
		copy(l.parts[1:], l.parts[:i])
		l.parts[0] = p
		return p
	}
	p := &Part{live: l, who: slices.Clone(who), joins: named, named: map[string][]int{}, acted: map[string][]int{}}
	for _, id := range named {
		if place, known := l.states.Links.Place(id); known {
			p.reach(place)
		}
	}
	for _, name := range who {
		p.reach(l.mine[name]...)
	}
	l.parts = slices.Insert(l.parts[:min(len(l.parts), maxParts-1)], 0, p)
	return p
}

// reach adds places, and what is linked to them.
func (p *Part) reach(places ...int) {
	for _, place := range p.live.states.Links.Reach(&p.has, places...) {
		p.note(place)
	}
}

// note notes what is recorded at a place of the part.
func (p *Part) note(place int) {
	r := p.live.states.At(place)
	if r == nil {
		return
	}
	p.called = p.called || r.Own && r.IsCheckpoint()
	switch {
	case r.Node != "" && (r.IsTask() || r.IsCheckpoint()):
		p.named[r.Node] = append(p.named[r.Node], place)
	case r.IsTask(): // the action of a checkpoint says nothing of its call
		p.acted[r.Action] = append(p.acted[r.Action], place)
	}
}

// Has reports whether an id is in the part.
func (p *Part) Has(id string) bool {
	place, known := p.live.states.Links.Place(id)
	return known && p.has.Has(place)
}

// Called reports whether the gateway has recorded a call in the part.
func (p *Part) Called() bool { return p.called }

// tasks visits the tasks in the part that are a node of a plan, as Descriptor.place has them.
func (p *Part) tasks(d *Descriptor, i int, visit func(t *workflow.Task)) {
	n := &d.Nodes[i]
	lists, label := [...][]int{p.named[n.ID], nil, nil}, n.ID
	if len(p.acted) > 0 {
		if only, err := d.Which("", n.Label); err == nil && only == i {
			label = n.Label
		}
		if lists[1] = p.acted[n.ID]; label != n.ID {
			lists[2] = p.acted[label]
		}
	}
	met := make(map[*workflow.Calls]bool)
	for _, places := range lists {
		for _, place := range places {
			c := p.live.states.Calls(place)
			if c == nil || met[c] {
				continue
			}
			met[c] = true
			for k := range c.Tasks {
				t := &c.Tasks[k]
				acts := t.Node == "" && t.Event == "" && (t.Action == n.ID || t.Action == label)
				if (acts || t.Node == n.ID) && p.has.Has(t.Place) {
					visit(t)
				}
			}
		}
	}
}

// state is that of all tasks of a node together. Tasks that are no calls count as done where done says so.
func (p *Part) state(d *Descriptor, i int, done func(id string) bool) (state workflow.State, detail workflow.Detail) {
	state, first := workflow.Pending, true
	p.tasks(d, i, func(t *workflow.Task) {
		s := t.State
		if done != nil && s == workflow.Running && !t.Called && done(t.ID) {
			s = workflow.Done
		}
		if first || weight(s, t.Detail) > weight(state, detail) {
			state, detail, first = s, t.Detail, false
		}
	})
	return state, detail
}

// Holds are the nodes that keep a node of a plan from beginning: a call of it has to wait for them, or not to begin
// at all where one of them is final. follows reports whether the call's tokens name an id as a parent,
// which says of a task that is no call of the gateway's that it is done (ATD, "Node States").
func (p *Part) Holds(d *Descriptor, node string, follows func(id string) bool) []Hold {
	var all []Hold
	var held []int
	for _, j := range d.Nodes[d.index[node]].Before {
		s, detail := p.state(d, j, nil)
		if !holds(s, detail) || s == workflow.Running && !holds(p.state(d, j, follows)) {
			continue
		}
		all, held = append(all, Hold{Node: d.Nodes[j].ID, State: s, Detail: detail}), append(held, j)
	}
	lost := p.lost(d, held)
	for k, j := range held {
		all[k].Final = lost[j]
	}
	return all
}

// lost are those of some nodes, and of all that they wait for, that will never be done: such a node, or one that it
// waits for, has failed or was undone. Each node is looked at once.
func (p *Part) lost(d *Descriptor, held []int) map[int]bool {
	if !p.live.trouble {
		return nil
	}
	waits, lost := map[int]bool{}, map[int]bool{} // waits has the nodes that have not begun
	met := map[int]bool{}
	for todo := slices.Clone(held); len(todo) > 0; {
		i := todo[len(todo)-1]
		if todo = todo[:len(todo)-1]; met[i] {
			continue
		}
		met[i] = true
		switch s, detail := p.state(d, i, nil); {
		case workflow.Final(s, detail):
			lost[i] = true
		case !begun(s, detail):
			waits[i] = true
			todo = append(todo, d.Nodes[i].Before...)
		}
	}
	if len(lost) == 0 {
		return nil
	}
	for _, i := range d.order { // what a node waits for comes before it
		if waits[i] && slices.ContainsFunc(d.Nodes[i].Before, func(j int) bool { return lost[j] }) {
			lost[i] = true
		}
	}
	return lost
}

// Before are the ids of the calls of all nodes directly before a node of a plan, and of their checkpoints.
func (p *Part) Before(d *Descriptor, node string) (ids []string) {
	for _, j := range d.Nodes[d.index[node]].Before {
		p.tasks(d, j, func(t *workflow.Task) { ids = append(append(ids, t.ID), t.Checkpoints...) })
	}
	return ids
}

// Holding are the tasks that a token waits for which names these ids as its parents. See
// workflow.Live.Holding.
func (l *Live) Holding(parents []string) []workflow.Task { return l.states.Holding(parents) }

// Issuers are the agents whose tokens have led to what is named, the nearest first. At most so many records are
// looked at.
func (l *Live) Issuers(named []string, most int) (all []string) {
	met := map[string]bool{}
	for todo := slices.Clone(named); len(todo) > 0 && len(met) < most; todo = todo[1:] {
		place, known := l.states.Links.Place(todo[0])
		if !known {
			continue
		}
		r := l.states.At(place)
		if r == nil || met[r.ID] {
			continue
		}
		met[r.ID] = true
		todo = append(todo, r.Parents...)
		if !r.Own && r.Issuer != "" && !slices.Contains(all, r.Issuer) {
			all = append(all, r.Issuer)
		}
	}
	return all
}
