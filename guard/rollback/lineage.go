package rollback

import "github.com/agent-guard/caddy-agent-guard/guard/workflow"

// Lineage is the policy for who may ask for a rollback.
type Lineage string

// The policies. Unknown policies deny everyone.
const (
	// Ancestor: the agents behind a checkpoint and behind the nodes that it follows from (ATD,
	// "Rollback Authorization").
	Ancestor Lineage = "ancestor"
	// Workflow: the agents behind the actions, checkpoints and groups that are linked to the
	// checkpoint, in any direction and over any number of nodes (cascade 6.1). Reports link
	// nothing.
	Workflow Lineage = "workflow"
)

// MayAsk reports whether an identity may ask for the rollback of a checkpoint. Nobody may for an
// unknown checkpoint, so that its answer is the one that strangers get.
//
// Events give no right, except workflow_start. Asking for a group needs the right to all its
// members, all of which must be known. With Ancestor, having made a group of others' checkpoints
// gives no right. A node in another workflow never counts; a workflow of the same name made by
// strangers links nothing.
func MayAsk(g *workflow.Graph, requester, checkpoint string, policy Lineage) bool {
	target, known := checkpointIn(g, checkpoint)
	return known && whole(g, target, near(g, requester, policy))
}

// initiator is the agent that began the workflow: the one behind the first node, if that follows
// from nothing; of events only workflow_start counts. Empty is nobody. Later roots do not change
// it: anybody who knows the name of a workflow can make one.
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

// near marks the nodes that are linked to the requester's nodes by the policy.
func near(g *workflow.Graph, requester string, policy Lineage) []bool {
	if requester == "" || policy != Ancestor && policy != Workflow {
		return make([]bool, g.Len())
	}
	return spread(g, requester, policy == Workflow)
}

// whole reports whether a checkpoint, or every member of a group, is among some nodes.
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

// contained returns checkpoint i, and the members of a group, nested groups included.
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

// follows reports whether a node follows from a checkpoint or its actions: such an error may ask
// for its rollback.
func follows(g *workflow.Graph, id, checkpoint string) bool {
	target, known := checkpointIn(g, checkpoint)
	i, there := g.Index(id)
	if !known || !there {
		return false
	}
	d := planner{Graph: g}
	return d.reach(d.withGuards(contained(g, target)))[g.End(i)]
}

// agentsBehind is how many agents are behind a checkpoint, of the actions that it was made for and of what follows
// from them. The gateway itself is none: its records of a call are by who has called.
func agentsBehind(g *workflow.Graph, checkpoint string) int {
	target, known := checkpointIn(g, checkpoint)
	if !known {
		return 0
	}
	d, agents := planner{Graph: g}, map[string]bool{}
	met := d.reach(d.withGuards(contained(g, target)))
	for i := range g.Len() {
		if n := g.At(i); met[g.End(i)] && n.TakesPart() && !n.Group && n.By != "" && !(n.Own && n.By == n.Issuer) {
			agents[n.By] = true
		}
	}
	return len(agents)
}

// spread marks the requester's nodes and their consequences by the tokens. A group does not
// follow from its members. With any it follows every link in both directions, but not from a
// report to its subjects.
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
