package workflow

import "slices"

// history is what happened to one node, as far as its state depends on it. Events are
// told apart by when they were recorded, since the times in tokens have whole seconds
// and come from different clocks.
type history struct {
	settled  int // when the last settlement was recorded; -1 is never
	outcome  Outcome
	claimed  int // when the last claim that is still open was recorded; -1 is never
	blame    blame
	followed bool // a task follows from it
	undo     undo
}

// derivation finds the states of all nodes.
type derivation struct {
	*Graph
	history []history
}

// derive fills in what the graph knows of its nodes.
func derive(g *Graph) {
	d := &derivation{Graph: g, history: make([]history, len(g.nodes))}
	for i := range d.history {
		d.history[i] = history{settled: -1, claimed: -1, blame: blame{own: -1, escalated: g.nodes[i].Escalated}}
	}
	d.settlements()
	d.claims()
	d.errors()
	d.followers()
	d.rollbacks()
	for i := range g.nodes {
		if g.nodes[i].task() {
			g.nodes[i].State, g.nodes[i].Detail = d.history[i].task()
		}
	}
	for i := range g.nodes {
		if g.nodes[i].isCheckpoint() {
			g.nodes[i].State, g.nodes[i].Detail = d.checkpoint(i)
		}
	}
}

// settlements tells every task what came of its call. The last one counts: a call that
// was not executed can be made again, and doubt can be settled later.
func (d *derivation) settlements() {
	last := make(map[int]int) // checkpoint -> the last settlement of its claim
	for i := range d.nodes {
		if !d.nodes[i].settlement() {
			continue
		}
		d.settle(i, i)
		for _, t := range d.announced(i) {
			d.settle(t, i)
		}
		for _, p := range d.parents[i] {
			if before, ok := last[p]; d.claimOf(i, p) && (!ok || d.seq[i] > d.seq[before]) {
				last[p] = i
			}
		}
	}
	for c, by := range last {
		for _, i := range d.children[c] {
			if d.claimOf(i, c) {
				d.settle(i, by)
			}
		}
	}
	for _, all := range d.executions {
		by := slices.MaxFunc(all, func(a, b int) int { return d.seq[a] - d.seq[b] })
		for _, i := range all {
			d.settle(i, by)
		}
	}
}

func (d *derivation) settle(task, by int) {
	if h := &d.history[task]; d.seq[by] > h.settled {
		h.settled, h.outcome = d.seq[by], d.nodes[by].Outcome
	}
}

// claims finds the calls that are under way: the gateway's checkpoint is recorded with
// the claim (P2), and nothing has settled it.
func (d *derivation) claims() {
	for i := range d.nodes {
		node := &d.nodes[i]
		if !node.isCheckpoint() || !node.Own ||
			slices.ContainsFunc(d.children[i], func(c int) bool { return d.claimOf(c, i) }) {
			continue
		}
		d.claim(i, i)
		for _, s := range d.executions[node.Execution] {
			d.claim(s, i)
		}
		for _, t := range d.announced(i) {
			d.claim(t, i)
		}
		for _, p := range d.parents[i] {
			if d.nodes[p].isCheckpoint() && !d.nodes[p].Own {
				d.claim(p, i) // the agent's own, for this call
			}
		}
	}
}

func (d *derivation) claim(node, by int) {
	h := &d.history[node]
	h.claimed = max(h.claimed, d.seq[by])
}

// followers finds the tasks that others follow from, also over a checkpoint: that one
// counts by its own action. A settlement follows from nothing that it settles, and
// nothing follows from itself, however wrong the graph.
func (d *derivation) followers() {
	passed := make(map[int][]int) // checkpoint -> two of the tasks that follow from it
	for i := range d.nodes {
		if !d.nodes[i].task() {
			continue
		}
		for _, p := range d.parents[i] {
			switch {
			case d.settles(i, p):
			case d.nodes[p].task():
				d.history[p].followed = true
			case !d.nodes[p].isCheckpoint():
			case d.nodes[i].settlement():
				d.follow(p, d.announced(i))
			case len(passed[p]) < 2:
				passed[p] = append(passed[p], i)
			}
		}
	}
	for c, by := range passed {
		var except []int
		if len(by) == 1 {
			except = by
		}
		d.follow(c, except)
	}
}

// follow marks the tasks before checkpoint c, but for some.
func (d *derivation) follow(c int, except []int) {
	for _, p := range d.parents[c] {
		if d.nodes[p].task() && !slices.Contains(except, p) {
			d.history[p].followed = true
		}
	}
}

// task is the state of a task.
func (h *history) task() (State, Detail) {
	open := h.claimed > h.settled
	unfinished := h.settled >= 0 && h.outcome != Completed
	failed := h.failed() || unfinished && !open
	state := Running
	switch {
	case h.undo == undone:
		state = RolledBack
	case h.undo == undoEscalated || h.blame.escalated && failed:
		state = Escalated
	case failed:
		state = Failed
	case open:
	case h.settled >= 0 || h.followed:
		state = Done
	}
	return state, h.detail(state)
}

func (h *history) detail(s State) Detail {
	if d := h.undo.detail(); d != "" {
		return d
	}
	if s == Failed || s == Escalated {
		switch {
		case h.settled < 0 || h.claimed > h.settled:
		case h.outcome == InDoubt:
			return DetailInDoubt
		case h.outcome == Released:
			return DetailReleased
		}
	}
	return ""
}

// checkpoint is the state of a checkpoint: what became of it, or else of the last task
// that it was made for. One without a task stands for an action of which there is no
// token yet.
func (d *derivation) checkpoint(i int) (State, Detail) {
	h := &d.history[i]
	last := -1
	for _, t := range d.guards[i] {
		if last < 0 || d.seq[t] > d.seq[last] {
			last = t
		}
	}
	detail := h.undo.detail()
	switch {
	case h.undo == undone:
		return RolledBack, detail
	case h.undo == undoEscalated:
		return Escalated, detail
	case last >= 0:
		if detail == "" {
			detail = d.nodes[last].Detail
		}
		return d.nodes[last].State, detail
	case h.failed() && h.blame.escalated:
		return Escalated, detail
	case h.failed():
		return Failed, detail
	case d.groups[i]:
		return "", detail
	case d.nodes[i].Own, h.claimed >= 0:
		return Running, detail
	}
	return Pending, detail
}
