package plan

import "slices"

// Plan makes the plan of a rollback. It fails with *ScopeError, *UnknownError or
// *CycleError. What speaks against executing it is in the plan.
func (g *Graph) Plan(r Request) (*Plan, error) {
	d := &draft{Graph: g, Request: r}
	return d.plan()
}

// draft is a plan that is being made.
type draft struct {
	*Graph
	Request

	looked int // links that were followed, which a test holds to be few

	steps   []bool // nodes: the checkpoints in the plan
	covered []bool // nodes: the actions that these were made for
	scope   []bool // places: what the rollback is about
	wide    []bool // places: that, what is covered, and all that follows
}

func (d *draft) plan() (*Plan, error) {
	if d.Scope.breadth() == 0 || d.Scope == FullWorkflow && !d.Coordinator {
		return nil, &ScopeError{d.Scope}
	}
	target, known := d.checkpoint(d.Target)
	if !known {
		return nil, &UnknownError{d.Target}
	}
	d.measure(target)
	o := order{draft: d}
	if err := o.sort(); err != nil {
		return nil, err
	}
	p := &Plan{Workflow: d.workflow, Target: d.Target, Scope: d.Scope}
	for i, height := range o.heights() {
		if i >= len(d.nodes) || !d.steps[i] {
			continue
		}
		for len(p.Levels) < height {
			p.Levels = append(p.Levels, nil)
		}
		p.Levels[height-1] = append(p.Levels[height-1], d.step(i, d.Now))
	}
	for _, level := range p.Levels {
		slices.SortFunc(level, func(a, b Step) int {
			return latestFirst(&d.nodes[d.index[a.Checkpoint]], &d.nodes[d.index[b.Checkpoint]])
		})
	}
	d.rest(p)
	return p, nil
}

// measure finds out how far the plan goes.
func (d *draft) measure(target int) {
	roots := d.contained(target)
	d.steps, d.covered = make([]bool, len(d.nodes)), make([]bool, len(d.nodes))
	switch d.Scope {
	case Single:
		d.scope = make([]bool, len(d.down))
		for _, i := range d.withGuards(roots) {
			d.scope[i] = true
		}
		d.take(func(i int) bool { return d.scope[i] })
	case SubDAG:
		starts := d.withGuards(roots)
		if d.By != "" {
			near := d.near(d.By, d.Lineage)
			starts = slices.DeleteFunc(starts, func(i int) bool { return d.nodes[i].Kind == Action && !near[i] })
		}
		d.consequences(starts)
	case FullWorkflow:
		if d.By != "" {
			d.linked()
			break
		}
		d.scope = make([]bool, len(d.down))
		for p := range d.scope {
			d.scope[p] = true
		}
		d.take(func(int) bool { return true })
	}
	all := d.effects(func(What) bool { return true })
	for p, in := range d.scope {
		if in {
			all = append(all, p)
		}
	}
	d.wide = d.reach(all)
}

// consequences takes what follows from some places.
func (d *draft) consequences(places []int) {
	d.scope = d.reach(places)
	d.take(func(i int) bool { return d.scope[i] })
	bare := make([]bool, len(d.nodes))
	for i, covered := range d.covered {
		bare[i] = d.scope[i] && !covered
	}
	// Placed before its action, a checkpoint need not follow from what the action
	// follows from.
	d.take(func(i int) bool {
		return slices.ContainsFunc(d.guards[i], func(a int) bool { return bare[a] })
	})
}

// linked takes what is linked to the nodes of who asks, and what follows from that. A group
// links nothing to who has made it: it is taken where all that it contains is.
func (d *draft) linked() {
	var own []int
	for i, near := range d.near(d.By, d.Lineage) {
		if near && d.nodes[i].Kind != Group {
			own = append(own, i)
		}
	}
	d.consequences(own)
	d.take(func(i int) bool { return d.nodes[i].Kind == Group && d.whole(i, d.scope) })
}

// take puts checkpoints into the plan.
func (d *draft) take(which func(i int) bool) {
	for i := range d.nodes {
		if !d.nodes[i].isCheckpoint() || d.steps[i] || !which(i) {
			continue
		}
		d.steps[i] = true
		d.looked += len(d.guards[i])
		for _, a := range d.guards[i] {
			d.covered[a] = true
		}
	}
}

// effects are the checkpoints of some steps, with their actions.
func (d *draft) effects(which func(w What) bool) []int {
	var all []int
	for i, step := range d.steps {
		what, _ := d.nodes[i].what(d.Now)
		if step && which(what) {
			all = append(all, i)
		}
	}
	return d.withGuards(all)
}

// withGuards are checkpoints with the actions that they were made for.
func (d *draft) withGuards(checkpoints []int) []int {
	all := slices.Clone(checkpoints)
	for _, i := range checkpoints {
		d.looked += len(d.guards[i])
		all = append(all, d.guards[i]...)
	}
	return all
}

// reach marks the places that follow from some places, and these.
func (d *draft) reach(starts []int) []bool {
	met := make([]bool, len(d.down))
	var todo []int
	meet := func(places []int) {
		d.looked += len(places)
		for _, p := range places {
			if !met[p] {
				met[p] = true
				todo = append(todo, p)
			}
		}
	}
	meet(starts)
	for len(todo) > 0 {
		last := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		meet(d.down[last])
	}
	return met
}

// rest fills in what is undone besides the scope, and what is not undone.
func (d *draft) rest(p *Plan) {
	touched := d.reach(d.effects(func(w What) bool { return w != Nothing && w != Block }))
	for i := range d.nodes {
		n := &d.nodes[i]
		if d.Scope == FullWorkflow && n.isCheckpoint() && !d.steps[i] {
			p.Left++
		}
		switch {
		case n.Kind != Action:
			if d.steps[i] {
				p.Missing = append(p.Missing, d.unknown[i]...)
			}
		case d.covered[i] && !d.scope[i]:
			p.Along = append(p.Along, n.ID)
		case d.covered[i]:
		case d.scope[i]:
			p.Passed = append(p.Passed, n.ID)
		case touched[i] && n.Done:
			p.Dependants = append(p.Dependants, n.ID)
		}
	}
	slices.Sort(p.Along)
	slices.Sort(p.Passed)
	slices.Sort(p.Dependants)
	slices.Sort(p.Missing)
	p.Missing = slices.Compact(p.Missing)
}
