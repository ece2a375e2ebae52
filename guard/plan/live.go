package plan

import (
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Live is where those who take part in a workflow are in its plan while its records come: what Progress finds of the
// same records, kept up to date. Nothing of it is stored. It is for one goroutine at a time.
//
// A record costs what it changes: the states of its own call, those of the nodes of that, and of the nodes behind them how
// many hold them. Neither the size of the plan nor how much came before counts.
type Live struct {
	states *workflow.Live
	// mine are the places of what was recorded of somebody, by the names in Record.By.
	mine map[string]*[]int
	// parts are those that were asked for lately, the latest first.
	parts []*Part
}

// maxParts is how many parts of a workflow are kept up to date. Others are found again when they are asked for.
const maxParts = 32

// Part is what somebody takes part in of a workflow: what is linked by tokens and calls to what is recorded of
// him. Others may use the workflow's name; what they do is no part of it (P3).
type Part struct {
	live  *Live
	who   []string
	named []string // further ids that it began with
	has   workflow.Places
	// called says that the gateway has recorded a call in it.
	called bool
	// grown are calls of which something is in the part since the last update.
	grown []*workflow.Calls

	plan  *Descriptor // that Follow has set; nil before
	nodes map[int]*liveNode
	// of are the nodes of the tasks that have one.
	of map[*workflow.Calls]placed
	// behind is what the nodes directly before a node say of it; it is not there where they say nothing.
	behind map[int]before
}

// placed are the nodes of the tasks of calls: as a rule one.
type placed struct {
	first int
	more  []int
}

// before counts the nodes directly before a node that do not hold it, and those that hold it for good.
type before struct{ clear, over int32 }

type liveNode struct {
	tasks []liveTask
	// state is that of the tasks together.
	state  workflow.State
	detail workflow.Detail
}

// liveTask is a task as it is in its calls, until these change.
type liveTask struct {
	*workflow.Task
	calls *workflow.Calls
}

// NewLive begins a workflow.
func NewLive() *Live {
	return &Live{states: workflow.NewLive(), mine: map[string]*[]int{}}
}

// Len is how much memory it takes, as the number of records that take as much: about a kilobyte each.
func (l *Live) Len() int {
	bytes := 0
	for _, p := range l.parts {
		bytes += 300 + 8*len(p.has) + 256*len(p.nodes) + 32*len(p.behind)
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
		if r.By != "" {
			mine := l.mine[r.By]
			if mine == nil {
				mine = new([]int)
				l.mine[r.By] = mine
			}
			*mine = append(*mine, place)
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

// settle derives what the records since the last question have changed: a call has several, and of most nobody asks
// before the last one.
func (l *Live) settle() {
	changed := l.states.Changes()
	for _, p := range l.parts {
		p.update(changed)
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
		if _, r := l.states.At(place); r != nil || len(l.states.Links.To(place)) > 0 {
			more = append(more, id)
		}
	}
	if more == nil {
		return base
	}
	return l.part(who, more)
}

func (l *Live) part(who, named []string) *Part {
	i := slices.IndexFunc(l.parts, func(p *Part) bool { return slices.Equal(p.who, who) && slices.Equal(p.named, named) })
	if i >= 0 {
		p := l.parts[i]
		copy(l.parts[1:], l.parts[:i])
		l.parts[0] = p
		return p
	}
	p := &Part{live: l, who: slices.Clone(who), named: named}
	for _, id := range named {
		if place, known := l.states.Links.Place(id); known {
			p.reach(place)
		}
	}
	for _, name := range who {
		if mine := l.mine[name]; mine != nil {
			p.reach(*mine...)
		}
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
	calls, r := p.live.states.At(place)
	p.called = p.called || r != nil && r.Own && r.IsCheckpoint()
	if calls != nil && p.plan != nil && !calls.Changed() { // else the next update has them anyway
		p.grown = append(p.grown, calls)
	}
}

// Has reports whether an id is in the part.
func (p *Part) Has(id string) bool {
	place, known := p.live.states.Links.Place(id)
	return known && p.has.Has(place)
}

// Called reports whether the gateway has recorded a call in the part.
func (p *Part) Called() bool { return p.called }

// Follow sets the plan that the questions are about. It costs nothing where it is the same as before.
func (p *Part) Follow(d *Descriptor) {
	if p.plan == d || p.plan != nil && p.plan.Version() == d.Version() {
		return
	}
	p.live.settle()
	p.plan, p.grown = d, nil
	p.nodes, p.of, p.behind = make(map[int]*liveNode), make(map[*workflow.Calls]placed), make(map[int]before)
	p.update(p.live.states.All())
}

// update takes the tasks of the nodes that have changed.
func (p *Part) update(changed []*workflow.Calls) {
	if p.plan == nil {
		return
	}
	var room [8]int
	touched := room[:0]
	for _, all := range [][]*workflow.Calls{changed, p.grown} {
		for _, c := range all {
			touched = p.take(c, touched)
		}
	}
	p.grown = nil
	for _, i := range touched {
		p.refresh(i)
	}
}

// take takes the tasks of calls that are in the part, and appends the nodes that they change.
func (p *Part) take(c *workflow.Calls, touched []int) []int {
	drop := func(i int) {
		touched = append(touched, i)
		p.nodes[i].tasks = slices.DeleteFunc(p.nodes[i].tasks, func(t liveTask) bool { return t.calls == c })
	}
	if of, had := p.of[c]; had {
		drop(of.first)
		for _, i := range of.more {
			drop(i)
		}
		delete(p.of, c)
	}
	var of placed
	found := false
	for k := range c.Tasks {
		t := &c.Tasks[k]
		i, ok := p.plan.place(t.Node, t.Action, t.Event == "")
		if !ok || !p.Has(t.ID) {
			continue
		}
		n := p.nodes[i]
		if n == nil {
			n = &liveNode{state: workflow.Pending}
			p.nodes[i] = n
		}
		n.tasks = append(n.tasks, liveTask{t, c})
		switch touched = append(touched, i); {
		case !found:
			of.first, found = i, true
		case i != of.first && !slices.Contains(of.more, i):
			of.more = append(of.more, i)
		}
	}
	if found {
		p.of[c] = of
	}
	return touched
}

// refresh finds the state of a node, and what that means for those that come after it.
func (p *Part) refresh(i int) {
	n := p.nodes[i]
	was, lost := *n, p.lost(i)
	n.state, n.detail = n.together(nil)
	if n.state != was.state || n.detail != was.detail {
		p.pass(i, holds(was.state, was.detail), lost || workflow.Final(was.state, was.detail))
	}
}

// pass passes on to the nodes behind a node what has changed of it: whether it holds them, and whether for good.
func (p *Part) pass(i int, held, over bool) {
	type change struct {
		node       int
		held, over bool // as they were
	}
	for todo := []change{{i, held, over}}; len(todo) > 0; todo = todo[1:] {
		c := todo[0]
		n := p.node(c.node)
		var more before
		switch now := holds(n.state, n.detail); {
		case c.held && !now:
			more.clear = 1
		case now && !c.held:
			more.clear = -1
		}
		switch now := p.lost(c.node) || workflow.Final(n.state, n.detail); {
		case now && !c.over:
			more.over = 1
		case c.over && !now:
			more.over = -1
		}
		if more == (before{}) {
			continue
		}
		for _, j := range p.plan.Nodes[c.node].After {
			was := p.behind[j]
			now := before{was.clear + more.clear, was.over + more.over}
			if p.behind[j] = now; now == (before{}) {
				delete(p.behind, j)
			}
			if (was.over > 0) == (now.over > 0) {
				continue
			}
			if n := p.node(j); !begun(n.state, n.detail) && !workflow.Final(n.state, n.detail) {
				todo = append(todo, change{j, holds(n.state, n.detail), was.over > 0})
			}
		}
	}
}

// lost reports whether a node can never begin: one directly before it will never be done.
func (p *Part) lost(i int) bool {
	n := p.node(i)
	return !begun(n.state, n.detail) && p.behind[i].over > 0
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

// node is a node of the plan, with its tasks in the part, for reading only.
func (p *Part) node(i int) *liveNode {
	if n := p.nodes[i]; n != nil {
		return n
	}
	return &pending
}

// pending is a node without tasks.
var pending = liveNode{state: workflow.Pending}

// Holds are the nodes that keep a node of the plan from beginning: a call of it has to wait for them, or not to begin
// at all where one of them is final. follows reports whether the call's tokens name an id as a parent,
// which says of a task that is no call of the gateway's that it is done (ATD, "Node States").
func (p *Part) Holds(node string, follows func(id string) bool) []Hold {
	p.live.settle()
	i := p.plan.index[node] // plans of one version may have it in other places
	if int(p.behind[i].clear) == len(p.plan.Nodes[i].Before) {
		return nil
	}
	var all []Hold
	for _, j := range p.plan.Nodes[i].Before {
		n := p.node(j)
		if !holds(n.state, n.detail) {
			continue
		}
		if n.state == workflow.Running && !holds(n.together(follows)) {
			continue
		}
		all = append(all, Hold{
			Node: p.plan.Nodes[j].ID, State: n.state, Detail: n.detail, Final: p.lost(j) || workflow.Final(n.state, n.detail),
		})
	}
	return all
}

// Before are the ids of the calls of all nodes directly before a node, and of their checkpoints.
func (p *Part) Before(node string) []string {
	p.live.settle()
	var ids []string
	for _, j := range p.plan.Nodes[p.plan.index[node]].Before {
		for _, t := range p.node(j).tasks {
			ids = append(append(ids, t.ID), t.Checkpoints...)
		}
	}
	return ids
}

// Holding are the tasks that a token waits for which names these ids as its parents. See
// workflow.Live.Holding.
func (l *Live) Holding(parents []string) []workflow.Task {
	l.settle()
	return l.states.Holding(parents)
}

// Issuers are the agents whose tokens have led to what is named, the nearest first. At most so many records are
// looked at.
func (l *Live) Issuers(named []string, most int) (all []string) {
	met := map[string]bool{}
	for todo := slices.Clone(named); len(todo) > 0 && len(met) < most; todo = todo[1:] {
		place, known := l.states.Links.Place(todo[0])
		if !known {
			continue
		}
		_, r := l.states.At(place)
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
