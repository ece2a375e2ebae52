package plan

// Lineage is who of a workflow may ask for a rollback.
type Lineage string

// The policies. What is none of them allows nobody.
const (
	// Ancestor: whoever is behind a checkpoint, or behind a node that it follows from
	// (ATD, "Rollback Authorization").
	Ancestor Lineage = "ancestor"
	// Workflow: whoever is behind an action, checkpoint or group that is linked to the
	// checkpoint, in whatever direction and over however many nodes (cascade 6.1). What
	// somebody tells of two others links them no more than the two were before.
	Workflow Lineage = "workflow"
)

// MayAsk reports whether an identity may ask for the rollback of a checkpoint. For a
// checkpoint that is unknown nobody may, so that the answer to it is the one that
// strangers get.
//
// To have told of an error, or to have asked before, is no part in the workflow: events
// give no right, but for the one that tells of its begin. Who asks for a group must be allowed to ask for all that it contains,
// and all of that must be known. Among ancestors it gives no right to have made a group
// of others' checkpoints. A node in another workflow never counts, and that strangers
// give theirs the same name links nothing.
func (g *Graph) MayAsk(requester, checkpoint string, policy Lineage) bool {
	target, known := g.checkpoint(checkpoint)
	return known && g.whole(target, g.near(requester, policy))
}

// Initiator is who began the workflow: who is behind the node that began first, if that
// follows from nothing; events do not count but for one that tells of the begin. Empty is
// nobody. Roots of others that come later take nothing from it: whoever knows the name of
// a workflow can make one.
func (g *Graph) Initiator() string {
	var first *Node
	for i := range g.nodes {
		n := &g.nodes[i]
		if (n.Kind != Event || n.Begins) && (first == nil || latestFirst(first, n) < 0) {
			first = n
		}
	}
	if first == nil || len(first.Parents) > 0 {
		return ""
	}
	return first.By
}

// near marks the nodes that are linked to the requester's own as the policy wants it.
func (g *Graph) near(requester string, policy Lineage) []bool {
	if requester == "" || policy != Ancestor && policy != Workflow {
		return make([]bool, len(g.nodes))
	}
	return g.spread(requester, policy == Workflow)
}

// whole reports whether a checkpoint, or all that a group contains, is among some nodes.
func (g *Graph) whole(checkpoint int, among []bool) bool {
	some := false
	for _, i := range g.contained(checkpoint) {
		group := g.nodes[i].Kind == Group
		if group && len(g.unknown[i]) > 0 || !group && !among[i] {
			return false
		}
		some = some || !group
	}
	return some
}

// Follows reports whether a node follows from a checkpoint, or from what it was made for:
// an error that does is one that its rollback can be asked for.
func (g *Graph) Follows(id, checkpoint string) bool {
	target, known := g.checkpoint(checkpoint)
	i, there := g.index[id]
	if !known || !there {
		return false
	}
	d := draft{Graph: g}
	return d.reach(d.withGuards(g.contained(target)))[g.after[i]]
}

// spread marks the requester's nodes and what follows from them by the tokens. A group
// does not follow from what it contains. With any, it goes along every link, and
// against it too, but not from what was told to what it tells of.
func (g *Graph) spread(requester string, any bool) []bool {
	links := make([][]int, len(g.nodes))
	met := make([]bool, len(g.nodes))
	var todo []int
	for i := range g.nodes {
		n := &g.nodes[i]
		for _, p := range g.parents[i] {
			if any && !n.Told {
				links[i] = append(links[i], p)
			}
			if any || n.Kind != Group {
				links[p] = append(links[p], i)
			}
		}
		if (n.Kind != Event || n.Begins) && n.By == requester {
			met[i] = true
			todo = append(todo, i)
		}
	}
	for len(todo) > 0 {
		last := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, i := range links[last] {
			if !met[i] {
				met[i] = true
				todo = append(todo, i)
			}
		}
	}
	return met
}
