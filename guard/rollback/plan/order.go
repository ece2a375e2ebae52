package plan

import "slices"

// order puts the places of a draft in the order of their rollback.
//
// Two relations decide. By the tokens alone a place comes before what it follows from.
// Besides, a checkpoint comes after what follows from the actions that it was made for,
// which need not follow from it. The second can run in circles. The places of a circle
// are a knot: between knots both relations decide, within one the tokens alone.
type order struct {
	*draft
	sorted []int // places by the tokens alone, consequences first
	knots  []int // of a place: its knot, consequences have the lower number; from 1 on
	count  int   // of knots
}

// next are the places that place p comes after.
func (o *order) next(p int) (follow, guarded []int) {
	follow = o.down[p]
	if p < len(o.nodes) && o.steps[p] {
		guarded = o.guards[p]
	}
	o.looked += len(follow) + len(guarded)
	return follow, guarded
}

// sort orders the places by the tokens. It fails with *CycleError.
func (o *order) sort() error {
	waits := make([]int, len(o.down))
	var todo []int
	count := 0
	for p, in := range o.wide {
		if !in {
			continue
		}
		count++
		follow, _ := o.next(p)
		for _, q := range follow {
			waits[q]++
		}
	}
	for p, in := range o.wide {
		if in && waits[p] == 0 {
			todo = append(todo, p)
		}
	}
	for n := 0; n < len(todo); n++ {
		follow, _ := o.next(todo[n])
		for _, q := range follow {
			if waits[q]--; waits[q] == 0 {
				todo = append(todo, q)
			}
		}
	}
	if len(todo) < count {
		e := &CycleError{}
		for p, n := range waits {
			if n > 0 {
				e.Nodes = append(e.Nodes, o.node(p).ID)
			}
		}
		slices.Sort(e.Nodes)
		e.Nodes = slices.Compact(e.Nodes)
		return e
	}
	slices.Reverse(todo)
	o.sorted = todo
	return nil
}

// heights gives the level of each place's step, from 1 on. Places that are no steps
// take none of their own.
func (o *order) heights() []int {
	o.tie()
	members := make([][]int, o.count+1)
	for _, p := range o.sorted {
		members[o.knots[p]] = append(members[o.knots[p]], p)
	}
	heights := make([]int, len(o.down))
	tops := make([]int, o.count+1) // of a knot: its highest level
	for k := 1; k <= o.count; k++ {
		for _, p := range members[k] {
			follow, guarded := o.next(p)
			for _, places := range [][]int{follow, guarded} {
				for _, q := range places {
					if o.knots[q] != k {
						tops[k] = max(tops[k], tops[o.knots[q]])
					}
				}
			}
		}
		below := tops[k]
		for _, p := range members[k] {
			heights[p] = below
			follow, _ := o.next(p)
			for _, q := range follow {
				if o.knots[q] == k {
					heights[p] = max(heights[p], heights[q])
				}
			}
			if p < len(o.nodes) && o.steps[p] {
				heights[p]++
			}
			tops[k] = max(tops[k], heights[p])
		}
	}
	return heights
}

// tie finds the knots: Tarjan's strongly connected components, which come out with the
// consequences first.
func (o *order) tie() {
	o.knots = make([]int, len(o.down))
	t := tying{order: o, seen: make([]int, len(o.down)), low: make([]int, len(o.down))}
	for _, p := range o.sorted {
		if t.seen[p] == 0 {
			t.visit(p)
		}
	}
}

// tying is the state of Tarjan's walk.
type tying struct {
	*order
	clock int
	seen  []int // when a place was first met; 0 is never
	low   []int // the earliest place that can be reached from it and is still open
	open  []int // places without a knot
}

// visit goes at most as deep as there are places, which the limits of New bound.
func (t *tying) visit(p int) {
	t.clock++
	t.seen[p], t.low[p] = t.clock, t.clock
	t.open = append(t.open, p)
	follow, guarded := t.next(p)
	for _, places := range [][]int{follow, guarded} {
		for _, q := range places {
			switch {
			case t.seen[q] == 0:
				t.visit(q)
				t.low[p] = min(t.low[p], t.low[q])
			case t.knots[q] == 0:
				t.low[p] = min(t.low[p], t.seen[q])
			}
		}
	}
	if t.low[p] < t.seen[p] {
		return
	}
	t.count++
	for {
		last := t.open[len(t.open)-1]
		t.open = t.open[:len(t.open)-1]
		t.knots[last] = t.count
		if last == p {
			return
		}
	}
}
