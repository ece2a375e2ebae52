package rollback

import "github.com/agent-guard/caddy-agent-guard/guard/workflow"

// Lineage is who of a workflow may ask for a rollback.
type Lineage string

// The policies. Unknown policies deny everyone.
const (
	// Ancestor: whoever is behind a checkpoint, or behind a node that it follows from
	// (ATD, "Rollback Authorization").
	Ancestor Lineage = "ancestor"
	// Workflow: whoever is behind an action, checkpoint or group that is linked to the
	// checkpoint, in whatever direction and over however many nodes (cascade 6.1).
	// Reports link nothing.
	Workflow Lineage = "workflow"
)

// MayAsk reports whether an identity may ask for the rollback of a checkpoint. For a
// checkpoint that is unknown nobody may, so that the answer to it is the one that
// strangers get.
//
// Events give no right, but for workflow_start. Who asks for a group must be allowed to ask
// for all that it contains, and all of that must be known. Among ancestors it gives no right to have made a group
// of others' checkpoints. A node in another workflow never counts, and that strangers
// give theirs the same name links nothing.
func MayAsk(g *workflow.Graph, requester, checkpoint string, policy Lineage) bool {
	target, known := checkpointIn(g, checkpoint)
	return known && whole(g, target, near(g, requester, policy))
}

// initiator is who began the workflow: who is behind the node that began first, if that
// follows from nothing; events do not count but for workflow_start. Empty is
// nobody. Roots of others that come later take nothing from it: whoever knows the name of
// a workflow can make one.
func initiator(g *workflow.Graph) string {
	first := -1
	for i := range g.Len() {
		if g.At(i).TakesPart() && (first < 0 || g.Seq(i) < g.Seq(first)) {
			first = i
		}
	}
	if first < 0 || len(g.At(first).Parents) > 0 {
		return ""
	}
	return g.At(first).By
}

// near marks the nodes that are linked to the requester's own as the policy wants it.
func near(g *workflow.Graph, requester string, policy Lineage) []bool {
	if requester == "" || policy != Ancestor && policy != Workflow {
		return make([]bool, g.Len())
	}
	return spread(g, requester, policy == Workflow)
}

// whole reports whether a checkpoint, or all that a group contains, is among some nodes.
func whole(g *workflow.Graph, checkpoint int, among []bool) bool {
	some := false
	for _, i := range contained(g, checkpoint) {
		n := g.At(i)
		if n.Group && len(n.Missing) > 0 || !n.Group && !among[i] {
			return false
		}
		some = some || !n.Group
	}
	return some
}

// contained gives the checkpoint i, and if it is a group all that it contains, groups
// in it too.
func contained(g *workflow.Graph, i int) []int {
	all, met := []int{i}, map[int]bool{i: true}
	for n := 0; n < len(all); n++ {
		if !g.At(all[n]).Group {
			continue
		}
		for _, p := range g.Parents(all[n]) {
			if !met[p] {
				met[p] = true
				all = append(all, p)
			}
		}
	}
	return all
}

// follows reports whether a node follows from a checkpoint, or from what it was made for:
// an error that does is one that its rollback can be asked for.
func follows(g *workflow.Graph, id, checkpoint string) bool {
	target, known := checkpointIn(g, checkpoint)
	i, there := g.Index(id)
	if !known || !there {
		return false
	}
	d := planner{Graph: g}
	return d.reach(d.withGuards(contained(g, target)))[g.End(i)]
}

// spread marks the requester's nodes and what follows from them by the tokens. A group
// does not follow from what it contains. With any, it goes along every link, and
// against it too, but not from a report to its subjects.
func spread(g *workflow.Graph, requester string, any bool) []bool {
	links := make([][]int, g.Len())
	met := make([]bool, g.Len())
	var todo []int
	for i := range g.Len() {
		n := g.At(i)
		for _, p := range g.Parents(i) {
			if any && !n.Report {
				links[i] = append(links[i], p)
			}
			if any || !n.Group {
				links[p] = append(links[p], i)
			}
		}
		if n.TakesPart() && n.By == requester {
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

// checkpointIn finds a checkpoint or group by its id.
func checkpointIn(g *workflow.Graph, id string) (int, bool) {
	i, ok := g.Index(id)
	return i, ok && g.At(i).IsCheckpoint()
}
